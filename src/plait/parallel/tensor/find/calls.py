"""Calls of a model's modules as the finder of slices keeps them, and how it listens to modules without changing them."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from plait.model.meter import tensors_in
from plait.randomness import keyed
from plait.tensors.torch_private import tree_map, tree_map_only

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, nn.Module, type)


@dataclass
class ModuleCall:
    """One call of a module that is no map."""

    name: str
    module: nn.Module
    parents: tuple[int, ...]
    """Numbers of the frames it lies in, the model's own first, and its own number last."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """What it was given, as it was before the call."""
    given: int
    """Sources of that."""
    state: Any = None
    """Of the host's generators of random numbers, before the call."""
    left: int = 0
    """When it ended."""
    output: list[Any] = field(default_factory=list)
    """Leaves of what it returned."""
    live: tuple[int, ...] = ()
    """Places of those that something uses later."""


@dataclass
class MapCall:
    """One call of a map."""

    name: str
    bit: int
    parents: tuple[int, ...]
    reads: int
    """Sources of its input."""
    output: Any
    returned: bool = False
    """The model returns its output as it is."""
    used: tuple[int, ...] = ()
    """Places of those leaves of its output that anything looks at."""


class Still(TorchFunctionMode):
    """Nothing is dropped out, so that two runs can be compared."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in keyed.PLAIN_DROPOUTS or func in keyed.FEATURE_DROPOUTS:
            return _kept(*args, **kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention:
            keys = (*args[1:3], *(kwargs[name] for name in ("key", "value") if name in kwargs))
            if any(
                t.dim() > 2 and not t.shape[-3] for t in keys
            ):  # torch 2.11 divides by their number: the process ends
                raise ValueError("attention without a head of keys or values")
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        return func(*args, **kwargs)


def hollow(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a map would return, with random numbers in it; only shapes are computed."""
    given = tree_map_only(Tensor, lambda t: t.detach().to("meta"), (args, kwargs))
    meta = {name: p.detach().to("meta", torch.float64) for name, p in module.named_parameters()}
    trained = any(t.requires_grad for t in (*module.parameters(), *tensors_in((args, kwargs))))
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        output = functional_call(module, meta, *given)
    finally:
        vars(module)["forward"] = own
    return tree_map_only(Tensor, lambda t: _random(t, trained and torch.is_grad_enabled()), output)


def _random(like: Tensor, trained: bool) -> Tensor:
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    return torch.empty(like.shape, dtype=torch.float64).uniform_(-0.5, 0.5).requires_grad_(trained).clone()


def _kept(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True) -> Tensor:
    return input if inplace else input.clone()


@contextmanager
def patched(modules: Mapping[str, nn.Module], make: Callable[[str, nn.Module, Any], Any]) -> Iterator[None]:
    """Give modules other forwards: `make(name, module, its forward)`."""
    own = {name: vars(module).get("forward") for name, module in modules.items()}
    for name, module in modules.items():
        module.__dict__["forward"] = make(name, module, module.forward)
    try:
        yield
    finally:
        for name, module in modules.items():
            if own[name] is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own[name]


def snapshot(tree: Any) -> Any:
    """The same arguments; objects that a call may change, such as a cache of keys, are copied, their tensors are not."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, (Tensor, *_PLAIN)) or callable(leaf) or not hasattr(leaf, "__dict__"):
            return leaf
        try:
            return copy.deepcopy(leaf, {id(t): t for t in tensors_in(leaf)})
        except Exception:  # it cannot be copied: then it is used as it is
            return leaf

    return tree_map(copied, tree)
