"""Views of a sharded tensor: which dim of the view is cut, and which rows of it each rank holds.

Each rule takes (function, sharded tensor, other arguments) and gives the result, or raises `Elsewhere` where the result's
parts are not ranges of one dim. So do those of functions along dims that are not cut.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.tensors.rows import Rows
from plait.tensors.torch_private import tree_map


class Elsewhere(Exception):
    """A function needs rows that this rank does not have."""


Rules = dict[str, Callable[[Any, Any, Any, Any], Any]]
"""Name of a function -> (function, sharded tensor, other arguments) -> result."""


class Sharded(Protocol):
    """A tensor that stands for a whole of which this rank has `local`: its `rows` of dim `cut`."""

    group: ProcessGroup

    @property
    def local(self) -> Tensor: ...
    @property
    def shape(self) -> torch.Size: ...
    @property
    def cut(self) -> int: ...
    @property
    def rows(self) -> Rows: ...
    @property
    def rank(self) -> int: ...
    def like(self, local: Tensor, dim: int | None = None, rows: Rows | None = None) -> Any: ...
    def whole(self) -> Tensor: ...
    def fitting(self, other: Tensor) -> Tensor: ...


def moved(func: Callable[..., Any], x: Sharded, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views that only move, add or drop dims; a meta tensor tells where the cut one goes."""
    sizes = [1 if n == 1 and d != x.cut else d + 2 for d, n in enumerate(x.shape)]
    shape = func(torch.empty(sizes, device="meta"), *args, **kwargs).shape
    if x.cut + 2 not in shape or (x.rows.length == 1 and func.__name__ == "squeeze"):
        raise Elsewhere
    return x.like(func(x.local, *args, **kwargs), shape.index(x.cut + 2))


