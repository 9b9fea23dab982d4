"""The manifest of a checkpoint: what is inside and where, sealed by a digest over its own bytes.

Reading trusts nothing: a manifest whose seal was forged must still describe tensors completely, once, inside its own
directory, or it is refused. `Damaged` says what is wrong with it.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from plait.checkpoint.chunks import Rect, wrong_tiling
from plait.checkpoint.safetensors_file import DTYPES, UNREADABLE, Damaged, sizes
from plait.config.errors import PlaitError, Problem
from plait.config.files import loads, read_plain
from plait.data.batch import Position

FORMAT = 2
KINDS = ("model", "optimizer", "ema", "eval", "groups", "compress", "carried")
"""What tensors are of: their names begin so, and files are named so."""
T = TypeVar("T")
MANIFEST = "manifest.json"
EVAL = "eval/"
"""How the names of weights begin that the optimizer has in eval mode (`model/optimizers.py`)."""
DEPTH = 10
"""How deep the values may be nested that callbacks keep."""
CARRIED_DEPTH = 50
"""The same of what ranks carry from step to step."""
_BEFORE, _AFTER = b'{"digest": "', b'",\n'
_MOST = 1 << 62
LONGEST = 256 << 20
"""Bytes of the largest manifest that is read."""


@dataclass(frozen=True)
class StoredChunk:
    """A rectangle of a tensor: the tensor `key` in `file`. `sha256` is of its bytes (None: a foreign file has none)."""

    file: str
    key: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    sha256: str | None

    @property
    def rect(self) -> Rect:
        return self.start, self.size


@dataclass(frozen=True)
class Entry:
    """A tensor: its number format (by its safetensors name), whole shape, and the pieces that make it up."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredChunk, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Base:
    """Where frozen parameters are that a checkpoint does not hold (`checkpoint/base.py`). `tensors`: of each its name there, its
    number format and its shape in the model."""

    path: str
    digest: str
    tensors: dict[str, tuple[str, str, tuple[int, ...]]]

    def stored(self, names: Iterable[str]) -> dict[str, Any]:
        """What a manifest says of it, with these of its tensors."""
        tensors = {name: list(self.tensors[name]) for name in names if name in self.tensors}
        return {"path": self.path, "digest": self.digest, "tensors": tensors}

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


@dataclass(frozen=True)
class CarriedValue:
    """A value that some ranks carried from step to step (`checkpoint/carried_state.py`)."""

    ranks: tuple[int, ...]
    """Those that had it; its tensors are named after the first."""
    same: bool
    """It was in the object that the model was made with."""
    read: bool
    """A step was seen to read it before it wrote it, or nobody looked."""
    value: object
    """Its JSON (`checkpoint/plain_values.py`)."""


@dataclass(frozen=True)
class CarriedValues:
    """What all ranks carried."""

    world: int = 0
    values: dict[str, tuple[CarriedValue, ...]] = field(default_factory=dict)
    """By name, each different value once."""
    unsaved: dict[str, str] = field(default_factory=dict)
    """Names of what could not be saved, and its type."""


OWN = re.compile(r"groups/\d+/")
"""How names begin of what belongs to one replica group."""


