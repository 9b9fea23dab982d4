"""Sums, means and softmax of sharded tensors: made over the ranks where they run over the cut dim."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.tensors.collectives import enter, summed, total
from plait.tensors.sharded_views import OTHERS, Elsewhere, Rules, Sharded, others

SIXTEEN = (torch.float16, torch.bfloat16)


def widened(x: Tensor) -> Tensor:
    """A 16-bit tensor in 32 bits, as torch computes a softmax."""
    return x.float() if x.dtype in SIXTEEN else x


def finite(x: Tensor) -> Tensor:
    """The tensor with 0 where it is not finite: there is nothing to subtract."""
    return torch.where(x.isfinite(), x, 0)


def largest(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The largest value along the cut dim, on every rank; the dim is kept."""
    empty = x.new_full([*x.shape[:dim], 1, *x.shape[dim + 1 :]], -torch.inf)
    return finite(summed(x.detach().amax(dim, True) if x.shape[dim] else empty, group, dist.ReduceOp.MAX))


def _named(names: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with torch's own names for numpy's axis and keepdims."""
    words = {"axis": "dim", "keepdims": "keepdim"}
    return dict(zip(names.split(), args)) | {words.get(k, k): v for k, v in kwargs.items()}


def _sum(func: Callable[..., Any], x: Sharded, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = _named("dim keepdim dtype", args, kwargs)
    if isinstance(named.get("dim"), torch.dtype) or not set(named) <= {"dim", "keepdim", "dtype"}:
        raise Elsewhere
    ndim = len(x.shape)
    dims = named.get("dim")
    dims = range(ndim) if dims is None or dims == () else [dims] if isinstance(dims, int) else dims
    dims = sorted(d % ndim for d in dims)
    keep, dtype = named.get("keepdim", False), named.get("dtype")
    if x.cut not in dims:
        return others(func, x, args, kwargs)
    local = x.local if dtype is None else x.local.to(dtype)
    kind = None if dtype is None and not local.is_floating_point() else local.dtype
    wide = torch.float32 if local.dtype in SIXTEEN else None
    result = total(local.sum(dims, keep, dtype=wide), x.group)
    if func.__name__ == "mean":
        result = result / math.prod(x.shape[d] for d in dims)
    return result if kind is None else result.to(kind)


def _logsumexp(x: Sharded, keep: bool) -> Tensor:
    local = widened(x.local)
    most = largest(local, x.cut, x.group)
    return (total((local - most).exp().sum(x.cut, True), x.group).log() + most).sum(x.cut, keep)


def _softmax(func: Callable[..., Any], x: Sharded, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """softmax, log_softmax and logsumexp."""
    dim = args[0] if args else kwargs.get("dim")
    if not isinstance(dim, int) or dim % len(x.shape) != x.cut:
        return others(func, x, args, kwargs)
    if func.__name__ == "logsumexp":
        keep = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
        return _logsumexp(x, keep).to(x.local.dtype)
    dtype = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype)), x.local.dtype)
    x = x.like(x.local.to(dtype))
    result = widened(x.local) - enter(_logsumexp(x, True), x.group)
    return x.like((result.exp() if func.__name__ == "softmax" else result).to(dtype))


RULES: Rules = {
    **OTHERS,
    **dict.fromkeys(("max", "min"), others),
    **dict.fromkeys(("sum", "mean"), _sum),
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp"), _softmax),
}
"""Name of a function -> its rule."""
