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
import pickle
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NoReturn, TextIO, TypeVar

from plait.config.errors import PlaitError
from plait.launch import forkable, limits
from plait.launch.child import live
from plait.launch.devices import kind_of
from plait.launch.failures import described, pieces, trace_of, unforkable
from plait.launch.hangs import Stacks
from plait.launch.limits import own_offsets
from plait.launch.loopback import LOOPBACK, LocalStore
from plait.launch.nodes import Node
from plait.launch.place import AROUND, Place, threads
from plait.launch.progress import ProgressBoard
from plait.launch.rendezvous import Meeting
from plait.launch.stopping import REQUESTS, RankSignals, StopRequest, signal_pipe
from plait.launch.supervise import Listener, Spare, Supervisor, Worker, end, kill

T = TypeVar("T")
Target = Callable[[Place], dict[str, Any] | None]
OMP_PAUSE_HARD = 2
"""OpenMP 5.0, `omp_pause_resource_all`: give back all threads; the next parallel region makes new ones."""


def run(
    target: Target, world: int, listener: Listener | None = None, *, patience: float | None = None, alike: bool = True,
    node: Node | None = None, handing: float = 0.0, devices: Sequence[int] | None = None, spare: Spare | None = None, leaves: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run `target(place)` in `world` forked processes and return what each returned (JSON values only).

    A rank that makes no progress is ended after `patience` seconds; None chooses, by what it does (see `launch/hangs.py`).
    `alike`: in every phase ranks do the same amount of work; not so with pipeline stages.
    `handing`: seconds that ranks which lose another are given to put away what they hold.
    `node`: this machine is one of several; only its own ranks are forked here, and only what they returned is.
    `spare`: ranks that the run can go on without; then ranks find each other by themselves, and have no store.
    `leaves`: ranks that wait for samples leave the step where somebody asks to stop, for what they hold is kept (`engine/train.py`).
    `devices`: numbers of the devices of this machine that the ranks forked here use, in their order; None: from 0 on.

    Raises the `PlaitError` of the guilty rank when one fails; by then all workers have ended. Ctrl-C, SIGTERM and SIGUSR1,
    to this process or to a rank, ask the workers to stop (`Place.stopping`); a second Ctrl-C kills them.
    """
    _warm_up()
    ranks = range(world) if node is None else node.ranks
    alone = world > 1 and node is None and spare is None
    limits.check(len(ranks), alone)
    store = LocalStore() if alone else None
    meeting, requests = node.meeting if node is not None else None, signal_pipe()
    group = _Group(target, world, ProgressBoard(ranks), Stacks(ranks), store, meeting, devices or range(len(ranks)), requests[1])
    workers, supervisor = list[Worker](), None
    try:
        with _frozen():
            for rank in ranks:
                with limits.forking(f"rank {rank} of {world}", f"--nproc {max(1, rank)}"):
                    workers.append(_fork(group, rank, workers))
        if spare is not None:
            spare = replace(spare, fork=lambda rank: _fork(group, rank, workers))
        supervisor = Supervisor(
            workers, group.board, group.stacks, listener or Listener(), patience, alike,
            node=node, handing=handing, spare=spare, leaves=leaves,
        )  # fmt: skip
        with _stop_signals(group.board, workers) as asked:
            return supervisor.wait(requests[0], asked)
    finally:
        if supervisor is not None:
            supervisor.selector.close()
        if store is not None:
            store.close()
        end(workers)
        list(map(os.close, requests))
        group.stacks.close()
        for worker in workers:
            worker.close(worker.reports)
            worker.close(worker.output)


class ForkResult(Generic[T]):
    """A value that a forked process returns to its parent: any that can be pickled. It goes through memory, or a file, without a name, so no
    other process can write it."""

    def __init__(self) -> None:
        linux = hasattr(os, "memfd_create")
        self._file = os.fdopen(os.memfd_create("plait"), "w+b") if linux else tempfile.TemporaryFile()  # noqa: SIM115

    def __enter__(self) -> "ForkResult[T]":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def put(self, value: T) -> None:
        """Set the value, in the forked process."""
        pickle.dump(value, self._file)
        self._file.flush()

    def take(self) -> T:
        """The value, in the parent, after the forked process has ended."""
        self._file.seek(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, of trees that it reads back
            return pickle.load(self._file)


def computed(work: Callable[[Place], T]) -> T:
    """What `work` returns in a forked process. This one stays as it is: no user's code runs in it, and it can fork. Raises as `run` does."""
    with ForkResult[T]() as result:

        def target(place: Place) -> dict[str, Any]:
            result.put(work(place))
            return {}

        run(target, 1)
        return result.take()


@dataclass(frozen=True)
class _Group:
    """What the ranks of this machine have in common."""

    target: Target
    world: int
    board: ProgressBoard
    stacks: Stacks
    store: LocalStore | None
    """Where the ranks find each other, where all are on this machine."""
    meeting: Meeting | None
    """Where they are not."""
    devices: Sequence[int]
    """Of each of them, in order."""
    requests: int
    """The pipe into which ranks write the numbers of signals that they get."""


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """What exists already is left out of garbage collection, so that workers share its memory; afterwards all is as before."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def stay_forkable() -> None:
    """Autograd finds at the first backward pass which devices get threads, and a process with such threads cannot fork. A
    torch with CUDA counts devices from the first fake tensor on, also where there is none: so the first pass is now."""
    import torch

    forkable.answer_by_forks()
    if kind_of("auto") == "cpu":
        torch.ones(1, requires_grad=True).backward()


def _warm_up() -> None:
    """Import what workers need, before forking. One thread: a forked copy of a thread pool is dead, so OpenMP's, in which this
    thread may have computed, is dissolved. H011 after CUDA was used, or where autograd has threads for devices."""
    import torch

    forkable.stay()
    if why := forkable.spoilt():
        raise PlaitError(unforkable(why))

    from plait.tensors.torch_private import warm_up

    warm_up()
    import torch.distributed

    torch.set_num_threads(1)
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(OMP_PAUSE_HARD)
    faulthandler.enable(2)  # of a worker, its output: sys.stderr may be anything, such as a notebook's


def _fork(group: _Group, rank: int, before: list[Worker]) -> Worker:
    parent = os.getpid()
    reports, reports_end = os.pipe()
    output, output_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pid = os.fork()
        if pid == 0:
            for descriptor in (reports, output, *(d for w in before for d in w.opened)):
                os.close(descriptor)
            _child(lambda: _work(group, rank, reports_end), parent, output_end)
    except OSError:
        os.close(reports)
        os.close(output)
        raise
    finally:
        os.close(reports_end)
        os.close(output_end)
    return Worker(rank, pid, reports, output)


def _child(work: Callable[[], int], parent: int, output: int) -> NoReturn:
    """Life of a forked rank: its output goes to the launcher."""

    def heard() -> int:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = _plain(sys.stdout, 1), _plain(sys.stderr, 2)
        return work()

    live(heard, parent)


def _plain(stream: TextIO, descriptor: int) -> TextIO:
    """A stream that writes to the descriptor: that of a notebook would write to the notebook's sockets."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it may have no descriptor
        if stream.fileno() == descriptor:
            return stream
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _work(group: _Group, rank: int, channel: int) -> int:
    import torch

    own_offsets()
    _die_first()
    group.stacks.answer(rank)
    lock, board = threading.Lock(), group.board
    signals = RankSignals(board, group.requests)
    signals.listen()

    def report(message: dict[str, Any]) -> None:
        data = (json.dumps(message, default=str) + "\n").encode()
        with lock:
            while data:
                data = data[os.write(channel, data) :]

    first, store = board.ranks.start, None
    if group.store is not None:
        os.environ["GLOO_SOCKET_IFNAME"], store = LOOPBACK, group.store.open
    elif group.meeting is not None:
        os.environ["GLOO_SOCKET_IFNAME"], store = group.meeting.interface.name, group.meeting.store
    torch.set_num_threads(threads(len(board.ranks)))
    place = Place(
        rank,
        group.world,
        group.devices[rank - first],
        store,
        report,
        lambda step, phase: board.write(rank, step, phase),
        lambda phase: board.within(rank, phase),
        lambda: board.reads(rank),
        board.stopping,
        signals.leaving,
    )
    try:
        result = group.target(AROUND.get()(place))
        report({"kind": "result", "value": result})
        board.write(rank, 2**62, "end")
        return 0
    except BaseException as error:
        _tell(error, report)
        return 1


def _die_first() -> None:
    """Where memory runs out, have the system end a rank (Linux) and not the launcher, which can say so."""
    with contextlib.suppress(OSError, ValueError):
        score = Path("/proc/self/oom_score_adj")
        score.write_text(f"{min(1000, int(score.read_text()) + 200)}")


def _tell(error: BaseException, report: Callable[[dict[str, Any]], None]) -> None:
    """Report a failure, short, and then its whole text for the log: into the output where nobody can be told."""
    try:
        report({"kind": "failed", **described(error)})
        for text in pieces(trace_of(error)):
            report({"kind": "log", "text": text})
    except OSError:
        sys.stderr.write(trace_of(error))


@contextlib.contextmanager
def _stop_signals(board: ProgressBoard, workers: list[Worker]) -> Iterator[Callable[[int], None]]:
    """Meanwhile signals to this process ask its ranks to stop. Yields what does so for a signal that a rank got."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda number: board.stop()
        return

    before, request = {number: signal.getsignal(number) for number in REQUESTS}, StopRequest.of_process(waits=True)

    def asked(number: int) -> None:
        board.stop()
        request.beside(board, number)

    def stop(number: int, frame: object) -> None:
        if board.asked() and number == signal.SIGINT:
            kill(workers)
            raise KeyboardInterrupt
        asked(number)

    try:
        for number in before:
            signal.signal(number, stop)
        request.before(board)
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
