"""Ring attention: a rank keeps its queries, and the keys and values of all shards arrive one after the other.

Every rank has the queries, keys and values of its rows of a sequence. In each of N steps, it computes the attention of its
queries over the keys that it has at the moment. Meanwhile it sends these keys to the next rank. After N steps, every query has
attended to every key. The partial results are merged by their log-sum-exps (`merge_block`). So no rank stores more than two
shards of keys, and never a full score matrix.

Backward passes the keys around once more. Each rank adds its gradients to those of the shard's keys and values. The gradients
follow one step behind the keys, and return to their rank in the last step.

Under a causal mask, the shards have unequal work: the first attends only to itself, the last to all. With `Rows.make_zigzag`, each
rank has one piece from the front and one from the end. In every step it then computes either all queries over the first half of
the keys, or the second half of the queries over all keys. The rest is masked, and never computed.

Paper
    Liu et al. 2023, Ring Attention with Blockwise Transformers (ICLR 2024); Brandon et al. 2023, Striped Attention, for
    the balance.

[Note: Blocks]
The output of attention over all keys is the mean of the outputs over blocks of keys. Its weights are the sums of the exponentials
in each block. So a block returns its output and the logarithm of that sum (`lse`), and `merge_block` adds a block to the previous
result. Backward needs no weights from the forward pass: with the full `lse` they are computed again, block by block, as in flash
attention.

Tensors: queries [batch, heads, rows, width], keys and values [batch, key heads, columns, width]; key heads divide heads. One of
torch's own kernels computes a block and stores no weights (`parallel/context/attention_kernels.py`). Cases without a kernel are
computed for `ROWS_PER_CHUNK` queries at a time: dropout, on a CPU also gradients of the mask and values of another width, on a
GPU float64.

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
from plait.parallel.context.attention_kernels import (
    MASKED_SCORE,
    AttentionInputs,
    BlockOutput,
    Scores,
    expand_kv_heads,
    slice_mask,
)
from plait.tensors.rows import Rows

ROWS_PER_CHUNK = 1024
"""Queries whose weights exist at the same time, if no kernel computes the block."""


def get_sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the format in which blocks are summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def make_empty_output(q: Tensor, v: Tensor) -> BlockOutput:
    """Make the result of attention over no keys."""
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=get_sum_dtype(q.dtype))
    return BlockOutput(out, q.new_full(q.shape[:-1], MASKED_SCORE, dtype=get_sum_dtype(q.dtype)))


def merge_block(out: Tensor, lse: Tensor, other: BlockOutput) -> None:
    """Add the result over more keys to `out` and `lse`, in place."""
    both = torch.logaddexp(lse, other.lse)
    base = both.masked_fill(both == MASKED_SCORE, 0.0)
    out.mul_((lse - base).exp_().unsqueeze(-1)).add_(other.out * (other.lse - base).exp_().unsqueeze(-1))
    lse.copy_(both)


def ring_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> BlockOutput:
    """Compute attention over these keys; a query that attends to none has zeros."""
    kernel = attention_kernels.choose_kernel(q, k, v, scores)
    if kernel is None:
        parts = [_forward_rows(q, k, v, scores, rows) for rows in _split_rows(q)]
        return BlockOutput(*(torch.cat(each, 2) for each in zip(*parts)))
    out, lse = kernel.forward(q, k, v, scores)
    if scores.mask is not None:
        lse = lse.masked_fill(_find_masked_rows(scores.mask, q.dtype), MASKED_SCORE)
    return BlockOutput(out.to(get_sum_dtype(q.dtype)), lse.to(get_sum_dtype(q.dtype)))


def backward(
    grad: Tensor, qkv: AttentionInputs, out: Tensor, lse: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the gradients of queries, keys, values and (if it is learned) mask that come from these keys.

    `out` and `lse` are those over all keys. Gradients are in the format of `get_sum_dtype`.
    """
    q, k, v = qkv
    lse = lse.masked_fill(lse == MASKED_SCORE, 0.0)  # such a query attends to no key here either
    kernel = attention_kernels.choose_kernel(q, k, v, scores)
    if kernel is not None:
        *found, dmask = kernel.backward(grad.to(q.dtype), qkv, out.to(q.dtype), lse, scores)
        dq, dk, dv = (g.to(get_sum_dtype(q.dtype)) for g in found)
        return dq, dk, dv, None if dmask is None else dmask.to(get_sum_dtype(q.dtype))
    dq, dk, dv = (torch.zeros_like(t, dtype=get_sum_dtype(t.dtype)) for t in qkv)
    learned = scores.mask if scores.learned else None
    dmask = None if learned is None else torch.zeros_like(learned, dtype=get_sum_dtype(learned.dtype))
    for rows in _split_rows(q):
        g, ds, p = _backward_rows(grad, qkv, out, lse, scores, rows)
        if (part := slice_mask(dmask, rows, slice(None))) is not None:
            part += ds.sum_to_size(part.shape)
        dq[:, :, rows] += (ds @ expand_kv_heads(k, q).to(ds.dtype)) * scores.scale
        _add_kv_gradient(dk, (ds.mT @ q[:, :, rows].to(ds.dtype)) * scores.scale)
        _add_kv_gradient(dv, p.mT @ g)
    return dq, dk, dv, dmask


