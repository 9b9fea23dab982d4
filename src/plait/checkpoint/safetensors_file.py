"""Tensors in files: assignment of rectangles to ranks, and one safetensors file, written and read.

[Note: Rectangles]
A checkpoint must work for every layout, so it depends on none. Each rank lists the rectangles that it holds. The assignment of writers and
the check for completeness use these lists only.

[Note: A file]
One safetensors file is written as a stream with a digest of each tensor, read by byte ranges, and verified tensor by tensor.
The format is public: eight bytes of header length, a JSON header, the tensors in sequence. plait has its own reader and writer, because
a digest of each tensor must be computed while it streams and checked without reading the rest of the file.
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
from plait.config.files import open_plain_file, parse_strict_json

MAX_CHUNK_BYTES = 32 << 20
"""Maximum bytes of a piece. A larger rectangle is split along dim 0, so that replicas share the writing and a partial read hashes
less."""

Rect = tuple[tuple[int, ...], tuple[int, ...]]
"""(start, size)."""
MOST_PAIRS = 1 << 18
"""Maximum number of compared pairs of one tensor's pieces. Pieces in rows, as plans make them, need no comparison."""


@dataclass(frozen=True)
class LocalChunk:
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
    def num_bytes(self) -> int:
        return prod(self.size) * self.itemsize


def intersect_rects(a: Rect, b: Rect) -> Rect | None:
    """Return the intersection of two rectangles, or None. Two scalars (no dims) intersect."""
    start = tuple(max(x, y) for x, y in zip(a[0], b[0]))
    end = tuple(min(x + n, y + m) for x, n, y, m in zip(*a, *b))
    size = tuple(e - s for s, e in zip(start, end))
    return (start, size) if all(n > 0 for n in size) else None


def subtract_rect(a: Rect, b: Rect) -> list[Rect]:
    """Return `a` without its intersection with `b`, as disjoint rectangles."""
    shared = intersect_rects(a, b)
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


def find_tiling_error(shape: Sequence[int], rects: Iterable[Rect]) -> str | None:
    """Return None if the rectangles cover the shape exactly once, else the error."""
    ordered = sorted(rects)
    for start, size in ordered:
        if any(s < 0 or n <= 0 or s + n > whole for s, n, whole in zip(start, size, shape)):
            return f"a piece at {list(start)} of size {list(size)} leaves the shape {list(shape)}"
    wrong = _find_overlap(ordered, 0, len(shape))
    covered = sum(prod(size) for _, size in ordered)
    return wrong or (None if covered == prod(shape) else f"its pieces cover {covered} of {prod(shape)} elements")


def _find_overlap(ordered: list[Rect], dim: int, dims: int) -> str | None:
    """Return an overlap of two rectangles. Pieces in rows are compared per row, from dim to dim."""
    if dim == dims:
        return None if len(ordered) < 2 else f"two pieces overlap at {list(ordered[1][0])}"
    rows: dict[tuple[int, int], list[Rect]] = {}
    for rect in ordered:
        rows.setdefault((rect[0][dim], rect[1][dim]), []).append(rect)
    bounds = sorted(rows)
    if all(start + size <= after for (start, size), (after, _) in pairwise(bounds)):
        return next((wrong for row in rows.values() if (wrong := _find_overlap(row, dim + 1, dims))), None)
    active: list[Rect] = []
    pairs = 0
    for rect in sorted(ordered, key=lambda r: r[0][dim]):
        active = [other for other in active if other[0][dim] + other[1][dim] > rect[0][dim]]
        pairs += len(active)
        if pairs > MOST_PAIRS:
            return f"it has {len(ordered)} pieces that are not in rows, too many to check for overlaps"
        if any(intersect_rects(rect, other) for other in active):
            return f"two pieces overlap at {list(rect[0])}"
        active.append(rect)
    return None


def assign_writers(held: list[list[LocalChunk]]) -> list[list[LocalChunk]]:
    """Assign the chunks to write to ranks: every element once, by a rank that has it, balanced by bytes.

    Every rank computes the same result from the same lists. Replicas divide the writing. K005 if ranks disagree about a
    tensor, or if no rank has some range of it.

    """
    holders: dict[str, dict[LocalChunk, list[int]]] = {}
    for rank, mine in enumerate(held):
        for part in mine:
            holders.setdefault(part.name, {}).setdefault(part, []).append(rank)
    todo: list[tuple[LocalChunk, list[int]]] = []
    for name, parts in holders.items():
        if len({(part.dtype, part.shape) for part in parts}) > 1:
            raise PlaitError(Problem("K005", f"ranks disagree about the shape or dtype of {name}"))
        done: list[Rect] = []
        for part, ranks in parts.items():
            left = [part.rect] if part.num_bytes else []
            for rect in done:
                left = [rest for one in left for rest in subtract_rect(one, rect)]
            done += left
            todo += [(piece, ranks) for rect in left for piece in _split_chunk(replace(part, start=rect[0], size=rect[1]))]
        wrong = find_tiling_error(next(iter(parts)).shape, done)
        if wrong:
            raise PlaitError(Problem("K005", f"no rank has some part of {name}", why=wrong))
    load = [0] * len(held)
    result: list[list[LocalChunk]] = [[] for _ in held]
    for piece, ranks in sorted(todo, key=lambda t: (-t[0].num_bytes, t[0].name, t[0].start)):
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        load[writer] += piece.num_bytes
        result[writer].append(piece)
    return result


