"""Where a process stands among the others, and how it connects to them."""

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from plait.config.errors import PlaitError
from plait.launch import attempts, nccl, rendezvous
from plait.launch.child import die_with_parent
from plait.launch.find_launcher import LAUNCHERS, find, mismatch
from plait.launch.launchers import Membership, unused
from plait.launch.loopback import LOOPBACK, LocalStore
from plait.launch.rendezvous import Meeting
from plait.launch.stopping import StopRequest

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store

T = TypeVar("T")
SAVED: ContextVar[Callable[[Path], None]] = ContextVar("SAVED", default=lambda path: None)
"""What a program that calls plait in each rank wants to be told of checkpoints (see `Place.saved`)."""
WATCHED, JOINED = timedelta(days=7), timedelta(minutes=30)
"""How long a collective of gloo may wait: beside plait's launcher, which finds a rank that hangs; and under another launcher."""


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
    leaving: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)
    """Around what can be left between two steps: raises `Stopped` there, where the launcher asks for it."""
    joined: bool = False
    """Started by another launcher (torchrun, ...)."""
    unsaid: bool = False
    """That launcher did not say which process of its machine this is: `local_rank` is 0 for want of it."""
    only: bool = False
    """That launcher started one process on each machine, as if a machine were a device."""
    saved: Callable[[Path], None] = field(default=lambda path: None)
    """Called when a checkpoint is published, on all ranks in the same step."""
    meet: Callable[[], object] = field(default=lambda: None)
    """Finds the other ranks, or says at once why they cannot be reached; `connect` does it too, later."""
    guest: bool = False
    """The process group was there before: who made it leaves it."""
    _beside: "tuple[ProcessGroup, ProcessGroup] | None" = None
    """A group that was there already, and the one that is used."""

    def waiting_for(self, samples: Iterable[T]) -> Iterator[T]:
        """The same samples. `Stopped` instead of those that the launcher asks this rank to wait for no longer."""
        source, end = iter(samples), object()
        while True:
            with self.leaving():
                found = next(source, end)
            if found is end:
                return
            yield found  # pyrefly: ignore

    def connect(self, device: "torch.device", single_messages: bool = False) -> "ProcessGroup | None":
        """The process group of all ranks, or None when there is one process. Uses a group the user already made.

        `single_messages`: ranks send to each other outside of batches, as the stages of a pipeline do (see `launch/nccl.py`).
        """
        import torch.distributed as dist

        from plait.launch import groups

        world = dist.group.WORLD if dist.is_initialized() else None
        if world is not None:
            if self._beside is None or self._beside[0] is not world:
                self._beside, self.guest = (world, groups.of_all()), True
            return self._beside[1]
        if self.world == 1 and not self.joined:
            return None
        self.meet()
        store, bound = self.store() if self.store is not None else None, None
        if device.type != "cpu":
            nccl.settle()
            bound = None if single_messages else device
        dist.init_process_group(
            _backend(device),
            store=store,
            rank=self.rank,
            world_size=self.world,
            timeout=self.patience(device, False),
            device_id=bound,
        )
        return self._made()

    def patience(self, device: "torch.device", going: bool) -> timedelta:
        """How long a collective may wait; `going`: the first step is over."""
        if device.type == "cpu":
            return JOINED if self.joined else WATCHED
        return (nccl.JOINED if self.joined else nccl.WATCHED)[going]

    def wait(self, device: "torch.device", going: bool) -> None:
        """Let the collectives of all groups that there are wait so long: of groups that somebody else made, as long as these say."""
        import torch.distributed as dist

        from plait.tensors.torch_private import let_wait

        if dist.is_initialized() and not self.guest:
            let_wait(self.patience(device, going))

    def alone(self, device: "torch.device") -> None:
        """A group of this process only, where there is none: what shards parameters wants one."""
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)
            self.joined = True  # the engine leaves it
            self._made()

    def _made(self) -> "ProcessGroup":
        import torch.distributed as dist

        world = dist.group.WORLD
        assert world is not None
        self._beside, self.guest = (world, world), False
        return world


def among(place: Place, rank: int, world: int, store: LocalStore | None) -> Place:
    """The place of a process among some ranks of this machine alone; `store`: theirs, where there are several."""
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    return replace(place, rank=rank, world=world, store=store.open if store is not None else None)


AROUND: ContextVar[Callable[[Place], Place]] = ContextVar("AROUND", default=lambda place: place)
"""What stands between a rank that this process forks and its place; `plait chaos` disturbs ranks there."""


