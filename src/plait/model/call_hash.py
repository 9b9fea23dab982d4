"""A hash of the operators that a call of a unit runs. Calls with equal hashes compute the same.

It covers each operator with its arguments. A tensor counts by its storage, numbered in order of first use, and by its shape, strides and format. A
parameter counts by its name inside the unit. Two layers therefore have equal hashes if they differ only in their parameters and inputs. A
layer that computes something else because of its position has another hash.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.tensors.torch_private import OpOverload, storage_key

PLAIN_TYPES = (int, float, complex, str, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class CallHash:
    """The running hash of one call. `inputs`: its input tensors, in order."""

    def __init__(self, unit: str, inputs: Iterable[Tensor] = ()):
        self.prefix = f"{unit}."
        self.places: dict[int, int] = {}
        self.alive: list[Tensor] = []
        self.value = hash(tuple(self._make_key(t, {}) for t in inputs))

    def add(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object, names: Mapping[int, str]) -> None:
        """Add an operator. `names`: parameter names by storage."""
        self.value = hash((self.value, func, self._make_key((args, tuple(kwargs.items()), result), names)))

    def finish(self, returned: Iterable[Tensor]) -> int:
        """Add the outputs of the call, and return the hash."""
        value = hash((self.value, tuple(self._make_key(t, {}) for t in returned)))
        self.alive.clear()
        return value

    def _make_key(self, item: object, names: Mapping[int, str]) -> object:
        if isinstance(item, Tensor):
            if item.layout is not torch.strided or item.is_nested:
                self.alive.append(item)
                return id(item)  # unique for every call
            key = storage_key(item)
            where: object = names.get(key, "").removeprefix(self.prefix)
            if not where:
                if key not in self.places:
                    self.places[key] = len(self.places)
                    self.alive.append(item)  # otherwise another tensor may reuse its storage id
                where = self.places[key]
            return where, item.shape, item.stride(), item.storage_offset(), item.dtype
        if isinstance(item, (list, tuple)):
            return tuple([self._make_key(one, names) for one in item])
        return item if isinstance(item, PLAIN_TYPES) else id(item)
