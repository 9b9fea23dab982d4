"""Measure one run of a model: the operations, saved bytes and dependencies of each unit call.

`model/trace.py` runs the model and reports to the `Meter` every module entry and exit, every torch function and every operator. The meter tracks:

- operators: their floating-point operations, the unit whose parameters they read, and the unit that runs them;
- tensors saved by autograd, through its hooks, by storage, so that a tensor saved twice counts once;
- dependencies: each tensor has the set of unit calls from which it was computed. Code between units passes the sets from arguments to results. The
  output of a unit has that call alone. This shows skip connections. Values that a unit passes on outside its output (in a list, a cache, an
  attribute) are tracked in the same way. A dependency counts if its value is used.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.model.call_hash import CallHash
from plait.model.operations import OpStats
from plait.tensors.torch_private import OpOverload, dataclass_leaves, is_view, storage_key, tree_map, version
from plait.tensors.trees import (
    TensorForm,
    capture_form,
    flatten_tensors,
    has_simple_object,
    iter_backward_nodes,
    iter_tensors,
    list_slot_tensors,
    register_classes,
)

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""
NO_CALLS: frozenset[int] = frozenset()
BETWEEN, OUTPUT, KNOWN_USE = -1, -2, -3
ROUTED_ATTRIBUTE = "routed_by_plait"
"""Attribute of values that units pass on outside their output, with known uses: leaks of `KNOWN_USE`."""
SHAPE_FUNCTIONS = frozenset({
    "__get__", "__len__", "__hash__", "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size",
    "is_contiguous", "is_floating_point", "is_complex", "get_device", "type", "data_ptr",
})  # fmt: skip
"""Names of functions that return no tensor values, unless they return a tensor."""


@dataclass(frozen=True)
class SharedInput:
    """A storage that several calls get as input, such as a mask. It exists once, and each call counts an equal part of it, so that layers are
    equal."""

    size: int
    """Bytes of the storage."""
    calls: int
    kept: bool
    """Autograd saves it."""


@dataclass
class MeteredCall:
    """The record of one unit call in one run; `UnitCall` of `model/operations.py` describes it for all batch sizes."""

    unit: str
    needs: tuple[int, ...]
    inputs: int = 0
    given: int = 0
    flops: int = 0
    output: int = 0
    own_fresh: int = 0
    own_saved: int = 0
    """Bytes of `fresh` and `saved` that are no input of other calls."""
    shared: tuple[SharedInput, ...] = ()
    itemsize: int = 4
    """Bytes per element of its output."""
    effort: OpStats = field(default_factory=OpStats)
    backward: bool = False
    """Backward computes a gradient of its output."""
    grad_fns: tuple[Any, ...] = ()
    """`grad_fn` of each output that requires a gradient; None for leaves, and for views, because a write may replace their `grad_fn`."""
    writes: bool = False
    back: int | str | None = None
    leaks: set[int] = field(default_factory=set)
    aside: set[int] = field(default_factory=set)
    returned: tuple[Any, tuple[Any, ...]] = (None, ())
    """The structure of its output, as returned by `capture_form` of `tensors/trees.py`."""
    call_hash: int = 0
    """The hash of its operators (`model/call_hash.py`)."""

    @property
    def fresh(self) -> float:
        """Bytes of its input storages."""
        return self.own_fresh + sum(one.size / one.calls for one in self.shared)

    @property
    def saved(self) -> float:
        """Bytes that autograd saves for it."""
        return self.own_saved + sum(one.size / one.calls for one in self.shared if one.kept)


@dataclass
class MeteredRun:
    """The record of one run."""

    calls: list[MeteredCall] = field(default_factory=list)
    needs: tuple[int, ...] = ()
    """Calls on which the model's output depends."""
    opened: set[str] = field(default_factory=set)
    """Units with a parameter or a submodule that was used outside of their calls."""
    called_modules: set[str] = field(default_factory=set)
    """Modules that were called."""
    called_outside: dict[str, int] = field(default_factory=dict)
    """Number of calls of each module while no unit was running."""
    flops: int = 0
    """Operations of the code between units."""
    effort: OpStats = field(default_factory=OpStats)
    """Operator statistics of the code between units."""
    saved: int = 0
    """Bytes saved by the code between units, without those that a unit saves too."""
    differentiates: bool = False
    """The model computes derivatives in its own forward pass."""


