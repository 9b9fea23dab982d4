"""The launcher's loop: read what workers say, notice who ended, stalled or failed, and find the guilty one."""

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.config.errors import PlaitError, shown
from plait.launch.failures import BETWEEN, Failure, Watch, hung
from plait.launch.hangs import HangDetector, Stacks, told
from plait.launch.nodes import WORD, Node
from plait.launch.progress import ProgressBoard
from plait.launch.stopping import HEARD, REQUESTS

SAYING = 2.0
"""Seconds that ranks are given to say what happened to them while only victims are known."""
GIVING = 10.0
"""Seconds that ranks are given to put away what they hold when a sample could not be read."""
TELLING = 20.0
"""Seconds that a failed rank is given to write all it has to say into its log."""


@dataclass
class Listener:
    """What the launcher does with what workers say. `message` gets their reports, `text` their output, by rank."""

    message: Callable[[int, dict[str, Any]], None] = field(default=lambda rank, message: None)
    text: Callable[[int, bytes], None] = field(default=lambda rank, text: None)
    tick: Callable[[], None] = field(default=lambda: None)
    note: Callable[[str], None] = field(default=lambda text: print(shown(text), file=sys.stderr, flush=True))
    """A line of the launcher's own, such as that a rank makes no progress."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Of processes that are no ranks of a plan."""
    logs: bool = False
    """Each rank has a log, which `message` writes."""
    hung: Callable[[], object] = field(default=lambda: None)
    """A rank hangs, and the run is about to be ended for it."""
    reached: int = -1
    """Steps that were done on some rank when one failed."""
    asked: bool = False
    """By then, or by the end, somebody had asked all ranks to stop."""
    guilty: int = -1
    """The rank that failed; -1 for a machine."""


@dataclass(frozen=True)
class Spare:
    """Ranks that a run can go on without: whether a rank is one, and what becomes of one that has died. `again` has it forked
    anew, `without` goes on without it, and an empty word ends the run."""

    may: Callable[[int], bool]
    lost: Callable[[int, Failure], str]
    fork: Callable[[int], "Worker"] = field(default=lambda rank: Worker(rank, 0, 0, 0))
    """Forks a rank anew; `launch/fork.py` says how."""


@dataclass
class Worker:
    """A forked process: its reports and its output arrive through pipes."""

    rank: int
    pid: int
    reports: int
    output: int
    buffer: bytearray = field(default_factory=bytearray)
    status: int | None = None
    telling: bool = False
    """It has failed, and is still writing what it has to say."""

    def __post_init__(self) -> None:
        self.opened = {self.reports, self.output}

    def close(self, descriptor: int) -> None:
        """Close a pipe, once."""
        if descriptor in self.opened:
            self.opened.remove(descriptor)
            os.close(descriptor)


