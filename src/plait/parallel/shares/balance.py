"""Measured speeds turned into parts of the batch, while training.

The row of a step tells every rank the samples and the seconds of all shares. From these each works out the same parts, at the same
step, without a message. They hold from a step on whose samples nobody has begun to read.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from plait.data.shares import Course, Parts, sizes
from plait.parallel.shares.fit import Row, balanced, costs, slowest

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
