"""Pipeline schedules as tables: which rank does what, in which order. Pure arithmetic, no torch, no clock.

A model cut into stages and a share cut into micro-batches give four kinds of `Action`: ``F`` forward, ``B`` the whole
backward, or its two halves: ``I`` the gradient of the stage's inputs, which the stage before waits for, and ``W`` the
gradient of its weights, which nobody waits for before the optimizer. ``F0.3`` is the forward pass of stage 0 on
micro-batch 3. What must come before what: F(s, m) after F(s - 1, m); B or I(s, m) after F(s, m) and after B or
I(s + 1, m); W(s, m) after I(s, m). A `Table` orders each rank's actions, and waiting for messages does the rest.

In every table a stage meets its micro-batches in ascending order, in forward and in backward, so that gradients are
added in the order of plain accumulation. An activation is held from F to the end of B or W. Below, p is ranks, m
micro-batches, v stages per rank; time is per rank, and a *bubble* is the share of it in which nothing is computed. With
a backward twice as long as the forward (F = I = W = 1):

| schedule      | stages on a rank | bubble                | held on rank r (stage × micro-batch)   |
|---------------|------------------|-----------------------|----------------------------------------|
| `sequential`  | any v, looped    | (p-1)/p               | v                                      |
| `gpipe`       | any v, looped    | (p-1)/(vm+p-1)        | vm                                     |
| `1f1b`        | 1                | (p-1)/(m+p-1)         | p - r                                  |
| `interleaved` | v ≥ 2, looped    | (p-1)/(vm+p-1)        | 2(p-r-1) + (v-1)p + 1                  |
| `zb`          | 1                | (p-1)/(3m+p-1)        | p                                      |
| `zbv`         | 2, a V           | (p-1)/(6m+p-1)        | 2p                                     |
| `auto`        | any v, both      | at most the best's    | at most vp, or what is asked for       |

Each stage of v on a rank is 1/v as large, and so is what it holds. `plait.parallel.pipeline.schedule_search` plays a table.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple, cast

from plait.config.keys import SCHEDULES

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do: `kind` F, B, I or W, of stage `stage`, on micro-batch `micro`. As text, ``F0.3``."""

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro}"


Row = tuple[Action, ...]
"""What one rank does, in order."""


@dataclass(frozen=True)
class Table:
    """The order in which ranks run the forwards and backwards of so many micro-batches."""

    name: str
    microbatches: int
    owner: tuple[int, ...]
    """The rank that holds each stage."""
    rows: tuple[Row, ...]
    """What each rank does, in order."""

    @classmethod
    def of(cls, name: str, microbatches: int, owner: tuple[int, ...], rows: Iterable[Iterable[Action]]) -> "Table":
        """A table of these rows.

        An I with its W right behind becomes a B on stage 0: no stage before it waits for the I, and a backward in one
        piece is cheaper than in two.
        """
        return cls(name, microbatches, owner, tuple(map(_joined, rows)))

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.owner)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """The most activations that each rank holds at once, one for each (stage, micro-batch): from F to the end of B or W."""
        signs = {"F": 1, "B": -1, "I": 0, "W": -1}
        return tuple(max(accumulate((signs[action.kind] for action in row), initial=0)) for row in self.rows)

    @cached_property
    def order(self) -> "PlayOrder":
        """All actions, each after those that it waits for, whatever they take; without those that wait forever."""
        order, count = PlayOrder([], [], [], []), self.microbatches
        places: dict[tuple[bool, int], int] = {}  # of forwards, and of backwards, by stage and micro-batch
        waiting: dict[tuple[bool, int], int] = {}
        begun, ready = [0] * self.ranks, list(range(self.ranks - 1, -1, -1))
        while ready:
            rank = ready.pop()
            for at in range(begun[rank], len(self.rows[rank])):
                action = self.rows[rank][at]
                own = action.stage * count + action.micro
                need, edge = self._need(action, (False, own) in places)
                if need is not None and need not in places:
                    waiting[need] = rank
                    break
                begun[rank] = at + 1
                if action.kind != "W":
                    made = action.kind != "F", own
                    places[made] = len(order.ranks)
                    if (waiter := waiting.pop(made, None)) is not None:
                        ready.append(waiter)
                order.ranks.append(rank)
                order.durations.append("FBIW".index(action.kind) * self.stages + action.stage)
                order.needs.append(-1 if need is None else places[need])
                order.edges.append(edge)
        return order

    def _need(self, action: Action, is_forward_done: bool) -> "tuple[tuple[bool, int] | None, int]":
        """What an action waits for, a forward or a backward, and over which boundary between stages; -1: over none."""
        own = action.stage * self.microbatches + action.micro
        if action.kind == "F":
            return ((False, own - self.microbatches), action.stage - 1) if action.stage else (None, -1)
        if action.kind == "W" or not is_forward_done or action.stage == self.stages - 1:
            return (action.kind == "W", own), -1
        return (True, own + self.microbatches), action.stage


