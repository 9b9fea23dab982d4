"""What a forward pass changes of the model itself: buffers that count or average, weights that follow others, what it makes for its own process.

Such a model's training depends on how often its forward runs, and, when what is written comes from the samples, on which
samples one run sees: copies that see other samples drift apart, and nothing in a step brings them together again. So
strategies ask for these names: a sketch has them from a run in which every operator tells what it reads and writes, by the
storage it lies in. What comes from a sample is what some operator made from one, however often removed. What comes from a
rank's own samples is the same, except through `plait.global_mean` and `plait.global_batch`, which give all ranks the same.

What a trial of the job's model or optimizer writes into tensors that were there before it: a teacher that is averaged, a table of norms.

A trial must leave them as they were, also one on fake tensors: torch's fake mode really writes where an operator is given no fake tensor.
And a rank that has a part of the weights would write something else into them than one device does.
"""

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from plait.model.deferred_init import Roles, roles
from plait.tensors.float64 import Shadow
from plait.tensors.parameters import LiveStorages
from plait.tensors.torch_private import (
    BatchNormBase,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    hooks_made,
    hooks_of,
    no_modes,
    storage_key,
    tree_leaves,
)
from plait.tensors.trees import flat


class ProcessFlags:
    """Finds the attributes by which a model remembers that its forward pass has made something that no checkpoint holds: hooks on its modules,
    as those of transformers that collect what layers return, or functions. Where such an attribute came from a checkpoint, the model would
    run without what it stands for."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]):
        self.modules = list(modules)
        self.found: list[str] = []
        self._known = {name: _Attributes.of(module) for name, module in self.modules}
        self._made, self._hooks = hooks_made(), self._count()

    def look(self, name: str, module: nn.Module) -> None:
        """The code of this module has run since the last look. Attributes that have become true since, while hooks were registered or a
        function was kept, stand for these."""
        if hooks_made() != self._made:
            self._made, before, self._hooks = hooks_made(), self._hooks, self._count()
            if self._hooks > before:
                self._note(self.modules)
        if name in self._known:
            if self._known[name].has_new_function(module):
                self._note([(name, module)])
            self._known[name] = _Attributes.of(module)

    def _note(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        for name, module in modules:
            now = _Attributes.of(module)
            self.found += [f"{name}.{flag}".lstrip(".") for flag in sorted(now.true - self._known[name].true)]
            self._known[name] = now

    def _count(self) -> int:
        return sum(len(table) for _, module in self.modules for table in hooks_of(module))


@dataclass(frozen=True)
class _Attributes:
    """A module's own attributes: their names, and the names of those that are True."""

    names: frozenset[str]
    true: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module) -> "_Attributes":
        own = vars(module)
        return cls(frozenset(own), frozenset(name for name, value in own.items() if value is True))

    def has_new_function(self, module: nn.Module) -> bool:
        """Whether it keeps a function that was not there."""
        own = vars(module)
        return own.keys() != self.names and any(callable(own[name]) for name in own.keys() - self.names)


class Mutations:
    """Listens to the operators of one forward pass of a model on `inputs`."""

    def __init__(self, model: nn.Module, inputs: object, fakes: FakeTensorMode | None):
        norms = {id(b) for m in model.modules() if isinstance(m, BatchNormBase) for b in m.buffers()}
        buffers = [(name, b) for name, b in model.named_buffers() if id(b) not in norms]
        self.model, self.norms = model, {name for name, b in model.named_buffers() if id(b) in norms}
        self.own: dict[int, str] = {}
        self._alive = list[Tensor]()
        """What `own` has the storages of. A key may be used again otherwise: torch forgets a fake tensor that nobody holds."""
        for name, tensor in (*model.named_parameters(), *buffers):
            # operators meet either
            same = [tensor] if fakes is None or isinstance(tensor, FakeTensor) else [tensor, fakes.from_tensor(tensor)]
            self._alive += same
            self.own |= {storage_key(t): name for t in same}
        self.data = {name: storage_key(p) for name, p in model.named_parameters()}
        self.sampled: dict[int, Any] = {}
        """Storages that hold something made from samples. Kept alive: a key may be used again otherwise."""
        self.unshared: dict[int, Any] = {}
        """Of these, storages that hold something made from a rank's own samples."""
        self.by: dict[str, set[str]] = {}
        """The modules whose own code writes a tensor of the model, by its name; "" is the model's."""
        self.faked = fakes is not None
        self.of_weights: dict[int, tuple[str, Any]] = {}
        """Storages that hold something made from weights and from no sample: the first weight, and the storage, kept alive."""
        self.outside: dict[str, set[str]] = {}
        """Weights from which tensors outside of the model are written, and the modules whose own code does it."""
        for marks in (self.sampled, self.unshared):
            marks.update(_storages(inputs))

    def operator(self, module: str, touched: Roles, result: object, own: LiveStorages) -> None:
        """One that a module's own code has run. `own`: storages that the forward pass made."""
        written, read = touched
        for tensor in written:
            if name := self.own.get(storage_key(tensor)):
                self.by.setdefault(name, set()).add(module)
        keys = {storage_key(t) for t in (*written, *read)}
        marked = [marks for marks in (self.sampled, self.unshared) if not marks.keys().isdisjoint(keys)]
        made = _storages([result, written]) if marked else []
        for marks in marked:
            marks.update(made)
        if self.sampled.keys().isdisjoint(keys):
            self._follow(module, [t for t in written if t not in own], [*written, *tree_leaves(result)], read)

    def _follow(self, module: str, outside: list[Any], made: list[Any], read: list[Any]) -> None:
        """What is made from weights alone; and where it is written into a tensor from outside of the run, which is not fake."""
        source = next((name for t in read if (name := self._weight(t)) is not None), None)
        if source is None or not self.faked:
            return
        for t in made:
            if not isinstance(t, torch.Tensor) or t.layout is not torch.strided or storage_key(t) in self.own:
                continue
            self.of_weights[storage_key(t)] = source, t.untyped_storage()
            if not isinstance(t, FakeTensor) and any(t is one for one in outside):
                self.outside.setdefault(source, set()).add(module)

    def _weight(self, tensor: torch.Tensor) -> str | None:
        key = storage_key(tensor)
        name = self.own.get(key)
        return name if name in self.data else self.of_weights[key][0] if key in self.of_weights else None

    def buffers(self) -> list[str]:
        """Buffers that were written in place."""
        return [name for name in self.by if name not in self.data]

    def holding(self, marks: dict[int, Any]) -> list[str]:
        """Buffers and weights that hold something made from samples now. `marks`: `sampled` or `unshared`."""
        held = {self.own[key] for key in marks if key in self.own}
        now = (*self.model.named_parameters(), *self.model.named_buffers())
        return [n for n, t in now if n not in self.norms and (n in held or storage_key(t) in marks)]

    def weights(self) -> dict[str, set[str]]:
        """Weights that were written or given other storage, and the modules whose code did it, where that is known."""
        written = {name: self.by[name] for name in self.data if name in self.by}
        for name, parameter in self.model.named_parameters():
            if storage_key(parameter) != self.data[name]:
                written.setdefault(name, {""})
        return written


