"""Attributes that a job sets on parameters: class, attributes and gradient hooks, and their copies on other tensors.

Optimizers use attributes (`p._no_weight_decay`), and forward passes may too. A rank often trains another tensor instead of the job's
parameter, such as its shard. Such tensors must be created with `make_parameter_like` or `ParameterAttributes`.

`LiveStorages` is a set of storages that are alive.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from plait.tensors.rows import Ranges, copy_ranges
from plait.tensors.torch_private import FakeTensor, FakeTensorMode, gradient_hooks, set_gradient_hooks, storage_key


class LiveStorages:
    """Set of storages, each named by one of its tensors. A storage leaves the set when it is freed, since its key may be reused."""

    def __init__(self, ended: Callable[[int], None] = lambda key: None):
        self._storages = dict[int, ReferenceType[object]]()
        self._ended = ended

    def __contains__(self, t: Tensor) -> bool:
        return storage_key(t) in self._storages

    def __len__(self) -> int:
        return len(self._storages)

    def add(self, t: Tensor) -> None:
        key = storage_key(t)
        self._storages[key] = ref(t.untyped_storage() if t.layout is torch.strided else t, lambda _: self._on_ended(key))

    def discard(self, t: Tensor) -> None:
        self._storages.pop(storage_key(t), None)

    def _on_ended(self, key: int) -> None:
        self._storages.pop(key, None)
        self._ended(key)


Module = TypeVar("Module", bound=nn.Module)
Hook = Callable[..., Tensor | None]


@dataclass(frozen=True)
class ParameterAttributes:
    """The class of a parameter, its shape, and the attributes that code has set on it."""

    kind: type[Any] = nn.Parameter
    shape: tuple[int, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def capture(parameter: Tensor) -> "ParameterAttributes":
        """Return the attributes of a parameter, without those that torch sets on tensors of its class."""
        kind, values, shape = type(parameter), dict(vars(parameter)), tuple(parameter.shape)
        if kind is not nn.Parameter and values:
            for name in _fake_attributes() if issubclass(kind, FakeTensor) else vars(nn.Parameter(parameter.detach(), False)):
                values.pop(name, None)
        known = kind is not nn.Parameter and not issubclass(kind, FakeTensor) and not hasattr(parameter, "placements")
        return ParameterAttributes(kind if known else nn.Parameter, shape, values)

    def __bool__(self) -> bool:
        return self.kind is not nn.Parameter or bool(self.values)

    def apply_to(self, parameter: Tensor, ranges: Sequence[Ranges] | None = None) -> None:
        """Set the attributes on another parameter, which has these ranges of the full one (None: all). Attribute tensors of the full shape, up to
        dims of size one, are sliced alike."""
        if self.kind is not nn.Parameter and type(parameter) is nn.Parameter:
            parameter.__class__ = self.kind
        if self.kind is not nn.Parameter and not issubclass(self.kind, nn.Parameter):
            vars(parameter)["_is_param"] = True
        for name, value in self.values.items():
            vars(parameter)[name] = value if ranges is None else self._slice_value(value, ranges)

    def make_parameter(self, data: Tensor, requires_grad: bool, ranges: Sequence[Ranges] | None = None) -> nn.Parameter:
        """Create a parameter of this data with the attributes."""
        made = nn.Parameter(data, requires_grad)
        self.apply_to(made, ranges)
        return made

    def _slice_value(self, value: object, ranges: Sequence[Ranges]) -> object:
        if not isinstance(value, Tensor) or value.dim() != len(self.shape):
            return value
        if any(n not in (1, whole) for n, whole in zip(value.shape, self.shape)):
            return value
        for dim, held in enumerate(ranges):
            if value.shape[dim] == self.shape[dim] and held != ((0, self.shape[dim]),):
                value = copy_ranges(value, dim, held)
        return value


@cache
def _fake_attributes() -> frozenset[str]:
    """Return the attributes that torch sets on every fake parameter."""
    with FakeTensorMode():
        return frozenset(vars(nn.Parameter(torch.empty(0), False)))


def make_parameter_like(parameter: Tensor, data: Tensor, ranges: Sequence[Ranges] | None = None) -> nn.Parameter:
    """Create a parameter of this data with the class, attributes and hooks of `parameter`. `ranges`: its part of it."""
    made = ParameterAttributes.capture(parameter).make_parameter(data, parameter.requires_grad, ranges)
    _copy_hooks(parameter, made)
    return made


def apply_attributes(
    parameters: dict[str, nn.Parameter], attributes: Mapping[str, ParameterAttributes]
) -> dict[str, nn.Parameter]:
    """Set the attributes of the same names on these stand-ins, and return them."""
    for name, parameter in parameters.items():
        if name in attributes:
            attributes[name].apply_to(parameter)
    return parameters


def copy_module(module: Module, memo: dict[int, Any] | None = None) -> Module:
    """Deep-copy a module, with attributes and hooks of parameters, which torch's own copy omits."""
    made = deep_copy(module, memo or {})
    for one, other in zip(module.parameters(), made.parameters()):
        if one is not other:
            ParameterAttributes.capture(one).apply_to(other)
            _copy_hooks(one, other)
    return made