@dataclass(frozen=True)
class Manifest:
    """A checked manifest. Tensors are named `model/<name>`, `optimizer/<parameter>/<key>`, `ema/<parameter>`, `eval/<parameter>`, as
    `checkpoint/replica_groups.py` names what groups hold, and as `checkpoint/state.py` names what compressed sums keep."""

    tensors: dict[str, Entry]
    files: dict[str, tuple[int, str]]
    """(bytes, digest of the header) by name."""
    position: Position
    plan: str
    seed: int
    batch: int
    parent: str | None
    """The checkpoint before it in the same run."""
    versions: dict[str, str]
    aliases: dict[str, str]
    """Tied names -> the name their tensor is stored under."""
    optimizer: str
    groups: list[dict[str, Any]]
    scalars: dict[str, Any]
    """`<parameter>/<key>` -> a JSON value, or {"dtype", "value"} for a tensor without dims."""
    scaler: dict[str, Any] | None
    nonfinite: tuple[str, ...] = ()
    """Weights and optimizer state that hold NaN or infinity: the training had gone wrong when this was saved."""
    job: dict[str, Any] = field(default_factory=dict)
    """What the job was (`checkpoint/fingerprint.py`); empty in old checkpoints. Its parts may be anything."""
    groups_of: dict[str, Any] = field(default_factory=dict)
    """Of replica groups: how many, what was sent and not applied yet, and of each its own; empty without any."""
    shares: dict[str, Any] | None = None
    """Parts of the batch that follow speeds, and what they are judged by (`parallel/shares/balance.py`)."""
    average: dict[str, int] | None = None
    """Of the average of the weights (`ema/<name>`): the optimizer's steps it has seen, and how often it moved."""
    base: Base | None = None
    """Where frozen parameters are that are not in it."""
    callbacks: dict[str, Any] = field(default_factory=dict)
    """The state of callbacks, and whether the run had ended (`engine/callbacks.py`); empty in old checkpoints."""
    carried: CarriedValues = CarriedValues()
    """What ranks carried from step to step outside of parameters and buffers; empty in old checkpoints."""


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
        content = loads(b"{" + body[len(_AFTER) :])
    except UNREADABLE as error:
        raise Damaged(name, str(error)[:200]) from None
    if not isinstance(content, dict):
        raise Damaged(name, "it is no JSON object")
    return content


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
        return _manifest(content)
    except UNREADABLE as error:
        raise Damaged(MANIFEST, str(error)[:300]) from None


def _manifest(content: dict[str, Any]) -> Manifest:
    if content.get("format") != FORMAT:
        raise ValueError(f"format {str(content.get('format'))[:20]}, this plait reads {FORMAT}")
    files = {_file_name(name): _file(value) for name, value in _get(content, "files", dict).items()}
    tensors = {name: _entry(name, _is(value, dict), files) for name, value in _get(content, "tensors", dict).items()}
    keys = [(piece.file, piece.key) for entry in tensors.values() for piece in entry.pieces]
    if len(set(keys)) != len(keys):
        raise ValueError("one stored piece is used twice")
    if unused := sorted(files.keys() - {file for file, _ in keys}):
        raise ValueError(f"no tensor is in the listed file {unused[0]}")
    optimizer = _get(content, "optimizer", dict)
    groups = shallow(_get(optimizer, "groups", list), 6)
    known = {name for group in groups for name in _get(_is(group, dict), "params", list) if _is(name, str)}
    scalars = {name: _scalar(value) for name, value in _get(optimizer, "scalars", dict).items()}
    stored = [name.removeprefix("optimizer/") for name in tensors if name.startswith("optimizer/")]
    groups_of = _groups_of(content.get("groups", {}))
    named = (OWN.sub("", name, 1) if groups_of else name for name in (*scalars, *stored))
    lost = [name for name in named if name.rpartition("/")[0] not in known]
    kinds = [kind for kind in KINDS if groups_of or kind != "groups"]
    if lost or any(not name.startswith(tuple(f"{kind}/" for kind in kinds)) for name in tensors):
        raise ValueError(f"tensors of nothing: {', '.join(lost)[:100]}")
    aliases = {k: _is(v, str) for k, v in _get(content, "aliases", dict).items()}
    base = _base(content.get("base"))
    if base is not None and any(f"model/{name}" in tensors for name in base.tensors):
        raise ValueError("a tensor is in it and in its base")
    if any(f"model/{name}" not in tensors and (base is None or name not in base.tensors) for name in aliases.values()):
        raise ValueError("a tied name of nothing")
    parent = content.get("parent")
    plan, versions = _line(_get(content, "plan", str)), _get(content, "versions", dict)
    return Manifest(
        tensors, files, _position(_get(content, "position", dict)), plan, _number(content, "seed", 2 * _MOST),
        _number(content, "batch"), None if parent is None else _line(parent),
        {_line(k): _line(v) for k, v in versions.items()}, aliases, _line(_get(optimizer, "type", str)),
        groups, scalars, _scaler(content.get("scaler")), tuple(_line(name) for name in _is(content.get("nonfinite", []), list)),
        shallow(_is(content.get("job", {}), dict), 8), groups_of, _shares(content.get("shares")),
        _average(content.get("average"), tensors), base, _callbacks(content.get("callbacks", {})),
        _carried(content.get("carried", {})),
    )  # fmt: skip


