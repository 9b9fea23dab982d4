"""Adaptation of local batches to measured speeds during training.

The step row contains the samples and the compute seconds of every local batch. From these, each rank computes the same
new split in the same step, without a message. The split takes effect at a step whose samples no loader has fetched.

A linear cost per local batch is fitted to the rows, and the split in which all ranks finish together is computed from
the costs. Both are pure functions of values that all ranks have.
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
from plait.data.batch import SplitSchedule, SplitWeights, split_by_weights

ShareTimes = tuple[tuple[int, ...], tuple[float, ...]]
"""Samples and compute seconds of each local batch in a step."""
MIN_STEPS = 8
"""Minimum number of steps of one size: the median of fewer varies too much."""
SIZE_CONTRAST = 1.25, 3
"""(ratio, steps) at which two batch sizes separate the fixed cost of a step from the cost per sample."""
FIT_SIGMAS = 4.0
"""Minimum difference of the two medians, in standard errors."""


@dataclass(frozen=True)
class BatchCost:
    """Linear cost of a local batch, in seconds: `fixed` per step, and `per_sample`. `error`: relative standard error of
    the median."""

    fixed: float
    per_sample: float
    error: float = 0.0

    def seconds(self, samples: int) -> float:
        """Return the seconds of a step with this number of samples."""
        return self.fixed + self.per_sample * samples

    def count_samples(self, seconds: float) -> int:
        """Return the number of samples that fit into this time."""
        return int((seconds - self.fixed) / self.per_sample)


def estimate_costs(rows: Sequence[ShareTimes], now: Sequence[int]) -> list[BatchCost] | None:
    """Fit the cost of each local batch. `now`: its current samples. None if there are too few measurements."""
    found = [_estimate_cost([(n[i], t[i]) for n, t in rows], size) for i, size in enumerate(now)]
    return None if None in found else [cost for cost in found if cost is not None]


def _estimate_cost(pairs: list[tuple[int, float]], now: int) -> BatchCost | None:
    times: dict[int, list[float]] = {}
    for samples, seconds in pairs:
        if samples and seconds > 0:
            times.setdefault(samples, []).append(seconds)
    own = times.pop(now, [])
    if len(own) < MIN_STEPS:
        return None
    here, error = _median_and_error(own)
    ratio, least = SIZE_CONTRAST
    others = {n: t for n, t in times.items() if len(t) >= least and max(n, now) >= ratio * min(n, now)}
    for samples in sorted(others, key=lambda n: (-len(others[n]), n)):
        there, other = _median_and_error(others[samples])
        each = (there - here) / (samples - now)
        fixed = here - each * now
        if each > 0 and fixed >= 0 and abs(there - here) > FIT_SIGMAS * (error * here + other * there):
            return BatchCost(fixed, each, error)
    return BatchCost(0.0, here / now, error)


def _median_and_error(values: list[float]) -> tuple[float, float]:
    """Return the median and its relative standard error. The error is estimated from the median absolute deviation,
    which is robust against outliers."""
    middle = median(values)
    spread = 1.4826 * median(abs(v - middle) for v in values)  # standard deviation of a normal distribution
    return middle, 1.2533 * spread / sqrt(len(values)) / middle


def find_slowest_seconds(found: Sequence[BatchCost], samples: Sequence[int]) -> float:
    """Return the seconds until the slowest rank is done."""
    return max(cost.seconds(n) for cost, n in zip(found, samples))


def balance_samples(found: Sequence[BatchCost], batch: int, least: int, most: Sequence[int]) -> tuple[int, ...]:
    """Return the samples of each local batch, between `least` and `most`, that minimize the time of the slowest rank.

    >>> balance_samples([BatchCost(0.0, 1.0), BatchCost(0.0, 3.0)], 32, 1, (32, 32))
    (24, 8)
    >>> balance_samples([BatchCost(0.0, 1.0), BatchCost(0.0, 3.0)], 32, 1, (20, 32))
    (20, 12)
    """
    low, high = 0.0, find_slowest_seconds(found, most)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(_count_done(found, middle, least, most)) < batch else (low, middle)
    samples = _count_done(found, low, least, most)
    queue = [(cost.seconds(n + 1), i) for i, (cost, n) in enumerate(zip(found, samples)) if n < most[i]]
    heapq.heapify(queue)
    for _ in range(batch - sum(samples)):
        _, i = heapq.heappop(queue)
        samples[i] += 1
        if samples[i] < most[i]:
            heapq.heappush(queue, (found[i].seconds(samples[i] + 1), i))
    return tuple(samples)


def _count_done(found: Sequence[BatchCost], seconds: float, least: int, most: Sequence[int]) -> list[int]:
    return [min(max(cost.count_samples(seconds), least), limit) for cost, limit in zip(found, most)]


WINDOW = 16
"""Number of most recent steps that the costs are fitted to."""
WARMUP_STEPS = 2
"""Steps to ignore after a start or a change, while memory is allocated, kernels are selected and graphs are compiled."""
MIN_GAIN = 0.05
"""Minimum relative gain of the slowest rank for a change. If step times vary by 10 %, the median of 16 has an error of
3 %. Smaller gains may be noise, and are not worth new shapes of all tensors."""
GAIN_SIGMAS = 3.0
"""Minimum gain in standard errors of the medians. The test is repeated after every step, so 2 would change the split by
chance a few times in 400 steps; 3 does not (`tests/unit/test_shares.py`)."""
MAX_RATIO = 4
"""Maximum size of a local batch relative to the equal part, if no memory limit was measured."""


@dataclass
class BatchBalancer:
    """Computes the batch split from measured costs. `least`: minimum samples of a local batch."""

    batch: int
    ranks: int
    least: int = 1
    course: SplitSchedule = field(init=False)
    rows: deque[ShareTimes] = field(default_factory=lambda: deque(maxlen=WINDOW))
    warmup_left: int = WARMUP_STEPS
    """Remaining steps to ignore."""
    last_samples: tuple[int, ...] = ()
    """Samples of the last step, whose seconds arrive with the next step."""

    def __post_init__(self) -> None:
        self.course = SplitSchedule(self.ranks)
        self.least = max(1, min(self.least, self.batch // self.ranks))

    def split_batch(self, parts: SplitWeights) -> tuple[int, ...]:
        """Return the samples of each local batch in a full batch."""
        return split_by_weights(self.batch, parts, self.least)

    def update_parts(self, done: int, samples: Sequence[int], seconds: Sequence[float], room: Sequence[int], ahead: int) -> str:
        """Record a step and change the split if that is faster. Return the note to print, or "".

        `done`: finished steps. Per local batch: `samples` of the last step, `seconds` of the step before it, and
        `room`, the samples that fit into memory (0: unknown). A new split takes effect `ahead` steps later.
        """
        before, self.last_samples = self.last_samples, tuple(samples)
        since, parts = self.course.last_change
        new = 0 < since <= done - 2 < since + WARMUP_STEPS  # the seconds belong to step done - 2
        if not (self.warmup_left or new) and before and all(t > 0 for n, t in zip(before, seconds) if n):
            self.rows.append((before, tuple(seconds)))
        self.warmup_left = max(0, self.warmup_left - 1)
        if done <= since:  # a change has not taken effect yet
            return ""
        now = self.split_batch(parts)
        found = estimate_costs(self.rows, now)
        wanted = None if found is None else balance_samples(found, self.batch, self.least, self._limit_samples(now, room))
        if found is None or wanted is None or wanted == now:
            return ""
        old, ends = find_slowest_seconds(found, now), find_slowest_seconds(found, wanted)
        if 1 - ends / old <= max(MIN_GAIN, GAIN_SIGMAS * max(cost.error for cost in found)):
            return ""
        self.course.change(done + ahead, wanted)
        times = [cost.seconds(n) / n for cost, n in zip(found, now)]
        slow = times.index(max(times))
        return (
            f"note  local batches {format_parts(wanted)} from step {done + ahead + 1} on: rank {slow} computes a sample in "
            f"{max(times) / min(times):.1f} × the time of the fastest; compute per step takes {1000 * ends:.3g} ms instead of {1000 * old:.3g}"
        )

    def _limit_samples(self, now: Sequence[int], room: Sequence[int]) -> list[int]:
        """Return the maximum samples of each local batch. Its current size is known to fit."""
        equal = -(-self.batch // self.ranks)
        most = [max(n, min(MAX_RATIO * equal, known or MAX_RATIO * equal)) for n, known in zip(now, room)]
        return [min(limit, self.batch) for limit in most]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        rows = [[list(n), list(t)] for n, t in self.rows]
        return {"batch": self.batch, "parts": self.course.to_rows(), "rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint. It is ignored if the number of local batches or the batch size differs."""
        self.warmup_left, self.last_samples = WARMUP_STEPS, ()
        if state["batch"] != self.batch or len(state["parts"][0]) != self.ranks + 1:
            return
        self.course.restore(state["parts"])
        self.rows.clear()
        self.rows.extend((tuple(n), tuple(t)) for n, t in state["rows"][-WINDOW:])


def format_parts(parts: Sequence[int]) -> str:
    """Format parts as in a plan, divided by their greatest common divisor.

    >>> format_parts((24, 8))
    '3:1'
    """
    common = gcd(*parts)
    return ":".join(str(n // common) for n in parts)


def compute_speed_parts(machine: Machine, plan: Plan) -> tuple[int, ...]:
    """Return the relative speed of the slowest device of each local batch, as integers."""
    found = [min(machine.speed(rank) for rank in ranks) for ranks in list_share_ranks(plan)]
    return tuple(max(1, round(10_000 * speed)) for speed in found)


def list_share_ranks(plan: Plan) -> list[list[int]]:
    """Return the ranks of each local batch."""
    found: list[list[int]] = [[] for _ in range(plan.ranks)]
    for rank in range(plan.world):
        found[plan.dp_rank(rank)].append(rank)
    return found
