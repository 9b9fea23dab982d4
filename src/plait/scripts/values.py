"""Convert tensors, batches and generators for a recording: stored tensors, row hashes, label counts.

It is loaded into scripts with `scripts/recorder.py`, and imports nothing of plait.
"""

import hashlib
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class RecordedTensor(NamedTuple):
    """A tensor in a folder of tensors. `name`: the file name, a hash of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass
class TensorFolder:
    """A folder of tensors, each stored once, under its hash. `room`: bytes that may still be written; below 0, tensors were omitted."""

    path: str
    room: int

    def store(self, t: Tensor) -> RecordedTensor:
        """Write a tensor, if it is new and space remains. A collective if it is sharded."""
        t = gather_full(t)
        t = (t if t.layout == torch.strided else t.to_dense()).cpu().contiguous()
        data = t.reshape(-1).view(torch.uint8).numpy().data if t.numel() else b""
        name = hashlib.blake2b(data, digest_size=16).hexdigest()
        path = os.path.join(self.path, name)
        if not os.path.exists(path):
            self.room -= len(data)
            if self.room >= 0:
                with open(f"{path}.{os.getpid()}", "wb") as file:
                    file.write(data)
                os.replace(file.name, path)
        return RecordedTensor(name, dtype_name(t.dtype), (*t.shape,))

    def load(self, stored: RecordedTensor) -> Tensor:
        """Load a stored tensor. Its data is memory-mapped."""
        path, dtype = os.path.join(self.path, stored.name), getattr(torch, stored.dtype)
        return torch.from_file(path, size=math.prod(stored.shape), dtype=dtype).reshape(stored.shape)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_split(t: Tensor) -> "TypeGuard[DTensor]":
    return hasattr(t, "full_tensor")


def gather_full(t: Tensor) -> Tensor:
    t = t.detach()
    return t.full_tensor() if is_split(t) else t


def iterate_tensors(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch with rows, by path."""
    if isinstance(value, Tensor):
        if value.dim():
            yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from iterate_tensors(each, f"{name}.{key}")


def replace_by_name(value: object, new: dict[str, Tensor], name: str = "") -> object:
    if isinstance(value, Tensor):
        return new.get(name, value)
    if isinstance(value, MutableMapping):
        value.update({key: replace_by_name(each, new, f"{name}.{key}") for key, each in value.items()})
    elif isinstance(value, (list, tuple)):
        found = [replace_by_name(each, new, f"{name}.{key}") for key, each in enumerate(value)]
        make: Callable[..., object] = type(value)
        return make(*found) if hasattr(value, "_fields") else make(found)
    return value


def hash_rows(batch: object) -> list[str]:
    leaves = [t.detach().cpu().contiguous() for _, t in iterate_tensors(batch) if t.layout == torch.strided]
    count = leaves[0].shape[0] if leaves else 0
    rows = [t.reshape(count, -1).view(torch.uint8).numpy() for t in leaves if t.shape[0] == count and t.numel()]
    return [hashlib.blake2b(b"".join(row[i].tobytes() for row in rows), digest_size=8).hexdigest() for i in range(count)]


def count_labels(leaves: dict[str, Tensor]) -> list[int] | None:
    """Count the labels of a batch: as they are, and without the first of each row (which a causal model shifts out)."""
    integers = {name: t for name, t in leaves.items() if not t.is_floating_point()}
    found = [t for t in integers.values() if (t == -100).any()] or [t for name, t in integers.items() if "label" in name] or [*integers.values()]
    return [int((t != -100).sum()) for t in (found[-1], found[-1][:, 1:] if found[-1].dim() == 2 else found[-1])] if found else None


def hash_generators() -> str:
    found = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8)
    found.update(repr(random.getstate()).encode())
    found.update(repr(sys.modules["numpy"].random.get_state()[1:3]).encode() if "numpy" in sys.modules else b"")
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.update(torch.cuda.get_rng_state().numpy().tobytes())
    return found.hexdigest()
