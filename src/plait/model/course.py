"""The graph of operators that a call of a unit runs, as one number: calls with the same number compute the same.

An operator is noted with its arguments: of a tensor which storage it lies in, by the order in which the call met them, and its shape, strides
and format; of a parameter its name inside of the unit. So two layers have the same number if one is the other with other
parameters and other inputs, whatever their code is. A layer that takes another way because of its place in the model has another.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.tensors.torch_private import OpOverload, storage_key

PLAIN = (int, float, complex, str, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class OperatorCourse:
    """Of one call. `given`: the tensors that it was given, in order."""

    def __init__(self, unit: str, given: Iterable[Tensor] = ()):
        self.prefix = f"{unit}."
        self.places: dict[int, int] = {}
        self.alive: list[Tensor] = []
        self.value = hash(tuple(self._of(t, {}) for t in given))

    def add(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object, names: Mapping[int, str]) -> None:
        """The call runs an operator. `names`: of parameters, by storage."""
        self.value = hash((self.value, func, self._of((args, tuple(kwargs.items()), result), names)))

    def end(self, returned: Iterable[Tensor]) -> int:
        """The number, with what the call returns."""
        value = hash((self.value, tuple(self._of(t, {}) for t in returned)))
        self.alive.clear()
        return value

    def _of(self, item: object, names: Mapping[int, str]) -> object:
        if isinstance(item, Tensor):
            if item.layout is not torch.strided or item.is_nested:
                self.alive.append(item)
                return id(item)  # no two calls have the same
            key = storage_key(item)
            where: object = names.get(key, "").removeprefix(self.prefix)
            if not where:
                if key not in self.places:
                    self.places[key] = len(self.places)
                    self.alive.append(item)  # or another tensor may get its storage's number
                where = self.places[key]
            return where, item.shape, item.stride(), item.storage_offset(), item.dtype
        if isinstance(item, (list, tuple)):
            return tuple([self._of(one, names) for one in item])
        return item if isinstance(item, PLAIN) else id(item)
