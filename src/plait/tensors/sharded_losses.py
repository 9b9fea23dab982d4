"""Reductions of sharded tensors: sums, means, softmax and losses, made over the ranks where they run over the cut dim.

[Note: Losses]
Losses of sharded tensors: cross-entropy over a sharded vocabulary without gathering the logits, and others.

What it does
    The softmax of a token needs two numbers of every rank, the largest logit and the sum of the exponentials, and its
    loss a third, the logit of its target, which one rank has. So 2 and 1 numbers per token cross, not the vocabulary.
    Where the tokens are cut instead, each rank computes the losses of its own; targets are whole on every rank.

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

from plait.tensors.collectives import enter, part, summed, total
from plait.tensors.rows import Ranges
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


def located(index: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """(whether this rank holds it, where in its part) of rows of the whole; 0 where it does not."""
    here, at, before = torch.zeros_like(index, dtype=torch.bool), torch.zeros_like(index), 0
    for first, length in ranges:
        inside = (index >= first) & (index < first + length)
        here, at = here | inside, torch.where(inside, index - first + before, at)
        before += length
    return here, at


def normalised(
    logits: Tensor, index: Tensor, ranges: Ranges, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of logits [tokens, words held] and targets [tokens]: log-sum-exp and target's logit over all ranks, and `located`.

    Two small all-reduces; not differentiated.
    """
    here, at = located(index, ranges)
    if logits.shape[1]:
        own = logits.logsumexp(1)
        chosen = torch.where(here, logits.gather(1, at.unsqueeze(1)).squeeze(1), 0.0)
    else:
        own, chosen = logits.new_full(index.shape, -torch.inf), logits.new_zeros(index.shape)
    top = finite(summed(own, group, dist.ReduceOp.MAX))
    both = summed(torch.stack([(own - top).exp(), chosen]), group)
    return both[0].log() + top, both[1], here, at


@dataclass(frozen=True)
class _Words:
    """The vocabulary of a cross-entropy, as this rank holds it: `weight` is of the words held, `total` of all `count`."""

    ranges: Ranges
    group: ProcessGroup
    count: int
    weight: Tensor | None
    total: float | Tensor


class _CrossEntropy(torch.autograd.Function):
    """Logits [tokens, words held] -> the loss of each token, the same on every rank. Keeps the logits, not their softmax.

    `shares`: the weight of each token's target, zero where it is ignored; `counts`: whether it is not.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, index: Tensor, shares: Tensor, counts: Tensor, words: _Words, smoothing: float
    ) -> Tensor:
        wide = widened(logits)
        log_sum, chosen, here, at = normalised(wide, index, words.ranges, words.group)
        loss = (log_sum - chosen) * shares
        if smoothing:
            all_words = summed((wide if words.weight is None else wide * words.weight).sum(1), words.group)
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
        p = (widened(logits) - log_sum.unsqueeze(1)).exp_()
        p.mul_((target + each * words.total).unsqueeze(1))
        if p.shape[1]:
            p.scatter_add_(1, at.unsqueeze(1), -(target * here).to(p.dtype).unsqueeze(1))
        if smoothing:
            p.sub_(each.unsqueeze(1) * (1.0 if words.weight is None else words.weight))
        return p.masked_fill_(~counts.unsqueeze(1), 0.0).to(logits.dtype), None, None, None, None, None


@dataclass(frozen=True)
class _Options:
    """The arguments of cross_entropy and nll_loss after input and target, in their order."""

    weight: Tensor | None = None
    size_average: bool | None = None
    ignore_index: int = -100
    reduce: bool | None = None
    reduction: str = "mean"
    label_smoothing: float = 0.0


def _shares(target: Tensor, o: _Options, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(index, share, whether it counts) of each target: its word, 0 where ignored; its class weight."""
    counts = target != o.ignore_index
    index = torch.where(counts, target, 0)
    shares = counts.to(dtype) if o.weight is None else torch.where(counts, o.weight[index].to(dtype), 0.0)
    return index, shares, counts


