"""The first or some chosen samples of a data set, as a data set that notes a digest of whatever is read of it."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.data.batch import Data, MapStyle, is_map
from plait.data.sample_errors import naming_samples
from plait.tensors.torch_private import tree_leaves

Digest = Callable[[object], Any] | None


class ChosenSamples:
    """Samples of a data set that is read by index: those of `ids`, numbered from 0."""

    sketched_beside: Callable[[], list[Any]]
    """What a sketch's samples are put together with, where that is given."""

    def __init__(self, data: MapStyle, ids: Sequence[int], digest: Digest = None):
        self.data, self.ids, self.digest, self.seen = data, ids, digest, dict[int, Any]()
        if hasattr(data, "collate"):
            self.collate = data.collate

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> object:
        with naming_samples([self.ids[i]], "of the data"):
            sample = self.data[self.ids[i]]
        if self.digest is not None:
            self.seen[i] = self.digest(sample)
        return sample


class FirstSamples:
    """The first samples of an iterable (None: all). It has no shares for ranks, even where the iterable has."""

    sketched_beside: Callable[[], list[Any]]

    def __init__(self, data: Data, length: int | None, digest: Digest = None):
        self.data, self.length, self.digest, self.seen = data, length, digest, dict[int, Any]()
        for name in ("collate", "set_epoch"):
            if hasattr(data, name):
                setattr(self, name, getattr(data, name))

    def __iter__(self) -> Iterator[object]:
        for i, sample in enumerate(islice(iter(self.data), self.length)):
            if self.digest is not None:
                self.seen[i] = self.digest(sample)
            yield sample


def first_of(data: Data, length: int | None = None, digest: Digest = None) -> ChosenSamples | FirstSamples:
    """The first `length` samples of a data set of either kind, or all of them; `seen` has the digests of what was read."""
    if is_map(data):
        return ChosenSamples(data, range(len(data) if length is None else min(length, len(data))), digest)
    return FirstSamples(data, length, digest)


def sample_digest(sample: object) -> float:
    """A number that changes when a sample does."""
    total = 0.0
    for k, leaf in enumerate(tree_leaves(sample)):
        flat = _values(leaf).nan_to_num(0.125, 1024.0, -1024.0)  # what is missing or masked equals itself
        total += float((flat * torch.arange(1, flat.numel() + 1, dtype=torch.float64).sin()).sum()) * (k + 1)
    return total


def _values(leaf: object) -> Tensor:
    """A leaf's values in one row: text as its bytes, an object as what its attributes hold. None, and what has no values, has none."""
    if isinstance(leaf, (str, bytes)):
        leaf = [*(leaf.encode() if isinstance(leaf, str) else leaf)]
    try:
        tensor = torch.as_tensor(leaf if isinstance(leaf, Tensor) else np.asarray(leaf))
    except (TypeError, ValueError):  # no array of numbers
        inner = [_values(value) for value in tree_leaves(getattr(leaf, "__dict__", {})) if value is not leaf]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *inner])
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().flatten()


def seen_in(data: object) -> dict[int, Any]:
    """Digests of the samples that were read of such data, by number."""
    assert isinstance(data, (ChosenSamples, FirstSamples))
    return data.seen
