"""Sums of tensors that each rank rounds before it sends them: to bf16, or to whole numbers from −127 to 127 times a scale.

Rounded numbers do not add up inside an all-reduce: the sum of two bf16 numbers is no bf16 number, and int8 numbers have
another scale on every rank. So the ranks' numbers are gathered as they are, and every rank adds them up in the wide
format, in the order of the ranks. The sum has no second rounding, and the same bits on every rank.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.parallel.compression.messages import gathered

MOST = 127
"""The largest whole number that is sent."""


def sum_bf16(given: Mapping[str, Tensor], group: ProcessGroup | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of each tensor the sum over the ranks of what they sent, and what this rank could not send."""
    sent = {name: x.to(torch.bfloat16) for name, x in given.items()}
    sums = {name: _added([row.to(given[name].dtype) for row in rows]) for name, rows in gathered(sent, group)}
    return sums, {name: x - sent[name].to(x.dtype) for name, x in given.items()}


def sum_int8(given: Mapping[str, Tensor], group: ProcessGroup | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same of whole numbers. The scale of a tensor is its largest number over 127, of each rank its own."""
    if not given:
        return {}, {}
    scales = {name: scale_of(x) for name, x in given.items()}  # sent as float64, which holds them all
    sent = {name: whole_numbers(x, scales[name]) for name, x in given.items()}
    each = dict(gathered({name: scale.double() for name, scale in scales.items()}, group))
    sums = {
        name: _added([_times(row, scale, given[name].dtype) for row, scale in zip(rows, each[name])])
        for name, rows in gathered(sent, group)
    }
    return sums, {name: x - _times(sent[name], scales[name], x.dtype) for name, x in given.items()}


def scale_of(x: Tensor) -> Tensor:
    """What one of the whole numbers stands for."""
    return x.abs().max() / MOST if x.numel() else x.new_zeros(())


def whole_numbers(x: Tensor, scale: Tensor) -> Tensor:
    """The nearest whole numbers; zeros where all of the tensor is zero."""
    return torch.round(x / torch.where(scale > 0, scale, 1.0)).to(torch.int8)


def _times(row: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return row.to(dtype) * scale.to(dtype)


def _added(rows: list[Tensor]) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
