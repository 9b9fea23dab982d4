"""Where the samples of a collated batch are: which dim of each tensor counts them, and what one sample's sizes are."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Any, Any]


@dataclass(frozen=True)
class SampleRows:
    """Where the samples are in what `collate` returns: a sample collated once, and the same twice."""

    once: Any
    twice: Any

    def form(self, pair: Pair, samples: int) -> tuple[int, ...] | None:
        """The sizes of all tensors, those in the direction of samples for one of them; None when it has no such direction."""
        found: list[int] = []
        return tuple(found) if self._sizes(pair, self.once, self.twice, (samples, found)) else None

    def _sizes(self, tree: Any, once: Any, twice: Any, into: tuple[int, list[int]]) -> bool:
        samples, found = into
        if isinstance(tree, Tensor):
            dim = _direction(once, twice)
            if dim is None or tree.dim() != once.dim() or (dim >= 0 and tree.shape[dim] % samples):
                return False
            found += [n // samples if d == dim else n for d, n in enumerate(tree.shape)]
            return True
        inner = _inner(tree, once, twice)
        return inner is None or all(self._sizes(*three, into) for three in inner)

    def first(self, pair: Pair, keep: int, samples: int) -> Pair:
        """The first `keep` samples of so many."""
        return _kept(pair, self.once, self.twice, (keep, samples))

    def holds(self, pair: Pair, own: Pair) -> bool:
        """Whether the tensors of `own` are in those of `pair`, at the start or the end of each dim."""
        return _holds(pair, own, self.once, self.twice)


def _direction(once: Any, twice: Any) -> int | None:
    """The dim of samples; -1 when there is none, None when it is not one."""
    if not isinstance(once, Tensor) or not isinstance(twice, Tensor) or once.dim() != twice.dim():
        return None
    dims = [d for d, (a, b) in enumerate(zip(once.shape, twice.shape)) if a != b]
    return None if len(dims) > 1 else dims[0] if dims else -1


def _inner(tree: Any, once: Any, twice: Any) -> Iterable[tuple[Any, Any, Any]] | None:
    """What is in a dict, a tuple or a list, beside the same of `once` and `twice`; None for a value without tensors."""
    if isinstance(tree, dict) and isinstance(once, dict) and tree.keys() == once.keys() == twice.keys():
        return [(tree[k], once[k], twice[k]) for k in tree]
    if isinstance(tree, (list, tuple)) and isinstance(once, (list, tuple)) and len(tree) == len(once) == len(twice):
        return list(zip(tree, once, twice))
    return None


def _kept(tree: Any, once: Any, twice: Any, part: tuple[int, int]) -> Any:
    keep, samples = part
    if isinstance(tree, Tensor):
        dim = _direction(once, twice)
        return tree if dim is None or dim < 0 else tree.narrow(dim, 0, tree.shape[dim] * keep // samples)
    inner = _inner(tree, once, twice)
    if inner is None:
        listed = isinstance(tree, (list, tuple)) and isinstance(once, (list, tuple)) and len(once) != len(twice)
        return tree[: len(tree) * keep // samples] if listed else tree
    values = [_kept(*three, part) for three in inner]
    if isinstance(tree, dict):
        return dict(zip(tree, values))
    return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)


def _holds(tree: Any, own: Any, once: Any, twice: Any) -> bool:
    if isinstance(own, Tensor):
        if _direction(once, twice) == -1:
            return True
        if not isinstance(tree, Tensor) or tree.dim() != own.dim() or any(a < b for a, b in zip(tree.shape, own.shape)):
            return False
        return any(torch.equal(block, own) for block in _blocks(tree, own.shape))
    if isinstance(own, dict):
        return isinstance(tree, dict) and all(_holds(tree[k], own[k], once[k], twice[k]) for k in own)
    if isinstance(own, (list, tuple)) and len(own) == len(once) == len(twice):
        return all(_holds(*four) for four in zip(tree, own, once, twice))
    return True


def _blocks(tree: Tensor, shape: torch.Size) -> Iterable[Tensor]:
    """The corners of a tensor that have this shape."""
    for starts in product(*[sorted({0, n - m}) for n, m in zip(tree.shape, shape)]):
        block = tree
        for dim, (start, length) in enumerate(zip(starts, shape)):
            block = block.narrow(dim, start, length)
        yield block
