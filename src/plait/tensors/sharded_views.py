"""Views of a sharded tensor: the sharded dim of each view, and the rows of it on each rank.

Each rule takes (function, sharded tensor, other arguments) and returns the result, or raises `NotShardable` if the result's parts are not
ranges of one dim. Rules of functions along other dims work alike.
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


class NotShardable(Exception):
    """A function needs rows that this rank does not have."""


Rules = dict[str, Callable[[Any, Any, Any, Any], Any]]
"""Function name -> (function, sharded tensor, other arguments) -> result."""


class ShardedLike(Protocol):
    """A tensor of which this rank has `local`: its `rows` of dim `cut`."""

    group: ProcessGroup

    @property
    def local(self) -> Tensor: ...
    @property
    def shape(self) -> torch.Size: ...
    @property
    def shard_dim(self) -> int: ...
    @property
    def rows(self) -> Rows: ...
    @property
    def rank(self) -> int: ...
    def with_local(self, local: Tensor, dim: int | None = None, rows: Rows | None = None) -> Any: ...
    def gather_full(self) -> Tensor: ...
    def match_part(self, other: Tensor) -> Tensor: ...


def move_dims(func: Callable[..., Any], x: ShardedLike, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rule of views that only move, add or drop dims; a meta tensor shows the new place of the sharded one."""
    sizes = [1 if n == 1 and d != x.shard_dim else d + 2 for d, n in enumerate(x.shape)]
    shape = func(torch.empty(sizes, device="meta"), *args, **kwargs).shape
    if x.shard_dim + 2 not in shape or (x.rows.length == 1 and func.__name__ == "squeeze"):
        raise NotShardable
    return x.with_local(func(x.local, *args, **kwargs), shape.index(x.shard_dim + 2))


