"""Bytes from every rank to every rank, as tensors: nothing that arrives is ever unpickled."""

from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

DIRECT: ContextVar[tuple[str, ...]] = ContextVar("direct", default=("cpu",))
"""Kinds of devices between which parts are exchanged by sends and receives, and not by the library's collectives."""


def directly(device: torch.device) -> bool:
    """Whether ranks on such devices exchange parts by sends and receives."""
    return device.type in DIRECT.get()


def exchange(data: bytes, group: Any, device: torch.device) -> list[bytes]:
    """Each rank's bytes, on all ranks, by rank. A collective; without a group it is this rank's own."""
    if group is None:
        return [data]
    world = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device), group=group)
    longest = max(int(n) for n in lengths)
    if longest == 0:
        return [b""] * world
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    rows = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(rows, mine.to(device), group=group)
    return [row[: int(n)].cpu().numpy().tobytes() for row, n in zip(rows, lengths)]
