"""The launcher's loop: read what workers say, notice who ended, stalled or failed, and find the guilty one."""

import contextlib
import json
import os
import selectors
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from plait.errors import PlaitError, Problem
from plait.launch.watch import Failure, Watch
from plait.launch.words import Words


@dataclass
class Listener:
    """What the launcher does with what workers say. `message` gets their reports, `text` their output, by rank."""

    message: Callable[[int, dict[str, Any]], None] = field(default=lambda rank, message: None)
    text: Callable[[int, bytes], None] = field(default=lambda rank, text: None)
    tick: Callable[[], None] = field(default=lambda: None)


@dataclass
class Worker:
    """A forked process: its reports and its output arrive through pipes."""

    rank: int
    pid: int
    reports: int
    output: int
    buffer: bytes = b""
    status: int | None = None


class Supervisor:
    """Reads the workers until all have ended, or one has failed and the guilty one is known."""

    def __init__(self, workers: list[Worker], words: Words, listener: Listener):
        self.workers, self.words, self.listener = workers, words, listener
        self.results: dict[int, dict[str, Any]] = {}
        self.failures: dict[int, Failure] = {}
        self.watch = Watch(words, [w.pid for w in workers])
        self.selector = selectors.DefaultSelector()
        for worker in workers:
            os.set_blocking(worker.reports, False)
            os.set_blocking(worker.output, False)
            self.selector.register(worker.reports, selectors.EVENT_READ, (worker, True))
            self.selector.register(worker.output, selectors.EVENT_READ, (worker, False))

    def wait(self) -> list[dict[str, Any]]:
        while not all(w.status is not None for w in self.workers):
            self._read(0.05 if self.selector.get_map() else 0.002)  # whoever has closed its pipes is about to end
            self._reap()
            self.listener.tick()
            stalled = self.watch.stalled()
            if stalled is not None and not self.failures:
                self._dump(stalled)
            if self.failures:
                self._settle()
                raise self._verdict()
        self._drain()
        if self.failures:
            raise self._verdict()
        return [self.results.get(w.rank) or {} for w in self.workers]

    def _read(self, timeout: float) -> None:
        for key, _ in self.selector.select(timeout):
            worker, is_report = key.data
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            if not data:
                self.selector.unregister(key.fd)
                os.close(key.fd)
            elif is_report:
                *lines, worker.buffer = (worker.buffer + data).split(b"\n")
                for line in lines:
                    self._message(worker, json.loads(line))
            else:
                self.listener.text(worker.rank, data)

    def _message(self, worker: Worker, message: dict[str, Any]) -> None:
        if message["kind"] == "result":
            self.results[worker.rank] = message["value"] or {}
        elif message["kind"] == "failed":
            step, phase, _ = self.words.read(worker.rank)
            self.failures[worker.rank] = Failure.raised(worker.rank, step, phase, message)
            self.listener.message(worker.rank, {"kind": "log", "text": message["trace"]})
        else:
            self.listener.message(worker.rank, message)

    def _reap(self) -> None:
        for worker in self.workers:
            if worker.status is None:
                pid, status = os.waitpid(worker.pid, os.WNOHANG)
                if pid:
                    worker.status = os.waitstatus_to_exitcode(status)
                    self._ended(worker)

    def _ended(self, worker: Worker) -> None:
        self._drain()
        if worker.rank in self.results or worker.rank in self.failures:
            return
        step, phase, _ = self.words.read(worker.rank)
        self.failures[worker.rank] = self.watch.died(worker.rank, step, phase, worker.status or 0)

    def _drain(self) -> None:
        while self.selector.get_map() and self.selector.select(0):
            self._read(0)

    def _dump(self, rank: int) -> None:
        """A rank is stalled: ask it for its stack, then hold it guilty."""
        pid = self.workers[rank].pid
        stopped = self.watch.is_stopped(rank)
        if not stopped:
            os.kill(pid, signal.SIGUSR1)
            self._read(0.3)
        step, phase, when = self.words.read(rank)
        self.failures[rank] = self.watch.stall(rank, step, phase, when, stopped)

    def _settle(self) -> None:
        """Give the others a moment to say what they saw, so that the guilty one is found among all failures."""
        for _ in range(20):
            if all(w.status is not None or w.rank in self.failures for w in self.workers):
                break
            if any(not f.victim for f in self.failures.values()):
                self._read(0.2)
                break
            self._read(0.1)
            self._reap()
        self.kill()
        self._drain()

    def _verdict(self) -> PlaitError:
        guilty = min(self.failures.values(), key=lambda f: f.order)
        problems = [guilty.problem] if guilty.problem is not None else guilty.problems
        return PlaitError(problems or Problem("C005", f"rank {guilty.rank} failed"), guilty.exit_code, guilty.trace)

    def kill(self) -> None:
        for worker in self.workers:
            if worker.status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
        for worker in self.workers:
            if worker.status is None:
                _, status = os.waitpid(worker.pid, 0)
                worker.status = os.waitstatus_to_exitcode(status)