def _find_masked_rows(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Find the queries that attend to no key. The least float32 value becomes minus infinity in 16 bits."""
    return ~mask.any(-1) if mask.dtype is torch.bool else (mask.to(dtype) == MASKED_SCORE).all(-1)


def _split_rows(q: Tensor) -> list[slice]:
    return [slice(i, min(i + ROWS_PER_CHUNK, q.shape[2])) for i in range(0, q.shape[2], ROWS_PER_CHUNK)]


def _compute_scores(q: Tensor, k: Tensor, scores: Scores, rows: slice) -> Tensor:
    """Compute the scores of some rows, in the format of `get_sum_dtype`."""
    s = (q[:, :, rows] @ expand_kv_heads(k, q).mT).to(get_sum_dtype(q.dtype)) * scores.scale
    if scores.causal:
        above = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        s = s.masked_fill(above[rows], MASKED_SCORE)
    mask = slice_mask(scores.mask, rows, slice(None))
    if mask is not None:
        s = s.masked_fill(~mask, MASKED_SCORE) if mask.dtype is torch.bool else s + mask
    return s


def _forward_rows(q: Tensor, k: Tensor, v: Tensor, scores: Scores, rows: slice) -> BlockOutput:
    s = _compute_scores(q, k, scores, rows)
    lse = torch.logsumexp(s, -1)
    p = (s - lse.masked_fill(lse == MASKED_SCORE, 0.0).unsqueeze(-1)).exp_()
    kept = slice_mask(scores.kept, rows, slice(None))
    p = p if kept is None else p * kept
    return BlockOutput(p @ expand_kv_heads(v, q).to(p.dtype), lse)


def _backward_rows(
    grad: Tensor, qkv: AttentionInputs, out: Tensor, lse: Tensor, scores: Scores, rows: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """For some rows, compute the gradients of the output and of the scores, and the weights of the values."""
    q, k, v = qkv
    g, out = grad[:, :, rows].to(get_sum_dtype(q.dtype)), out.to(get_sum_dtype(q.dtype))
    p = (_compute_scores(q, k, scores, rows) - lse[:, :, rows].unsqueeze(-1)).exp_()
    kept = slice_mask(scores.kept, rows, slice(None))
    dp = g @ expand_kv_heads(v, q).to(g.dtype).mT
    dp = dp if kept is None else dp * kept
    ds = p * (dp - (g * out[:, :, rows]).sum(-1, keepdim=True))
    return g, ds, p if kept is None else p * kept


def _add_kv_gradient(into: Tensor, grad: Tensor) -> None:
    """Add the gradients of all heads that use the same key head."""
    into += attention_kernels.sum_kv_gradients(grad, into.shape[1])


RING_TAG = 2**17
"""Tag of the messages of a ring; gradients have the next tag."""


@dataclass(frozen=True)
class Ring:
    """The ranks that shard a sequence."""

    group: ProcessGroup
    cut: Rows

    @property
    def rank(self) -> int:
        return self.group.rank()

    def list_blocks(self, source: int, causal: bool) -> Iterator[tuple[slice, slice, bool]]:
        """Yield the blocks to compute for this rank's queries over a shard's keys: (queries, keys, whether the block is causal)."""
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

    def list_positions(self, source: int, device: torch.device) -> Tensor:
        """Return the positions of a shard's rows in the full sequence."""
        ranges = self.cut.ranks[source]
        return torch.cat([torch.arange(first, first + length, device=device) for first, length in ranges])

    def send_next(self, sent: Tensor, size: int, tag: int) -> "RingMessage":
        """Start to send to the next rank and to receive from the previous rank; both continue in the background."""
        assert isinstance(self.group, ProcessGroup)
        received = sent.new_empty(size)
        ahead, behind = (self.rank + 1) % self.group.size(), (self.rank - 1) % self.group.size()
        give = dist.P2POp(dist.isend, sent, group=self.group, tag=tag, group_peer=ahead)
        take = dist.P2POp(dist.irecv, received, group=self.group, tag=tag, group_peer=behind)
        return RingMessage(received, dist.batch_isend_irecv([give, take]))


@dataclass(frozen=True)
class RingMessage:
    """The message from the previous rank, received while this rank sends to the next."""

    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """Wait for the message and return it."""
        for work in self.works:
            work.wait()
        return self.received


def compute_ring_attention(q: Tensor, k: Tensor, v: Tensor, scores: Scores, ring: Ring) -> Tensor:
    """Compute attention of this rank's queries over the full sequence.

    q [batch, heads, rows, width], k and v [batch, key heads, rows, width] are this rank's rows. `scores.mask` and `scores.kept`
    have this rank's rows (or one row for all), and all columns of the full sequence (or one).
    """
    return _RingAttention.apply(q, k, v, scores.mask, scores, ring)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores, ring: Ring) -> Tensor:
        out, lse = make_empty_output(q, v)
        for source, k_, v_ in _rotate_blocks(k, v, ring):
            here = _slice_columns(scores, ring, source)
            for rows, columns, causal in ring.list_blocks(source, scores.causal):
                part = here.select(rows, columns, causal)
                found = ring_forward(q[:, :, rows], k_[:, :, columns], v_[:, :, columns], part)
                merge_block(out[:, :, rows], lse[:, :, rows], found)
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
        for source, k_, v_ in _rotate_blocks(k, v, ring):
            found = _backward_block(
                grad, AttentionInputs(q, k_, v_), BlockOutput(out, lse), scores=scores, ring=ring, source=source, dq=dq, dmask=dmask
            )
            if source == ring.rank:
                home = found
            else:  # the previous rank computed this shard one step earlier; its gradients arrive after the shard
                found = found if travelling is None else found + travelling.wait()
                after = (source - 1) % ring.group.size()
                size = _count_elements(k, v, ring.cut.sizes[after]) if after != ring.rank else home.numel()
                travelling = ring.send_next(found, size, RING_TAG + 1)
        if travelling is not None:
            home = home + travelling.wait()
        dk, dv = _unpack(home, k, v, k.shape[2])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask, None, None