class Supervisor:
    """Reads the workers until all have ended, or one has failed and the guilty one is known."""

    def __init__(
        self, workers: list[Worker], board: ProgressBoard, stacks: Stacks, listener: Listener, patience: float | None = None,
        alike: bool = True, *, node: Node | None = None, handing: float = 0.0, spare: Spare | None = None, leaves: bool = False,
    ):  # fmt: skip
        self.spare, self.leaves = spare, leaves
        self.asked: float | None = None
        """When somebody asked all ranks to stop."""
        self.left = set[int]()
        """Ranks that have been asked to leave what they wait for."""
        self.workers, self.board, self.listener, self.node, self.handing = workers, board, listener, node, handing
        self.results: dict[int, dict[str, Any]] = {}
        self.failures: dict[int, Failure] = {}
        self.watch = Watch()
        self.hangs = HangDetector(board, {w.rank: w.pid for w in workers}, stacks, patience, alike, node is not None)
        self.selector = selectors.DefaultSelector()
        for worker in workers:
            self._hear(worker)

    def _hear(self, worker: Worker) -> None:
        """Read what it says from now on."""
        os.set_blocking(worker.reports, False)
        os.set_blocking(worker.output, False)
        self.selector.register(worker.reports, selectors.EVENT_READ, (worker, True))
        self.selector.register(worker.output, selectors.EVENT_READ, (worker, False))

    def wait(self, pipe: int, request: Callable[[int], None]) -> list[dict[str, Any]]:
        """What each rank returned, once all have ended. `request` is called with each signal of `REQUESTS` that a rank received, which it
        writes into the pipe."""
        self.selector.register(pipe, selectors.EVENT_READ, request)
        while not all(w.status is not None for w in self.workers):
            self._read(0.05 if any(w.opened for w in self.workers) else 0.002)  # whoever has closed its pipes is about to end
            self._reap()
            self.listener.tick()
            self._ask()
            if not self.failures:
                self._leave()
                self._look()
            if self.failures:
                self._settle()
                raise self._verdict()
        self._drain()
        if self.failures:
            raise self._verdict()
        self.listener.asked = self.board.asked()
        return [self.results.get(w.rank) or {} for w in self.workers]

    def _read(self, timeout: float) -> None:
        for key, _ in self.selector.select(timeout):
            if callable(key.data):
                for number in os.read(key.fd, 1 << 10):
                    if number in REQUESTS:
                        key.data(number)
                continue
            worker, is_report = key.data
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            if not data:
                self.selector.unregister(key.fd)
                worker.close(key.fd)
            elif is_report:
                worker.buffer += data
                if b"\n" in data:
                    *lines, worker.buffer = worker.buffer.split(b"\n")
                    for line in lines:
                        self._message(worker, _parsed(line))
            else:
                self.listener.text(worker.rank, data)

    def _message(self, worker: Worker, message: dict[str, Any]) -> None:
        if message["kind"] == "result":
            self.results[worker.rank] = message["value"] or {}
        elif message["kind"] == "failed":
            progress = self.board.read(worker.rank)
            self.failures[worker.rank] = Failure.raised(worker.rank, progress, message, self.listener.names.get(worker.rank, ""))
            worker.telling = True
        else:
            self.listener.message(worker.rank, message)

    def _reap(self) -> None:
        for worker in [*self.workers]:
            if worker.status is None:
                pid, status = os.waitpid(worker.pid, os.WNOHANG)
                if pid:
                    worker.status = os.waitstatus_to_exitcode(status)
                    self._ended(worker)

    def _ended(self, worker: Worker) -> None:
        self._drain()
        worker.telling = False
        if worker.rank in self.results or worker.rank in self.failures:
            return
        progress = self.board.read(worker.rank)
        failure = self.watch.died(worker.rank, progress, worker.status or 0)
        word = self.spare.lost(worker.rank, failure) if self.spare is not None and self.spare.may(worker.rank) else ""
        if not word:
            self.failures[worker.rank] = failure
            return
        self.board.write(worker.rank, *((2**62, "end") if word == "without" else (-1, "start")))
        self.results[worker.rank] = {}
        if self.spare is not None and word == "again":
            del self.results[worker.rank]
            fresh = self.spare.fork(worker.rank)
            self.workers[self.workers.index(worker)] = fresh
            self.hangs.pids[worker.rank] = fresh.pid
            self._hear(fresh)

    def _drain(self) -> None:
        while self.selector.select(0):
            self._read(0)

    def _leave(self) -> None:
        """Some time after a request to stop, have ranks leave the samples that they wait for: the others wait for them."""
        if not self.board.asked():
            return
        if self.asked is None:
            self.asked = time.monotonic()
            self.listener.note("note  asked to stop: the ranks finish their step")
        for worker in self.workers if self.leaves else ():
            late = time.monotonic() - self.asked > HEARD and self.board.delays(worker.rank, HEARD)
            if late and worker.status is None and worker.rank not in self.left:
                self.left.add(worker.rank)
                self.board.leave()
                os.kill(worker.pid, signal.SIGTERM)

    def _look(self) -> None:
        """Name the ranks that make no progress, with their stacks in their logs; hold one guilty when it is time."""
        hang = self.hangs.check()
        for group, waiting in self.hangs.names():
            for look in group:
                self._log(look.rank, look.stack.text)
            self.listener.note(told(group, waiting, self.listener.names, self.listener.logs))
        if hang is not None:
            self._log(hang.look.rank, hang.look.stack.text)
            self.listener.hung()
            if self.spare is not None and self.spare.may(hang.look.rank):
                self.listener.note(f"note  {hung(hang).all_problems()[0].what}: it is ended")
                kill([w for w in self.workers if w.rank == hang.look.rank])
                return
            self.failures[hang.look.rank] = hung(hang)

    def _ask(self) -> None:
        """Take in what has failed on other machines, so far the one whose guilt is most likely."""
        failure = self.node.look(broken=bool(self.failures)) if self.node is not None else None
        if self.node is not None and self.node.regroups:
            self.board.stop(asked=False)
        if failure is not None and not failure.victim:
            self.failures[-1] = min((failure, self.failures.get(-1, failure)), key=lambda f: f.order)

    def _log(self, rank: int, text: str) -> None:
        if text:
            self.listener.message(rank, {"kind": "log", "text": text})

    def _settle(self) -> None:
        """Give the others a moment to say what they saw, so that the guilty one is found among all failures, and those
        that have failed the time to write it into their logs."""
        began, reached = time.monotonic(), max(self.board.read(w.rank).step for w in self.workers)
        wanted = GIVING if any(p.code in BETWEEN for f in self.failures.values() for p in f.all_problems()) else self.handing
        handing = wanted if reached > 0 else 0.0  # who waits to meet the others does not notice, and holds nothing yet
        if handing:  # survivors notice that one is lost when it has ended
            kill(
                [
                    w
                    for w in self.workers
                    if w.rank in self.failures and not self.failures[w.rank].victim and not w.telling
                ]
            )
        while (waited := time.monotonic() - began) < TELLING:
            guilty = any(not failure.victim for failure in self.failures.values())
            said = all(w.status is not None or w.rank in self.failures for w in self.workers)
            said = said and (guilty or self.node is None or waited > WORD)
            patience = max(handing, 0.2 if guilty else SAYING if self.node is None else WORD)
            if not any(w.telling for w in self.workers) and (said or waited > patience):
                break
            self._ask()
            self._read(0.05 if any(w.opened for w in self.workers) else 0.002)
            self._reap()
        end(self.workers)
        self._drain()
        self.listener.reached = max(self.board.read(w.rank).step for w in self.workers)
        self.listener.asked = self.board.asked()

    def _verdict(self) -> PlaitError:
        guilty = min(self.failures.values(), key=lambda f: f.order)
        self.listener.guilty = guilty.rank
        if self.node is not None:
            self.node.failed(guilty, here=guilty is not self.failures.get(-1))
        return guilty.error()


def kill(workers: list[Worker]) -> None:
    """Kill those that still run."""
    for worker in workers:
        if worker.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)


def end(workers: list[Worker]) -> None:
    """Kill those that still run, and wait for it."""
    kill(workers)
    for worker in workers:
        if worker.status is None:
            _, status = os.waitpid(worker.pid, 0)
            worker.status = os.waitstatus_to_exitcode(status)


def _parsed(line: bytes | bytearray) -> dict[str, Any]:
    """A report; what somebody else wrote into the pipe is text for the log."""
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    return message if isinstance(message, dict) and "kind" in message else {"kind": "log", "text": f"{line!r}\n"}