def _backend(device: "torch.device") -> str:
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def current() -> Place:
    """The place that another launcher gave this process, or alone. SIGTERM and SIGUSR1 ask a joined run to stop."""
    member = joined()
    if member is None:
        return Place()
    flag = StopRequest.of_process(waits=True)
    flag.listen()
    if threading.current_thread() is threading.main_thread() and member.master is not None and member.agent:
        die_with_parent(signal.SIGTERM)  # torchrun leaves its ranks behind when it is killed: they save, and end
    rank, local = member.index, member.local_rank
    beat = lambda step, phase: flag.begun(step)  # noqa: E731
    if member.agent:
        words = {"saved": SAVED.get(), "joined": True, "unsaid": local is None, "beat": beat}
        place = Place(rank, member.count, local or 0, stopping=flag.is_set, **words)
        place.meet = lambda: attempts.choose_interface(member)
        if attempts.shared(member):
            place.meet = epoch = functools.cache(lambda: attempts.epoch_of(member, flag.is_set))
            place.store = lambda: attempts.store_of(member, epoch())
        return place

    def meeting() -> Meeting:
        return _meeting(member)

    return Place(
        rank, member.count, local or 0, lambda: meeting().store(), beat=beat, stopping=flag.is_set, joined=True,
        unsaid=local is None and member.count > 1, only=member.local_count == 1 < member.count, meet=meeting,
    )  # fmt: skip


@functools.cache
def _meeting(member: Membership) -> Meeting:
    """Once in a process: number 0 opens one gate."""
    return rendezvous.meet(member, rendezvous.say_on_terminal)


def joined() -> Membership | None:
    """Of a process that another launcher started as a rank."""
    member = find()
    return member if member is not None and member.of == "ranks" else None


def on_nodes() -> Membership | None:
    """Of a process that was started as the only one on each of several machines."""
    member = find()
    return member if member is not None and member.of == "nodes" else None


def unused_allocation() -> list[str]:
    """A line for a process that is alone where Slurm gave several."""
    line = unused(os.environ) if find() is None else None
    return [line] if line else []


def joining() -> bool:
    """Whether another launcher started this process as a rank."""
    return joined() is not None


def world(nproc: int | None = None) -> int | None:
    """Ranks of a run, as far as they are counted: by another launcher, or as `nproc` on each machine. L005 if both contradict."""
    member = find()
    if member is None:
        return nproc
    if member.of == "ranks":
        if nproc is not None and nproc not in (member.count, member.local_count):
            raise PlaitError(mismatch(member, f"--nproc {nproc}", ("leave --nproc out    if the launcher is right",)))
        return member.count
    each = nproc or member.local_count
    return member.count * each if each else None


def pose(rank: int | None, world: int) -> None:
    """Where a launcher set which rank this is: set it as for this rank of `world` on one machine, or, for a process alone, not at all.

    For processes of plait's own that do beforehand what ranks will do; a job may ask who it is.
    """
    member = joined()
    if member is None or member.launcher not in LAUNCHERS:
        return
    launcher = LAUNCHERS[member.launcher]
    names = (launcher.index, *launcher.count, *launcher.local_rank, *launcher.local_count, *launcher.nodes)
    for name in names:
        os.environ.pop(name, None)
    if rank is not None:
        os.environ |= dict.fromkeys((launcher.index, *launcher.local_rank[:1]), str(rank))
        os.environ |= dict.fromkeys((launcher.count[0], *launcher.local_count[:1]), str(world))


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(world: int) -> int:
    """Threads for each of `world` processes on this machine: what OMP_NUM_THREADS says, else its share of the cores."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdecimal() and int(said) else max(1, cores() // world)


def fix_threads(count: int) -> None:
    """Have every rank that is forked from here use so many threads, however many are on a machine: sums are as threads share them."""
    os.environ["OMP_NUM_THREADS"] = str(count)


def facts() -> dict[str, str]:
    """The environment variables worth keeping with a run: never a value whose name looks like a secret."""
    wanted = (
        "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "MASTER_ADDR",
        "PYTHONHASHSEED", "NO_COLOR", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    )  # fmt: skip
    libraries = (name for name in os.environ if name.startswith(("NCCL_", "TORCH_NCCL_", "TORCH_FR_")))
    return {name: os.environ[name] for name in (*wanted, *sorted(libraries)) if name in os.environ}
