"""Reductions of sharded tensors (sums, means, softmax, losses), with communication if they run over the sharded dim.

[Note: Losses]
Cross-entropy over a sharded vocabulary needs no gathered logits. The softmax of a token needs two numbers of every rank, the largest logit
and the sum of the exponentials. Its loss needs a third, the logit of its target, which one rank has. So 2 and 1 numbers per token are
communicated, not the vocabulary. If the tokens are sharded instead, each rank computes its own losses; targets are replicated.

Paper
Shoeybi et al. 2019, Megatron-LM (vocabulary-parallel cross-entropy).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from plait.tensors.collectives import all_reduce_copy, copy_to_region, reduce_from_region, scatter_to_region
from plait.tensors.rows import Ranges
from plait.tensors.sharded_views import DIM_RULES, NotShardable, Rules, ShardedLike, run_other_dims

HALF_DTYPES = (torch.float16, torch.bfloat16)


def widen_half(x: Tensor) -> Tensor:
    """Return a 16-bit tensor in 32 bits, as torch computes a softmax."""
    return x.float() if x.dtype in HALF_DTYPES else x


def zero_nonfinite(x: Tensor) -> Tensor:
    """Return the tensor with 0 in place of nonfinite values, for subtraction."""
    return torch.where(x.isfinite(), x, 0)


def all_reduce_max(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the largest value along the sharded dim, on every rank; the dim is kept."""
    empty = x.new_full([*x.shape[:dim], 1, *x.shape[dim + 1 :]], -torch.inf)
    return zero_nonfinite(all_reduce_copy(x.detach().amax(dim, True) if x.shape[dim] else empty, group, dist.ReduceOp.MAX))


def _bind_arguments(names: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by torch's names, also for numpy's axis and keepdims."""
    words = {"axis": "dim", "keepdims": "keepdim"}
    return dict(zip(names.split(), args)) | {words.get(k, k): v for k, v in kwargs.items()}


def _sum_rule(func: Callable[..., Any], x: ShardedLike, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = _bind_arguments("dim keepdim dtype", args, kwargs)
    if isinstance(named.get("dim"), torch.dtype) or not set(named) <= {"dim", "keepdim", "dtype"}:
        raise NotShardable
    ndim = len(x.shape)
    dims = named.get("dim")
    dims = range(ndim) if dims is None or dims == () else [dims] if isinstance(dims, int) else dims
    dims = sorted(d % ndim for d in dims)
    keep, dtype = named.get("keepdim", False), named.get("dtype")
    if x.shard_dim not in dims:
        return run_other_dims(func, x, args, kwargs)
    local = x.local if dtype is None else x.local.to(dtype)
    kind = None if dtype is None and not local.is_floating_point() else local.dtype
    wide = torch.float32 if local.dtype in HALF_DTYPES else None
    result = reduce_from_region(local.sum(dims, keep, dtype=wide), x.group)
    if func.__name__ == "mean":
        result = result / math.prod(x.shape[d] for d in dims)
    return result if kind is None else result.to(kind)


def _logsumexp_rule(x: ShardedLike, keep: bool) -> Tensor:
    local = widen_half(x.local)
    most = all_reduce_max(local, x.shard_dim, x.group)
    return (reduce_from_region((local - most).exp().sum(x.shard_dim, True), x.group).log() + most).sum(x.shard_dim, keep)


def _softmax_rule(func: Callable[..., Any], x: ShardedLike, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rule of softmax, log_softmax and logsumexp."""
    dim = args[0] if args else kwargs.get("dim")
    if not isinstance(dim, int) or dim % len(x.shape) != x.shard_dim:
        return run_other_dims(func, x, args, kwargs)
    if func.__name__ == "logsumexp":
        keep = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
        return _logsumexp_rule(x, keep).to(x.local.dtype)
    dtype = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype)), x.local.dtype)
    x = x.with_local(x.local.to(dtype))
    result = widen_half(x.local) - copy_to_region(_logsumexp_rule(x, True), x.group)
    return x.with_local((result.exp() if func.__name__ == "softmax" else result).to(dtype))


