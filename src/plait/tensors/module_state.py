"""Changes to modules from outside: another forward, restored state after a call, other parameters, eval mode.

Restoring covers values that a call may change in place in a module's attributes: lists, dicts, sets and deques, random generators, and
objects of user classes, also nested.
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
from plait.tensors.parameters import make_parameter_like
from plait.tensors.torch_private import map_tensors, own_buffers

Value = Any
"""Any type; the type determines how it is saved."""
LIST_TYPES, DICT_TYPES = (list, deque), (dict, OrderedDict, Counter, defaultdict)
MAX_LEVELS = 10
"""Maximum depth of nested values."""
MAX_ARRAY_BYTES = 1 << 20
"""Maximum bytes of a saved array; larger ones count as data."""
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes of every module that are not its own values."""


class SavedContents:
    """Saved contents of containers, generators and objects in attributes of modules.

    `libraries`: also of objects of libraries other than torch, such as a key-value cache; else of user classes only.

    """

    def __init__(self, modules: Iterable[object], libraries: bool = False):
        self._libraries = libraries
        self._content: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        for module in modules:
            for name, value in vars(module).items():
                if name not in MODULE_ATTRIBUTES:
                    self._add(value, 0)

    def _add(self, value: Value, level: int) -> None:
        kind = type(value)
        if kind in PLAIN_TYPES or id(value) in self._seen or level > MAX_LEVELS:
            return
        if kind in LIST_TYPES:
            content = list(value)
        elif kind in DICT_TYPES:
            content = dict(value)
        elif kind is set:
            content = set(value)
        elif kind is tuple:
            content = None
        else:
            content = _read_content(value, self._libraries)
            if content is None:
                return
        self._seen.add(id(value))
        self._content.append((value, content))
        inner = value if kind is tuple else content if kind in LIST_TYPES or kind is set else None
        if inner is None and type(content) is dict:
            inner = content.values()
        for each in inner or ():
            self._add(each, level + 1)

    def restore_contents(self) -> None:
        """Restore the saved contents in place."""
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


PLAIN_TYPES = frozenset((int, float, bool, str, type(None), torch.Tensor, nn.Parameter))
"""Types without nested values."""


def _read_content(value: Value, libraries: bool) -> Any:
    """Return the contents of a generator, or of an object of a user class; None for other values."""
    if isinstance(value, np.ndarray):
        return value.copy() if value.flags.writeable and value.nbytes <= MAX_ARRAY_BYTES else None
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
class SavedAttributes:
    """Saved attributes of modules, with their contents."""

    tables: list[tuple[nn.Module, dict[str, Any]]]
    values: SavedContents


def bind_forward(module: nn.Module) -> Callable[..., Any]:
    """Return a module's current forward, for use by a replacement.

    It is the forward of the module's class at call time, since a strategy may change the class, unless the module itself has
    a forward.

    """
    replaced = vars(module).get("forward")
    return partial(_forward_by_class, module) if replaced is None else replaced


