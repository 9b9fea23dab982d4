"""The life of a process that plait forks: it ends with its parent, leaves signals to it, and never returns into its code.

[Note: Companion]
A process that a rank starts, for work that must neither delay nor end training.

It is a new Python, not a fork: none of the rank's threads, sockets and locks are in it, and a package that it imports can crash
it alone. Its output goes to a file; lines for the user go through a pipe, which the rank reads between steps without waiting.
Its session is its own, so Ctrl-C in the terminal does not reach it. It ends after the rank has closed its standard input, which
the system does if the rank dies.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import IO, NoReturn

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


def environment_with(folder: Path) -> dict[str, str]:
    """This process's environment, with a folder in front of Python's path."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)


LAST = 600.0
"""Seconds after the end of its work in which a companion must exit; then it is killed."""


class Companion:
    """Runs `main(end, say, *arguments)` of a module in a new process; `end` is an `EndOfWork`, and `say` sends a line to the user.

    `log`: the file for all other output. `environment`: variables that the process has in addition to the rank's.
    """

    def __init__(self, module: str, arguments: list[str], log: Path, environment: Mapping[str, str]):
        code = f"import sys; sys.path[:] = {sys.path!r}; from plait.launch.child import live_as_companion; live_as_companion()"
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
                bufsize=0, start_new_session=True, env={**os.environ, **environment},
            )  # fmt: skip
        self._input, self._output = _pipe(self.process.stdin), _pipe(self.process.stdout)
        os.set_blocking(self._output.fileno(), False)
        self._rest = b""

    def read_lines(self) -> list[str]:
        """The lines for the user since the last call."""
        while data := self._output.read(65536):
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]

    def finish(self, word: str) -> None:
        """End its work; `word` says how the run ended."""
        with contextlib.suppress(OSError, ValueError):  # it has exited, or was told before
            self._input.write(word.encode())
            self._input.close()

    def close(self) -> None:
        self._output.close()
        self.finish("")
        if self.process.poll() is None:
            self.process.returncode = 0  # so that subprocess does not warn of a process that is still running


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


class EndOfWork(threading.Event):
    """Is set once the rank has ended the work, or died. `word`: what the rank gave to `finish`; empty if it died."""

    word = b""

    def listen(self) -> None:
        """Read standard input to its end. `LAST` seconds later, end this process, whatever a library waits for."""
        while data := os.read(0, 64):
            self.word += data
        self.set()
        time.sleep(LAST)
        os._exit(1)


def live_as_companion() -> None:
    """The process of a companion, from its first line to its last."""
    for number in REQUESTS:  # its rank decides when it ends
        signal.signal(number, signal.SIG_IGN)
    lines, end = os.dup(1), EndOfWork()
    os.dup2(2, 1)
    threading.Thread(target=end.listen, daemon=True).start()

    def say(line: str) -> None:
        try:
            os.write(lines, (line.replace("\n", " ") + "\n").encode())
        except OSError:
            print(line, flush=True)  # the rank is gone; the log is there

    import_module(sys.argv[1]).main(end, say, *sys.argv[2:])


def variables(*names: str) -> dict[str, str]:
    """Those of the environment variables that are set, and not empty."""
    return {name: os.environ[name] for name in names if os.environ.get(name)}
