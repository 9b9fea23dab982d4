"""Several ranks on one GPU, which NCCL refuses: torch's collectives of tensors on the device, carried by gloo through the host's memory.

    with sharing(2):                          # ranks that are forked here share device 0
        verify(job, Plan.parse("dp=2"), device="cuda")

All of plait's code for devices runs, and the device's own kernels compute; NCCL's order, overlap and speed are not shown. A collective is
over when it returns. A message that is received is delivered when it is waited for, so that two ranks may both receive first.
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
"""torch's operators whose first argument is written."""
KEPT: list[Any] = []
"""The registration, and work that nobody has waited for: torch holds it by its C++ half alone."""


class Delivery(dist.Work):
    """A message that was received on the host; who waits has it on the device."""

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
    """Tensors of the device as copies on the host, also in lists."""
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
        KEPT.append(hosted)  # until the process ends: nobody says when it has left
        return own(hosted, *more)

    def receive(tensors: list[Tensor], *more: Any) -> Any:
        hosted = [torch.empty_like(t, device="cpu") for t in tensors]
        work = Delivery(dist.Work.unbox(own(hosted, *more)), hosted[0], tensors[0].detach())
        KEPT.append(work)
        return work.boxed()

    return {"send": send, "recv_": receive}.get(name, collective)


def install() -> None:
    """In this process and those that are forked from it. It touches no device."""
    if KEPT:
        return
    library = torch.library.Library("c10d", "IMPL")
    KEPT.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its kernels for CUDA are replaced
        for name in (*RECEIVES, "barrier", "send", "recv_"):
            library.impl(name, _kernel(name), "CUDA")


@contextlib.contextmanager
def sharing(ranks: int) -> Iterator[None]:
    """Ranks that are forked here use the first device together. On a CPU nothing is changed."""
    names, connect = devices.cuda_names(), place.Place.connect
    if not names:
        yield
        return
    install()
    with (
        patch.object(devices, "cuda_names", lambda: names[:1] * max(ranks, len(names))),
        patch.object(build, "of_rank", lambda where: 0),
        patch.object(place, "_backend", lambda device: "cpu:gloo,cuda:gloo"),
        patch.object(place.Place, "connect", lambda self, device, single_messages=False: connect(self, device, True)),
    ):
        yield
