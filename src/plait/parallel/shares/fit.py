"""What a share of the batch takes by its samples, and the parts with which all shares end together.

Pure functions of numbers that all ranks have: whoever calls them comes to the same parts, without a message.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

Row = tuple[tuple[int, ...], tuple[float, ...]]
"""Of a step: samples, and seconds computing, of each share."""
FEW = 8
"""So many steps of one size are needed to judge by: the median of fewer moves with each of them."""
APART = 1.25, 3
"""Two sizes tell the fixed cost of a step from that of a sample when one is so many times the other, in so many steps each."""
SURE = 4.0
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
        if each > 0 and fixed >= 0 and abs(there - here) > SURE * (error * here + other * there):
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
