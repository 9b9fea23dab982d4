"""Metering one run of a model: what each unit call computes, keeps for backward, and depends on.

`model/trace.py` runs the model and tells the `Meter` of every module that is entered and left, every torch function and
every operator. Three things are followed:

- operators: floating-point operations, and which unit's parameters each operator reads, and from where;
- what autograd saves, through its own hooks, by storage, so that a tensor saved twice counts once;
- dependencies: every tensor carries the set of unit calls it was computed from. Code between units passes the sets
  on from arguments to results; the output of a unit carries that call alone. This is how a skip connection is seen.
  What a unit hands on past what it returns (in a list, a cache, an attribute) is followed in the same way: it matters where
  something depends on its numbers, not where it lies.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.model.course import OperatorCourse
from plait.model.operations import Effort
from plait.tensors.torch_private import OpOverload, is_view, leaves, storage_key, tree_map, version
from plait.tensors.trees import TensorForm, carried, flat, learn, nodes_behind, taken, tensors, tensors_in

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a call: those by place, and by name."""
NONE: frozenset[int] = frozenset()
BETWEEN, OUTPUT, KNOWN = -1, -2, -3
ROUTED = "routed_by_plait"
"""Attribute of values that units hand on past what they return, of which is known what is done with them: leaks of `KNOWN`."""
SHAPES = frozenset({
    "__get__", "__len__", "__hash__", "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size",
    "is_contiguous", "is_floating_point", "is_complex", "get_device", "type", "data_ptr",
})  # fmt: skip
"""Names of functions that give no numbers of a tensor, when what they give is no tensor."""


@dataclass(frozen=True)
class SharedInput:
    """A storage that several calls are given, such as a mask. It is there once: each of them has an equal part of it, so that layers are
    alike."""

    size: int
    """Bytes."""
    calls: int
    kept: bool
    """Autograd keeps it."""


@dataclass
class MeteredCall:
    """What one call of a unit showed in one run, as `UnitCall` of `model/operations.py` has it of any batch."""

    unit: str
    needs: tuple[int, ...]
    inputs: int = 0
    given: int = 0
    flops: int = 0
    output: int = 0
    own_fresh: int = 0
    own_saved: int = 0
    """Of `fresh` and `saved`, what no other call is given."""
    shared: tuple[SharedInput, ...] = ()
    itemsize: int = 4
    """Bytes of a number of its output."""
    effort: Effort = field(default_factory=Effort)
    backward: bool = False
    """Backward computes a gradient of its output."""
    grad_fns: tuple[Any, ...] = ()
    """`grad_fn` of each returned tensor that requires a gradient; None for a leaf, and for a view, whose `grad_fn` a write may replace."""
    writes: bool = False
    back: int | str | None = None
    leaks: set[int] = field(default_factory=set)
    aside: set[int] = field(default_factory=set)
    returned: tuple[Any, tuple[Any, ...]] = (None, ())
    """The structure of its output: `taken` of `tensors/trees.py`."""
    course: int = 0
    """What it computes (`model/course.py`)."""

    @property
    def fresh(self) -> float:
        """Bytes of the storages that it is given."""
        return self.own_fresh + sum(one.size / one.calls for one in self.shared)

    @property
    def saved(self) -> float:
        """Bytes that autograd keeps of it."""
        return self.own_saved + sum(one.size / one.calls for one in self.shared if one.kept)


@dataclass
class Metered:
    """What one run showed."""

    calls: list[MeteredCall] = field(default_factory=list)
    needs: tuple[int, ...] = ()
    """Calls that the model's output depends on."""
    opened: set[str] = field(default_factory=set)
    """Units with a parameter or a submodule that was used from outside of their calls."""
    entered: set[str] = field(default_factory=set)
    """Modules that were called."""
    outside: dict[str, int] = field(default_factory=dict)
    """Modules that were called while no unit was running, and how often."""
    flops: int = 0
    """Of the code between units."""
    effort: Effort = field(default_factory=Effort)
    """The same in detail."""
    saved: int = 0
    """By the code between units, what a unit saves too not counted."""
    differentiates: bool = False
    """The model asks for derivatives in its own forward pass."""


