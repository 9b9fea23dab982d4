"""The best table for measured times and a limit on memory: the textbook's tables, and lists packed greedily.

The textbook's tables are drawn for stages that all take as long; real first and last stages do not, and messages take
time. A list is packed for the times at hand: whenever a rank is free it takes one of the actions that could start now,
by a few fixed preferences, as long as what it would hold stays within the limit (after Qi et al. 2024, arXiv
2401.10241, section 3.1, here for several stages per rank, looped or folded, and with a limit on each rank). `best`
tries all preferences, plays every table, and takes the fastest that fits.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Literal

from plait.config.keys import SCHEDULES
from plait.parallel.pipeline.schedules import Action, Table, folded, looped, problems
from plait.parallel.pipeline.schedules import textbook as textbook_table
from plait.parallel.pipeline.simulate import Played, hops, simulate

Limit = float | Sequence[float] | None
"""What ranks may hold at once: one number for all, or one for each; None for what 1f1b's first rank does."""


@dataclass(frozen=True)
class Costs:
    """What each stage takes for one micro-batch, as `simulate` wants it. `saved` is what it holds, in any one unit."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    link: float | tuple[float, ...] = 0.0
    send: float = 0.0
    saved: tuple[float, ...] = ()

    @classmethod
    def equal(cls, stages: int) -> "Costs":
        """Forward and both halves of backward take 1 on every stage, and each holds 1."""
        one = (1.0,) * stages
        return cls(one, one, one, saved=one)

    def play(self, table: Table) -> Played:
        """`simulate` with these costs."""
        times = self.forward, self.backward_input, self.backward_weight
        return simulate(table, *times, self.link, self.send, saved=self.saved or (1.0,) * table.stages)


@dataclass(frozen=True)
class Taste:
    """Preferences of a greedy list. `first` orders what could start now: IF backward before forward, FI the other way,
    "alternate" whichever was not last; W only when neither can. `deep` takes the stage nearest the loss first, else the
    one nearest the inputs. With `patience` a rank waits for an input rather than start a W that would make it late.
    """

    first: str
    deep: bool
    patience: bool
    split: bool


def table(schedule: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> Table:
    """The table of a schedule, the same for the same numbers. ValueError where `problems` finds some.

    `auto` here takes all stages to be equal, links to be free and each rank to hold what 1f1b's first rank does; `best`
    takes measured times and other limits.
    """
    if schedule == "auto" and not problems(schedule, ranks, microbatches, stages_per_rank):
        return best(ranks, microbatches, stages_per_rank)
    return textbook_table(schedule, ranks, microbatches, stages_per_rank)


def best(
    ranks: int,
    microbatches: int,
    stages_per_rank: int = 1,
    costs: Costs | None = None,
    limit: Limit = None,
    *,
    split: bool = True,
) -> Table:
    """The table with the smallest makespan of those that hold at most `limit` on each rank, in the unit of `saved`.

    Without `costs` all stages are equal. Without `limit` a rank may hold its stages' activations of p micro-batches,
    which is what 1f1b's first rank does. With `split` off no backward is cut in two, for modules that cannot. Of equal
    tables the one that holds less is taken, then the one with fewer actions. ValueError when the limit is less than
    what one micro-batch needs.
    """
    known = costs or Costs.equal(ranks * stages_per_rank)
    scored = []
    sizes = ranks, microbatches, stages_per_rank
    for at, candidate in enumerate(chain(textbook_tables(*sizes, split), packed_all(*sizes, known, limit, split))):
        played = known.play(candidate)
        if all(size <= most * (1 + 1e-9) for size, most in zip(played.bytes, _limits(candidate.owner, known, limit))):
            size = max(played.bytes), sum(map(len, candidate.rows))
            scored.append((float(f"{played.makespan:.9g}"), *size, at, candidate))
    if not scored:
        raise ValueError(f"one micro-batch needs more than {limit} on some rank")
    return min(scored)[-1]


def textbook_tables(ranks: int, microbatches: int, stages_per_rank: int, split: bool = True) -> Iterator[Table]:
    """Every table of `plait.parallel.pipeline.schedules` there is for these numbers, but `auto`."""
    for name in SCHEDULES:
        if name != "auto" and not problems(name, ranks, microbatches, stages_per_rank):
            textbook = textbook_table(name, ranks, microbatches, stages_per_rank)
            if split or not any(action.kind == "W" for row in textbook.rows for action in row):
                yield textbook


def packed_all(
    ranks: int, microbatches: int, stages_per_rank: int, costs: Costs, limit: Limit = None, split: bool = True
) -> Iterator[Table]:
    """Greedy lists, one for each taste and layout of the stages that the limit leaves room for."""
    several = (True, False) if stages_per_rank > 1 else (True,)
    patient = (True, False) if split else (True,)
    owners = dict.fromkeys((looped(ranks, stages_per_rank), folded(ranks, stages_per_rank)))
    for owner in owners:
        limits = _limits(owner, costs, limit)
        if all(need <= most for need, most in zip(_limits(owner, costs, None, 1), limits)):
            for first, deep, patience in product(("IF", "FI", "alternate"), several, patient):
                yield packed(microbatches, owner, costs, limits, Taste(first, deep, patience, split))


def _limits(owner: tuple[int, ...], costs: Costs, limit: Limit, microbatches: int = 0) -> list[float]:
    """What each rank may hold: the limit, or its stages' activations of so many micro-batches, by default p."""
    ranks = max(owner) + 1
    if isinstance(limit, (int, float)):
        return [float(limit)] * ranks
    if limit is not None:
        return list(limit)
    needs = [0.0] * ranks
    for rank, size in zip(owner, costs.saved or (1.0,) * len(owner)):
        needs[rank] += size * (microbatches or ranks)
    return needs


