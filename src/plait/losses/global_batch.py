"""Losses over the global batch, the same under any plan.

A mean over samples can be computed from the means of local batches. Some losses cannot: a product of two means (the balance loss
of a mixture of experts), or comparisons between samples (contrastive losses). Each rank would compute them on its local batch
only. Written with the functions of this module, such a loss has the same value and the same gradient, however the batch is split:

>>> def balance(probabilities, chosen):                    # [tokens, experts] each, the second of zeros and ones
...     return probabilities.shape[1] * (plait.global_mean(probabilities) * plait.global_mean(chosen)).sum()

On one device they are `x.mean(0)` and `x`. In a split run they are collectives over the ranks with other samples. So every rank
must call them equally often and in the same order. A rank without samples in a short batch runs a sample that does not count.
Micro-batches are computed one after another, so the mean covers one micro-batch of all ranks. `plait verify` reports that this is
not exact.

The loss of every rank is weighted by its weight over the global batch's weight. Each rank computes the same value from the same
means, so the weights sum to one. Backward sums the ranks' gradients of the mean, which already contain these weights.

[Note: Mixtures of Hugging Face]
Hugging Face transformers' mixtures of experts call `load_balancing_loss_func(router logits of every layer, …)` in their own
forward. The function multiplies two means over the batch, so the mean of the ranks' losses is not the loss of the batch. Here the
logits of all ranks are gathered first (one value per expert, token and layer, which is small). The library's own function gets
all logits, so value and gradient are the same on every rank, whatever its formula. If ranks have sequence shards, these are
gathered before.
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
from plait.model.meter import ROUTED_ATTRIBUTE, iter_tensors
from plait.model.mutations import mark_same_on_ranks
from plait.tensors.collectives import (
    all_gather_rows,
    all_reduce_copy,
    apply_linear,
    exchange_row_counts,
    reduce_scatter_rows,
)
from plait.tensors.fake import is_remote_fake
from plait.tensors.rows import Rows
from plait.tensors.torch_private import is_in_backward, tree_leaves


class BatchPeers:
    """The ranks with the other samples of the batch, while a rank's forward and backward passes run."""

    def __init__(self, ranks: list[int] | None = None, microbatches: int = 1):
        self.ranks, self.microbatches = ranks, microbatches
        self.thread_peers: BatchPeers | None = None
        """The peers of this process's threads, which each have a part of its samples. A thread's means cover its own part."""
        self.idle = False
        """Whether the current sample only fills the local batch and does not count."""
        self.used = self.is_exchanging = False
        """`used`: whether the job used the global batch. `is_exchanging`: whether an exchange runs now."""
        self.exchanged: list[Tensor] = []
        """Results of exchanges since the last `begin`."""

    @property
    def has_all_samples(self) -> bool:
        """Whether this rank has all samples."""
        return self.ranks is None or len(self.ranks) == 1

    @cached_property
    def group(self) -> ProcessGroup:
        """The process group of the ranks, separate because other messages between them may have another order. Made at the first use."""
        group = groups.new_group(self.ranks, use_local_synchronization=True)
        assert isinstance(group, ProcessGroup)
        return group

    def begin(self, idle: bool) -> None:
        """Start a micro-batch, before its forward pass."""
        self.idle, self.exchanged = idle, []

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Context in which `global_mean` and `global_batch` cover the samples of all ranks."""
        token = CURRENT_PEERS.set(self)
        try:
            yield
        finally:
            CURRENT_PEERS.reset(token)

    @contextmanager
    def activate_thread(self) -> Iterator[None]:
        """Context of a thread with a part of this rank's samples: a mean covers this part, and its use is recorded."""
        self.thread_peers = self.thread_peers or BatchPeers()
        with self.thread_peers.activate():
            yield

    @contextmanager
    def mark_exchange(self) -> Iterator[None]:
        """Context of an exchange that the job requested."""
        self.is_exchanging = True
        try:
            yield
        finally:
            self.is_exchanging = False

    @property
    def inexact_reasons(self) -> list[str]:
        """Reasons why results differ from those of one device."""
        means = []
        if self.used and self.microbatches > 1:
            means.append(f"over one micro-batch of all ranks, not over the batch: microbatches={self.microbatches}")
        if self.thread_peers is not None and self.thread_peers.used:
            means.append("over one device's samples if the model calls it: processes=one")
        return [f"the job's global_mean or global_batch is {mean}" for mean in means]


CURRENT_PEERS: ContextVar[BatchPeers | None] = ContextVar("sharers", default=None)
SEQUENCE_GATHERER: ContextVar[Callable[[Sequence[Tensor]], tuple[Tensor, ...]] | None] = ContextVar("stretches", default=None)
"""Gathers full sequences of values [samples · positions, …] that units pass on outside of their return values."""


def global_mean(x: Tensor) -> Tensor:
    """The mean over dim 0 of `x` [n, …] over all ranks, where n may differ between ranks: `x.mean(0)` of the global batch.

    It is differentiable. Every rank must call it, in the same order. On one device it is `x.mean(0)`.
    """
    peers = _get_peers()
    if peers is None or peers.has_all_samples:
        return mark_same_on_ranks(x.mean(0))
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    mine = x[:0] if peers.idle else x
    row = torch.cat([mine.to(wide).sum(0).reshape(-1), torch.full((1,), len(mine), dtype=wide, device=x.device)])
    row = apply_linear(row, _sum_ranks, _sum_ranks, peers)
    mean = (row[:-1] / row[-1].detach()).view(x.shape[1:]).to(x.dtype)
    peers.exchanged.append(mean)
    return mean


