"""Location of the samples in a collated batch: the sample dim of each tensor, and the sizes of one sample."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from plait.tensors.rows import make_dense

Pair = tuple[Any, Any]
"""(inputs, targets) of one or more samples."""


@dataclass(frozen=True)
class SampleRows:
    """Location of samples in the result of `collate`, found from a sample collated once and twice."""

    one_sample: object
    two_samples: object

    def measure_sizes(self, pair: Pair, samples: int) -> tuple[int, ...] | None:
        """Return the sizes of all tensors, per sample in the sample dim; None if a tensor has no sample dim."""
        sizes: list[int] = []
        return tuple(sizes) if _collect_sizes(pair, self.one_sample, self.two_samples, samples, sizes) else None

    def take_first(self, pair: Pair, keep: int, samples: int) -> Pair:
        """Return the inputs of the first `keep` samples, of any structure."""
        return _take_samples(pair, self, range(keep), samples)

    def take_one(self, pair: Pair, number: int, samples: int) -> Pair:
        """Return sample `number` of `samples` samples."""
        return _take_samples(pair, self, range(number, number + 1), samples)

    def contains(self, pair: Pair, own: Pair) -> bool:
        """Return whether each tensor of `own` is at the start or end of each dim of the tensor in `pair`, with all of its samples."""
        return _contains(pair, own, self.one_sample, self.two_samples)


def _collect_sizes(tree: object, once: object, twice: object, samples: int, into: list[int]) -> bool:
    """Append the sizes of all tensors to `into`. Return whether every tensor has a sample dim or needs none."""
    if isinstance(tree, Tensor):
        dim = _find_sample_dim(tree, once, twice)
        if dim is None:
            return False
        into += [n // samples if d == dim else n for d, n in enumerate(tree.shape)]
        return dim < 0 or tree.shape[dim] % samples == 0
    inner = _zip_children(tree, once, twice)
    return inner is None or all(_collect_sizes(a, b, c, samples, into) for a, b, c in inner)


def _find_sample_dim(tree: Tensor, once: object, twice: object) -> int | None:
    """Return the sample dim of a tensor; -1 if it has none, None if it is ambiguous. A sample without elements is ambiguous."""
    if not isinstance(once, Tensor) or not isinstance(twice, Tensor) or not once.dim() == twice.dim() == tree.dim():
        return None
    dims = [d for d, (a, b) in enumerate(zip(once.shape, twice.shape)) if a != b]
    if dims:
        return dims[0] if len(dims) == 1 else None
    return None if tree.numel() and not once.numel() else -1


def _zip_children(*trees: object) -> list[tuple[Any, ...]] | None:
    """Return the children of dicts with equal keys, or of tuples and lists of equal length, zipped; None for other values."""
    dicts = [tree for tree in trees if isinstance(tree, dict)]
    if len(dicts) == len(trees) and all(d.keys() == dicts[0].keys() for d in dicts):
        return [tuple(d[key] for d in dicts) for key in dicts[0]]
    lists = [tree for tree in trees if isinstance(tree, (list, tuple))]
    return list(zip(*lists)) if len(lists) == len(trees) and len(set(map(len, lists))) == 1 else None


def _take_samples(tree: object, rows: SampleRows, keep: range, samples: int) -> Any:
    once, twice = rows.one_sample, rows.two_samples
    places = lambda length: slice(length * keep.start // samples, length * keep.stop // samples)  # noqa: E731
    if isinstance(tree, Tensor):
        dim = _find_sample_dim(tree, once, twice)
        if dim is None or dim < 0:
            return tree
        of = places(tree.shape[dim])
        return make_dense(tree.narrow(dim, of.start, of.stop - of.start))
    inner = _zip_children(tree, once, twice)
    if inner is None:
        lists = [value for value in (tree, once, twice) if isinstance(value, (list, tuple))]
        grows = len(lists) == 3 and len(lists[1]) != len(lists[2])
        return lists[0][places(len(lists[0]))] if grows else tree
    values = [_take_samples(a, SampleRows(b, c), keep, samples) for a, b, c in inner]
    if isinstance(tree, dict):
        return dict(zip(tree, values))
    kind: Callable[..., object] = type(tree)
    return kind(*values) if hasattr(tree, "_fields") else kind(values)


def _contains(tree: object, own: object, once: object, twice: object) -> bool:
    if isinstance(own, Tensor):
        dim = _find_sample_dim(tree, once, twice) if isinstance(tree, Tensor) else None
        if dim == -1:
            return True
        if dim is None or not isinstance(tree, Tensor) or tree.dim() != own.dim() or tree.shape[dim] != own.shape[dim]:
            return False  # samples share a row: a part of the larger batch's rows is not a part of these samples
        if any(a < b for a, b in zip(tree.shape, own.shape)):
            return False
        return any(torch.equal(block, own) for block in _iter_corner_blocks(tree, own.shape))
    inner = _zip_children(tree, own, once, twice)
    return not isinstance(own, dict) if inner is None else all(_contains(*four) for four in inner)


def _iter_corner_blocks(tree: Tensor, shape: torch.Size) -> Iterable[Tensor]:
    """Yield the corner blocks of a tensor that have this shape."""
    for starts in product(*[sorted({0, n - m}) for n, m in zip(tree.shape, shape)]):
        yield tree[tuple(slice(start, start + length) for start, length in zip(starts, shape))]
