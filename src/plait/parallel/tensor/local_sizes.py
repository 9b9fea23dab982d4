"""Sizes in a block's code that are those of the whole, made those of a rank's slice while the code runs.

Many models compute sizes from what their *input* has: `y.view(B, T, C)` with C the width of the residual stream, after
an attention over the rank's own heads, has n times fewer numbers than it asks for. No attribute can be divided there.
`LocalSizes(n)` runs the block's own code and corrects such requests when they cannot be meant:

- `view`, `reshape`, `unflatten` to n times as many numbers as there are: one dim is divided, the one where the
  requested shape and the tensor's own part ways;
- `split` into parts larger than the dim, or that do not fill it: the parts are divided;
- `expand` of a dim that is neither 1 nor as requested, but n times smaller: it stays as it is.

Whether this is right for a block is not argued but checked: `parallel/tensor/find/finder.py` runs the block with it on every rank's slice.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SHAPING = (Tensor.view, Tensor.reshape, torch.reshape)
_SPLITS = (Tensor.split, torch.split, Tensor.split_with_sizes, torch.split_with_sizes)


class LocalSizes(TorchFunctionMode):
    """Active while the code of a sliced block runs on one of n ranks."""

    def __init__(self, n: int):
        super().__init__()
        self.n = n

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _SHAPING:
            args, kwargs = self._shaped(args, kwargs)
        elif func in (Tensor.unflatten, torch.unflatten) and not kwargs and len(args) == 3:
            args = self._unflattened(*args)
        elif func in _SPLITS:
            args, kwargs = self._split(func, args, kwargs)
        elif func is Tensor.expand and not kwargs:
            args = self._expanded(args)
        return func(*args, **kwargs)

    def _shaped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x, *rest = args
        given = kwargs.get("shape", kwargs.get("size")) if not rest else rest[0] if len(rest) == 1 else rest
        shape = _sizes([given] if isinstance(given, int) else given)
        if shape is None:
            return args, kwargs
        return (x, resized(tuple(x.shape), shape, self.n)), {}

    def _unflattened(self, x: Tensor, dim: Any, given: Any) -> tuple[Any, ...]:
        shape = _sizes(given)
        if shape is None or not isinstance(dim, int):
            return x, dim, given
        return x, dim, resized((x.shape[dim],), shape, self.n)

    def _split(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """`split(x, size or sizes, dim=0)`."""
        names = ("split_size", "split_size_or_sections", "split_sizes")
        name = next((k for k in names if k in kwargs), None)
        parts = args[1] if len(args) > 1 else kwargs.get(name) if name else None
        dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        size = args[0].shape[dim]
        if isinstance(parts, int):
            wrong = parts > 0 and parts % self.n == 0 and (size <= parts or size % parts != 0)
            parts = parts // self.n if wrong else parts
        elif (sizes := _sizes(parts)) is not None:
            wrong = sum(sizes) == self.n * size and all(s % self.n == 0 for s in sizes)
            parts = [s // self.n for s in sizes] if wrong else parts
        else:
            return args, kwargs
        return (args[0], parts, dim), {}

    def _expanded(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        shape = _sizes(rest[0] if len(rest) == 1 and not isinstance(rest[0], int) else rest)
        if shape is None or len(shape) < x.dim():
            return args
        front = len(shape) - x.dim()
        own = (None,) * front + tuple(x.shape)
        return x, tuple(
            have if have not in (None, 1) and ask == self.n * have else ask for have, ask in zip(own, shape)
        )


def _sizes(given: Any) -> tuple[int, ...] | None:
    """Whole numbers, or None when it is something else (a dtype, a tensor)."""
    if not isinstance(given, (tuple, list)):
        return None
    return tuple(given) if all(isinstance(s, int) for s in given) else None


def resized(have: tuple[int, ...], ask: tuple[int, ...], n: int) -> tuple[int, ...]:
    """The shape that code meant which asks for `ask` and holds one n-th of it, in the shape `have`.

    >>> resized((2, 5, 8), (2, 5, 16), 2), resized((2, 5, 8), (2, 5, 4, 4), 2), resized((2, 2, 5, 4), (8, 5, 4), 2)
    ((2, 5, 8), (2, 5, 2, 4), (4, 5, 4))
    """
    if -1 in ask or _product(ask) != n * _product(have):
        return ask
    i = _parting(have, ask, n)
    at = next((k for k in range(i, len(ask)) if ask[k] % n == 0), None)
    return ask if at is None else (*ask[:at], ask[at] // n, *ask[at + 1 :])


def _parting(have: tuple[int, ...], ask: tuple[int, ...], n: int) -> int:
    """The first requested dim that is not made of the tensor's own dims, from the left."""
    i = j = 0
    while i < len(ask) and j < len(have):
        if ask[i] == n * have[j] and ask[i] != have[j]:
            return i
        start, left, right = i, have[j], ask[i]
        while left != right:
            if left < right and j + 1 < len(have):
                j += 1
                left *= have[j]
            elif right < left and i + 1 < len(ask):
                i += 1
                right *= ask[i]
            else:
                return start
        i, j = i + 1, j + 1
    return i if i < len(ask) else 0


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
