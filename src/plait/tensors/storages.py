"""Sets of storages while they live."""

from collections.abc import Callable
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from plait.tensors.torch_private import storage_key


class LiveStorages:
    """Storages, each named by a tensor that lies in it. One leaves the set when it ends: another may then get its key."""

    def __init__(self, ended: Callable[[int], None] = lambda key: None):
        self._storages = dict[int, ReferenceType[object]]()
        self._ended = ended

    def __contains__(self, t: Tensor) -> bool:
        return storage_key(t) in self._storages

    def __len__(self) -> int:
        return len(self._storages)

    def add(self, t: Tensor) -> None:
        key = storage_key(t)
        self._storages[key] = ref(t.untyped_storage() if t.layout is torch.strided else t, lambda _: self._end(key))

    def discard(self, t: Tensor) -> None:
        self._storages.pop(storage_key(t), None)

    def _end(self, key: int) -> None:
        self._storages.pop(key, None)
        self._ended(key)