def reshape_rule(func: Callable[..., Any], x: ShardedLike, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rule of view, reshape, flatten and unflatten."""
    if func.__name__ == "view" and args and isinstance(args[0], torch.dtype):
        raise NotShardable
    sizes = [tuple(a.shape) if isinstance(a, Tensor) else a for a in args]
    name = {"view_as": "view", "reshape_as": "reshape"}.get(func.__name__, func.__name__)
    shape = getattr(torch.empty(x.shape, device="meta"), name)(*sizes, **kwargs).shape
    cut = track_dim(x.shape, x.shard_dim, shape, x.rows)
    if cut is None:
        raise NotShardable
    dim, rows = cut
    local = (*shape[:dim], rows.sizes[x.rank], *shape[dim + 1 :])
    return x.with_local(x.local.view(local) if name == "view" else x.local.reshape(local), dim, rows)


def track_dim(old: Sequence[int], cut: int, new: Sequence[int], rows: Rows) -> tuple[int, Rows] | None:
    """Return (dim, rows) of the sharded dim of shape `old` in shape `new`; None if more than one dim would be sharded."""
    if 0 in old:
        return None
    if rows.length == 1:
        same = (k for k, n in enumerate(new) if n == 1 and math.prod(new[:k]) == math.prod(old[:cut]))
        dim = next(same, None)
        if dim is not None:
            return dim, rows
    (a, i), (b, j) = ((0, len(old)), (0, len(new))) if rows.length == 1 else _find_block(old, cut, new)
    flat = rows.merge_dims(math.prod(old[a:cut]), math.prod(old[cut + 1 : i]))
    for dim in range(b, j):
        after = flat.split_dim(math.prod(new[b:dim]), new[dim], math.prod(new[dim + 1 : j]))
        if after is not None:
            return dim, after
    return None


def _find_block(old: Sequence[int], cut: int, new: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the smallest block of dims around the sharded one that maps to a block of `new`: (first, end) in both."""
    i = j = 0
    while True:
        a, b = i, j
        i, j = i + 1, j + 1
        while math.prod(old[a:i]) != math.prod(new[b:j]):
            if math.prod(old[a:i]) < math.prod(new[b:j]):
                i += 1
            else:
                j += 1
        while i < len(old) and old[i] == 1:  # dims of size one belong to no block
            i += 1
        while j < len(new) and new[j] == 1:
            j += 1
        if a <= cut < i:
            return (a, i), (b, j)


def slice_shard_dim(x: ShardedLike, first: int, end: int) -> Any:
    """Return rows first … end − 1 of the sharded dim."""
    held = x.rows.locate(x.rank, first, end)
    pieces = [x.local.narrow(x.shard_dim, a, n) for a, n in held] or [x.local.narrow(x.shard_dim, 0, 0)]
    return x.with_local(pieces[0] if len(pieces) == 1 else torch.cat(pieces, x.shard_dim), rows=x.rows.slice_range(first, end))


def index_rule(func: Callable[..., Any], x: ShardedLike, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rule of x[…] with slices, integers, None and …, and with tensors before a dim that is kept."""
    index = list(args[0]) if isinstance(args[0], tuple) else [args[0]]
    advanced = [i for i in index if isinstance(i, (Tensor, list, range))]
    if any(isinstance(i, bool) for i in index):
        raise NotShardable
    takes = [1 if not isinstance(i, Tensor) or i.dtype not in (torch.bool, torch.uint8) else i.dim() for i in index]
    takes = [0 if i is None or i is Ellipsis else n for i, n in zip(index, takes)]
    at = next((k for k, i in enumerate(index) if i is Ellipsis), len(index))
    index[at : at + 1] = [slice(None)] * (len(x.shape) - sum(takes))
    takes[at : at + 1] = [1] * (len(x.shape) - sum(takes))
    place = next(k for k in range(len(index)) if sum(takes[:k]) <= x.shard_dim < sum(takes[: k + 1]))
    mine = index[place]
    if len(advanced) == 1 and mine == slice(None) and not any(type(i) is int for i in index):
        later = next(k for k, i in enumerate(index) if i is advanced[0]) > place
        if later:
            return x.with_local(x.local[tuple(index)], sum(i is None or isinstance(i, slice) for i in index[:place]))
    if advanced:
        if mine != slice(None) or any(i != slice(None) for i in index[place:]):
            raise NotShardable
        return x.with_local(x.local[tuple(index)], x.shard_dim - len(x.shape))
    if isinstance(mine, slice) and mine.step in (None, 1):
        first, end, _ = mine.indices(x.rows.length)
        part = x if (first, end) == (0, x.rows.length) else slice_shard_dim(x, first, max(first, end))
        index[place] = slice(None)
        dim = sum(i is None or isinstance(i, slice) for i in index[:place])
        return part.with_local(part.local[tuple(index)], dim)
    if isinstance(mine, int):
        one = slice_shard_dim(x, mine % x.rows.length, mine % x.rows.length + 1).gather_full()
        index[place] = 0
        return one[tuple(index)]
    raise NotShardable


def narrow_rule(func: Callable[..., Any], x: ShardedLike, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rule of narrow, select, chunk and split; along the sharded dim they are slices."""
    name, first = func.__name__, func.__name__ in ("narrow", "select")
    dim = kwargs.get("dim", 0) if len(args) <= (not first) else args[0 if first else 1]
    if not isinstance(dim, int):
        raise NotShardable
    dim %= len(x.shape)
    if dim != x.shard_dim:
        result = func(x.local, *args, **kwargs)
        lost = name == "select" and dim < x.shard_dim
        return x.with_local(result, x.shard_dim - lost) if first else tuple(x.with_local(t) for t in result)
    if name == "narrow" and len(args) == 3 and isinstance(args[1], int):
        start = args[1] % x.rows.length if args[1] < 0 else args[1]
        return slice_shard_dim(x, start, start + args[2])
    if name == "select" and len(args) == 2:
        return index_rule(func, x, ((slice(None),) * dim + (args[1],),), {})
    if first:
        raise NotShardable
    sizes = [len(t) for t in func(torch.empty(x.rows.length, device="meta"), *args[:1], **kwargs | {"dim": 0})]
    ends = list(accumulate(sizes))
    return tuple(slice_shard_dim(x, end - size, end) for size, end in zip(sizes, ends))


DIM_SECOND = dict.fromkeys(("linalg_norm", "linalg_vector_norm", "norm", "repeat_interleave", "roll")) | {"normalize": 1}
"""Functions with dims after another argument -> their default."""
DIM_OPTIONAL = {"glu": -1, "unbind": 0}
"""Functions with an optional dim -> its default."""


def run_other_dims(func: Callable[..., Any], x: ShardedLike, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rule of functions along other dims than the sharded one: sums, norms, softmax, selections."""
    name = func.__name__
    at, unsaid = (1, DIM_SECOND[name]) if name in DIM_SECOND else (0, DIM_OPTIONAL.get(name))
    dims = args[at] if len(args) > at else kwargs.get("dim", kwargs.get("axis", kwargs.get("dims", unsaid)))
    dims = args if name == "flip" and args and isinstance(args[0], int) else dims
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, (tuple, list)) or not dims or not all(type(d) is int for d in dims):
        raise NotShardable
    dims = {d % len(x.shape) for d in dims}
    if x.shard_dim in dims:
        raise NotShardable
    before = sum(d < x.shard_dim for d in dims)
    found = func(x.local, *args, **kwargs)
    return tree_map(
        lambda t: x.with_local(t, x.shard_dim - before * (t.dim() < len(x.shape))) if isinstance(t, Tensor) else t, found
    )


MOVE_FUNCTIONS = (
    "adjoint", "movedim", "moveaxis", "permute", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze",
)  # fmt: skip
VIEW_RULES: Rules = {
    **dict.fromkeys(MOVE_FUNCTIONS, move_dims),
    **dict.fromkeys(("flatten", "reshape", "reshape_as", "unflatten", "view", "view_as"), reshape_rule),
    **dict.fromkeys(("chunk", "narrow", "select", "split", "tensor_split"), narrow_rule),
    "__getitem__": index_rule,
}
"""Function name -> its rule."""
DIM_RULES: Rules = dict.fromkeys(
    (
        "all", "amax", "amin", "any", "argmax", "argmin", "argsort", "cumprod", "cumsum", "flip", "index_select", "log_softmax",
        "logsumexp", "mean", "prod", "softmax", "sort", "std", "sum", "topk", "var", *DIM_SECOND, *DIM_OPTIONAL,
    ),
    run_other_dims,
)  # fmt: skip
"""Rules of functions along dims."""
