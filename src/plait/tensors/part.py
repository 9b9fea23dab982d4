"""Which part of a tensor a rank holds: what checkpoints, digests and `verify` need to know of a layout, and no more.

A part is, in every dim, some ranges of the whole tensor one after another. Every layout plait makes (copies, shards,
slices, stages) is a set of parts per rank; two ranks that hold the same ranges hold copies. Most parts are rectangles.
A slice of a fused weight is not: a rank's heads of query, key and value lie apart in the whole. `pieces` gives the
rectangles that any part is made of. Nothing here knows which strategy made them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]
"""((first, length), …) along one dim of the whole tensor, in the order in which a rank holds them."""


@dataclass(frozen=True)
class Part:
    """This rank's ranges, dim by dim, of a tensor of `shape`; `tensor` is the storage itself, not a copy."""

    tensor: Tensor
    shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]

    @property
    def whole(self) -> bool:
        """Whether this rank holds all of it."""
        return self.ranges == everything(self.shape)

    @property
    def start(self) -> tuple[int, ...]:
        """Where it begins in the whole."""
        return tuple(dim[0][0] if dim else 0 for dim in self.ranges)

    def pieces(self) -> Iterator["Part"]:
        """The rectangles it is made of, each a view of this part's storage."""
        steps = []
        for dim in self.ranges:
            at, found = 0, []
            for first, length in dim:
                found.append((at, first, length))
                at += length
            steps.append(found)
        for corner in product(*steps):
            tensor = self.tensor
            for dim, (at, _, length) in enumerate(corner):
                tensor = tensor.narrow(dim, at, length)
            yield Part(tensor, self.shape, tuple(((first, length),) for _, first, length in corner))

    def inside(self, tensor: Tensor) -> Tensor:
        """The stretch of a whole tensor (or anything of `shape`) that a rectangle covers, as a view."""
        for dim, ((first, length),) in enumerate(self.ranges):
            tensor = tensor.narrow(dim, first, length)
        return tensor


def everything(shape: tuple[int, ...]) -> tuple[Ranges, ...]:
    """All of every dim."""
    return tuple(((0, n),) for n in shape)


def whole(tensor: Tensor) -> Part:
    """The part of a rank that holds everything."""
    return Part(tensor, tuple(tensor.shape), everything(tuple(tensor.shape)))


def within(ranges: Ranges, first: int, count: int) -> Ranges:
    """Of what is held, the rows `first` … first + count − 1, as they are in the whole.

    >>> within(((0, 4), (10, 4)), 2, 4)
    ((2, 2), (10, 2))
    """
    found, at = [], 0
    for start, length in ranges:
        low, high = max(first - at, 0), min(first + count - at, length)
        if low < high:
            found.append((start + low, high - low))
        at += length
    return tuple(found) or ((ranges[0][0] if ranges else 0, 0),)


def taken(whole: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """These ranges of one dim of a tensor, in storage of their own."""
    pieces = [whole.narrow(dim, first, length) for first, length in ranges]
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
