"""Position of a process among the ranks, and its connection to them."""

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
from plait.launch.find_launcher import LAUNCHERS, find_membership, launcher_mismatch
from plait.launch.launchers import Membership, describe_unused_tasks
from plait.launch.loopback import LOOPBACK, LocalStore
from plait.launch.rendezvous import Rendezvous
from plait.launch.stopping import StopRequest

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store

T = TypeVar("T")
ON_CHECKPOINT: ContextVar[Callable[[Path], None]] = ContextVar("SAVED", default=lambda path: None)
"""Callback of a program that calls plait in each rank, called with each checkpoint (see `Place.saved`)."""
LAUNCHED_TIMEOUT, JOINED_TIMEOUT = timedelta(days=7), timedelta(minutes=30)
"""Timeouts of a gloo collective: under plait's launcher, which finds hung ranks, and under another launcher."""


@dataclass
class Place:
    """Rank `rank` of `world` processes. `store` opens the rendezvous store; `report` and `is_stopping` communicate with the launcher."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    store: Callable[[], "Store"] | None = None
    report: Callable[[dict[str, Any]], None] | None = None
    beat: Callable[[int, str], None] = field(default=lambda step, phase: None)
    """Called with the number of completed steps and a phase, when the phase begins or continues."""
    set_phase: Callable[[str], None] = field(default=lambda phase: None)
    """Called with a phase; the step is the last one reported."""
    mark_read: Callable[[], None] = field(default=lambda: None)
    """Called before each sample is read, also in loader processes."""
    is_stopping: Callable[[], bool] = field(default=lambda: False)
    allow_leaving: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)
    """Context of work that may be abandoned between two steps: raises `StopRequested` there on the launcher's request."""
    joined: bool = False
    """Started by another launcher (torchrun, ...)."""
    unsaid: bool = False
    """That launcher did not set the local rank; `local_rank` is 0 as a default."""
    is_one_per_node: bool = False
    """That launcher started one process per node, as if a node were a device."""
    saved: Callable[[Path], None] = field(default=lambda path: None)
    """Called when a checkpoint is published, on all ranks in the same step."""
    meet: Callable[[], object] = field(default=lambda: None)
    """Connects to the other ranks, or raises at once if they cannot be reached; otherwise `connect` does so later."""
    is_guest: bool = False
    """The process group existed before; its creator destroys it."""
    _group_pair: "tuple[ProcessGroup, ProcessGroup] | None" = None
    """An existing process group, and the group that is used."""

    def iterate_samples(self, samples: Iterable[T]) -> Iterator[T]:
        """Yield the samples. Raises `StopRequested` if the launcher requests this rank to stop waiting for them."""
        source, end = iter(samples), object()
        while True:
            with self.allow_leaving():
                found = next(source, end)
            if found is end:
                return
            yield found  # pyrefly: ignore

    def connect(self, device: "torch.device", single_messages: bool = False) -> "ProcessGroup | None":
        """Return the process group of all ranks, or None for one process. An existing group of the user is used.

        `single_messages`: ranks send to each other outside of batches, as pipeline stages do (see `launch/nccl.py`).
        """
        import torch.distributed as dist

        from plait.launch import groups

        world = dist.group.WORLD if dist.is_initialized() else None
        if world is not None:
            if self._group_pair is None or self._group_pair[0] is not world:
                self._group_pair, self.is_guest = (world, groups.get_world_group()), True
            return self._group_pair[1]
        if self.world == 1 and not self.joined:
            return None
        self.meet()
        store, bound = self.store() if self.store is not None else None, None
        if device.type != "cpu":
            nccl.set_nccl_defaults()
            bound = None if single_messages else device
        dist.init_process_group(
            _pick_backend(device),
            store=store,
            rank=self.rank,
            world_size=self.world,
            timeout=self.collective_timeout(device, False),
            device_id=bound,
        )
        return self._adopt_group()

    def collective_timeout(self, device: "torch.device", going: bool) -> timedelta:
        """Return the timeout of a collective; `going`: the first step is over."""
        if device.type == "cpu":
            return JOINED_TIMEOUT if self.joined else LAUNCHED_TIMEOUT
        return (nccl.JOINED_TIMEOUTS if self.joined else nccl.LAUNCHED_TIMEOUTS)[going]

    def set_timeouts(self, device: "torch.device", going: bool) -> None:
        """Set the timeout of the collectives of all groups; groups that the user made keep theirs."""
        import torch.distributed as dist

        from plait.tensors.torch_private import set_group_timeout

        if dist.is_initialized() and not self.is_guest:
            set_group_timeout(self.collective_timeout(device, going))

    def make_single_group(self, device: "torch.device") -> None:
        """Make a group of this process if none exists, since sharding of parameters needs one."""
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group(_pick_backend(device), store=dist.HashStore(), rank=0, world_size=1)
            self.joined = True  # the engine leaves it
            self._adopt_group()

    def _adopt_group(self) -> "ProcessGroup":
        import torch.distributed as dist

        world = dist.group.WORLD
        assert world is not None
        self._group_pair, self.is_guest = (world, world), False
        return world


