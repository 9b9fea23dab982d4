"""CPU time, disk and network use of a process and its children.

A process that uses none of them waits or sleeps, unless other processes occupy all CPU cores.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import psutil

BUSY_CPU_SHARE = 0.03
"""Fraction of a core above which a process counts as busy. A process that waits in torch, gloo or a loader's queue stays below."""
STARVED_SHARE = 0.5
"""Fraction of the time above which a process counts as waiting for a core. A process that only wakes up to poll stays below."""
BUSY_BYTES_PER_S = 64 * 1024.0
"""Bytes per second above which a process counts as reading, writing, downloading or uploading."""
DISK_WAIT_SHARE = 0.1
"""Fraction of the measurements above which a process counts as waiting for its disk."""


@dataclass(frozen=True)
class Activity:
    """Resources that a process tree has used up to a point in time."""

    measured_at: float
    cpu_seconds: float
    io_bytes: float
    """Read and written, through files and pipes."""
    network_bytes: float
    """Bytes over the network (without loopback) while the tree is connected to another machine; otherwise 0."""
    waits_for_disk: bool
    """A thread is in an uninterruptible system call, as during a read from a slow disk."""
    cpu_wait_seconds: float = 0.0
    """Seconds in which main threads were runnable but had no core (Linux). The kernel adds them when the thread runs again."""
    is_ready: bool = False
    """A main thread runs, or is runnable."""

    def is_busy_since(self, before: "Activity") -> bool:
        """Whether the tree did any work between two measurements."""
        took = max(self.measured_at - before.measured_at, 1e-3)
        moved = max(self.io_bytes - before.io_bytes, self.network_bytes - before.network_bytes if before.network_bytes else 0.0)
        works = (self.cpu_seconds - before.cpu_seconds) / took > BUSY_CPU_SHARE or (
            self.cpu_wait_seconds - before.cpu_wait_seconds
        ) / took > STARVED_SHARE
        starves = self.is_ready and before.is_ready and self.cpu_seconds == before.cpu_seconds  # it got no core at all
        return self.waits_for_disk or works or starves or moved / took > BUSY_BYTES_PER_S


class ActivityHistory:
    """Activity of a process tree since its last progress.

    Rates are means. So a background thread that wakes up for a moment does not turn a sleeping process into a busy one.
    """

    def __init__(self, silent_since: float) -> None:
        """`silent_since`: time of the last progress (`time.monotonic`)."""
        self.silent_since = silent_since
        self.measurements: list[Activity] = []

    @property
    def is_busy(self) -> bool:
        """Whether the tree worked between the last two measurements. One measurement shows no rate, so the answer is True."""
        return len(self.measurements) < 2 or self.measurements[-1].is_busy_since(self.measurements[-2])

    @property
    def cpu_seconds(self) -> float:
        """CPU time between the first and the last measurement."""
        return self.measurements[-1].cpu_seconds - self.measurements[0].cpu_seconds

    @property
    def idle_seconds(self) -> float:
        """Seconds before the last measurement during which the tree was idle on average; 0 if it is busy."""
        if self.is_busy:
            return 0.0
        *earlier, last = self.measurements
        disk_waits = sum(one.waits_for_disk for one in earlier)
        for number, first in enumerate(earlier):
            if not last.is_busy_since(first) and disk_waits <= DISK_WAIT_SHARE * (len(earlier) - number):
                return last.measured_at - (first.measured_at if number else self.silent_since)
            disk_waits -= first.waits_for_disk
        return 0.0


def read_activity(pid: int) -> Activity:
    """Measure the resources that a process and its children have used so far. All zeros after it has ended."""
    seconds = moved = delayed = 0.0
    disk = remote = ready = False
    for process in _list_process_tree(pid):
        try:
            times = process.cpu_times()
            seconds += times.user + times.system
            delayed += _read_cpu_delay(process.pid)
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


def _read_cpu_delay(pid: int) -> float:
    """Seconds in which the main thread of a process waited for a core; 0 if the kernel does not report it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _list_process_tree(pid: int) -> list[psutil.Process]:
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.Error:
        return []


def is_stopped(pid: int) -> bool:
    """Whether a process is in the stopped state (SIGSTOP, a debugger)."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
