"""Attention of some queries over some keys, in such a way that the results of several blocks of keys can be put together.

The output of attention over all keys is the mean of the outputs over blocks of them, weighted by the sum of the
exponentials in each block. So a block gives its output and the logarithm of that sum (`lse`), and `merge` adds a block
to what is there. Backward needs no weights from the forward pass: with the whole's `lse` they are computed again, block
by block, which is how flash attention does it.

Tensors: queries [batch, heads, rows, width], keys and values [batch, key heads, columns, width]; key heads divide heads.
One of torch's own kernels computes a block and keeps no weights at all (`parallel/context/attention_kernels.py`); what none can do
(dropout, on a CPU also gradients of the mask and values of another width, on a GPU float64) is computed `ROWS` queries at a time.

Paper
    Dao et al. 2022, FlashAttention (NeurIPS); Milakov and Gimelshein 2018, Online normalizer calculation for softmax.
"""

import torch
from torch import Tensor

from plait.parallel.context import attention_kernels
from plait.parallel.context.attention_kernels import NEVER, AttentionInputs, BlockOutput, Scores, cut, spread

ROWS = 1024
"""Queries whose weights exist at the same time, where no kernel does it better."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The format in which blocks are added up."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def empty(q: Tensor, v: Tensor) -> BlockOutput:
    """Attention over no keys."""
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide(q.dtype))
    return BlockOutput(out, q.new_full(q.shape[:-1], NEVER, dtype=wide(q.dtype)))


def merge(out: Tensor, lse: Tensor, other: BlockOutput) -> None:
    """Add the result over more keys to `out` and `lse`, in place."""
    both = torch.logaddexp(lse, other.lse)
    base = both.masked_fill(both == NEVER, 0.0)
    out.mul_((lse - base).exp_().unsqueeze(-1)).add_(other.out * (other.lse - base).exp_().unsqueeze(-1))
    lse.copy_(both)


def forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> BlockOutput:
    """Attention over these keys; a query that sees none has zeros."""
    kernel = attention_kernels.choose(q, k, v, scores)
    if kernel is None:
        parts = [_rows(q, k, v, scores, rows) for rows in _chunks(q)]
        return BlockOutput(*(torch.cat(each, 2) for each in zip(*parts)))
    out, lse = kernel.forward(q, k, v, scores)
    if scores.mask is not None:
        lse = lse.masked_fill(_blind(scores.mask, q.dtype), NEVER)
    return BlockOutput(out.to(wide(q.dtype)), lse.to(wide(q.dtype)))


def backward(
    grad: Tensor, qkv: AttentionInputs, out: Tensor, lse: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of queries, keys, values and (if it is learned) mask that come from these keys.

    `out` and `lse` are those over all keys. Gradients are in the format of `wide`.
    """
    q, k, v = qkv
    lse = lse.masked_fill(lse == NEVER, 0.0)  # such a query sees nothing here either
    kernel = attention_kernels.choose(q, k, v, scores)
    if kernel is not None:
        *found, dmask = kernel.backward(grad.to(q.dtype), qkv, out.to(q.dtype), lse, scores)
        dq, dk, dv = (g.to(wide(q.dtype)) for g in found)
        return dq, dk, dv, None if dmask is None else dmask.to(wide(q.dtype))
    dq, dk, dv = (torch.zeros_like(t, dtype=wide(t.dtype)) for t in qkv)
    learned = scores.mask if scores.learned else None
    dmask = None if learned is None else torch.zeros_like(learned, dtype=wide(learned.dtype))
    for rows in _chunks(q):
        g, ds, p = _rows_back(grad, qkv, out, lse, scores, rows)
        if (part := cut(dmask, rows, slice(None))) is not None:
            part += ds.sum_to_size(part.shape)
        dq[:, :, rows] += (ds @ spread(k, q).to(ds.dtype)) * scores.scale
        _gather(dk, (ds.mT @ q[:, :, rows].to(ds.dtype)) * scores.scale)
        _gather(dv, p.mT @ g)
    return dq, dk, dv, dmask


def _blind(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Which queries see no key: the least number of float32 is minus infinity in 16 bits."""
    return ~mask.any(-1) if mask.dtype is torch.bool else (mask.to(dtype) == NEVER).all(-1)


def _chunks(q: Tensor) -> list[slice]:
    return [slice(i, min(i + ROWS, q.shape[2])) for i in range(0, q.shape[2], ROWS)]


def _products(q: Tensor, k: Tensor, scores: Scores, rows: slice) -> Tensor:
    """The scores of some rows, in the format of `wide`."""
    s = (q[:, :, rows] @ spread(k, q).mT).to(wide(q.dtype)) * scores.scale
    if scores.causal:
        above = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        s = s.masked_fill(above[rows], NEVER)
    mask = cut(scores.mask, rows, slice(None))
    if mask is not None:
        s = s.masked_fill(~mask, NEVER) if mask.dtype is torch.bool else s + mask
    return s


def _rows(q: Tensor, k: Tensor, v: Tensor, scores: Scores, rows: slice) -> BlockOutput:
    s = _products(q, k, scores, rows)
    lse = torch.logsumexp(s, -1)
    p = (s - lse.masked_fill(lse == NEVER, 0.0).unsqueeze(-1)).exp_()
    kept = cut(scores.kept, rows, slice(None))
    p = p if kept is None else p * kept
    return BlockOutput(p @ spread(v, q).to(p.dtype), lse)


def _rows_back(
    grad: Tensor, qkv: AttentionInputs, out: Tensor, lse: Tensor, scores: Scores, rows: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Of some rows: the gradient of the output and of the scores, and the weights that values were multiplied with."""
    q, k, v = qkv
    g, out = grad[:, :, rows].to(wide(q.dtype)), out.to(wide(q.dtype))
    p = (_products(q, k, scores, rows) - lse[:, :, rows].unsqueeze(-1)).exp_()
    kept = cut(scores.kept, rows, slice(None))
    dp = g @ spread(v, q).to(g.dtype).mT
    dp = dp if kept is None else dp * kept
    ds = p * (dp - (g * out[:, :, rows]).sum(-1, keepdim=True))
    return g, ds, p if kept is None else p * kept


def _gather(into: Tensor, grad: Tensor) -> None:
    """Add the gradients of all heads that share a head of keys."""
    into += attention_kernels.gather(grad, into.shape[1])
