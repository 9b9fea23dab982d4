"""What is known of a kind of device: rates and memory of its data sheet, and what was measured on the machine itself."""

from dataclasses import dataclass
from itertools import pairwise

KINDS, NOT_YET = ("auto", "cpu", "cuda"), ("xpu", "mps")
"""What `--device` takes, and kinds of devices that torch knows and plait does not train on yet."""
CORES = "processes on cores"
"""The note of a machine without accelerators."""


@dataclass(frozen=True)
class Rates:
    """One number per precision, None where it is not known."""

    fp32: float | None = None
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None
    fp4: float | None = None

    def of(self, precision: str) -> float | None:
        """The number of one precision."""
        return getattr(self, precision)


@dataclass(frozen=True)
class Device:
    """One device. `memory` is in bytes, `memory_bandwidth` in bytes/s, `peak` in flop/s, dense.

    `achievable` is the part of the peak that the best matmuls reach.
    """

    name: str
    memory: int
    memory_bandwidth: float | None = None
    peak: Rates = Rates()
    achievable: Rates = Rates()
    multiprocessors: int | None = None
    """Parts that compute a tile of a matmul each."""


@dataclass(frozen=True)
class Matmuls:
    """Measured: points (flops of one matmul, part of the peak it reached), smallest first."""

    precision: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Collectives:
    """Measured: points (bytes, seconds) of one collective in a group of neighbouring ranks, smallest first."""

    collective: str
    ranks: int
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Loader:
    """Measured: samples/s that one rank reads of a job's data, while the other ranks of its node do the same."""

    job: str
    samples_per_s: float


def between(points: tuple[tuple[float, float], ...], x: float) -> float:
    """The value at `x` on straight lines between points, and that of the first and the last outside of them.

    >>> between(((1.0, 10.0), (3.0, 20.0)), 2.0)
    15.0
    """
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


def seconds_at(points: tuple[tuple[float, float], ...], size: float) -> float:
    """Seconds for `size` bytes: between the measured points, and straight on beyond the last two."""
    if len(points) < 2 or size <= points[-1][0]:
        return between(points, size)
    (x0, y0), (x1, y1) = points[-2:]
    return y1 + max(0.0, y1 - y0) * (size - x1) / (x1 - x0)
