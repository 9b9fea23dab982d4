"""What attention becomes in a unit that runs on a stretch of the sequence: its own call, answered for the whole.

A unit's code calls `scaled_dot_product_attention` on the queries, keys and values of its rows. `Attending` takes that
call and hands it to whoever can see the other stretches: a ring, an exchange of heads, or, when it is checked that a
unit can run on a stretch, the keys and values of a run on the whole sequence.

Masks may come whole (a mask that the model made for the whole sequence) or as this rank's rows; keys a mask speaks of
are always all of them, so columns that were cut are gathered.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from plait import ring, ulysses
from plait.blockwise import Scores
from plait.draws import bits, key
from plait.errors import PlaitError, Problem
from plait.ranges import Rows, within
from plait.stretch import Held
from plait.windows import Axis, sub_block


@dataclass(frozen=True)
class Asked:
    """A call of attention: q [batch, heads, rows, width], k and v [batch, key heads, rows, width] of this rank's rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    """Rows: the whole's, this rank's, or one; columns: the whole's or one."""
    dropout: float
    causal: bool
    scale: float

    def rows(self, held: Held) -> Tensor | None:
        """The mask with this rank's rows (or one for all)."""
        whole = self.mask is not None and self.mask.shape[-2] == held.cut.length
        return held.take(self.mask, self.mask.dim() - 2) if whole else self.mask  # pyrefly: ignore


Answer = Callable[[Asked, Held], Tensor]


