"""What attention becomes in a unit that runs on a stretch of the sequence: its own call, answered for the whole.

A unit's code calls `scaled_dot_product_attention` on the queries, keys and values of its rows. `ShardedAttention` takes that
call and hands it to whoever can see the other stretches: a ring, an exchange of heads, or, when it is checked that a
unit can run on a stretch, the keys and values of a run on the whole sequence.

Masks may come whole (a mask that the model made for the whole sequence) or as this rank's rows; keys a mask speaks of
are always all of them, so columns that were cut are gathered.

[Note: Ulysses]
Ulysses attention: for the time of the attention, ranks exchange stretches of the sequence for heads.

Every rank has all heads of its rows. One all-to-all later it has its heads of all rows, computes plain attention on
them with whatever kernel there is, and another all-to-all brings the output back. Heads do not talk to each other, so
nothing is approximated; what travels is 1/N of queries, keys, values and output per rank, however long the sequence.
The number of heads limits N.

With fewer heads of keys than ranks (grouped queries) keys and values are repeated to the least number that N divides.

Paper
    Jacobs et al. 2023, DeepSpeed Ulysses.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from plait.config.errors import PlaitError, Problem
from plait.parallel.context import ring
from plait.parallel.context.attention_kernels import Scores
from plait.parallel.context.sequence_shard import SequenceShard
from plait.parallel.context.sequences import Pair, SequenceLayout
from plait.randomness.distributions import key
from plait.randomness.keyed import Randomness
from plait.randomness.philox import StreamPart, mask, staying
from plait.randomness.sub_block import Axis
from plait.tensors.collectives import Absent
from plait.tensors.rows import Ranges, Rows, within
from plait.tensors.torch_private import FakeTensor


@dataclass(frozen=True)
class Exchange:
    """The ranks among which a sequence is cut."""

    group: ProcessGroup
    cut: Rows

    def heads(self, t: Tensor) -> Tensor:
        """[batch, heads, this rank's rows, width] -> [batch, this rank's heads, all rows, width]."""
        return _Swap.apply(t, self, True)

    def heads_of_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`heads` of each of several tensors, in one message where their shapes are alike."""
        if len({(t.shape, t.dtype) for t in tensors}) > 1:
            return [self.heads(t) for t in tensors]
        return list(self.heads(torch.cat([*tensors])).chunk(len(tensors)))

    def rows(self, t: Tensor) -> Tensor:
        return _Swap.apply(t, self, False)

    def mine(self, t: Tensor) -> Tensor:
        """This rank's heads of something that every rank has with all heads, or with one for all."""
        return t if t.shape[1] == 1 else t.chunk(self.group.size(), 1)[self.group.rank()]


def repeated(t: Tensor, heads: int, ranks: int) -> Tensor:
    """Keys or values, repeated so that each rank's share of them is of the heads of its queries."""
    times = enough(t.shape[1], heads, ranks) // t.shape[1]
    return t if times == 1 else t.repeat_interleave(times, 1)