def locate_rows(index: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """Return (whether this rank holds each global row, its index in the part, else 0)."""
    here, at, before = torch.zeros_like(index, dtype=torch.bool), torch.zeros_like(index), 0
    for first, length in ranges:
        inside = (index >= first) & (index < first + length)
        here, at = here | inside, torch.where(inside, index - first + before, at)
        before += length
    return here, at


def reduce_logits(
    logits: Tensor, index: Tensor, ranges: Ranges, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-sum-exp and target logit over all ranks, and `locate_rows`, of logits [tokens, local vocabulary], targets [tokens].

    Two small all-reduces; not differentiable.

    """
    here, at = locate_rows(index, ranges)
    if logits.shape[1]:
        own = logits.logsumexp(1)
        chosen = torch.where(here, logits.gather(1, at.unsqueeze(1)).squeeze(1), 0.0)
    else:
        own, chosen = logits.new_full(index.shape, -torch.inf), logits.new_zeros(index.shape)
    top = zero_nonfinite(all_reduce_copy(own, group, dist.ReduceOp.MAX))
    both = all_reduce_copy(torch.stack([(own - top).exp(), chosen]), group)
    return both[0].log() + top, both[1], here, at


@dataclass(frozen=True)
class _Vocabulary:
    """This rank's part of a vocabulary: `weight` of its words, `total` weight of all `count` words."""

    ranges: Ranges
    group: ProcessGroup
    count: int
    weight: Tensor | None
    total: float | Tensor


class _CrossEntropy(torch.autograd.Function):
    """Logits [tokens, local vocabulary] -> the loss of each token, equal on every rank. Saves the logits, not their softmax.

    `shares`: weight of each token's target, zero if ignored; `counts`: whether it is not ignored.

    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, index: Tensor, shares: Tensor, counts: Tensor, words: _Vocabulary, smoothing: float
    ) -> Tensor:
        wide = widen_half(logits)
        log_sum, chosen, here, at = reduce_logits(wide, index, words.ranges, words.group)
        loss = (log_sum - chosen) * shares
        if smoothing:
            all_words = all_reduce_copy((wide if words.weight is None else wide * words.weight).sum(1), words.group)
            loss = (1 - smoothing) * loss
            loss += (words.total * log_sum - all_words) * counts.to(loss.dtype) * (smoothing / words.count)
        ctx.words, ctx.smoothing = words, smoothing
        ctx.save_for_backward(logits, log_sum, shares, counts, here, at)
        return torch.where(counts, loss, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        logits, log_sum, shares, counts, here, at = ctx.saved_tensors
        words, smoothing, g = ctx.words, ctx.smoothing, grads[0]
        target = g * shares * (1 - smoothing)
        each = g * counts * (smoothing / words.count)
        p = (widen_half(logits) - log_sum.unsqueeze(1)).exp_()
        p.mul_((target + each * words.total).unsqueeze(1))
        if p.shape[1]:
            p.scatter_add_(1, at.unsqueeze(1), -(target * here).to(p.dtype).unsqueeze(1))
        if smoothing:
            p.sub_(each.unsqueeze(1) * (1.0 if words.weight is None else words.weight))
        return p.masked_fill_(~counts.unsqueeze(1), 0.0).to(logits.dtype), None, None, None, None, None


@dataclass(frozen=True)
class _Options:
    """Arguments of cross_entropy and nll_loss after input and target, in order."""

    weight: Tensor | None = None
    size_average: bool | None = None
    ignore_index: int = -100
    reduce: bool | None = None
    reduction: str = "mean"
    label_smoothing: float = 0.0


def _target_shares(target: Tensor, o: _Options, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return (class, 0 if ignored; class weight; whether it counts) of each target."""
    counts = target != o.ignore_index
    index = torch.where(counts, target, 0)
    shares = counts.to(dtype) if o.weight is None else torch.where(counts, o.weight[index].to(dtype), 0.0)
    return index, shares, counts


def _classification_loss(func: Callable[..., Any], x: ShardedLike, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rule of cross_entropy and nll_loss, with the vocabulary or the tokens sharded."""
    target = args[0] if args else kwargs["target"]
    o = _Options(*args[1:], **{k: v for k, v in kwargs.items() if k != "target"})
    if o.size_average is not None or o.reduce is not None or (o.weight is not None and o.weight.requires_grad):
        raise NotShardable
    target = target.gather_full() if type(target) is type(x) else target
    kind, classes = x.local.device.type, min(1, len(x.shape) - 1)
    if torch.is_autocast_enabled(kind) and x.local.dtype in HALF_DTYPES:
        x = x.with_local(x.local.float())
    soft = target.is_floating_point()
    if x.shard_dim != classes:
        return _token_sharded_loss(func, x, target, o, x.shard_dim - (x.shard_dim > classes and not soft))
    if soft:
        losses, whole = _soft_target_loss(x, target, o), target.numel() / x.rows.length
        return _reduce_losses(losses, o.reduction, whole).to(x.local.dtype)
    return _vocab_sharded_loss(func, x, target, o, classes)


def _reduce_losses(losses: Tensor, reduction: str, whole: float | Tensor) -> Tensor:
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.sum() / whole


def _vocab_sharded_loss(func: Callable[..., Any], x: ShardedLike, target: Tensor, o: _Options, dim: int) -> Tensor:
    rank, count = x.group.rank(), x.rows.length
    index, shares, counts = _target_shares(target, o, widen_half(x.local).dtype)
    if func.__name__ == "nll_loss":
        losses = -gather_rule(func, x, (dim, index.unsqueeze(dim)), {}).squeeze(dim) * shares
    else:
        weight = None if o.weight is None else x.rows.take_part(o.weight, 0, rank)
        total_weight = float(count) if o.weight is None else o.weight.sum()
        words = _Vocabulary(x.rows.ranks[rank], x.group, count, weight, total_weight)
        flat = x.local.movedim(dim, -1).reshape(target.numel(), x.local.shape[dim])
        tokens = (t.reshape(-1) for t in (index, shares, counts))
        losses = _CrossEntropy.apply(flat, *tokens, words, o.label_smoothing).view(target.shape)
    return _reduce_losses(losses, o.reduction, shares.sum()).to(x.local.dtype)


def _soft_target_loss(x: ShardedLike, target: Tensor, o: _Options) -> Tensor:
    """Return losses of targets that are probabilities, with the vocabulary sharded."""
    target = target * (1 - o.label_smoothing) + o.label_smoothing / x.rows.length
    if o.weight is not None:
        target = target * o.weight.view(-1, *(1 for _ in x.shape[2:]))
    return -(torch.log_softmax(x.with_local(widen_half(x.local)), x.shard_dim) * target).sum(x.shard_dim)


def _token_sharded_loss(func: Callable[..., Any], x: ShardedLike, target: Tensor, o: _Options, dim: int) -> Any:
    """Return each rank's losses of its own rows; `dim` of the targets is sharded as the input is."""
    mine = scatter_to_region(target, dim, x.rows, x.group) if target.requires_grad else x.rows.take_part(target, dim, x.group.rank())
    options = {"weight": o.weight, "ignore_index": o.ignore_index, "reduction": "none"}
    options |= {"label_smoothing": o.label_smoothing} if func.__name__ == "cross_entropy" else {}
    losses = x.with_local(func(x.local, mine, **options), dim)
    if o.reduction == "none":
        return losses
    sums = reduce_from_region(widen_half(losses.local).sum(), x.group)
    if o.reduction == "mean":
        soft = target.is_floating_point()
        sums = sums / (target.numel() / x.shape[1] if soft else _target_shares(target, o, sums.dtype)[1].sum())
    return sums.to(losses.local.dtype)


def gather_rule(func: Callable[..., Any], x: ShardedLike, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rule of x.gather(dim, index): along the sharded dim from the rank with the row, else from each rank's part."""
    named = dict(zip(("dim", "index"), args)) | kwargs
    dim, index = named.pop("dim") % len(x.shape), named.pop("index")
    if named or type(index) is type(x):
        raise NotShardable
    if dim == x.shard_dim:
        here, at = locate_rows(index, x.rows.ranks[x.group.rank()])
        mine = x.local.gather(dim, at) if x.local.shape[dim] else x.local.sum() * torch.zeros_like(index)
        return reduce_from_region(torch.where(here, mine, 0.0), x.group)
    if index.shape[x.shard_dim] != x.rows.length:
        raise NotShardable
    return x.with_local(x.local.gather(dim, x.rows.take_part(index, x.shard_dim, x.group.rank())))


def _elementwise_loss(func: Callable[..., Any], x: ShardedLike, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rule of losses that are the mean or the sum of an element-wise one."""
    target = args[0] if args else kwargs.get("target")
    options = {k: v for k, v in kwargs.items() if k != "target"}
    old = options.pop("size_average", None) is not None or options.pop("reduce", None) is not None
    reduction = options.pop("reduction", "mean")
    if target is None or old or len(args) > 1 or target.shape != x.shape:
        raise NotShardable
    if any(isinstance(v, Tensor) for v in options.values()):
        raise NotShardable
    losses = x.with_local(func(x.local, x.match_part(target), reduction="none", **options))
    if reduction == "batchmean":
        return losses.sum() / x.shape[0]
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


ELEMENTWISE = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "kl_div", "l1_loss", "mse_loss",
    "smooth_l1_loss", "soft_margin_loss",
)  # fmt: skip
LOSS_RULES: Rules = {
    **DIM_RULES,
    **dict.fromkeys(("max", "min"), run_other_dims),
    **dict.fromkeys(("sum", "mean"), _sum_rule),
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp"), _softmax_rule),
    "cross_entropy": _classification_loss,
    "nll_loss": _classification_loss,
    "gather": gather_rule,
    **dict.fromkeys(ELEMENTWISE, _elementwise_loss),
}
"""Function name -> its rule."""