class Meter:
    """Tracks one run. `module_homes`: modules with their units, as of `iter_homes`; `constants`: parameters by name, and buffers with an empty
    name."""

    def __init__(
        self, units: Mapping[int, str], module_homes: Iterator[tuple[nn.Module, str]], constants: list[tuple[str, Tensor]]
    ):
        self.metered = MeteredRun()
        self.units = units
        self.modules: dict[int, set[str]] = {}
        self.parameters: dict[int, set[str]] = {}
        for module, home in module_homes:
            self.modules.setdefault(id(module), set()).add(home)
            for parameter in module.parameters(recurse=False):
                self.parameters.setdefault(id(parameter), set()).add(home)
        self.constants = {storage_key(t): name for name, t in constants}
        self.alive: list[Any] = [t for _, t in constants]  # ids and storage keys are valid only while these are alive
        self.is_suspended = False
        """The meter itself reads tensor sizes; these calls are not the model's."""
        self.running: nn.Module | None = None
        self.call_hash = CallHash("")
        self.depth = 0
        self.versions: list[tuple[Tensor, int]] = []
        self.arguments: CallArguments = (), {}
        self.call_sources: dict[int, frozenset[int]] = {}
        self.made_in: dict[int, int] = {}
        self.written_sources: dict[int, frozenset[int]] = {}
        self.unreturned: dict[int, frozenset[tuple[int, int]]] = {}
        """By tensor, and below by storage: (call, kind of leak when a value depends on it) of values outside of outputs, after code between units."""
        self.unreturned_storages: dict[int, frozenset[tuple[int, int]]] = {}
        self.kept: dict[int, tuple[int | None, int]] = {}
        self.inputs: dict[int, tuple[set[int], int]] = {}
        """By storage: the calls with an input tensor in it, and its bytes."""

    # — calls —

    def enter(self, name: str, module: nn.Module, given: CallArguments) -> None:
        """Record the call of a module with the arguments `given`."""
        self.metered.called_modules.add(name)
        unit = None
        if self.running is not None:
            self.depth += module is self.running
        else:
            self.metered.called_outside[name] = self.metered.called_outside.get(name, 0) + 1
            unit = self.units.get(id(module))
        if unit is None:
            self._record_use(self.modules.get(id(module)))
            return
        with self._suspend():
            tensors = list(iter_tensors(given))
            needs = self.find_sources(tensors)
            self.metered.calls.append(MeteredCall(unit, tuple(sorted(needs)), _sum_tensor_bytes(tensors), len(tensors)))
            self._record_inputs(tensors)
            self.running, self.depth, self.call_hash = module, 0, CallHash(unit, tensors)
            self.versions, self.arguments = [(t, version(t)) for t in tensors], given

    def _record_inputs(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if (storage := storage_key(tensor)) not in self.constants:
                calls, _ = self.inputs.setdefault(storage, (set(), _count_storage(tensor)))
                calls.add(len(self.metered.calls) - 1)
        self.alive += tensors

    @contextmanager
    def _suspend(self) -> Iterator[None]:
        self.is_suspended = True
        try:
            yield
        finally:
            self.is_suspended = False

    def leave(self, module: nn.Module, output: object) -> Any:
        """Record the output of a module. Returns None, or a copy of the output if the call also stored its tensors in its arguments."""
        if module is not self.running:
            return None
        if self.depth:
            self.depth -= 1
            return None
        with self._suspend():
            left = {id(t) for t in iter_tensors(self.arguments)} - {id(t) for t, _ in self.versions}
            both = any(id(t) in left for t in list_slot_tensors(output)) and not has_simple_object(output)
            apart = None
            if both and _find_argument(self.arguments, output) is None:
                apart = tree_map(lambda t: t.view_as(t) if isinstance(t, Tensor) and id(t) in left else t, output)
            self._record_outputs(output if apart is None else apart)
            return apart

    def _record_outputs(self, output: object) -> None:
        self.running = None
        this_call = len(self.metered.calls) - 1
        returned, this = list(iter_tensors(output)), frozenset((this_call,))
        call = self.metered.calls[-1]
        for tensor in returned:
            self.made_in.pop(id(tensor), None)
        call.itemsize = max((t.element_size() for t in returned if t.is_floating_point()), default=4)
        call.output, call.backward = _sum_tensor_bytes(returned), any(t.requires_grad for t in returned)
        register_classes(output)
        plain = {id(leaf) for leaf in dataclass_leaves(output)}  # reading its output would not show others
        hidden = [t for t in returned if id(t) not in plain and id(t) not in self.parameters]
        if any(t.requires_grad for t in hidden) or has_simple_object(output):  # sharding hooks read the output
            self.metered.opened.add(call.unit)
        if hidden:
            call.leaks.add(BETWEEN)
            call.aside.add(BETWEEN)
        call.returned, call.call_hash = capture_form(output), self.call_hash.finish(returned)
        call.grad_fns = tuple(None if is_view(t) else t.grad_fn for t in returned if t.requires_grad)
        same = {id(t) for t, _ in self.versions}
        if {id(t) for t in iter_tensors(self.arguments)} & {id(t) for t in returned if id(t) not in same}:
            call.back = _find_argument(self.arguments, output)
            call.writes = call.back is None
        for i, _ in self._find_unreturned(t for t in returned if id(t) in same):
            self.metered.calls[i].leaks.add(this_call)
            self.metered.calls[i].aside.add(this_call)
        for tensor in returned:  # a unit may return its input: then the output also depends on the input's calls
            self._mark(tensor, this | self.find_sources([tensor]) if id(tensor) in same else this)
        for tensor, before in self.versions:
            if version(tensor) != before:
                call.writes = True
                self._mark_storage(tensor, this)
        self.versions, self.arguments = [], ((), {})

    def finish(self, output: object, loss: object = None) -> MeteredRun:
        """Finish the run with the model's output. `loss`: computed from it; if None, the loss may depend on all of the output."""
        self.metered.needs = tuple(sorted(self.find_sources(iter_tensors(output))))
        for i, _ in self._find_unreturned(iter_tensors(output)):
            self.metered.calls[i].aside.add(OUTPUT)
        for i, way in self._find_unreturned(iter_tensors(output if loss is None else loss)):
            self.metered.calls[i].leaks.add(way if way == KNOWN_USE else OUTPUT)
        self._mark_backward(output if loss is None else loss)
        self._count_kept()
        self.alive.clear()  # autograd's graph may reference itself through these
        return self.metered

    def _count_kept(self) -> None:
        """Attribute saved bytes to calls, and to the code between units."""
        calls = self.metered.calls
        shared = {storage for storage, (given, _) in self.inputs.items() if len(given) > 1}
        for storage, (call, size) in self.kept.items():
            if call is None:
                self.metered.saved += size
            elif storage not in shared:
                calls[call].own_saved += size
        for storage, (given, size) in self.inputs.items():
            if storage not in shared:
                calls[min(given)].own_fresh += size
                continue
            one = SharedInput(size, len(given), self.kept.get(storage, (None,))[0] is not None)
            for call in given:
                calls[call].shared += (one,)

    def _mark_backward(self, end: object) -> None:
        """Clear `backward` of calls whose outputs autograd does not reach from `end`, such as detached ones.

        Calls whose values may leave them outside of their output are unchanged.
        """
        reached = set(iter_backward_nodes(t.grad_fn for t in iter_tensors(end)))
        for call in self.metered.calls:
            sure = not (self.metered.differentiates or call.aside or call.writes or None in call.grad_fns)
            if sure and not reached.intersection(call.grad_fns):
                spec, leaves = call.returned
                call.backward = False
                call.returned = spec, tuple(
                    TensorForm(form.shape, form.dtype, False, form.order) if isinstance(form, TensorForm) else form for form in leaves
                )
            call.grad_fns = ()

    def _record_use(self, homes: set[str] | None) -> None:
        """Record a use of something inside these units: it opens them, unless one of them is running."""
        here = "" if self.running is None else self.metered.calls[-1].unit
        if homes is not None and here not in homes:
            self.metered.opened |= homes - {""}

    # — dependencies —

    def find_sources(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """Return the calls from which these tensors were computed."""
        calls = NO_CALLS
        for tensor in tensors:
            calls |= self.call_sources.get(id(tensor), NO_CALLS)
            if self.written_sources:
                calls |= self.written_sources.get(storage_key(tensor), NO_CALLS)
        return calls

    def record_function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Record a torch function that the model's own code called."""
        if self.is_suspended:
            return
        arguments = [*flatten_tensors(args), *flatten_tensors(kwargs)]
        carried = self._find_unreturned(arguments)
        if carried:
            self._record_unreturned(carried, func, arguments, result)
        if self.running is not None:
            old = {id(t) for t in arguments}
            for tensor in flatten_tensors(result):
                if id(tensor) not in old and id(tensor) not in self.call_sources:
                    self.made_in[id(tensor)] = len(self.metered.calls) - 1
                    self.alive.append(tensor)
            return
        calls = self.find_sources(arguments)
        if not calls:
            return
        if getattr(func, "__name__", "") == "__setitem__":
            self._mark_storage(arguments[0], calls)
        inputs = {id(t) for t in arguments}
        for tensor in flatten_tensors(result):
            self._mark(tensor, calls)
            if id(tensor) in inputs:  # in place, or out=
                self._mark_storage(tensor, calls)

    def _find_unreturned(self, tensors: Iterable[Tensor]) -> frozenset[tuple[int, int]]:
        """Return (call, kind of leak) of values among these tensors that earlier calls computed and did not return."""
        here = BETWEEN if self.running is None else len(self.metered.calls) - 1
        pairs: set[tuple[int, int]] = set()
        for tensor in tensors:
            call = self.made_in.get(id(tensor), here)
            if call != here and id(tensor) not in self.call_sources:
                pairs.add((call, KNOWN_USE if hasattr(tensor, ROUTED_ATTRIBUTE) else BETWEEN))
            pairs |= self.unreturned.get(id(tensor), frozenset())
            if self.unreturned_storages:
                pairs |= self.unreturned_storages.get(storage_key(tensor), frozenset())
        return frozenset(pairs)

    def _record_unreturned(
        self, carried: frozenset[tuple[int, int]], func: Callable[..., Any], arguments: list[Tensor], result: object
    ) -> None:
        """Record a function that uses values which calls did not return: its results depend on them."""
        name, results = getattr(func, "__name__", ""), list(flatten_tensors(result))
        here = BETWEEN if self.running is None else len(self.metered.calls) - 1
        written = {id(t) for t in arguments} & {id(t) for t in (arguments[:1] if name == "__setitem__" else results)}
        numbers = bool(results or written) or name not in SHAPE_FUNCTIONS
        for i, way in carried:
            self.metered.calls[i].aside.add(here if here != BETWEEN else way)
            if numbers and (here != BETWEEN or not (results or written)):
                self.metered.calls[i].leaks.add(here if here != BETWEEN else way)
        for tensor in results if here == BETWEEN else ():
            self.unreturned[id(tensor)] = self.unreturned.get(id(tensor), frozenset()) | carried
            self.alive.append(tensor)
        for tensor in (t for t in arguments if id(t) in written):
            key = storage_key(tensor)
            self.unreturned_storages[key] = self.unreturned_storages.get(key, frozenset()) | carried
            self.alive.append(tensor)

    def _mark(self, tensor: Tensor, sources: frozenset[int]) -> None:
        self.call_sources[id(tensor)] = sources
        self.alive.append(tensor)

    def _mark_storage(self, tensor: Tensor, sources: frozenset[int]) -> None:
        """Mark a written storage: all views of it depend on the sources, including earlier ones."""
        storage = storage_key(tensor)
        self.written_sources[storage] = self.written_sources.get(storage, NO_CALLS) | sources
        self.alive.append(tensor)

    # — operators and tensors saved by autograd —

    def record_operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        for tensor in flatten_tensors(args):
            homes = self.parameters.get(id(tensor))
            if homes is not None:
                self._record_use(homes)
        if self.running is not None:
            self.call_hash.add(func, args, kwargs, result, self.constants)
        record = self.metered if self.running is None else self.metered.calls[-1]
        record.flops += record.effort.add(func, args, kwargs, result, self.constants)

    def pack(self, tensor: Tensor) -> int:
        """Record a tensor that autograd saves. Storages that are already saved, parameters and buffers count 0 bytes."""
        storage = storage_key(tensor)
        call = None if self.running is None else len(self.metered.calls) - 1
        before = self.kept.get(storage)
        if storage not in self.constants and (before is None or (before[0] is None and call is not None)):
            self.kept[storage] = (call, _count_storage(tensor))
        self.alive.append(tensor)
        return len(self.alive) - 1

    def unpack(self, index: int) -> Tensor:
        """Return a saved tensor, for a model that differentiates in its forward pass."""
        self.metered.differentiates = True
        return self.alive[index]


def iter_homes(model: nn.Module, units: Mapping[int, str]) -> Iterator[tuple[nn.Module, str]]:
    """Yield every module with its unit, or "". `units`: names by the id of their module.

    A module that is reachable in several ways is yielded several times.
    """

    def walk(module: nn.Module, home: str) -> Iterator[tuple[nn.Module, str]]:
        home = home or units.get(id(module), "")
        yield module, home
        for kid in module.children():
            yield from walk(kid, home)

    yield from walk(model, "")


def _find_argument(arguments: CallArguments, output: object) -> int | str | None:
    """Return the position or name of the argument that is itself the output."""
    return next((key for key, value in (*enumerate(arguments[0]), *arguments[1].items()) if value is output), None)


def _count_storage(tensor: Tensor) -> int:
    """Return the bytes of a tensor's storage."""
    return tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else _sum_tensor_bytes([tensor])


def _sum_tensor_bytes(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
