"""What is done to modules from outside: another forward, what a call changes put back, other parameters, eval mode.

Put back are also values that a module's attributes hold and a call may change in place: lists, dicts, sets and deques, random
generators, and objects of the user's own classes, also inside of each other.
"""

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plait.config.job import is_user_class
from plait.tensors.opaque_code import is_scripted
from plait.tensors.parameters import like
from plait.tensors.torch_private import each_tensor, own_buffers

Value = Any
"""Of any type: what it is decides how it is kept."""
LISTS, TABLES = (list, deque), (dict, OrderedDict, Counter, defaultdict)
LEVELS = 10
"""How deep values are followed into each other."""
SMALL = 1 << 20
"""Bytes of the largest array that is kept: larger ones are data."""
STRUCTURE = frozenset(vars(nn.Module()))
"""Attributes of every module that are not its own values."""


class HeldValues:
    """What is inside of the containers, generators and objects among some modules' attributes. `libraries`: of objects of other libraries
    than torch too, such as a cache of keys and values; else of the user's classes only."""

    def __init__(self, modules: Iterable[object], libraries: bool = False):
        self._libraries = libraries
        self._content: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        for module in modules:
            for name, value in vars(module).items():
                if name not in STRUCTURE:
                    self._add(value, 0)

    def _add(self, value: Value, level: int) -> None:
        kind = type(value)
        if kind in PLAIN or id(value) in self._seen or level > LEVELS:
            return
        if kind in LISTS:
            content = list(value)
        elif kind in TABLES:
            content = dict(value)
        elif kind is set:
            content = set(value)
        elif kind is tuple:
            content = None
        else:
            content = _state(value, self._libraries)
            if content is None:
                return
        self._seen.add(id(value))
        self._content.append((value, content))
        inner = value if kind is tuple else content if kind in LISTS or kind is set else None
        if inner is None and type(content) is dict:
            inner = content.values()
        for each in inner or ():
            self._add(each, level + 1)

    def put_back(self) -> None:
        """Have them hold what they held."""
        for value, content in self._content:
            if content is None:
                continue
            if isinstance(value, (list, deque)):
                value.clear()
                value.extend(content)
            elif isinstance(value, (dict, set)):
                value.clear()
                value.update(content)
            elif isinstance(value, np.ndarray):
                np.copyto(value, content)
            elif isinstance(value, torch.Generator):
                value.set_state(content)
            elif isinstance(value, np.random.Generator):
                value.bit_generator.state = content
            elif isinstance(value, np.random.RandomState):
                value.set_state(content)
            elif isinstance(value, random.Random):
                value.setstate(content)
            else:
                vars(value).clear()
                vars(value).update(content)


PLAIN = frozenset((int, float, bool, str, type(None), torch.Tensor, nn.Parameter))
"""Types of values that hold no others."""


def _state(value: Value, libraries: bool) -> Any:
    """What is inside of a generator or of an object of the user's class; None for what is followed no further."""
    if isinstance(value, np.ndarray):
        return value.copy() if value.flags.writeable and value.nbytes <= SMALL else None
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if type(value) is random.Random:
        return value.getstate()
    followed = hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value)
    known = is_user_class(type(value)) or (libraries and type(value).__module__.partition(".")[0] not in ("torch", "plait"))
    return dict(vars(value)) if followed and known else None


@dataclass(frozen=True)
class Attributes:
    """The attributes of modules at one moment, and what is inside of them."""

    tables: list[tuple[nn.Module, dict[str, Any]]]
    values: HeldValues


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """A module's forward as it is now, for another one that is put in its place.

    It is that of the class which the module has when it is called, since a strategy may change that; unless a forward
    was put on the module itself.
    """
    replaced = vars(module).get("forward")
    return partial(_of_its_class, module) if replaced is None else replaced


def _of_its_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return class_forward(type(module), module, *args, **kwargs)


THROUGH = "class_forward_through"
"""Attribute of a module: what calls the forward of its class, where something was put around it."""
OURS = frozenset(("_noting", "_silent", "_resized", "_gathered", "_rows", "_ranks", "_owed", THROUGH, "forward"))
"""Attributes that strategies put on modules, and change while steps run."""
WRAPS = "wraps_class_forward"
"""Attribute of a class: its forward only prepares, and calls `class_forward` of another class."""


