"""Values of Python as JSON and tensors, and back: what modules keep in attributes, without pickle.

Plain values are written as they are: numbers, texts, None, tensors, arrays, and lists, tuples, dicts, sets and deques of these. Of an
object of the user's own class its attributes are written, and are read into the object that a new model has in the same place. Of a
random generator its state is written. Everything else is opaque: only the one that is there already can be kept.

Which attributes of modules a step reads before it writes them: those carry something from the step before.

What a step writes first, such as the attention map of its own batch, is made anew by every step. A descriptor on the module's class
sees reads and writes of one attribute; the values stay in the module.
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

from plait.checkpoint.safetensors_file import NAMES
from plait.config.job import is_user_class

PACKED = 64
"""Numbers of a list from which on they are written as a tensor."""
LEVELS, VALUES = 10, 200_000
"""How deep values are followed, and how many of one attribute."""
EXACT = 1 << 53
"""Whole numbers beyond it are written as text."""
BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
Json = Any
Value = Any
"""Of any type: what it is decides how it is written."""


class Opaque(Exception):
    """A value that cannot be read back: the text is its type."""


def digest(tensor: Tensor) -> str:
    """A digest of a tensor's elements."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(raw.data, digest_size=16).hexdigest()


@dataclass
class Writer:
    """Writes one attribute. Equal values give equal JSON, in which tensors have a digest."""

    tensors: list[Tensor] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    """Types of what is opaque in it."""
    _seen: dict[int, int] = field(default_factory=dict)
    _alive: list[object] = field(default_factory=list)
    _count: int = 0

    def write(self, value: object, level: int = 0) -> Json:
        """The JSON of a value."""
        self._count += 1
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            return value if abs(value) < EXACT else ["int", str(value)]
        if type(value) is float:
            return value if math.isfinite(value) else ["float", str(value)]
        simple = _written_simply(value)
        if simple is not None:
            return simple
        if id(value) in self._seen:
            return ["same", self._seen[id(value)]]
        if level > LEVELS or self._count > VALUES:
            return self._hidden(value)
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        return self._with_parts(value, level + 1)

    def _with_parts(self, value: Value, level: int) -> Json:
        kind = type(value)
        if kind is Tensor:
            return self._tensor(value) if _has_elements(value) else self._hidden(value)
        if kind is np.ndarray:
            return self._array(value)
        if kind in (list, tuple, deque, torch.Size):
            name = "size" if kind is torch.Size else kind.__name__
            most = [value.maxlen] if kind is deque else []
            return [name, self._items(list(value), level), *most]
        if kind in (set, frozenset):
            return [kind.__name__, self._items(sorted(value, key=repr), level)]
        if kind in (dict, OrderedDict, Counter, defaultdict):
            return [kind.__name__, [[self.write(k, level), self.write(v, level)] for k, v in value.items()]]
        if (generator := _generator_kind(value)) is not None:
            return [generator, self.write(_GENERATORS[generator](value), level)]
        if (
            hasattr(value, "__dict__")
            and is_user_class(kind)
            and not isinstance(value, (nn.Module, type))
            and not callable(value)
        ):
            return ["object", kind.__qualname__, [[k, self.write(v, level)] for k, v in vars(value).items()]]
        return self._hidden(value)

    def _items(self, values: list[Any], level: int) -> Json:
        kinds = set(map(type, values)) if len(values) >= PACKED else set()
        if kinds == {float} or (kinds == {int} and max(map(abs, values)) < EXACT):
            packed = torch.tensor(values, dtype=torch.float64 if kinds == {float} else torch.int64)
            self._alive.append(packed)
            return {"packed": self._tensor(packed)}
        return [self.write(v, level) for v in values]

    def _tensor(self, value: Tensor) -> Json:
        self.tensors.append(value.detach())
        place = "cpu" if value.device.type == "cpu" else "device"
        leaf = value.requires_grad and value.grad_fn is None
        name = NAMES[value.dtype]
        return ["tensor", len(self.tensors) - 1, name, list(value.shape), place, leaf, digest(value)]

    def _array(self, value: np.ndarray) -> Json:
        try:
            made = torch.from_numpy(np.array(value, order="C"))
        except (TypeError, ValueError):  # objects, texts
            return self._hidden(value)
        if made.dtype not in NAMES:
            return self._hidden(value)
        self._alive.append(made)
        return ["array", self._tensor(made)]

    def _hidden(self, value: object) -> Json:
        name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        self.opaque.append(name)
        return ["opaque", name]


