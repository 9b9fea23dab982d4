"""Attention of a unit that runs on a sequence shard: its queries attend to the full sequence.

A unit's code calls `scaled_dot_product_attention` on the queries, keys and values of its rows. `ShardedAttention` intercepts the
call and passes it to a backend that has access to the other shards: a ring, or an exchange of heads. When a unit is checked, the
backend uses the keys and values recorded in a run on the full sequence.

A mask may have all rows of the sequence or this rank's rows. It always covers all keys, so sharded columns are gathered.

[Note: Ulysses]
Ulysses attention: for the attention, ranks exchange their sequence shards for heads.

Every rank has all heads of its rows. An all-to-all gives it its heads of all rows. It computes plain attention on them with any
kernel, and another all-to-all returns the output. Heads are independent, so nothing is approximated. A rank sends 1/N of queries,
keys, values and output, whatever the sequence length. N is at most the number of heads.

If there are fewer key heads than ranks (grouped queries), keys and values are repeated to the least number that N divides.

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
from plait.randomness.distributions import make_philox_key
from plait.randomness.keyed import Randomness
from plait.randomness.philox import StreamPart, draw_mask_by, make_attention_range
from plait.randomness.sub_block import Axis
from plait.tensors.collectives import FakeProcessGroup
from plait.tensors.rows import Ranges, Rows, slice_ranges
from plait.tensors.torch_private import FakeTensor


@dataclass(frozen=True)
class HeadExchange:
    """The ranks that shard a sequence."""

    group: ProcessGroup
    cut: Rows

    def exchange_for_heads(self, t: Tensor) -> Tensor:
        """[batch, heads, this rank's rows, width] -> [batch, this rank's heads, all rows, width]."""
        return _HeadAllToAll.apply(t, self, True)

    def exchange_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Apply `exchange_for_heads` to several tensors, in one message if their shapes and formats are equal."""
        if len({(t.shape, t.dtype) for t in tensors}) > 1:
            return [self.exchange_for_heads(t) for t in tensors]
        return list(self.exchange_for_heads(torch.cat([*tensors])).chunk(len(tensors)))

    def exchange_for_rows(self, t: Tensor) -> Tensor:
        return _HeadAllToAll.apply(t, self, False)

    def take_local_heads(self, t: Tensor) -> Tensor:
        """Take this rank's heads of a tensor that every rank has with all heads, or with one for all."""
        return t if t.shape[1] == 1 else t.chunk(self.group.size(), 1)[self.group.rank()]


def repeat_kv_heads(t: Tensor, heads: int, ranks: int) -> Tensor:
    """Repeat the heads of keys or values, so that each rank's part of them matches the heads of its queries."""
    times = count_kv_heads(t.shape[1], heads, ranks) // t.shape[1]
    return t if times == 1 else t.repeat_interleave(times, 1)


def count_kv_heads(kv: int, heads: int, ranks: int) -> int:
    """Return the least number of key heads that can be divided over the ranks."""
    least = lcm(kv, ranks)
    return heads if heads % least else least


