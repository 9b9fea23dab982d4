"""Ranges of a dim that each rank of a group holds, and the part of a tensor that a rank holds.

Checkpoints, digests and `verify` need no more of a layout than parts. A part is, in every dim, a sequence of ranges of the full tensor.
Every layout of plait (replicas, shards, slices, stages) is a set of parts per rank; ranks with equal ranges are replicas. Most parts are
rectangles. A slice of a fused weight is not: a rank's heads of query, key and value are separate ranges. `iter_rects` gives the rectangles
of any part. Nothing here depends on the strategy that made the parts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]
"""((first, length), …) along one dim of the full tensor, in the order in which a rank holds them."""


@dataclass(frozen=True)
class Part:
    """This rank's ranges of a tensor of `shape`, per dim; `tensor` is the storage itself, not a copy."""

    tensor: Tensor
    shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]

    @property
    def is_full(self) -> bool:
        """Whether this rank holds all of the tensor."""
        return self.ranges == full_ranges(self.shape)

    @property
    def start(self) -> tuple[int, ...]:
        """Coordinates of its first element in the full tensor."""
        return tuple(dim[0][0] if dim else 0 for dim in self.ranges)

    def iter_rects(self) -> Iterator["Part"]:
        """Yield its rectangles, each a view of this part's storage."""
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

    def slice_tensor(self, tensor: Tensor) -> Tensor:
        """Return the view of a full tensor (or anything of `shape`) that a rectangular part covers."""
        for dim, ((first, length),) in enumerate(self.ranges):
            tensor = tensor.narrow(dim, first, length)
        return tensor


def full_ranges(shape: tuple[int, ...]) -> tuple[Ranges, ...]:
    """Return the full range of every dim."""
    return tuple(((0, n),) for n in shape)


def make_full_part(tensor: Tensor) -> Part:
    """Return the part of a rank that holds the full tensor."""
    return Part(tensor, tuple(tensor.shape), full_ranges(tuple(tensor.shape)))


def slice_ranges(ranges: Ranges, first: int, count: int) -> Ranges:
    """Return rows `first` … first + count − 1 of a part as ranges of the full tensor.

    >>> slice_ranges(((0, 4), (10, 4)), 2, 4)
    ((2, 2), (10, 2))

    """
    found, at = [], 0
    for start, length in ranges:
        low, high = max(first - at, 0), min(first + count - at, length)
        if low < high:
            found.append((start + low, high - low))
        at += length
    return tuple(found) or ((ranges[0][0] if ranges else 0, 0),)


