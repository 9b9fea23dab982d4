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
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from plait.errors import PlaitError
from plait.job import user_line
from plait.launch.place import Place, threads
from plait.launch.supervise import Listener, Supervisor, Worker
from plait.launch.words import Words

Target = Callable[[Place], dict[str, Any] | None]


def run(target: Target, world: int, listener: Listener | None = None) -> list[dict[str, Any]]:
    """Run `target(place)` in `world` forked processes and return what each returned (JSON values only).

    Raises the `PlaitError` of the guilty rank when one fails; by then all workers have ended. Ctrl-C and SIGTERM ask
    the workers to stop (`Place.stopping`); a second one kills them.
    """
    _warm_up()
    words = Words(world)
    listening = _loopback_socket() if world > 1 else None
    workers = [_fork(target, rank, world, words, listening) for rank in range(world)]
    server = _serve(listening) if listening is not None else None
    supervisor = Supervisor(workers, words, listener or Listener())
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


def _warm_up() -> None:
    """Import what workers need, before forking. One thread: a forked copy of a thread pool is dead."""
    import torch

    from plait.torchseam import warm_dynamo

    warm_dynamo()  # the first optimizer imports it lazily, in every worker
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


def _serve(listening: socket.socket) -> Any:
    """The rendezvous store, in the launcher, on the loopback socket made before the fork."""
    from torch.distributed import TCPStore

    port = listening.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _fork(target: Target, rank: int, world: int, words: Words, listening: socket.socket | None) -> Worker:
    reports, reports_end = os.pipe()
    output, output_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child(lambda: _work(target, rank, world, words, listening, reports_end), parent, output_end)
    os.close(reports_end)
    os.close(output_end)
    return Worker(rank, pid, reports, output)


def _child(work: Callable[[], int], parent: int, output: int) -> NoReturn:
    """Life of a forked process: its output goes to the launcher, signals are the launcher's business, no way back."""
    die_with_parent()
    status = 1
    with contextlib.suppress(BaseException):
        if os.getppid() == parent:
            os.dup2(output, 1)
            os.dup2(output, 2)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
            status = work()
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
    torch.set_num_threads(threads(world))
    port = listening.getsockname()[1] if listening is not None else 0
    if listening is not None:
        listening.close()
    place = Place(
        rank,
        world,
        rank,
        store if world > 1 else None,
        report,
        lambda step, phase: words.write(rank, step, phase),
        words.stopping,
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
        "memory": isinstance(error, MemoryError)
        or "can't allocate memory" in str(error)
        or "OutOfMemory" in type(error).__name__,
    }


@contextlib.contextmanager
def _stop_signals(words: Words, supervisor: Supervisor):
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
