"""The manifest of a checkpoint: what is inside and where, sealed by a digest over its own bytes.

Reading trusts nothing: a manifest whose seal was forged must still describe tensors completely, once, inside its own
directory, or it is refused. `Damaged` says what is wrong with it.
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct, convert, field, structs

from plait.checkpoint.safetensors_file import (
    DTYPES,
    UNREADABLE,
    Count,
    Damaged,
    FileName,
    Format,
    Rect,
    Sizes,
    wrong_tiling,
)
from plait.config.errors import PlaitError, Problem
from plait.config.files import loads, read_plain

FORMAT = 2
KINDS = ("model", "optimizer", "ema", "eval", "groups", "compress", "carried")
"""What tensors are of: their names begin so, and files are named so."""
MANIFEST = "manifest.json"
EVAL = "eval/"
"""How the names of weights begin that the optimizer has in eval mode (`model/optimizers.py`)."""
DEPTH = 10
"""How deep the values may be nested that callbacks keep."""
CARRIED_DEPTH = 50
"""The same of what ranks carry from step to step."""
_BEFORE, _AFTER = b'{"digest": "', b'",\n'
_LARGEST = 1 << 63
LONGEST = 256 << 20
"""Bytes of the largest manifest that is read."""
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Line = str
"""A line of text, which a terminal can be shown: `_lines` checks it."""
Samples = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 40)]], Meta(min_length=1)]
Seconds = Annotated[float, Meta(ge=0, le=sys.float_info.max)]


class StoredChunk(Struct, frozen=True):
    """A rectangle of a tensor: the tensor `key` in `file`. `sha256` is of its bytes (None: a foreign file has none)."""

    file: str
    key: str
    start: Sizes
    size: Sizes
    sha256: Digest | None

    @property
    def rect(self) -> Rect:
        return self.start, self.size


class Entry(Struct, frozen=True):
    """A tensor: its number format (by its safetensors name), whole shape, and the pieces that make it up."""

    dtype: Format
    shape: Sizes
    pieces: tuple[StoredChunk, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class ListedFile(Struct, frozen=True):
    """A file of the checkpoint: its size, and the digest of its header."""

    bytes: Count
    header: Digest


class Base(Struct, frozen=True):
    """Where frozen parameters are that a checkpoint does not hold (`checkpoint/opening.py`). `tensors`: of each its name there, its
    number format and its shape in the model."""

    path: Line
    digest: Digest
    tensors: dict[Line, tuple[Line, Format, Sizes]]

    def stored(self, names: Iterable[str]) -> dict[str, Any]:
        """What a manifest says of it, with these of its tensors."""
        return structs.asdict(self) | {"tensors": {name: self.tensors[name] for name in names if name in self.tensors}}

    def check(self, digest: str, path: Path, entries: Mapping[str, "Entry"]) -> None:
        """K020 when what is at `path` is something else, or has no tensor of a name and shape that are given here."""
        if digest == self.digest:
            self._fits(path, entries)
            return
        what = f"{path} is not the base that this checkpoint was trained on"
        why = f"its SHA-256 begins with {digest[:12]}, that of {self.path} began with {self.digest[:12]}"
        fix = ("put back the weights that the run started from, and give their path as Job.weights (export: --base)",)
        raise PlaitError(Problem("K020", what, why=why, fix=fix))

    def _fits(self, path: Path, entries: Mapping[str, "Entry"]) -> None:
        for name, (source, kind, shape) in self.tensors.items():
            entry = entries.get(source)
            if entry is None:
                why = f"it says that {name[:100]} is {source[:100]} there, and there is no such tensor"
            elif entry.shape != shape or DTYPES[entry.dtype].is_floating_point != DTYPES[kind].is_floating_point:
                said = f"{kind} {list(shape)}"
                why = f"it says that {name[:100]}, {said}, is {source[:100]} there, which is {entry.dtype} {list(entry.shape)}"
            else:
                continue
            fix = ("go on from another checkpoint: plait checkpoint verify RUN looks at all of them",)
            raise PlaitError(Problem("K020", f"the manifest of this checkpoint does not fit its base {path}", why=why, fix=fix))


class CarriedValue(Struct, frozen=True):
    """A value that some ranks carried from step to step (`checkpoint/carried_state.py`)."""

    ranks: Samples
    """Those that had it; its tensors are named after the first."""
    same: bool
    """It was in the object that the model was made with."""
    read: bool
    """A step was seen to read it before it wrote it, or nobody looked."""
    value: object = None
    """Its JSON (`checkpoint/plain_values.py`)."""


class CarriedValues(Struct, frozen=True):
    """What all ranks carried."""

    world: Count
    values: dict[Line, Annotated[tuple[CarriedValue, ...], Meta(min_length=1)]]
    """By name, each different value once."""
    unsaved: dict[Line, Line]
    """Names of what could not be saved, and its type."""


class SavedPosition(Struct, frozen=True):
    """The `Position` of the data after this step."""

    step: Count
    epoch: Count
    start: Count
    samples: Count
    state: object = None


class SavedNumber(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor without dims of the optimizer's state."""

    dtype: Format
    value: bool | int | float

    def __post_init__(self) -> None:
        kind = DTYPES[self.dtype]
        python = bool if kind == torch.bool else float if kind.is_floating_point else int
        if type(self.value) is not python or (python is int and not torch.iinfo(kind).min <= self.value <= torch.iinfo(kind).max):
            raise ValueError(f"{str(self.value)[:30]} is no {self.dtype}")


