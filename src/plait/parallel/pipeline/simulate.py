"""Plays a table on a virtual clock: when each rank does what, how long it waits, how much it holds. No torch, no device.

A rank does its row in order. An action begins when the rank is free and what it needs has arrived; between different
ranks that is `link` seconds after it was made. Links do not occupy ranks, and messages do not queue behind each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from plait.parallel.pipeline.schedules import Action, Table

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
    took, starts = _timed(table, (forward, backward_input, backward_weight), link, send)
    events = tuple(
        Event(rank, action, start, start + took[action.kind][action.stage])
        for rank, row in enumerate(table.rows)
        for action, start in zip(row, starts[rank])
    )
    makespan = max((event.end for event in events), default=0.0)
    return Played(table, events, makespan, tuple(saved) or (0.0,) * table.stages)


def makespan(table: Table, times: Stages, link: float | Sequence[float] = 0.0) -> float:
    """When the last action of `simulate` ends, and nothing else: several times as fast."""
    took, starts = _timed(table, times, link, 0.0)
    last = ((row[-1], begun[-1]) for row, begun in zip(table.rows, starts) if row)
    return max((begun + took[action.kind][action.stage] for action, begun in last), default=0.0)


def _timed(
    table: Table, times: Stages, link: float | Sequence[float], send: float
) -> tuple[dict[str, list[float]], list[list[float]]]:
    """(seconds of each kind of action on each stage, when each action of each row begins)."""
    for name, numbers in zip(("forward", "backward_input", "backward_weight"), times):
        if len(numbers) != table.stages:
            raise ValueError(f"{name} has {len(numbers)} times for {table.stages} stages")
    forward, backward_input, backward_weight = times
    whole = [i + w for i, w in zip(backward_input, backward_weight)]
    kinds = {"F": forward, "B": whole, "I": backward_input, "W": backward_weight}
    took = {kind: [t + send * _sends(table, kind, s) for s, t in enumerate(ts)] for kind, ts in kinds.items()}
    return took, _starts(table, took, hops(table.owner, link))


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


def _starts(table: Table, took: dict[str, list[float]], wait: list[float]) -> list[list[float]]:
    """When each action of each row begins. Every rank goes on until it must wait; what it waits for wakes it."""
    count, last = table.microbatches, table.stages - 1
    # end of F at s·m + micro, of B or I at the same place in a second list; None while not done
    forward: list[float | None] = [None] * (table.stages * count)
    backward: list[float | None] = [None] * (table.stages * count)
    waiting: dict[tuple[bool, int], int] = {}
    starts: list[list[float]] = [[] for _ in table.rows]
    clock = [0.0] * table.ranks
    ready = list(range(table.ranks - 1, -1, -1))
    while ready:
        rank = ready.pop()
        mine, now = starts[rank], clock[rank]
        for action in table.rows[rank][len(mine) :]:
            kind, stage = action.kind, action.stage
            at = stage * count + action.micro
            if kind == "F":
                need, arrived, hop = (False, at - count), 0.0, 0.0
                if stage:
                    arrived, hop = forward[at - count], wait[stage - 1]
            elif kind == "W" or forward[at] is None or stage == last:
                need, hop = (kind == "W", at), 0.0
                arrived = (backward if kind == "W" else forward)[at]
            else:
                need, arrived, hop = (True, at + count), backward[at + count], wait[stage]
            if arrived is None:
                waiting[need] = rank
                break
            mine.append(max(now, arrived + hop))
            now = mine[-1] + took[kind][stage]
            if kind != "W":
                (forward if kind == "F" else backward)[at] = now
                if (waiter := waiting.pop((kind != "F", at), None)) is not None:
                    ready.append(waiter)
        clock[rank] = now
    blocked = {r: row[len(starts[r])] for r, row in enumerate(table.rows) if len(starts[r]) < len(row)}
    if blocked:
        raise Deadlock(blocked)
    return starts
