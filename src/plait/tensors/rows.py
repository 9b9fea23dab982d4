"""Which rows of a dim each rank of a group holds: in order or not, in one stretch or several, equally many or not.

Which part of a tensor a rank holds: what checkpoints, digests and `verify` need to know of a layout, and no more.

A part is, in every dim, some ranges of the whole tensor one after another. Every layout plait makes (copies, shards,
slices, stages) is a set of parts per rank; two ranks that hold the same ranges hold copies. Most parts are rectangles.
A slice of a fused weight is not: a rank's heads of query, key and value lie apart in the whole. `pieces` gives the
rectangles that any part is made of. Nothing here knows which strategy made them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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


@dataclass(frozen=True)
class Rows:
    """The ranges of a dim that each rank of a group holds. Together they are the dim, each row once."""

    ranks: tuple[Ranges, ...]

    @classmethod
    def of(cls, sizes: Sequence[int]) -> "Rows":
        """Rank after rank, each its number of rows (which may be zero)."""
        firsts = [sum(sizes[:rank]) for rank in range(len(sizes))]
        return cls(tuple(((first, size),) for first, size in zip(firsts, sizes)))

    @classmethod
    def even(cls, length: int, ranks: int) -> "Rows":
        """As equal as can be: sizes differ by at most one, the first ranks have the larger ones."""
        return cls(tuple((split(length, ranks, rank),) for rank in range(ranks)))

    @classmethod
    def chunks(cls, length: int, ranks: int) -> "Rows":
        """As `torch.chunk` and FSDP2 cut a dim."""
        return cls(tuple((chunk(length, ranks, rank),) for rank in range(ranks)))

    @classmethod
    def zigzag(cls, length: int, ranks: int) -> "Rows":
        """Of 2 · ranks stretches rank r has the r-th from the front and the r-th from the end: causal work is equal."""
        pieces = [ranges[0] for ranges in cls.even(length, 2 * ranks).ranks]
        return cls(tuple((pieces[rank], pieces[-1 - rank]) for rank in range(ranks)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each rank."""
        return tuple(sum(length for _, length in ranges) for ranges in self.ranks)

    @cached_property
    def length(self) -> int:
        """Rows of the whole."""
        return sum(self.sizes)

    def take(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        """The part of a rank, in one piece; a view where that is possible."""
        pieces = [whole.narrow(dim, first, length) for first, length in self.ranks[rank] if length]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [whole.narrow(dim, 0, 0)], dim)

    def sliced(self, first: int, end: int) -> "Rows":
        """Of the dim [first:end] of this one."""
        kept = [[(max(f, first), min(f + n, end)) for f, n in ranges] for ranges in self.ranks]
        return replace(self, ranks=tuple(tuple((a - first, b - a) for a, b in ranges if b > a) for ranges in kept))

    def held(self, rank: int, first: int, end: int) -> Ranges:
        """Where in the part of a rank the rows first … end − 1 of the whole are."""
        found, at = list[tuple[int, int]](), 0
        for f, n in self.ranks[rank]:
            a, b = max(f, first), min(f + n, end)
            found += [(at + a - f, b - a)] if b > a else []
            at += n
        return _joined(found)

    def merged(self, outer: int, inner: int) -> "Rows":
        """Of the one dim that [outer, this dim, inner] is as."""
        parts = (
            _joined([((o * self.length + f) * inner, n * inner) for o in range(outer) for f, n in ranges])
            for ranges in self.ranks
        )
        return replace(self, ranks=tuple(parts))

    def parted(self, outer: int, length: int, inner: int) -> "Rows | None":
        """Of the middle one of the dims [outer, length, inner] that this dim is as; None when the others are cut too."""
        first = self.sliced(0, length * inner)
        if any(f % inner or n % inner for ranges in first.ranks for f, n in ranges):
            return None
        found = replace(self, ranks=tuple(tuple((f // inner, n // inner) for f, n in ranges) for ranges in first.ranks))
        alike = found.length == length and found.merged(outer, inner) == self.merged(1, 1)
        return found if alike else None


class AndAll(Rows):
    """The rows of ranks, and one rank more that has all of them: a dim is followed through views as that of the others is."""

    @classmethod
    def beside(cls, rows: Rows) -> "AndAll":
        """The last rank has all."""
        return cls((*rows.ranks, ((0, rows.length),)))

    @cached_property
    def length(self) -> int:
        return self.sizes[-1]


def dense(part: Tensor) -> Tensor:
    """A slice in memory of its own, without gaps and with its dims in the same order, as a batch of its size is laid out.

    Code of models and losses may need that: `targets.view(-1)` raises for a slice of dim 1.
    """
    return part if part.layout is not torch.strided or part.is_contiguous() else part.clone()


def memory_order(t: Tensor) -> tuple[int, ...]:
    """The dims of a tensor from the outermost in memory to the innermost; empty if that is their order, or if elements overlap."""
    if t.layout is not torch.strided or t.is_contiguous() or 0 in t.stride():
        return ()
    order = tuple(sorted(range(t.dim()), key=lambda d: -t.stride(d)))
    return () if list(order) == sorted(order) else order


def split(size: int, parts: int, index: int) -> tuple[int, int]:
    """(first, count) of part `index` when `size` things are shared out as evenly as they go, larger parts first."""
    each, extra = divmod(size, parts)
    return index * each + min(index, extra), each + (index < extra)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """(first, count) of part `index` as `torch.chunk` and FSDP2 cut a dim: equal parts, the last ones short or empty."""
    each = -(-size // parts)
    first = min(index * each, size)
    return first, min(each, size - first)


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The same rows in the fewest ranges."""
    found: list[tuple[int, int]] = []
    for first, length in ranges:
        if found and sum(found[-1]) == first:
            found[-1] = (found[-1][0], found[-1][1] + length)
        elif length:
            found.append((first, length))
    return tuple(found)
