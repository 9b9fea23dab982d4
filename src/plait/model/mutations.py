"""Record writes of a forward pass to the model itself: counting or averaging buffers, weights that follow others, and per-process objects.

The training of such a model depends on the number of its forward passes. If written values come from samples, it also depends on the samples of
a run: replicas with different samples diverge, and no step corrects them. Strategies therefore check these names. A sketch gets them from
a run in which every operator reports the storages it reads and writes.

Values come from a sample if any chain of operators leads to them from one. Values from a rank's own samples are the same, except through
`plait.global_mean` and `plait.global_batch`, whose results are equal on all ranks.

The second part of this file restores tensors that a trial of the job's model or optimizer writes, and that existed before it: an averaged teacher,
a table of norms. Trials on fake tensors must be undone too, because torch's fake mode executes operators without fake arguments. A rank with
weight shards would also write other values into such tensors than one device.
"""

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from plait.model.deferred_init import TouchedTensors, find_touched
from plait.tensors.float64 import Float64Shadow
from plait.tensors.parameters import LiveStorages
from plait.tensors.torch_private import (
    BatchNormBase,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    count_hooks,
    forward_hooks,
    no_modes,
    storage_key,
    tree_leaves,
)
from plait.tensors.trees import flatten_tensors


class ProcessFlags:
    """Finds attributes by which a model remembers per-process objects that no checkpoint contains: hooks on its modules, such as the output recorders
    of
    transformers, or functions.

    If a checkpoint restored such an attribute, the model would run without the object.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]):
        self.modules = list(modules)
        self.found: list[str] = []
        self._known = {name: _Attributes.from_module(module) for name, module in self.modules}
        self._made, self._hooks = count_hooks(), self._count_hooks()

    def check_module(self, name: str, module: nn.Module) -> None:
        """Check a module after its code ran. Attributes that became True since the last check mark new hooks or functions."""
        if count_hooks() != self._made:
            self._made, before, self._hooks = count_hooks(), self._hooks, self._count_hooks()
            if self._hooks > before:
                self._record_flags(self.modules)
        if name in self._known:
            if self._known[name].has_new_function(module):
                self._record_flags([(name, module)])
            self._known[name] = _Attributes.from_module(module)

    def _record_flags(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        for name, module in modules:
            now = _Attributes.from_module(module)
            self.found += [f"{name}.{flag}".lstrip(".") for flag in sorted(now.true_names - self._known[name].true_names)]
            self._known[name] = now

    def _count_hooks(self) -> int:
        return sum(len(table) for _, module in self.modules for table in forward_hooks(module))


@dataclass(frozen=True)
class _Attributes:
    """A module's own attributes: their names, and the names of those that are True."""

    names: frozenset[str]
    true_names: frozenset[str]

    @classmethod
    def from_module(cls, module: nn.Module) -> "_Attributes":
        own = vars(module)
        return cls(frozenset(own), frozenset(name for name, value in own.items() if value is True))

    def has_new_function(self, module: nn.Module) -> bool:
        """Whether the module has a new attribute with a function."""
        own = vars(module)
        return own.keys() != self.names and any(callable(own[name]) for name in own.keys() - self.names)


class MutationRecorder:
    """Records the operators of one forward pass of a model on `inputs`."""

    def __init__(self, model: nn.Module, inputs: object, fakes: FakeTensorMode | None):
        norms = {id(b) for m in model.modules() if isinstance(m, BatchNormBase) for b in m.buffers()}
        buffers = [(name, b) for name, b in model.named_buffers() if id(b) not in norms]
        self.model, self.norms = model, {name for name, b in model.named_buffers() if id(b) in norms}
        self.model_storages: dict[int, str] = {}
        self._alive = list[Tensor]()
        """Keeps the storages of `model_storages` alive, since torch drops unreferenced fake tensors and would reuse their keys."""
        for name, tensor in (*model.named_parameters(), *buffers):
            # operators may get either
            same = [tensor] if fakes is None or isinstance(tensor, FakeTensor) else [tensor, fakes.from_tensor(tensor)]
            self._alive += same
            self.model_storages |= {storage_key(t): name for t in same}
        self.data = {name: storage_key(p) for name, p in model.named_parameters()}
        self.from_samples: dict[int, Any] = {}
        """Storages with values from samples, kept alive because their keys could be reused."""
        self.rank_dependent: dict[int, Any] = {}
        """The storages among them with values from a rank's own samples."""
        self.writers: dict[str, set[str]] = {}
        """Modules whose own code writes a tensor of the model, by the tensor's name; "" is the model."""
        self.faked = fakes is not None
        self.weight_sources: dict[int, tuple[str, Any]] = {}
        """Storages with values from weights and from no sample: the first weight, and the storage, which is kept alive."""
        self.outside_writers: dict[str, set[str]] = {}
        """Weights from which tensors outside of the model are written, and the modules whose own code writes them."""
        for marks in (self.from_samples, self.rank_dependent):
            marks.update(_list_storages(inputs))

    def record_operator(self, module: str, touched: TouchedTensors, result: object, own: LiveStorages) -> None:
        """Record an operator of a module's own code. `own`: storages that the forward pass created."""
        written, read = touched
        for tensor in written:
            if name := self.model_storages.get(storage_key(tensor)):
                self.writers.setdefault(name, set()).add(module)
        keys = {storage_key(t) for t in (*written, *read)}
        marked = [marks for marks in (self.from_samples, self.rank_dependent) if not marks.keys().isdisjoint(keys)]
        made = _list_storages([result, written]) if marked else []
        for marks in marked:
            marks.update(made)
        if self.from_samples.keys().isdisjoint(keys):
            self._record_outside(module, [t for t in written if t not in own], [*written, *tree_leaves(result)], read)

    def _record_outside(self, module: str, outside: list[Any], made: list[Any], read: list[Any]) -> None:
        """Track values from weights only, and record their writes to tensors from outside of the run, which are not fake."""
        source = next((name for t in read if (name := self._find_weight(t)) is not None), None)
        if source is None or not self.faked:
            return
        for t in made:
            if not isinstance(t, torch.Tensor) or t.layout is not torch.strided or storage_key(t) in self.model_storages:
                continue
            self.weight_sources[storage_key(t)] = source, t.untyped_storage()
            if not isinstance(t, FakeTensor) and any(t is one for one in outside):
                self.outside_writers.setdefault(source, set()).add(module)

    def _find_weight(self, tensor: torch.Tensor) -> str | None:
        key = storage_key(tensor)
        name = self.model_storages.get(key)
        return name if name in self.data else self.weight_sources[key][0] if key in self.weight_sources else None

    def list_buffers(self) -> list[str]:
        """Return the buffers that were written in place."""
        return [name for name in self.writers if name not in self.data]

    def list_marked(self, marks: dict[int, Any]) -> list[str]:
        """Return the buffers and weights that hold values from samples. `marks`: `from_samples` or `rank_dependent`."""
        held = {self.model_storages[key] for key in marks if key in self.model_storages}
        now = (*self.model.named_parameters(), *self.model.named_buffers())
        return [n for n, t in now if n not in self.norms and (n in held or storage_key(t) in marks)]

    def find_written_weights(self) -> dict[str, set[str]]:
        """Return the weights that were written or replaced, and the modules that wrote them, if known."""
        written = {name: self.writers[name] for name in self.data if name in self.writers}
        for name, parameter in self.model.named_parameters():
            if storage_key(parameter) != self.data[name]:
                written.setdefault(name, {""})
        return written