def make_local_place(place: Place, rank: int, world: int, store: LocalStore | None) -> Place:
    """Return the place of a process in a group on this node. `store`: the group's store; None for one process."""
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    return replace(place, rank=rank, world=world, store=store.open if store is not None else None)


PLACE_WRAPPER: ContextVar[Callable[[Place], Place]] = ContextVar("AROUND", default=lambda place: place)
"""Wraps the `Place` of a rank that this process forks; `plait chaos` injects faults there."""


def _pick_backend(device: "torch.device") -> str:
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def find_place() -> Place:
    """Return the place that another launcher gave this process, else that of a single process.

    SIGTERM and SIGUSR1 request a joined run to stop.
    """
    member = find_rank_membership()
    if member is None:
        return Place()
    flag = StopRequest.get_current(waits=True)
    flag.install_handlers()
    if threading.current_thread() is threading.main_thread() and member.master is not None and member.has_agent_store:
        die_with_parent(signal.SIGTERM)  # torchrun's ranks survive its death: they save, and end
    rank, local = member.index, member.local_rank
    beat = lambda step, phase: flag.mark_begun(step)  # noqa: E731
    if member.has_agent_store:
        words = {"saved": ON_CHECKPOINT.get(), "joined": True, "unsaid": local is None, "beat": beat}
        place = Place(rank, member.count, local or 0, is_stopping=flag.is_set, **words)
        place.meet = lambda: attempts.choose_interface(member)
        if attempts.has_shared_store(member):
            place.meet = epoch = functools.cache(lambda: attempts.join_epoch(member, flag.is_set))
            place.store = lambda: attempts.open_attempt_store(member, epoch())
        return place

    def meeting() -> Rendezvous:
        return _meet_once(member)

    return Place(
        rank, member.count, local or 0, lambda: meeting().connect_store(), beat=beat, is_stopping=flag.is_set, joined=True,
        unsaid=local is None and member.count > 1, is_one_per_node=member.local_count == 1 < member.count, meet=meeting,
    )  # fmt: skip


@functools.cache
def _meet_once(member: Membership) -> Rendezvous:
    """Cached, because process 0 opens one gate only."""
    return rendezvous.join_rendezvous(member, rendezvous.print_note)


def find_rank_membership() -> Membership | None:
    """Return the membership of a process that another launcher started as a rank."""
    member = find_membership()
    return member if member is not None and member.member_kind == "ranks" else None


def find_node_membership() -> Membership | None:
    """Return the membership of a process that was started as the only one on its node."""
    member = find_membership()
    return member if member is not None and member.member_kind == "nodes" else None


def note_unused_allocation() -> list[str]:
    """Return a note for a single process in a Slurm allocation of several."""
    line = describe_unused_tasks(os.environ) if find_membership() is None else None
    return [line] if line else []


def is_launched_rank() -> bool:
    """Whether another launcher started this process as a rank."""
    return find_rank_membership() is not None


def count_ranks(nproc: int | None = None) -> int | None:
    """Return the number of ranks that another launcher started, or of `nproc` per node; None if unknown. Raises L005 if they contradict."""
    member = find_membership()
    if member is None:
        return nproc
    if member.member_kind == "ranks":
        if nproc is not None and nproc not in (member.count, member.local_count):
            raise PlaitError(launcher_mismatch(member, f"--nproc {nproc}", ("leave --nproc out    if the launcher is right",)))
        return member.count
    each = nproc or member.local_count
    return member.count * each if each else None


def set_rank_variables(rank: int | None, world: int) -> None:
    """Set the launcher's rank variables as for this rank of `world` on one node; with None, delete them.

    For plait's own processes that run the job's code before ranks do, since a job may read its rank.
    """
    member = find_rank_membership()
    if member is None or member.launcher not in LAUNCHERS:
        return
    launcher = LAUNCHERS[member.launcher]
    names = (launcher.index, *launcher.count, *launcher.local_rank, *launcher.local_count, *launcher.nodes)
    for name in names:
        os.environ.pop(name, None)
    if rank is not None:
        os.environ |= dict.fromkeys((launcher.index, *launcher.local_rank[:1]), str(rank))
        os.environ |= dict.fromkeys((launcher.count[0], *launcher.local_count[:1]), str(world))


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_threads(world: int) -> int:
    """Return the number of threads for each of `world` processes on this node: OMP_NUM_THREADS, else an equal part of the cores."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdecimal() and int(said) else max(1, count_cores() // world)


def fix_threads(count: int) -> None:
    """Give every rank forked from here this many threads, however many ranks a node has; sums depend on the number of threads."""
    os.environ["OMP_NUM_THREADS"] = str(count)


def collect_environment() -> dict[str, str]:
    """Return the environment variables to record with a run, without values whose names suggest a secret."""
    wanted = (
        "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "MASTER_ADDR",
        "PYTHONHASHSEED", "NO_COLOR", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    )  # fmt: skip
    libraries = (name for name in os.environ if name.startswith(("NCCL_", "TORCH_NCCL_", "TORCH_FR_")))
    return {name: os.environ[name] for name in (*wanted, *sorted(libraries)) if name in os.environ}