def _has_elements(value: Tensor) -> bool:
    strided = value.layout is torch.strided and not value.is_quantized and not value.is_nested
    return strided and value.device.type != "meta" and value.dtype in NAMES


def _written_simply(value: object) -> Json:
    """The JSON of a value without parts; None for one that has some."""
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


def _generator_kind(value: object) -> str | None:
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
"""The state of each kind of random generator."""


@dataclass
class Restorer:
    """Reads one attribute back. `tensors`: those that were written, in order; `device`: where those of a device belong."""

    tensors: list[Tensor]
    device: torch.device
    _made: list[Any] = field(default_factory=list)

    def read(self, told: Json, there: object = None) -> Any:
        """The value. `there`: what is in its place now, which is changed where it can be. Opaque for what cannot be read."""
        if not isinstance(told, list):
            return told
        kind, content = told[0], told[1]
        if kind in _READERS:
            return _READERS[kind](*told[1:])
        if kind == "same":
            return self._made[content]
        if kind == "opaque":
            self._made.append(there)
            if there is None:
                raise Opaque(content)
            return there
        return self._with_parts(told, there)

    def _with_parts(self, told: Json, there: Value) -> Any:
        kind, content, at = told[0], told[1], len(self._made)
        self._made.append(None)
        if kind == "tensor":
            self._made[at] = made = self._tensor(told, there)
            return made
        if kind == "array":
            self._made[at] = made = self._array(self.tensors[content[1]].numpy(), there)
            return made
        if kind in ("list", "deque", "dict", "OrderedDict", "Counter", "defaultdict", "set", "object"):
            return self._filled(told, there, at)
        if kind in ("tuple", "size", "frozenset"):
            before = list(there) if isinstance(there, tuple) else []
            items = self._items(content, before)
            made = {"tuple": tuple, "size": torch.Size, "frozenset": frozenset}[kind](items)
            self._made[at] = made
            return made
        self._made[at] = made = self._generator(kind, self.read(content), there)
        return made

    def _filled(self, told: Json, there: Value, at: int) -> Any:
        """A container or an object, which may hold itself."""
        kind, content = told[0], told[1]
        same = type(there).__name__ == kind or (kind == "object" and type(there).__qualname__ == content)
        if not same and kind in ("object", "defaultdict"):
            raise Opaque(content if kind == "object" else kind)
        new = {"list": list, "dict": dict, "OrderedDict": OrderedDict, "Counter": Counter, "set": set}
        made: Value = there if same else deque(maxlen=told[2]) if kind == "deque" else new[kind]()
        self._made[at] = made
        if kind == "object":
            before = dict(vars(made))
            values = {name: self.read(value, before.get(name)) for name, value in told[2]}
            vars(made).clear()
            vars(made).update(values)
        elif kind in ("list", "deque", "set"):
            items = self._items(content, [] if kind == "set" else list(made))
            made.clear()
            made.update(items) if kind == "set" else made.extend(items)
        else:
            before = dict(made)
            pairs = [(self.read(k), v) for k, v in content]
            values = {k: self.read(v, before.get(k)) for k, v in pairs}
            made.clear()
            made.update(values)
        return made

    def _items(self, content: Json, before: list[Any]) -> list[Any]:
        if isinstance(content, dict):
            return self.tensors[content["packed"][1]].tolist()
        return [self.read(v, before[i] if i < len(before) else None) for i, v in enumerate(content)]

    def _tensor(self, told: Json, there: object) -> Tensor:
        value = self.tensors[told[1]]
        value = value if told[4] == "cpu" else value.to(self.device)
        alike = type(there) is Tensor and (there.shape, there.dtype, there.device) == (
            value.shape,
            value.dtype,
            value.device,
        )
        if alike and isinstance(there, Tensor) and not there.requires_grad:
            return there.copy_(value)
        return value.clone().requires_grad_(told[5])

    def _array(self, value: np.ndarray, there: object) -> np.ndarray:
        if (
            isinstance(there, np.ndarray)
            and there.flags.writeable
            and (there.shape, there.dtype) == (value.shape, value.dtype)
        ):
            np.copyto(there, value)
            return there
        return value.copy()

    def _generator(self, kind: str, state: Value, there: Value) -> Any:
        if kind == "torch.Generator":
            made = there if isinstance(there, torch.Generator) else torch.Generator()
            made.set_state(state)
        elif kind == "numpy.Generator":
            name = state["bit_generator"]
            if name not in BIT_GENERATORS:
                raise Opaque(kind)
            same = isinstance(there, np.random.Generator) and type(there.bit_generator).__name__ == name
            made = there if same else np.random.Generator(getattr(np.random, name)())
            made.bit_generator.state = state
        elif kind == "numpy.RandomState":
            made = there if isinstance(there, np.random.RandomState) else np.random.RandomState()
            made.set_state(state)
        elif kind == "random.Random":
            made = there if type(there) is random.Random else random.Random()
            made.setstate(state)
        else:
            raise Opaque(str(kind)[:100])
        return made


