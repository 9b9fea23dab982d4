"""Operating system limits that a run needs on this machine: open files, processes, the loopback interface.

Known limits are checked before a process starts. Errors that a rank meets later are described by the same functions.

Open files of a process are its standard streams, which may be closed, and files that a fork shares.

Daemons and cron start programs with closed standard streams. The next file that is opened then gets a stream's number, and printed text
goes into it. So closed streams are first opened on /dev/null.

A fork duplicates descriptors, and duplicates share one file offset. If ranks or loader processes seek in a file that was opened before the
fork, they move each other's offsets, and samples are wrong.
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

MIN_OPEN_FILES = 4096
"""Soft limit of open files below which it is raised, up to the hard limit; loader processes pass tensors as files."""
CONNECT_TIMEOUT = 2.0
"""Timeout in seconds for a connection of this machine to itself."""


def check_limits(ranks: int, loopback: bool) -> None:
    """Raise H006 or H016 if a launcher of this many ranks cannot run here, H007 if the ranks need `loopback` and it does not answer."""
    _check_proc()
    _check_files(ranks)
    if loopback:
        open_loopback_socket().close()


def _check_files(ranks: int) -> None:
    """Raise H006 if a launcher of this many ranks could not open its files. Raises a low soft limit first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        wanted = MIN_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MIN_OPEN_FILES)
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
    """Raise H016 on Linux if /proc is missing, or belongs to other processes; memory, hangs and connections are read there."""
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
    """H006 for open files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    fix = ("ulimit -n 4096    (in a container: --ulimit nofile=4096)", "fewer --workers")
    return Problem("H006", f"too many open files: a process may have {limit}", why=why, where=where, fix=fix)


def explain_os_limit(error: OSError) -> Problem | None:
    """Return H006 for an error about a reached limit, R006 if no temporary folder is writable, None for other errors."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return too_many_files(str(error), "")
    if "No usable temporary directory" in str(error):  # Python's error message
        fix = ("export TMPDIR=/a/folder/with/room", "ulimit -f    how much a file may have")
        return Problem("R006", "no folder for temporary files can be written", why=str(error), fix=fix)
    return None


def too_many_processes(what: str, why: str, fewer: tuple[str, ...], where: str = "") -> Problem:
    """H006 for processes and threads."""
    count = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limit = f"; ulimit -u is {count}" if count != resource.RLIM_INFINITY else ""
    fix = ("ulimit -u    (in a container: --pids-limit)", *fewer)
    return Problem("H006", f"the system cannot start more processes: {what}", why=f"{why}{limit}", where=where, fix=fix)


@contextlib.contextmanager
def catch_fork_failure(what: str, fewer: str = "") -> Iterator[None]:
    """Convert a failed fork of process `what` to H006. `fewer`: an option that needs fewer processes."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.ENOMEM):
            raise
        problem = too_many_processes(f"{what} could not be started", error.strerror or "", (fewer,) if fewer else ())
        raise PlaitError(problem, FAILED) from error


def open_loopback_socket() -> socket.socket:
    """Open a socket on 127.0.0.1. Raises H007 if this machine cannot connect to itself."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(256)
    try:
        with socket.create_connection(listening.getsockname(), CONNECT_TIMEOUT):
            listening.accept()[0].close()
    except OSError as error:
        listening.close()
        what = "processes on this machine cannot reach each other: 127.0.0.1 does not answer"
        fix = ("ip link set lo up    (as root; the loopback interface is down)", "ip addr show lo")
        raise PlaitError(Problem("H007", what, why=str(error), fix=fix), FAILED) from error
    return listening


def no_shared_memory(what: str, why: str, where: str) -> Problem:
    """H008 with the free space of /dev/shm."""
    with contextlib.suppress(OSError):
        room = os.statvfs("/dev/shm")
        free, size = room.f_bavail * room.f_frsize / 2**20, room.f_blocks * room.f_frsize / 2**20
        told = f"/dev/shm has {free:.1f} of {size:.1f} MiB free, and loader processes pass batches through it"
        why = f"{told}\n{why}"
    fix = (
        "--workers 0, or fewer",
        "docker run --shm-size 8g    mount -o remount,size=8G /dev/shm",
        "delete what fills /dev/shm",
    )
    return Problem("H008", what, why=why, where=where, fix=fix)


LAST_STANDARD_FD = 2
"""Highest descriptor of the standard streams, which processes share on purpose."""
_KEPT_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | os.O_SYNC


def open_standard_streams() -> None:
    """Open closed standard streams on /dev/null."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (LAST_STANDARD_FD, "stderr", "w")):
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


def reopen_inherited_files() -> None:
    """Reopen every inherited readable file in this process at the same offset. Linux only.

    A write-only file stays shared, so that lines of several processes are appended, as in a log.
    """
    with contextlib.suppress(OSError):  # there is no /proc
        for name in os.listdir("/proc/self/fd"):
            if (number := int(name)) > LAST_STANDARD_FD:
                with contextlib.suppress(OSError):  # it is closed, or may not be opened any more
                    _reopen_file(number)


def _reopen_file(number: int) -> None:
    flags = fcntl.fcntl(number, fcntl.F_GETFL)
    if not stat.S_ISREG(os.fstat(number).st_mode) or flags & os.O_ACCMODE == os.O_WRONLY:
        return
    offset, inherited = os.lseek(number, 0, os.SEEK_CUR), os.get_inheritable(number)
    fresh = os.open(f"/proc/self/fd/{number}", flags & _KEPT_FLAGS | os.O_CLOEXEC)
    try:
        os.lseek(fresh, offset, os.SEEK_SET)
        os.dup2(fresh, number, inheritable=inherited)
    finally:
        os.close(fresh)
