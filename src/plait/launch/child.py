"""Life cycle of a process that plait forks: it ends with its parent, ignores stop signals, and never returns into the parent's code.

[Note: Companion] A process that a rank starts for work that must neither delay nor end training.

It is a new Python process and not a fork, so it has none of the rank's threads, sockets and locks. A package that crashes it does not crash
the rank. Its output goes to a file. Lines for the user go through a pipe, which the rank reads between steps without waiting. It has its
own session, so Ctrl-C in the terminal does not reach it. It ends after the rank has closed its standard input, which the system does if the
rank dies.
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

from plait.launch.stopping import STOP_SIGNALS


def fork_process() -> int:
    """Fork like `os.fork`, without losing a stop signal that arrives meanwhile.

    Python runs hooks of libraries after a fork, and discards exceptions in them. There a Ctrl-C would be lost. Here its `KeyboardInterrupt`
    is raised after the fork, and the new process is killed.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        pid = os.fork()
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except BaseException:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise
    return pid


def run_child(work: Callable[[], int], parent: int) -> NoReturn:
    """Run `work` in a process that `parent` has just forked, and exit with the status that it returns, or 1 if it raises."""
    die_with_parent()
    status = 1
    with contextlib.suppress(BaseException):
        if os.getppid() == parent:
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            status = work()
    end_process(status)  # a plain exit may abort in gloo's threads after a correct run


def end_process(status: int) -> NoReturn:
    """End the process with this exit code and without Python's teardown. Output that cannot be written is lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def prepend_python_path(folder: Path) -> dict[str, str]:
    """Return this process's environment with a folder at the front of PYTHONPATH."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)


EXIT_GRACE_S = 600.0
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
        self._input, self._output = _require_pipe(self.process.stdin), _require_pipe(self.process.stdout)
        os.set_blocking(self._output.fileno(), False)
        self._rest = b""

    def read_lines(self) -> list[str]:
        """Return the lines for the user since the last call."""
        while data := self._output.read(65536):
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]

    def finish(self, word: str) -> None:
        """End its work; `word` is the outcome of the run."""
        with contextlib.suppress(OSError, ValueError):  # it has exited, or has been finished before
            self._input.write(word.encode())
            self._input.close()

    def close(self) -> None:
        self._output.close()
        self.finish("")
        if self.process.poll() is None:
            self.process.returncode = 0  # so that subprocess does not warn of a process that is still running


def _require_pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


class EndOfWork(threading.Event):
    """Set once the rank has ended the work, or has died. `word`: the argument of `finish`; empty if the rank died."""

    word = b""

    def listen(self) -> None:
        """Read standard input to its end. `EXIT_GRACE_S` seconds later, exit, even if a library still waits."""
        while data := os.read(0, 64):
            self.word += data
        self.set()
        time.sleep(EXIT_GRACE_S)
        os._exit(1)


def live_as_companion() -> None:
    """Run the process of a companion."""
    for number in STOP_SIGNALS:  # its rank decides when it ends
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


def read_variables(*names: str) -> dict[str, str]:
    """Return these environment variables, as far as they are set and not empty."""
    return {name: os.environ[name] for name in names if os.environ.get(name)}
