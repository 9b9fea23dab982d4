"""Random numbers for a rank that computes a sub-block of a tensor, such as some heads or a sequence shard.

Random numbers are indexed by the element of the full tensor, batch dim first (`randomness/keyed.py`). A rank with a
slice of the heads or features, or with a sequence shard, draws a smaller tensor than one device. It must draw the
numbers of its elements in the full tensor. The draw itself does not show the full shape. The sketch has the shape for
one sample, and the strategy that split the model gives this rank's ranges of each dim.

A sub-block consists of many contiguous parts of a stream. Starting a part costs as much as drawing about ten thousand
numbers. So long parts are drawn separately. Short parts are drawn together with the numbers between them, which are
then discarded.

A device draws each number separately. There a sub-block is a few boxes (`iter_boxes`), one per combination of ranges. A
box has a start and a few dims with strides.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple

import numpy as np

from plait.config.errors import PlaitError, Problem
from plait.tensors.rows import Ranges, Rows

Axis = tuple[int, Ranges]
"""(size of a dim of the full tensor, local ranges of it)."""
Rule = Callable[[str, int, int | None, int], Axis | None]
"""(place, dim, size of the full dim in the sketch, size of the local dim) -> local ranges of the dim, or None for all
of it.

It is called at every draw for every dim except the batch dim. It is also called for the batch dim if a sample has
several rows in it (batch and sequence in one dim). Both sizes are then rows of one sample. The size in the sketch is
None at a place that the sketch did not see (a branch taken for the first time). The returned full size may differ from
the sketch, because sequence lengths vary.
"""


def chain_rules(rules: Sequence[Rule]) -> Rule:
    """Combine rules: the result is the first one that is not None."""
    return lambda place, dim, whole, local: next(filter(None, (r(place, dim, whole, local) for r in rules)), None)


RESTART_COST = 2**14
"""Numbers that take about as long to draw as the start of a contiguous part."""


@dataclass(frozen=True)
class SubBlocks:
    """The sub-block of every random tensor on a rank. `shapes`: place -> shape drawn for one sample (`Sketch.drawn`)."""

    shapes: Mapping[str, tuple[int, ...]]
    rule: Rule

    def find_axes(self, place: str, dim: int | None, shape: Sequence[int], samples: int) -> list[Axis] | None:
        """Return the axes of the drawn tensor: samples, rows of one sample, other dims. None if no dim is split."""
        whole = self.shapes.get(place, ())
        known = whole if len(whole) == len(shape) else (None,) * len(shape)
        axes: list[Axis] = []
        if dim is None:
            order, sizes = list(range(len(shape))), list(shape)
        else:
            if not samples or shape[dim] % samples:
                return None
            axes.append((samples, ((0, samples),)))
            order = [dim, *(d for d in range(len(shape)) if d != dim)]
            sizes = [n // samples if d == dim else n for d, n in enumerate(shape)]
        cut = False
        for d in order:
            one = d == dim and sizes[d] == 1 and known[d] in (1, None)
            axis = None if one else self.rule(place, d, known[d], sizes[d])
            if axis is not None and sum(length for _, length in axis[1]) != sizes[d]:
                raise ValueError(f"{place}: the draw has {tuple(shape)}, but dim {d} has the local ranges {axis[1]} of {axis[0]}")
            cut = cut or axis is not None
            axes.append(axis or (sizes[d], ((0, sizes[d]),)))
        return axes if cut else None


@dataclass(frozen=True)
class LocalRowsRule:
    """Rule of a rank that has its part of `rows` in every dim that is split like it, in units or multiples.

    `Rows.from_sizes([2, 1])` of 3 heads also defines which 128 of 192 features a rank has. `split_dims` contains the (place,
    dim) that are split (`find_differing_dims` finds them). Then only the local size matters, and tensors may be longer
    or shorter than in the sketch. If it is None, a dim is split if local size : full size equals the rank's part of
    `rows` : `rows`. That is for models whose tensors always have the sketch's sizes.
    """

    rows: Rows
    rank: int
    split_dims: frozenset[tuple[str, int]] | None = None

    def __call__(self, place: str, dim: int, whole: int | None, local: int) -> Axis | None:
        """Return the local ranges of a dim. Raises J019 at a place that the sketch did not see, if only the size could
        decide."""
        part, rows = self.rows.sizes[self.rank], self.rows
        if self.split_dims is not None:
            if (place, dim) not in self.split_dims:
                return None
            scale, rest = divmod(local, part) if part else (1, local)
            if rest:
                raise ValueError(f"{place}: the draw has {local} rows in dim {dim}, which is not a multiple of the local {part}")
        else:
            if whole is None:
                what = f"{place.split('#')[0] or 'the model'} draws random numbers at a place where the sketch saw none"
                why = "its tensors are sharded, and their full size is unknown"
                raise PlaitError(Problem("J019", what, why=why, fix=("draw them in every forward pass", "tp=1 cp=1")))
            scale, rest = divmod(whole, rows.length)
            if rest or local == whole or local != part * scale:
                return None
        return rows.length * scale, tuple((first * scale, length * scale) for first, length in rows.ranks[self.rank])


def find_differing_dims(whole: Mapping[str, Sequence[int]], local: Mapping[str, Sequence[int]]) -> frozenset[tuple[str, int]]:
    """Return the (place, dim) whose sizes differ between the `drawn` of a model and of a rank's part of it."""
    both = ((place, shape, local[place]) for place, shape in whole.items() if place in local)
    return frozenset((place, d) for place, a, b in both for d, (m, n) in enumerate(zip(a, b)) if m != n)


