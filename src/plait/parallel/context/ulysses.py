"""Ulysses attention: for the time of the attention, ranks exchange stretches of the sequence for heads.

Every rank has all heads of its rows. One all-to-all later it has its heads of all rows, computes plain attention on
them with whatever kernel there is, and another all-to-all brings the output back. Heads do not talk to each other, so
nothing is approximated; what travels is 1/N of queries, keys, values and output per rank, however long the sequence.
The number of heads limits N.

With fewer heads of keys than ranks (grouped queries) keys and values are repeated to the least number that N divides.

Paper
    Jacobs et al. 2023, DeepSpeed Ulysses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.tensors.rows import Ranges, Rows


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
