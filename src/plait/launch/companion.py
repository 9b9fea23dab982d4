"""A process that a rank starts beside itself, for work that must neither hold training up nor end it.

It is a new Python, not a fork: none of the rank's threads, sockets and locks are in it, and whatever it imports stays in it.
What it and its libraries print goes to a file; what it wants said goes through a pipe, which the rank reads between steps
without waiting. Its session is its own, so Ctrl-C at the terminal is not its business: it ends some time after the rank
closes its standard input, which the system does for a rank that dies.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import IO

from plait.launch.stopping import REQUESTS

LAST = 600.0
"""Seconds that a companion has, once the rank is done with it, before it is ended."""


class Companion:
    """`main(until, say)` of `module`, called with `arguments` in a process of its own that the rank started.

    `log`: the file for what is printed there. `environment`: variables it has besides the rank's.
    """

    def __init__(self, module: str, arguments: list[str], log: Path, environment: Mapping[str, str]):
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._said, self._rest = os.fdopen(reading, "rb", buffering=0), b""
        code = f"import sys; sys.path[:] = {sys.path!r}; from plait.launch.companion import live; live()"
        try:
            with open(log, "ab") as file:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code, module, str(writing), *arguments], stdin=subprocess.PIPE, stdout=file,
                    stderr=file, pass_fds=(writing,), start_new_session=True, env={**os.environ, **environment},
                )  # fmt: skip
        finally:
            os.close(writing)

    @property
    def number(self) -> int:
        """Of the process."""
        return self._process.pid

    def said(self) -> list[str]:
        """The lines it has said since the last call. It does not wait for any."""
        while True:
            data = self._said.read(65536)
            if not data:
                break
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]

    def done(self, word: str) -> None:
        """Tell it that nothing follows, and how the run ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended already, or been told
            self._process.stdin.write(word.encode())
            self._process.stdin.close()

    def wait(self, seconds: float) -> int | None:
        """Wait for its end: the exit status, or None if it goes on."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def ended(self) -> int | None:
        """Its exit status, or None while it goes on."""
        return self._process.poll()

    def close(self) -> None:
        """Listen to it no longer; it may go on."""
        self._said.close()
        self.done("")
        if self._process.poll() is None:
            self._process.returncode = 0  # so that nothing complains that it is left to itself


class Until:
    """The end of a companion's work, as its rank says it: by a word, or by dying."""

    def __init__(self, source: IO[bytes]):
        self._source, self.word = source, b""
        self.over = False

    def wait(self, seconds: float) -> bool:
        """Whether nothing follows; known after `seconds` at most."""
        end = time.monotonic() + seconds
        while not self.over:
            ready, _, _ = select.select([self._source], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return False
            data = os.read(self._source.fileno(), 64)
            self.word += data
            self.over = not data
        return True


def live() -> None:
    """The process of a companion, from its first line to its last."""
    _, module, writing, *arguments = sys.argv
    os.set_inheritable(int(writing), False)
    for number in REQUESTS:  # its rank says when it is to end
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_late, daemon=True).start()
    with os.fdopen(int(writing), "wb", buffering=0) as out, os.fdopen(0, "rb", buffering=0) as source:
        until = Until(source)

        def say(line: str) -> None:
            try:
                out.write((line.replace("\n", " ") + "\n").encode())
            except OSError:
                print(line, flush=True)  # the rank is gone; the log is there

        import_module(module).main(until, say, *arguments)


def _end_late() -> None:
    """Ends this process `LAST` seconds after its rank is done with it, whatever a library of it waits for."""
    select.select([0], [], [])
    time.sleep(LAST)
    os._exit(1)


def variables(*names: str) -> dict[str, str]:
    """Those of the environment variables that are set, and not empty."""
    return {name: os.environ[name] for name in names if os.environ.get(name)}