def draw_sub_block(stream: Callable[[int, int], np.ndarray], start: int, axes: Sequence[Axis]) -> np.ndarray:
    """Draw a sub-block of a tensor as uint32. The tensor starts at number `start`; `stream(start, count)` draws
    numbers."""
    out = np.empty([sum(length for _, length in ranges) for _, ranges in axes], np.uint32)
    if out.size:
        _fill_sub_block(out, stream, start, axes)
    return out


def _fill_sub_block(out: np.ndarray, stream: Callable[[int, int], np.ndarray], start: int, axes: Sequence[Axis]) -> None:
    (_, ranges), inner = axes[0], axes[1:]
    sizes = [size for size, _ in inner]
    each, at = math.prod(sizes), 0
    apart = any(held != ((0, size),) for size, held in inner)
    for first, length in ranges:
        rows = max(1, RESTART_COST // each) if apart else max(length, 1)
        for row in range(0, length, rows):
            n, begin = min(rows, length - row), start + (first + row) * each
            if apart and each > RESTART_COST:
                _fill_sub_block(out[at], stream, begin, inner)
            else:
                out[at : at + n] = _take_ranges(stream(begin, n * each).reshape(n, *sizes), inner)
            at += n


def _take_ranges(drawn: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    """Return the local ranges of an array [rows, *axes]."""
    for axis, (size, ranges) in enumerate(axes, 1):
        if ranges != ((0, size),):
            drawn = np.take(drawn, np.concatenate([np.arange(f, f + n) for f, n in ranges]), axis)
    return drawn


class Box(NamedTuple):
    """Numbers of a stream at regular distances, with their positions in the memory of a tensor."""

    first: int
    """Position of the first element in the stream."""
    at: int
    """Index in memory of the element that is written first."""
    dims: tuple[tuple[int, int, int], ...]
    """(size, distance in the stream, distance in memory), outermost first. In the last dim, numbers are consecutive in
    the stream."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(size for size, _, _ in self.dims)

    def take_slice(self, dim: int, first: int, length: int) -> "Box":
        """Return the box with elements first … first + length − 1 of one dim."""
        _, apart, written = self.dims[dim]
        dims = (*self.dims[:dim], (length, apart, written), *self.dims[dim + 1 :])
        return Box(self.first + first * apart, self.at + first * written, dims)


def iter_boxes(start: int, axes: Sequence[Axis], strides: Sequence[int]) -> Iterator[Box]:
    """Iterate over the boxes of a sub-block of a tensor that starts at number `start` of the stream. `strides`: of each
    axis in memory."""
    sizes = [size for size, _ in axes]
    apart = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    starts = [(0, *accumulate(length for _, length in ranges)) for _, ranges in axes]
    choices = [list(zip(ranges, begin)) for (_, ranges), begin in zip(axes, starts)]
    for chosen in product(*choices):
        first, at, dims = start, 0, []
        for ((begin, length), written), distance, stride in zip(chosen, apart, strides):
            first, at = first + begin * distance, at + written * stride
            dims.append((length, distance, stride))
        if all(length for length, _, _ in dims):
            yield Box(first, at, _merge_dims(dims))


def split_box(box: Box, numbers: int, dims: int) -> Iterator[Box]:
    """Split a box into boxes with at most `numbers` elements and `dims` dims."""
    length, enough = box.dims[0][0], box.size <= numbers and len(box.dims) <= dims
    if enough:
        yield box
    elif len(box.dims) > dims or length == 1:
        for index in range(length):
            one = box.take_slice(0, index, 1)
            yield from split_box(Box(one.first, one.at, one.dims[1:]), numbers, dims)
    else:
        half = length // 2
        yield from split_box(box.take_slice(0, 0, half), numbers, dims)
        yield from split_box(box.take_slice(0, half, length - half), numbers, dims)


def _merge_dims(dims: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Merge dims where possible. In the last dim, numbers are consecutive in the stream."""
    found = [dims[-1] if dims else (1, 1, 1)]
    for size, apart, stride in reversed(dims[:-1]):
        inner, inner_apart, inner_stride = found[0]
        if apart == inner * inner_apart and stride == inner * inner_stride:
            found[0] = size * inner, inner_apart, inner_stride
        elif size > 1:
            found.insert(0, (size, apart, stride))
    return tuple(found)
