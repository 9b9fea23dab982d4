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
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from plait.config.errors import PlaitError
from plait.launch import limits
from plait.launch.devices import kind_of
from plait.launch.failure_report import described, pieces, trace_of, unforkable
from plait.launch.place import Place, threads
from plait.launch.progress import ProgressBoard
from plait.launch.stacks import Stacks
from plait.launch.supervise import Listener, Supervisor, Worker, end, kill

Target = Callable[[Place], dict[str, Any] | None]


def run(
    target: Target, world: int, listener: Listener | None = None, *, patience: float | None = None, alike: bool = True
) -> list[dict[str, Any]]:  # fmt: skip
    """Run `target(place)` in `world` forked processes and return what each returned (JSON values only).

    A rank that makes no progress is ended after `patience` seconds; None chooses, by what it does (see `launch/hangs.py`).
    `alike`: in every phase ranks do the same amount of work; not so with pipeline stages.

    Raises the `PlaitError` of the guilty rank when one fails; by then all workers have ended. Ctrl-C and SIGTERM ask
    the workers to stop (`Place.stopping`); a second one kills them.
    """
    _warm_up()
    limits.check_files(world)
    listening = limits.listening() if world > 1 else None
    board, stacks, workers = ProgressBoard(world), Stacks(), list[Worker]()
    try:
        with _frozen():
            for rank in range(world):
                with limits.forking(rank, world):
                    workers.append(_fork(target, board, stacks, listening, workers))
        server = _serve(listening) if listening is not None else None
        supervisor = Supervisor(workers, board, stacks, listener or Listener(), patience, alike)
        with _stop_signals(board, workers):
            result = supervisor.wait()
        del server
        return result
    finally:
        if listening is not None:
            listening.close()
        end(workers)
        stacks.close()
        for worker in workers:
            worker.close(worker.reports)
            worker.close(worker.output)


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """What exists already is left out of garbage collection, so that workers share its memory; afterwards all is as before."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def stay_forkable() -> None:
    """Autograd finds at the first backward pass which devices get threads, and a process with such threads cannot fork. A
    torch with CUDA counts devices from the first fake tensor on, also where there is none: so the first pass is now."""
    import torch

    if kind_of("auto") == "cpu":
        torch.ones(1, requires_grad=True).backward()


def _warm_up() -> None:
    """Import what workers need, before forking. One thread: a forked copy of a thread pool is dead. H011 after CUDA was used."""
    import torch

    if torch.cuda.is_initialized():
        raise PlaitError(unforkable("this process has used CUDA, which its copies could not"))

    from plait.tensors.torch_private import warm_dynamo

    warm_dynamo()  # the first optimizer imports it lazily, in every worker
    import torch.distributed

    torch.set_num_threads(1)
    faulthandler.enable()


def _serve(listening: socket.socket) -> Any:
    """The rendezvous store, in the launcher, on the loopback socket made before the fork."""
    from torch.distributed import TCPStore

    port = listening.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _fork(
    target: Target, board: ProgressBoard, stacks: Stacks, listening: socket.socket | None, before: list[Worker]
) -> Worker:
    rank, parent = len(before), os.getpid()
    reports, reports_end = os.pipe()
    output, output_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pid = os.fork()
        if pid == 0:
            for descriptor in (reports, output, *(d for w in before for d in (w.reports, w.output))):
                os.close(descriptor)
            stacks.answer()
            _child(lambda: _work(target, rank, board, listening, reports_end), parent, output_end)
    except OSError:
        os.close(reports)
        os.close(output)
        raise
    finally:
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
            status = work()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)  # a plain exit may abort in gloo's threads after a correct run


def _work(target: Target, rank: int, board: ProgressBoard, listening: socket.socket | None, channel: int) -> int:
    import torch

    lock, world = threading.Lock(), board.world

    def report(message: dict[str, Any]) -> None:
        data = (json.dumps(message, default=str) + "\n").encode()
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
        lambda step, phase: board.write(rank, step, phase),
        lambda phase: board.within(rank, phase),
        lambda: board.reads(rank),
        board.stopping,
    )
    try:
        result = target(place)
        report({"kind": "result", "value": result})
        board.write(rank, 2**62, "end")
        return 0
    except BaseException as error:
        _tell(error, report)
        return 1


def _tell(error: BaseException, report: Callable[[dict[str, Any]], None]) -> None:
    """Report a failure, short, and then its whole text for the log: into the output where nobody can be told."""
    try:
        report({"kind": "failed", **described(error)})
        for text in pieces(trace_of(error)):
            report({"kind": "log", "text": text})
    except OSError:
        sys.stderr.write(trace_of(error))


@contextlib.contextmanager
def _stop_signals(board: ProgressBoard, workers: list[Worker]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        if board.stopping() and number == signal.SIGINT:
            kill(workers)
            raise KeyboardInterrupt
        board.stop()

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
