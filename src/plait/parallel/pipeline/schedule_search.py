"""Search for the fastest pipeline table under a memory limit, among textbook tables and greedy tables.

Textbook tables assume that all stages take equal time and that messages are free. A greedy table is built for measured
times. Whenever a rank is free, it starts one of the actions that are ready, by a fixed policy, if the memory limit
allows it. This follows Qi et al. 2024 (arXiv 2401.10241, section 3.1), with several stages per rank, looped or folded,
and a limit per rank. `find_best_table` tries all policies, simulates every table, and takes the fastest that fits.

[Note: Simulation]
A table is simulated on a virtual clock, without torch or devices: start and end of each action, waits, and memory. A
rank executes its row in order. An action starts when the rank is free and its input has arrived. Between different
ranks, a message arrives `link` seconds after it was produced. Links do not occupy ranks, and messages do not queue
behind each other.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import Literal, NamedTuple

from plait.config.keys import SCHEDULES
from plait.parallel.pipeline.schedules import Action, ScheduleTable, assign_folded, assign_looped, find_schedule_errors
from plait.parallel.pipeline.schedules import build_textbook_table as textbook_table

Stages = tuple[Sequence[float], Sequence[float], Sequence[float]]
"""Times of F, I and W of each stage."""


class Event(NamedTuple):
    """An action of `rank` from `start` to `end`, in the unit of the given times."""

    rank: int
    action: Action
    start: float
    end: float


class Deadlock(Exception):
    """Raised if the ranks of a table wait for each other. `blocked` is the action at which each unfinished rank waits."""

    def __init__(self, blocked: dict[int, Action]):
        self.blocked = blocked
        super().__init__("; ".join(f"rank {rank} waits forever at {action}" for rank, action in blocked.items()))


@dataclass(frozen=True)
class SimulatedRun:
    """Result of a simulation. `saved`: bytes that each stage stores per micro-batch, or all 0 if not given."""

    table: ScheduleTable
    events: tuple[Event, ...]
    """Rank by rank, in the order of each rank's row."""
    makespan: float
    saved: tuple[float, ...]

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Compute time of each rank."""
        total = [0.0] * self.table.ranks
        for rank, _, start, end in self.events:
            total[rank] += end - start
        return tuple(total)

    @property
    def idle(self) -> tuple[float, ...]:
        """Idle time of each rank, between the start of the first action and the end of the last."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Fraction of time × ranks without computation."""
        return sum(self.idle) / (self.makespan * self.table.ranks) if self.makespan else 0.0

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Peak bytes of activations on each rank. An activation is stored from F to the end of B or W."""
        now, most = [0.0] * self.table.ranks, [0.0] * self.table.ranks
        for rank, action, _, _ in self.events:
            if action.kind != "I":
                now[rank] += self.saved[action.stage] if action.kind == "F" else -self.saved[action.stage]
                most[rank] = max(most[rank], now[rank])
        return tuple(most)


def simulate(
    table: ScheduleTable,
    forward: Sequence[float],
    backward_input: Sequence[float],
    backward_weight: Sequence[float],
    link: float | Sequence[float] = 0.0,
    send: float = 0.0,
    *,
    saved: Sequence[float] = (),
) -> SimulatedRun:
    """Simulate `table` (see [Note: Simulation]). Times are per stage and micro-batch, in one unit. B takes the time of
    I + W.

    `link`: time of a message between two ranks, as one value or one per boundary (between stages s and s + 1 at index
    s). `send`: time that sending adds to the action that produced the message. `saved`: bytes that a stage stores per
    micro-batch. Raises `Deadlock` if ranks wait for each other.
    """
    if saved and len(saved) != table.stages:
        raise ValueError(f"saved has {len(saved)} values for {table.stages} stages")
    took = _list_durations(table, (forward, backward_input, backward_weight), send)
    begun, _ = _play_actions(table, took, list_link_times(table.owner, link))
    starts: list[list[float]] = [[] for _ in table.rows]
    for rank, start in zip(table.play_order.ranks, begun):
        starts[rank].append(start)
    events = tuple(
        Event(rank, action, start, start + took["FBIW".index(action.kind) * table.stages + action.stage])
        for rank, row in enumerate(table.rows)
        for action, start in zip(row, starts[rank])
    )
    makespan = max((event.end for event in events), default=0.0)
    return SimulatedRun(table, events, makespan, tuple(saved) or (0.0,) * table.stages)


def compute_makespan(table: ScheduleTable, times: Stages, link: float | Sequence[float] = 0.0) -> float:
    """Return the end of the last action, like `simulate`, but several times as fast."""
    return max(_play_actions(table, _list_durations(table, times, 0.0), list_link_times(table.owner, link))[1], default=0.0)


def _list_durations(table: ScheduleTable, times: Stages, send: float) -> list[float]:
    """Return the durations of F on all stages, then of B, I and W."""
    for name, numbers in zip(("forward", "backward_input", "backward_weight"), times):
        if len(numbers) != table.stages:
            raise ValueError(f"{name} has {len(numbers)} times for {table.stages} stages")
    forward, backward_input, backward_weight = times
    whole = [i + w for i, w in zip(backward_input, backward_weight)]
    kinds = {"F": forward, "B": whole, "I": backward_input, "W": backward_weight}
    return [t + send * _has_send(table, kind, s) for kind, ts in kinds.items() for s, t in enumerate(ts)]


def list_link_times(owner: Sequence[int], link: float | Sequence[float]) -> list[float]:
    """Return the message time of each boundary between stages s and s + 1; 0 within a rank."""
    edges = len(owner) - 1
    links = [float(link)] * edges if isinstance(link, (int, float)) else list(link)
    if len(links) != edges:
        raise ValueError(f"link has {len(links)} times for {edges} boundaries between {len(owner)} stages")
    return [time if a != b else 0.0 for time, a, b in zip(links, owner, owner[1:])]


def _has_send(table: ScheduleTable, kind: str, stage: int) -> bool:
    """Return whether the action sends a message to another rank."""
    to = stage + 1 if kind == "F" else stage - 1
    return kind != "W" and 0 <= to < table.stages and table.owner[to] != table.owner[stage]


def _play_actions(table: ScheduleTable, took: list[float], wait: list[float]) -> tuple[list[float], list[float]]:
    """Return the start and end of each action of `table.play_order`."""
    order = table.play_order
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
"""Memory limit: one value for all ranks, one per rank, or None for the peak of 1f1b's first rank."""


