"""Start `plait` in a forked child of the warm test process: the whole command line, without importing torch again."""

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from plait.cli.main import main

TEST_JOB = str(Path(__file__).parent / "training.py")


RUNNING: "list[Command]" = []
"""Commands whose exit codes nobody has asked for."""


class Command:
    """A running command in a session of its own; `output` is what it printed so far."""

    def __init__(
        self, *argv: str, folder: Path, environment: dict[str, str] | None = None, host: Callable[[], None] | None = None
    ):  # fmt: skip
        self.log = folder / f"command-{time.monotonic_ns()}.log"
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                os.setsid()
                for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):  # as in a process that has just begun
                    signal.signal(number, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.close(reading)
                os.close(writing)
                if host is not None:
                    host()
                os.chdir(folder)
                os.environ.update(environment or {})
                descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
                warnings.resetwarnings()
                sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
                code = main(list(argv))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        RUNNING.append(self)
        os.close(writing)
        os.read(reading, 1)  # until it no longer has the handlers of this process
        os.close(reading)

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait(self, timeout: float = 60.0) -> int:
        """The exit code."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                RUNNING.remove(self)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        self.kill()
        raise TimeoutError(self.output)

    def until(self, ready: Callable[[], bool], timeout: float = 60.0) -> None:
        end = time.monotonic() + timeout
        while not ready():
            assert time.monotonic() < end, self.output
            time.sleep(0.01)

    def workers(self) -> list[int]:
        """Processes forked by the command, in the order of their ranks."""
        return sorted(int(p) for p in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())

    def kill(self) -> None:
        """kill -9 of everything the command started."""
        os.killpg(self.pid, signal.SIGKILL)


def end_all() -> None:
    """End the commands that a test has left running: one that failed would train on beside all others."""
    while RUNNING:
        command = RUNNING.pop()
        with contextlib.suppress(OSError):
            command.kill()
        with contextlib.suppress(OSError):
            os.waitpid(command.pid, 0)


def rows(folder: Path) -> list[dict]:
    """Rows of the latest run's metrics that are steps."""
    path = folder / "runs" / "latest" / "metrics.jsonl"
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [r for r in found if "loss" in r]


def free_port() -> int:
    """One on which nobody listens."""
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        return int(asking.getsockname()[1])


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
