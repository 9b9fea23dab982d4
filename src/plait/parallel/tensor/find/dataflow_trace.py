"""Trace of one model run that records, for every tensor, the linear layers and parameters that it was computed from.

A set of sources is an integer whose bits stand for calls of linear layers ("maps") and for parameters. Sources
propagate through all code up to the next map; the output of a map has only that call as source. They are followed in
two ways, because each misses something. Torch functions are intercepted, in place or not, except custom autograd
functions. The autograd graph is walked backward, until a `detach`.

Maps return random values of the right shape, and their weights are not read. So the trace also works for models whose
weights do not fit or do not exist yet. Only a model that differentiates in its own forward needs real outputs
(`with_values`).
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

from plait.model.meter import flatten_tensors, iter_tensors
from plait.randomness import keyed
from plait.randomness.distributions import DROPOUTS, parse_dropout_call
from plait.tensors.module_state import restore_forwards
from plait.tensors.opaque_code import READ_FUNCTIONS
from plait.tensors.torch_private import dataclass_leaves, no_functions, storage_key, tree_map, tree_map_only

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, nn.Module, type)


@dataclass
class ModuleCall:
    """One call of a module that is not a map."""

    name: str
    module: nn.Module
    parents: tuple[int, ...]
    """Indices of the enclosing module calls, outermost first, ending with its own index."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """A copy of the arguments before the call."""
    sources: int
    """Sources of the arguments."""
    state: keyed.HostState
    """State of the host's random generators before the call."""
    end_time: int = 0
    """Time at which the call ended."""
    output: list[Any] = field(default_factory=list)
    """Leaves of the output."""
    used_leaves: tuple[int, ...] = ()
    """Indices of output leaves that later code uses."""


@dataclass
class MapCall:
    """One application of a linear layer: its operands and its result, by index."""

    name: str
    bit: int
    parents: tuple[int, ...]
    sources: int
    """Sources of the input."""
    output: object
    is_returned: bool = False
    """True if the model returns the output unchanged."""
    used_leaves: tuple[int, ...] = ()
    """Indices of output leaves that later code uses."""


class DisableDropout(TorchFunctionMode):
    """Disables dropout, so that two runs are comparable."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in DROPOUTS:
            dropout = parse_dropout_call(func, *args, **kwargs)
            return dropout.input if dropout.inplace else dropout.input.clone()
        if func is torch.nn.functional.scaled_dot_product_attention:
            keys = (*args[1:3], *(kwargs[name] for name in ("key", "value") if name in kwargs))
            if any(
                t.dim() > 2 and not t.shape[-3] for t in keys
            ):  # torch 2.11 divides by their number, and the process crashes
                raise ValueError("attention needs at least one head of keys and values")
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        return func(*args, **kwargs)


def run_on_meta(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a map's output without values, by a run on the meta device."""
    on_meta = tree_map_only(Tensor, lambda t: t.detach().to("meta"), (args, kwargs))
    meta = {name: p.detach().to("meta", torch.float64) for name, p in module.named_parameters()}
    trained = any(t.requires_grad for t in (*module.parameters(), *iter_tensors((args, kwargs))))
    with restore_forwards([module]):
        vars(module)["forward"] = forward
        output = functional_call(module, meta, *on_meta)
    trained &= torch.is_grad_enabled()
    return tree_map_only(Tensor, lambda t: t.detach().requires_grad_(trained and t.is_floating_point()), output)


def _random_output(like: Tensor) -> Tensor:
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    drawn = torch.empty(like.shape, dtype=torch.float64).uniform_(-0.5, 0.5)
    return drawn.add_(torch.zeros((), dtype=torch.float64, requires_grad=True)) if like.requires_grad else drawn


class TraceTooLarge(Exception):
    """Raised if the outputs of maps exceed the memory limit."""


Patch = Callable[[str, nn.Module, Callable[..., Any]], Callable[..., Any]]
"""(name, module, its forward) -> the replacement of its forward."""


@contextmanager
def patch_forwards(modules: Mapping[str, nn.Module], make: Patch) -> Iterator[None]:
    """Replace forwards of modules inside this context."""
    with restore_forwards(modules.values()):
        for name, module in modules.items():
            vars(module)["forward"] = make(name, module, module.forward)
        yield


def copy_arguments(tree: object) -> Any:
    """Copy arguments before a call. Objects that the call may change, such as a cache of keys, are copied, but not
    their tensors."""

    def copy_leaf(leaf: object) -> object:
        if isinstance(leaf, (Tensor, *_PLAIN)) or callable(leaf) or not hasattr(leaf, "__dict__"):
            return leaf
        try:
            return copy.deepcopy(leaf, {id(t): t for t in iter_tensors(leaf)})
        except Exception:  # uncopyable objects are used as they are
            return leaf

    return tree_map(copy_leaf, tree)


