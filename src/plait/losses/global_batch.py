"""Losses that look at the whole batch: means over the global batch, or the global batch itself, under any plan.

A mean over samples can be computed share by share. A loss that multiplies two means (the balance loss of a mixture of
experts), or compares samples with each other (contrastive losses), cannot: each rank would compute it of its own share.
Write such a loss with the functions here and it is the same number, with the same gradient, however the batch is split:

>>> def balance(probabilities, chosen):                    # [tokens, experts] each, the second of zeros and ones
...     return probabilities.shape[1] * (plait.global_mean(probabilities) * plait.global_mean(chosen)).sum()

On one device they are `x.mean(0)` and `x`. In a split run they are collectives over the ranks that have other samples,
so every rank has to call them, as often and in the same order; a rank without samples in a short batch runs along on a
sample that does not count. Micro-batches are computed one after another: there the mean is over one micro-batch of all
ranks, and `plait verify` says that this is not exact.

How the gradient comes out right: the loss of every rank enters with its weight over the global batch's weight. Each
rank computes the same value from the same means, so the weights sum to one; and backward sums the ranks' gradients of
the mean, each of which has its weight in it already.

[Note: Mixtures of Hugging Face]
The balance loss of Hugging Face transformers' mixtures of experts, over the global batch.

Its models compute `load_balancing_loss_func(router logits of every layer, …)` in their own forward. The function
multiplies two means over the batch, so the mean of the ranks' losses is not the loss of the batch. Here the logits of
all ranks are put together first (experts numbers per token and layer, little beside the tokens themselves) and the
library's own function is given the whole: the same number and gradient on every rank, whatever its formula. Where
ranks hold stretches of sequences, the stretches are put together before.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plait.config.errors import FAILED, PlaitError, Problem
from plait.launch import groups
from plait.model.meter import ROUTED, tensors_in
from plait.model.mutations import same_on_all_ranks
from plait.tensors.collectives import gathered, linear, rows_of_ranks, sum_part, summed
from plait.tensors.fake import is_unknown
from plait.tensors.rows import Rows
from plait.tensors.torch_private import in_backward, tree_leaves


class BatchPeers:
    """The ranks that have the other samples of the batch, seen from one, while its forward and backward passes run."""

    def __init__(self, ranks: list[int] | None = None, microbatches: int = 1):
        self.ranks, self.microbatches = ranks, microbatches
        self.apart: BatchPeers | None = None
        """What threads of this process, each with a part of its samples, ask instead: they do not know of each other."""
        self.idle = False
        """What runs now is a sample that makes up the number and does not count."""
        self.used = self.asking = False
        """Whether the job asked for something of the global batch; whether it is being exchanged just now."""
        self.made: list[Tensor] = []
        """What was asked for since `made` was last cleared."""

    @property
    def alone(self) -> bool:
        """Whether this rank has all samples."""
        return self.ranks is None or len(self.ranks) == 1

    @cached_property
    def group(self) -> ProcessGroup:
        """The ranks, in a group of their own: what else is under way between them may be in another order. They make it
        when they first ask for something."""
        group = groups.new_group(self.ranks, use_local_synchronization=True)
        assert isinstance(group, ProcessGroup)
        return group

    def begin(self, idle: bool) -> None:
        """To be called when a micro-batch's forward pass begins."""
        self.idle, self.made = idle, []

    @contextmanager
    def here(self) -> Iterator[None]:
        """A context in which `global_mean` and `global_batch` are of all ranks' samples."""
        token = CURRENT.set(self)
        try:
            yield
        finally:
            CURRENT.reset(token)

    @contextmanager
    def thread(self) -> Iterator[None]:
        """The context of a thread with a part of this rank's samples: a mean is of that part, and this is noted."""
        self.apart = self.apart or BatchPeers()
        with self.apart.here():
            yield

    @contextmanager
    def ask(self) -> Iterator[None]:
        """A context in which what is exchanged was asked for by the job."""
        self.asking = True
        try:
            yield
        finally:
            self.asking = False

    @property
    def inexact(self) -> list[str]:
        """Sentences on what cannot equal one device here."""
        means = []
        if self.used and self.microbatches > 1:
            means.append(f"of one micro-batch of all ranks, not of the batch: microbatches={self.microbatches}")
        if self.apart is not None and self.apart.used:
            means.append("of one device's share where the model asks for it: processes=one")
        return [f"what the job asks of the global batch (global_mean, global_batch) is {mean}" for mean in means]


CURRENT: ContextVar[BatchPeers | None] = ContextVar("sharers", default=None)
STRETCHES: ContextVar[Callable[[Sequence[Tensor]], tuple[Tensor, ...]] | None] = ContextVar("stretches", default=None)
"""What makes whole sequences of this rank's stretches in values that units hand on past what they return."""


def global_mean(x: Tensor) -> Tensor:
    """The mean over dim 0 of `x` [n, …] on all ranks together, whatever n is on each: `x.mean(0)` of the global batch.

    It can be differentiated. Every rank must call it, in the same order. On one device it is `x.mean(0)`.
    """
    peers = _current()
    if peers is None or peers.alone:
        return same_on_all_ranks(x.mean(0))
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    mine = x[:0] if peers.idle else x
    row = torch.cat([mine.to(wide).sum(0).reshape(-1), torch.full((1,), len(mine), dtype=wide, device=x.device)])
    row = linear(row, _summed, _summed, peers)
    mean = (row[:-1] / row[-1].detach()).view(x.shape[1:]).to(x.dtype)
    peers.made.append(mean)
    return mean