class PlayOrder(NamedTuple):
    """Of each action of a table: its rank, its place among the times of F, B, I and W of all stages, and the action and the boundary between
    stages that it waits for; -1: none."""

    ranks: list[int]
    durations: list[int]
    needs: list[int]
    edges: list[int]


def looped(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Who holds each stage: 0 1 2 0 1 2 …"""
    return tuple(range(ranks)) * stages_per_rank


def folded(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Who holds each stage: 0 1 2 2 1 0 …, for two stages a V: rank 0 has the first and the last, so also the loss."""
    there, back = tuple(range(ranks)), tuple(reversed(range(ranks)))
    return tuple(rank for turn in range(stages_per_rank) for rank in (back if turn % 2 else there))


def owners(schedule: str, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Who holds each stage, under a schedule other than `auto`."""
    return (folded if schedule == "zbv" else looped)(ranks, stages_per_rank)


def _joined(row: Iterable[Action]) -> Row:
    joined: list[Action] = []
    for action in row:
        if action.kind == "W" and action.stage == 0 and joined and joined[-1] == Action("I", 0, action.micro):
            joined.pop()
            action = Action("B", 0, action.micro)
        joined.append(action)
    return tuple(joined)


def problems(schedule: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> list[str]:
    """Why there is no such table, a sentence each; empty when there is. `schedule` is one of `SCHEDULES`."""
    if schedule not in SCHEDULES:
        return [f"no schedule is called {schedule!r}; known: {', '.join(SCHEDULES)}"]
    sentences = []
    for what, n in (("ranks", ranks), ("micro-batches", microbatches), ("stages per rank", stages_per_rank)):
        if n < 1:
            sentences.append(f"a pipeline has at least 1 of {what}, not {n}")
    if schedule in ("1f1b", "zb") and stages_per_rank > 1:
        sentences.append(f"{schedule} has 1 stage per rank, not {stages_per_rank}")
    if schedule == "interleaved" and stages_per_rank == 1:
        sentences.append("interleaved needs stages_per_rank ≥ 2; with 1 it is 1f1b")
    if schedule == "zbv" and stages_per_rank != 2:
        sentences.append(f"zbv has 2 stages per rank, one on each arm of the V, not {stages_per_rank}")
    return sentences


def textbook(schedule: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> Table:
    """The table of a schedule other than `auto`, the same for the same numbers. ValueError where `problems` finds some."""
    if wrong := problems(schedule, ranks, microbatches, stages_per_rank):
        raise ValueError("; ".join(wrong))
    owner = owners(schedule, ranks, stages_per_rank)
    rank_row = ROWS[schedule]
    return Table.of(
        schedule, microbatches, owner, (rank_row(r, ranks, microbatches, stages_per_rank) for r in range(ranks))
    )


def sequential(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> list[Action]:
    """Naive model parallelism: one micro-batch after the other, through all stages and back.

        rank 0  F0       B0 B0 F1       B1 B1
        rank 1     F0 B0 B0       F1 B1 B1

    One rank computes while the others wait: bubble (p-1)/p. It holds one micro-batch: the least of all.
    """
    mine = range(rank, ranks * stages_per_rank, ranks)
    row: list[Action] = []
    for m in range(microbatches):
        row += [Action("F", s, m) for s in mine]
        row += [Action("B", s, m) for s in reversed(mine)]
    return row


def gpipe(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> list[Action]:
    """All forward passes, then all backward passes (Huang et al. 2019, arXiv 1811.06965).

        rank 0  F0 F1 F2          B0 B0 B1 B1 B2 B2
        rank 1     F0 F1 F2 B0 B0 B1 B1 B2 B2

    Bubble (p-1)/(m+p-1). Everything is held: m micro-batches. With several stages per rank it is breadth-first
    (Lamy-Poirier 2023, arXiv 2211.05953): all micro-batches through a rank's first stage, then through its next.
    """
    mine = range(rank, ranks * stages_per_rank, ranks)
    forward = [Action("F", s, m) for s in mine for m in range(microbatches)]
    return forward + [Action("B", s, m) for s in reversed(mine) for m in range(microbatches)]


def one_f_one_b(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> list[Action]:
    """One forward, one backward: backward as soon as it can (PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503).

        rank 0  F0 F1       B0 B0 F2 B1 B1    B2 B2
        rank 1     F0 B0 B0 F1 B1 B1 F2 B2 B2

    The bubble is gpipe's, (p-1)/(m+p-1); but rank r holds at most p - r micro-batches however many there are.
    """
    return _alternating(
        [Action("F", rank, m) for m in range(microbatches)],
        [Action("B", rank, m) for m in range(microbatches)],
        ranks - rank - 1,
    )


def interleaved(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> list[Action]:
    """1f1b with v stages per rank, looped over the ranks (Narayanan et al. 2021, arXiv 2104.04473; Megatron-LM).

        rank 0  F0.0 F0.1 F2.0 F2.1 F0.2      B2.0 B2.0 F0.3 B2.1 B2.1 …       stages 0 and 2
        rank 1       F1.0 F1.1 F3.0 B3.0 B3.0 F3.1 B3.1 B3.1 F1.2 B1.0 …       stages 1 and 3

    Micro-batches go in groups of p: a group through a rank's first stage, then through its second, …. A stage is 1/v as
    long, and so is the wait at both ends: bubble (p-1)/(vm+p-1) when p divides m. Messages are v times as many. Rank r
    holds up to 2(p-r-1) + (v-1)p + 1 of the smaller activations.

    When p does not divide m, the table of the next multiple is made and what does not exist is left out. The rest keeps
    its order, and so cannot block where the full table does not.
    """
    whole = -(-microbatches // ranks)
    mine = range(rank, ranks * stages_per_rank, ranks)

    def order(kind: Kind, stages: range) -> list[Action]:
        return [Action(kind, s, g * ranks + i) for g in range(whole) for s in stages for i in range(ranks)]

    ahead = 2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks
    row = _alternating(order("F", mine), order("B", mine[::-1]), ahead)
    return [a for a in row if a.micro < microbatches]


def _alternating(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    """`ahead` forward actions, then one forward and one backward in turn, then what is left of backward."""
    row = forward[:ahead]
    for f, b in zip(forward[ahead:], backward):
        row += (f, b)
    return row + backward[max(0, len(forward) - ahead) :]


def zb(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> list[Action]:
    """Zero bubble ZB-H1: 1f1b with a backward in two halves (Qi et al. 2024, arXiv 2401.10241).

        rank 0  F0 F1    I0 W0 F2 I1 W1 I2 W2
        rank 1     F0 I0 F1 I1 W0 F2 I2 W1 W2

    The rank before waits for I only, half as long as B; W fills the gaps. On rank r it comes r micro-batches after its
    I, so that all ranks end together: bubble (p-1)/(3m+p-1) where 1f1b has (p-1)/(m+p-1). A micro-batch is held until
    its W: p on every rank, as many as on the first of 1f1b.
    """
    forward = [Action("F", rank, m) for m in range(microbatches)]
    row: list[Action] = []
    for action in _alternating(forward, [Action("I", rank, m) for m in range(microbatches)], ranks - rank - 1):
        row.append(action)
        if action.kind == "I" and action.micro >= rank:
            row.append(Action("W", rank, action.micro - rank))
    return row + [Action("W", rank, m) for m in range(max(0, microbatches - rank), microbatches)]


def zbv(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> list[Action]:
    """Zero bubble on a V: rank r holds stages r and 2p-1-r (Qi et al. 2024, arXiv 2405.15362, ZB-V).

        rank 0  F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 F0.3 I0.0 …       stages 0 and 3, so also the loss
        rank 1       F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 …       stages 1 and 2

    The loss is on rank 0, so that backward starts where forward started and every rank holds the same: 2p activations
    of half a stage, which is 1f1b's first rank. Bubble (p-1)/(6m+p-1) from 2p-1 micro-batches on; below, the table of
    2p-1 with what does not exist left out.
    """
    down, up, full = rank, 2 * ranks - 1 - rank, max(2 * ranks - 1, microbatches)
    row: list[Action] = []
    count: Counter[tuple[str, int]] = Counter()

    def do(stage: int, kinds: str) -> None:
        for kind in kinds:
            micro = count[kind, stage]
            count[kind, stage] += 1
            if micro < microbatches:
                row.append(Action(cast(Kind, kind), stage, micro))

    for _ in range(2 * (ranks - rank) - 1):
        do(down, "F")
    for _ in range(rank):
        do(up, "F")
        do(down, "F")
    for _ in range(ranks - rank):
        do(up, "FIW")
    while count["F", up] < full:
        if count["F", down] < full:
            do(down, "F")
        do(down, "IW")
        do(up, "FIW")
    for _ in range(rank):
        do(down, "I")
        do(up, "I")
    for _ in range(ranks - rank):
        do(down, "IW")
    do(up, "W" * (full - count["W", up]))
    do(down, "W" * (full - count["W", down]))
    return row


ROWS: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "sequential": sequential, "gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb": zb, "zbv": zbv,
}  # fmt: skip
"""rank, ranks, micro-batches, stages per rank → what the rank does; `auto` is not made rank by rank."""