def deep_copy(module: Module, memo: Mapping[int, Any]) -> Module:
    """Run `copy.deepcopy` with `memo`, sharing values that cannot be copied, such as a scripted function or a lock."""
    try:
        return copy.deepcopy(module, {**memo})
    except Exception:
        own = {id(one): one for one in (*module.modules(), *module.parameters(), *module.buffers())}
        shared = {id(value): value for one in module.modules() for value in _iter_values(vars(one)) if not _can_copy(value, own)}
        if not shared:
            raise
        return copy.deepcopy(module, {**memo, **shared})


def _iter_values(value: object) -> Iterator[object]:
    """Yield the values nested in dicts, lists and tuples."""
    if isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _iter_values(one)
    else:
        yield value


def _can_copy(value: object, own: Mapping[int, object]) -> bool:
    """Return whether a module's value can be copied if the modules and tensors in `own` are shared."""
    try:
        copy.deepcopy(value, {**own})
    except Exception:
        return False
    return True


def _copy_hooks(parameter: Tensor, other: Tensor) -> None:
    before, after = gradient_hooks(parameter)
    if before or after:
        set_gradient_hooks(
            other, OrderedDict() if before is None else before, OrderedDict() if after is None else after
        )


@dataclass(frozen=True)
class ParameterHooks:
    """Gradient hooks of a parameter, by number: torch's own tables, from which a handle removes its hook."""

    before: Mapping[int, Hook] = field(default_factory=dict)
    """Hooks of `register_hook`: they receive the gradient and may return another."""
    after: Mapping[int, Hook] = field(default_factory=dict)
    """Hooks of `register_post_accumulate_grad_hook`: they receive the parameter with its gradient."""

    def __bool__(self) -> bool:
        return bool(self.before or self.after)

    @staticmethod
    def detach_from(parameter: Tensor) -> "ParameterHooks":
        """Remove the hooks from a parameter, so that backward passes no longer call them, and return them."""
        before, after = gradient_hooks(parameter)
        if before or after:
            set_gradient_hooks(parameter, OrderedDict(), OrderedDict())
        return ParameterHooks(before or {}, after or {})

    @staticmethod
    def find_job_hooks(parameter: Tensor, take: bool = False) -> "ParameterHooks":
        """Return the job's own hooks, without those of plait, torch or read-only trackers. `take`: also remove them."""
        tables = gradient_hooks(parameter)
        found = [{n: hook for n, hook in (table or {}).items() if not _is_internal(hook)} for table in tables]
        for table, jobs in zip(tables, found):
            for number in jobs if take else ():
                del table[number]
        return ParameterHooks(*found)


def _is_internal(hook: object) -> bool:
    hook = getattr(hook, "func", hook)  # a partial function
    return str(getattr(hook, "__module__", "")).startswith(("plait.", "torch.distributed.", "wandb."))
