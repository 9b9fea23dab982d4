"""Start `plait` in a forked child of the warm test process: the full command line, without another import of torch."""

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
"""Commands whose exit codes were not read yet."""


class Command:
    """A running command in its own process session; `output` is the text that it has printed."""

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
                for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):  # as in a new process
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
        os.read(reading, 1)  # until the child has no handlers of this process
        os.close(reading)

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait(self, timeout: float = 60.0) -> int:
        """Return the exit code."""
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
        """Return the processes that the command forked, in the order of their ranks."""
        return sorted(int(p) for p in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())

    def kill(self) -> None:
        """Send SIGKILL to all processes of the command."""
        os.killpg(self.pid, signal.SIGKILL)


def end_all() -> None:
    """End the commands that a test left running. After a failed test, one would otherwise train while the next tests run."""
    while RUNNING:
        command = RUNNING.pop()
        with contextlib.suppress(OSError):
            command.kill()
        with contextlib.suppress(OSError):
            os.waitpid(command.pid, 0)


def rows(folder: Path) -> list[dict]:
    """Return the rows of the latest run's metrics that are steps."""
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
    """Return a port without a listener."""
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        return int(asking.getsockname()[1])


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
