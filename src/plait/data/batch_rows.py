"""Where the samples of a collated batch are: which dim of each tensor counts them, and what one sample's sizes are."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from plait.tensors.rows import dense

Pair = tuple[Any, Any]
"""(inputs, targets) of one or more samples, as a job's data gives them."""


@dataclass(frozen=True)
class SampleRows:
    """Where the samples are in what `collate` returns: a sample collated once, and the same twice."""

    once: object
    twice: object

    def form(self, pair: Pair, samples: int) -> tuple[int, ...] | None:
        """The sizes of all tensors, those in the direction of samples for one of them; None when it has no such direction."""
        sizes: list[int] = []
        return tuple(sizes) if _sizes(pair, self.once, self.twice, samples, sizes) else None

    def first(self, pair: Pair, keep: int, samples: int) -> Pair:
        """The first `keep` samples of so many."""
        return _kept(pair, self, range(keep), samples)

    def one(self, pair: Pair, number: int, samples: int) -> Pair:
        """One sample of so many, by its number."""
        return _kept(pair, self, range(number, number + 1), samples)

    def holds(self, pair: Pair, own: Pair) -> bool:
        """Whether the tensors of `own` are in those of `pair`, at the start or the end of each dim, and are all of its samples."""
        return _holds(pair, own, self.once, self.twice)


def _sizes(tree: object, once: object, twice: object, samples: int, into: list[int]) -> bool:
    """Whether all tensors have a dim of samples or need none; their sizes go `into` a list."""
    if isinstance(tree, Tensor):
        dim = _direction(tree, once, twice)
        if dim is None:
            return False
        into += [n // samples if d == dim else n for d, n in enumerate(tree.shape)]
        return dim < 0 or tree.shape[dim] % samples == 0
    inner = _inner(tree, once, twice)
    return inner is None or all(_sizes(a, b, c, samples, into) for a, b, c in inner)


def _direction(tree: Tensor, once: object, twice: object) -> int | None:
    """The dim of samples in a tensor; -1 when there is none, None when it is not one. A sample without elements does not tell where
    those of others are."""
    if not isinstance(once, Tensor) or not isinstance(twice, Tensor) or not once.dim() == twice.dim() == tree.dim():
        return None
    dims = [d for d, (a, b) in enumerate(zip(once.shape, twice.shape)) if a != b]
    if dims:
        return dims[0] if len(dims) == 1 else None
    return None if tree.numel() and not once.numel() else -1


def _inner(*trees: object) -> list[tuple[Any, ...]] | None:
    """What is in dicts of the same keys, or in tuples and lists of the same length, side by side; None for anything else."""
    dicts = [tree for tree in trees if isinstance(tree, dict)]
    if len(dicts) == len(trees) and all(d.keys() == dicts[0].keys() for d in dicts):
        return [tuple(d[key] for d in dicts) for key in dicts[0]]
    lists = [tree for tree in trees if isinstance(tree, (list, tuple))]
    return list(zip(*lists)) if len(lists) == len(trees) and len(set(map(len, lists))) == 1 else None


def _kept(tree: object, rows: SampleRows, keep: range, samples: int) -> Any:
    once, twice = rows.once, rows.twice
    places = lambda length: slice(length * keep.start // samples, length * keep.stop // samples)  # noqa: E731
    if isinstance(tree, Tensor):
        dim = _direction(tree, once, twice)
        if dim is None or dim < 0:
            return tree
        of = places(tree.shape[dim])
        return dense(tree.narrow(dim, of.start, of.stop - of.start))
    inner = _inner(tree, once, twice)
    if inner is None:
        lists = [value for value in (tree, once, twice) if isinstance(value, (list, tuple))]
        grows = len(lists) == 3 and len(lists[1]) != len(lists[2])
        return lists[0][places(len(lists[0]))] if grows else tree
    values = [_kept(a, SampleRows(b, c), keep, samples) for a, b, c in inner]
    if isinstance(tree, dict):
        return dict(zip(tree, values))
    kind: Callable[..., object] = type(tree)
    return kind(*values) if hasattr(tree, "_fields") else kind(values)


def _holds(tree: object, own: object, once: object, twice: object) -> bool:
    if isinstance(own, Tensor):
        dim = _direction(tree, once, twice) if isinstance(tree, Tensor) else None
        if dim == -1:
            return True
        if dim is None or not isinstance(tree, Tensor) or tree.dim() != own.dim() or tree.shape[dim] != own.shape[dim]:
            return False  # samples in one row: a share of the larger batch's rows is not that of these samples
        if any(a < b for a, b in zip(tree.shape, own.shape)):
            return False
        return any(torch.equal(block, own) for block in _blocks(tree, own.shape))
    inner = _inner(tree, own, once, twice)
    return not isinstance(own, dict) if inner is None else all(_holds(*four) for four in inner)


def _blocks(tree: Tensor, shape: torch.Size) -> Iterable[Tensor]:
    """The corners of a tensor that have this shape."""
    for starts in product(*[sorted({0, n - m}) for n, m in zip(tree.shape, shape)]):
        yield tree[tuple(slice(start, start + length) for start, length in zip(starts, shape))]