MUTATION_RECORDER: ContextVar[MutationRecorder | None] = ContextVar("the mutations of the forward pass that runs", default=None)


def mark_same_on_ranks(x: torch.Tensor) -> torch.Tensor:
    """Mark `x` as equal on all ranks although it comes from samples. In a recorded forward pass, it returns a copy."""
    listener = MUTATION_RECORDER.get()
    if listener is None:
        return x
    x = x.clone()
    listener.rank_dependent.pop(storage_key(x), None)
    return x


def _list_storages(values: object) -> list[tuple[int, Any]]:
    """Return the storages of tensors, with their keys."""
    found = (t for t in tree_leaves(values) if isinstance(t, torch.Tensor))
    return [(storage_key(t), t.untyped_storage() if t.layout is torch.strided else t) for t in found]


class RestoredWrites(TorchDispatchMode):
    """A context for a trial that also creates its tensors. At its end, tensors from outside get their old values back, including those that
    `Float64Mode` wrote through their shadows."""

    def __init__(self) -> None:
        super().__init__()
        self.own_storages = LiveStorages(self.forget)
        """Storages of the trial's own tensors."""
        self._before = list[tuple[Tensor, Tensor]]()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return self.run(func, args, kwargs, find_touched(func, args, kwargs))

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], touched: TouchedTensors) -> Any:
        """Run an operator that touches these tensors, and return its result."""
        written, read = touched
        for t in written:
            if t not in self.own_storages:
                with no_modes():
                    self._before.append((t, t.detach().clone()))
        result = func(*args, **kwargs)
        given = {storage_key(t) for t in (*written, *read)}
        for t in flatten_tensors(result):
            if storage_key(t) not in given:
                self.own_storages.add(t)
        return result

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        with torch.no_grad(), no_modes():
            for tensor, value in reversed(self._before):
                tensor.copy_(value)
        Float64Shadow.flush_written({storage_key(tensor) for tensor, _ in self._before})
        self._before.clear()

    def forget(self, key: int) -> None:
        """Handle the end of one of the trial's own storages."""


WEIGHT_ORIGIN = 0
"""Origin of values from the trial's parameters and gradients; other origins are storages of tensors from outside."""


class TrackedWrites(RestoredWrites):
    """A `RestoredWrites` that also tracks the sources of writes to tensors from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.has_outside_write = False
        """A tensor from outside was written with values from weights, gradients or other tensors from outside."""
        self._origins = dict[int, frozenset[int]]()

    def mark_weights(self, *weights: Tensor | None) -> None:
        """Mark tensors as parameters or gradients of the trial."""
        for t in (t for t in weights if t is not None):
            self._origins[storage_key(t)] = frozenset({WEIGHT_ORIGIN})
            self.own_storages.add(t)

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], touched: TouchedTensors) -> Any:
        written, read = touched
        origins = frozenset[int]().union(*map(self._find_origin, (*written, *read)))
        outside = [t for t in written if t not in self.own_storages]
        self.has_outside_write = self.has_outside_write or any(origins - {storage_key(t)} for t in outside)
        result = super().run(func, args, kwargs, touched)
        for t in (*written, *flatten_tensors(result)):
            if t in self.own_storages:
                self._origins[storage_key(t)] = origins
        return result

    def forget(self, key: int) -> None:
        """Handle the end of one of the trial's own storages."""
        self._origins.pop(key, None)

    def _find_origin(self, t: Tensor) -> frozenset[int]:
        key = storage_key(t)
        outside = frozenset({key}) if t.dim() else frozenset[int]()
        return self._origins.get(key, frozenset()) if t in self.own_storages else outside
