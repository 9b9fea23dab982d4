"""Random numbers for a rank that computes a sub-block of a tensor, such as some heads or a stretch of the sequence.

Random numbers are numbered by the element of the whole tensor, the batch dim first (`randomness/keyed.py`). A rank that
computes a slice of the heads or features, or a stretch of the sequence, draws a smaller tensor than one device would,
and must draw the numbers that its elements have in the whole one. Nothing at the draw tells how the whole looks: the
sketch says what shape it had on one sample, and whoever cut the model says, dim by dim, what this rank holds of it.

A sub-block of a stream is many stretches of it, and starting a stretch costs as much as drawing some ten thousand
numbers. Long stretches are drawn alone; of short ones, what lies between them is drawn too and left out.

A device draws number by number instead. It is told where: a sub-block is a few boxes (`boxes`), one for each combination
of ranges, and a box is a place to begin at and a few dims with their strides.
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
"""The size of a dim of the whole tensor, and the ranges of it that are held."""
Rule = Callable[[str, int, int | None, int], Axis | None]
"""(place, dim, size of the whole dim when sketched, size of the local dim) -> what is held of it; None: all of it.

Asked at every draw, for every dim but the batch dim; for the batch dim too when a sample has several rows in it (batch
and sequence in one dim), and then both sizes are rows of one sample. The size when sketched is None at a place that
the sketch did not see (a branch taken for the first time). The whole size returned may differ from the sketched one:
sequences may be longer or shorter from step to step."""


def first_of(rules: Sequence[Rule]) -> Rule:
    """A rule that asks several in turn, until one does not answer None."""
    return lambda place, dim, whole, local: next(filter(None, (r(place, dim, whole, local) for r in rules)), None)


CHUNK = 2**14
"""Numbers that take about as long to draw as starting a stretch."""


@dataclass(frozen=True)
class SubBlocks:
    """Which sub-block a rank holds of every drawn tensor. `shapes`: place -> shape drawn for one sample (`Sketch.drawn`)."""

    shapes: Mapping[str, tuple[int, ...]]
    rule: Rule

    def axes(self, place: str, dim: int | None, shape: Sequence[int], samples: int) -> list[Axis] | None:
        """The drawn tensor, batch dim first and split into samples and rows of one; None when nothing of it is cut."""
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
                raise ValueError(f"{place}: dim {d} of {tuple(shape)} is drawn, ranges {axis[1]} of {axis[0]} are held")
            cut = cut or axis is not None
            axes.append(axis or (sizes[d], ((0, sizes[d]),)))
        return axes if cut else None


@dataclass(frozen=True)
class HeldRows:
    """The rule of a rank that holds its part of `rows` in every dim that is cut like it, in units or in multiples.

    `Rows.of([2, 1])` of 3 heads also says which 128 of 192 features a rank holds. `at` says which (place, dim) are cut
    (`differing` finds them): then only the local size counts, and tensors may be longer or shorter than when sketched.
    None: every dim whose local size is to the rank's part of `rows` as its sketched size is to the whole of `rows`; for
    models whose tensors always have the sketched sizes.
    """

    rows: Rows
    rank: int
    at: frozenset[tuple[str, int]] | None = None

    def __call__(self, place: str, dim: int, whole: int | None, local: int) -> Axis | None:
        """What is held of a dim; J019 at a place that the sketch did not see, when there is only the size to go by."""
        part, rows = self.rows.sizes[self.rank], self.rows
        if self.at is not None:
            if (place, dim) not in self.at:
                return None
            scale, rest = divmod(local, part) if part else (1, local)
            if rest:
                raise ValueError(f"{place}: {local} rows of dim {dim} are drawn where {part}, or multiples, are held")
        else:
            if whole is None:
                what = f"{place.split('#')[0] or 'the model'} draws random numbers where the sketch saw none"
                why = "its tensors are cut over ranks, and how large they are in whole is not known"
                raise PlaitError(Problem("J019", what, why=why, fix=("draw them in every forward pass", "tp=1 cp=1")))
            scale, rest = divmod(whole, rows.length)
            if rest or local == whole or local != part * scale:
                return None
        return rows.length * scale, tuple((first * scale, length * scale) for first, length in rows.ranks[self.rank])


def differing(whole: Mapping[str, Sequence[int]], local: Mapping[str, Sequence[int]]) -> frozenset[tuple[str, int]]:
    """The (place, dim) whose sizes differ between two sketches' `drawn`: of a model, and of a rank's part of it."""
    both = ((place, shape, local[place]) for place, shape in whole.items() if place in local)
    return frozenset((place, d) for place, a, b in both for d, (m, n) in enumerate(zip(a, b)) if m != n)


def sub_block(stream: Callable[[int, int], np.ndarray], start: int, axes: Sequence[Axis]) -> np.ndarray:
    """The numbers of `stream(start, count)` for a sub-block of a tensor that begins at number `start` of it, as uint32."""
    out = np.empty([sum(length for _, length in ranges) for _, ranges in axes], np.uint32)
    if out.size:
        _fill(out, stream, start, axes)
    return out


def _fill(out: np.ndarray, stream: Callable[[int, int], np.ndarray], start: int, axes: Sequence[Axis]) -> None:
    (_, ranges), inner = axes[0], axes[1:]
    sizes = [size for size, _ in inner]
    each, at = math.prod(sizes), 0
    apart = any(held != ((0, size),) for size, held in inner)
    for first, length in ranges:
        rows = max(1, CHUNK // each) if apart else max(length, 1)
        for row in range(0, length, rows):
            n, begin = min(rows, length - row), start + (first + row) * each
            if apart and each > CHUNK:
                _fill(out[at], stream, begin, inner)
            else:
                out[at : at + n] = _held(stream(begin, n * each).reshape(n, *sizes), inner)
            at += n


def _held(drawn: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    """The held ranges of an array [rows, *axes]."""
    for axis, (size, ranges) in enumerate(axes, 1):
        if ranges != ((0, size),):
            drawn = np.take(drawn, np.concatenate([np.arange(f, f + n) for f, n in ranges]), axis)
    return drawn


class Box(NamedTuple):
    """Numbers of a stream at regular distances, and where in the memory of a tensor each of them goes."""

    first: int
    """The number of the stream that the first element is."""
    at: int
    """Which element of the tensor, counted in its memory, is written first."""
    dims: tuple[tuple[int, int, int], ...]
    """(size, distance in the stream, distance in memory), outermost first. In the last one the numbers are consecutive."""

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(size for size, _, _ in self.dims)

    def part(self, dim: int, first: int, length: int) -> "Box":
        """The stretch first … first + length − 1 of one of its dims."""
        _, apart, written = self.dims[dim]
        dims = (*self.dims[:dim], (length, apart, written), *self.dims[dim + 1 :])
        return Box(self.first + first * apart, self.at + first * written, dims)


def boxes(start: int, axes: Sequence[Axis], strides: Sequence[int]) -> Iterator[Box]:
    """The boxes of a sub-block of a tensor that begins at number `start` of the stream. `strides`: of each axis in memory."""
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
            yield Box(first, at, _joined(dims))


def pieces(box: Box, numbers: int, dims: int) -> Iterator[Box]:
    """A box in boxes of at most so many numbers and so many dims."""
    length, enough = box.dims[0][0], box.size <= numbers and len(box.dims) <= dims
    if enough:
        yield box
    elif len(box.dims) > dims or length == 1:
        for index in range(length):
            one = box.part(0, index, 1)
            yield from pieces(Box(one.first, one.at, one.dims[1:]), numbers, dims)
    else:
        half = length // 2
        yield from pieces(box.part(0, 0, half), numbers, dims)
        yield from pieces(box.part(0, half, length - half), numbers, dims)


def _joined(dims: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """The same elements in as few dims as possible; the last one has consecutive numbers."""
    found = [dims[-1] if dims else (1, 1, 1)]
    for size, apart, stride in reversed(dims[:-1]):
        inner, inner_apart, inner_stride = found[0]
        if apart == inner * inner_apart and stride == inner * inner_stride:
            found[0] = size * inner, inner_apart, inner_stride
        elif size > 1:
            found.insert(0, (size, apart, stride))
    return tuple(found)
