"""The manifest of a checkpoint: its tensors and files, sealed by a digest over its own bytes.

A manifest with a forged seal is rejected too unless it describes every tensor completely, once, and within its own directory.
`DamagedFileError` names the error.
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
    PARSE_ERRORS,
    Count,
    DamagedFileError,
    FileName,
    Format,
    Rect,
    Sizes,
    find_tiling_error,
)
from plait.config.errors import PlaitError, Problem
from plait.config.files import parse_strict_json, read_plain_file

FORMAT = 2
KINDS = ("model", "optimizer", "ema", "eval", "groups", "compress", "carried")
"""Prefixes of tensor names, also used in file names."""
MANIFEST_NAME = "manifest.json"
EVAL_PREFIX = "eval/"
"""Prefix for the names of weights in the optimizer's eval mode (`model/optimizers.py`)."""
MAX_DEPTH = 10
"""Maximum nesting depth of callback values."""
MAX_CARRIED_DEPTH = 50
"""Maximum nesting depth of carried values."""
_BEFORE, _AFTER = b'{"digest": "', b'",\n'
_MAX_INT = 1 << 63
MAX_MANIFEST_BYTES = 256 << 20
"""Maximum bytes of a manifest."""
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Line = str
"""A line of printable text; `_iter_lines` lists all of them for the check."""
Samples = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 40)]], Meta(min_length=1)]
Seconds = Annotated[float, Meta(ge=0, le=sys.float_info.max)]


class StoredChunk(Struct, frozen=True):
    """A rectangle of a tensor: the tensor `key` in `file`. `sha256`: of its bytes (None in a file of another tool)."""

    file: str
    key: str
    start: Sizes
    size: Sizes
    sha256: Digest | None

    @property
    def rect(self) -> Rect:
        return self.start, self.size


