"""Runs several ranks on one GPU, which NCCL rejects: gloo transfers torch's collectives of device tensors through the host's memory.

    with sharing(2):                          # ranks that are forked here use device 0
        verify(job, Plan.parse("dp=2"), device="cuda")

All of plait's code for devices runs, with the device's own kernels. NCCL's order, overlap and speed are not tested. A collective
is complete when it returns. A received message is copied to the device in wait(), so that two ranks may both receive first.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from plait.engine import build
from plait.launch import devices, place

RECEIVES = (
    "broadcast_", "allreduce_", "allreduce_coalesced_", "reduce_", "allgather_", "_allgather_base_", "allgather_coalesced_",
    "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_",
    "alltoall_base_", "gather_", "scatter_",
)  # fmt: skip
"""torch's operators that write their first argument."""
KEPT: list[Any] = []
"""The registration, and work without a wait; torch keeps only its C++ half alive."""


class Delivery(dist.Work):
    """A message that was received on the host; wait() copies it to the device."""

    def __init__(self, work: Any, arrived: Tensor, target: Tensor):
        super().__init__()
        self.work, self.arrived, self.target = work, arrived, target

    def wait(self, *timeout: Any) -> bool:
        if self in KEPT:
            self.work.wait()
            self.target.copy_(self.arrived)
            KEPT.remove(self)
        return True

    def is_completed(self) -> bool:
        return self.work.is_completed() and self.wait()


def _hosted(value: Any) -> Any:
    """Copy tensors of the device to the host, also in lists."""
    if isinstance(value, Tensor):
        return value.detach().cpu() if value.is_cuda else value
    return [_hosted(each) for each in value] if isinstance(value, list | tuple) else value


def _returned(target: Any, made: Any) -> None:
    if isinstance(target, Tensor):
        target.detach().copy_(made)
    else:
        for one, other in zip(target, made):
            _returned(one, other)


def _kernel(name: str) -> Callable[..., Any]:
    own = getattr(torch.ops.c10d, name)

    def collective(*args: Any) -> Any:
        hosted = [_hosted(each) for each in args]
        found = own(*hosted)
        work = found[-1] if isinstance(found, tuple) else found
        dist.Work.unbox(work).wait()
        if name in RECEIVES:
            _returned(args[0], hosted[0])
        return (args[0], *found[1:]) if isinstance(found, tuple) else found

    def send(tensors: list[Tensor], *more: Any) -> Any:
        hosted = _hosted(tensors)
        KEPT.append(hosted)  # until the process ends, because no call marks the end of its use
        return own(hosted, *more)

    def receive(tensors: list[Tensor], *more: Any) -> Any:
        hosted = [torch.empty_like(t, device="cpu") for t in tensors]
        work = Delivery(dist.Work.unbox(own(hosted, *more)), hosted[0], tensors[0].detach())
        KEPT.append(work)
        return work.boxed()

    return {"send": send, "recv_": receive}.get(name, collective)


def install() -> None:
    """Install the collectives in this process and in those forked from it, without any use of a device."""
    if KEPT:
        return
    library = torch.library.Library("c10d", "IMPL")
    KEPT.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its kernels for CUDA are replaced
        for name in (*RECEIVES, "barrier", "send", "recv_"):
            library.impl(name, _kernel(name), "CUDA")


@contextlib.contextmanager
def sharing(ranks: int) -> Iterator[None]:
    """Let ranks that are forked here use the first device together. On a CPU this has no effect."""
    names, connect = devices.list_cuda_devices(), place.Place.connect
    if not names:
        yield
        return
    install()
    with (
        patch.object(devices, "list_cuda_devices", lambda: names[:1] * max(ranks, len(names))),
        patch.object(build, "find_rank_device", lambda where: 0),
        patch.object(place, "_pick_backend", lambda device: "cpu:gloo,cuda:gloo"),
        patch.object(place.Place, "connect", lambda self, device, single_messages=False: connect(self, device, True)),
    ):
        yield
