"""Measured speeds turned into parts of the batch, while training.

The row of a step tells every rank the samples and the seconds of all shares. From these each works out the same parts, at the same
step, without a message. They hold from a step on whose samples nobody has begun to read.

What a share takes by its samples is fitted to these rows, and the parts with which all shares end together follow from it: pure
functions of numbers that all ranks have.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd, sqrt
from statistics import median
from typing import Any

from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.data.batch import Course, Parts, sizes

Row = tuple[tuple[int, ...], tuple[float, ...]]
"""Of a step: samples, and seconds computing, of each share."""
FEW = 8
"""So many steps of one size are needed to judge by: the median of fewer moves with each of them."""
APART = 1.25, 3
"""Two sizes tell the fixed cost of a step from that of a sample when one is so many times the other, in so many steps each."""
SURE_FIT = 4.0
"""And their times differ by so many standard errors."""


@dataclass(frozen=True)
class Cost:
    """Seconds that a share computes: so many of every step, and so many of each sample. `error`: the standard error of the median,
    as a part of it."""

    fixed: float
    each: float
    error: float = 0.0

    def seconds(self, samples: int) -> float:
        """Of a step with so many samples."""
        return self.fixed + self.each * samples

    def within(self, seconds: float) -> int:
        """How many samples are done in so many seconds."""
        return int((seconds - self.fixed) / self.each)


def costs(rows: Sequence[Row], now: Sequence[int]) -> list[Cost] | None:
    """What each share costs, of which `now` says the present samples; None while there is too little to judge by."""
    found = [_cost([(n[i], t[i]) for n, t in rows], size) for i, size in enumerate(now)]
    return None if None in found else [cost for cost in found if cost is not None]


def _cost(pairs: list[tuple[int, float]], now: int) -> Cost | None:
    times: dict[int, list[float]] = {}
    for samples, seconds in pairs:
        if samples and seconds > 0:
            times.setdefault(samples, []).append(seconds)
    own = times.pop(now, [])
    if len(own) < FEW:
        return None
    here, error = _median(own)
    ratio, least = APART
    others = {n: t for n, t in times.items() if len(t) >= least and max(n, now) >= ratio * min(n, now)}
    for samples in sorted(others, key=lambda n: (-len(others[n]), n)):
        there, other = _median(others[samples])
        each = (there - here) / (samples - now)
        fixed = here - each * now
        if each > 0 and fixed >= 0 and abs(there - here) > SURE_FIT * (error * here + other * there):
            return Cost(fixed, each, error)
    return Cost(0.0, here / now, error)


def _median(values: list[float]) -> tuple[float, float]:
    """The median, and its standard error as a part of it, told by the median distance from it: a few outliers move neither."""
    middle = median(values)
    spread = 1.4826 * median(abs(v - middle) for v in values)  # of a normal distribution: its standard deviation
    return middle, 1.2533 * spread / sqrt(len(values)) / middle


def slowest(found: Sequence[Cost], samples: Sequence[int]) -> float:
    """Seconds until all shares are done."""
    return max(cost.seconds(n) for cost, n in zip(found, samples))


def balanced(found: Sequence[Cost], batch: int, least: int, most: Sequence[int]) -> tuple[int, ...]:
    """Samples of each share, at least `least` and at most `most`, with which the last is done as early as can be.

    >>> balanced([Cost(0.0, 1.0), Cost(0.0, 3.0)], 32, 1, (32, 32)), balanced([Cost(0.0, 1.0), Cost(0.0, 3.0)], 32, 1, (20, 32))
    ((24, 8), (20, 12))
    """
    low, high = 0.0, slowest(found, most)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(_done(found, middle, least, most)) < batch else (low, middle)
    samples = _done(found, low, least, most)
    queue = [(cost.seconds(n + 1), i) for i, (cost, n) in enumerate(zip(found, samples)) if n < most[i]]
    heapq.heapify(queue)
    for _ in range(batch - sum(samples)):
        _, i = heapq.heappop(queue)
        samples[i] += 1
        if samples[i] < most[i]:
            heapq.heappush(queue, (found[i].seconds(samples[i] + 1), i))
    return tuple(samples)


def _done(found: Sequence[Cost], seconds: float, least: int, most: Sequence[int]) -> list[int]:
    return [min(max(cost.within(seconds), least), limit) for cost, limit in zip(found, most)]


WINDOW = 16
"""Steps that are judged by: after a change those before it leave the window as fast as new ones come."""
WARM = 2
"""Steps after a start or a change that do not count: memory is taken, kernels are chosen, graphs are compiled."""
GAIN = 0.05
"""A change must make the slowest share at least so much faster. Where a step's time varies by a tenth, the median of 16 is sure to
3 %: what is smaller may be chance, and is not worth new shapes of all tensors."""
SURE = 3.0
"""And by so many standard errors of the medians: where times vary more, more is asked for. It is asked after every step, so that two
would let chance move shares a few times in 400 steps (`tests/unit/test_shares.py`); three do not."""
MOST = 4
"""No share has more than so many times its equal part: a bound on memory where nothing is known of it."""


@dataclass
class Balance:
    """The parts of a batch by what its shares were measured to take. `least`: samples that each has at any rate."""

    batch: int
    ranks: int
    least: int = 1
    course: Course = field(init=False)
    rows: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW))
    skip: int = WARM
    """Steps to come that do not count."""
    before: tuple[int, ...] = ()
    """Samples of the last step: its seconds are told with the next."""

    def __post_init__(self) -> None:
        self.course = Course(self.ranks)
        self.least = max(1, min(self.least, self.batch // self.ranks))

    def sizes(self, parts: Parts) -> tuple[int, ...]:
        """Samples of each share in a full batch."""
        return sizes(self.batch, parts, self.least)

    def heard(self, done: int, samples: Sequence[int], seconds: Sequence[float], room: Sequence[int], ahead: int) -> str:
        """The note to print after `done` steps, or nothing. Of each share: the `samples` of the last step, the `seconds` of the step
        before, and how many samples its memory has `room` for (0: not known). Other parts are for the step `ahead` of it."""
        before, self.before = self.before, tuple(samples)
        since, parts = self.course.last
        new = 0 < since <= done - 2 < since + WARM  # number done - 2 is the step whose seconds are told
        if not (self.skip or new) and before and all(t > 0 for n, t in zip(before, seconds) if n):
            self.rows.append((before, tuple(seconds)))
        self.skip = max(0, self.skip - 1)
        if done <= since:  # a change is to come
            return ""
        now = self.sizes(parts)
        found = costs(self.rows, now)
        wanted = None if found is None else balanced(found, self.batch, self.least, self._most(now, room))
        if found is None or wanted is None or wanted == now:
            return ""
        old, ends = slowest(found, now), slowest(found, wanted)
        if 1 - ends / old <= max(GAIN, SURE * max(cost.error for cost in found)):
            return ""
        self.course.change(done + ahead, wanted)
        times = [cost.seconds(n) / n for cost, n in zip(found, now)]
        slow = times.index(max(times))
        return (
            f"note  shares {told(wanted)} from step {done + ahead + 1} on: rank {slow} computes a sample in "
            f"{max(times) / min(times):.1f} × the time of the fastest; computing takes {1000 * ends:.3g} ms instead of {1000 * old:.3g}"
        )

    def _most(self, now: Sequence[int], room: Sequence[int]) -> list[int]:
        """Samples that each share may have: what it has is known to fit."""
        equal = -(-self.batch // self.ranks)
        most = [max(n, min(MOST * equal, known or MOST * equal)) for n, known in zip(now, room)]
        return [min(limit, self.batch) for limit in most]

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: JSON values."""
        rows = [[list(n), list(t)] for n, t in self.rows]
        return {"batch": self.batch, "parts": self.course.rows(), "rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From one; of other shares, or another batch, nothing is taken over."""
        self.skip, self.before = WARM, ()
        if state["batch"] != self.batch or len(state["parts"][0]) != self.ranks + 1:
            return
        self.course.restore(state["parts"])
        self.rows.clear()
        self.rows.extend((tuple(n), tuple(t)) for n, t in state["rows"][-WINDOW:])


def told(parts: Sequence[int]) -> str:
    """Parts as a plan has them, in the smallest numbers.

    >>> told((24, 8))
    '3:1'
    """
    common = gcd(*parts)
    return ":".join(str(n // common) for n in parts)


def by_speed(machine: Machine, plan: Plan) -> tuple[int, ...]:
    """Of each share the speed of its slowest device, in whole numbers."""
    found = [min(machine.speed(rank) for rank in ranks) for ranks in members(plan)]
    return tuple(max(1, round(10_000 * speed)) for speed in found)


def members(plan: Plan) -> list[list[int]]:
    """The ranks of each share."""
    found: list[list[int]] = [[] for _ in range(plan.ranks)]
    for rank in range(plan.world):
        found[plan.share(rank)].append(rank)
    return found