class TensorEntry(Struct, frozen=True):
    """A tensor: dtype (its safetensors name), full shape, and its pieces."""

    dtype: Format
    shape: Sizes
    pieces: tuple[StoredChunk, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class ListedFile(Struct, frozen=True):
    """A file of the checkpoint: its size, and the digest of its header."""

    bytes: Count
    header: Digest


class BaseWeights(Struct, frozen=True):
    """Location of frozen parameters that a checkpoint omits (`checkpoint/foreign_weights.py`). `tensors`: name in the model -> (name in
    the base, dtype and shape in the model)."""

    path: Line
    digest: Digest
    tensors: dict[Line, tuple[Line, Format, Sizes]]

    def to_manifest(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the manifest entry, limited to the tensors `names`."""
        return structs.asdict(self) | {"tensors": {name: self.tensors[name] for name in names if name in self.tensors}}

    def check(self, digest: str, path: Path, entries: Mapping[str, "TensorEntry"]) -> None:
        """K020 if the digest of `path` differs, or if it lacks a tensor of a recorded name and shape."""
        if digest == self.digest:
            self._has_tensors(path, entries)
            return
        what = f"{path} is not the base that this checkpoint was trained on"
        why = f"its SHA-256 begins with {digest[:12]}, that of {self.path} began with {self.digest[:12]}"
        fix = ("restore the weights that the run started from, and pass their path as Job.weights (export: --base)",)
        raise PlaitError(Problem("K020", what, why=why, fix=fix))

    def _has_tensors(self, path: Path, entries: Mapping[str, "TensorEntry"]) -> None:
        for name, (source, kind, shape) in self.tensors.items():
            entry = entries.get(source)
            if entry is None:
                why = f"it maps {name[:100]} to {source[:100]}, and the base has no such tensor"
            elif entry.shape != shape or DTYPES[entry.dtype].is_floating_point != DTYPES[kind].is_floating_point:
                said = f"{kind} {list(shape)}"
                why = f"it maps {name[:100]}, {said}, to {source[:100]} of the base, which is {entry.dtype} {list(entry.shape)}"
            else:
                continue
            fix = ("resume from another checkpoint (plait checkpoint verify RUN checks all of them)",)
            raise PlaitError(Problem("K020", f"the manifest of this checkpoint does not fit its base {path}", why=why, fix=fix))


class CarriedValue(Struct, frozen=True):
    """A value that some ranks carry from step to step (`checkpoint/carried_state.py`)."""

    ranks: Samples
    """Ranks with this value; its tensors are named after the first of them."""
    same: bool
    """The value was in the object that the model was created with."""
    read: bool
    """A step read the value before writing it, or reads were not watched."""
    value: object = None
    """The value as JSON (`checkpoint/plain_values.py`)."""


class CarriedValues(Struct, frozen=True):
    """Carried values of all ranks."""

    world: Count
    values: dict[Line, Annotated[tuple[CarriedValue, ...], Meta(min_length=1)]]
    """Name -> each distinct value once."""
    unsaved: dict[Line, Line]
    """Name -> type of each value that could not be saved."""


class SavedPosition(Struct, frozen=True):
    """`Position` in the data after this step."""

    step: Count
    epoch: Count
    start: Count
    samples: Count
    state: object = None


class SavedNumber(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor without dims in the optimizer's state."""

    dtype: Format
    value: bool | int | float

    def __post_init__(self) -> None:
        kind = DTYPES[self.dtype]
        python = bool if kind == torch.bool else float if kind.is_floating_point else int
        if type(self.value) is not python or (python is int and not torch.iinfo(kind).min <= self.value <= torch.iinfo(kind).max):
            raise ValueError(f"{str(self.value)[:30]} is no {self.dtype}")


class SavedOptimizer(Struct, frozen=True):
    """The optimizer's class, its parameter groups, and `<parameter>/<key>` -> scalar state."""

    type: Line
    groups: list[dict[str, Any]]
    scalars: dict[str, Annotated[int, Meta(gt=-_MAX_INT // 2, lt=_MAX_INT // 2)] | float | bool | str | SavedNumber | None]


class SavedScale(Struct, frozen=True):
    """State of a `LossScale`."""

    value: Annotated[float, Meta(gt=0, le=sys.float_info.max)]
    good_steps: Count


class SavedGroup(Struct, frozen=True):
    """State of one replica group other than tensors."""

    met: list[Line]
    scaler: SavedScale | None = None


class SavedGroups(Struct, frozen=True):
    """State of replica groups (`checkpoint/replica_groups.py`): their number, the state of each, and the sums that were sent and not applied."""

    count: Count
    own: dict[str, SavedGroup]
    sent: list[tuple[Count, Count, list[float]]]

    def __post_init__(self) -> None:
        if set(self.own) != {str(i) for i in range(min(self.count, len(self.own) + 1))}:
            raise ValueError(f"{self.count} replica groups are not {len(self.own)}")


class SavedShares(Struct, frozen=True):
    """Relative sizes of local batches and the measured times behind them (`parallel/batch_split/batch_balancer.py`)."""

    batch: Count
    parts: tuple[Samples, Samples]
    rows: list[tuple[Samples, list[Seconds]]]

    def __post_init__(self) -> None:
        ranks = len(self.parts[0]) - 1
        lengths = {len(self.parts[1]) - 1, *(len(each) for row in self.rows for each in row)}
        if ranks < 1 or lengths != {ranks} or not all(min(row[1:]) > 0 for row in self.parts):
            raise ValueError("the rows of the saved batch split differ in their number of ranks")


class SavedAverage(Struct, frozen=True):
    """Moving average of the weights (`ema/<name>`): optimizer steps since its start, and number of updates."""

    steps: Count
    moved: Count


class SavedCallbacks(Struct, frozen=True):
    """State of callbacks, and whether the run has ended (`engine/callbacks.py`)."""

    states: dict[Line, Any] = {}
    wish: Line = ""
    ended: Line = ""
    evaluated: Count = 0


GROUP_PREFIX = re.compile(r"groups/\d+/")
"""Prefix for names of one replica group's tensors."""


class Manifest(Struct, frozen=True, kw_only=True):
    """A checked manifest.

    Names of tensors are `model/<name>`, `optimizer/<parameter>/<key>`, `ema/<parameter>` and `eval/<parameter>`. Further names are defined
    in `checkpoint/replica_groups.py` for groups and in `checkpoint/training_state.py` for gradient compression.

    """

    tensors: dict[str, TensorEntry]
    files: dict[FileName, ListedFile]
    position: SavedPosition
    plan: Line
    seed: Annotated[int, Meta(ge=0, le=_MAX_INT - 1)]
    batch: Count
    parent: Line | None = None
    """The previous checkpoint of the same run."""
    versions: dict[Line, Line]
    aliases: dict[str, str]
    """Tied names -> the name under which their tensor is stored."""
    optimizer: SavedOptimizer
    scaler: SavedScale | None = None
    nonfinite: tuple[Line, ...] = ()
    """Weights and optimizer state with NaN or infinity at the time of this save."""
    job: dict[str, Any] = {}
    """Summary of the job (`checkpoint/fingerprint.py`), unchecked; empty in old checkpoints."""
    replica_groups: SavedGroups = field(name="groups", default=SavedGroups(0, {}, []))
    shares: SavedShares | None = None
    average: SavedAverage | None = None
    base: BaseWeights | None = None
    """Base weights with the frozen parameters that the checkpoint omits."""
    callbacks: SavedCallbacks = SavedCallbacks()
    carried: CarriedValues = CarriedValues(0, {}, {})
    """State of ranks outside of parameters and buffers."""


def seal_json(content: dict[str, Any]) -> bytes:
    """Encode JSON whose first value is the SHA-256 of all bytes after it."""
    body = _AFTER + json.dumps(content, indent=1).encode()[1:].lstrip()
    return _BEFORE + hashlib.sha256(body).hexdigest().encode() + body


def unseal_json(raw: bytes, name: str = MANIFEST_NAME) -> dict[str, Any]:
    """Decode sealed JSON. DamagedFileError if any byte differs."""
    head, body = raw[: len(_BEFORE) + 64], raw[len(_BEFORE) + 64 :]
    if head != _BEFORE + hashlib.sha256(body).hexdigest().encode() or not body.startswith(_AFTER):
        raise DamagedFileError(name, "its content differs from the saved one (SHA-256)")
    try:
        return parse_strict_json(b"{" + body[len(_AFTER) :])
    except PARSE_ERRORS as error:
        raise DamagedFileError(name, str(error)[:200]) from None


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint in a directory. DamagedFileError if it is invalid."""
    try:
        raw = read_plain_file(path / MANIFEST_NAME, MAX_MANIFEST_BYTES, follow=False)
    except OSError as error:
        raise DamagedFileError(MANIFEST_NAME, error.strerror or str(error)) from None
    manifest = parse_manifest(unseal_json(raw))
    if path.name.startswith("step-") and path.name != f"step-{manifest.position.step:06d}":
        raise DamagedFileError(MANIFEST_NAME, f"it is of step {manifest.position.step}, the directory of {path.name}")
    return manifest


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in a directory, newest first."""
    named = (p for p in directory.glob("step-*") if p.name[5:].isascii() and p.name[5:].isdecimal())
    return sorted((p for p in named if p.is_dir()), key=lambda p: -int(p.name[5:]))


def damaged_problem(path: Path, error: DamagedFileError) -> Problem:
    """K002 for a damaged file of the checkpoint."""
    fix = ("--resume    loads the previous checkpoint, if there is one",)
    return Problem("K002", f"{path}/{error.file} is damaged", why=error.why, fix=fix)


def parse_manifest(content: dict[str, Any]) -> Manifest:
    """Convert the JSON of a manifest and check it."""
    try:
        if content.get("format") != FORMAT:
            raise ValueError(f"format {str(content.get('format'))[:20]}, this plait reads {FORMAT}")
        check_depth(content.get("callbacks"), MAX_DEPTH)
        none = {name for name in ("base", "carried", "groups") if content.get(name) == {}}
        manifest = convert({name: value for name, value in content.items() if name not in none}, Manifest)
        _check_pieces(manifest)
        _check_names(manifest)
        _check_values(manifest)
        return manifest
    except PARSE_ERRORS as error:
        raise DamagedFileError(MANIFEST_NAME, str(error)[:300]) from None


def _check_pieces(manifest: Manifest) -> None:
    """Check that pieces cover their tensors and that each lies in one listed file, once."""
    pieces = [piece for entry in manifest.tensors.values() for piece in entry.pieces]
    if len({(piece.file, piece.key) for piece in pieces}) != len(pieces):
        raise ValueError("one stored piece is used twice")
    if different := sorted(manifest.files.keys() ^ {piece.file for piece in pieces}):
        raise ValueError(f"{different[0][:100]} is listed without a tensor, or has a tensor without being listed")
    for name, entry in manifest.tensors.items():
        if any(piece.sha256 is None or {len(piece.start), len(piece.size)} != {len(entry.shape)} for piece in entry.pieces):
            raise ValueError(f"a piece of {name} has no digest, or another number of dims")
        if wrong := find_tiling_error(entry.shape, [piece.rect for piece in entry.pieces]):
            raise ValueError(f"{name}: {wrong}")


def _check_names(manifest: Manifest) -> None:
    """Check that every tensor and scalar belongs to a known parameter."""
    tensors, groups, base = manifest.tensors, manifest.replica_groups.count, manifest.base
    known = {name for group in manifest.optimizer.groups for name in convert(group.get("params"), list[str])}
    stored = [name.removeprefix("optimizer/") for name in tensors if name.startswith("optimizer/")]
    named = (GROUP_PREFIX.sub("", name, 1) if groups else name for name in (*manifest.optimizer.scalars, *stored))
    lost = [name for name in named if name.rpartition("/")[0] not in known]
    kinds = tuple(f"{kind}/" for kind in KINDS if groups or kind != "groups")
    if lost or not all(name.startswith(kinds) for name in tensors):
        raise ValueError(f"tensors without a parameter: {', '.join(lost)[:100]}")
    frozen = {f"model/{name}" for name in base.tensors} if base is not None else set[str]()
    if frozen & tensors.keys():
        raise ValueError("a tensor is in it and in its base")
    if not {f"model/{name}" for name in manifest.aliases.values()} <= frozen | tensors.keys():
        raise ValueError("a tied name without a tensor")
    for name in (name for name in tensors if name.startswith(("ema/", EVAL_PREFIX))):
        weight = tensors.get(f"model/{name.partition('/')[2]}")
        if weight is None or weight.shape != tensors[name].shape:
            raise ValueError(f"average or eval weights without a parameter: {name[:100]}")
    if manifest.average is None and any(name.startswith("ema/") for name in tensors):
        raise ValueError("`average` is missing")


def _check_values(manifest: Manifest) -> None:
    """Check that free-form values are shallow and bounded, and that displayed strings are lines of text."""
    check_depth(manifest.optimizer.groups, 6)
    check_depth(manifest.job, 8)
    for row in (row for rows in manifest.carried.values.values() for row in rows):
        check_depth(row.value, MAX_CARRIED_DEPTH)
    for line in _iter_lines(manifest):
        if len(line) > 2000 or not line.isprintable():
            raise ValueError(f"{line[:40]!r} is no line of text")


def _iter_lines(manifest: Manifest) -> Iterator[str]:
    """Yield every `Line` of a manifest."""
    callbacks, carried, base = manifest.callbacks, manifest.carried, manifest.base
    yield from (manifest.plan, manifest.parent or "", manifest.optimizer.type, callbacks.wish, callbacks.ended)
    yield from (*manifest.nonfinite, *callbacks.states, *carried.values, *carried.unsaved, *carried.unsaved.values())
    yield from (*manifest.versions, *manifest.versions.values())
    yield from (name for group in manifest.replica_groups.own.values() for name in group.met)
    if base is not None:
        yield from (base.path, *base.tensors, *(source for source, _, _ in base.tensors.values()))


def check_depth(value: object, most: int) -> Any:
    """Return the value. ValueError if it nests deeper than `most` levels or has an integer of too many digits."""
    if isinstance(value, (dict, list)):
        if most == 0:
            raise ValueError("a value in it is nested too deeply")
        for part in value.values() if isinstance(value, dict) else value:
            check_depth(part, most - 1)
    elif type(value) is int and abs(value) >= _MAX_INT:
        raise ValueError("a number in it has too many digits")
    return value