class Meter:
    """Follows one run. `where` says which unit each module lies in: `homes`; `constants` are parameters by name, and
    buffers without one."""

    def __init__(
        self, units: Mapping[int, str], where: Iterator[tuple[nn.Module, str]], constants: list[tuple[str, Tensor]]
    ):
        self.metered = Metered()
        self.units = units
        self.modules: dict[int, set[str]] = {}
        self.parameters: dict[int, set[str]] = {}
        for module, home in where:
            self.modules.setdefault(id(module), set()).add(home)
            for parameter in module.parameters(recurse=False):
                self.parameters.setdefault(id(parameter), set()).add(home)
        self.constants = {storage_key(t): name for name, t in constants}
        self.alive: list[Any] = [t for _, t in constants]  # ids and storages name tensors only as long as these live
        self.looking = False
        """The meter itself asks tensors for their sizes: not the model's code."""
        self.running: nn.Module | None = None
        self.course = OperatorCourse("")
        self.depth = 0
        self.versions: list[tuple[Tensor, int]] = []
        self.arguments: Arguments = (), {}
        self.of: dict[int, frozenset[int]] = {}
        self.made: dict[int, int] = {}
        self.written: dict[int, frozenset[int]] = {}
        self.past: dict[int, frozenset[tuple[int, int]]] = {}
        """By tensor, and below by storage: (call, its leak when something depends on this) of what code between units made of
        what calls did not return."""
        self.past_written: dict[int, frozenset[tuple[int, int]]] = {}
        self.kept: dict[int, tuple[int | None, int]] = {}
        self.inputs: dict[int, tuple[set[int], int]] = {}
        """By storage: the calls that were given a tensor in it, and its bytes."""

    # — calls —

    def enter(self, name: str, module: nn.Module, given: Arguments) -> None:
        """A module is called with `given`."""
        self.metered.entered.add(name)
        unit = None
        if self.running is not None:
            self.depth += module is self.running
        else:
            self.metered.outside[name] = self.metered.outside.get(name, 0) + 1
            unit = self.units.get(id(module))
        if unit is None:
            self._used(self.modules.get(id(module)))
            return
        with self._look():
            tensors = list(tensors_in(given))
            needs = self.sources(tensors)
            self.metered.calls.append(MeteredCall(unit, tuple(sorted(needs)), _bytes(tensors), len(tensors)))
            self._given(tensors)
            self.running, self.depth, self.course = module, 0, OperatorCourse(unit, tensors)
            self.versions, self.arguments = [(t, version(t)) for t in tensors], given

    def _given(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if (storage := storage_key(tensor)) not in self.constants:
                calls, _ = self.inputs.setdefault(storage, (set(), _stored(tensor)))
                calls.add(len(self.metered.calls) - 1)
        self.alive += tensors

    @contextmanager
    def _look(self) -> Iterator[None]:
        self.looking = True
        try:
            yield
        finally:
            self.looking = False

    def leave(self, module: nn.Module, output: object) -> Any:
        """The module returns `output`; None, or the same with other tensors where it also leaves those in what it was given."""
        if module is not self.running:
            return None
        if self.depth:
            self.depth -= 1
            return None
        with self._look():
            left = {id(t) for t in tensors_in(self.arguments)} - {id(t) for t, _ in self.versions}
            both = any(id(t) in left for t in tensors(output)) and not carried(output)
            apart = None
            if both and _place(self.arguments, output) is None:
                apart = tree_map(lambda t: t.view_as(t) if isinstance(t, Tensor) and id(t) in left else t, output)
            self._returned(output if apart is None else apart)
            return apart

    def _returned(self, output: object) -> None:
        self.running = None
        this_call = len(self.metered.calls) - 1
        returned, this = list(tensors_in(output)), frozenset((this_call,))
        call = self.metered.calls[-1]
        for tensor in returned:
            self.made.pop(id(tensor), None)
        call.itemsize = max((t.element_size() for t in returned if t.is_floating_point()), default=4)
        call.output, call.backward = _bytes(returned), any(t.requires_grad for t in returned)
        learn(output)
        plain = {id(leaf) for leaf in leaves(output)}  # nobody who looks through its output would see others
        hidden = [t for t in returned if id(t) not in plain and id(t) not in self.parameters]
        if any(t.requires_grad for t in hidden) or carried(output):  # hooks of sharding look through the output
            self.metered.opened.add(call.unit)
        if hidden:
            call.leaks.add(BETWEEN)
            call.aside.add(BETWEEN)
        call.returned, call.course = taken(output), self.course.end(returned)
        call.grad_fns = tuple(None if is_view(t) else t.grad_fn for t in returned if t.requires_grad)
        same = {id(t) for t, _ in self.versions}
        if {id(t) for t in tensors_in(self.arguments)} & {id(t) for t in returned if id(t) not in same}:
            call.back = _place(self.arguments, output)
            call.writes = call.back is None
        for i, _ in self._carried(t for t in returned if id(t) in same):
            self.metered.calls[i].leaks.add(this_call)
            self.metered.calls[i].aside.add(this_call)
        for tensor in returned:  # a unit may hand on what it was given: then it also comes from where that came from
            self._mark(tensor, this | self.sources([tensor]) if id(tensor) in same else this)
        for tensor, before in self.versions:
            if version(tensor) != before:
                call.writes = True
                self._mark_storage(tensor, this)
        self.versions, self.arguments = [], ((), {})

    def finish(self, output: object, loss: object = None) -> Metered:
        """The run is over and returned `output`, of which a loss was made, if it is given: else that may depend on all of it."""
        self.metered.needs = tuple(sorted(self.sources(tensors_in(output))))
        for i, _ in self._carried(tensors_in(output)):
            self.metered.calls[i].aside.add(OUTPUT)
        for i, way in self._carried(tensors_in(output if loss is None else loss)):
            self.metered.calls[i].leaks.add(way if way == KNOWN else OUTPUT)
        self._mark_backward(output if loss is None else loss)
        self._count_kept()
        self.alive.clear()  # autograd's graph may hold itself through these
        return self.metered

    def _count_kept(self) -> None:
        """Attribute what is kept to calls, and to the code between."""
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
        """Clear `backward` of calls whose outputs autograd does not reach from `end`, such as detached ones. A call is left as it is if
        its values may leave it by another way than its output."""
        reached = set(nodes_behind(t.grad_fn for t in tensors_in(end)))
        for call in self.metered.calls:
            sure = not (self.metered.differentiates or call.aside or call.writes or None in call.grad_fns)
            if sure and not reached.intersection(call.grad_fns):
                spec, leaves = call.returned
                call.backward = False
                call.returned = spec, tuple(
                    TensorForm(form.shape, form.dtype, False, form.order) if isinstance(form, TensorForm) else form for form in leaves
                )
            call.grad_fns = ()

    def _used(self, homes: set[str] | None) -> None:
        """Something that lies in these units is used here: from outside, unless one of them is running."""
        here = "" if self.running is None else self.metered.calls[-1].unit
        if homes is not None and here not in homes:
            self.metered.opened |= homes - {""}

    # — dependencies —

    def sources(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """The calls that these tensors were computed from."""
        calls = NONE
        for tensor in tensors:
            calls |= self.of.get(id(tensor), NONE)
            if self.written:
                calls |= self.written.get(storage_key(tensor), NONE)
        return calls

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """A torch function was called by the model's own code."""
        if self.looking:
            return
        arguments = [*flat(args), *flat(kwargs)]
        carried = self._carried(arguments)
        if carried:
            self._passed(carried, func, arguments, result)
        if self.running is not None:
            old = {id(t) for t in arguments}
            for tensor in flat(result):
                if id(tensor) not in old and id(tensor) not in self.of:
                    self.made[id(tensor)] = len(self.metered.calls) - 1
                    self.alive.append(tensor)
            return
        calls = self.sources(arguments)
        if not calls:
            return
        if getattr(func, "__name__", "") == "__setitem__":
            self._mark_storage(arguments[0], calls)
        inputs = {id(t) for t in arguments}
        for tensor in flat(result):
            self._mark(tensor, calls)
            if id(tensor) in inputs:  # in place, or out=
                self._mark_storage(tensor, calls)

    def _carried(self, tensors: Iterable[Tensor]) -> frozenset[tuple[int, int]]:
        """What of these tensors calls other than the one that runs computed and did not return."""
        here = BETWEEN if self.running is None else len(self.metered.calls) - 1
        pairs: set[tuple[int, int]] = set()
        for tensor in tensors:
            call = self.made.get(id(tensor), here)
            if call != here and id(tensor) not in self.of:
                pairs.add((call, KNOWN if hasattr(tensor, ROUTED) else BETWEEN))
            pairs |= self.past.get(id(tensor), frozenset())
            if self.past_written:
                pairs |= self.past_written.get(storage_key(tensor), frozenset())
        return frozenset(pairs)

    def _passed(
        self, carried: frozenset[tuple[int, int]], func: Callable[..., Any], arguments: list[Tensor], result: object
    ) -> None:
        """A function is given what calls did not return: its results depend on them."""
        name, results = getattr(func, "__name__", ""), list(flat(result))
        here = BETWEEN if self.running is None else len(self.metered.calls) - 1
        written = {id(t) for t in arguments} & {id(t) for t in (arguments[:1] if name == "__setitem__" else results)}
        numbers = bool(results or written) or name not in SHAPES
        for i, way in carried:
            self.metered.calls[i].aside.add(here if here != BETWEEN else way)
            if numbers and (here != BETWEEN or not (results or written)):
                self.metered.calls[i].leaks.add(here if here != BETWEEN else way)
        for tensor in results if here == BETWEEN else ():
            self.past[id(tensor)] = self.past.get(id(tensor), frozenset()) | carried
            self.alive.append(tensor)
        for tensor in (t for t in arguments if id(t) in written):
            key = storage_key(tensor)
            self.past_written[key] = self.past_written.get(key, frozenset()) | carried
            self.alive.append(tensor)

    def _mark(self, tensor: Tensor, sources: frozenset[int]) -> None:
        self.of[id(tensor)] = sources
        self.alive.append(tensor)

    def _mark_storage(self, tensor: Tensor, sources: frozenset[int]) -> None:
        """Also views of it, made before or after, see what was written."""
        storage = storage_key(tensor)
        self.written[storage] = self.written.get(storage, NONE) | sources
        self.alive.append(tensor)

    # — operators and what autograd keeps —

    def operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        for tensor in flat(args):
            homes = self.parameters.get(id(tensor))
            if homes is not None:
                self._used(homes)
        if self.running is not None:
            self.course.add(func, args, kwargs, result, self.constants)
        record = self.metered if self.running is None else self.metered.calls[-1]
        record.flops += record.effort.add(func, args, kwargs, result, self.constants)

    def pack(self, tensor: Tensor) -> int:
        """Autograd keeps a tensor. What it keeps already, parameters and buffers cost nothing more."""
        storage = storage_key(tensor)
        call = None if self.running is None else len(self.metered.calls) - 1
        before = self.kept.get(storage)
        if storage not in self.constants and (before is None or (before[0] is None and call is not None)):
            self.kept[storage] = (call, _stored(tensor))
        self.alive.append(tensor)
        return len(self.alive) - 1

    def unpack(self, index: int) -> Tensor:
        """What was packed, for a model that differentiates in its forward pass."""
        self.metered.differentiates = True
        return self.alive[index]


def homes(model: nn.Module, units: Mapping[int, str]) -> Iterator[tuple[nn.Module, str]]:
    """Every module with the unit it lies in, or "", of units by the id of their module.

    A module that is reached by several ways comes several times.
    """

    def walk(module: nn.Module, home: str) -> Iterator[tuple[nn.Module, str]]:
        home = home or units.get(id(module), "")
        yield module, home
        for kid in module.children():
            yield from walk(kid, home)

    yield from walk(model, "")


def _place(asked: Arguments, output: object) -> int | str | None:
    """Which of the arguments (args, kwargs) is itself the output."""
    return next((key for key, value in (*enumerate(asked[0]), *asked[1].items()) if value is output), None)


def _stored(tensor: Tensor) -> int:
    """Bytes in the storage of a tensor."""
    return tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else _bytes([tensor])


def _bytes(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
