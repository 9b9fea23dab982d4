"""Rectangles of tensors: who holds which, who writes which, and whether they make the whole. Pure arithmetic.

A checkpoint must work for every layout, so it knows of none: each rank says which rectangle of which tensor it holds,
and that list decides everything.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from plait.config.errors import PlaitError, Problem

CUT = 32 << 20
"""Bytes of the largest piece. A larger rectangle is cut along dim 0, so that several holders can share the writing and
a reader that needs a part of it need not hash all of it."""

Rect = tuple[tuple[int, ...], tuple[int, ...]]
"""(start, size)."""
MOST_PAIRS = 1 << 18
"""Pairs of pieces of one tensor that are compared at most. Those in rows need no comparing, and plans make rows."""


@dataclass(frozen=True)
class HeldChunk:
    """A rectangle of the tensor `name` of `shape`; `itemsize` is bytes per element, `dtype` its safetensors name."""

    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def rect(self) -> Rect:
        return self.start, self.size

    @property
    def bytes(self) -> int:
        return prod(self.size) * self.itemsize


def overlap(a: Rect, b: Rect) -> Rect | None:
    """The rectangle two rectangles share, or None. That of two single elements (no dims) is that element."""
    start = tuple(max(x, y) for x, y in zip(a[0], b[0]))
    end = tuple(min(x + n, y + m) for x, n, y, m in zip(*a, *b))
    size = tuple(e - s for s, e in zip(start, end))
    return (start, size) if all(n > 0 for n in size) else None


def without(a: Rect, b: Rect) -> list[Rect]:
    """`a` without what it shares with `b`, as disjoint rectangles."""
    shared = overlap(a, b)
    if shared is None:
        return [a]
    found: list[Rect] = []
    start, size = list(a[0]), list(a[1])
    for dim, (first, length) in enumerate(zip(*shared)):
        before, after = first - start[dim], start[dim] + size[dim] - first - length
        if before:
            found.append((tuple(start), (*size[:dim], before, *size[dim + 1 :])))
        if after:
            found.append(((*start[:dim], first + length, *start[dim + 1 :]), (*size[:dim], after, *size[dim + 1 :])))
        start[dim], size[dim] = first, length
    return found


def wrong_tiling(shape: Sequence[int], rects: Iterable[Rect]) -> str | None:
    """None when the rectangles cover the shape exactly once, else what is wrong."""
    ordered = sorted(rects)
    for start, size in ordered:
        if any(s < 0 or n <= 0 or s + n > whole for s, n, whole in zip(start, size, shape)):
            return f"a piece at {list(start)} of size {list(size)} leaves the shape {list(shape)}"
    wrong = _overlapping(ordered, 0, len(shape))
    covered = sum(prod(size) for _, size in ordered)
    return wrong or (None if covered == prod(shape) else f"its pieces cover {covered} of {prod(shape)} elements")


def _overlapping(ordered: list[Rect], dim: int, dims: int) -> str | None:
    """What overlaps. Pieces that plans make stand in rows: each row is looked at by itself, from dim to dim."""
    if dim == dims:
        return None if len(ordered) < 2 else f"two pieces overlap at {list(ordered[1][0])}"
    rows: dict[tuple[int, int], list[Rect]] = {}
    for rect in ordered:
        rows.setdefault((rect[0][dim], rect[1][dim]), []).append(rect)
    bounds = sorted(rows)
    if all(start + size <= after for (start, size), (after, _) in pairwise(bounds)):
        return next((wrong for row in rows.values() if (wrong := _overlapping(row, dim + 1, dims))), None)
    active: list[Rect] = []
    pairs = 0
    for rect in sorted(ordered, key=lambda r: r[0][dim]):
        active = [other for other in active if other[0][dim] + other[1][dim] > rect[0][dim]]
        pairs += len(active)
        if pairs > MOST_PAIRS:
            return f"it has {len(ordered)} pieces, too many of them side by side"
        if any(overlap(rect, other) for other in active):
            return f"two pieces overlap at {list(rect[0])}"
        active.append(rect)
    return None


def assign(held: list[list[HeldChunk]]) -> list[list[HeldChunk]]:
    """What each rank writes, from what each rank holds: every element once, by a holder, balanced by bytes.

    Every rank computes the same answer from the same lists. Copies are shared out among their holders. K005 when the
    ranks disagree about a tensor, or nobody holds a stretch of it.
    """
    holders: dict[str, dict[HeldChunk, list[int]]] = {}
    for rank, mine in enumerate(held):
        for part in mine:
            holders.setdefault(part.name, {}).setdefault(part, []).append(rank)
    todo: list[tuple[HeldChunk, list[int]]] = []
    for name, parts in holders.items():
        if len({(part.dtype, part.shape) for part in parts}) > 1:
            raise PlaitError(Problem("K005", f"ranks disagree about the shape or number format of {name}"))
        done: list[Rect] = []
        for part, ranks in parts.items():
            left = [part.rect] if part.bytes else []
            for rect in done:
                left = [rest for one in left for rest in without(one, rect)]
            done += left
            todo += [(piece, ranks) for rect in left for piece in _cut(replace(part, start=rect[0], size=rect[1]))]
        wrong = wrong_tiling(next(iter(parts)).shape, done)
        if wrong:
            raise PlaitError(Problem("K005", f"the ranks together do not hold {name}", why=wrong))
    load = [0] * len(held)
    result: list[list[HeldChunk]] = [[] for _ in held]
    for piece, ranks in sorted(todo, key=lambda t: (-t[0].bytes, t[0].name, t[0].start)):
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        load[writer] += piece.bytes
        result[writer].append(piece)
    return result


def _cut(piece: HeldChunk) -> list[HeldChunk]:
    if piece.bytes <= CUT or not piece.size:
        return [piece]
    rows = piece.size[0]
    each = max(1, CUT // (piece.bytes // rows))
    return [
        replace(piece, start=(piece.start[0] + i, *piece.start[1:]), size=(min(each, rows - i), *piece.size[1:]))
        for i in range(0, rows, each)
    ]
