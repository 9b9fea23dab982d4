"""The best table for measured times and a limit on memory: the textbook's tables, and lists packed greedily.

The textbook's tables are drawn for stages that all take as long; real first and last stages do not, and messages take
time. A list is packed for the times at hand: whenever a rank is free it takes one of the actions that could start now,
by a few fixed preferences, as long as what it would hold stays within the limit (after Qi et al. 2024, arXiv
2401.10241, section 3.1, here for several stages per rank, looped or folded, and with a limit on each rank). `best`
tries all preferences, plays every table, and takes the fastest that fits.

Plays a table on a virtual clock: when each rank does what, how long it waits, how much it holds. No torch, no device.

A rank does its row in order. An action begins when the rank is free and what it needs has arrived; between different
ranks that is `link` seconds after it was made. Links do not occupy ranks, and messages do not queue behind each other.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import Literal, NamedTuple

from plait.config.keys import SCHEDULES
from plait.parallel.pipeline.schedules import Action, Table, folded, looped, problems
from plait.parallel.pipeline.schedules import textbook as textbook_table

Stages = tuple[Sequence[float], Sequence[float], Sequence[float]]
"""Times of F, I and W of each stage."""


class Event(NamedTuple):
    """What `rank` did from `start` to `end`, in the unit of the times given."""

    rank: int
    action: Action
    start: float
    end: float


class Deadlock(Exception):
    """The table cannot be played to its end. `blocked` is the action each unfinished rank stands at."""

    def __init__(self, blocked: dict[int, Action]):
        self.blocked = blocked
        super().__init__("; ".join(f"rank {rank} waits forever at {action}" for rank, action in blocked.items()))


@dataclass(frozen=True)
class Played:
    """A table as it was played. `saved` is bytes held per micro-batch by each stage, all 0 when not given."""

    table: Table
    events: tuple[Event, ...]
    """Rank by rank, each rank's in order."""
    makespan: float
    saved: tuple[float, ...]

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time each rank computes."""
        total = [0.0] * self.table.ranks
        for rank, _, start, end in self.events:
            total[rank] += end - start
        return tuple(total)

    @property
    def idle(self) -> tuple[float, ...]:
        """Time each rank waits, from the start of the first action anywhere to the end of the last."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The share of time × ranks in which nothing is computed."""
        return sum(self.idle) / (self.makespan * self.table.ranks) if self.makespan else 0.0

    @cached_property
    def bytes(self) -> tuple[float, ...]:
        """The most bytes of activations each rank held: from the start of F to the end of B or W."""
        now, most = [0.0] * self.table.ranks, [0.0] * self.table.ranks
        for rank, action, _, _ in self.events:
            if action.kind != "I":
                now[rank] += self.saved[action.stage] if action.kind == "F" else -self.saved[action.stage]
                most[rank] = max(most[rank], now[rank])
        return tuple(most)


def simulate(
    table: Table,
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    link: float | Sequence[float] = 0.0,
    send: float = 0.0,
    *,
    saved: Sequence[float] = (),
) -> Played:
    """Plays `table`. Times are per stage and micro-batch, in any one unit; a whole backward takes both halves.

    `link` is the time of a message between two ranks, one number or one for each boundary between stages (s and s + 1
    at index s); `send` is time that handing a message over adds to the action that made it. `saved` is bytes that a
    stage holds per micro-batch. `Deadlock` when ranks wait for each other.
    """
    if saved and len(saved) != table.stages:
        raise ValueError(f"saved has {len(saved)} numbers for {table.stages} stages")
    took = _durations(table, (forward, backward_input, backward_weight), send)
    begun, _ = _played(table, took, hops(table.owner, link))
    starts: list[list[float]] = [[] for _ in table.rows]
    for rank, start in zip(table.order.ranks, begun):
        starts[rank].append(start)
    events = tuple(
        Event(rank, action, start, start + took["FBIW".index(action.kind) * table.stages + action.stage])
        for rank, row in enumerate(table.rows)
        for action, start in zip(row, starts[rank])
    )
    makespan = max((event.end for event in events), default=0.0)
    return Played(table, events, makespan, tuple(saved) or (0.0,) * table.stages)


def makespan(table: Table, times: Stages, link: float | Sequence[float] = 0.0) -> float:
    """When the last action of `simulate` ends, and nothing else: several times as fast."""
    return max(_played(table, _durations(table, times, 0.0), hops(table.owner, link))[1], default=0.0)


def _durations(table: Table, times: Stages, send: float) -> list[float]:
    """Seconds of F, B, I and W on each stage, one after the other."""
    for name, numbers in zip(("forward", "backward_input", "backward_weight"), times):
        if len(numbers) != table.stages:
            raise ValueError(f"{name} has {len(numbers)} times for {table.stages} stages")
    forward, backward_input, backward_weight = times
    whole = [i + w for i, w in zip(backward_input, backward_weight)]
    kinds = {"F": forward, "B": whole, "I": backward_input, "W": backward_weight}
    return [t + send * _sends(table, kind, s) for kind, ts in kinds.items() for s, t in enumerate(ts)]


def hops(owner: Sequence[int], link: float | Sequence[float]) -> list[float]:
    """The time of a message over the boundary between stages s and s + 1: none within a rank."""
    edges = len(owner) - 1
    links = [float(link)] * edges if isinstance(link, (int, float)) else list(link)
    if len(links) != edges:
        raise ValueError(f"link has {len(links)} times for {edges} boundaries between {len(owner)} stages")
    return [time if a != b else 0.0 for time, a, b in zip(links, owner, owner[1:])]


def _sends(table: Table, kind: str, stage: int) -> bool:
    """Whether the action leaves a message for another rank."""
    to = stage + 1 if kind == "F" else stage - 1
    return kind != "W" and 0 <= to < table.stages and table.owner[to] != table.owner[stage]


def _played(table: Table, took: list[float], wait: list[float]) -> tuple[list[float], list[float]]:
    """When each action of `table.order` begins and ends. An action begins when its rank is free and what it waits for has arrived."""
    order = table.order
    if len(order.ranks) < sum(map(len, table.rows)):
        done = Counter(order.ranks)
        raise Deadlock({rank: row[done[rank]] for rank, row in enumerate(table.rows) if done[rank] < len(row)})
    starts, ends, clock, waits = list[float](), list[float](), [0.0] * table.ranks, [*wait, 0.0]
    for rank, duration, need, edge in zip(*order):
        start = clock[rank]
        if need >= 0 and (arrived := ends[need] + waits[edge]) > start:
            start = arrived
        clock[rank] = end = start + took[duration]
        starts.append(start)
        ends.append(end)
    return starts, ends


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
