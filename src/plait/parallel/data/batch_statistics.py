"""The statistics of a batch over all ranks, and the normalization by them with its gradient (see `parallel/data/batch_norm.py`)."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.tensors.collectives import ALL_GATHER
from plait.tensors.torch_private import all_gather_tensor, all_reduce


@dataclass(frozen=True)
class StatisticsRanks:
    """The ranks whose samples enter the statistics. `idle`: this rank runs a sample of another rank."""

    group: ProcessGroup | None
    idle: bool


class BatchStatistics(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias with mean and var over all ranks. x: [batch, channels, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ranks: StatisticsRanks):
        dims = [d for d in range(x.dim()) if d != 1]
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        count = 0 if ranks.idle else x.numel() // x.shape[1]
        if count:
            var, mean = torch.var_mean(wide, dims, correction=0)
        else:
            var = mean = wide.new_zeros(x.shape[1])
        mine = torch.cat([mean, var * count, mean.new_full((1,), count)])
        merge = merge_in_graphs if torch.compiler.is_compiling() else _merge
        mean, squares, total = merge(_gather_rows(mine, ranks.group), x.shape[1])
        alone = count == 1  # else the count need not be read, which would wait for the device
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
        if ctx.ranks.idle:  # zeros that a compiler cannot see: it would move a sum of constants into forward, where no other rank has it
            grad = torch.where(ctx.total < 0, grad, 0.0)
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


def _gather_rows(mine: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather the rows of all ranks: [ranks, 2 * channels + 1]."""
    if group is not None and torch.compiler.is_compiling():
        return all_gather_tensor(mine[None], 0, group)
    rows = mine.new_empty(dist.get_world_size(group), len(mine))
    ALL_GATHER(rows.view(-1), mine, group=group)
    return rows


def _merge(rows: Tensor, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the statistics of all ranks into (mean, sum of squared deviations, count). rows: [ranks, 2 * channels + 1]."""
    means, squares, counts = rows[:, :channels], rows[:, channels : 2 * channels], rows[:, -1:]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    return mean, squares.sum(0) + ((means - mean).square() * counts).sum(0), total


@torch.library.custom_op("plait::merged_statistics", mutates_args=())
def merge_in_graphs(rows: Tensor, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Merge as an operator that `torch.compile` does not change. Ranks compile other code for other sizes, with other rounding. Then
    the running statistics would differ between ranks."""
    return _merge(rows, channels)


@merge_in_graphs.register_fake
def _(rows: Tensor, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    return rows.new_empty(channels), rows.new_empty(channels), rows.new_empty(())


def move_statistic(running: Tensor, new: Tensor, share: float | Tensor) -> None:
    """Move a running statistic towards the new one by this fraction (a tensor for a cumulative average)."""
    if torch.compiler.is_compiling() and not isinstance(share, Tensor):
        move_in_graphs(running, new, share)
    else:
        running.lerp_(new, share)


@torch.library.custom_op("plait::move_statistic", mutates_args=("running",))
def move_in_graphs(running: Tensor, new: Tensor, share: float) -> None:
    """Move as an operator, for the same reason as `merge_in_graphs`."""
    running.lerp_(new, share)
