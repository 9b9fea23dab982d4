"""What a pipeline schedule is made of: actions, and the table that orders each rank's. No torch.

`plait.parallel.pipeline.schedules` makes tables and explains the actions; `plait.parallel.pipeline.simulate` plays them on a virtual clock.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do: `kind` F, B, I or W, of stage `stage`, on micro-batch `micro`. As text, ``F0.3``."""

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """ValueError when the text is not an action."""
        found = re.fullmatch(r"([FBIW])(\d+)\.(\d+)", text)
        if not found:
            raise ValueError(f"{text!r} is not an action such as F0.3")
        return cls(cast(Kind, found[1]), int(found[2]), int(found[3]))


Row = tuple[Action, ...]
"""What one rank does, in order."""


@dataclass(frozen=True)
class Table:
    """A schedule for `ranks` ranks, `stages` stages and `microbatches` micro-batches.

    `owner[stage]` is the rank that holds a stage; `rows[rank]` its actions in order; `live[rank]` the largest number of
    activations, one for each (stage, micro-batch), that the rank holds at once.
    """

    name: str
    ranks: int
    stages: int
    microbatches: int
    owner: tuple[int, ...]
    rows: tuple[Row, ...]
    live: tuple[int, ...]

    def to_text(self) -> str:
        """A line of sizes, a line of owners, and a line for each rank; `from_text` reads it back."""
        lines = [
            f"{self.name} ranks {self.ranks} stages {self.stages} microbatches {self.microbatches}",
            f"owner {' '.join(map(str, self.owner))}",
        ]
        for rank, (row, live) in enumerate(zip(self.rows, self.live, strict=True)):
            lines.append(f"rank {rank} live {live}: {' '.join(map(str, row))}".rstrip())
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> "Table":
        """ValueError when the text is not a table."""
        first, second, *rest = [line.strip() for line in text.strip().splitlines()] + ["", ""]
        head = re.fullmatch(r"(\S+) ranks (\d+) stages (\d+) microbatches (\d+)", first)
        lines = [re.fullmatch(r"rank (\d+) live (\d+):(.*)", line) for line in rest if line]
        owner = re.fullmatch(r"owner((?: \d+)*)", second)
        if not head or not owner or not all(lines):
            raise ValueError("not a table: a line of sizes, a line of owners and a line for each rank are wanted")
        found = [line for line in lines if line]
        owners = tuple(map(int, owner[1].split()))
        sizes = int(head[2]), int(head[3]), int(head[4])
        if [int(line[1]) for line in found] != list(range(sizes[0])) or len(owners) != sizes[1]:
            raise ValueError(f"not a table: {len(found)} rows for {sizes[0]} ranks, {len(owners)} owners")
        rows = tuple(tuple(map(Action.parse, line[3].split())) for line in found)
        return cls(head[1], *sizes, owners, rows, tuple(int(line[2]) for line in found))


def looped(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Who holds each stage: 0 1 2 0 1 2 …"""
    return tuple(range(ranks)) * stages_per_rank


def folded(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Who holds each stage: 0 1 2 2 1 0 …, for two stages a V: rank 0 has the first and the last, so also the loss."""
    there, back = tuple(range(ranks)), tuple(reversed(range(ranks)))
    return tuple(rank for turn in range(stages_per_rank) for rank in (back if turn % 2 else there))


def held(row: Iterable[Action]) -> int:
    """The largest number of activations that a rank with this row holds at once: from F to the end of B or W."""
    now = most = 0
    for action in row:
        if action.kind == "F":
            now += 1
            most = max(most, now)
        elif action.kind != "I":
            now -= 1
    return most


def made(name: str, microbatches: int, owner: tuple[int, ...], rows: Iterable[Iterable[Action]]) -> Table:
    """A table of these rows, with what each rank holds counted.

    An I with its W right behind becomes a B on stage 0: no stage before it waits for the I, and a backward in one piece
    is cheaper than in two.
    """
    done = tuple(_joined(tuple(row)) for row in rows)
    return Table(name, len(done), len(owner), microbatches, owner, done, tuple(map(held, done)))


def _joined(row: Row) -> Row:
    found: list[Action] = []
    for action in row:
        if action.kind == "W" and action.stage == 0 and found and found[-1] == Action("I", 0, action.micro):
            found.pop()
            action = Action("B", 0, action.micro)
        found.append(action)
    return tuple(found)