def reshaped(func: Callable[..., Any], x: Sharded, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """view, reshape, flatten, unflatten and the like."""
    if func.__name__ == "view" and args and isinstance(args[0], torch.dtype):
        raise Elsewhere
    sizes = [tuple(a.shape) if isinstance(a, Tensor) else a for a in args]
    name = {"view_as": "view", "reshape_as": "reshape"}.get(func.__name__, func.__name__)
    shape = getattr(torch.empty(x.shape, device="meta"), name)(*sizes, **kwargs).shape
    cut = follow(x.shape, x.cut, shape, x.rows)
    if cut is None:
        raise Elsewhere
    dim, rows = cut
    local = (*shape[:dim], rows.sizes[x.rank], *shape[dim + 1 :])
    return x.like(x.local.view(local) if name == "view" else x.local.reshape(local), dim, rows)


def follow(old: Sequence[int], cut: int, new: Sequence[int], rows: Rows) -> tuple[int, Rows] | None:
    """(dim, rows) of the cut dim of the shape `old` in the shape `new`; None when no dim of it alone is cut."""
    if 0 in old:
        return None
    if rows.length == 1:
        same = (k for k, n in enumerate(new) if n == 1 and math.prod(new[:k]) == math.prod(old[:cut]))
        dim = next(same, None)
        if dim is not None:
            return dim, rows
    (a, i), (b, j) = ((0, len(old)), (0, len(new))) if rows.length == 1 else _block(old, cut, new)
    flat = rows.merged(math.prod(old[a:cut]), math.prod(old[cut + 1 : i]))
    for dim in range(b, j):
        after = flat.parted(math.prod(new[b:dim]), new[dim], math.prod(new[dim + 1 : j]))
        if after is not None:
            return dim, after
    return None


def _block(old: Sequence[int], cut: int, new: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The smallest block of neighbouring dims around the cut one that is a block of `new` too: (first, end) in both."""
    i = j = 0
    while True:
        a, b = i, j
        i, j = i + 1, j + 1
        while math.prod(old[a:i]) != math.prod(new[b:j]):
            if math.prod(old[a:i]) < math.prod(new[b:j]):
                i += 1
            else:
                j += 1
        while i < len(old) and old[i] == 1:  # belong to no block, and disturb none
            i += 1
        while j < len(new) and new[j] == 1:
            j += 1
        if a <= cut < i:
            return (a, i), (b, j)


def sliced(x: Sharded, first: int, end: int) -> Any:
    """Rows first … end − 1 of the cut dim."""
    held = x.rows.held(x.rank, first, end)
    pieces = [x.local.narrow(x.cut, a, n) for a, n in held] or [x.local.narrow(x.cut, 0, 0)]
    return x.like(pieces[0] if len(pieces) == 1 else torch.cat(pieces, x.cut), rows=x.rows.sliced(first, end))


def indexed(func: Callable[..., Any], x: Sharded, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x[…] with slices, whole numbers, None and …, and with tensors before a dim that stays as it is."""
    index = list(args[0]) if isinstance(args[0], tuple) else [args[0]]
    advanced = [i for i in index if isinstance(i, (Tensor, list, range))]
    if any(isinstance(i, bool) for i in index):
        raise Elsewhere
    takes = [1 if not isinstance(i, Tensor) or i.dtype not in (torch.bool, torch.uint8) else i.dim() for i in index]
    takes = [0 if i is None or i is Ellipsis else n for i, n in zip(index, takes)]
    at = next((k for k, i in enumerate(index) if i is Ellipsis), len(index))
    index[at : at + 1] = [slice(None)] * (len(x.shape) - sum(takes))
    takes[at : at + 1] = [1] * (len(x.shape) - sum(takes))
    place = next(k for k in range(len(index)) if sum(takes[:k]) <= x.cut < sum(takes[: k + 1]))
    mine = index[place]
    if len(advanced) == 1 and mine == slice(None) and not any(type(i) is int for i in index):
        later = next(k for k, i in enumerate(index) if i is advanced[0]) > place
        if later:
            return x.like(x.local[tuple(index)], sum(i is None or isinstance(i, slice) for i in index[:place]))
    if advanced:
        if mine != slice(None) or any(i != slice(None) for i in index[place:]):
            raise Elsewhere
        return x.like(x.local[tuple(index)], x.cut - len(x.shape))
    if isinstance(mine, slice) and mine.step in (None, 1):
        first, end, _ = mine.indices(x.rows.length)
        part = x if (first, end) == (0, x.rows.length) else sliced(x, first, max(first, end))
        index[place] = slice(None)
        dim = sum(i is None or isinstance(i, slice) for i in index[:place])
        return part.like(part.local[tuple(index)], dim)
    if isinstance(mine, int):
        one = sliced(x, mine % x.rows.length, mine % x.rows.length + 1).whole()
        index[place] = 0
        return one[tuple(index)]
    raise Elsewhere


def narrowed(func: Callable[..., Any], x: Sharded, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """narrow, select, chunk and split; along the cut dim they are slices."""
    name, first = func.__name__, func.__name__ in ("narrow", "select")
    dim = kwargs.get("dim", 0) if len(args) <= (not first) else args[0 if first else 1]
    if not isinstance(dim, int):
        raise Elsewhere
    dim %= len(x.shape)
    if dim != x.cut:
        result = func(x.local, *args, **kwargs)
        lost = name == "select" and dim < x.cut
        return x.like(result, x.cut - lost) if first else tuple(x.like(t) for t in result)
    if name == "narrow" and len(args) == 3 and isinstance(args[1], int):
        start = args[1] % x.rows.length if args[1] < 0 else args[1]
        return sliced(x, start, start + args[2])
    if name == "select" and len(args) == 2:
        return indexed(func, x, ((slice(None),) * dim + (args[1],),), {})
    if first:
        raise Elsewhere
    sizes = [len(t) for t in func(torch.empty(x.rows.length, device="meta"), *args[:1], **kwargs | {"dim": 0})]
    ends = list(accumulate(sizes))
    return tuple(sliced(x, end - size, end) for size, end in zip(sizes, ends))


SECOND = dict.fromkeys(("linalg_norm", "linalg_vector_norm", "norm", "repeat_interleave", "roll")) | {"normalize": 1}
"""Functions whose dims come after another argument -> what they are when they are not given."""
FIRST = {"glu": -1, "unbind": 0}
"""Those whose dim may be left out."""


def others(func: Callable[..., Any], x: Sharded, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What runs along dims that are not cut: sums, norms, softmax, tensors picked or taken apart."""
    name = func.__name__
    at, unsaid = (1, SECOND[name]) if name in SECOND else (0, FIRST.get(name))
    dims = args[at] if len(args) > at else kwargs.get("dim", kwargs.get("axis", kwargs.get("dims", unsaid)))
    dims = args if name == "flip" and args and isinstance(args[0], int) else dims
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, (tuple, list)) or not dims or not all(type(d) is int for d in dims):
        raise Elsewhere
    dims = {d % len(x.shape) for d in dims}
    if x.cut in dims:
        raise Elsewhere
    before = sum(d < x.cut for d in dims)
    found = func(x.local, *args, **kwargs)
    return tree_map(
        lambda t: x.like(t, x.cut - before * (t.dim() < len(x.shape))) if isinstance(t, Tensor) else t, found
    )


MOVED = (
    "adjoint", "movedim", "moveaxis", "permute", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze",
)  # fmt: skip
RULES: Rules = {
    **dict.fromkeys(MOVED, moved),
    **dict.fromkeys(("flatten", "reshape", "reshape_as", "unflatten", "view", "view_as"), reshaped),
    **dict.fromkeys(("chunk", "narrow", "select", "split", "tensor_split"), narrowed),
    "__getitem__": indexed,
}
"""Name of a function -> its rule."""
OTHERS: Rules = dict.fromkeys(
    (
        "all", "amax", "amin", "any", "argmax", "argmin", "argsort", "cumprod", "cumsum", "flip", "index_select", "log_softmax",
        "logsumexp", "mean", "prod", "softmax", "sort", "std", "sum", "topk", "var", *SECOND, *FIRST,
    ),
    others,
)  # fmt: skip
"""Those of functions that run along dims."""