def global_batch(x: Tensor) -> Tensor:
    """`x` [n, …] of all ranks, concatenated in the order of the samples; n may differ between ranks.

    It is differentiable. Every rank must call it, in the same order. On one device it is `x`.
    """
    peers = _get_peers()
    if peers is None or peers.has_all_samples:
        return mark_same_on_ranks(x)
    mine = x[:0] if peers.idle else x
    with peers.mark_exchange():
        rows = exchange_row_counts(len(mine), peers.group, x.device)
    whole = apply_linear(mine, _gather_ranks, _sum_part, rows, peers)
    peers.exchanged.append(whole)
    return whole


def gather_sequences(rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gather tensors [samples · positions, …] over the ranks that shard a sequence."""
    make = SEQUENCE_GATHERER.get()
    return tuple(rows) if make is None else make(rows)


def is_global_batch_used() -> bool:
    """Whether the global batch has more samples than this rank. If so, it counts as used."""
    peers = _get_peers()
    return peers is not None and (not peers.has_all_samples or peers.microbatches > 1)


def _get_peers() -> BatchPeers | None:
    peers = CURRENT_PEERS.get()
    if peers is not None:
        peers.used = True
    elif is_in_backward() and dist.is_initialized() and dist.get_world_size() > 1:
        what = "global_mean was called in a recomputation without access to the other ranks"
        why = "backward runs in another thread than the forward pass"
        fix = ("call it in the loss, or outside of the checkpointed code",)
        raise PlaitError(Problem("J020", what, why=why, fix=fix), FAILED)
    return peers


def make_zero_loss(loss: Callable[[], Tensor], outputs: object, requested: Sequence[Tensor] = ()) -> Tensor:
    """Make a zero that depends on the model outputs which the loss uses, for a rank without samples.

    Its backward reaches the same units as the backwards of the other ranks, and the exchanges `requested` by the loss. (Zero
    times the loss may be NaN.)
    """
    edges = [(o, o.grad_fn, o.output_nr) for o in iter_tensors(outputs) if o.requires_grad]
    try:
        value = loss()
    except Exception:  # it may reject an empty batch
        return torch.stack([o.sum() * 0.0 for o, _, _ in edges]).sum()
    ends, ahead = {(node, number) for _, node, number in edges}, [(value.grad_fn, value.output_nr)]
    met = set(ahead)
    edges += [(o, o.grad_fn, o.output_nr) for o in requested if o.requires_grad]
    while ahead:
        edge = ahead.pop()
        if edge not in ends and edge[0] is not None:
            new = [other for other in edge[0].next_functions if other not in met]
            met.update(new)
            ahead.extend(new)
    sums = [o.sum() * 0.0 for o, node, number in edges if (node, number) in met]
    return torch.stack(sums).sum() if sums else value * 0.0


def _sum_ranks(x: Tensor, peers: BatchPeers) -> Tensor:
    """Sum over the ranks; it is its own adjoint."""
    with peers.mark_exchange():
        return all_reduce_copy(x, peers.group)


def _gather_ranks(x: Tensor, rows: Rows, peers: BatchPeers) -> Tensor:
    with peers.mark_exchange():
        return all_gather_rows(x, 0, rows, peers.group)


def _sum_part(x: Tensor, rows: Rows, peers: BatchPeers) -> Tensor:
    """Sum over the ranks and return this rank's rows: the adjoint of `_gather_ranks`."""
    with peers.mark_exchange():
        return reduce_scatter_rows(x, 0, rows, peers.group)


BALANCE_LOSS = "load_balancing_loss_func"


def adapt_balance_losses(model: nn.Module) -> None:
    """Replace the balance loss of the model's library file, if it has one, by that of the global batch; once per file."""
    if "transformers" not in sys.modules:
        return
    for module in {type(m).__module__ for m in model.modules()}:
        file = sys.modules.get(module)
        balance = getattr(file, BALANCE_LOSS, None)
        if module.startswith("transformers.") and balance is not None and not hasattr(balance, "__wrapped__"):
            setattr(file, BALANCE_LOSS, globalize_balance(balance))


def globalize_balance(balance: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the library's function: it gets the logits (and the mask) of all ranks. Outside of a split run it is unchanged."""

    @wraps(balance)
    def compute_global(
        gate_logits: tuple[Tensor, ...] | Tensor | None,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor | int:
        given = [t for t in tree_leaves((gate_logits, attention_mask)) if isinstance(t, Tensor)]
        if not isinstance(gate_logits, tuple) or not gate_logits:
            return balance(gate_logits, num_experts, top_k, attention_mask)
        for t in gate_logits:
            setattr(t, ROUTED_ATTRIBUTE, True)
        whole = any(map(is_remote_fake, given))
        gathered = gate_logits if whole else gather_sequences(gate_logits)
        if whole or not is_global_batch_used():
            return balance(gathered, num_experts, top_k, attention_mask)
        if len({t.shape for t in gathered}) == 1:
            gathered = global_batch(torch.stack([t.to(gathered[0].device) for t in gathered], 1)).unbind(1)
        else:
            gathered = tuple(global_batch(t) for t in gathered)
        mask = None if attention_mask is None else global_batch(attention_mask)
        return balance(gathered, num_experts, top_k, mask)

    return compute_global