def _number_format(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name[:40]} is no number format")
    return found


def _numpy_number(name: str, value: Value) -> np.generic:
    kind = np.dtype(name)
    if kind.kind not in "biuf":
        raise ValueError(f"{name[:40]} is no number format")
    return kind.type(value)


_READERS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "complex": complex,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda parts: range(*parts),
    "dtype": _number_format,
    "device": torch.device,
    "numpy": _numpy_number,
}
"""Kinds without parts, and what reads each."""


ENOUGH = 3
"""Whole steps after which an attribute that none of them read first counts as made anew."""
_ABSENT = object()


class _Seen:
    """The descriptor of one attribute of one class."""

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
    """Notes what each step reads first. Values are those of the owners throughout."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, str], int] = {}
        """Steps that began since an attribute is watched."""
        self._read: set[tuple[int, str]] = set()
        self._written: set[tuple[int, str]] = set()
        self._descriptors: dict[tuple[type, str], _Seen] = {}

    def add(self, owner: object, name: str) -> None:
        """Watch an attribute of an object from the next step on."""
        kind, key = type(owner), (id(owner), name)
        if key in self._steps:
            return
        self._steps[key] = 0
        if (kind, name) in self._descriptors:
            return
        default = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _ABSENT)
        if hasattr(type(default), "__get__"):  # a property or a method: it is not this object's own value
            self._read.add(key)
            return
        self._descriptors[kind, name] = made = _Seen(name, default, name in vars(kind), self)
        setattr(kind, name, made)

    def begin_step(self) -> None:
        """A step begins: nothing is written yet."""
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
        """Whether a step was seen to read it before it wrote it. An attribute that is not watched counts as read."""
        key = (id(owner), name)
        return key in self._read or key not in self._steps

    def forget_writes(self) -> None:
        """What follows is no part of the step that wrote."""
        self._written.clear()

    def is_made_anew(self, owner: object, name: str) -> bool:
        """Whether enough whole steps were seen, and each wrote the attribute before it read it."""
        key = (id(owner), name)
        return key not in self._read and self._steps.get(key, 0) > ENOUGH

    def close(self) -> None:
        """Take the descriptors off the classes."""
        for (kind, name), made in self._descriptors.items():
            if vars(kind).get(name) is made:
                delattr(kind, name)
                if made.own:
                    setattr(kind, name, made.default)
        self._descriptors.clear()