def _reject_unpack(_: object) -> Tensor:
    raise RuntimeError("the model differentiates its own computation")


class DataflowTrace(TorchFunctionMode):
    """A mode that propagates sources during `run`. `opaque`: modules that are treated as maps."""

    def __init__(self, model: nn.Module, opaque: Mapping[str, nn.Module], numbers: bool = False, most: float = math.inf):
        super().__init__()
        self.model, self.opaque, self.with_values, self.bytes_left = model, opaque, numbers, most
        self.module_calls: list[ModuleCall] = []
        self.map_calls: list[MapCall] = []
        self.output_sources = 0
        """Sources of the model's output, and of values on which its code branches."""
        self.stray_parameters: set[str] = set()
        """Parameters that are used outside of their own module."""
        self.parameter_bits: dict[str, int] = {}
        self.parameters = {id(p): name for name, p in model.named_parameters()}
        self.hidden = {id(p) for m in opaque.values() for p in m.parameters()}
        self._new_bits, self._time, self._call_depth = itertools.count(), 0, 0
        self._stack: list[ModuleCall] = []
        self._own_ids: list[set[int]] = [set()]
        self._used_inside: set[str] = set()
        self._sources_by_id: dict[int, int] = {}
        self._storage_sources: dict[int, int] = {}
        self._use_times: dict[int, int] = {}
        self._node_sources: dict[Node, int] = {}
        self._tracked: dict[int, weakref.ref[Tensor]] = {}
        self._alive: list[object] = []

    def run(self, call: Callable[[], Any]) -> "DataflowTrace":
        """Trace `call()`, which runs the model. Several runs are accumulated."""
        first, earlier = len(self.module_calls), len(self.map_calls)
        kept = nullcontext() if self.with_values else saved_tensors_hooks(lambda _: None, _reject_unpack)
        with patch_forwards(dict(self.model.named_modules()), self._wrap_forward), torch.enable_grad(), kept, self:
            output = call()
        returned = [leaf for leaf in dataclass_leaves(output) if isinstance(leaf, Tensor)]
        self.output_sources |= self._find_sources(returned)
        self._alive += returned
        self._mark_used(returned)
        known = {id(t) for t in returned}
        for made in self.map_calls[earlier:]:
            parts = dataclass_leaves(made.output)
            made.is_returned = any(id(t) in known for t in parts)
            made.used_leaves = tuple(i for i, t in enumerate(parts) if id(t) in self._use_times)
        for frame in self.module_calls[first:]:
            places = [i for i, t in enumerate(frame.output) if isinstance(t, Tensor)]
            frame.used_leaves = tuple(i for i in places if self._use_times.get(id(frame.output[i]), 0) > frame.end_time)
        return self

    # — queries of the finder —

    def find_calls(self, name: str) -> list[MapCall]:
        return [made for made in self.map_calls if made.name == name]

    def find_sources(self, name: str) -> int:
        """Return the calls of one map as a set of sources."""
        return sum(1 << made.bit for made in self.find_calls(name))

    def find_readers(self, sources: int) -> set[str]:
        """Return the maps whose input was computed from any of these sources."""
        return {made.name for made in self.map_calls if made.sources & sources}

    def find_map_calls(self, sources: int) -> list[MapCall]:
        """Return the calls in a set of sources."""
        return [made for made in self.map_calls if sources >> made.bit & 1]

    # — modules —

    def _wrap_forward(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run_as_map(*args: Any, **kwargs: Any) -> Any:
            if self._call_depth:
                return forward(*args, **kwargs)
            with no_functions():
                given = list(iter_tensors((args, kwargs)))
                self._mark_used(given)
                reads = self._find_sources(given)
            self._call_depth += 1
            try:
                output = forward(*args, **kwargs) if self.with_values else run_on_meta(module, forward, args, kwargs)
                self._spend_bytes(output)
                output = output if self.with_values else tree_map_only(Tensor, _random_output, output)
            finally:
                self._call_depth -= 1
            self.map_calls.append(MapCall(name, next(self._new_bits), self._parents(), reads, output))
            self._alive.append(output)
            with no_functions():
                for tensor in iter_tensors(output):
                    self._sources_by_id[id(tensor)] = 1 << self.map_calls[-1].bit
                    if tensor.grad_fn is not None:
                        self._node_sources[tensor.grad_fn] = 1 << self.map_calls[-1].bit
            return output

        @functools.wraps(forward)
        def run_as_module(*args: Any, **kwargs: Any) -> Any:
            if self._call_depth:
                return forward(*args, **kwargs)
            with no_functions():
                given = self._find_sources(iter_tensors((args, kwargs)))
            parents = (*self._parents(), len(self.module_calls))
            state = keyed.get_host_state()
            frame = ModuleCall(name, module, parents, copy_arguments(args), copy_arguments(kwargs), given, state)
            self.module_calls.append(frame)
            self._stack.append(frame)
            self._own_ids.append({id(p) for p in module.parameters(recurse=False)})
            try:
                output = forward(*args, **kwargs)
            finally:
                self._stack.pop()
                self._own_ids.pop()
            frame.output, frame.end_time = dataclass_leaves(output), self._time
            self._alive.append(output)
            return output

        return run_as_map if name in self.opaque else run_as_module

    def _spend_bytes(self, output: object) -> None:
        """Count the bytes of a map's output, which is kept until the end. Raises `TraceTooLarge` beyond the limit."""
        self.bytes_left -= sum(t.numel() * torch.float64.itemsize for t in iter_tensors(output))
        if self.bytes_left < 0:
            raise TraceTooLarge

    def _parents(self) -> tuple[int, ...]:
        return self._stack[-1].parents if self._stack else ()

    # — tensors —

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._call_depth:
            with no_functions():  # other modes must not see these functions
                self._propagate(getattr(func, "__name__", ""), [*flatten_tensors(args), *flatten_tensors(kwargs)], flatten_tensors(result))
        return result

    def _propagate(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Propagate sources from the inputs to the outputs of the function `name`."""
        if outputs or name in READ_FUNCTIONS or name == "__setitem__":
            self._mark_used(inputs)
            sources = self._find_sources(inputs)
            if name in READ_FUNCTIONS:
                self.output_sources |= sources
            if sources and name == "__setitem__":
                self._mark_storage(inputs[0], sources)
            old = {id(t) for t in inputs}
            for tensor in outputs if sources else ():
                self._sources_by_id[id(tensor)] = self._sources_by_id.get(id(tensor), 0) | sources
                if id(tensor) in old:  # in place, or by out=
                    self._mark_storage(tensor, sources)
        self._track(outputs)

    def _mark_used(self, tensors: list[Tensor]) -> None:
        self._time += 1
        for tensor in tensors:
            self._use_times[id(tensor)] = self._time
            name = self.parameters.get(id(tensor))
            if name is not None:
                (self._used_inside if id(tensor) in self._own_ids[-1] else self.stray_parameters).add(name)
        self._track(tensors)

    def _track(self, tensors: Iterable[Tensor]) -> None:
        """Forget a tensor's records when it is freed, because another tensor may then get the same id."""
        for tensor in tensors:
            key = id(tensor)
            if key not in self._tracked:
                self._tracked[key] = weakref.ref(tensor, functools.partial(self._forget, key))

    def _forget(self, key: int, _: object) -> None:
        for known in (self._sources_by_id, self._use_times, self._tracked):
            known.pop(key, None)

    def _find_sources(self, tensors: Iterator[Tensor] | list[Tensor]) -> int:
        sources = 0
        for tensor in tensors:
            sources |= self._sources_by_id.get(id(tensor), 0) | self._parameter_source(tensor)
            if self._storage_sources:
                sources |= self._storage_sources.get(storage_key(tensor), 0)
            if tensor.grad_fn is not None:
                sources |= self._walk_graph(tensor.grad_fn)
        return sources

    def _parameter_source(self, tensor: object) -> int:
        name = self.parameters.get(id(tensor))
        if name is None:
            return 0
        if name not in self.parameter_bits:
            self.parameter_bits[name] = next(self._new_bits)
        return 1 << self.parameter_bits[name]

    def _mark_storage(self, tensor: Tensor, sources: int) -> None:
        """Add sources to the storage, so that all views of it get them."""
        storage = storage_key(tensor)
        self._storage_sources[storage] = self._storage_sources.get(storage, 0) | sources
        self._alive.append(tensor)

    def _walk_graph(self, node: Node) -> int:
        """Return the sources in the autograd graph behind a node."""
        known, stack = self._node_sources, [node]
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
            known[top] = functools.reduce(int.__or__, (known[k] for k in behind), self._parameter_source(variable))
            if id(variable) in self.hidden and self.parameters[id(variable)] not in self._used_inside:
                self.stray_parameters.add(self.parameters[id(variable)])
            stack.pop()
        return known[node]