def packed(microbatches: int, owner: tuple[int, ...], costs: Costs, limits: Sequence[float], taste: Taste) -> Table:
    """A greedy list for limits that hold one micro-batch. The oldest unfinished one always finds room: it ends."""
    packer = _Packer(microbatches, owner, costs, limits, taste)
    wakes = [(0.0, rank) for rank in range(max(owner) + 1)]
    while wakes:
        now, rank = heapq.heappop(wakes)
        if packer.free[rank] <= now and (action := packer.choose(rank, now)):
            for wake in packer.do(rank, action, now):
                heapq.heappush(wakes, wake)
    if min(packer.weights) < microbatches:
        raise AssertionError(f"a greedy list is stuck at {packer.rows}")
    return Table.of("auto", microbatches, owner, packer.rows)


class _Packer:
    """The state of a greedy list: which micro-batch is next, for each stage and kind, and when inputs arrive."""

    def __init__(
        self, microbatches: int, owner: tuple[int, ...], costs: Costs, limits: Sequence[float], taste: Taste
    ) -> None:
        ranks, stages = max(owner) + 1, len(owner)
        self.count, self.owner, self.limits, self.taste, self.stages = microbatches, owner, limits, taste, stages
        self.hops = hops(owner, costs.link)
        self.saved = costs.saved or (1.0,) * stages
        whole = tuple(i + w for i, w in zip(costs.backward_input, costs.backward_weight))
        self.took = {"F": costs.forward, "B": whole, "I": costs.backward_input, "W": costs.backward_weight}
        self.back: Literal["I", "B"] = "I" if taste.split else "B"
        self.mine = [[s for s in range(stages) if owner[s] == rank] for rank in range(ranks)]
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.free = [0.0] * ranks
        self.held = [0.0] * ranks
        # when the inputs of each micro-batch are there, in order; and how many are done
        self.inputs: list[list[float]] = [[0.0] * microbatches if s == 0 else [] for s in range(stages)]
        self.grads: list[list[float]] = [[] for _ in range(stages)]
        self.forwards, self.backwards, self.weights = [0] * stages, [0] * stages, [0] * stages

    def choose(self, rank: int, now: float) -> Action | None:
        """What a free rank does now, or None to wait for something to arrive."""
        soon = float("inf")
        ready: dict[str, list[int]] = {"F": [], "I": []}
        for s in self.mine[rank]:
            for kind, done, there in (("F", self.forwards, self.inputs), ("I", self.backwards, self.grads)):
                if done[s] < len(there[s]) and (kind == "I" or self.fits(rank, s)):
                    when = there[s][done[s]]
                    soon = min(soon, when)
                    if when <= now:
                        ready[kind].append(s)
        for kind in self.order(rank):
            if ready[kind]:
                stage = max(ready[kind]) if self.taste.deep == (kind == "F") else min(ready[kind])
                if kind == "F":
                    return Action("F", stage, self.forwards[stage])
                return Action(self.back, stage, self.backwards[stage])
        late = [s for s in self.mine[rank] if self.weights[s] < self.backwards[s]]
        if late:
            stage = max(late, key=lambda s: (self.backwards[s] - self.weights[s], s))
            if not self.taste.patience or soon >= now + self.took["W"][stage] / 2:
                return Action("W", stage, self.weights[stage])
        return None

    def order(self, rank: int) -> str:
        if self.taste.first != "alternate":
            return self.taste.first
        last = next((a.kind for a in reversed(self.rows[rank]) if a.kind != "W"), "I")
        return "IF" if last == "F" else "FI"

    def fits(self, rank: int, stage: int) -> bool:
        """Whether after one more forward the unfinished micro-batches can still be finished one after the other.

        A stage nearer the inputs may hold what one nearer the loss has let go of long ago; so each is asked in turn for
        room for the forwards it lacks, and then gives back all it held (Dijkstra's banker).
        """
        mine, micro = self.mine[rank], self.forwards[stage]
        room = self.limits[rank] * (1 + 1e-9) - self.held[rank] - self.saved[stage]
        if room < 0:
            return False
        whole = sum(self.saved[s] for s in mine)
        for m in range(min(self.weights[s] for s in mine), max(self.forwards[s] for s in mine) + 1):
            if room >= whole:
                return True
            need = sum(self.saved[s] for s in mine if m >= self.forwards[s] and (s, m) != (stage, micro))
            if room < need:
                return False
            room += sum(
                self.saved[s] for s in mine if self.weights[s] <= m < self.forwards[s] or (s, m) == (stage, micro)
            )
        return True

    def do(self, rank: int, action: Action, now: float) -> list[tuple[float, int]]:
        """Puts the action down; who is to look again, and when."""
        stage, end = action.stage, now + self.took[action.kind][action.stage]
        self.rows[rank].append(action)
        self.free[rank] = end
        wakes = [(end, rank)]
        if action.kind == "F":
            self.forwards[stage] += 1
            self.held[rank] += self.saved[stage]
            if stage + 1 < self.stages:
                wakes.append(self.arrive(self.inputs[stage + 1], stage + 1, end + self.hops[stage]))
            else:
                self.grads[stage].append(end)
        elif action.kind != "W":
            self.backwards[stage] += 1
            if stage:
                wakes.append(self.arrive(self.grads[stage - 1], stage - 1, end + self.hops[stage - 1]))
        if action.kind in "BW":
            self.weights[stage] += 1
            self.held[rank] -= self.saved[stage]
        return wakes

    def arrive(self, queue: list[float], stage: int, when: float) -> tuple[float, int]:
        queue.append(when)
        return when, self.owner[stage]
