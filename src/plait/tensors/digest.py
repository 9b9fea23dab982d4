"""Whether ranks hold the same bits: a 64-bit digest per tensor, compared over a group."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

STRETCH = 1 << 18
"""Numbers that are worked on at once: a large tensor must not be copied several times over."""


def digests(named: list[tuple[str, Tensor]]) -> Tensor:
    """One 64-bit digest per tensor, sensitive to order: int64 of shape [len(named)], on the host."""
    rows = [digest(t.detach()).cpu() for _, t in named]
    return torch.stack(rows) if rows else torch.zeros(0, dtype=torch.int64)


def digest(t: Tensor) -> Tensor:
    """One 64-bit digest, sensitive to the order of the elements. It is made where the tensor is, the same bits everywhere."""
    raw = t.contiguous().reshape(-1).view(torch.uint8)
    raw = raw if raw.numel() % 8 == 0 else torch.cat([raw, raw.new_zeros(-raw.numel() % 8)])
    raw = raw.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for start in range(0, raw.numel(), STRETCH):
        part = raw[start : start + STRETCH]
        odd = (
            torch.arange(start + 1, start + len(part) + 1, device=t.device) * 2 + 1
        )  # wraps around: arithmetic modulo 2^64
        total += ((part ^ (part >> 29)) * odd).sum()
    return total


def differing(named: list[tuple[str, Tensor]], group: Any, device: torch.device) -> list[str]:
    """Names of tensors that are not bit-equal on all ranks of the group, which exchanges tensors on this device."""
    mine = digests(named).to(device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    apart = (torch.stack(everyone) != mine).any(0).tolist()
    return [name for (name, _), differs in zip(named, apart) if differs]