def enough(kv: int, heads: int, ranks: int) -> int:
    """The least number of heads of keys that ranks can share out."""
    least = lcm(kv, ranks)
    return heads if heads % least else least


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, exchange: Exchange, to_heads: bool) -> Tensor:
        ctx.exchange, ctx.to_heads = exchange, to_heads
        return _swapped(t, exchange, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        return _Swap.apply(grads[0], ctx.exchange, not ctx.to_heads), None, None


def _swapped(t: Tensor, exchange: Exchange, to_heads: bool) -> Tensor:
    cut, ranks, rank = exchange.cut, exchange.group.size(), exchange.group.rank()
    batch, heads, _, width = t.shape
    if to_heads:
        share, sent = heads // ranks, [piece.reshape(-1) for piece in t.chunk(ranks, 1)]
        shapes = [(batch, share, size, width) for size in cut.sizes]
    else:
        sent = [cut.take(t, 2, r).reshape(-1) for r in range(ranks)]
        shapes = [(batch, heads, cut.sizes[rank], width)] * ranks
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = t.new_empty(sum(sizes))
    dist.all_to_all_single(received, torch.cat(sent), sizes, [s.numel() for s in sent], group=exchange.group)
    parts = [flat.view(shape) for flat, shape in zip(received.split(sizes), shapes)]
    return _in_order(parts, cut) if to_heads else torch.cat(parts, 1)


def _in_order(parts: list[Tensor], cut: Rows) -> Tensor:
    """The whole sequence, of every rank's rows."""

    def pieces(part: Tensor, ranges: Ranges) -> list[tuple[int, Tensor]]:
        return list(zip((first for first, _ in ranges), part.split([n for _, n in ranges], 2)))

    found = [piece for part, ranges in zip(parts, cut.ranks) for piece in pieces(part, ranges)]
    return torch.cat([piece for _, piece in sorted(found, key=lambda p: p[0])], 2)


@dataclass(frozen=True)
class AttentionCall:
    """A call of attention: q [batch, heads, rows, width], k and v [batch, key heads, rows, width] of this rank's rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    """Rows: the whole's, this rank's, or one; columns: the whole's or one."""
    dropout: float
    causal: bool
    scale: float

    def rows(self, held: SequenceLayout) -> Tensor | None:
        """The mask with this rank's rows (or one for all)."""
        whole = self.mask is not None and self.mask.shape[-2] == held.cut.length
        return held.take(self.mask, self.mask.dim() - 2) if whole else self.mask  # pyrefly: ignore


Answer = Callable[[AttentionCall, SequenceLayout, SequenceLayout], Tensor]
"""(call, the queries' rows, the keys' rows) -> output of this rank's queries."""


Asked = Callable[..., Tensor]
"""What `ShardedAttention.ask` is, put around with something."""


class ShardedAttention(TorchFunctionMode):
    """Around a unit's forward: its attentions see all stretches.

    `held`: the rows of each sequence. `pairs`: the sequences of each attention, in the order in which they are called.
    """

    def __init__(
        self, held: Mapping[int, SequenceLayout], pairs: Sequence[Pair], answer: Answer, asked: Asked | None = None
    ):
        super().__init__()
        self.held, self.pairs, self.answer = held, pairs, answer
        self.asked = asked or ShardedAttention.ask
        self.number = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return self.asked(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _rows(self, which: int, given: Tensor) -> SequenceLayout | None:
        """Which rows of a sequence an attention's queries (0) or keys (1) are; None: every rank has all of them."""
        if self.number > len(self.pairs):
            what = f"a unit calls attention {self.number} times, in the sketch {len(self.pairs)}"
            raise PlaitError(Problem("P043", what, why="the model's course depends on its input", fix=("cp=1",)))
        sequence = self.pairs[self.number - 1][which]
        held = None if sequence is None else self.held.get(sequence)
        return held if held is not None and given.shape[-2] == held.size else None

    def ask(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        self.number += 1
        asked, mask = query, attn_mask
        query, key, value = (_local(t, t.dim() - 2) for t in (query, key, value))
        attn_mask = mask.local if isinstance(mask, SequenceShard) and mask.along > -3 else mask
        queries, keys = self._rows(0, query), self._rows(1, key)
        if queries is not None and is_causal and queries is not keys:  # queries and keys are counted from the first
            length = key.shape[-2] if keys is None else keys.cut.length
            order = torch.arange(max(length, queries.cut.length), device=query.device)
            attn_mask, is_causal = order[: queries.cut.length, None] >= order[:length], False
        if queries is None or keys is None:  # what is attended to is no stretch, or becomes whole: every rank has it
            if queries is not None and attn_mask is not None and attn_mask.shape[-2] == queries.cut.length:
                attn_mask = queries.take(attn_mask, attn_mask.dim() - 2)
            key, value = (t if keys is None else keys.gather(t, t.dim() - 2) for t in (key, value))
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return asked.like(out) if isinstance(asked, SequenceShard) else out
        front = query.shape[:-2]
        q, k, v = (t if t.dim() == 4 else t.reshape(1, -1, *t.shape[-2:]) for t in (query, key, value))
        if attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        if attn_mask is not None and attn_mask.shape[-1] == keys.size < keys.cut.length:
            fetch = keys.gather if attn_mask.requires_grad else keys.fetch
            attn_mask = fetch(attn_mask, attn_mask.dim() - 1)
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        out = self.answer(AttentionCall(q, k, v, attn_mask, dropout_p, is_causal, scale), queries, keys)
        out = out.reshape(*front, query.shape[-2], value.shape[-1])
        return asked.like(out) if isinstance(asked, SequenceShard) else out


def _local(given: Tensor, dim: int) -> Tensor:
    """This rank's rows of queries or keys, when they are a stretch inside a unit."""
    if not isinstance(given, SequenceShard):
        return given
    return given.local if given.cut == dim and given.times == 1 else given.whole()


def plainly(asked: AttentionCall) -> Tensor:
    """Attention as torch computes it, of all rows, without dropout."""
    grouped = asked.k.shape[1] != asked.q.shape[1]
    return F.scaled_dot_product_attention(
        asked.q, asked.k, asked.v, asked.mask, 0.0, asked.causal, scale=asked.scale, enable_gqa=grouped
    )


def by_ring(randomness: Callable[[], Randomness], group: ProcessGroup) -> Answer:
    """Attention in a ring."""

    def answer(asked: AttentionCall, queries: SequenceLayout, keys: SequenceLayout) -> Tensor:
        mask, kept = asked.rows(queries), None
        if asked.dropout > 0.0:
            b, h, t, _ = asked.q.shape
            length = keys.cut.length
            drawn = _Drawn(randomness(), b, h, True)
            axes = [*drawn.heads(), (queries.cut.length, queries.cut.ranks[queries.rank]), (length, ((0, length),))]
            kept = drawn.kept(asked, axes).view(b, h, t, length)
        learned = mask is not None and mask.requires_grad
        scores = Scores(asked.scale, asked.causal, mask, kept, learned)
        return ring.attention(asked.q, asked.k, asked.v, scores, ring.Ring(group, keys.cut))

    return answer


def by_ulysses(randomness: Callable[[], Randomness], group: ProcessGroup) -> Answer:
    """Attention on this rank's heads of the whole sequence."""

    def answer(asked: AttentionCall, queries: SequenceLayout, keys: SequenceLayout) -> Tensor:
        rows, columns = (Exchange(group, held.cut) for held in (queries, keys))
        ranks, heads = len(queries.cut.ranks), asked.q.shape[1]
        k, v = (repeated(t, heads, ranks) for t in (asked.k, asked.v))
        if queries.cut == keys.cut and asked.q.shape == k.shape:
            q, k, v = rows.heads_of_all((asked.q, k, v))
        else:
            q, (k, v) = rows.heads(asked.q), columns.heads_of_all((k, v))
        mask = asked.mask
        if mask is not None and mask.shape[-2] == queries.size:
            mask = (queries.gather if mask.requires_grad else queries.fetch)(mask, mask.dim() - 2)
        mask = mask if mask is None else rows.mine(mask)
        if asked.dropout == 0.0:
            return rows.rows(plainly(replace(asked, q=q, k=k, v=v, mask=mask)))
        b, share, sizes = q.shape[0], q.shape[1], (queries.cut.length, keys.cut.length)
        drawn = _Drawn(randomness(), b, heads, False)
        axes = [*drawn.heads(queries.rank * share, share), *((size, ((0, size),)) for size in sizes)]
        kept = drawn.kept(asked, axes).view(b, share, *sizes)
        scores = Scores(asked.scale, asked.causal, mask, kept, mask is not None and mask.requires_grad)
        return rows.rows(ring.attention(q, k, v, scores, ring.Ring(Absent(1), Rows.of(sizes[1:]))))

    return answer


def check_heads(heads: int, ranks: int, slices: int = 1) -> None:
    """P042 when heads cannot be shared out. `slices`: of how many processes, each with its heads, this is one."""
    if heads % ranks:
        whose = f" of each of tp={slices}" if slices > 1 else ""
        what = f"cp_method=ulysses shares out heads: {heads} heads{whose} do not divide by cp={ranks}"
        raise PlaitError(Problem("P042", what, why=f"{heads} = {heads // ranks} × {ranks} + {heads % ranks}",
                                 fix=("cp_method=ring", f"cp={math.gcd(heads, ranks)}")))  # fmt: skip


class _Drawn:
    """What an attention of `heads` heads draws: element i of the stream is that of the whole weights, samples first."""

    def __init__(self, randomness: Randomness, batch: int, heads: int, fold: bool):
        assert randomness.windows is not None  # under cp numbers are drawn for rows
        self.windows, self.place = randomness.windows, randomness.place()
        self.seed, self.step, first, self.samples = randomness.where.tolist()
        if fold and self.samples and batch % self.samples and batch * heads % self.samples == 0:  # both in one dim
            batch, heads = self.samples, batch * heads // self.samples
        self.batch, self.local = batch, heads
        self.first = first * (batch // self.samples) if self.samples and batch % self.samples == 0 else 0

    def heads(self, first: int = 0, count: int | None = None) -> list[Axis]:
        """The batch, and of the heads those that are held here; of these, `count` from the `first` on."""
        axis, shape = None, self.windows.shapes.get(self.place, ())
        if shape and self.batch == self.samples:
            axis = self.windows.rule(self.place, len(shape) - 3, math.prod(shape[:-2]), self.local)
        size, ranges = axis or (self.local, ((0, self.local),))
        if count is not None:
            ranges = within(ranges, first, count)
        return [(self.batch, ((0, self.batch),)), (size, ranges)]

    def kept(self, asked: AttentionCall, axes: list[Axis]) -> Tensor:
        """What dropout multiplies a sub-block of the weights with: as it is for these elements on one device."""
        held = torch.Size(sum(length for _, length in ranges) for _, ranges in axes)
        dtype = torch.float64 if asked.q.dtype is torch.float64 else torch.float32
        if isinstance(asked.q, FakeTensor):
            return asked.q.new_empty(held, dtype=dtype)
        start = self.first * math.prod(size for size, _ in axes[1:])
        numbers = StreamPart.of(key(self.seed, "draw", self.step, self.place), start, axes)
        return mask(held, numbers, staying(1.0 - asked.dropout, dtype), dtype, asked.q.device)


# — the check —


@dataclass
class WholeAttention:
    """A run on the whole sequence: the keys and values of each attention, by their number."""

    calls: list[AttentionCall]
    number: int = 0
    worst: float = 0.0

    def note(self, asked: AttentionCall) -> None:
        """A call of the whole run."""
        self.calls.append(replace(asked, mask=None))

    def answer(self, asked: AttentionCall, queries: SequenceLayout, keys: SequenceLayout) -> Tensor:
        """Attention over the whole run's keys and values. Notes how far this rank's own are from their rows."""
        whole = self.calls[self.number]
        self.number += 1
        for mine, other, held in ((asked.q, whole.q, queries), (asked.k, whole.k, keys), (asked.v, whole.v, keys)):
            self.worst = max(self.worst, apart(mine, held.take(other, 2)))
        mask = asked.rows(queries)
        if asked.causal:
            order = torch.arange(queries.cut.length, device=asked.q.device)
            mask = queries.take(order[:, None], 0) >= order
        return plainly(replace(asked, k=whole.k, v=whole.v, mask=mask, causal=False))


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, to the largest number in `b`."""
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    a, b = ((torch.view_as_real(t) if t.is_complex() else t).detach().double().nan_to_num() for t in (a, b))
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