class Attending(TorchFunctionMode):
    """Around a unit's forward: its attention sees all stretches."""

    def __init__(self, held: Held, answer: Answer):
        super().__init__()
        self.held, self.answer = held, answer

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return self._asked(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _asked(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        rows, length = self.held.size, self.held.cut.length
        if (
            key.shape[-2] != rows or query.shape[-2] != rows
        ):  # what is attended to is no stretch: every rank has all of it
            if attn_mask is not None and attn_mask.shape[-2] == length and query.shape[-2] == rows:
                attn_mask = self.held.take(attn_mask, attn_mask.dim() - 2)
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        front = query.shape[:-2]
        q, k, v = (t if t.dim() == 4 else t.reshape(1, -1, *t.shape[-2:]) for t in (query, key, value))
        if attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        if attn_mask is not None and attn_mask.shape[-1] == rows < length:
            fetch = self.held.gather if attn_mask.requires_grad else self.held.fetch
            attn_mask = fetch(attn_mask, attn_mask.dim() - 1)
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        out = self.answer(Asked(q, k, v, attn_mask, dropout_p, is_causal, scale), self.held)
        return out.reshape(*front, rows, value.shape[-1])


def around(randomness: Callable[[], Any]) -> Answer:
    """Attention in a ring."""

    def answer(asked: Asked, held: Held) -> Tensor:
        mask, kept = asked.rows(held), None
        if asked.dropout > 0.0:
            b, h, t, _ = asked.q.shape
            length = held.cut.length
            drawn = _Drawn(randomness(), b, h, True)
            axes = [*drawn.heads(), (length, held.cut.ranks[held.rank]), (length, ((0, length),))]
            kept = drawn.kept(asked, axes).view(b, h, t, length)
        learned = mask is not None and mask.requires_grad
        scores = Scores(asked.scale, asked.causal, mask, kept, learned)
        return ring.attention(asked.q, asked.k, asked.v, scores, ring.Ring(held.group, held.cut))

    return answer


def exchanged(randomness: Callable[[], Any]) -> Answer:
    """Attention on this rank's heads of the whole sequence."""

    def answer(asked: Asked, held: Held) -> Tensor:
        exchange = ulysses.Exchange(held.group, held.cut)
        ranks, heads = len(held.cut.ranks), asked.q.shape[1]
        k, v = (ulysses.repeated(t, heads, ranks) for t in (asked.k, asked.v))
        q, k, v = (exchange.heads(t) for t in (asked.q, k, v))
        mask = asked.mask
        if mask is not None and mask.shape[-2] == held.size:
            mask = (held.gather if mask.requires_grad else held.fetch)(mask, mask.dim() - 2)
        mask = mask if mask is None else exchange.mine(mask)
        if asked.dropout == 0.0:
            grouped = k.shape[1] != q.shape[1]
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=asked.causal, scale=asked.scale, enable_gqa=grouped
            )
            return exchange.rows(out)
        b, share, whole = q.shape[0], q.shape[1], (held.cut.length, ((0, held.cut.length),))
        drawn = _Drawn(randomness(), b, heads, False)
        axes = drawn.heads((held.rank * share, share))
        kept = drawn.kept(asked, [*axes, whole, whole]).view(b, share, held.cut.length, held.cut.length)
        scores = Scores(asked.scale, asked.causal, mask, kept, mask is not None and mask.requires_grad)
        return exchange.rows(ring.attention(q, k, v, scores, ring.Ring(_Alone(), Rows.of([held.cut.length]))))

    return answer


class _Alone:
    """A group of one."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def check_heads(heads: int, ranks: int, slices: int = 1) -> None:
    """P042 when heads cannot be shared out. `slices`: of how many processes, each with its heads, this is one."""
    if heads % ranks:
        whose = f" of each of tp={slices}" if slices > 1 else ""
        what = f"context=ulysses shares out heads: {heads} heads{whose} do not divide by cp={ranks}"
        raise PlaitError(Problem("P042", what, why=f"{heads} = {heads // ranks} × {ranks} + {heads % ranks}",
                                 fix=("context=ring", f"cp={math.gcd(heads, ranks)}")))  # fmt: skip


class _Drawn:
    """What an attention of `heads` heads draws: element i of the stream is that of the whole weights, samples first."""

    def __init__(self, randomness: Any, batch: int, heads: int, fold: bool):
        self.windows, self.place = randomness.windows, randomness.place()
        self.seed, self.step, first, self.samples = randomness.where.tolist()
        if fold and self.samples and batch % self.samples and batch * heads % self.samples == 0:  # both in one dim
            batch, heads = self.samples, batch * heads // self.samples
        self.batch, self.local = batch, heads
        self.start = first * (batch // self.samples) if self.samples and batch % self.samples == 0 else 0

    def heads(self, some: tuple[int, int] | None = None) -> list[Axis]:
        """The batch, and of the heads those that are held here; `some`: of these, (the first, how many)."""
        axis, shape = None, self.windows.shapes.get(self.place, ())
        if shape and self.batch == self.samples:
            axis = self.windows.rule(self.place, len(shape) - 3, math.prod(shape[:-2]), self.local)
        size, ranges = axis or (self.local, ((0, self.local),))
        if some is not None:
            ranges = within(ranges, *some)
        return [(self.batch, ((0, self.batch),)), (size, ranges)]

    def kept(self, asked: Asked, axes: list[Axis]) -> Tensor:
        """What dropout multiplies a sub-block of the weights with: as it is for these elements on one device."""
        stream = partial(bits, key(self.seed, "draw", self.step, self.place))
        words = sub_block(stream, self.start, axes)
        stays = 1.0 - asked.dropout
        kept = torch.from_numpy(np.asarray((words + 0.5) * 2.0**-32 < stays))
        return kept.to(asked.q.device, torch.float64 if asked.q.dtype is torch.float64 else torch.float32) / stays


# — the check —


@dataclass
class Whole:
    """A run on the whole sequence: the keys and values of each attention, by their number."""

    calls: list[Asked]
    number: int = 0
    worst: float = 0.0

    def note(self, asked: Asked) -> None:
        """A call of the whole run."""
        self.calls.append(replace(asked, mask=None))

    def answer(self, asked: Asked, held: Held) -> Tensor:
        """Attention over the whole run's keys and values. Notes how far this rank's own are from their rows."""
        whole = self.calls[self.number]
        self.number += 1
        for mine, other in ((asked.q, whole.q), (asked.k, whole.k), (asked.v, whole.v)):
            if mine.shape[2] == held.size:
                self.worst = max(self.worst, apart(mine, held.take(other, 2)))
        mask = asked.rows(held)
        if asked.causal:
            order = torch.arange(held.cut.length, device=asked.q.device)
            mask = held.take(order[:, None], 0) >= order
        grouped = whole.k.shape[1] != asked.q.shape[1]
        return F.scaled_dot_product_attention(asked.q, whole.k, whole.v, mask, scale=asked.scale, enable_gqa=grouped)


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, to the largest number in `b`."""
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