def _groups_of(value: object) -> dict[str, Any]:
    """What it says of replica groups (`checkpoint/replica_groups.py`)."""
    groups = _is(value, dict)
    if not groups:
        return {}
    count, own = _number(groups, "count"), _get(groups, "own", dict)
    if set(own) != {str(i) for i in range(count)}:
        raise ValueError(f"{count} replica groups are not {len(own)}")
    sent = [
        [_is(n, int) for n in _is(row, list)[:2]] + [list(map(float, row[2]))] for row in _get(groups, "sent", list)
    ]
    kept = {
        i: {"met": list(map(_line, _get(_is(v, dict), "met", list))), "scaler": _scaler(v.get("scaler"))}
        for i, v in own.items()
    }
    return {"count": count, "own": kept, "sent": sent}


def _callbacks(value: object) -> dict[str, Any]:
    """What it keeps of callbacks, whose own values may be anything."""
    kept = shallow(_is(value, dict), DEPTH)
    for name in ("wish", "ended"):
        _line(kept.get(name, ""))
    _is(kept.get("evaluated", 0), int)
    for name in _is(kept.get("states", {}), dict):
        _line(name)
    return kept


def _carried(value: object) -> CarriedValues:
    told = _is(value, dict)
    if not told:
        return CarriedValues()
    values = dict[str, tuple[CarriedValue, ...]]()
    for name, rows in _get(told, "values", dict).items():
        each = [_is(row, dict) for row in _is(rows, list)]
        if not each or not all(row.get("ranks") for row in each):
            raise ValueError(f"{name[:100]} is carried by nobody")
        values[_line(name)] = tuple(
            CarriedValue(
                tuple(_counts(row["ranks"])),
                _get(row, "same", bool),
                _get(row, "read", bool),
                shallow(row.get("value"), CARRIED_DEPTH),
            )
            for row in each
        )
    unsaved = {_line(name): _line(kind) for name, kind in _get(told, "unsaved", dict).items()}
    return CarriedValues(_number(told, "world"), values, unsaved)


def _entry(name: str, value: dict[str, Any], files: dict[str, Any]) -> Entry:
    dtype, shape = _get(value, "dtype", str), _numbers(value, "shape")
    if dtype not in DTYPES:
        raise ValueError(f"{name} has the unknown number format {dtype[:20]}")
    pieces = tuple(_piece(_is(piece, dict), len(shape)) for piece in _get(value, "pieces", list))
    wrong = wrong_tiling(shape, [piece.rect for piece in pieces])
    if wrong:
        raise ValueError(f"{name}: {wrong}")
    lost = [piece.file for piece in pieces if piece.file not in files]
    if lost:
        raise ValueError(f"{name} is in {lost[0][:100]}, which is not listed")
    return Entry(dtype, shape, pieces)


def _piece(value: dict[str, Any], dims: int) -> StoredChunk:
    start, size = _numbers(value, "start"), _numbers(value, "size")
    if len(start) != dims or len(size) != dims:
        raise ValueError("a piece has another number of dims than its tensor")
    return StoredChunk(_get(value, "file", str), _get(value, "key", str), start, size, _sha256(value.get("sha256")))


def _file(value: object) -> tuple[int, str]:
    entry = _is(value, dict)
    return _number(entry, "bytes"), _sha256(entry.get("header"))


def _file_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors", name):
        raise ValueError(f"the file name {name[:100]!r} is none of ours: it may leave the directory")
    return name


def _scalar(value: object) -> Any:
    if isinstance(value, dict):
        if set(value) != {"dtype", "value"} or str(value["dtype"]) not in DTYPES:
            raise ValueError("a number of the optimizer has no number format")
        kind = DTYPES[value["dtype"]]
        if not _fits(value["value"], kind):
            raise ValueError(f"a number of the optimizer, {str(value['value'])[:30]}, is no {value['dtype']}")
    elif not (value is None or isinstance(value, (bool, float, str)) or (type(value) is int and abs(value) < _MOST)):
        raise ValueError("a number of the optimizer is none")
    return value


def _fits(value: object, kind: torch.dtype) -> bool:
    """Whether a tensor of this format can hold the number."""
    if kind == torch.bool or isinstance(value, bool):
        return kind == torch.bool and isinstance(value, bool)
    if kind.is_floating_point:
        return isinstance(value, float) or (type(value) is int and abs(value) < _MOST)
    return type(value) is int and torch.iinfo(kind).min <= value <= torch.iinfo(kind).max


