"""One run of a model in which every tensor knows the linear maps and parameters it was computed from.

A set of sources is a whole number whose bits stand for calls of maps and for parameters. Sources go through any code
up to the next map and no further: what comes out of a map has that call alone for its source. They are followed twice,
because each way misses something: torch functions are seen as they are called, in place or not (custom autograd
functions are not among them), and autograd's graph is walked backwards (it ends at a `detach`).

Maps return random numbers of the right shape: no weight of one is read, and the run costs the same for a model whose
weights do not fit, or that has none yet. Only a model that differentiates in its own forward needs their `numbers`.
"""

import copy
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from plait.model.meter import flat, tensors_in
from plait.randomness import keyed
from plait.randomness.distributions import DROPOUTS, dropout_call
from plait.tensors.modules import forwards_kept
from plait.tensors.opaque_code import READS
from plait.tensors.torch_private import leaves, no_functions, storage_key, tree_map, tree_map_only

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
    state: keyed.HostState
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
    output: object
    returned: bool = False
    """The model returns its output as it is."""
    used: tuple[int, ...] = ()
    """Places of those leaves of its output that anything looks at."""


class Still(TorchFunctionMode):
    """Nothing is dropped out, so that two runs can be compared."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in DROPOUTS:
            dropout = dropout_call(func, *args, **kwargs)
            return dropout.input if dropout.inplace else dropout.input.clone()
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
    """What a map would return, without numbers: only shapes are computed."""
    on_meta = tree_map_only(Tensor, lambda t: t.detach().to("meta"), (args, kwargs))
    meta = {name: p.detach().to("meta", torch.float64) for name, p in module.named_parameters()}
    trained = any(t.requires_grad for t in (*module.parameters(), *tensors_in((args, kwargs))))
    with forwards_kept([module]):
        vars(module)["forward"] = forward
        output = functional_call(module, meta, *on_meta)
    trained &= torch.is_grad_enabled()
    return tree_map_only(Tensor, lambda t: t.detach().requires_grad_(trained and t.is_floating_point()), output)


def _random(like: Tensor) -> Tensor:
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    drawn = torch.empty(like.shape, dtype=torch.float64).uniform_(-0.5, 0.5)
    return drawn.add_(torch.zeros((), dtype=torch.float64, requires_grad=True)) if like.requires_grad else drawn


class TooLarge(Exception):
    """Following the model takes more memory than it may."""


Patch = Callable[[str, nn.Module, Callable[..., Any]], Callable[..., Any]]
"""(name, module, its forward) -> the forward in its place."""


@contextmanager
def patched(modules: Mapping[str, nn.Module], make: Patch) -> Iterator[None]:
    """Give modules other forwards."""
    with forwards_kept(modules.values()):
        for name, module in modules.items():
            vars(module)["forward"] = make(name, module, module.forward)
        yield


def snapshot(tree: object) -> Any:
    """The same arguments; objects that a call may change, such as a cache of keys, are copied, their tensors are not."""

    def copied(leaf: object) -> object:
        if isinstance(leaf, (Tensor, *_PLAIN)) or callable(leaf) or not hasattr(leaf, "__dict__"):
            return leaf
        try:
            return copy.deepcopy(leaf, {id(t): t for t in tensors_in(leaf)})
        except Exception:  # it cannot be copied: then it is used as it is
            return leaf

    return tree_map(copied, tree)


def _never(_: object) -> Tensor:
    raise RuntimeError("the model goes back through what it computed")


class DataflowTrace(TorchFunctionMode):
    """The mode that passes sources on; `run` does all of it. `opaque`: modules taken as maps, whatever they do."""

    def __init__(self, model: nn.Module, opaque: Mapping[str, nn.Module], numbers: bool = False, most: float = math.inf):
        super().__init__()
        self.model, self.opaque, self.numbers, self.left = model, opaque, numbers, most
        self.frames: list[ModuleCall] = []
        self.calls: list[MapCall] = []
        self.output = 0
        """Sources of what the model returns, and of what its code decides by."""
        self.stray: set[str] = set()
        """Parameters that are used outside of the module that holds them."""
        self.bits: dict[str, int] = {}
        self.parameters = {id(p): name for name, p in model.named_parameters()}
        self.hidden = {id(p) for m in opaque.values() for p in m.parameters()}
        self._new_bits, self._time, self._off = itertools.count(), 0, 0
        self._stack: list[ModuleCall] = []
        self._own: list[set[int]] = [set()]
        self._kept: set[str] = set()
        self._of: dict[int, int] = {}
        self._written: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._nodes: dict[Node, int] = {}
        self._held: dict[int, weakref.ref[Tensor]] = {}
        self._alive: list[object] = []

    def run(self, call: Callable[[], Any]) -> "DataflowTrace":
        """Follow `call()`, which runs the model. Several runs add up."""
        first, earlier = len(self.frames), len(self.calls)
        kept = nullcontext() if self.numbers else saved_tensors_hooks(lambda _: None, _never)
        with patched(dict(self.model.named_modules()), self._wrapped), torch.enable_grad(), kept, self:
            output = call()
        returned = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
        self.output |= self._sources(returned)
        self._alive += returned
        self._use(returned)
        known = {id(t) for t in returned}
        for made in self.calls[earlier:]:
            parts = leaves(made.output)
            made.returned = any(id(t) in known for t in parts)
            made.used = tuple(i for i, t in enumerate(parts) if id(t) in self._used)
        for frame in self.frames[first:]:
            places = [i for i, t in enumerate(frame.output) if isinstance(t, Tensor)]
            frame.live = tuple(i for i in places if self._used.get(id(frame.output[i]), 0) > frame.left)
        return self

    # — what the rest of the finder asks —

    def made_by(self, name: str) -> list[MapCall]:
        """The calls of one map."""
        return [made for made in self.calls if made.name == name]

    def sources_of(self, name: str) -> int:
        """What the calls of one map are as sources."""
        return sum(1 << made.bit for made in self.made_by(name))

    def readers(self, sources: int) -> set[str]:
        """The maps whose input was computed from any of these sources."""
        return {made.name for made in self.calls if made.reads & sources}

    def maps_in(self, sources: int) -> list[MapCall]:
        """The calls among sources."""
        return [made for made in self.calls if sources >> made.bit & 1]

    # — modules —

    def _wrapped(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def as_map(*args: Any, **kwargs: Any) -> Any:
            if self._off:
                return forward(*args, **kwargs)
            with no_functions():
                given = list(tensors_in((args, kwargs)))
                self._use(given)
                reads = self._sources(given)
            self._off += 1
            try:
                output = forward(*args, **kwargs) if self.numbers else hollow(module, forward, args, kwargs)
                self._count(output)
                output = output if self.numbers else tree_map_only(Tensor, _random, output)
            finally:
                self._off -= 1
            self.calls.append(MapCall(name, next(self._new_bits), self._parents(), reads, output))
            self._alive.append(output)
            with no_functions():
                for tensor in tensors_in(output):
                    self._of[id(tensor)] = 1 << self.calls[-1].bit
                    if tensor.grad_fn is not None:
                        self._nodes[tensor.grad_fn] = 1 << self.calls[-1].bit
            return output

        @functools.wraps(forward)
        def as_frame(*args: Any, **kwargs: Any) -> Any:
            if self._off:
                return forward(*args, **kwargs)
            with no_functions():
                given = self._sources(tensors_in((args, kwargs)))
            parents = (*self._parents(), len(self.frames))
            state = keyed.host_state()
            frame = ModuleCall(name, module, parents, snapshot(args), snapshot(kwargs), given, state)
            self.frames.append(frame)
            self._stack.append(frame)
            self._own.append({id(p) for p in module.parameters(recurse=False)})
            try:
                output = forward(*args, **kwargs)
            finally:
                self._stack.pop()
                self._own.pop()
            frame.output, frame.left = leaves(output), self._time
            self._alive.append(output)
            return output

        return as_map if name in self.opaque else as_frame

    def _count(self, output: object) -> None:
        """What maps return stays until the model is understood: `TooLarge` before it takes more than it may."""
        self.left -= sum(t.numel() * torch.float64.itemsize for t in tensors_in(output))
        if self.left < 0:
            raise TooLarge

    def _parents(self) -> tuple[int, ...]:
        return self._stack[-1].parents if self._stack else ()

    # — tensors —

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._off:
            with no_functions():  # other modes need not see what this one asks
                self._passed(getattr(func, "__name__", ""), [*flat(args), *flat(kwargs)], flat(result))
        return result

    def _passed(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """A function of this name made the outputs of the inputs."""
        if outputs or name in READS or name == "__setitem__":
            self._use(inputs)
            sources = self._sources(inputs)
            if name in READS:
                self.output |= sources
            if sources and name == "__setitem__":
                self._mark_storage(inputs[0], sources)
            old = {id(t) for t in inputs}
            for tensor in outputs if sources else ():
                self._of[id(tensor)] = self._of.get(id(tensor), 0) | sources
                if id(tensor) in old:  # in place, or out=
                    self._mark_storage(tensor, sources)
        self._hold(outputs)

    def _use(self, tensors: list[Tensor]) -> None:
        self._time += 1
        for tensor in tensors:
            self._used[id(tensor)] = self._time
            name = self.parameters.get(id(tensor))
            if name is not None:
                (self._kept if id(tensor) in self._own[-1] else self.stray).add(name)
        self._hold(tensors)

    def _hold(self, tensors: Iterable[Tensor]) -> None:
        """What is known of a tensor is forgotten with it: its number may then be another's."""
        for tensor in tensors:
            key = id(tensor)
            if key not in self._held:
                self._held[key] = weakref.ref(tensor, functools.partial(self._forget, key))

    def _forget(self, key: int, _: object) -> None:
        for known in (self._of, self._used, self._held):
            known.pop(key, None)

    def _sources(self, tensors: Iterator[Tensor] | list[Tensor]) -> int:
        sources = 0
        for tensor in tensors:
            sources |= self._of.get(id(tensor), 0) | self._parameter(tensor)
            if self._written:
                sources |= self._written.get(storage_key(tensor), 0)
            if tensor.grad_fn is not None:
                sources |= self._walked(tensor.grad_fn)
        return sources

    def _parameter(self, tensor: object) -> int:
        name = self.parameters.get(id(tensor))
        if name is None:
            return 0
        if name not in self.bits:
            self.bits[name] = next(self._new_bits)
        return 1 << self.bits[name]

    def _mark_storage(self, tensor: Tensor, sources: int) -> None:
        """Also views of it, made before or after, see what was written."""
        storage = storage_key(tensor)
        self._written[storage] = self._written.get(storage, 0) | sources
        self._alive.append(tensor)

    def _walked(self, node: Node) -> int:
        """The sources in autograd's graph behind a node."""
        known, stack = self._nodes, [node]
        while stack:
            top = stack[-1]
            if top in known:
                stack.pop()
                continue
            behind = [k for k, _ in top.next_functions if k is not None]
            new = [k for k in behind if k not in known]
            if new:
                stack += new
                continue
            variable = getattr(top, "variable", None)
            known[top] = functools.reduce(int.__or__, (known[k] for k in behind), self._parameter(variable))
            if id(variable) in self.hidden and self.parameters[id(variable)] not in self._kept:
                self.stray.add(self.parameters[id(variable)])
            stack.pop()
        return known[node]
