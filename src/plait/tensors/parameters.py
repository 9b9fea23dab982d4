"""What a job has put on a parameter: its class, attributes, and hooks on its gradient; and other tensors with the same.

Optimizers go by attributes (`p._no_weight_decay`), and so may forward passes. A rank often trains another tensor in the place of the
job's parameter, such as its shard. Whatever makes such a tensor makes it with `like`, or with `ParameterAttributes`.

Sets of storages while they live (`LiveStorages`).
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

from plait.tensors.rows import Ranges, taken
from plait.tensors.torch_private import FakeTensor, FakeTensorMode, gradient_hooks, put_gradient_hooks, storage_key


class LiveStorages:
    """Storages, each named by a tensor that lies in it. One leaves the set when it ends: another may then get its key."""

    def __init__(self, ended: Callable[[int], None] = lambda key: None):
        self._storages = dict[int, ReferenceType[object]]()
        self._ended = ended

    def __contains__(self, t: Tensor) -> bool:
        return storage_key(t) in self._storages

    def __len__(self) -> int:
        return len(self._storages)

    def add(self, t: Tensor) -> None:
        key = storage_key(t)
        self._storages[key] = ref(t.untyped_storage() if t.layout is torch.strided else t, lambda _: self._end(key))

    def discard(self, t: Tensor) -> None:
        self._storages.pop(storage_key(t), None)

    def _end(self, key: int) -> None:
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
    def of(parameter: Tensor) -> "ParameterAttributes":
        """Those of a parameter. Attributes that torch itself sets on tensors of its class are no part of them."""
        kind, values, shape = type(parameter), dict(vars(parameter)), tuple(parameter.shape)
        if kind is not nn.Parameter and values:
            for name in _fake_attributes() if issubclass(kind, FakeTensor) else vars(nn.Parameter(parameter.detach(), False)):
                values.pop(name, None)
        known = kind is not nn.Parameter and not issubclass(kind, FakeTensor) and not hasattr(parameter, "placements")
        return ParameterAttributes(kind if known else nn.Parameter, shape, values)

    def __bool__(self) -> bool:
        return self.kind is not nn.Parameter or bool(self.values)

    def put_on(self, parameter: Tensor, ranges: Sequence[Ranges] | None = None) -> None:
        """Give them to another parameter, which has these ranges of the whole (None: all). Tensors with the shape of the whole, up to
        dims of one row, are cut as it is."""
        if self.kind is not nn.Parameter and type(parameter) is nn.Parameter:
            parameter.__class__ = self.kind
        if self.kind is not nn.Parameter and not issubclass(self.kind, nn.Parameter):
            vars(parameter)["_is_param"] = True
        for name, value in self.values.items():
            vars(parameter)[name] = value if ranges is None else self._cut(value, ranges)

    def parameter(self, data: Tensor, requires_grad: bool, ranges: Sequence[Ranges] | None = None) -> nn.Parameter:
        """A parameter of this data with them."""
        made = nn.Parameter(data, requires_grad)
        self.put_on(made, ranges)
        return made

    def _cut(self, value: object, ranges: Sequence[Ranges]) -> object:
        if not isinstance(value, Tensor) or value.dim() != len(self.shape):
            return value
        if any(n not in (1, whole) for n, whole in zip(value.shape, self.shape)):
            return value
        for dim, held in enumerate(ranges):
            if value.shape[dim] == self.shape[dim] and held != ((0, self.shape[dim]),):
                value = taken(value, dim, held)
        return value


@cache
def _fake_attributes() -> frozenset[str]:
    """Attributes that torch sets on every fake parameter."""
    with FakeTensorMode():
        return frozenset(vars(nn.Parameter(torch.empty(0), False)))


def like(parameter: Tensor, data: Tensor, ranges: Sequence[Ranges] | None = None) -> nn.Parameter:
    """A parameter of this data with the class, the attributes and the hooks of another. `ranges`: what it has of the other."""
    made = ParameterAttributes.of(parameter).parameter(data, parameter.requires_grad, ranges)
    _hook(parameter, made)
    return made


def with_attributes(
    parameters: dict[str, nn.Parameter], attributes: Mapping[str, ParameterAttributes]
) -> dict[str, nn.Parameter]:
    """These stand-ins, with the attributes of the parameters of their names."""
    for name, parameter in parameters.items():
        if name in attributes:
            attributes[name].put_on(parameter)
    return parameters


def copy_module(module: Module, memo: dict[int, Any] | None = None) -> Module:
    """A deep copy of a module. torch's own leaves out attributes and hooks of parameters."""
    made = deep_copy(module, memo or {})
    for one, other in zip(module.parameters(), made.parameters()):
        if one is not other:
            ParameterAttributes.of(one).put_on(other)
            _hook(one, other)
    return made


def deep_copy(module: Module, memo: Mapping[int, Any]) -> Module:
    """`copy.deepcopy` with what `memo` has by id, which shares what modules have that cannot be copied: a scripted function, a lock."""
    try:
        return copy.deepcopy(module, {**memo})
    except Exception:
        own = {id(one): one for one in (*module.modules(), *module.parameters(), *module.buffers())}
        shared = {id(value): value for one in module.modules() for value in _values(vars(one)) if not _copied(value, own)}
        if not shared:
            raise
        return copy.deepcopy(module, {**memo, **shared})


def _values(value: object) -> Iterator[object]:
    """What is in dicts, lists and tuples."""
    if isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _values(one)
    else:
        yield value


def _copied(value: object, own: Mapping[int, object]) -> bool:
    """Whether a value of a module, without modules and tensors of its own in it, can be copied."""
    try:
        copy.deepcopy(value, {**own})
    except Exception:
        return False
    return True


def _hook(parameter: Tensor, other: Tensor) -> None:
    before, after = gradient_hooks(parameter)
    if before or after:
        put_gradient_hooks(
            other, OrderedDict() if before is None else before, OrderedDict() if after is None else after
        )


@dataclass(frozen=True)
class ParameterHooks:
    """Hooks on the gradient of a parameter, by number: torch's own tables, from which a handle removes its hook."""

    before: Mapping[int, Hook] = field(default_factory=dict)
    """Of `register_hook`: they are given the gradient, and may return another."""
    after: Mapping[int, Hook] = field(default_factory=dict)
    """Of `register_post_accumulate_grad_hook`: they are given the parameter, with its gradient."""

    def __bool__(self) -> bool:
        return bool(self.before or self.after)

    @staticmethod
    def taken(parameter: Tensor) -> "ParameterHooks":
        """Take the hooks off a parameter: backward passes no longer call them."""
        before, after = gradient_hooks(parameter)
        if before or after:
            put_gradient_hooks(parameter, OrderedDict(), OrderedDict())
        return ParameterHooks(before or {}, after or {})

    @staticmethod
    def of_job(parameter: Tensor, take: bool = False) -> "ParameterHooks":
        """Those that are not plait's, torch's for its own use, or a tracker's, which only looks; taken off the parameter, if so."""
        tables = gradient_hooks(parameter)
        found = [{n: hook for n, hook in (table or {}).items() if not _internal(hook)} for table in tables]
        for table, jobs in zip(tables, found):
            for number in jobs if take else ():
                del table[number]
        return ParameterHooks(*found)


def _internal(hook: object) -> bool:
    hook = getattr(hook, "func", hook)  # a partial function
    return str(getattr(hook, "__module__", "")).startswith(("plait.", "torch.distributed.", "wandb."))
