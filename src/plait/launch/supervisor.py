"""The launcher's loop: read reports of ranks, detect ranks that ended, hang or failed, and find the rank that caused a failure."""

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

from plait.config.errors import PlaitError, escape_controls
from plait.launch.failures import BETWEEN_STEP_CODES, ExitAnalyzer, Failure, describe_hang
from plait.launch.hangs import HangDetector, Stacks, format_silent_ranks
from plait.launch.nodes import REPLY_WAIT, Node
from plait.launch.progress import ProgressBoard
from plait.launch.stopping import STOP_SIGNALS, WAIT_GRACE_S

REPORT_WAIT_S = 2.0
"""Seconds in which ranks may report while only victims are known."""
SAMPLE_GRACE_S = 10.0
"""Seconds in which ranks may save their snapshots after a sample could not be read."""
LOG_WAIT_S = 20.0
"""Seconds in which a failed rank may write its full error to its log."""
SPARE_EXIT_S = 10.0
"""Seconds in which spare ranks must exit once all other ranks have returned. Then they are killed: one that was forked late waits for a server."""


@dataclass
class Listener:
    """Callbacks of the launcher. `on_message` gets ranks' reports, `on_text` their output, by rank."""

    on_message: Callable[[int, dict[str, Any]], None] = field(default=lambda rank, message: None)
    on_text: Callable[[int, bytes], None] = field(default=lambda rank, text: None)
    on_tick: Callable[[], None] = field(default=lambda: None)
    on_note: Callable[[str], None] = field(default=lambda text: print(escape_controls(text), file=sys.stderr, flush=True))
    """Called with a line of the launcher itself, such as that a rank makes no progress."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Names of processes that are not ranks of a plan."""
    logs: bool = False
    """Each rank has a log, which `on_message` writes."""
    on_hang: Callable[[], object] = field(default=lambda: None)
    """Called before the run is ended because of a hung rank."""
    steps_done: int = -1
    """Largest number of completed steps of any rank at the time of a failure."""
    is_stop_requested: bool = False
    """All ranks had been requested to stop by then, or by the end."""
    guilty_rank: int = -1
    """The rank that caused the failure; -1 for a node."""


@dataclass(frozen=True)
class SpareRanks:
    """Ranks that a run can lose. `is_spare`: whether a rank is one. `on_lost`: the reaction to its death.

    The reaction `again` forks the rank again, `without` continues without it, and an empty string ends the run.
    """

    is_spare: Callable[[int], bool]
    on_lost: Callable[[int, Failure], str]
    fork: Callable[[int], "Worker"] = field(default=lambda rank: Worker(rank, 0, 0, 0))
    """Forks a rank again; set by `launch/fork.py`."""


@dataclass
class Worker:
    """A forked process: its reports and its output arrive through pipes."""

    rank: int
    pid: int
    reports: int
    output: int
    buffer: bytearray = field(default_factory=bytearray)
    status: int | None = None
    is_reporting: bool = False
    """It has failed, and is still writing its error."""

    def __post_init__(self) -> None:
        self.open_pipes = {self.reports, self.output}

    def close(self, descriptor: int) -> None:
        """Close a pipe, once."""
        if descriptor in self.open_pipes:
            self.open_pipes.remove(descriptor)
            os.close(descriptor)


