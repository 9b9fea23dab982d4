"""What the operating system must grant a run on this machine: open files, processes, the loopback interface.

What can be known is found out before a process is started; what a rank meets later is told by the same functions.

Open files of a process: the standard streams that its starter closed, and those that a fork shares.

Daemons and cron start programs with standard streams closed: the next file that is opened then gets the number of one, and what is printed
goes into it. So closed ones are opened on /dev/null first.

A fork copies descriptors, and copies of a descriptor share one offset. If ranks or loader processes seek in a file that was opened
before the fork, one process moves the offset of all others, and samples are wrong.
"""

import contextlib
import errno
import fcntl
import os
import resource
import socket
import stat
import sys
from collections.abc import Iterator

from plait.config.errors import FAILED, PlaitError, Problem

FILES_WANTED = 4096
"""A soft limit of open files below this is raised, as far as the hard limit allows: loader processes pass tensors as files."""
CONNECT = 2.0
"""Seconds a connection of this machine with itself may take."""


def check(ranks: int, loopback: bool) -> None:
    """H006, H016 when the launcher of so many ranks cannot run here; H007 when they meet on `loopback`, which does not answer."""
    _check_proc()
    _check_files(ranks)
    if loopback:
        listening().close()


def _check_files(ranks: int) -> None:
    """H006 when the launcher of so many ranks could not open what it needs. Raises the soft limit where it is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES_WANTED:
        wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    needed = 3 * ranks + 14  # two pipes and a connection for each, and the rendezvous store's own
    opened: list[int] = []
    try:
        opened += (os.dup(0) for _ in range(needed))
    except OSError as error:
        problem = too_many_files(f"the launcher of {ranks} processes opens {needed} more", "")
        raise PlaitError(problem, FAILED) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _check_proc() -> None:
    """H016 on Linux where /proc is missing, or is that of other processes: memory, hangs and connections are read there."""
    if sys.platform != "linux":
        return
    found = ""
    with contextlib.suppress(OSError):
        found = os.readlink("/proc/self")
    if found != f"{os.getpid()}":
        why = f"/proc/self is process {found}, and this one is {os.getpid()}" if found else "there is no /proc/self"
        problem = Problem("H016", "/proc does not show this process", why=why, fix=("mount -t proc proc /proc    (as root)",))
        raise PlaitError(problem, FAILED)


def too_many_files(why: str, where: str) -> Problem:
    """H006, of open files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    fix = ("ulimit -n 4096    (in a container: --ulimit nofile=4096)", "fewer --workers")
    return Problem("H006", f"too many open files: a process may have {limit}", why=why, where=where, fix=fix)


def refused(error: OSError) -> Problem | None:
    """H006 when an error of the operating system says that one of its limits is reached; R006 when nothing temporary can be written."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return too_many_files(str(error), "")
    if "No usable temporary directory" in str(error):  # Python's own words
        fix = ("export TMPDIR=/a/folder/with/room", "ulimit -f    how much a file may have")
        return Problem("R006", "no folder for temporary files can be written", why=str(error), fix=fix)
    return None


def too_many_processes(what: str, why: str, fewer: tuple[str, ...], where: str = "") -> Problem:
    """H006, of processes and threads."""
    count = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limit = f"; ulimit -u is {count}" if count != resource.RLIM_INFINITY else ""
    fix = ("ulimit -u    (in a container: --pids-limit)", *fewer)
    return Problem("H006", f"the system starts no more processes: {what}", why=f"{why}{limit}", where=where, fix=fix)


@contextlib.contextmanager
def forking(what: str, fewer: str = "") -> Iterator[None]:
    """H006 when the system has no room for another process: `what` it is. `fewer`: an option that asks for fewer."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.ENOMEM):
            raise
        problem = too_many_processes(f"{what} could not be started", error.strerror or "", (fewer,) if fewer else ())
        raise PlaitError(problem, FAILED) from error


def listening() -> socket.socket:
    """A socket that only this machine reaches. H007 when the machine does not reach itself."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(256)
    try:
        with socket.create_connection(listening.getsockname(), CONNECT):
            listening.accept()[0].close()
    except OSError as error:
        listening.close()
        what = "processes on this machine cannot reach each other: 127.0.0.1 does not answer"
        fix = ("ip link set lo up    (as root; the loopback interface is down)", "ip addr show lo")
        raise PlaitError(Problem("H007", what, why=str(error), fix=fix), FAILED) from error
    return listening


def no_shared_memory(what: str, why: str, where: str) -> Problem:
    """H008, with the room there is."""
    with contextlib.suppress(OSError):
        room = os.statvfs("/dev/shm")
        free, size = room.f_bavail * room.f_frsize / 2**20, room.f_blocks * room.f_frsize / 2**20
        told = f"/dev/shm has {free:.1f} of {size:.1f} MiB free, and loader processes hand batches over through it"
        why = f"{told}\n{why}"
    fix = (
        "--workers 0, or fewer",
        "docker run --shm-size 8g    mount -o remount,size=8G /dev/shm",
        "delete what fills /dev/shm",
    )
    return Problem("H008", what, why=why, where=where, fix=fix)


STANDARD = 2
"""Descriptors up to this one are standard streams, which processes share on purpose."""
_KEPT = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | os.O_SYNC


def open_standard() -> None:
    """Open standard streams that are closed."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (STANDARD, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def own_offsets() -> None:
    """Open every inherited file that can be read once more, in this process, at the same offset. Linux only.

    A file that is open for writing alone stays shared: what several processes write to it follows each other, as in a log.
    """
    with contextlib.suppress(OSError):  # there is no /proc
        for name in os.listdir("/proc/self/fd"):
            if (number := int(name)) > STANDARD:
                with contextlib.suppress(OSError):  # it is closed, or may not be opened any more
                    _reopen(number)


def _reopen(number: int) -> None:
    flags = fcntl.fcntl(number, fcntl.F_GETFL)
    if not stat.S_ISREG(os.fstat(number).st_mode) or flags & os.O_ACCMODE == os.O_WRONLY:
        return
    offset, inherited = os.lseek(number, 0, os.SEEK_CUR), os.get_inheritable(number)
    fresh = os.open(f"/proc/self/fd/{number}", flags & _KEPT | os.O_CLOEXEC)
    try:
        os.lseek(fresh, offset, os.SEEK_SET)
        os.dup2(fresh, number, inheritable=inherited)
    finally:
        os.close(fresh)