def copy_ranges(whole: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """Return these ranges of one dim of a tensor, in new storage."""
    pieces = [whole.narrow(dim, first, length) for first, length in ranges]
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Rows:
    """The ranges of a dim that each rank of a group holds. Together they cover the dim, each row once."""

    ranks: tuple[Ranges, ...]

    @classmethod
    def from_sizes(cls, sizes: Sequence[int]) -> "Rows":
        """Assign consecutive rows to ranks, by their numbers of rows (which may be zero)."""
        firsts = [sum(sizes[:rank]) for rank in range(len(sizes))]
        return cls(tuple(((first, size),) for first, size in zip(firsts, sizes)))

    @classmethod
    def make_even(cls, length: int, ranks: int) -> "Rows":
        """Split rows as equally as possible: sizes differ by at most one, larger ones first."""
        return cls(tuple((split_evenly(length, ranks, rank),) for rank in range(ranks)))

    @classmethod
    def make_chunks(cls, length: int, ranks: int) -> "Rows":
        """Split rows as `torch.chunk` and FSDP2 do."""
        return cls(tuple((chunk_range(length, ranks, rank),) for rank in range(ranks)))

    @classmethod
    def make_zigzag(cls, length: int, ranks: int) -> "Rows":
        """Give rank r block r from the front and block r from the end of 2 · ranks blocks, which balances causal attention."""
        pieces = [ranges[0] for ranges in cls.make_even(length, 2 * ranks).ranks]
        return cls(tuple((pieces[rank], pieces[-1 - rank]) for rank in range(ranks)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each rank."""
        return tuple(sum(length for _, length in ranges) for ranges in self.ranks)

    @cached_property
    def length(self) -> int:
        """Rows of the full dim."""
        return sum(self.sizes)

    def take_part(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        """Return the part of a rank as one tensor; a view if possible."""
        pieces = [whole.narrow(dim, first, length) for first, length in self.ranks[rank] if length]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [whole.narrow(dim, 0, 0)], dim)

    def slice_range(self, first: int, end: int) -> "Rows":
        """Return the rows of the slice [first:end] of this dim."""
        kept = [[(max(f, first), min(f + n, end)) for f, n in ranges] for ranges in self.ranks]
        return replace(self, ranks=tuple(tuple((a - first, b - a) for a, b in ranges if b > a) for ranges in kept))

    def locate(self, rank: int, first: int, end: int) -> Ranges:
        """Return the ranges of rows first … end − 1 within the part of a rank."""
        found, at = list[tuple[int, int]](), 0
        for f, n in self.ranks[rank]:
            a, b = max(f, first), min(f + n, end)
            found += [(at + a - f, b - a)] if b > a else []
            at += n
        return _join_ranges(found)

    def merge_dims(self, outer: int, inner: int) -> "Rows":
        """Return the rows of the dim that merges [outer, this dim, inner]."""
        parts = (
            _join_ranges([((o * self.length + f) * inner, n * inner) for o in range(outer) for f, n in ranges])
            for ranges in self.ranks
        )
        return replace(self, ranks=tuple(parts))

    def split_dim(self, outer: int, length: int, inner: int) -> "Rows | None":
        """Return the rows of the middle dim if this dim is split into [outer, length, inner]; None if another of them is sharded too."""
        first = self.slice_range(0, length * inner)
        if any(f % inner or n % inner for ranges in first.ranks for f, n in ranges):
            return None
        found = replace(self, ranks=tuple(tuple((f // inner, n // inner) for f, n in ranges) for ranges in first.ranks))
        alike = found.length == length and found.merge_dims(outer, inner) == self.merge_dims(1, 1)
        return found if alike else None


class RowsPlusFull(Rows):
    """The rows of ranks, and of one more rank that has all rows. Views track the dim as without that rank."""

    @classmethod
    def append_full(cls, rows: Rows) -> "RowsPlusFull":
        """Append a rank that has all rows."""
        return cls((*rows.ranks, ((0, rows.length),)))

    @cached_property
    def length(self) -> int:
        return self.sizes[-1]


def make_dense(part: Tensor) -> Tensor:
    """Return a slice in new memory without gaps, with the memory layout of a batch of its size.

    Models and losses may depend on it: `targets.view(-1)` raises for a slice of dim 1.

    """
    return part if part.layout is not torch.strided or part.is_contiguous() else part.clone()


def memory_order(t: Tensor) -> tuple[int, ...]:
    """Return the dims from the outermost in memory to the innermost; empty if that is their order, or if elements overlap."""
    if t.layout is not torch.strided or t.is_contiguous() or 0 in t.stride():
        return ()
    order = tuple(sorted(range(t.dim()), key=lambda d: -t.stride(d)))
    return () if list(order) == sorted(order) else order


def split_evenly(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return (first, count) of part `index` if `size` items are split as evenly as possible, larger parts first."""
    each, extra = divmod(size, parts)
    return index * each + min(index, extra), each + (index < extra)


def chunk_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return (first, count) of part `index` as `torch.chunk` and FSDP2 split a dim: equal parts, the last ones short or empty."""
    each = -(-size // parts)
    first = min(index * each, size)
    return first, min(each, size - first)


def _join_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the same rows in the fewest ranges."""
    found: list[tuple[int, int]] = []
    for first, length in ranges:
        if found and sum(found[-1]) == first:
            found[-1] = (found[-1][0], found[-1][1] + length)
        elif length:
            found.append((first, length))
    return tuple(found)
