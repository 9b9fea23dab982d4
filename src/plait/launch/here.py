"""Launching on this machine: fork workers from a process that has imported torch once, and watch over them.

Forking a warm process takes milliseconds where starting torch anew takes seconds. The rendezvous store listens on
127.0.0.1 only and gloo is told to use the loopback interface. Workers die with the launcher. The launcher reads what
they print (into a log per rank), their progress words and their exit codes, and when one fails it ends all of them
and names the one that is guilty: a rank that only lost its peer is a victim.
"""

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from plait.errors import PlaitError, Problem
from plait.job import user_line
from plait.launch.place import Place, cores
from plait.launch.watch import Failure, Watch
from plait.launch.words import Words

Target = Callable[[Place], dict[str, Any] | None]


@dataclass
class Listener:
    """What the launcher does with what workers say. `message` gets their reports, `text` their output, by rank."""

    message: Callable[[int, dict[str, Any]], None] = field(default=lambda rank, message: None)
    text: Callable[[int, bytes], None] = field(default=lambda rank, text: None)
    tick: Callable[[], None] = field(default=lambda: None)


@dataclass
class _Worker:
    rank: int
    pid: int
    reports: int
    output: int
    buffer: bytes = b""
    status: int | None = None


def run(target: Target, world: int, listener: Listener | None = None) -> list[dict[str, Any]]:
    """Run `target(place)` in `world` forked processes and return what each returned (JSON values only).

    Raises the `PlaitError` of the guilty rank when one fails; by then all workers have ended. Ctrl-C and SIGTERM ask
    the workers to stop (`Place.stopping`); a second one kills them.
    """
    _warm_up(world)
    words = Words(world)
    listening = _loopback_socket() if world > 1 else None
    workers = [_fork(target, rank, world, words, listening) for rank in range(world)]
    server = _serve(listening, world) if listening is not None else None
    supervisor = _Supervisor(workers, words, listener or Listener())
    try:
        with _stop_signals(words, supervisor):
            return supervisor.wait()
    finally:
        supervisor.kill()
        del server


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _warm_up(world: int) -> None:
    """Import what workers need, before forking. One thread: a forked copy of a thread pool is dead."""
    import torch
    import torch._dynamo  # the first optimizer imports it lazily, in every worker
    import torch.distributed

    import plait.engine  # noqa: F401

    torch.set_num_threads(1)
    faulthandler.enable()
    gc.freeze()


def _loopback_socket() -> socket.socket:
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(256)
    return listening


def _serve(listening: socket.socket, world: int) -> Any:
    """The rendezvous store, in the launcher, on the loopback socket made before the fork."""
    from torch.distributed import TCPStore

    port = listening.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _fork(target: Target, rank: int, world: int, words: Words, listening: socket.socket | None) -> _Worker:
    reports, reports_end = os.pipe()
    output, output_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(reports_end)
        os.close(output_end)
        return _Worker(rank, pid, reports, output)
    status = 1
    try:
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        os.close(reports)
        os.close(output)
        os.dup2(output_end, 1)
        os.dup2(output_end, 2)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=False)
        status = _work(target, rank, world, words, listening, reports_end)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)  # a plain exit may abort in gloo's threads after a correct run


def _work(target: Target, rank: int, world: int, words: Words, listening: socket.socket | None, channel: int) -> int:
    import torch

    lock = threading.Lock()

    def report(message: dict[str, Any]) -> None:
        data = (json.dumps(message) + "\n").encode()
        with lock:
            while data:
                data = data[os.write(channel, data) :]

    def store() -> Any:
        assert listening is not None
        return torch.distributed.TCPStore("127.0.0.1", port, is_master=False)

    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(max(1, cores() // world))
    port = listening.getsockname()[1] if listening is not None else 0
    if listening is not None:
        listening.close()
    place = Place(
        rank, world, rank, store if world > 1 else None, report, lambda step, phase: words.write(rank, step, phase), words.stopping
    )
    try:
        result = target(place)
        report({"kind": "result", "value": result})
        words.write(rank, 2**62, "end")
        return 0
    except BaseException as error:
        report({"kind": "failed", **_described(error), "trace": traceback.format_exc()})
        return 1


def _described(error: BaseException) -> dict[str, Any]:
    problems = [vars(p) for p in error.problems] if isinstance(error, PlaitError) else []
    lines = str(error).splitlines() or [""]
    return {
        "type": type(error).__name__,
        "text": lines[0],
        "where": user_line(error),
        "problems": problems,
        "exit_code": error.exit_code if isinstance(error, PlaitError) else 1,
        "memory": isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "OutOfMemory" in type(error).__name__,
    }


class _Supervisor:
    """Reads the workers until all have ended, or one has failed and the guilty one is known."""

    def __init__(self, workers: list[_Worker], words: Words, listener: Listener):
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
            self._read(0.05)
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

    def _message(self, worker: _Worker, message: dict[str, Any]) -> None:
        if message["kind"] == "result":
            self.results[worker.rank] = message["value"] or {}
        elif message["kind"] == "failed":
            step, phase, _, _ = self.words.read(worker.rank)
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

    def _ended(self, worker: _Worker) -> None:
        self._drain()
        if worker.rank in self.results or worker.rank in self.failures:
            return
        step, phase, _, memory = self.words.read(worker.rank)
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
        step, phase, when, _ = self.words.read(rank)
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


@contextlib.contextmanager
def _stop_signals(words: Words, supervisor: _Supervisor):
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        if words.stopping() and number == signal.SIGINT:
            supervisor.kill()
        words.stop()

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
