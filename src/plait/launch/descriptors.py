"""Open files of a process: the standard streams that its starter closed, and those that a fork shares.

Daemons and cron start programs with standard streams closed: the next file that is opened then gets the number of one, and what is printed
goes into it. So closed ones are opened on /dev/null first.

A fork copies descriptors, and copies of a descriptor share one offset. If ranks or loader processes seek in a file that was opened
before the fork, one process moves the offset of all others, and samples are wrong.
"""

import contextlib
import fcntl
import os
import stat
import sys

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