class SavedOptimizer(Struct, frozen=True):
    """The optimizer's class, its parameter groups, and `<parameter>/<key>` -> what of its state is no tensor with dims."""

    type: Line
    groups: list[dict[str, Any]]
    scalars: dict[str, Annotated[int, Meta(gt=-_LARGEST // 2, lt=_LARGEST // 2)] | float | bool | str | SavedNumber | None]


class SavedScale(Struct, frozen=True):
    """The state of a `LossScale`."""

    value: Annotated[float, Meta(gt=0, le=sys.float_info.max)]
    good_steps: Count


class SavedGroup(Struct, frozen=True):
    """What one replica group has of its own besides tensors."""

    met: list[Line]
    scaler: SavedScale | None = None


class SavedGroups(Struct, frozen=True):
    """What is said of replica groups (`checkpoint/replica_groups.py`): how many, of each its own, and what was sent and not applied yet."""

    count: Count
    own: dict[str, SavedGroup]
    sent: list[tuple[Count, Count, list[float]]]

    def __post_init__(self) -> None:
        if set(self.own) != {str(i) for i in range(min(self.count, len(self.own) + 1))}:
            raise ValueError(f"{self.count} replica groups are not {len(self.own)}")


class SavedShares(Struct, frozen=True):
    """Parts of the batch that follow speeds, and what they are judged by (`parallel/shares/balance.py`)."""

    batch: Count
    parts: tuple[Samples, Samples]
    rows: list[tuple[Samples, list[Seconds]]]

    def __post_init__(self) -> None:
        ranks = len(self.parts[0]) - 1
        lengths = {len(self.parts[1]) - 1, *(len(each) for row in self.rows for each in row)}
        if ranks < 1 or lengths != {ranks} or not all(min(row[1:]) > 0 for row in self.parts):
            raise ValueError("the shares of the batch are not of one number of ranks")


class SavedAverage(Struct, frozen=True):
    """Of the average of the weights (`ema/<name>`): the optimizer's steps it has seen, and how often it moved."""

    steps: Count
    moved: Count


class SavedCallbacks(Struct, frozen=True):
    """The state of callbacks, and whether the run had ended (`engine/callbacks.py`)."""

    states: dict[Line, Any] = {}
    wish: Line = ""
    ended: Line = ""
    evaluated: Count = 0


OWN = re.compile(r"groups/\d+/")
"""How names begin of what belongs to one replica group."""


class Manifest(Struct, frozen=True, kw_only=True):
    """A checked manifest. Tensors are named `model/<name>`, `optimizer/<parameter>/<key>`, `ema/<parameter>`, `eval/<parameter>`, as
    `checkpoint/replica_groups.py` names what groups hold, and as `checkpoint/state.py` names what compressed sums keep."""

    tensors: dict[str, Entry]
    files: dict[FileName, ListedFile]
    position: SavedPosition
    plan: Line
    seed: Annotated[int, Meta(ge=0, le=_LARGEST - 1)]
    batch: Count
    parent: Line | None = None
    """The checkpoint before it in the same run."""
    versions: dict[Line, Line]
    aliases: dict[str, str]
    """Tied names -> the name their tensor is stored under."""
    optimizer: SavedOptimizer
    scaler: SavedScale | None = None
    nonfinite: tuple[Line, ...] = ()
    """Weights and optimizer state that hold NaN or infinity: the training had gone wrong when this was saved."""
    job: dict[str, Any] = {}
    """What the job was (`checkpoint/fingerprint.py`); empty in old checkpoints. Its parts may be anything."""
    replica_groups: SavedGroups = field(name="groups", default=SavedGroups(0, {}, []))
    shares: SavedShares | None = None
    average: SavedAverage | None = None
    base: Base | None = None
    """Where frozen parameters are that are not in it."""
    callbacks: SavedCallbacks = SavedCallbacks()
    carried: CarriedValues = CarriedValues(0, {}, {})
    """What ranks carried from step to step outside of parameters and buffers."""


def seal(content: dict[str, Any]) -> bytes:
    """JSON whose first value is the SHA-256 of all bytes after it."""
    body = _AFTER + json.dumps(content, indent=1).encode()[1:].lstrip()
    return _BEFORE + hashlib.sha256(body).hexdigest().encode() + body


def unseal(raw: bytes, name: str = MANIFEST) -> dict[str, Any]:
    """What was sealed; Damaged unless every byte is as it was."""
    head, body = raw[: len(_BEFORE) + 64], raw[len(_BEFORE) + 64 :]
    if head != _BEFORE + hashlib.sha256(body).hexdigest().encode() or not body.startswith(_AFTER):
        raise Damaged(name, "its content is not what was saved (SHA-256 differs)")
    try:
        return loads(b"{" + body[len(_AFTER) :])
    except UNREADABLE as error:
        raise Damaged(name, str(error)[:200]) from None


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in a directory. Damaged says what is wrong with it."""
    try:
        raw = read_plain(path / MANIFEST, LONGEST, follow=False)
    except OSError as error:
        raise Damaged(MANIFEST, error.strerror or str(error)) from None
    manifest = parse(unseal(raw))
    if path.name.startswith("step-") and path.name != f"step-{manifest.position.step:06d}":
        raise Damaged(MANIFEST, f"it is of step {manifest.position.step}, the directory of {path.name}")
    return manifest


def published(directory: Path) -> list[Path]:
    """The checkpoints in a directory, newest first."""
    named = (p for p in directory.glob("step-*") if p.name[5:].isascii() and p.name[5:].isdecimal())
    return sorted((p for p in named if p.is_dir()), key=lambda p: -int(p.name[5:]))


def damaged(path: Path, error: Damaged) -> Problem:
    """K002 of what is wrong with a file of the checkpoint."""
    fix = ("the checkpoint before it is used when there is one",)
    return Problem("K002", f"{path}/{error.file} is damaged", why=error.why, fix=fix)


def parse(content: dict[str, Any]) -> Manifest:
    """A checked value of what a manifest says."""
    try:
        if content.get("format") != FORMAT:
            raise ValueError(f"format {str(content.get('format'))[:20]}, this plait reads {FORMAT}")
        shallow(content.get("callbacks"), DEPTH)
        none = {name for name in ("base", "carried", "groups") if content.get(name) == {}}
        manifest = convert({name: value for name, value in content.items() if name not in none}, Manifest)
        _check_pieces(manifest)
        _check_names(manifest)
        _check_values(manifest)
        return manifest
    except UNREADABLE as error:
        raise Damaged(MANIFEST, str(error)[:300]) from None


def _check_pieces(manifest: Manifest) -> None:
    """Pieces make up their tensors, and are in listed files, each in one tensor."""
    pieces = [piece for entry in manifest.tensors.values() for piece in entry.pieces]
    if len({(piece.file, piece.key) for piece in pieces}) != len(pieces):
        raise ValueError("one stored piece is used twice")
    if different := sorted(manifest.files.keys() ^ {piece.file for piece in pieces}):
        raise ValueError(f"{different[0][:100]} is a listed file of no tensor, or a file of a tensor that is not listed")
    for name, entry in manifest.tensors.items():
        if any(piece.sha256 is None or {len(piece.start), len(piece.size)} != {len(entry.shape)} for piece in entry.pieces):
            raise ValueError(f"a piece of {name} has no digest, or another number of dims")
        if wrong := wrong_tiling(entry.shape, [piece.rect for piece in entry.pieces]):
            raise ValueError(f"{name}: {wrong}")


def _check_names(manifest: Manifest) -> None:
    """Tensors and numbers are of something that is there."""
    tensors, groups, base = manifest.tensors, manifest.replica_groups.count, manifest.base
    known = {name for group in manifest.optimizer.groups for name in convert(group.get("params"), list[str])}
    stored = [name.removeprefix("optimizer/") for name in tensors if name.startswith("optimizer/")]
    named = (OWN.sub("", name, 1) if groups else name for name in (*manifest.optimizer.scalars, *stored))
    lost = [name for name in named if name.rpartition("/")[0] not in known]
    kinds = tuple(f"{kind}/" for kind in KINDS if groups or kind != "groups")
    if lost or not all(name.startswith(kinds) for name in tensors):
        raise ValueError(f"tensors of nothing: {', '.join(lost)[:100]}")
    frozen = {f"model/{name}" for name in base.tensors} if base is not None else set[str]()
    if frozen & tensors.keys():
        raise ValueError("a tensor is in it and in its base")
    if not {f"model/{name}" for name in manifest.aliases.values()} <= frozen | tensors.keys():
        raise ValueError("a tied name of nothing")
    for name in (name for name in tensors if name.startswith(("ema/", EVAL))):
        weight = tensors.get(f"model/{name.partition('/')[2]}")
        if weight is None or weight.shape != tensors[name].shape:
            raise ValueError(f"other weights of no parameter: {name[:100]}")
    if manifest.average is None and any(name.startswith("ema/") for name in tensors):
        raise ValueError("`average` is missing")


def _check_values(manifest: Manifest) -> None:
    """Values that may be anything have few levels and no endless numbers, and what is shown is a line of text."""
    shallow(manifest.optimizer.groups, 6)
    shallow(manifest.job, 8)
    for row in (row for rows in manifest.carried.values.values() for row in rows):
        shallow(row.value, CARRIED_DEPTH)
    for line in _lines(manifest):
        if len(line) > 2000 or not line.isprintable():
            raise ValueError(f"{line[:40]!r} is no line of text")


def _lines(manifest: Manifest) -> Iterator[str]:
    """All that is a `Line`."""
    callbacks, carried, base = manifest.callbacks, manifest.carried, manifest.base
    yield from (manifest.plan, manifest.parent or "", manifest.optimizer.type, callbacks.wish, callbacks.ended)
    yield from (*manifest.nonfinite, *callbacks.states, *carried.values, *carried.unsaved, *carried.unsaved.values())
    yield from (*manifest.versions, *manifest.versions.values())
    yield from (name for group in manifest.replica_groups.own.values() for name in group.met)
    if base is not None:
        yield from (base.path, *base.tensors, *(source for source, _, _ in base.tensors.values()))


def shallow(value: object, most: int) -> Any:
    """A value of at most so many levels, without endless numbers."""
    if isinstance(value, (dict, list)):
        if most == 0:
            raise ValueError("something in it is too deep")
        for part in value.values() if isinstance(value, dict) else value:
            shallow(part, most - 1)
    elif type(value) is int and abs(value) >= _LARGEST:
        raise ValueError("a number in it has too many digits")
    return value
