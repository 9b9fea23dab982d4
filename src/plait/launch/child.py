"""The life of a process that plait forks: it ends with its parent, leaves signals to it, and never returns into its code."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from plait.launch.stopping import REQUESTS


def live(work: Callable[[], int], parent: int) -> NoReturn:
    """Do `work` in a process that `parent` has just forked, and end with the status that it returns; 1 when it raises."""
    die_with_parent()
    status = 1
    with contextlib.suppress(BaseException):
        if os.getppid() == parent:
            for number in REQUESTS:
                signal.signal(number, signal.SIG_IGN)
            status = work()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)  # a plain exit may abort in gloo's threads after a correct run


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)
