"""Where a process stands among the others, and how it connects to them. The only file group that reads the environment."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from plait.launch import started_by

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store

WATCHED, JOINED = timedelta(days=7), timedelta(minutes=30)
"""How long a collective may wait: beside plait's launcher, which finds a rank that hangs; and under another launcher."""


@dataclass
class Place:
    """Rank `rank` of `world` processes. `store` makes the rendezvous store; `report` and `stop` talk to the launcher."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    store: Callable[[], "Store"] | None = None
    report: Callable[[dict[str, Any]], None] | None = None
    beat: Callable[[int, str], None] = field(default=lambda step, phase: None)
    """Called with the steps that are done and a phase: it begins, or goes on."""
    within: Callable[[str], None] = field(default=lambda phase: None)
    """The same at the step that was said last."""
    reads: Callable[[], None] = field(default=lambda: None)
    """Called before each sample is read, also in loader processes."""
    stopping: Callable[[], bool] = field(default=lambda: False)
    joined: bool = False
    """Started by another launcher (torchrun, ...)."""
    unsaid: bool = False
    """That launcher did not say which process of its machine this is: `local_rank` is 0 for want of it."""

    def connect(self, device: "torch.device") -> "ProcessGroup | None":
        """The process group of all ranks, or None when there is one process. Uses a group the user already made."""
        import torch.distributed as dist

        if dist.is_initialized():
            return dist.group.WORLD
        if self.world == 1 and not self.joined:
            return None
        store, patience = (self.store(), WATCHED) if self.store is not None else (None, JOINED)
        dist.init_process_group(_backend(device), store=store, rank=self.rank, world_size=self.world, timeout=patience)
        return dist.group.WORLD

    def alone(self, device: "torch.device") -> None:
        """A group of this process only, where there is none: what shards parameters wants one."""
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)
            self.joined = True  # the engine leaves it


def _backend(device: "torch.device") -> str:
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def current() -> Place:
    """The place another launcher gave this process (RANK set), or alone. SIGTERM asks a joined run to stop."""
    if not joining():
        started_by.check()
        return Place()
    rank, world, local = started_by.joined_as()
    flag = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: flag.set())
    return Place(rank, world, local or 0, stopping=flag.is_set, joined=True, unsaid=local is None)


def pose(rank: int | None, world: int) -> None:
    """Where a launcher set which rank this is: set it as for this rank of `world` on one machine, or, for a process alone, not at all.

    For processes of plait's own that do beforehand what ranks will do; a job may ask who it is.
    """
    launcher = started_by.joined()
    if launcher is None:
        return
    ranks, sizes = (launcher.rank, "LOCAL_RANK"), (launcher.size[0], "LOCAL_WORLD_SIZE")
    for name in (*ranks, *sizes):
        os.environ.pop(name, None)
    if rank is not None:
        os.environ |= dict.fromkeys(ranks, str(rank)) | dict.fromkeys(sizes, str(world))


def joining() -> bool:
    """Whether another launcher started this process."""
    return started_by.joined() is not None


def world() -> int:
    """Processes another launcher started."""
    return started_by.joined_as()[1] if joining() else 1


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(world: int) -> int:
    """Threads for each of `world` processes on this machine: what OMP_NUM_THREADS says, else its share of the cores."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdecimal() and int(said) else max(1, cores() // world)


def facts() -> dict[str, str]:
    """The environment variables worth keeping with a run: never a value whose name looks like a secret."""
    wanted = (
        "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "MASTER_ADDR", "PYTHONHASHSEED", "NO_COLOR",
    )  # fmt: skip
    return {name: os.environ[name] for name in wanted if name in os.environ}
