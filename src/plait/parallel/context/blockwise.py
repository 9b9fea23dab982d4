"""Attention of some queries over some keys, in such a way that the results of several blocks of keys can be put together.

The output of attention over all keys is the mean of the outputs over blocks of them, weighted by the sum of the
exponentials in each block. So a block gives its output and the logarithm of that sum (`lse`), and `merge` adds a block
to what is there. Backward needs no weights from the forward pass: with the whole's `lse` they are computed again, block
by block, which is how flash attention does it.

Tensors: queries [batch, heads, rows, width], keys and values [batch, key heads, columns, width]; key heads divide heads.
On a CPU torch's own flash kernel computes a block and keeps no weights at all; what it cannot do (dropout, gradients of
the mask, values of another width, other devices) is computed `ROWS` queries at a time.

Paper
    Dao et al. 2022, FlashAttention (NeurIPS); Milakov and Gimelshein 2018, Online normalizer calculation for softmax.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.tensors.torch_private import flash_cpu, flash_cpu_backward

ROWS = 1024
"""Queries whose weights exist at the same time, where no kernel does it better."""
NEVER = float("-inf")


@dataclass(frozen=True)
class Scores:
    """How products of queries and keys become weights."""

    scale: float
    causal: bool = False
    """Query i sees keys 0 … i."""
    mask: Tensor | None = None
    """[batch or 1, heads or 1, rows or 1, columns]: true where a key is seen, or numbers to be added."""
    kept: Tensor | None = None
    """[batch, heads, rows, columns]: what dropout multiplies the weights with."""
    learned: bool = False
    """The mask needs a gradient."""

    def only(self, rows: slice, columns: slice, causal: bool) -> "Scores":
        """The scores of some rows and columns."""
        return replace(self, causal=causal, mask=_cut(self.mask, rows, columns), kept=_cut(self.kept, rows, columns))


def _cut(t: Tensor | None, rows: slice, columns: slice) -> Tensor | None:
    if t is None:
        return None
    t = t[..., rows, :] if t.shape[-2] > 1 else t
    return t[..., columns] if t.shape[-1] > 1 else t


def wide(dtype: torch.dtype) -> torch.dtype:
    """The format in which blocks are added up."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def empty(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(output, lse) over no keys."""
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide(q.dtype))
    return out, q.new_full(q.shape[:-1], NEVER, dtype=wide(q.dtype))


def merge(out: Tensor, lse: Tensor, other: tuple[Tensor, Tensor]) -> None:
    """Add the result over more keys to `out` and `lse`, in place."""
    both = torch.logaddexp(lse, other[1])
    base = both.masked_fill(both == NEVER, 0.0)
    out.mul_((lse - base).exp_().unsqueeze(-1)).add_(other[0] * (other[1] - base).exp_().unsqueeze(-1))
    lse.copy_(both)


def forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """(output, lse) of attention over these keys; a query that sees none has zeros and minus infinity."""
    if not _flash(q, k, v, scores):
        parts = [_rows(q, k, v, scores, rows) for rows in _chunks(q)]
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)
    out, lse = flash_cpu(q, k, v, scores.causal, _added(scores.mask, q, k), scores.scale)
    if scores.mask is not None:
        lse = lse.masked_fill(_blind(scores.mask), NEVER)
    return out.to(wide(q.dtype)), lse.to(wide(q.dtype))


