"""Many tensors in few messages: gathered from every rank as they are, or summed."""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

MESSAGE_BYTES = 8 << 20
"""A message takes another tensor as long as it has fewer bytes than this."""


def size_of(group: ProcessGroup | None) -> int:
    """Ranks of a group; None is this rank alone."""
    return 1 if group is None else group.size()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The format in which tensors of this format are added up: their own, of 16 bits fp32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def batches(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names of the tensors that share a message: those of one format, in their order."""
    kinds: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault(tensor.dtype, []).append(name)
    for names in kinds.values():
        message, size = list[str](), 0
        for name in names:
            message.append(name)
            size += tensors[name].nbytes
            if size >= MESSAGE_BYTES:
                yield message
                message, size = [], 0
        if message:
            yield message


def gathered(tensors: Mapping[str, Tensor], group: ProcessGroup | None) -> Iterator[tuple[str, list[Tensor]]]:
    """(name, that tensor of every rank in the order of the ranks), message by message. Sent as bytes, whatever the format."""
    for names in batches(tensors):
        mine = torch.cat([tensors[name].reshape(-1) for name in names])
        rows = [mine]
        if group is not None:
            sent = mine.view(torch.uint8)
            arrived = [torch.empty_like(sent) for _ in range(group.size())]
            dist.all_gather(arrived, sent, group=group)
            rows = [row.view(mine.dtype) for row in arrived]
        each = [row.split([tensors[name].numel() for name in names]) for row in rows]
        for name, parts in zip(names, zip(*each)):
            yield name, [part.view(tensors[name].shape) for part in parts]


def summed(tensors: Mapping[str, Tensor], group: ProcessGroup | None) -> dict[str, Tensor]:
    """The sum of each tensor over the ranks, on every rank."""
    found: dict[str, Tensor] = {}
    for names in batches(tensors):
        flat = torch.cat([tensors[name].reshape(-1) for name in names])
        if group is not None:
            dist.all_reduce(flat, group=group)
        parts = flat.split([tensors[name].numel() for name in names])
        found |= {name: part.view(tensors[name].shape) for name, part in zip(names, parts)}
    return found
