"""Pipeline schedules as tables: the order of each rank's actions. Pure arithmetic, without torch and without times.

A model has stages, and a local batch has micro-batches. An `Action` has one of four kinds: ``F`` is forward and ``B``
is the full backward. ``I`` and ``W`` are its halves: the gradient of the stage's inputs, which the previous stage waits
for, and of its weights, which only the optimizer needs. ``F0.3`` is the forward pass of stage 0 on micro-batch 3.
Dependencies: F(s, m) runs after F(s - 1, m). B or I(s, m) runs after F(s, m), and after B or I(s + 1, m). W(s, m) runs
after I(s, m). A `ScheduleTable` orders each rank's actions; waiting for messages enforces the rest.

In every table, a stage processes its micro-batches in ascending order, in forward and in backward. So gradients are
added in the order of plain accumulation. An activation is stored from F to the end of B or W. Below, p is the number of
ranks, m of micro-batches, and v of stages per rank. The *bubble* is the fraction of a rank's time without computation.
The backward pass takes twice as long as the forward pass (F = I = W = 1):

| schedule      | stages on a rank | bubble                | stored on rank r (stage × micro-batch) |
|---------------|------------------|-----------------------|----------------------------------------|
| `sequential`  | any v, looped    | (p-1)/p               | v                                      |
| `gpipe`       | any v, looped    | (p-1)/(vm+p-1)        | vm                                     |
| `1f1b`        | 1                | (p-1)/(m+p-1)         | p - r                                  |
| `interleaved` | v ≥ 2, looped    | (p-1)/(vm+p-1)        | 2(p-r-1) + (v-1)p + 1                  |
| `zb`          | 1                | (p-1)/(3m+p-1)        | p                                      |
| `zbv`         | 2, a V           | (p-1)/(6m+p-1)        | 2p                                     |
| `auto`        | any v, both      | at most the best's    | at most vp, or the given limit         |

Each of v stages on a rank has 1/v of the size, and so does its activation. `plait.parallel.pipeline.schedule_search`
simulates tables.
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
    """One action of `kind` F, B, I or W, for a stage and a micro-batch. As text: ``F0.3``."""

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro}"


Row = tuple[Action, ...]
"""The actions of one rank, in order."""


@dataclass(frozen=True)
class ScheduleTable:
    """The order in which each rank runs the forwards and backwards of its micro-batches."""

    name: str
    microbatches: int
    owner: tuple[int, ...]
    """The rank of each stage."""
    rows: tuple[Row, ...]
    """The actions of each rank, in order."""

    @classmethod
    def from_rows(cls, name: str, microbatches: int, owner: tuple[int, ...], rows: Iterable[Iterable[Action]]) -> "ScheduleTable":
        """Make a table of these rows.

        On stage 0, an I directly followed by its W is merged into a B. No stage waits for that I, and a full backward
        is cheaper than two halves.
        """
        return cls(name, microbatches, owner, tuple(map(_merge_halves, rows)))

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.owner)

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """Peak number of activations on each rank, one per (stage, micro-batch), from F to the end of B or W."""
        signs = {"F": 1, "B": -1, "I": 0, "W": -1}
        return tuple(max(accumulate((signs[action.kind] for action in row), initial=0)) for row in self.rows)

    @cached_property
    def play_order(self) -> "PlayOrder":
        """All actions in an order in which each follows its dependencies. Actions in a deadlock are missing."""
        order, count = PlayOrder([], [], [], []), self.microbatches
        places: dict[tuple[bool, int], int] = {}  # positions of forwards and of backwards, by stage and micro-batch
        waiting: dict[tuple[bool, int], int] = {}
        begun, ready = [0] * self.ranks, list(range(self.ranks - 1, -1, -1))
        while ready:
            rank = ready.pop()
            for at in range(begun[rank], len(self.rows[rank])):
                action = self.rows[rank][at]
                own = action.stage * count + action.micro
                need, edge = self._find_dependency(action, (False, own) in places)
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

    def _find_dependency(self, action: Action, is_forward_done: bool) -> "tuple[tuple[bool, int] | None, int]":
        """Return the forward or backward that an action waits for, and the stage boundary between them; −1 for none."""
        own = action.stage * self.microbatches + action.micro
        if action.kind == "F":
            return ((False, own - self.microbatches), action.stage - 1) if action.stage else (None, -1)
        if action.kind == "W" or not is_forward_done or action.stage == self.stages - 1:
            return (action.kind == "W", own), -1
        return (True, own + self.microbatches), action.stage


class PlayOrder(NamedTuple):
    """Columns of a table's actions: rank, index of the duration among those of F, B, I and W of all stages, index of
    the required action, and the boundary between stages; −1 for none."""

    ranks: list[int]
    durations: list[int]
    needs: list[int]
    edges: list[int]


def assign_looped(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the rank of every stage: 0 1 2 0 1 2 …"""
    return tuple(range(ranks)) * stages_per_rank


