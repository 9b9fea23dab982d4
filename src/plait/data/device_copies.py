"""Samples on their way to a GPU: copied from pinned memory, on a stream of their own, while the step before computes.

A copy from memory that is not pinned makes the host wait, and one on the stream that computes makes the GPU wait. So each tensor
is put into pinned memory, copied on a stream of its own, and whoever takes it has its stream wait for that copy alone. The host
asks as soon as it has read a batch. It has then queued the step before, which the GPU is still computing: nothing has to be read
earlier than it is today, and what a checkpoint says of the data is the same.

At most `AHEAD` batches lie on the device for this. A host that is farther ahead, as in an evaluation, does not wait: what it asks
for then is copied in its turn, by the stream that computes.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from plait.tensors.torch_private import tree_map_only

AHEAD = 3
"""Batches that are copied ahead of their steps, at most."""


class DeviceCopies:
    """Copies of samples on one device. On a CPU there are none: samples are used where they are."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.asked: deque[dict[int, tuple[Tensor, Tensor, Any]]] = deque(maxlen=2)
        """By the tensor of the host: it, its copy, and what tells that the copy is there; of the last two batches."""
        self.ends: deque[Any] = deque()
        """What tells that all is over that was queued before a batch was asked for; of those that are not known to be over."""

    def begin(self, trees: Iterable[object]) -> None:
        """Start copying the tensors of a batch, as they are now. They may be taken once."""
        if self.stream is None:
            return
        while self.ends and self.ends[0].query():
            self.ends.popleft()
        if len(self.ends) == AHEAD:
            return
        self.ends.append(torch.cuda.current_stream(self.device).record_event())
        copies: dict[int, tuple[Tensor, Tensor, Any]] = {}
        tree_map_only(Tensor, lambda t: self._copy(t, copies), [*trees])
        self.asked.append(copies)

    def take(self, tree: object) -> Any:
        """The tree with its tensors on the device, as far as they are of the host; what nobody asked for is copied now."""
        return tree if self.stream is None else tree_map_only(Tensor, self._taken, tree)

    def _taken(self, t: Tensor) -> Tensor:
        copies = next((copies for copies in self.asked if id(t) in copies), None)
        if copies is None:
            return _pinned(t).to(self.device, non_blocking=True) if _plain(t) else t
        _, copy, end = copies.pop(id(t))
        here = torch.cuda.current_stream(self.device)
        here.wait_event(end)
        copy.record_stream(here)  # it was allocated on the other one, which may not use the memory again before
        return copy

    def _copy(self, t: Tensor, copies: dict[int, tuple[Tensor, Tensor, Any]]) -> None:
        assert self.stream is not None
        if not _plain(t) or id(t) in copies:
            return
        pinned = _pinned(t)
        with torch.cuda.stream(self.stream):
            copies[id(t)] = t, pinned.to(self.device, non_blocking=True), self.stream.record_event()


def _plain(t: Tensor) -> bool:
    """Whether it is a plain tensor of the host; others are left to those who move them."""
    return t.device.type == "cpu" and t.layout is torch.strided and not t.requires_grad and type(t) is Tensor


def _pinned(t: Tensor) -> Tensor:
    """In pinned memory of our own: the data may write into what it gave."""
    return torch.empty_like(t, pin_memory=True).copy_(t)