@dataclass(frozen=True)
class StageCosts:
    """Costs of each stage per micro-batch, for `simulate`. `saved`: memory that it stores, in any unit."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    link: float | tuple[float, ...] = 0.0
    send: float = 0.0
    saved: tuple[float, ...] = ()

    @classmethod
    def uniform(cls, stages: int) -> "StageCosts":
        """Costs of equal stages: forward and both halves of backward take 1 each, and each stage stores 1."""
        one = (1.0,) * stages
        return cls(one, one, one, saved=one)

    def simulate_table(self, table: ScheduleTable) -> SimulatedRun:
        """Simulate a table with these costs."""
        times = self.forward, self.backward_input, self.backward_weight
        return simulate(table, *times, self.link, self.send, saved=self.saved or (1.0,) * table.stages)


@dataclass(frozen=True)
class SchedulePolicy:
    """Preferences of a greedy table. `kind_order`: "IF" prefers backward, "FI" forward, "alternate" the kind that did
    not run last; W runs if neither is ready. `deepest_first` prefers forwards of the stage nearest the loss, else of
    the stage nearest the inputs. With `wait_for_input`, a rank waits for an input instead of starting a W that would
    delay it."""

    kind_order: str
    deepest_first: bool
    wait_for_input: bool
    split: bool


def build_table(schedule: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> ScheduleTable:
    """Build the table of a schedule; it is deterministic. Raises ValueError with the errors of `find_schedule_errors`.

    `auto` assumes equal stages, free links, and the peak of 1f1b's first rank as the limit. `find_best_table` uses
    measured times and other limits.
    """
    if schedule == "auto" and not find_schedule_errors(schedule, ranks, microbatches, stages_per_rank):
        return find_best_table(ranks, microbatches, stages_per_rank)
    return textbook_table(schedule, ranks, microbatches, stages_per_rank)


def find_best_table(
    ranks: int,
    microbatches: int,
    stages_per_rank: int = 1,
    costs: StageCosts | None = None,
    limit: Limit = None,
    *,
    split: bool = True,
) -> ScheduleTable:
    """Return the table with the smallest makespan among those that store at most `limit` on each rank.

    `limit` has the unit of `costs.saved`. Without `costs`, all stages are equal. Without `limit`, a rank may store the
    activations of its stages for p micro-batches, as 1f1b's first rank does. With `split` False, no backward pass is
    split into two halves. Ties are resolved by less memory, then by fewer actions. Raises ValueError if one micro-batch
    exceeds the limit.
    """
    known = costs or StageCosts.uniform(ranks * stages_per_rank)
    scored = []
    sizes = ranks, microbatches, stages_per_rank
    for at, candidate in enumerate(chain(iter_textbook_tables(*sizes, split), iter_greedy_tables(*sizes, known, limit, split))):
        played = known.simulate_table(candidate)
        if all(size <= most * (1 + 1e-9) for size, most in zip(played.peak_bytes, _list_limits(candidate.owner, known, limit))):
            size = max(played.peak_bytes), sum(map(len, candidate.rows))
            scored.append((float(f"{played.makespan:.9g}"), *size, at, candidate))
    if not scored:
        raise ValueError(f"one micro-batch exceeds the memory limit of {limit} on some rank")
    return min(scored)[-1]


def iter_textbook_tables(ranks: int, microbatches: int, stages_per_rank: int, split: bool = True) -> Iterator[ScheduleTable]:
    """Iterate over the textbook tables that exist for these sizes."""
    for name in SCHEDULES:
        if name != "auto" and not find_schedule_errors(name, ranks, microbatches, stages_per_rank):
            textbook = textbook_table(name, ranks, microbatches, stages_per_rank)
            if split or not any(action.kind == "W" for row in textbook.rows for action in row):
                yield textbook


def iter_greedy_tables(
    ranks: int, microbatches: int, stages_per_rank: int, costs: StageCosts, limit: Limit = None, split: bool = True
) -> Iterator[ScheduleTable]:
    """Iterate over greedy tables: one per policy and stage placement that fit into the limit."""
    several = (True, False) if stages_per_rank > 1 else (True,)
    patient = (True, False) if split else (True,)
    owners = dict.fromkeys((assign_looped(ranks, stages_per_rank), assign_folded(ranks, stages_per_rank)))
    for owner in owners:
        limits = _list_limits(owner, costs, limit)
        if all(need <= most for need, most in zip(_list_limits(owner, costs, None, 1), limits)):
            for first, deep, patience in product(("IF", "FI", "alternate"), several, patient):
                yield build_greedy_table(microbatches, owner, costs, limits, SchedulePolicy(first, deep, patience, split))


def _list_limits(owner: tuple[int, ...], costs: StageCosts, limit: Limit, microbatches: int = 0) -> list[float]:
    """Return the memory limit of each rank. Without `limit`: the activations of its stages for `microbatches`, by
    default p."""
    ranks = max(owner) + 1
    if isinstance(limit, (int, float)):
        return [float(limit)] * ranks
    if limit is not None:
        return list(limit)
    needs = [0.0] * ranks
    for rank, size in zip(owner, costs.saved or (1.0,) * len(owner)):
        needs[rank] += size * (microbatches or ranks)
    return needs


def build_greedy_table(microbatches: int, owner: tuple[int, ...], costs: StageCosts, limits: Sequence[float], taste: SchedulePolicy) -> ScheduleTable:
    """Build a greedy table. The limits must fit one micro-batch: then the oldest unfinished one can always proceed."""
    packer = _GreedyScheduler(microbatches, owner, costs, limits, taste)
    wakes = [(0.0, rank) for rank in range(max(owner) + 1)]
    while wakes:
        now, rank = heapq.heappop(wakes)
        if packer.free[rank] <= now and (action := packer.choose(rank, now)):
            for wake in packer.append_action(rank, action, now):
                heapq.heappush(wakes, wake)
    if min(packer.weights) < microbatches:
        raise AssertionError(f"the greedy table is stuck at {packer.rows}")
    return ScheduleTable.from_rows("auto", microbatches, owner, packer.rows)


class _GreedyScheduler:
    """State of a greedy table: the next micro-batch for each stage and kind, and the arrival times of inputs."""

    def __init__(
        self, microbatches: int, owner: tuple[int, ...], costs: StageCosts, limits: Sequence[float], taste: SchedulePolicy
    ) -> None:
        ranks, stages = max(owner) + 1, len(owner)
        self.count, self.owner, self.limits, self.policy, self.stages = microbatches, owner, limits, taste, stages
        self.link_times = list_link_times(owner, costs.link)
        self.saved = costs.saved or (1.0,) * stages
        whole = tuple(i + w for i, w in zip(costs.backward_input, costs.backward_weight))
        self.took = {"F": costs.forward, "B": whole, "I": costs.backward_input, "W": costs.backward_weight}
        self.back: Literal["I", "B"] = "I" if taste.split else "B"
        self.stages_of_rank = [[s for s in range(stages) if owner[s] == rank] for rank in range(ranks)]
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.free = [0.0] * ranks
        self.held_bytes = [0.0] * ranks
        # arrival times of the inputs of each micro-batch, in order; and the number of finished actions
        self.inputs: list[list[float]] = [[0.0] * microbatches if s == 0 else [] for s in range(stages)]
        self.grads: list[list[float]] = [[] for _ in range(stages)]
        self.forwards, self.backwards, self.weights = [0] * stages, [0] * stages, [0] * stages

    def choose(self, rank: int, now: float) -> Action | None:
        """Return the action that a free rank starts now, or None to wait for an input."""
        soon = float("inf")
        ready: dict[str, list[int]] = {"F": [], "I": []}
        for s in self.stages_of_rank[rank]:
            for kind, done, there in (("F", self.forwards, self.inputs), ("I", self.backwards, self.grads)):
                if done[s] < len(there[s]) and (kind == "I" or self.can_start_forward(rank, s)):
                    when = there[s][done[s]]
                    soon = min(soon, when)
                    if when <= now:
                        ready[kind].append(s)
        for kind in self.kind_order(rank):
            if ready[kind]:
                stage = max(ready[kind]) if self.policy.deepest_first == (kind == "F") else min(ready[kind])
                if kind == "F":
                    return Action("F", stage, self.forwards[stage])
                return Action(self.back, stage, self.backwards[stage])
        late = [s for s in self.stages_of_rank[rank] if self.weights[s] < self.backwards[s]]
        if late:
            stage = max(late, key=lambda s: (self.backwards[s] - self.weights[s], s))
            if not self.policy.wait_for_input or soon >= now + self.took["W"][stage] / 2:
                return Action("W", stage, self.weights[stage])
        return None

    def kind_order(self, rank: int) -> str:
        if self.policy.kind_order != "alternate":
            return self.policy.kind_order
        last = next((a.kind for a in reversed(self.rows[rank]) if a.kind != "W"), "I")
        return "IF" if last == "F" else "FI"

    def can_start_forward(self, rank: int, stage: int) -> bool:
        """Return whether the unfinished micro-batches can still be finished one by one after one more forward.

        A stage nearer the inputs may still store activations that a stage nearer the loss has freed. So each micro-batch in turn
        needs room for its missing forwards, and then frees all its memory (Dijkstra's banker's algorithm).
        """
        mine, micro = self.stages_of_rank[rank], self.forwards[stage]
        room = self.limits[rank] * (1 + 1e-9) - self.held_bytes[rank] - self.saved[stage]
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

    def append_action(self, rank: int, action: Action, now: float) -> list[tuple[float, int]]:
        """Append the action to its row. Return (time, rank) of the ranks to check again."""
        stage, end = action.stage, now + self.took[action.kind][action.stage]
        self.rows[rank].append(action)
        self.free[rank] = end
        wakes = [(end, rank)]
        if action.kind == "F":
            self.forwards[stage] += 1
            self.held_bytes[rank] += self.saved[stage]
            if stage + 1 < self.stages:
                wakes.append(self.add_arrival(self.inputs[stage + 1], stage + 1, end + self.link_times[stage]))
            else:
                self.grads[stage].append(end)
        elif action.kind != "W":
            self.backwards[stage] += 1
            if stage:
                wakes.append(self.add_arrival(self.grads[stage - 1], stage - 1, end + self.link_times[stage - 1]))
        if action.kind in "BW":
            self.weights[stage] += 1
            self.held_bytes[rank] -= self.saved[stage]
        return wakes

    def add_arrival(self, queue: list[float], stage: int, when: float) -> tuple[float, int]:
        queue.append(when)
        return when, self.owner[stage]