def assign_folded(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Assign stages to ranks in a V: 0 1 2 2 1 0 …. Rank 0 has the first and the last stage, so also the loss."""
    there, back = tuple(range(ranks)), tuple(reversed(range(ranks)))
    return tuple(rank for turn in range(stages_per_rank) for rank in (back if turn % 2 else there))


def assign_stages(schedule: str, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Assign stages to ranks for a schedule other than `auto`."""
    return (assign_folded if schedule == "zbv" else assign_looped)(ranks, stages_per_rank)


def _merge_halves(row: Iterable[Action]) -> Row:
    joined: list[Action] = []
    for action in row:
        if action.kind == "W" and action.stage == 0 and joined and joined[-1] == Action("I", 0, action.micro):
            joined.pop()
            action = Action("B", 0, action.micro)
        joined.append(action)
    return tuple(joined)


def find_schedule_errors(schedule: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> list[str]:
    """Return the reasons why a schedule is invalid for these sizes, one sentence each; empty if it is valid."""
    if schedule not in SCHEDULES:
        return [f"schedule {schedule!r} is unknown; known are {', '.join(SCHEDULES)}"]
    sentences = []
    for what, n in (("ranks", ranks), ("micro-batches", microbatches), ("stages per rank", stages_per_rank)):
        if n < 1:
            sentences.append(f"a pipeline needs at least 1 of {what}, not {n}")
    if schedule in ("1f1b", "zb") and stages_per_rank > 1:
        sentences.append(f"{schedule} needs 1 stage per rank, not {stages_per_rank}")
    if schedule == "interleaved" and stages_per_rank == 1:
        sentences.append("interleaved needs stages_per_rank ≥ 2; with 1 it equals 1f1b")
    if schedule == "zbv" and stages_per_rank != 2:
        sentences.append(f"zbv needs 2 stages per rank, one on each arm of the V, not {stages_per_rank}")
    return sentences


def build_textbook_table(schedule: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> ScheduleTable:
    """Build the table of a schedule other than `auto`; it is deterministic. Raises ValueError with the errors of
    `find_schedule_errors`."""
    if wrong := find_schedule_errors(schedule, ranks, microbatches, stages_per_rank):
        raise ValueError("; ".join(wrong))
    owner = assign_stages(schedule, ranks, stages_per_rank)
    rank_row = ROW_BUILDERS[schedule]
    return ScheduleTable.from_rows(
        schedule, microbatches, owner, (rank_row(r, ranks, microbatches, stages_per_rank) for r in range(ranks))
    )


def sequential(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> list[Action]:
    """Naive model parallelism: one micro-batch after the other, through all stages and back.

        rank 0  F0       B0 B0 F1       B1 B1
        rank 1     F0 B0 B0       F1 B1 B1

    One rank computes while the others wait: the bubble is (p-1)/p. Each rank stores one micro-batch, the least of all
    schedules.
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

    The bubble is (p-1)/(m+p-1). All m micro-batches are stored. With several stages per rank, the order is
    breadth-first (Lamy-Poirier 2023, arXiv 2211.05953): all micro-batches run through a rank's first stage, then
    through its next.
    """
    mine = range(rank, ranks * stages_per_rank, ranks)
    forward = [Action("F", s, m) for s in mine for m in range(microbatches)]
    return forward + [Action("B", s, m) for s in reversed(mine) for m in range(microbatches)]


def one_f_one_b(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> list[Action]:
    """One forward, one backward: backward as early as possible (PipeDream-Flush, Narayanan et al. 2021, arXiv
    2006.09503).

        rank 0  F0 F1       B0 B0 F2 B1 B1    B2 B2
        rank 1     F0 B0 B0 F1 B1 B1 F2 B2 B2

    The bubble is that of gpipe, (p-1)/(m+p-1). Rank r stores at most p - r micro-batches, for any m.
    """
    return _alternate(
        [Action("F", rank, m) for m in range(microbatches)],
        [Action("B", rank, m) for m in range(microbatches)],
        ranks - rank - 1,
    )


def interleaved(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> list[Action]:
    """1f1b with v stages per rank, looped over the ranks (Narayanan et al. 2021, arXiv 2104.04473; Megatron-LM).

        rank 0  F0.0 F0.1 F2.0 F2.1 F0.2      B2.0 B2.0 F0.3 B2.1 B2.1 …       stages 0 and 2
        rank 1       F1.0 F1.1 F3.0 B3.0 B3.0 F3.1 B3.1 B3.1 F1.2 B1.0 …       stages 1 and 3

    Micro-batches run in groups of p: a group through a rank's first stage, then through its second. A stage takes 1/v
    of the time, and so do the waits at both ends. The bubble is (p-1)/(vm+p-1) if p divides m. There are v times as
    many messages. Rank r stores up to 2(p-r-1) + (v-1)p + 1 of the smaller activations.

    If p does not divide m, the table is made for the next multiple, and actions of missing micro-batches are removed.
    The other actions keep their order, so the result cannot deadlock.
    """
    whole = -(-microbatches // ranks)
    mine = range(rank, ranks * stages_per_rank, ranks)

    def list_actions(kind: Kind, stages: range) -> list[Action]:
        return [Action(kind, s, g * ranks + i) for g in range(whole) for s in stages for i in range(ranks)]

    ahead = 2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks
    row = _alternate(list_actions("F", mine), list_actions("B", mine[::-1]), ahead)
    return [a for a in row if a.micro < microbatches]


def _alternate(forward: list[Action], backward: list[Action], ahead: int) -> list[Action]:
    """Return `ahead` forward actions, then one forward and one backward in turn, then the remaining backward actions."""
    row = forward[:ahead]
    for f, b in zip(forward[ahead:], backward):
        row += (f, b)
    return row + backward[max(0, len(forward) - ahead) :]


def zb(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> list[Action]:
    """Zero bubble ZB-H1: 1f1b with a backward in two halves (Qi et al. 2024, arXiv 2401.10241).

        rank 0  F0 F1    I0 W0 F2 I1 W1 I2 W2
        rank 1     F0 I0 F1 I1 W0 F2 I2 W1 W2

    The previous rank waits only for I, which takes half the time of B; W fills the gaps. On rank r, W runs r
    micro-batches after its I, so all ranks end together. The bubble is (p-1)/(3m+p-1) instead of (p-1)/(m+p-1). A
    micro-batch is stored until its W: p on every rank, like the first rank of 1f1b.
    """
    forward = [Action("F", rank, m) for m in range(microbatches)]
    row: list[Action] = []
    for action in _alternate(forward, [Action("I", rank, m) for m in range(microbatches)], ranks - rank - 1):
        row.append(action)
        if action.kind == "I" and action.micro >= rank:
            row.append(Action("W", rank, action.micro - rank))
    return row + [Action("W", rank, m) for m in range(max(0, microbatches - rank), microbatches)]


def zbv(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> list[Action]:
    """Zero bubble on a V: rank r has stages r and 2p-1-r (Qi et al. 2024, arXiv 2405.15362, ZB-V).

        rank 0  F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 F0.3 I0.0 …       stages 0 and 3, so also the loss
        rank 1       F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 …       stages 1 and 2

    The loss is on rank 0, so backward starts there, and every rank stores the same: 2p activations of half a stage,
    like 1f1b's first rank. The bubble is (p-1)/(6m+p-1) from 2p-1 micro-batches on. Fewer micro-batches use the table
    of 2p-1 without the missing actions.
    """
    down, up, full = rank, 2 * ranks - 1 - rank, max(2 * ranks - 1, microbatches)
    row: list[Action] = []
    count: Counter[tuple[str, int]] = Counter()

    def add_actions(stage: int, kinds: str) -> None:
        for kind in kinds:
            micro = count[kind, stage]
            count[kind, stage] += 1
            if micro < microbatches:
                row.append(Action(cast(Kind, kind), stage, micro))

    for _ in range(2 * (ranks - rank) - 1):
        add_actions(down, "F")
    for _ in range(rank):
        add_actions(up, "F")
        add_actions(down, "F")
    for _ in range(ranks - rank):
        add_actions(up, "FIW")
    while count["F", up] < full:
        if count["F", down] < full:
            add_actions(down, "F")
        add_actions(down, "IW")
        add_actions(up, "FIW")
    for _ in range(rank):
        add_actions(down, "I")
        add_actions(up, "I")
    for _ in range(ranks - rank):
        add_actions(down, "IW")
    add_actions(up, "W" * (full - count["W", up]))
    add_actions(down, "W" * (full - count["W", down]))
    return row


ROW_BUILDERS: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "sequential": sequential, "gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb": zb, "zbv": zbv,
}  # fmt: skip
"""(rank, ranks, micro-batches, stages per rank) -> the rank's actions. `auto` is not built rank by rank."""
