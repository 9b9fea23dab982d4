"""Which samples a step sees: a pure function of (seed, step), never of the layout.

The order of an epoch is a permutation keyed by (seed, epoch). Step k takes the next `batch` samples of it; the last
batch of an epoch is short, never padded and never dropped. Ranks take contiguous, possibly unequal shares of the
batch, micro-batches contiguous parts of a share. Augmentation inside ``dataset[i]`` may use Python's, numpy's or
torch's own generators: they are seeded by (seed, epoch, i), whoever loads the sample, so neither the rank nor the
number of loader workers changes it.

An iterable data set is read by every rank in full and each keeps its share; its ``state_dict`` (when it has one)
travels in checkpoints, otherwise a resumed run reads up to where it was.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from plait.errors import PlaitError, Problem
from plait.randomness import host_state, restore_host
from plait.torchseam import tree_map_only


@dataclass(frozen=True)
class Position:
    """Where a run is in its data: `step` steps done, next sample `start` of `epoch`, `samples` seen in all.

    `state` is an iterable data set's own state there, when it has one.
    """

    step: int = 0
    epoch: int = 0
    start: int = 0
    samples: int = 0
    state: Any = None


@dataclass(frozen=True)
class Micro:
    """One micro-batch of one rank: samples first … first + count − 1 of the global batch."""

    first: int
    count: int
    inputs: Any
    targets: Any
    ids: tuple[int, ...]
    spare: tuple[Any, Any] | None = None
    """(inputs, targets) of one sample beside an empty micro-batch, for a forward pass that every rank must make."""


@dataclass(frozen=True)
class Batch:
    """One step's work for one rank. `size` samples over all ranks; `after` is the position once it is done."""

    position: Position
    size: int
    micro: tuple[Micro, ...]
    after: Position

    @property
    def count(self) -> int:
        return sum(m.count for m in self.micro)


@dataclass(frozen=True)
class Share:
    """Which part of every batch is ours: part `rank` of `ranks`, computed in `microbatches` parts."""

    rank: int = 0
    ranks: int = 1
    microbatches: int = 1

    def parts(self, size: int) -> list[tuple[int, int]]:
        """(first, count) of each micro-batch in a global batch of `size`; a count may be 0 in a short batch."""
        first, count = split(size, self.ranks, self.rank)
        inside = [split(count, self.microbatches, i) for i in range(self.microbatches)]
        return [(first + offset, n) for offset, n in inside]


def split(size: int, parts: int, index: int) -> tuple[int, int]:
    """(first, count) of part `index` when `size` things are shared out as evenly as they go, larger parts first."""
    each, extra = divmod(size, parts)
    return index * each + min(index, extra), each + (index < extra)


def is_map(data: Any) -> bool:
    """Whether the data set is read by index (torch's IterableDataset inherits a `__getitem__` that only raises)."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)


def checked(data: Any, where: str) -> Any:
    """`data` when it can be read by `batches`, with at least one sample. J007 otherwise."""
    if is_map(data):
        if len(data) == 0:
            raise PlaitError(Problem("J007", "the job's data is empty", why="len(data) = 0", where=where))
    elif not hasattr(data, "__iter__"):
        raise PlaitError(
            Problem("J007", f"the job's data is a {type(data).__name__}, which cannot be read", where=where,
                    fix=("give it  __len__ and __getitem__,  or  __iter__",))
        )  # fmt: skip
    return data


def collate(data: Any, samples: list[Any]) -> tuple[Any, Any]:
    """(inputs, targets) of some samples: the data set's own `collate` when it has one, else torch's default."""
    pairs = data.collate(samples) if hasattr(data, "collate") else default_collate(samples)
    if not isinstance(pairs, (tuple, list)) or len(pairs) != 2:
        raise PlaitError(
            Problem("J007", "a sample is not a pair (inputs, targets)", why=f"got {type(samples[0]).__name__}",
                    fix=("return inputs, targets    from __getitem__ (inputs may be a tensor, a tuple or a dict)",))
        )  # fmt: skip
    return pairs[0], pairs[1]


def first_samples(data: Any, count: int) -> tuple[Any, Any]:
    """A collated batch of `count` samples for the sketch: the first sample, repeated. Leaves the generators as they were."""
    state = host_state()
    sample = data[0] if is_map(data) else next(iter(data))
    restore_host(state)
    return collate(data, [sample] * count)


def part(data: Any, samples: list[Any], first: int, ids: list[int]) -> "Micro":
    """The micro-batch of these samples. Without ids it is empty, and one of `samples` is beside it."""
    inputs, targets = collate(data, samples[: len(ids) or 1])
    spare = None if ids else (inputs, targets)
    if not ids:
        inputs, targets = tree_map_only(Tensor, lambda t: t[:0] if t.dim() else t, (inputs, targets))
    return Micro(first, len(ids), inputs, targets, tuple(ids), spare)


Weigh = Callable[[Any], Any] | None


def weigh(weight: Weigh, micro: Micro) -> float:
    """What the loss of a micro-batch is a mean over: `Job.weight` of its targets, or its number of samples."""
    if micro.count == 0:
        return 0.0
    if weight is None:
        return float(micro.count)
    value = weight(micro.targets)
    return float(value.sum() if isinstance(value, Tensor) else value)