def _classified(func: Callable[..., Any], x: Sharded, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """cross_entropy and nll_loss, the vocabulary cut or the tokens."""
    target = args[0] if args else kwargs["target"]
    o = _Options(*args[1:], **{k: v for k, v in kwargs.items() if k != "target"})
    if o.size_average is not None or o.reduce is not None or (o.weight is not None and o.weight.requires_grad):
        raise Elsewhere
    target = target.whole() if type(target) is type(x) else target
    kind, classes = x.local.device.type, min(1, len(x.shape) - 1)
    if torch.is_autocast_enabled(kind) and x.local.dtype in SIXTEEN:
        x = x.like(x.local.float())
    soft = target.is_floating_point()
    if x.cut != classes:
        return _by_tokens(func, x, target, o, x.cut - (x.cut > classes and not soft))
    if soft:
        losses, whole = _soft(x, target, o), target.numel() / x.rows.length
        return _reduced(losses, o.reduction, whole).to(x.local.dtype)
    return _by_words(func, x, target, o, classes)


def _reduced(losses: Tensor, reduction: str, whole: float | Tensor) -> Tensor:
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.sum() / whole


def _by_words(func: Callable[..., Any], x: Sharded, target: Tensor, o: _Options, dim: int) -> Tensor:
    rank, count = x.group.rank(), x.rows.length
    index, shares, counts = _shares(target, o, widened(x.local).dtype)
    if func.__name__ == "nll_loss":
        losses = -gathered(func, x, (dim, index.unsqueeze(dim)), {}).squeeze(dim) * shares
    else:
        weight = None if o.weight is None else x.rows.take(o.weight, 0, rank)
        total_weight = float(count) if o.weight is None else o.weight.sum()
        words = _Words(x.rows.ranks[rank], x.group, count, weight, total_weight)
        flat = x.local.movedim(dim, -1).reshape(target.numel(), x.local.shape[dim])
        tokens = (t.reshape(-1) for t in (index, shares, counts))
        losses = _CrossEntropy.apply(flat, *tokens, words, o.label_smoothing).view(target.shape)
    return _reduced(losses, o.reduction, shares.sum()).to(x.local.dtype)


def _soft(x: Sharded, target: Tensor, o: _Options) -> Tensor:
    """Losses of targets that are probabilities, the vocabulary cut."""
    target = target * (1 - o.label_smoothing) + o.label_smoothing / x.rows.length
    if o.weight is not None:
        target = target * o.weight.view(-1, *(1 for _ in x.shape[2:]))
    return -(torch.log_softmax(x.like(widened(x.local)), x.cut) * target).sum(x.cut)


def _by_tokens(func: Callable[..., Any], x: Sharded, target: Tensor, o: _Options, dim: int) -> Any:
    """Each rank the losses of its own rows; `dim` of the targets is cut as the input is."""
    mine = part(target, dim, x.rows, x.group) if target.requires_grad else x.rows.take(target, dim, x.group.rank())
    options = {"weight": o.weight, "ignore_index": o.ignore_index, "reduction": "none"}
    options |= {"label_smoothing": o.label_smoothing} if func.__name__ == "cross_entropy" else {}
    losses = x.like(func(x.local, mine, **options), dim)
    if o.reduction == "none":
        return losses
    sums = total(widened(losses.local).sum(), x.group)
    if o.reduction == "mean":
        soft = target.is_floating_point()
        sums = sums / (target.numel() / x.shape[1] if soft else _shares(target, o, sums.dtype)[1].sum())
    return sums.to(losses.local.dtype)


def gathered(func: Callable[..., Any], x: Sharded, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x.gather(dim, index): along the cut dim from the rank that has the row, else each rank from its part."""
    named = dict(zip(("dim", "index"), args)) | kwargs
    dim, index = named.pop("dim") % len(x.shape), named.pop("index")
    if named or type(index) is type(x):
        raise Elsewhere
    if dim == x.cut:
        here, at = located(index, x.rows.ranks[x.group.rank()])
        mine = x.local.gather(dim, at) if x.local.shape[dim] else x.local.sum() * torch.zeros_like(index)
        return total(torch.where(here, mine, 0.0), x.group)
    if index.shape[x.cut] != x.rows.length:
        raise Elsewhere
    return x.like(x.local.gather(dim, x.rows.take(index, x.cut, x.group.rank())))


def _elementwise(func: Callable[..., Any], x: Sharded, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Losses that are the mean or the sum of an element-wise one."""
    target = args[0] if args else kwargs.get("target")
    options = {k: v for k, v in kwargs.items() if k != "target"}
    old = options.pop("size_average", None) is not None or options.pop("reduce", None) is not None
    reduction = options.pop("reduction", "mean")
    if target is None or old or len(args) > 1 or target.shape != x.shape:
        raise Elsewhere
    if any(isinstance(v, Tensor) for v in options.values()):
        raise Elsewhere
    losses = x.like(func(x.local, x.fitting(target), reduction="none", **options))
    if reduction == "batchmean":
        return losses.sum() / x.shape[0]
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


ELEMENTWISE = (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "kl_div", "l1_loss", "mse_loss",
    "smooth_l1_loss", "soft_margin_loss",
)  # fmt: skip
RULES: Rules = {
    **OTHERS,
    **dict.fromkeys(("max", "min"), others),
    **dict.fromkeys(("sum", "mean"), _sum),
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp"), _softmax),
    "cross_entropy": _classified,
    "nll_loss": _classified,
    "gather": gathered,
    **dict.fromkeys(ELEMENTWISE, _elementwise),
}
"""Name of a function -> its rule."""
