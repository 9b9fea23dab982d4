"""Batch normalisation over all ranks: the statistics of the global batch, not of each rank's share.

What it does
    A layer that normalises over the batch computes another thing when it sees a share of it. Under `dp` the user's
    batch-norm modules get their training statistics from all ranks. Their class is replaced in place, so names,
    parameters and buffers stay. (torch's own `SyncBatchNorm` runs on GPUs only.)

Costs
    Traffic: one gather of 2 C + 1 numbers per layer of C channels in forward and one sum of 2 C in backward, each of
    them waited for: many small layers feel it.

Choose when
    It is not chosen: a `dp` plan needs it to be the same training.

Avoid when
    The network can use group or layer normalisation instead, which see one sample at a time.

How it stays exact
    Ranks exchange (mean, sum of squared deviations, count) and merge them, which loses no digits where E[x²] − mean²
    would. A rank without samples in a short batch runs a sample of another rank, which counts zero: it enters no statistic and
    has no gradient. Under `compile` the exchange is
    part of the graph, which keeps the order of such operators, so that a model with many layers stays one graph.

Paper
    Ioffe and Szegedy 2015, Batch Normalization (ICML); Chan, Golub and LeVeque 1983, Algorithms for Computing the
    Sample Variance, for the merge.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from plait.losses.global_batch import BatchPeers
from plait.tensors.collectives import GATHER_PARTS, directly
from plait.tensors.torch_private import BatchNormBase, all_gather_tensor, all_reduce, check_dims


def synchronise(
    model: nn.Module, names: Sequence[str], group: ProcessGroup | None, peers: BatchPeers | None = None
) -> None:
    """Make the named batch-norm modules compute their training statistics over `group`, without samples that are `peers.idle`."""
    for name in names:
        module = model.get_submodule(name)
        kind = type(module)
        module.__class__ = type(f"Synchronised{kind.__name__}", (_Synchronised, kind), {})
        module.__dict__ |= {"_group": group, "_peers": peers or BatchPeers()}


class _Synchronised(BatchNormBase):
    _group: ProcessGroup | None
    _peers: BatchPeers

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training or self.running_mean is None):
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        check_dims(self, input)
        ranks = _Ranks(self._group, self._peers.idle)
        out, mean, var, count = _BatchStatistics.apply(input, self.weight, self.bias, self.eps, ranks)
        if self.training and self.track_running_stats and self.running_mean is not None:
            assert self.num_batches_tracked is not None and self.running_var is not None
            self.num_batches_tracked.add_(1)
            with torch.no_grad():
                unbiased = var * (count / (count - 1))
                for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
                    if self.momentum is None:
                        running.lerp_(new.to(running.dtype), self.num_batches_tracked.to(running.dtype).reciprocal())
                    else:
                        running.lerp_(new.to(running.dtype), self.momentum)
        return out


@dataclass(frozen=True)
class _Ranks:
    """The ranks whose samples enter the statistics. `idle`: the sample of this one belongs to another rank."""

    group: ProcessGroup | None
    idle: bool


class _BatchStatistics(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias with mean and var over all ranks. x: [batch, channels, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ranks: _Ranks):
        dims = [d for d in range(x.dim()) if d != 1]
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        count = 0 if ranks.idle else x.numel() // x.shape[1]
        if count:
            var, mean = torch.var_mean(wide, dims, correction=0)
        else:
            var = mean = wide.new_zeros(x.shape[1])
        mine = torch.cat([mean, var * count, mean.new_full((1,), count)])
        mean, squares, total = _merge(_everyone(mine, ranks.group), x.shape[1])
        alone = count == 1  # else there are more, or another rank has the only one: the number is not read, which a device waits for
        if alone and not torch.compiler.is_compiling() and int(total) == 1:
            raise ValueError("Expected more than 1 value per channel when training, over all ranks")
        var = squares / total
        shape = [1, -1] + [1] * (x.dim() - 2)
        inverse = torch.rsqrt(var + eps)
        normal = (wide - mean.view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, weight, inverse)
        ctx.ranks, ctx.dims, ctx.total, ctx.shape = ranks, dims, total, shape
        ctx.mark_non_differentiable(mean, var, total)
        out = normal if weight is None else normal * weight.view(shape)
        out = out if bias is None else out + bias.view(shape)
        return out.to(x.dtype), mean, var, total

    @staticmethod
    def backward(ctx: Any, *upstream: Any):
        normal, weight, inverse = ctx.saved_tensors
        grad, group = upstream[0].to(normal.dtype), ctx.ranks.group
        grad = torch.zeros_like(grad) if ctx.ranks.idle else grad
        sum_grad, sum_product = grad.sum(ctx.dims), (grad * normal).sum(ctx.dims)
        both = torch.cat([sum_grad, sum_product])
        if torch.compiler.is_compiling():
            both = all_reduce(both, "sum", group)
        else:
            dist.all_reduce(both, group=group)
        all_grad, all_product = both.chunk(2)
        scale = inverse if weight is None else inverse * weight
        centred = grad - (all_grad / ctx.total).view(ctx.shape) - normal * (all_product / ctx.total).view(ctx.shape)
        centred = grad if ctx.ranks.idle else centred
        grad_x = (centred * scale.view(ctx.shape)).to(upstream[0].dtype)
        return (
            grad_x,
            sum_product if weight is not None else None,
            sum_grad if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def _everyone(mine: Tensor, group: ProcessGroup | None) -> Tensor:
    """The rows of all ranks: [ranks, 2 * channels + 1]."""
    if group is not None and torch.compiler.is_compiling():
        return all_gather_tensor(mine[None], 0, group)
    ranks = dist.get_world_size(group)
    if not directly(mine.device):
        rows = mine.new_empty(ranks, len(mine))
        GATHER_PARTS(rows.view(-1), mine, group=group)
        return rows
    everyone = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(everyone, mine, group=group)
    return torch.stack(everyone)


def _merge(rows: Tensor, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, sum of squared deviations, count) of the union. rows: [ranks, 2 * channels + 1]."""
    means, squares, counts = rows[:, :channels], rows[:, channels : 2 * channels], rows[:, -1:]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    return mean, squares.sum(0) + ((means - mean).square() * counts).sum(0), total
