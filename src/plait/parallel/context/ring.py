"""Ring attention: the queries of a stretch stay where they are, keys and values of all stretches come by.

Every rank has the queries, keys and values of its rows of a sequence. In each of N steps it computes the attention of
its queries over the keys that it holds at the moment, and passes these on to the next rank while it computes; after N
steps every query has seen every key. The partial results are put together by their log-sum-exps (`parallel/context/blockwise.py`), so no
rank ever holds more than two stretches of keys, and never a square of weights.

Backward goes round once more: the gradients of a stretch's keys and values are added to by each rank that meets them,
one step behind the keys themselves, and come home in the last step.

A causal mask makes the work of stretches unequal: the first sees only itself, the last sees all. With `Rows.zigzag` each
rank has one piece from the front and one from the end. Then in every step it computes exactly one of: all queries over
the first half of the keys, or the second half of the queries over all keys; the rest is masked, and is never computed.

Paper
    Liu et al. 2023, Ring Attention with Blockwise Transformers (ICLR 2024); Brandon et al. 2023, Striped Attention, for
    the balance.
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

from plait.parallel.context import blockwise
from plait.parallel.context.attention_kernels import AttentionInputs, BlockOutput, Scores
from plait.tensors.rows import Rows

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
        out, lse = blockwise.empty(q, v)
        for source, k_, v_ in _round(k, v, ring):
            here = _columns(scores, ring, source)
            for rows, columns, causal in ring.jobs(source, scores.causal):
                part = here.only(rows, columns, causal)
                found = blockwise.forward(q[:, :, rows], k_[:, :, columns], v_[:, :, columns], part)
                blockwise.merge(out[:, :, rows], lse[:, :, rows], found)
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
        a, b, c, d = blockwise.backward(grad[:, :, rows], given, out[:, :, rows], lse[:, :, rows], part)
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
