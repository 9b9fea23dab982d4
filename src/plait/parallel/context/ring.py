"""Ring attention: the queries of a stretch stay where they are, keys and values of all stretches come by.

Every rank has the queries, keys and values of its rows of a sequence. In each of N steps it computes the attention of
its queries over the keys that it holds at the moment, and passes these on to the next rank while it computes; after N
steps every query has seen every key. The partial results are put together by their log-sum-exps (`merge`), so no
rank ever holds more than two stretches of keys, and never a square of weights.

Backward goes round once more: the gradients of a stretch's keys and values are added to by each rank that meets them,
one step behind the keys themselves, and come home in the last step.

A causal mask makes the work of stretches unequal: the first sees only itself, the last sees all. With `Rows.zigzag` each
rank has one piece from the front and one from the end. Then in every step it computes exactly one of: all queries over
the first half of the keys, or the second half of the queries over all keys; the rest is masked, and is never computed.

Paper
    Liu et al. 2023, Ring Attention with Blockwise Transformers (ICLR 2024); Brandon et al. 2023, Striped Attention, for
    the balance.

Attention of some queries over some keys, in such a way that the results of several blocks of keys can be put together.

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

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from plait.parallel.context import attention_kernels
from plait.parallel.context.attention_kernels import NEVER, AttentionInputs, BlockOutput, Scores, cut, spread
from plait.tensors.rows import Rows

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


TAG = 2**17
"""Of the messages of a ring; `TAG + 1` of gradients."""


@dataclass(frozen=True)
class Ring:
    """The ranks among which a sequence is cut."""

    group: ProcessGroup
    cut: Rows

    @property
    def rank(self) -> int:
        return self.group.rank()

    def jobs(self, source: int, causal: bool) -> Iterator[tuple[slice, slice, bool]]:
        """What to compute of this rank's queries over a stretch's keys: (queries, keys, along the diagonal)."""
        if not causal or source == self.rank:
            yield slice(None), slice(None), causal
            return
        found: list[list[int]] = []  # first query, last query, keys
        at = 0
        for first, length in self.cut.ranks[self.rank]:
            seen = sum(n for start, n in self.cut.ranks[source] if start < first)
            if found and found[-1][2] == seen:
                found[-1][1] += length
            else:
                found.append([at, at + length, seen])
            at += length
        yield from ((slice(a, b), slice(0, n), False) for a, b, n in found if n and b > a)

    def columns(self, source: int, device: torch.device) -> Tensor:
        """The numbers of a stretch's rows in the whole sequence."""
        ranges = self.cut.ranks[source]
        return torch.cat([torch.arange(first, first + length, device=device) for first, length in ranges])

    def turn(self, sent: Tensor, size: int, tag: int) -> "RingMessage":
        """Send to the next rank, receive from the one before; both go on while other things are computed."""
        assert isinstance(self.group, ProcessGroup)
        received = sent.new_empty(size)
        ahead, behind = (self.rank + 1) % self.group.size(), (self.rank - 1) % self.group.size()
        give = dist.P2POp(dist.isend, sent, group=self.group, tag=tag, group_peer=ahead)
        take = dist.P2POp(dist.irecv, received, group=self.group, tag=tag, group_peer=behind)
        return RingMessage(received, dist.batch_isend_irecv([give, take]))


@dataclass(frozen=True)
class RingMessage:
    """What comes from the rank before while this one sends to the next."""

    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """What has come, once it is there."""
        for work in self.works:
            work.wait()
        return self.received