def global_batch(x: Tensor) -> Tensor:
    """`x` [n, …] of all ranks, concatenated in the order of the samples; n may differ between ranks.

    It can be differentiated. Every rank must call it, in the same order. On one device it is `x`.
    """
    peers = _current()
    if peers is None or peers.alone:
        return same_on_all_ranks(x)
    mine = x[:0] if peers.idle else x
    with peers.ask():
        rows = rows_of_ranks(len(mine), peers.group, x.device)
    whole = linear(mine, _gathered, _sum_part, rows, peers)
    peers.made.append(whole)
    return whole


def whole_sequences(rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors [samples · positions, …] with the positions of all ranks that share a sequence."""
    make = STRETCHES.get()
    return tuple(rows) if make is None else make(rows)


def asking() -> bool:
    """Whether the global batch is more than what this rank has; if so it counts as asked for."""
    peers = _current()
    return peers is not None and (not peers.alone or peers.microbatches > 1)


def _current() -> BatchPeers | None:
    peers = CURRENT.get()
    if peers is not None:
        peers.used = True
    elif in_backward() and dist.is_initialized() and dist.get_world_size() > 1:
        what = "global_mean was called in a recomputation that does not know the other ranks"
        why = "backward runs in another thread than the forward pass did"
        fix = ("call it in the loss, or outside what is recomputed",)
        raise PlaitError(Problem("J020", what, why=why, fix=fix), FAILED)
    return peers


def zero_loss(loss: Callable[[], Tensor], outputs: object, asked: Sequence[Tensor] = ()) -> Tensor:
    """A zero that depends on those of a model's outputs that the loss looks at, for a rank without samples.

    Backward from it comes to the units that the other ranks' backwards come to, and to what the loss `asked` of the
    other ranks meanwhile. (Zero times the loss may be NaN.)
    """
    edges = [(o, o.grad_fn, o.output_nr) for o in tensors_in(outputs) if o.requires_grad]
    try:
        value = loss()
    except Exception:  # it may not bear an empty batch
        return torch.stack([o.sum() * 0.0 for o, _, _ in edges]).sum()
    ends, ahead = {(node, number) for _, node, number in edges}, [(value.grad_fn, value.output_nr)]
    met = set(ahead)
    edges += [(o, o.grad_fn, o.output_nr) for o in asked if o.requires_grad]
    while ahead:
        edge = ahead.pop()
        if edge not in ends and edge[0] is not None:
            new = [other for other in edge[0].next_functions if other not in met]
            met.update(new)
            ahead.extend(new)
    sums = [o.sum() * 0.0 for o, node, number in edges if (node, number) in met]
    return torch.stack(sums).sum() if sums else value * 0.0


def _summed(x: Tensor, peers: BatchPeers) -> Tensor:
    """The sum over the ranks: its own adjoint."""
    with peers.ask():
        return summed(x, peers.group)


def _gathered(x: Tensor, rows: Rows, peers: BatchPeers) -> Tensor:
    with peers.ask():
        return gathered(x, 0, rows, peers.group)


def _sum_part(x: Tensor, rows: Rows, peers: BatchPeers) -> Tensor:
    """This rank's rows of the sum over the ranks: the adjoint of `_gathered`."""
    with peers.ask():
        return sum_part(x, 0, rows, peers.group)


NAME = "load_balancing_loss_func"


def adapt_balance_losses(model: nn.Module) -> None:
    """Replace the balance loss of the model's library file, if it has one, by that of the global batch; once per file."""
    if "transformers" not in sys.modules:
        return
    for module in {type(m).__module__ for m in model.modules()}:
        file = sys.modules.get(module)
        balance = getattr(file, NAME, None)
        if module.startswith("transformers.") and balance is not None and not hasattr(balance, "__wrapped__"):
            setattr(file, NAME, over_all(balance))


def over_all(balance: Callable[..., Any]) -> Callable[..., Any]:
    """The library's function, given the logits (and the mask) of all ranks; outside a split run it is unchanged."""

    @wraps(balance)
    def over(
        gate_logits: tuple[Tensor, ...] | Tensor | None,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor | int:
        given = [t for t in tree_leaves((gate_logits, attention_mask)) if isinstance(t, Tensor)]
        if not isinstance(gate_logits, tuple) or not gate_logits:
            return balance(gate_logits, num_experts, top_k, attention_mask)
        for t in gate_logits:
            setattr(t, ROUTED, True)
        whole = any(map(is_unknown, given))
        gathered = gate_logits if whole else whole_sequences(gate_logits)
        if whole or not asking():
            return balance(gathered, num_experts, top_k, attention_mask)
        if len({t.shape for t in gathered}) == 1:
            gathered = global_batch(torch.stack([t.to(gathered[0].device) for t in gathered], 1)).unbind(1)
        else:
            gathered = tuple(global_batch(t) for t in gathered)
        mask = None if attention_mask is None else global_batch(attention_mask)
        return balance(gathered, num_experts, top_k, mask)

    return over