class _HeadAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, exchange: HeadExchange, to_heads: bool) -> Tensor:
        ctx.exchange, ctx.to_heads = exchange, to_heads
        return _run_all_to_all(t, exchange, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        return _HeadAllToAll.apply(grads[0], ctx.exchange, not ctx.to_heads), None, None


def _run_all_to_all(t: Tensor, exchange: HeadExchange, to_heads: bool) -> Tensor:
    cut, ranks, rank = exchange.cut, exchange.group.size(), exchange.group.rank()
    batch, heads, _, width = t.shape
    if to_heads:
        share, sent = heads // ranks, [piece.reshape(-1) for piece in t.chunk(ranks, 1)]
        shapes = [(batch, share, size, width) for size in cut.sizes]
    else:
        sent = [cut.take_part(t, 2, r).reshape(-1) for r in range(ranks)]
        shapes = [(batch, heads, cut.sizes[rank], width)] * ranks
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = t.new_empty(sum(sizes))
    dist.all_to_all_single(received, torch.cat(sent), sizes, [s.numel() for s in sent], group=exchange.group)
    parts = [flat.view(shape) for flat, shape in zip(received.split(sizes), shapes)]
    return _merge_rank_rows(parts, cut) if to_heads else torch.cat(parts, 1)


def _merge_rank_rows(parts: list[Tensor], cut: Rows) -> Tensor:
    """Merge every rank's rows into the full sequence."""

    def split_ranges(part: Tensor, ranges: Ranges) -> list[tuple[int, Tensor]]:
        return list(zip((first for first, _ in ranges), part.split([n for _, n in ranges], 2)))

    found = [piece for part, ranges in zip(parts, cut.ranks) for piece in split_ranges(part, ranges)]
    return torch.cat([piece for _, piece in sorted(found, key=lambda p: p[0])], 2)


@dataclass(frozen=True)
class AttentionCall:
    """A call of attention, for this rank's rows.

    q is [batch, heads, rows, width]; k and v are [batch, key heads, rows, width].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    """Rows: those of the full sequence, this rank's, or one. Columns: those of the full sequence, or one."""
    dropout: float
    causal: bool
    scale: float

    def take_local_mask(self, held: SequenceLayout) -> Tensor | None:
        """Return the mask with this rank's rows (or one row for all)."""
        whole = self.mask is not None and self.mask.shape[-2] == held.rows.length
        return held.take(self.mask, self.mask.dim() - 2) if whole else self.mask  # pyrefly: ignore


AttentionBackend = Callable[[AttentionCall, SequenceLayout, SequenceLayout], Tensor]
"""(call, layout of the queries, layout of the keys) -> output of this rank's queries."""


AttentionHook = Callable[..., Tensor]
"""A wrapper of `ShardedAttention.attend`."""


class ShardedAttention(TorchFunctionMode):
    """Context of a unit's forward in which its attention covers the full sequences.

    `layouts`: the rows of each sequence. `pairs`: the sequences of each attention, in the order of the calls.
    """

    def __init__(
        self, layouts: Mapping[int, SequenceLayout], pairs: Sequence[Pair], backend: AttentionBackend, hook: AttentionHook | None = None
    ):
        super().__init__()
        self.layouts, self.pairs, self.backend = layouts, pairs, backend
        self.hook = hook or ShardedAttention.attend
        self.call_count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return self.hook(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _find_layout(self, which: int, given: Tensor) -> SequenceLayout | None:
        """Return the layout of an attention's queries (0) or keys (1). None: every rank has all rows."""
        if self.call_count > len(self.pairs):
            what = f"a unit calls attention {self.call_count} times, but {len(self.pairs)} times in the measured forward pass"
            raise PlaitError(Problem("P043", what, why="the model's calls depend on its input", fix=("cp=1",)))
        sequence = self.pairs[self.call_count - 1][which]
        held = None if sequence is None else self.layouts.get(sequence)
        return held if held is not None and given.shape[-2] == held.size else None

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        self.call_count += 1
        asked, mask = query, attn_mask
        query, key, value = (_take_local(t, t.dim() - 2) for t in (query, key, value))
        attn_mask = mask.local if isinstance(mask, SequenceShard) and mask.dim_from_end > -3 else mask
        queries, keys = self._find_layout(0, query), self._find_layout(1, key)
        if queries is not None and is_causal and queries is not keys:  # both are numbered from position 0
            length = key.shape[-2] if keys is None else keys.rows.length
            order = torch.arange(max(length, queries.rows.length), device=query.device)
            attn_mask, is_causal = order[: queries.rows.length, None] >= order[:length], False
        if queries is None or keys is None:  # every rank has the full keys, or gathers them
            if queries is not None and attn_mask is not None and attn_mask.shape[-2] == queries.rows.length:
                attn_mask = queries.take(attn_mask, attn_mask.dim() - 2)
            key, value = (t if keys is None else keys.gather(t, t.dim() - 2) for t in (key, value))
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return asked.with_local(out) if isinstance(asked, SequenceShard) else out
        front = query.shape[:-2]
        q, k, v = (t if t.dim() == 4 else t.reshape(1, -1, *t.shape[-2:]) for t in (query, key, value))
        if attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        if attn_mask is not None and attn_mask.shape[-1] == keys.size < keys.rows.length:
            fetch = keys.gather if attn_mask.requires_grad else keys.gather_no_grad
            attn_mask = fetch(attn_mask, attn_mask.dim() - 1)
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        out = self.backend(AttentionCall(q, k, v, attn_mask, dropout_p, is_causal, scale), queries, keys)
        out = out.reshape(*front, query.shape[-2], value.shape[-1])
        return asked.with_local(out) if isinstance(asked, SequenceShard) else out


def _take_local(given: Tensor, dim: int) -> Tensor:
    """Return this rank's rows of queries or keys, if they are a sequence shard inside a unit."""
    if not isinstance(given, SequenceShard):
        return given
    return given.local if given.shard_dim == dim and given.times == 1 else given.gather_full()


def compute_attention(asked: AttentionCall) -> Tensor:
    """Compute attention by torch's function, over all rows and without dropout."""
    grouped = asked.k.shape[1] != asked.q.shape[1]
    return F.scaled_dot_product_attention(
        asked.q, asked.k, asked.v, asked.mask, 0.0, asked.causal, scale=asked.scale, enable_gqa=grouped
    )


def make_ring_attention(randomness: Callable[[], Randomness], group: ProcessGroup) -> AttentionBackend:
    """Return the backend in which keys and values travel from rank to rank (arXiv 2310.01889)."""

    def attend(asked: AttentionCall, queries: SequenceLayout, keys: SequenceLayout) -> Tensor:
        mask, kept = asked.take_local_mask(queries), None
        if asked.dropout > 0.0:
            b, h, t, _ = asked.q.shape
            length = keys.rows.length
            drawn = _DropoutDraws(randomness(), b, h, True)
            axes = [*drawn.list_axes(), (queries.rows.length, queries.rows.ranks[queries.rank]), (length, ((0, length),))]
            kept = drawn.draw_mask(asked, axes).view(b, h, t, length)
        learned = mask is not None and mask.requires_grad
        scores = Scores(asked.scale, asked.causal, mask, kept, learned)
        return ring.compute_ring_attention(asked.q, asked.k, asked.v, scores, ring.Ring(group, keys.rows))

    return attend


def make_ulysses_attention(randomness: Callable[[], Randomness], group: ProcessGroup) -> AttentionBackend:
    """Make the backend of Ulysses attention, on this rank's heads of the full sequence."""

    def attend(asked: AttentionCall, queries: SequenceLayout, keys: SequenceLayout) -> Tensor:
        rows, columns = (HeadExchange(group, held.rows) for held in (queries, keys))
        ranks, heads = len(queries.rows.ranks), asked.q.shape[1]
        k, v = (repeat_kv_heads(t, heads, ranks) for t in (asked.k, asked.v))
        if queries.rows == keys.rows and asked.q.shape == k.shape:
            q, k, v = rows.exchange_all((asked.q, k, v))
        else:
            q, (k, v) = rows.exchange_for_heads(asked.q), columns.exchange_all((k, v))
        mask = asked.mask
        if mask is not None and mask.shape[-2] == queries.size:
            mask = (queries.gather if mask.requires_grad else queries.gather_no_grad)(mask, mask.dim() - 2)
        mask = mask if mask is None else rows.take_local_heads(mask)
        if asked.dropout == 0.0:
            return rows.exchange_for_rows(compute_attention(replace(asked, q=q, k=k, v=v, mask=mask)))
        b, share, sizes = q.shape[0], q.shape[1], (queries.rows.length, keys.rows.length)
        drawn = _DropoutDraws(randomness(), b, heads, False)
        axes = [*drawn.list_axes(queries.rank * share, share), *((size, ((0, size),)) for size in sizes)]
        kept = drawn.draw_mask(asked, axes).view(b, share, *sizes)
        scores = Scores(asked.scale, asked.causal, mask, kept, mask is not None and mask.requires_grad)
        return rows.exchange_for_rows(ring.compute_ring_attention(q, k, v, scores, ring.Ring(FakeProcessGroup(1), Rows.from_sizes(sizes[1:]))))

    return attend


def check_heads(heads: int, ranks: int, slices: int = 1) -> None:
    """Raise P042 if the heads are not divisible by the ranks. `slices`: the tensor-parallel size; each such rank has `heads` heads."""
    if heads % ranks:
        whose = f" of each of tp={slices}" if slices > 1 else ""
        what = f"cp_method=ulysses distributes heads: {heads} heads{whose} do not divide by cp={ranks}"
        raise PlaitError(Problem("P042", what, why=f"{heads} = {heads // ranks} × {ranks} + {heads % ranks}",
                                 fix=("cp_method=ring", f"cp={math.gcd(heads, ranks)}")))  # fmt: skip


class _DropoutDraws:
    """The random numbers of the dropout of an attention with `heads` heads.

    Element i of the stream belongs to element i of the full weights, samples first.
    """

    def __init__(self, randomness: Randomness, batch: int, heads: int, fold: bool):
        assert randomness.sub_blocks is not None  # under cp, random numbers are drawn for rows
        self.windows, self.place = randomness.sub_blocks, randomness.next_place()
        self.seed, self.step, first, self.samples = randomness.where.tolist()
        if fold and self.samples and batch % self.samples and batch * heads % self.samples == 0:  # samples and heads in one dim
            batch, heads = self.samples, batch * heads // self.samples
        self.batch, self.local = batch, heads
        self.first = first * (batch // self.samples) if self.samples and batch % self.samples == 0 else 0

    def list_axes(self, first: int = 0, count: int | None = None) -> list[Axis]:
        """Return the axes of the batch and of the heads on this rank; `first` and `count` select some of these heads."""
        axis, shape = None, self.windows.shapes.get(self.place, ())
        if shape and self.batch == self.samples:
            axis = self.windows.rule(self.place, len(shape) - 3, math.prod(shape[:-2]), self.local)
        size, ranges = axis or (self.local, ((0, self.local),))
        if count is not None:
            ranges = slice_ranges(ranges, first, count)
        return [(self.batch, ((0, self.batch),)), (size, ranges)]

    def draw_mask(self, asked: AttentionCall, axes: list[Axis]) -> Tensor:
        """Draw the dropout mask of a block of the weights: the same values as these elements have on one device."""
        held = torch.Size(sum(length for _, length in ranges) for _, ranges in axes)
        dtype = torch.float64 if asked.q.dtype is torch.float64 else torch.float32
        if isinstance(asked.q, FakeTensor):
            return asked.q.new_empty(held, dtype=dtype)
        start = self.first * math.prod(size for size, _ in axes[1:])
        numbers = StreamPart.from_axes(make_philox_key(self.seed, "draw", self.step, self.place), start, axes)
        return draw_mask_by(held, numbers, make_attention_range(1.0 - asked.dropout, dtype), dtype, asked.q.device)


# — the check —


@dataclass
class FullAttention:
    """A run on the full sequence, with the queries, keys and values of each attention in order."""

    calls: list[AttentionCall]
    call_count: int = 0
    max_diff: float = 0.0

    def record(self, asked: AttentionCall) -> None:
        """Record a call of the full run."""
        self.calls.append(replace(asked, mask=None))

    def attend(self, asked: AttentionCall, queries: SequenceLayout, keys: SequenceLayout) -> Tensor:
        """Attend to the keys and values of the full run. Updates `max_diff` with the difference between this rank's inputs and their rows."""
        whole = self.calls[self.call_count]
        self.call_count += 1
        for mine, other, held in ((asked.q, whole.q, queries), (asked.k, whole.k, keys), (asked.v, whole.v, keys)):
            self.max_diff = max(self.max_diff, max_relative_diff(mine, held.take(other, 2)))
        mask = asked.take_local_mask(queries)
        if asked.causal:
            order = torch.arange(queries.rows.length, device=asked.q.device)
            mask = queries.take(order[:, None], 0) >= order
        return compute_attention(replace(asked, k=whole.k, v=whole.v, mask=mask, causal=False))


def max_relative_diff(a: Tensor, b: Tensor) -> float:
    """Return the largest difference, relative to the largest value in `b`."""
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    a, b = ((torch.view_as_real(t) if t.is_complex() else t).detach().double().nan_to_num() for t in (a, b))
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