def _split_chunk(piece: LocalChunk) -> list[LocalChunk]:
    if piece.num_bytes <= MAX_CHUNK_BYTES or not piece.size:
        return [piece]
    rows = piece.size[0]
    each = max(1, MAX_CHUNK_BYTES // (piece.num_bytes // rows))
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
"""Dtypes that a file can hold, by their names in it."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
HASH_CHUNK = 4 << 20
MAX_HEADER_BYTES = 100 << 20
Format = Annotated[str, Meta(pattern=rf"\A({'|'.join(DTYPES)})\Z")]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Sizes = Annotated[tuple[Count, ...], Meta(max_length=64)]
"""Sizes of a tensor, or coordinates in it."""
FileName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors\Z")]
"""File names that stay within their folder."""


PARSE_ERRORS = (ValueError, TypeError, ArithmeticError, LookupError, RecursionError, MemoryError)
"""Exceptions that parsing untrusted JSON can raise."""


class DamagedFileError(Exception):
    """An invalid file and the reason. The caller converts it to K002."""

    def __init__(self, file: str, why: str):
        super().__init__(why)
        self.file, self.why = file, why


class WriteCancelled(Exception):
    """The write was cancelled."""


@dataclass(frozen=True)
class WrittenFile:
    """A finished file: its size, the digest of its header, and the digest of each tensor by key."""

    num_bytes: int
    header: str
    tensors: dict[str, str]


Spec = tuple[torch.dtype, tuple[int, ...]]
"""(dtype, shape) in the header."""


def write_safetensors(
    path: Path, specs: Mapping[str, Spec], get: Callable[[str], Tensor], cancelled: Callable[[], bool] = lambda: False
) -> WrittenFile:
    """Write contiguous CPU tensors, fetched one at a time by key, and sync them to disk. OSError on failure.

    `cancelled` is called every few MiB.

    """
    ordered = sorted(specs, key=lambda key: (-specs[key][0].itemsize, key))  # keeps all tensors aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in ordered:
        dtype, shape = specs[key]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    digests = {}
    with open(path, "xb", buffering=0) as file:
        _write_all(file, head)
        for key in ordered:
            digest = hashlib.sha256()
            raw = memoryview(get(key).reshape(-1).view(torch.uint8).numpy().data)
            for at in range(0, len(raw), HASH_CHUNK):
                if cancelled():
                    raise WriteCancelled
                digest.update(raw[at : at + HASH_CHUNK])
                _write_all(file, raw[at : at + HASH_CHUNK])
            digests[key] = digest.hexdigest()
        os.fsync(file.fileno())
    return WrittenFile(len(head) + end, hashlib.sha256(head).hexdigest(), digests)


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while len(view):
        view = view[file.write(view) :]


class StoredTensor(Struct, frozen=True):
    """A tensor in a file: its bytes are those between the offsets."""

    dtype: Format
    shape: Sizes
    data_offsets: tuple[Count, Count]

    def __post_init__(self) -> None:
        begin, end = self.data_offsets
        if end - begin != math.prod(self.shape) * DTYPES[self.dtype].itemsize:
            raise ValueError(f"bytes {begin} to {end} are no {self.dtype} of shape {list(self.shape)}")


class ShardFile:
    """A safetensors file opened for reading. All of its content is checked; DamagedFileError if it is invalid.

    `bytes` and `header`: size and header digest from a manifest; without them only internal consistency is checked.

    """

    def __init__(self, path: Path, bytes: int | None = None, header: str | None = None):
        self.name = path.name
        try:
            with open_plain_file(path, follow=False) as file:
                size = os.fstat(file.fileno()).st_size
                if bytes is not None and size != bytes:
                    raise DamagedFileError(self.name, f"{size} bytes, the manifest says {bytes}")
                if size < 8:
                    raise DamagedFileError(self.name, f"{size} bytes are no safetensors file")
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise DamagedFileError(self.name, error.strerror or str(error)) from None
        length = int.from_bytes(self.map[:8], "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise DamagedFileError(self.name, f"its header would be {length} bytes long")
        self.body = 8 + length
        if header is not None and hashlib.sha256(self.map[: self.body]).hexdigest() != header:
            raise DamagedFileError(self.name, "its header differs from the saved one (SHA-256)")
        self.tensors = self._parse(self.map[8 : self.body], size - self.body)

    def _parse(self, text: bytes, size: int) -> dict[str, StoredTensor]:
        try:
            content = parse_strict_json(text)
            if isinstance(content, dict):
                content.pop("__metadata__", None)
            tensors = convert(content, dict[str, StoredTensor])
        except PARSE_ERRORS as error:
            raise DamagedFileError(self.name, f"its header cannot be read: {str(error)[:200]}") from None
        at = 0
        for begin, end in sorted(stored.data_offsets for stored in tensors.values()):
            if begin != at:
                raise DamagedFileError(self.name, f"its tensors overlap or leave a gap at byte {at}")
            at = end
        if at != size:
            raise DamagedFileError(self.name, f"its tensors take {at} bytes, the file has {size}")
        return tensors

    def read_bytes(self, stored: StoredTensor) -> memoryview:
        """Return the bytes of a tensor, without a copy."""
        begin, end = stored.data_offsets
        return memoryview(self.map)[self.body + begin : self.body + end]

    def hash_tensor(self, key: str) -> str:
        """Return the SHA-256 of a tensor's bytes."""
        return hashlib.sha256(self.read_bytes(self.tensors[key])).hexdigest()

    def read_tensor(self, key: str) -> Tensor:
        """Return the tensor, as a view of the file if it is aligned."""
        stored = self.tensors[key]
        dtype = DTYPES[stored.dtype]
        begin, end = stored.data_offsets
        if begin == end:
            return torch.empty(stored.shape, dtype=dtype)
        at = self.body + begin
        raw = torch.frombuffer(self.map, dtype=torch.uint8, count=end - begin, offset=at)
        return (raw.clone() if at % dtype.itemsize else raw).view(dtype).reshape(stored.shape)