def _backward_block(
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
    """Compute the gradients of a shard's keys and values that come from this rank's queries.

    The gradients of the queries and of the mask are added to `dq` and `dmask`. `known`: attention over all keys.
    """
    (q, k, v), (out, lse) = qkv, known
    dk, dv = (torch.zeros_like(t, dtype=lse.dtype) for t in (k, v))
    here = _slice_columns(scores, ring, source)
    for rows, columns, causal in ring.list_blocks(source, scores.causal):
        part = here.select(rows, columns, causal)
        given = AttentionInputs(q[:, :, rows], k[:, :, columns], v[:, :, columns])
        a, b, c, d = backward(grad[:, :, rows], given, out[:, :, rows], lse[:, :, rows], part)
        dq[:, :, rows] += a
        dk[:, :, columns] += b
        dv[:, :, columns] += c
        if d is not None and dmask is not None:
            one = torch.zeros(1, dtype=torch.long, device=d.device)
            where = ring.list_positions(source, d.device) if dmask.shape[-1] > 1 else one
            dmask.index_add_(-1, where, d.to(dmask.dtype))
    return _pack(dk, dv)


def _slice_columns(scores: Scores, ring: Ring, source: int) -> Scores:
    """Slice the scores to the keys of one shard."""

    def take_columns(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.shape[-1] == 1 else t.index_select(-1, ring.list_positions(source, t.device))

    return replace(scores, mask=take_columns(scores.mask), kept=take_columns(scores.kept))


def _rotate_blocks(k: Tensor, v: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (rank, its keys, its values), this rank first. The next shard is received while the current one is used."""
    ranks, rank = ring.group.size(), ring.rank
    held = _pack(k, v) if ranks > 1 else Tensor()
    for step in range(ranks):
        source = (rank - step) % ranks
        coming = None
        if step + 1 < ranks:
            coming = ring.send_next(held, _count_elements(k, v, ring.cut.sizes[(source - 1) % ranks]), RING_TAG)
        yield (source, *((k, v) if step == 0 else _unpack(held, k, v, ring.cut.sizes[source])))
        if coming is not None:
            held = coming.wait()


def _pack(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpack(flat: Tensor, k: Tensor, v: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    shapes = [(*t.shape[:2], rows, t.shape[3]) for t in (k, v)]
    size = math.prod(shapes[0])
    return flat[:size].view(shapes[0]), flat[size:].view(shapes[1])


def _count_elements(k: Tensor, v: Tensor, rows: int) -> int:
    return rows * (k.shape[0] * k.shape[1] * k.shape[3] + v.shape[0] * v.shape[1] * v.shape[3])