def attention(q: Tensor, k: Tensor, v: Tensor, scores: Scores, ring: Ring) -> Tensor:
    """Attention of this rank's queries over the whole sequence.

    q [batch, heads, rows, width], k and v [batch, key heads, rows, width]: this rank's rows. `scores.mask` and
    `scores.kept` have this rank's rows (or one row for all) and all columns of the whole sequence (or one).
    """
    return _Ring.apply(q, k, v, scores.mask, scores, ring)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores, ring: Ring) -> Tensor:
        out, lse = empty(q, v)
        for source, k_, v_ in _round(k, v, ring):
            here = _columns(scores, ring, source)
            for rows, columns, causal in ring.jobs(source, scores.causal):
                part = here.only(rows, columns, causal)
                found = forward(q[:, :, rows], k_[:, :, columns], v_[:, :, columns], part)
                merge(out[:, :, rows], lse[:, :, rows], found)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, result, lse, scores.kept)
        ctx.scores, ctx.ring = replace(scores, mask=None, kept=None), ring
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        q, k, v, mask, out, lse, kept = ctx.saved_tensors
        scores, ring = replace(ctx.scores, mask=mask, kept=kept), ctx.ring
        grad = grads[0].contiguous()
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dmask = torch.zeros_like(mask) if scores.learned else None
        home, travelling = Tensor(), None
        for source, k_, v_ in _round(k, v, ring):
            found = _block_back(
                grad, AttentionInputs(q, k_, v_), BlockOutput(out, lse), scores=scores, ring=ring, source=source, dq=dq, dmask=dmask
            )
            if source == ring.rank:
                home = found
            else:  # the rank before has met this stretch a step ago: what it found comes after it
                found = found if travelling is None else found + travelling.wait()
                after = (source - 1) % ring.group.size()
                size = _flat_size(k, v, ring.cut.sizes[after]) if after != ring.rank else home.numel()
                travelling = ring.turn(found, size, TAG + 1)
        if travelling is not None:
            home = home + travelling.wait()
        dk, dv = _unpacked(home, k, v, k.shape[2])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask, None, None


def _block_back(
    grad: Tensor,
    qkv: AttentionInputs,
    known: BlockOutput,
    *,
    scores: Scores,
    ring: Ring,
    source: int,
    dq: Tensor,
    dmask: Tensor | None,
) -> Tensor:
    """The gradients of a stretch's keys and values that come from this rank's queries. Those of the queries and of the mask
    are added to `dq` and `dmask`. `known`: attention over all keys."""
    (q, k, v), (out, lse) = qkv, known
    dk, dv = (torch.zeros_like(t, dtype=lse.dtype) for t in (k, v))
    here = _columns(scores, ring, source)
    for rows, columns, causal in ring.jobs(source, scores.causal):
        part = here.only(rows, columns, causal)
        given = AttentionInputs(q[:, :, rows], k[:, :, columns], v[:, :, columns])
        a, b, c, d = backward(grad[:, :, rows], given, out[:, :, rows], lse[:, :, rows], part)
        dq[:, :, rows] += a
        dk[:, :, columns] += b
        dv[:, :, columns] += c
        if d is not None and dmask is not None:
            one = torch.zeros(1, dtype=torch.long, device=d.device)
            where = ring.columns(source, d.device) if dmask.shape[-1] > 1 else one
            dmask.index_add_(-1, where, d.to(dmask.dtype))
    return _packed(dk, dv)


def _columns(scores: Scores, ring: Ring, source: int) -> Scores:
    """The scores over one stretch's keys."""

    def cut(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.shape[-1] == 1 else t.index_select(-1, ring.columns(source, t.device))

    return replace(scores, mask=cut(scores.mask), kept=cut(scores.kept))


def _round(k: Tensor, v: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(rank, its keys, its values), the own first; the next are on their way while these are used."""
    ranks, rank = ring.group.size(), ring.rank
    held = _packed(k, v) if ranks > 1 else Tensor()
    for step in range(ranks):
        source = (rank - step) % ranks
        coming = None
        if step + 1 < ranks:
            coming = ring.turn(held, _flat_size(k, v, ring.cut.sizes[(source - 1) % ranks]), TAG)
        yield (source, *((k, v) if step == 0 else _unpacked(held, k, v, ring.cut.sizes[source])))
        if coming is not None:
            held = coming.wait()


def _packed(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpacked(flat: Tensor, k: Tensor, v: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    shapes = [(*t.shape[:2], rows, t.shape[3]) for t in (k, v)]
    size = math.prod(shapes[0])
    return flat[:size].view(shapes[0]), flat[size:].view(shapes[1])


def _flat_size(k: Tensor, v: Tensor, rows: int) -> int:
    return rows * (k.shape[0] * k.shape[1] * k.shape[3] + v.shape[0] * v.shape[1] * v.shape[3])