def class_forward(kind: type[nn.Module], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a class computes with this module: by itself, or through what was put there (`call_class_forward`)."""
    through = vars(module).get(THROUGH)
    if through is None or WRAPS in vars(kind):
        return kind.forward(module, *args, **kwargs)
    return through(kind.forward, module, *args, **kwargs)


def call_class_forward(module: nn.Module, through: Callable[..., Any]) -> None:
    """From now on `through(forward, module, *args, **kwargs)` calls the forward of the module's class: inside of whatever else was
    put, or will be put, in the place of the module's forward."""
    vars(module)[THROUGH] = through
    module.forward = own_forward(module)


@contextmanager
def forwards_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """What is put in the place of these modules' forwards inside is taken back."""
    before = [(vars(module), vars(module).get("forward")) for module in modules]
    try:
        yield
    finally:
        for attributes, forward in before:
            attributes.pop("forward", None)
            if forward is not None:
                attributes["forward"] = forward


def attributes_of(modules: Iterable[nn.Module]) -> Attributes:
    """The attributes of modules as they are now (numbers, caches, a forward of their own), for `put_back`. Those of modules that
    torch.jit has compiled cannot be replaced, and are left out."""
    kept = [module for module in modules if not is_scripted(module)]
    return Attributes([(module, dict(vars(module))) for module in kept], HeldValues(kept))


def without_scripted(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules without those that torch.jit has compiled, which keep what they have in C++."""
    modules = list(modules)
    compiled = {id(inner) for module in modules if is_scripted(module) for inner in module.modules()}
    return [module for module in modules if id(module) not in compiled]


def put_back(attributes: Attributes) -> None:
    """Give modules exactly these attributes again, with what was inside of them."""
    for module, values in attributes.tables:
        vars(module).clear()
        vars(module).update(values)
    attributes.values.put_back()


class ModuleState:
    """What a call may change on modules, as it is now: attributes, which parameters, buffers and modules they have, and `hooks`."""

    def __init__(self, modules: Iterable[nn.Module], hooks: bool = True):
        self.attributes = attributes_of(without_scripted(modules))
        self.buffers = [own_buffers(module) for module, _ in self.attributes.tables]
        values = [value for _, values in self.attributes.tables for value in values.values()] if hooks else []
        values += [buffer for module in modules if is_scripted(module) for buffer in module.buffers(recurse=False)]
        self._tensors = [(value, value.clone()) for value in values if type(value) is Tensor and not value.is_meta]
        content = [vars(module)[name] for module, _ in self.attributes.tables for name in ("_parameters", "_modules")]
        tables: list[dict[Any, Any]] = [*self.buffers, *content, *(value for value in values if type(value) is OrderedDict)]
        self._tables = [(table, dict(table)) for table in tables]

    def restore(self) -> None:
        """Put it back. The numbers in buffers are as the call left them."""
        put_back(self.attributes)
        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
        for table, content in self._tables:
            table.clear()
            table.update(content)


@contextmanager
def state_kept(modules: Iterable[nn.Module], hooks: bool = True) -> Iterator[None]:
    """What a call inside changes on modules is put back (`ModuleState`), and of their buffers it gets copies to write to.

    `hooks`: theirs too; what runs in every step of training is spared the time.
    """
    before = ModuleState(modules, hooks)
    copies: dict[int, Tensor | None] = {}
    for table in before.buffers:
        for name, buffer in table.items():
            if id(buffer) not in copies:
                copies[id(buffer)] = None if buffer is None else buffer.clone()
            table[name] = copies[id(buffer)]
    try:
        yield
    finally:
        before.restore()


@contextmanager
def loss_kept(loss: object, model: nn.Module) -> Iterator[None]:
    """What a call inside changes on a loss that has a state of its own is put back. The model's own modules are left alone."""
    of_model = set(map(id, model.modules()))
    if isinstance(loss, nn.Module):
        with state_kept(module for module in loss.modules() if id(module) not in of_model):
            yield
        return
    own = is_user_class(type(loss)) and hasattr(loss, "__dict__")
    before = dict(vars(loss)) if own else {}
    values = HeldValues([loss] if own else [])
    try:
        yield
    finally:
        if own:
            vars(loss).clear()
            vars(loss).update(before)
            values.put_back()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards each of its modules is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def put_parameters(model: nn.Module, new: Mapping[int, nn.Parameter]) -> None:
    """Put other parameters in the place of some (id -> the new one), wherever the model uses them: tied ones stay tied."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in new:
                setattr(module, name, new[id(parameter)])


def exchange_tensors(model: nn.Module, one: Callable[[Tensor], Tensor]) -> None:
    """Other parameters and buffers in the place of all of a model's, tensor by tensor: `nn.Module.to` cannot exchange fake ones in place."""
    put_parameters(model, {id(p): like(p, one(p)) for p in model.parameters()})
    for module in model.modules():
        buffers = own_buffers(module)
        buffers.update({name: None if b is None else one(b) for name, b in buffers.items()})


def format_in(t: Tensor, cast: torch.dtype | None) -> torch.dtype:
    """The format that a tensor has where floating tensors are in `cast`: complex ones in the complex format of that size."""
    if cast is None or not (t.is_floating_point() or t.is_complex()):
        return t.dtype
    return cast.to_complex() if t.is_complex() else cast


def device_of(module: nn.Module, otherwise: torch.device) -> torch.device:
    """Where a module's parameters are; `otherwise` for one that has none, or on the meta device alone."""
    return next((p.device for p in module.parameters() if not p.is_meta), otherwise)


def convert(root: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
    """The module on the device (None: where it is), its floating and complex tensors in `dtype` when given; what is on the meta
    device stays there."""

    def moved(t: Tensor) -> Tensor:
        return t.to("meta" if t.device.type == "meta" else device, format_in(t, dtype))

    return each_tensor(root, moved)


def materialise(root: nn.Module, device: torch.device) -> None:
    """Give the meta parameters and buffers of a sharded model storage on the device; the others stay what they are."""
    each_tensor(root, lambda t: torch.empty_like(t, device=device) if t.device.type == "meta" else t)