LISTENER: ContextVar[Mutations | None] = ContextVar("the mutations of the forward pass that runs", default=None)


def same_on_all_ranks(x: torch.Tensor) -> torch.Tensor:
    """`x`, which all ranks hold alike although it comes from samples. A forward pass that is listened to gets a copy."""
    listener = LISTENER.get()
    if listener is None:
        return x
    x = x.clone()
    listener.unshared.pop(storage_key(x), None)
    return x


def _storages(values: object) -> list[tuple[int, Any]]:
    """The storages of tensors, with their keys."""
    found = (t for t in tree_leaves(values) if isinstance(t, torch.Tensor))
    return [(storage_key(t), t.untyped_storage() if t.layout is torch.strided else t) for t in found]


class OutsideWrites(TorchDispatchMode):
    """A context for a trial, in which its tensors are made too. At its end, tensors from outside have the values from before, also
    those that `Wide` has written through their shadows."""

    def __init__(self) -> None:
        super().__init__()
        self.own = LiveStorages(self.forget)
        """Those of the trial's own tensors."""
        self._before = list[tuple[Tensor, Tensor]]()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return self.run(func, args, kwargs, roles(func, args, kwargs))

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], touched: Roles) -> Any:
        """The result of an operator that touches these tensors."""
        written, read = touched
        for t in written:
            if t not in self.own:
                with no_modes():
                    self._before.append((t, t.detach().clone()))
        result = func(*args, **kwargs)
        given = {storage_key(t) for t in (*written, *read)}
        for t in flat(result):
            if storage_key(t) not in given:
                self.own.add(t)
        return result

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        with torch.no_grad(), no_modes():
            for tensor, value in reversed(self._before):
                tensor.copy_(value)
        Shadow.written({storage_key(tensor) for tensor, _ in self._before})
        self._before.clear()

    def forget(self, key: int) -> None:
        """A storage of the trial's own has ended."""


WEIGHTS = 0
"""The origin of what is made from the trial's parameters and gradients; others are the storages of tensors from outside."""


class FollowedWrites(OutsideWrites):
    """The same, which also follows what the trial writes into tensors from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.follows = False
        """A tensor from outside was written, with what is made from weights, gradients or other tensors from outside."""
        self._origins = dict[int, frozenset[int]]()

    def mark(self, *weights: Tensor | None) -> None:
        """These are parameters or gradients of the trial."""
        for t in (t for t in weights if t is not None):
            self._origins[storage_key(t)] = frozenset({WEIGHTS})
            self.own.add(t)

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], touched: Roles) -> Any:
        written, read = touched
        origins = frozenset[int]().union(*map(self._origin, (*written, *read)))
        outside = [t for t in written if t not in self.own]
        self.follows = self.follows or any(origins - {storage_key(t)} for t in outside)
        result = super().run(func, args, kwargs, touched)
        for t in (*written, *flat(result)):
            if t in self.own:
                self._origins[storage_key(t)] = origins
        return result

    def forget(self, key: int) -> None:
        """A storage of the trial's own has ended."""
        self._origins.pop(key, None)

    def _origin(self, t: Tensor) -> frozenset[int]:
        key = storage_key(t)
        outside = frozenset({key}) if t.dim() else frozenset[int]()
        return self._origins.get(key, frozenset()) if t in self.own else outside
