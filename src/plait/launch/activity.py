"""What a process and its children use: processor time, disk, network. A process that uses none of them waits or sleeps, unless others have
all processors."""

import time
from dataclasses import dataclass
from pathlib import Path

import psutil

CORE = 0.03
"""Share of a core above which a process is at work; what waits in torch, gloo or a loader's queue stays below."""
STARVED = 0.5
"""Share of the time above which a process waits for a processor that others use; what wakes up now and then to look stays below."""
BYTES = 64 * 1024.0
"""Bytes a second above which a process reads, writes, downloads or uploads."""


@dataclass(frozen=True)
class Activity:
    """What a process tree has used up to a moment."""

    at: float
    seconds: float
    """Of processor time."""
    bytes: float
    """Read and written, by files and pipes."""
    network: float
    """Bytes over the network (not loopback) while the tree is connected to another machine; 0 when it is not."""
    waits_for_disk: bool
    """A thread of it is in a system call that cannot be interrupted, which is what a read of a slow disk looks like."""
    delayed: float = 0.0
    """Seconds in which main threads could have computed, and had no processor (Linux). The kernel counts them when a thread gets one again."""
    is_ready: bool = False
    """A main thread computes, or could."""

    def busy_since(self, before: "Activity") -> bool:
        """Whether the tree did anything between two looks."""
        took = max(self.at - before.at, 1e-3)
        moved = max(self.bytes - before.bytes, self.network - before.network if before.network else 0.0)
        works = (self.seconds - before.seconds) / took > CORE or (self.delayed - before.delayed) / took > STARVED
        starves = self.is_ready and before.is_ready and self.seconds == before.seconds  # it got no processor at all
        return self.waits_for_disk or works or starves or moved / took > BYTES


def activity(pid: int) -> Activity:
    """What a process and its children have used so far. All zeros when it has ended."""
    seconds = moved = delayed = 0.0
    disk = remote = ready = False
    for process in _tree(pid):
        try:
            times = process.cpu_times()
            seconds += times.user + times.system
            delayed += _delay(process.pid)
            status = process.status()
            disk |= status == psutil.STATUS_DISK_SLEEP
            ready |= status == psutil.STATUS_RUNNING
            open_ = [c for c in process.net_connections(kind="inet") if c.status == psutil.CONN_ESTABLISHED]
            remote |= any(c.raddr and not c.raddr.ip.startswith(("127.", "::1")) for c in open_)
            io = process.io_counters()
            moved += io.read_bytes + io.write_bytes + getattr(io, "read_chars", 0) + getattr(io, "write_chars", 0)
        except (psutil.Error, AttributeError, OSError):
            continue
    cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    network = sum(card.bytes_recv + card.bytes_sent for card in cards)
    return Activity(time.monotonic(), seconds, moved, float(network) if remote else 0.0, disk, delayed, ready)


def _delay(pid: int) -> float:
    """Seconds in which the main thread of a process waited for a processor; 0 where the kernel does not tell."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _tree(pid: int) -> list[psutil.Process]:
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.Error:
        return []


def stopped(pid: int) -> bool:
    """Whether a process is in the stopped state (SIGSTOP, a debugger)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
