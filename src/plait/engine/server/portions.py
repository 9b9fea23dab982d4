"""Clocks cut into portions: the samples that a group is dealt at once.

A clock is what a step is elsewhere: the next samples of the epoch's order (`data/sampling.py`). It is cut into as many contiguous
portions as there are groups, and fewer where it has fewer samples.
"""

from dataclasses import asdict, dataclass

from plait.data.batch import Position
from plait.data.sampling import Sampling
from plait.tensors.rows import split


@dataclass(frozen=True, order=True)
class Portion:
    """Samples first … first + count − 1 of a clock's batch."""

    clock: int
    """Number of the clock, from 0: the steps that were done before it."""
    first: int
    count: int
    size: int
    """Samples of the clock."""
    epoch: int
    start: int
    """Where the clock begins in the epoch's order."""

    @property
    def share(self) -> float:
        """Its part of the clock, by samples."""
        return self.count / self.size


class Clocks:
    """The clocks of a job, one after the other, from a position on."""

    def __init__(self, sampling: Sampling, groups: int, at: Position | None = None):
        self.sampling, self.groups = sampling, groups
        self.after = at or Position()
        """Where the clock after the last one given begins."""

    def take(self) -> list[Portion]:
        """The portions of the next clock."""
        at = self.after
        size = self.sampling.size(at.epoch, at.start)
        parts = min(self.groups, size)
        cuts = [split(size, parts, i) for i in range(parts)]
        ends = at.start + size == len(self.sampling.epoch(at.epoch))
        self.after = Position(at.step + 1, at.epoch + ends, 0 if ends else at.start + size, at.samples + size)
        return [Portion(at.step, first, count, size, at.epoch, at.start) for first, count in cuts]

    def ids(self, portion: Portion) -> list[int]:
        """The ids of its samples."""
        begin = portion.start + portion.first
        return self.sampling.epoch(portion.epoch)[begin : begin + portion.count].tolist()


def as_row(portion: Portion) -> dict[str, int]:
    """A portion as JSON values."""
    return asdict(portion)


def of_row(row: dict[str, int]) -> Portion:
    """The portion of such values."""
    return Portion(**row)