class Supervisor:
    """Reads the ranks' reports until all have ended, or one has failed and the cause is known."""

    def __init__(
        self, workers: list[Worker], board: ProgressBoard, stacks: Stacks, listener: Listener, hang_timeout: float | None = None,
        uniform: bool = True, *, node: Node | None = None, snapshot_grace: float = 0.0, spare: SpareRanks | None = None, can_leave: bool = False,
    ):  # fmt: skip
        self.spare, self.can_leave = spare, can_leave
        self.asked_at: float | None = None
        """Time of the first request to stop."""
        self.returned_at: float | None = None
        """Time at which all ranks but the spare ones had returned."""
        self.left_ranks = set[int]()
        """Ranks that have been requested to abandon their samples."""
        self.workers, self.board, self.listener, self.node, self.snapshot_grace = workers, board, listener, node, snapshot_grace
        self.results: dict[int, dict[str, Any]] = {}
        self.failures: dict[int, Failure] = {}
        self.exit_analyzer = ExitAnalyzer()
        remote = node is not None and node.has_remote_ranks
        self.hangs = HangDetector(board, {w.rank: w.pid for w in workers}, stacks, hang_timeout, uniform, remote)
        self.selector = selectors.DefaultSelector()
        for worker in workers:
            self._register_worker(worker)

    def _register_worker(self, worker: Worker) -> None:
        """Start to read its pipes."""
        os.set_blocking(worker.reports, False)
        os.set_blocking(worker.output, False)
        self.selector.register(worker.reports, selectors.EVENT_READ, (worker, True))
        self.selector.register(worker.output, selectors.EVENT_READ, (worker, False))

    def wait(self, pipe: int, request: Callable[[int], None]) -> list[dict[str, Any]]:
        """Return the result of each rank, once all have ended.

        `request` is called with each signal of `STOP_SIGNALS` that a rank received and wrote into the pipe.
        """
        self.selector.register(pipe, selectors.EVENT_READ, request)
        while not all(w.status is not None for w in self.workers):
            self._read_pipes(0.05 if any(w.open_pipes for w in self.workers) else 0.002)  # a worker that has closed its pipes is about to end
            self._reap_workers()
            self._end_spare_ranks()
            self.listener.on_tick()
            self._check_nodes()
            if not self.failures:
                self._ask_to_leave()
                self._check_hangs()
            if self.failures:
                self._collect_failures()
                raise self._choose_verdict()
        self._drain_pipes()
        if self.failures:
            raise self._choose_verdict()
        self.listener.is_stop_requested = self.board.is_end_requested()
        return [self.results.get(w.rank) or {} for w in self.workers]

    def _read_pipes(self, timeout: float) -> None:
        for key, _ in self.selector.select(timeout):
            if callable(key.data):
                for number in os.read(key.fd, 1 << 10):
                    if number in STOP_SIGNALS:
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
                        self._handle_message(worker, _parse_report(line))
            else:
                self.listener.on_text(worker.rank, data)

    def _handle_message(self, worker: Worker, message: dict[str, Any]) -> None:
        if message["kind"] == "result":
            self.results[worker.rank] = message["value"] or {}
        elif message["kind"] == "failed":
            progress = self.board.read(worker.rank)
            self.failures[worker.rank] = Failure.from_report(worker.rank, progress, message, self.listener.names.get(worker.rank, ""))
            worker.is_reporting = True
        else:
            self.listener.on_message(worker.rank, message)

    def _reap_workers(self) -> None:
        for worker in [*self.workers]:
            if worker.status is None:
                pid, status = os.waitpid(worker.pid, os.WNOHANG)
                if pid:
                    worker.status = os.waitstatus_to_exitcode(status)
                    self._handle_exit(worker)

    def _handle_exit(self, worker: Worker) -> None:
        self._drain_pipes()
        worker.is_reporting = False
        if worker.rank in self.results or worker.rank in self.failures:
            return
        if self.returned_at is not None:  # a spare rank, which no other rank needs any more
            self.results[worker.rank] = {}
            return
        progress = self.board.read(worker.rank)
        failure = self.exit_analyzer.explain_exit(worker.rank, progress, worker.status or 0)
        word = self.spare.on_lost(worker.rank, failure) if self.spare is not None and self.spare.is_spare(worker.rank) else ""
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
            self._register_worker(fresh)

    def _end_spare_ranks(self) -> None:
        """Once all other ranks have returned, kill the spare ranks that do not exit."""
        spare = self.spare
        if spare is None or any(w.rank not in self.results for w in self.workers if not spare.is_spare(w.rank)):
            return
        if self.returned_at is None:
            self.returned_at = time.monotonic()
        elif time.monotonic() - self.returned_at > SPARE_EXIT_S:
            kill_workers([w for w in self.workers if w.status is None and spare.is_spare(w.rank)])

    def _drain_pipes(self) -> None:
        while self.selector.select(0):
            self._read_pipes(0)

    def _ask_to_leave(self) -> None:
        """Some time after a request to stop, make ranks abandon samples that they wait for, since the other ranks wait for them."""
        if not self.board.is_end_requested():
            return
        if self.asked_at is None:
            self.asked_at = time.monotonic()
            self.listener.on_note("note  received a request to stop: the ranks finish their step")
        for worker in self.workers if self.can_leave else ():
            late = time.monotonic() - self.asked_at > WAIT_GRACE_S and self.board.is_delayed(worker.rank, WAIT_GRACE_S)
            if late and worker.status is None and worker.rank not in self.left_ranks:
                self.left_ranks.add(worker.rank)
                self.board.request_leave()
                os.kill(worker.pid, signal.SIGTERM)

    def _check_hangs(self) -> None:
        """Report ranks without progress, with their stacks in their logs; end the run after a rank's limit."""
        hang = self.hangs.check()
        for group, waiting in self.hangs.list_silent_groups():
            for look in group:
                self._write_log(look.rank, look.stack.text)
            self.listener.on_note(format_silent_ranks(group, waiting, self.listener.names, self.listener.logs))
        if hang is not None:
            self._write_log(hang.suspect.rank, hang.suspect.stack.text)
            self.listener.on_hang()
            if self.spare is not None and self.spare.is_spare(hang.suspect.rank):
                self.listener.on_note(f"note  {describe_hang(hang).all_problems()[0].what}: it is ended")
                kill_workers([w for w in self.workers if w.rank == hang.suspect.rank])
                return
            self.failures[hang.suspect.rank] = describe_hang(hang)

    def _check_nodes(self) -> None:
        """Collect failures on other nodes, and keep the most likely cause."""
        failure = self.node.check_nodes(broken=bool(self.failures)) if self.node is not None else None
        if self.node is not None and self.node.regroups:
            self.board.stop(ends_run=False)
        if failure is not None and not failure.victim:
            self.failures[-1] = min((failure, self.failures.get(-1, failure)), key=lambda f: f.order)

    def _write_log(self, rank: int, text: str) -> None:
        if text:
            self.listener.on_message(rank, {"kind": "log", "text": text})

    def _collect_failures(self) -> None:
        """Wait briefly for reports of the other ranks, so that the cause is found among all failures, and for the logs of failed ranks."""
        began, reached = time.monotonic(), max(self.board.read(w.rank).step for w in self.workers)
        wanted = (
            SAMPLE_GRACE_S
            if any(p.code in BETWEEN_STEP_CODES for f in self.failures.values() for p in f.all_problems())
            else self.snapshot_grace
        )
        handing = wanted if reached > 0 else 0.0  # a rank that still waits for the rendezvous has no snapshot
        if handing:  # survivors detect the loss of a rank when it has ended
            kill_workers(
                [
                    w
                    for w in self.workers
                    if w.rank in self.failures and not self.failures[w.rank].victim and not w.is_reporting
                ]
            )
        while (waited := time.monotonic() - began) < LOG_WAIT_S:
            guilty = any(not failure.victim for failure in self.failures.values())
            said = all(w.status is not None or w.rank in self.failures for w in self.workers)
            said = said and (guilty or self.node is None or waited > REPLY_WAIT)
            patience = max(handing, 0.2 if guilty else REPORT_WAIT_S if self.node is None else REPLY_WAIT)
            if not any(w.is_reporting for w in self.workers) and (said or waited > patience):
                break
            self._check_nodes()
            self._read_pipes(0.05 if any(w.open_pipes for w in self.workers) else 0.002)
            self._reap_workers()
        end_workers(self.workers)
        self._drain_pipes()
        self.listener.steps_done = max(self.board.read(w.rank).step for w in self.workers)
        self.listener.is_stop_requested = self.board.is_end_requested()

    def _choose_verdict(self) -> PlaitError:
        guilty = min(self.failures.values(), key=lambda f: f.order)
        self.listener.guilty_rank = guilty.rank
        if self.node is not None:
            self.node.announce_failure(guilty, here=guilty is not self.failures.get(-1))
        return guilty.error()


def kill_workers(workers: list[Worker]) -> None:
    """Kill the workers that still run."""
    for worker in workers:
        if worker.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)


def end_workers(workers: list[Worker]) -> None:
    """Kill the workers that still run, and wait for their end."""
    kill_workers(workers)
    for worker in workers:
        if worker.status is None:
            _, status = os.waitpid(worker.pid, 0)
            worker.status = os.waitstatus_to_exitcode(status)


def _parse_report(line: bytes | bytearray) -> dict[str, Any]:
    """Parse a report; other text in the pipe becomes a log message."""
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    return message if isinstance(message, dict) and "kind" in message else {"kind": "log", "text": f"{line!r}\n"}