def backward(
    grad: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of queries, keys, values and (if it is learned) mask that come from these keys.

    `out` and `lse` are those over all keys. Gradients are in the format of `wide`.
    """
    q, k, v = qkv
    lse = lse.masked_fill(lse == NEVER, 0.0)  # such a query sees nothing here either
    if _flash(q, k, v, scores):
        mask = _added(scores.mask, q, k)
        found = flash_cpu_backward(grad.to(q.dtype), qkv, (out.to(q.dtype), lse), scores.causal, mask, scores.scale)
        dq, dk, dv = (g.to(wide(q.dtype)) for g in found)
        return dq, dk, dv, None
    dq, dk, dv = (torch.zeros_like(t, dtype=wide(t.dtype)) for t in qkv)
    learned = scores.mask if scores.learned else None
    dmask = None if learned is None else torch.zeros_like(learned, dtype=wide(learned.dtype))
    for rows in _chunks(q):
        g, ds, p = _rows_back(grad, qkv, out, lse, scores, rows)
        if (part := _cut(dmask, rows, slice(None))) is not None:
            part += ds.sum_to_size(part.shape)
        dq[:, :, rows] += (ds @ _spread(k, q).to(ds.dtype)) * scores.scale
        _gather(dk, (ds.mT @ q[:, :, rows].to(ds.dtype)) * scores.scale)
        _gather(dv, p.mT @ g)
    return dq, dk, dv, dmask


def _flash(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> bool:
    same = q.device.type == "cpu" and v.shape[-1] == q.shape[-1] and q.dtype == k.dtype == v.dtype
    return same and scores.kept is None and not scores.learned and min(q.numel(), k.numel()) > 0


def _added(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as numbers to be added, of full shape in its last two dims."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, NEVER)
    return mask.to(q.dtype).expand(*mask.shape[:-2], q.shape[2], k.shape[2])


def _blind(mask: Tensor) -> Tensor:
    """Which queries see no key."""
    return ~mask.any(-1) if mask.dtype is torch.bool else (mask == NEVER).all(-1)


def _chunks(q: Tensor) -> list[slice]:
    return [slice(i, min(i + ROWS, q.shape[2])) for i in range(0, q.shape[2], ROWS)]


def _products(q: Tensor, k: Tensor, scores: Scores, rows: slice) -> Tensor:
    """The scores of some rows, in the format of `wide`."""
    s = (q[:, :, rows] @ _spread(k, q).mT).to(wide(q.dtype)) * scores.scale
    if scores.causal:
        above = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        s = s.masked_fill(above[rows], NEVER)
    mask = _cut(scores.mask, rows, slice(None))
    if mask is not None:
        s = s.masked_fill(~mask, NEVER) if mask.dtype is torch.bool else s + mask
    return s


def _rows(q: Tensor, k: Tensor, v: Tensor, scores: Scores, rows: slice) -> tuple[Tensor, Tensor]:
    s = _products(q, k, scores, rows)
    lse = torch.logsumexp(s, -1)
    p = (s - lse.masked_fill(lse == NEVER, 0.0).unsqueeze(-1)).exp_()
    kept = _cut(scores.kept, rows, slice(None))
    p = p if kept is None else p * kept
    return p @ _spread(v, q).to(p.dtype), lse


def _rows_back(
    grad: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, scores: Scores, rows: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Of some rows: the gradient of the output and of the scores, and the weights that values were multiplied with."""
    q, k, v = qkv
    g, out = grad[:, :, rows].to(wide(q.dtype)), out.to(wide(q.dtype))
    p = (_products(q, k, scores, rows) - lse[:, :, rows].unsqueeze(-1)).exp_()
    kept = _cut(scores.kept, rows, slice(None))
    dp = g @ _spread(v, q).to(g.dtype).mT
    dp = dp if kept is None else dp * kept
    ds = p * (dp - (g * out[:, :, rows]).sum(-1, keepdim=True))
    return g, ds, p if kept is None else p * kept


def _spread(t: Tensor, q: Tensor) -> Tensor:
    """Keys or values for every head of the queries."""
    return t if t.shape[1] == q.shape[1] else t.repeat_interleave(q.shape[1] // t.shape[1], 1)


def _gather(into: Tensor, grad: Tensor) -> None:
    """Add the gradients of all heads that share a head of keys."""
    into += grad.unflatten(1, (into.shape[1], -1)).sum(2)
