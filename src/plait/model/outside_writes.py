"""What a trial of the job's model or optimizer writes into tensors that were there before it: a teacher that is averaged, a table of norms.

A trial must leave them as they were, also one on fake tensors: torch's fake mode really writes where an operator is given no fake tensor.
And a rank that has a part of the weights would write something else into them than one device does.
"""

from types import TracebackType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from plait.model.deferred_init import Roles, roles
from plait.tensors.float64 import Shadow
from plait.tensors.torch_private import OpOverload, TorchDispatchMode, no_modes, storage_key
from plait.tensors.trees import flat


class OutsideWrites(TorchDispatchMode):
    """A context for a trial, in which its tensors are made too. At its end, tensors from outside have the values from before, also
    those that `Wide` has written through their shadows."""

    def __init__(self) -> None:
        super().__init__()
        self._made = dict[int, ReferenceType[object]]()
        """Storages of the trial's own tensors, while they live."""
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
            if storage_key(t) not in self._made:
                with no_modes():
                    self._before.append((t, t.detach().clone()))
        result = func(*args, **kwargs)
        given = {storage_key(t) for t in (*written, *read)}
        for t in flat(result):
            if storage_key(t) not in given:
                self.keep(t)
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

    def keep(self, t: Tensor) -> None:
        """Know it as the trial's own; when its storage ends, another may get the number."""
        key, forget = storage_key(t), self.forget
        self._made[key] = ref(t.untyped_storage() if t.layout is torch.strided else t, lambda _: forget(key))

    def forget(self, key: int) -> None:
        """A storage of the trial's own has ended."""
        self._made.pop(key, None)


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
            self.keep(t)

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], touched: Roles) -> Any:
        written, read = touched
        origins = frozenset[int]().union(*map(self._origin, (*written, *read)))
        outside = [t for t in written if storage_key(t) not in self._made]
        self.follows = self.follows or any(origins - {storage_key(t)} for t in outside)
        result = super().run(func, args, kwargs, touched)
        for t in (*written, *flat(result)):
            if (key := storage_key(t)) in self._made:
                self._origins[key] = origins
        return result

    def forget(self, key: int) -> None:
        """A storage of the trial's own has ended."""
        super().forget(key)
        self._origins.pop(key, None)

    def _origin(self, t: Tensor) -> frozenset[int]:
        key = storage_key(t)
        outside = frozenset({key}) if t.dim() else frozenset[int]()
        return self._origins.get(key, frozenset()) if key in self._made else outside