def _scaler(value: object) -> dict[str, Any] | None:
    if value is None:
        return None
    state = _is(value, dict)
    if type(state.get("value")) not in (int, float) or not 0 < state["value"] < math.inf:
        raise ValueError("the loss scale is no positive number")
    return {"value": state["value"], "good_steps": _number(state, "good_steps")}


def _average(value: object, tensors: dict[str, Entry]) -> dict[str, int] | None:
    for name in (name for name in tensors if name.startswith(("ema/", EVAL))):
        weight = tensors.get(f"model/{name.partition('/')[2]}")
        if weight is None or weight.shape != tensors[name].shape:
            raise ValueError(f"other weights of no parameter: {name[:100]}")
    if value is None and not any(name.startswith("ema/") for name in tensors):
        return None
    state = _is(value, dict)
    return {key: _number(state, key) for key in ("steps", "moved")}


def _base(value: object) -> Base | None:
    if not value:
        return None
    stored, tensors = _is(value, dict), dict[str, tuple[str, str, tuple[int, ...]]]()
    for name, row in _get(stored, "tensors", dict).items():
        source, kind, shape = _is(row, list)
        if kind not in DTYPES:
            raise ValueError(f"{name} of the base has the unknown number format {str(kind)[:20]}")
        tensors[_line(name)] = (_line(source), kind, sizes(shape, name))
    return Base(_line(stored.get("path")), _sha256(stored.get("digest")), tensors)


def _shares(value: object) -> dict[str, Any] | None:
    if value is None:
        return None
    state = _is(value, dict)
    parts = [_counts(row) for row in _get(state, "parts", list)]
    count = len(parts[0]) - 1 if len(parts) == 2 else 0
    rows = [tuple(_is(row, list)) for row in _get(state, "rows", list)]
    known = all(len(row) == 2 and len(_counts(row[0])) == count == len(_is(row[1], list)) for row in rows)
    if count < 1 or len(parts[1]) != count + 1 or not all(min(row[1:]) > 0 for row in parts) or not known:
        raise ValueError("the shares of the batch are not of one number of ranks")
    if not all(type(t) in (int, float) and 0 <= t < math.inf for _, times in rows for t in times):
        raise ValueError("what a share took is no number of seconds")
    return {"batch": _number(state, "batch"), "parts": parts, "rows": rows}


def _counts(value: object) -> list[int]:
    numbers = _is(value, list)
    if not all(type(n) is int and 0 <= n < 1 << 40 for n in numbers):
        raise ValueError("a share of the batch is no number of samples")
    return numbers


def _position(value: dict[str, Any]) -> Position:
    step, epoch, start, samples = (_number(value, name) for name in ("step", "epoch", "start", "samples"))
    return Position(step, epoch, start, samples, value.get("state"))


def _is(value: object, kind: type[T]) -> T:
    if type(value) is not kind:
        raise ValueError(f"{str(value)[:40]!r} is not a {kind.__name__}")
    return value


def shallow(value: object, most: int) -> Any:
    """A value of at most so many levels, without endless numbers."""
    if isinstance(value, (dict, list)):
        if most == 0:
            raise ValueError("something in it is too deep")
        for part in value.values() if isinstance(value, dict) else value:
            shallow(part, most - 1)
    elif type(value) is int and abs(value) >= 2 * _MOST:
        raise ValueError("a number in it has too many digits")
    return value


def _line(value: object) -> str:
    """A line of text, which a terminal can be shown."""
    line = _is(value, str)
    if len(line) > 2000 or not line.isprintable():
        raise ValueError(f"{line[:40]!r} is no line of text")
    return line


def _get(value: dict[str, Any], name: str, kind: type[T]) -> T:
    item = value.get(name)
    if type(item) is not kind:
        raise ValueError(f"`{name}` is missing or of another kind")
    return item


def _number(value: dict[str, Any], name: str, most: int = _MOST) -> int:
    number = _get(value, name, int)
    if not 0 <= number < most:
        raise ValueError(f"`{name}` is {str(number)[:30]}")
    return number


def _numbers(value: dict[str, Any], name: str) -> tuple[int, ...]:
    return sizes(_get(value, name, list), f"`{name}`")


def _sha256(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ValueError("a digest is none")
    return value
