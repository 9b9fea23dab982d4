"""Python values in attributes of modules as JSON and tensors, without pickle, and detection of values that steps carry.

Numbers, strings, None, tensors, arrays, and lists, tuples, dicts, sets and deques of these are written as they are. Of an object of a user
class its attributes are written; they are read into the object that a new model has in the same place. Of a random generator its state is
written. Every other value is opaque: only the existing object can be kept.

[Note: Carried attributes]
An attribute that a step reads before writing it carries a value from the previous step. An attribute that every step writes first, such as
the attention map of its batch, carries none. A descriptor on the module's class records reads and writes of one attribute; the
values stay in the module.
"""

import hashlib
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plait.checkpoint.safetensors_file import DTYPE_NAMES
from plait.config.job import is_user_class

MAX_PACKED = 64
"""Lists with at least this many numbers are written as a tensor."""
MAX_LEVELS, MAX_VALUES = 10, 200_000
"""Maximum depth and number of values in one attribute."""
MAX_EXACT_INT = 1 << 53
"""Larger integers are written as text."""
BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
Json = Any
Value = Any
"""Any type; the type determines the encoding."""


class OpaqueValueError(Exception):
    """A value that cannot be restored. The message is its type."""


def digest_elements(tensor: Tensor) -> str:
    """Return a digest of a tensor's elements."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(raw.data, digest_size=16).hexdigest()


@dataclass
class ValueWriter:
    """Writes one attribute. Equal values give equal JSON, in which tensors are replaced by digests."""

    tensors: list[Tensor] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    """Types of the opaque values found."""
    _numbered: dict[int, int] = field(default_factory=dict)
    _alive: list[object] = field(default_factory=list)
    _count: int = 0

    def write(self, value: object, level: int = 0) -> Json:
        """Return the value as JSON; code and tensors are stored by reference."""
        self._count += 1
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            return value if abs(value) < MAX_EXACT_INT else ["int", str(value)]
        if type(value) is float:
            return value if math.isfinite(value) else ["float", str(value)]
        simple = _write_scalar(value)
        if simple is not None:
            return simple
        if id(value) in self._numbered:
            return ["same", self._numbered[id(value)]]
        if level > MAX_LEVELS or self._count > MAX_VALUES:
            return self._write_opaque(value)
        self._numbered[id(value)] = len(self._numbered)
        self._alive.append(value)
        return self._write_composite(value, level + 1)

    def _write_composite(self, value: Value, level: int) -> Json:
        kind = type(value)
        if kind is Tensor:
            return self._write_tensor(value) if _has_elements(value) else self._write_opaque(value)
        if kind is np.ndarray:
            return self._write_array(value)
        if kind in (list, tuple, deque, torch.Size):
            name = "size" if kind is torch.Size else kind.__name__
            most = [value.maxlen] if kind is deque else []
            return [name, self._write_items(list(value), level), *most]
        if kind in (set, frozenset):
            return [kind.__name__, self._write_items(sorted(value, key=repr), level)]
        if kind in (dict, OrderedDict, Counter, defaultdict):
            return [kind.__name__, [[self.write(k, level), self.write(v, level)] for k, v in value.items()]]
        if (generator := _find_generator_kind(value)) is not None:
            return [generator, self.write(_GENERATORS[generator](value), level)]
        if (
            hasattr(value, "__dict__")
            and is_user_class(kind)
            and not isinstance(value, (nn.Module, type))
            and not callable(value)
        ):
            return ["object", kind.__qualname__, [[k, self.write(v, level)] for k, v in vars(value).items()]]
        return self._write_opaque(value)

    def _write_items(self, values: list[Any], level: int) -> Json:
        kinds = set(map(type, values)) if len(values) >= MAX_PACKED else set()
        if kinds == {float} or (kinds == {int} and max(map(abs, values)) < MAX_EXACT_INT):
            packed = torch.tensor(values, dtype=torch.float64 if kinds == {float} else torch.int64)
            self._alive.append(packed)
            return {"packed": self._write_tensor(packed)}
        return [self.write(v, level) for v in values]

    def _write_tensor(self, value: Tensor) -> Json:
        self.tensors.append(value.detach())
        place = "cpu" if value.device.type == "cpu" else "device"
        leaf = value.requires_grad and value.grad_fn is None
        name = DTYPE_NAMES[value.dtype]
        return ["tensor", len(self.tensors) - 1, name, list(value.shape), place, leaf, digest_elements(value)]

    def _write_array(self, value: np.ndarray) -> Json:
        try:
            made = torch.from_numpy(np.array(value, order="C"))
        except (TypeError, ValueError):  # objects, strings
            return self._write_opaque(value)
        if made.dtype not in DTYPE_NAMES:
            return self._write_opaque(value)
        self._alive.append(made)
        return ["array", self._write_tensor(made)]

    def _write_opaque(self, value: object) -> Json:
        name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        self.opaque.append(name)
        return ["opaque", name]


def _has_elements(value: Tensor) -> bool:
    strided = value.layout is torch.strided and not value.is_quantized and not value.is_nested
    return strided and value.device.type != "meta" and value.dtype in DTYPE_NAMES


def _write_scalar(value: object) -> Json:
    """Return the JSON of a value without parts, else None."""
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return ["numpy", value.dtype.name, value.item() if value.dtype.kind != "f" else repr(float(value))]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value)]
    if isinstance(value, torch.device):
        return ["device", value.type]
    if type(value) is complex:
        return ["complex", str(value)]
    if type(value) in (bytes, bytearray) and isinstance(value, (bytes, bytearray)):
        return [type(value).__name__, value.hex()]
    if type(value) is range and isinstance(value, range):
        return ["range", [value.start, value.stop, value.step]]
    return None


def _find_generator_kind(value: object) -> str | None:
    if isinstance(value, torch.Generator):
        return "torch.Generator"
    if isinstance(value, np.random.Generator) and type(value.bit_generator).__name__ in BIT_GENERATORS:
        return "numpy.Generator"
    if isinstance(value, np.random.RandomState):
        return "numpy.RandomState"
    return "random.Random" if type(value) is random.Random else None


_GENERATORS: dict[str, Callable[[Any], Any]] = {
    "torch.Generator": lambda made: made.get_state(),
    "numpy.Generator": lambda made: dict(made.bit_generator.state),
    "numpy.RandomState": lambda made: made.get_state(legacy=False),
    "random.Random": lambda made: made.getstate(),
}
"""Functions that return the state of each kind of random generator."""


@dataclass
class ValueReader:
    """Reads one attribute. `tensors`: the written tensors, in order; `device`: target of tensors that were on an accelerator."""

    tensors: list[Tensor]
    device: torch.device
    _made: list[Any] = field(default_factory=list)

    def read(self, written: Json, current: object = None) -> Any:
        """Return the value, reusing `current` in place if possible. OpaqueValueError if it cannot be restored."""
        if not isinstance(written, list):
            return written
        kind, content = written[0], written[1]
        if kind in _READERS:
            return _READERS[kind](*written[1:])
        if kind == "same":
            return self._made[content]
        if kind == "opaque":
            self._made.append(current)
            if current is None:
                raise OpaqueValueError(content)
            return current
        return self._read_composite(written, current)

    def _read_composite(self, written: Json, current: Value) -> Any:
        kind, content, at = written[0], written[1], len(self._made)
        self._made.append(None)
        if kind == "tensor":
            self._made[at] = made = self._read_tensor(written, current)
            return made
        if kind == "array":
            self._made[at] = made = self._read_array(self.tensors[content[1]].numpy(), current)
            return made
        if kind in ("list", "deque", "dict", "OrderedDict", "Counter", "defaultdict", "set", "object"):
            return self._fill_container(written, current, at)
        if kind in ("tuple", "size", "frozenset"):
            before = list(current) if isinstance(current, tuple) else []
            items = self._read_items(content, before)
            made = {"tuple": tuple, "size": torch.Size, "frozenset": frozenset}[kind](items)
            self._made[at] = made
            return made
        self._made[at] = made = self._read_generator(kind, self.read(content), current)
        return made

    def _fill_container(self, written: Json, current: Value, at: int) -> Any:
        """Fill a container or an object, which may contain itself."""
        kind, content = written[0], written[1]
        same = type(current).__name__ == kind or (kind == "object" and type(current).__qualname__ == content)
        if not same and kind in ("object", "defaultdict"):
            raise OpaqueValueError(content if kind == "object" else kind)
        new = {"list": list, "dict": dict, "OrderedDict": OrderedDict, "Counter": Counter, "set": set}
        made: Value = current if same else deque(maxlen=written[2]) if kind == "deque" else new[kind]()
        self._made[at] = made
        if kind == "object":
            before = dict(vars(made))
            values = {name: self.read(value, before.get(name)) for name, value in written[2]}
            vars(made).clear()
            vars(made).update(values)
        elif kind in ("list", "deque", "set"):
            items = self._read_items(content, [] if kind == "set" else list(made))
            made.clear()
            made.update(items) if kind == "set" else made.extend(items)
        else:
            before = dict(made)
            pairs = [(self.read(k), v) for k, v in content]
            values = {k: self.read(v, before.get(k)) for k, v in pairs}
            made.clear()
            made.update(values)
        return made

    def _read_items(self, content: Json, before: list[Any]) -> list[Any]:
        if isinstance(content, dict):
            return self.tensors[content["packed"][1]].tolist()
        return [self.read(v, before[i] if i < len(before) else None) for i, v in enumerate(content)]

    def _read_tensor(self, written: Json, current: object) -> Tensor:
        value = self.tensors[written[1]]
        value = value if written[4] == "cpu" else value.to(self.device)
        alike = type(current) is Tensor and (current.shape, current.dtype, current.device) == (
            value.shape,
            value.dtype,
            value.device,
        )
        if alike and isinstance(current, Tensor) and not current.requires_grad:
            return current.copy_(value)
        return value.clone().requires_grad_(written[5])

    def _read_array(self, value: np.ndarray, current: object) -> np.ndarray:
        if (
            isinstance(current, np.ndarray)
            and current.flags.writeable
            and (current.shape, current.dtype) == (value.shape, value.dtype)
        ):
            np.copyto(current, value)
            return current
        return value.copy()

    def _read_generator(self, kind: str, state: Value, current: Value) -> Any:
        if kind == "torch.Generator":
            made = current if isinstance(current, torch.Generator) else torch.Generator()
            made.set_state(state)
        elif kind == "numpy.Generator":
            name = state["bit_generator"]
            if name not in BIT_GENERATORS:
                raise OpaqueValueError(kind)
            same = isinstance(current, np.random.Generator) and type(current.bit_generator).__name__ == name
            made = current if same else np.random.Generator(getattr(np.random, name)())
            made.bit_generator.state = state
        elif kind == "numpy.RandomState":
            made = current if isinstance(current, np.random.RandomState) else np.random.RandomState()
            made.set_state(state)
        elif kind == "random.Random":
            made = current if type(current) is random.Random else random.Random()
            made.setstate(state)
        else:
            raise OpaqueValueError(str(kind)[:100])
        return made


def _parse_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name[:40]} is not a dtype")
    return found


def _parse_numpy_number(name: str, value: Value) -> np.generic:
    kind = np.dtype(name)
    if kind.kind not in "biuf":
        raise ValueError(f"{name[:40]} is not a dtype")
    return kind.type(value)


_READERS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "complex": complex,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda parts: range(*parts),
    "dtype": _parse_dtype,
    "device": torch.device,
    "numpy": _parse_numpy_number,
}
"""Readers of values without parts, by kind."""


MIN_STEPS = 3
"""Number of steps that must write an attribute first before it counts as not carried."""
_ABSENT = object()


class _WatchedAttribute:
    """Descriptor that records reads and writes of one attribute of one class."""

    def __init__(self, name: str, default: object, own: bool, watch: "AttributeWatch"):
        self.name, self.default, self.own, self.watch = name, default, own, watch

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        if owner is None:
            if self.default is _ABSENT:
                raise AttributeError(self.name)
            return self.default
        self.watch.note_read(owner, self.name)
        try:
            return vars(owner)[self.name]
        except KeyError:
            if self.default is _ABSENT:
                raise AttributeError(f"{type(owner).__name__!r} object has no attribute {self.name!r}") from None
            return self.default

    def __set__(self, owner: object, value: object) -> None:
        self.watch.note_written(owner, self.name)
        vars(owner)[self.name] = value

    def __delete__(self, owner: object) -> None:
        self.watch.note_written(owner, self.name)
        try:
            del vars(owner)[self.name]
        except KeyError:
            raise AttributeError(self.name) from None


class AttributeWatch:
    """Records the first access of each step. The values themselves stay in their owners."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, str], int] = {}
        """Steps started since an attribute is watched."""
        self._read: set[tuple[int, str]] = set()
        self._written: set[tuple[int, str]] = set()
        self._descriptors: dict[tuple[type, str], _WatchedAttribute] = {}

    def add(self, owner: object, name: str) -> None:
        """Watch an attribute of an object from the next step on."""
        kind, key = type(owner), (id(owner), name)
        if key in self._steps:
            return
        self._steps[key] = 0
        if (kind, name) in self._descriptors:
            return
        default = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _ABSENT)
        if hasattr(type(default), "__get__"):  # a property or a method, not the object's own value
            self._read.add(key)
            return
        self._descriptors[kind, name] = made = _WatchedAttribute(name, default, name in vars(kind), self)
        setattr(kind, name, made)

    def begin_step(self) -> None:
        """Start a step: clear the record of writes."""
        self._written.clear()
        for key in self._steps:
            self._steps[key] += 1

    def note_read(self, owner: object, name: str) -> None:
        key = (id(owner), name)
        if key not in self._written:
            self._read.add(key)

    def note_written(self, owner: object, name: str) -> None:
        self._written.add((id(owner), name))

    def is_read(self, owner: object, name: str) -> bool:
        """Return whether a step read the attribute before writing it. True for an attribute that is not watched."""
        key = (id(owner), name)
        return key in self._read or key not in self._steps

    def forget_writes(self) -> None:
        """Clear the record of writes, since later code is not part of the step."""
        self._written.clear()

    def is_recreated(self, owner: object, name: str) -> bool:
        """Return whether enough complete steps were watched and each wrote the attribute before reading it."""
        key = (id(owner), name)
        return key not in self._read and self._steps.get(key, 0) > MIN_STEPS

    def close(self) -> None:
        """Remove the descriptors from the classes."""
        for (kind, name), made in self._descriptors.items():
            if vars(kind).get(name) is made:
                delattr(kind, name)
                if made.own:
                    setattr(kind, name, made.default)
        self._descriptors.clear()
