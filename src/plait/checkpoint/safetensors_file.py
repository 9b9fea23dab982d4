"""How tensors lie in files: which rank writes which rectangle of a tensor, and a file of them, written and read.

[Note: Rectangles]
Rectangles of tensors: who holds which, who writes which, and whether they make the whole. Pure arithmetic.

A checkpoint must work for every layout, so it knows of none: each rank says which rectangle of which tensor it holds,
and that list decides everything.

[Note: A file]
One safetensors file: written as a stream with a digest of each tensor, read by byte ranges, believed tensor by tensor.

The format is public: eight bytes of header length, a JSON header, the tensors one after another. Our own few lines write
and read it, because a digest of each tensor must be taken while it streams and read back without the rest of the file.
"""

import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct, convert
from torch import Tensor

from plait.config.errors import PlaitError, Problem
from plait.config.files import loads, open_plain

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
    rest: list[Rect] = []
    start, size = list(a[0]), list(a[1])
    for dim, (first, length) in enumerate(zip(*shared)):
        before, after = first - start[dim], start[dim] + size[dim] - first - length
        if before:
            rest.append((tuple(start), (*size[:dim], before, *size[dim + 1 :])))
        if after:
            rest.append(((*start[:dim], first + length, *start[dim + 1 :]), (*size[:dim], after, *size[dim + 1 :])))
        start[dim], size[dim] = first, length
    return rest


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


DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Number formats a file can hold, by their names in it."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK = 4 << 20
LONGEST_HEADER = 100 << 20
Format = Annotated[str, Meta(pattern=rf"\A({'|'.join(DTYPES)})\Z")]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Sizes = Annotated[tuple[Count, ...], Meta(max_length=64)]
"""Sizes of a tensor, or a place in it."""
FileName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors\Z")]
"""Names of files that do not lead out of their folder."""


UNREADABLE = (ValueError, TypeError, ArithmeticError, LookupError, RecursionError, MemoryError)
"""What reading JSON that somebody made up can raise."""


class Damaged(Exception):
    """What is wrong with a file. Whoever knows the checkpoint makes a K002 of it."""

    def __init__(self, file: str, why: str):
        super().__init__(why)
        self.file, self.why = file, why


class Cancelled(Exception):
    """Somebody no longer wants what is being written."""


@dataclass(frozen=True)
class Written:
    """What a file came to: its size, the digest of its header, and that of each tensor by key."""

    bytes: int
    header: str
    tensors: dict[str, str]


Spec = tuple[torch.dtype, tuple[int, ...]]
"""What the header says of a tensor."""


def write(
    path: Path, specs: Mapping[str, Spec], get: Callable[[str], Tensor], cancelled: Callable[[], bool] = lambda: False
) -> Written:
    """Write contiguous CPU tensors, got one at a time by key, and sync them to the disk. OSError when it cannot.

    `cancelled` is asked every few MiB.
    """
    ordered = sorted(specs, key=lambda key: (-specs[key][0].itemsize, key))  # keeps all of them aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in ordered:
        dtype, shape = specs[key]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    digests = {}
    with open(path, "xb", buffering=0) as file:
        _write_all(file, head)
        for key in ordered:
            digest = hashlib.sha256()
            raw = memoryview(get(key).reshape(-1).view(torch.uint8).numpy().data)
            for at in range(0, len(raw), CHUNK):
                if cancelled():
                    raise Cancelled
                digest.update(raw[at : at + CHUNK])
                _write_all(file, raw[at : at + CHUNK])
            digests[key] = digest.hexdigest()
        os.fsync(file.fileno())
    return Written(len(head) + end, hashlib.sha256(head).hexdigest(), digests)


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while len(view):
        view = view[file.write(view) :]


class Stored(Struct, frozen=True):
    """A tensor in a file: its bytes are those between the offsets."""

    dtype: Format
    shape: Sizes
    data_offsets: tuple[Count, Count]

    def __post_init__(self) -> None:
        begin, end = self.data_offsets
        if end - begin != math.prod(self.shape) * DTYPES[self.dtype].itemsize:
            raise ValueError(f"bytes {begin} to {end} are no {self.dtype} of shape {list(self.shape)}")


class ShardFile:
    """A safetensors file opened for reading. Nothing in it is trusted: Damaged says what is wrong.

    `bytes` and `header` are what a manifest says of it; without them the file must only be consistent in itself.
    """

    def __init__(self, path: Path, bytes: int | None = None, header: str | None = None):
        self.name = path.name
        try:
            with open_plain(path, follow=False) as file:
                size = os.fstat(file.fileno()).st_size
                if bytes is not None and size != bytes:
                    raise Damaged(self.name, f"{size} bytes, the manifest says {bytes}")
                if size < 8:
                    raise Damaged(self.name, f"{size} bytes are no safetensors file")
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise Damaged(self.name, error.strerror or str(error)) from None
        length = int.from_bytes(self.map[:8], "little")
        if length > min(size - 8, LONGEST_HEADER):
            raise Damaged(self.name, f"its header would be {length} bytes long")
        self.body = 8 + length
        if header is not None and hashlib.sha256(self.map[: self.body]).hexdigest() != header:
            raise Damaged(self.name, "its header is not the one that was saved (SHA-256 differs)")
        self.tensors = self._parse(self.map[8 : self.body], size - self.body)

    def _parse(self, text: bytes, size: int) -> dict[str, Stored]:
        try:
            content = loads(text)
            if isinstance(content, dict):
                content.pop("__metadata__", None)
            tensors = convert(content, dict[str, Stored])
        except UNREADABLE as error:
            raise Damaged(self.name, f"its header cannot be read: {str(error)[:200]}") from None
        at = 0
        for begin, end in sorted(stored.data_offsets for stored in tensors.values()):
            if begin != at:
                raise Damaged(self.name, f"its tensors overlap or leave a gap at byte {at}")
            at = end
        if at != size:
            raise Damaged(self.name, f"its tensors take {at} bytes, the file has {size}")
        return tensors

    def raw(self, stored: Stored) -> memoryview:
        """The bytes of a tensor, without a copy."""
        begin, end = stored.data_offsets
        return memoryview(self.map)[self.body + begin : self.body + end]

    def sha256(self, key: str) -> str:
        """The digest of a tensor's bytes."""
        return hashlib.sha256(self.raw(self.tensors[key])).hexdigest()

    def tensor(self, key: str) -> Tensor:
        """The tensor, as a view of the file where it is aligned."""
        stored = self.tensors[key]
        dtype = DTYPES[stored.dtype]
        begin, end = stored.data_offsets
        if begin == end:
            return torch.empty(stored.shape, dtype=dtype)
        at = self.body + begin
        raw = torch.frombuffer(self.map, dtype=torch.uint8, count=end - begin, offset=at)
        return (raw.clone() if at % dtype.itemsize else raw).view(dtype).reshape(stored.shape)
