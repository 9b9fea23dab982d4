"""Batch normalization over all ranks: the statistics of the global batch, not of each rank's local batch.

What it does
    The output of a layer that normalizes over the batch depends on the samples that it sees together. Under `dp` and
    `fsdp`, the user's batch-norm modules get their training statistics from all ranks. plait replaces their class in
    place, so names, parameters and buffers stay. It treats a `SyncBatchNorm` like any other batch norm, and skips that
    module's own messages.

Costs
    Traffic: for a layer of C channels, one all-gather of 2 C + 1 values in forward and one all-reduce of 2 C in
    backward. The rank waits for each, so a model with many small layers becomes slower.

Choose when
    It is automatic: plans with `dp` or `fsdp` need it for the training result of one device.

Avoid when
    The network can use group or layer normalization instead, which see one sample at a time.

How it stays exact
    Ranks exchange (mean, sum of squared deviations, count) and merge them. This loses no digits, while E[x²] − mean²
    would. In a short batch, a rank without samples runs a sample of another rank. It counts zero, so it enters no
    statistic and has no gradient. Under `compile`, the exchange is part of the graph, which keeps the order of such
    operators, so a model with many layers stays one graph. A subclass with its own forward keeps this forward and runs
    outside of graphs. torch's function in it gets the statistics of all ranks.

Paper
    Ioffe and Szegedy 2015, Batch Normalization (ICML); Chan, Golub and LeVeque 1983, Algorithms for Computing the
    Sample Variance, for the merge.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from plait.losses.global_batch import BatchPeers
from plait.parallel.data.batch_statistics import BatchStatistics, StatisticsRanks, move_statistic
from plait.tensors.torch_private import BatchNormBase, check_dims, uncompiled


def sync_batch_norms(
    model: nn.Module, names: Sequence[str], group: ProcessGroup | None, peers: BatchPeers | None = None
) -> None:
    """Let the named batch-norm modules compute their training statistics over `group`, without the samples of ranks with `peers.idle`."""
    for name in names:
        module = model.get_submodule(name)
        kind = type(module)
        made = _SyncedBatchNorm if kind.forward is BatchNormBase.forward else _SyncedSubclass
        module.__class__ = type(f"Synchronised{kind.__name__}", (made, kind), {})
        module.__dict__ |= {"_group": group, "_peers": peers or BatchPeers()}


class _SyncedBatchNorm(BatchNormBase):
    """torch's own forward, with the statistics of all ranks."""

    _group: ProcessGroup | None
    _peers: BatchPeers

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:  # ranks evaluate unequal numbers of batches, so they do not wait for each other
            held = None if self.running_mean is None or self.running_var is None else (self.running_mean, self.running_var)
            return _normalize_local(input, held, Affine(self.weight, self.bias), held is None, 0.0, self.eps)
        check_dims(self, input)
        running: Running = None
        if self.training and self.track_running_stats and self.running_mean is not None:
            assert self.num_batches_tracked is not None and self.running_var is not None
            self.num_batches_tracked.add_(1)
            running = self.running_mean, self.running_var
        steps, momentum = self.num_batches_tracked, self.momentum
        share = steps.to(running[0].dtype).reciprocal() if running and steps is not None and momentum is None else momentum
        ranks = StatisticsRanks(self._group, self._peers.idle)
        return _normalize_global(input, running, Affine(self.weight, self.bias), share, self.eps, ranks)


class _SyncedSubclass(BatchNormBase):
    """A subclass's own forward, in which torch's function gets the statistics of all ranks."""

    _group: ProcessGroup | None
    _peers: BatchPeers

    @uncompiled
    def forward(self, input: Tensor) -> Tensor:
        ranks = StatisticsRanks(self._group, self._peers.idle) if self.training else None
        with _GlobalStatistics(ranks):
            return super().forward(input)


class _GlobalStatistics(TorchFunctionMode):
    """Context in which `F.batch_norm` and `torch.batch_norm` normalize by the statistics of all ranks in training.

    Without `ranks`: by the statistics of this rank's samples, even of a single one.
    """

    def __init__(self, ranks: StatisticsRanks | None):
        super().__init__()
        self.ranks = ranks

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = SIGNATURES[func].bind(*args, **kwargs or {}) if func in SIGNATURES else None
        if given is None:
            return func(*args, **kwargs or {})
        given.apply_defaults()
        of = given.arguments
        if not of["training"]:
            return func(*args, **kwargs or {})
        running = (of["running_mean"], of["running_var"]) if of["running_mean"] is not None else None
        affine = Affine(of["weight"], of["bias"])
        if self.ranks is None:
            return _normalize_local(of["input"], running, affine, True, of["momentum"], of["eps"])
        return _normalize_global(of["input"], running, affine, of["momentum"], of["eps"], self.ranks)


def _make_signature(*names: str) -> inspect.Signature:
    """Make the signature of `torch.batch_norm`, which Python cannot inspect."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])


SIGNATURES: dict[Callable[..., Any], inspect.Signature] = {
    F.batch_norm: inspect.signature(F.batch_norm),
    torch.batch_norm: _make_signature(
        "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled"
    ),
}


class Affine(NamedTuple):
    """The learned scale and offset, [channels] each; None: not learned."""

    weight: Tensor | None
    bias: Tensor | None


Running = tuple[Tensor, Tensor] | None
"""The running mean and variance to update."""


def _normalize_local(
    input: Tensor, running: Running, affine: Affine, batch: bool, momentum: float, eps: float
) -> Tensor:  # fmt: skip
    """Apply `F.batch_norm`, also to a single sample. `batch`: normalize by its statistics, and not by `running`."""
    cudnn = torch.backends.cudnn.enabled
    with torch.DisableTorchFunction():
        return torch.batch_norm(input, *affine, *(running or (None, None)), batch, momentum, eps, cudnn)


def _normalize_global(
    input: Tensor, running: Running, affine: Affine, momentum: float | Tensor | None, eps: float,
    ranks: StatisticsRanks,
) -> Tensor:  # fmt: skip
    """Normalize by the statistics of all ranks, and move `running` towards them by the fraction `momentum`."""
    out, mean, var, count = BatchStatistics.apply(input, *affine, eps, ranks)
    if running is not None:
        with torch.no_grad():
            for held, new in zip(running, (mean, var * (count / (count - 1)))):
                move_statistic(held, new.to(held.dtype), 0.0 if momentum is None else momentum)
    return out