def _forward_by_class(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return run_class_forward(type(module), module, *args, **kwargs)


WRAPPER_ATTRIBUTE = "class_forward_through"
"""Attribute of a module: function that wraps the forward of its class."""
STRATEGY_ATTRIBUTES = frozenset(("_noting", "_silent", "_resized", "_gathered", "_rows", "_ranks", "_owed", WRAPPER_ATTRIBUTE, "forward"))
"""Attributes that strategies set on modules and change in every step."""
DELEGATES_ATTRIBUTE = "wraps_class_forward"
"""Attribute of a class: its forward only prepares, and calls `run_class_forward` of another class."""


def run_class_forward(kind: type[nn.Module], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a class's forward with this module, through its wrapper if there is one (`wrap_class_forward`)."""
    through = vars(module).get(WRAPPER_ATTRIBUTE)
    if through is None or DELEGATES_ATTRIBUTE in vars(kind):
        return kind.forward(module, *args, **kwargs)
    return through(kind.forward, module, *args, **kwargs)


def wrap_class_forward(module: nn.Module, through: Callable[..., Any]) -> None:
    """Call `through(forward, module, *args, **kwargs)` instead of the forward of the module's class.

    It runs inside of any other replacement of the module's forward, past or future.

    """
    vars(module)[WRAPPER_ATTRIBUTE] = through
    module.forward = bind_forward(module)


@contextmanager
def restore_forwards(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context that restores these modules' forwards on exit."""
    before = [(vars(module), vars(module).get("forward")) for module in modules]
    try:
        yield
    finally:
        for attributes, forward in before:
            attributes.pop("forward", None)
            if forward is not None:
                attributes["forward"] = forward


def save_attributes(modules: Iterable[nn.Module]) -> SavedAttributes:
    """Save the current attributes of modules for `restore_attributes`. Modules compiled by torch.jit are skipped."""
    kept = [module for module in modules if not is_scripted(module)]
    return SavedAttributes([(module, dict(vars(module))) for module in kept], SavedContents(kept))


def drop_scripted(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules without those compiled by torch.jit, which keep their state in C++."""
    modules = list(modules)
    compiled = {id(inner) for module in modules if is_scripted(module) for inner in module.modules()}
    return [module for module in modules if id(module) not in compiled]


def restore_attributes(attributes: SavedAttributes) -> None:
    """Restore the attributes of modules, with their contents."""
    for module, values in attributes.tables:
        vars(module).clear()
        vars(module).update(values)
    attributes.values.restore_contents()


class ModuleState:
    """Saved state of modules: attributes, registered parameters, buffers and submodules, and with `hooks` their hooks."""

    def __init__(self, modules: Iterable[nn.Module], hooks: bool = True):
        self.attributes = save_attributes(drop_scripted(modules))
        self.buffers = [own_buffers(module) for module, _ in self.attributes.tables]
        values = [value for _, values in self.attributes.tables for value in values.values()] if hooks else []
        values += [buffer for module in modules if is_scripted(module) for buffer in module.buffers(recurse=False)]
        self._tensors = [(value, value.clone()) for value in values if type(value) is Tensor and not value.is_meta]
        content = [vars(module)[name] for module, _ in self.attributes.tables for name in ("_parameters", "_modules")]
        tables: list[dict[Any, Any]] = [*self.buffers, *content, *(value for value in values if type(value) is OrderedDict)]
        self._tables = [(table, dict(table)) for table in tables]

    def restore(self) -> None:
        """Restore the state, except the values of buffers."""
        restore_attributes(self.attributes)
        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
        for table, content in self._tables:
            table.clear()
            table.update(content)


@contextmanager
def restore_module_state(modules: Iterable[nn.Module], hooks: bool = True) -> Iterator[None]:
    """Context that restores the modules' state on exit (`ModuleState`). Inside, buffers are copies.

    `hooks`: also restore hooks; training steps skip this to save time.

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
def restore_loss_state(loss: object, model: nn.Module) -> Iterator[None]:
    """Context that restores the state of a loss on exit. Modules of the model are left unchanged."""
    of_model = set(map(id, model.modules()))
    if isinstance(loss, nn.Module):
        with restore_module_state(module for module in loss.modules() if id(module) not in of_model):
            yield
        return
    own = is_user_class(type(loss)) and hasattr(loss, "__dict__")
    before = dict(vars(loss)) if own else {}
    values = SavedContents([loss] if own else [])
    try:
        yield
    finally:
        if own:
            vars(loss).clear()
            vars(loss).update(before)
            values.restore_contents()


@contextmanager
def use_eval_mode(model: nn.Module) -> Iterator[None]:
    """Context with the model in eval mode; on exit each module is back in its previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def replace_parameters(model: nn.Module, new: Mapping[int, nn.Parameter]) -> None:
    """Replace parameters (id -> new one) wherever the model uses them; tied ones stay tied."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in new:
                setattr(module, name, new[id(parameter)])


def replace_tensors(model: nn.Module, one: Callable[[Tensor], Tensor]) -> None:
    """Replace all parameters and buffers of a model by `one(tensor)`; `nn.Module.to` cannot replace fake ones in place."""
    replace_parameters(model, {id(p): make_parameter_like(p, one(p)) for p in model.parameters()})
    for module in model.modules():
        buffers = own_buffers(module)
        buffers.update({name: None if b is None else one(b) for name, b in buffers.items()})


def choose_dtype(t: Tensor, cast: torch.dtype | None) -> torch.dtype:
    """Return a tensor's dtype if floating tensors are in `cast`; complex ones have the matching complex dtype."""
    if cast is None or not (t.is_floating_point() or t.is_complex()):
        return t.dtype
    return cast.to_complex() if t.is_complex() else cast


def find_device(module: nn.Module, otherwise: torch.device) -> torch.device:
    """Return the device of a module's parameters; `otherwise` if it has none, or only meta parameters."""
    return next((p.device for p in module.parameters() if not p.is_meta), otherwise)


def convert_module(root: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> nn.Module:
    """Move the module to the device (None: keep it) and cast floating and complex tensors to `dtype`; meta tensors stay meta."""

    def move_tensor(t: Tensor) -> Tensor:
        return t.to("meta" if t.device.type == "meta" else device, choose_dtype(t, dtype))

    return map_tensors(root, move_tensor)


def materialize(root: nn.Module, device: torch.device) -> None:
    """Allocate the meta parameters and buffers of a sharded model on the device; others are unchanged."""
    map_tensors(root, lambda t: torch.empty_like(t, device=device) if t.device.type == "meta" else t)
