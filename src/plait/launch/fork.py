"""Fork the ranks of this node from a process that has imported torch, and supervise them.

A fork of a process that has imported torch takes milliseconds; a new import takes seconds. The rendezvous store listens on 127.0.0.1 only,
and gloo uses the loopback interface. Ranks end with the launcher. The launcher reads their output (into one log per rank), their progress
and their exit codes. When one fails, the launcher ends all of them and reports the rank that caused the failure. A rank that only lost its
peer is a victim.
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
from plait.launch.child import fork_process, run_child
from plait.launch.devices import resolve_kind
from plait.launch.failures import describe_error, format_error_trace, split_chunks, unforkable
from plait.launch.hangs import Stacks
from plait.launch.limits import reopen_inherited_files
from plait.launch.loopback import LOOPBACK, LocalStore
from plait.launch.nodes import Node
from plait.launch.place import PLACE_WRAPPER, Place, count_threads
from plait.launch.progress import ProgressBoard
from plait.launch.rendezvous import Rendezvous
from plait.launch.stopping import STOP_SIGNALS, RankSignals, StopRequest, open_signal_pipe
from plait.launch.supervisor import Listener, SpareRanks, Supervisor, Worker, end_workers, kill_workers

T = TypeVar("T")
Target = Callable[[Place], dict[str, Any] | None]
OMP_PAUSE_HARD = 2
"""OpenMP 5.0, `omp_pause_resource_all`: release all threads; the next parallel region starts new ones."""


def run_ranks(
    target: Target, world: int, listener: Listener | None = None, *, hang_timeout: float | None = None, uniform: bool = True,
    node: Node | None = None, snapshot_grace: float = 0.0, devices: Sequence[int] | None = None, spare: SpareRanks | None = None,
    can_leave: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run `target(place)` in `world` forked processes and return their results (JSON values only).

    A rank without progress is ended after `hang_timeout` seconds; None selects a limit by its activity (see `launch/hangs.py`).
    `uniform`: all ranks do the same amount of work in every phase; false for pipeline stages.
    `snapshot_grace`: seconds in which the survivors of a rank failure may save their snapshots.
    `node`: this node is one of several; only its ranks are forked, and only their results are returned.
    `spare`: ranks that the run can lose; ranks then connect by themselves, without a store.
    `can_leave`: on a request to stop, ranks that wait for samples abandon the step, since their state is saved (`engine/train.py`).
    `devices`: device indices of the ranks forked here, in rank order; None: 0, 1, 2, …

    Raises the `PlaitError` of the rank that caused a failure, after all ranks have ended. Ctrl-C, SIGTERM and SIGUSR1, sent to this process or
    to a rank, request all ranks to stop (`Place.is_stopping`); a second Ctrl-C kills them.
    """
    _warm_up()
    ranks = range(world) if node is None else node.ranks
    alone = world > 1 and node is None and spare is None
    limits.check_limits(len(ranks), alone)
    store = LocalStore() if alone else None
    meeting, requests = node.meeting if node is not None else None, open_signal_pipe()
    group = _RankGroup(target, world, ProgressBoard(ranks), Stacks(ranks), store, meeting, devices or range(len(ranks)), requests[1])
    workers, supervisor = list[Worker](), None
    try:
        with _freeze_garbage():
            for rank in ranks:
                with limits.catch_fork_failure(f"rank {rank} of {world}", f"--nproc {max(1, rank)}"):
                    workers.append(_fork_rank(group, rank, workers))
        if spare is not None:
            spare = replace(spare, fork=lambda rank: _fork_rank(group, rank, workers))
        supervisor = Supervisor(
            workers, group.board, group.stacks, listener or Listener(), hang_timeout, uniform,
            node=node, snapshot_grace=snapshot_grace, spare=spare, can_leave=can_leave,
        )  # fmt: skip
        with _request_stops(group.board, workers) as asked:
            return supervisor.wait(requests[0], asked)
    finally:
        if supervisor is not None:
            supervisor.selector.close()
        if store is not None:
            store.close()
        end_workers(workers)
        list(map(os.close, requests))
        group.stacks.close()
        for worker in workers:
            worker.close(worker.reports)
            worker.close(worker.output)


class ForkResult(Generic[T]):
    """Result of a forked process for its parent: any value that can be pickled.

    It is passed in memory, or in a file without a name, so no other process can write it.
    """

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
        """Return the value, in the parent, after the forked process has ended."""
        self._file.seek(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, of trees that it reads back
            return pickle.load(self._file)


def run_forked(work: Callable[[Place], T]) -> T:
    """Return the result of `work` in a forked process. This process runs no user code, so it can still fork. Raises as `run_ranks` does."""
    with ForkResult[T]() as result:

        def target(place: Place) -> dict[str, Any]:
            result.put(work(place))
            return {}

        run_ranks(target, 1)
        return result.take()


@dataclass(frozen=True)
class _RankGroup:
    """Common state of the ranks of this node."""

    target: Target
    world: int
    board: ProgressBoard
    stacks: Stacks
    store: LocalStore | None
    """Store of the ranks, if all are on this node."""
    meeting: Rendezvous | None
    """Rendezvous of the ranks, if they are on several nodes."""
    devices: Sequence[int]
    """Device index of each rank, in rank order."""
    requests: int
    """Pipe into which ranks write the numbers of signals that they receive."""


@contextlib.contextmanager
def _freeze_garbage() -> Iterator[None]:
    """Exclude existing objects from garbage collection, so that ranks share their memory; restore it afterwards."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def stay_forkable() -> None:
    """Run autograd's first backward pass now, while no device has a thread.

    Autograd starts threads for devices at the first backward pass, and a process with such threads cannot fork. torch with CUDA counts devices
    from the first fake tensor on, even without a device.
    """
    import torch

    forkable.answer_by_forks()
    if resolve_kind("auto") == "cpu":
        torch.ones(1, requires_grad=True).backward()


def _warm_up() -> None:
    """Import the ranks' modules before forking, and reduce this process to one thread.

    A fork has no working copy of a thread pool, so OpenMP's pool is released. Raises H011 if CUDA was used, or if autograd has threads for
    devices.
    """
    import torch

    forkable.keep_forkable()
    if why := forkable.find_fork_obstacle():
        raise PlaitError(unforkable(why))

    from plait.tensors.torch_private import warm_up

    warm_up()
    import torch.distributed

    torch.set_num_threads(1)
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(OMP_PAUSE_HARD)
    faulthandler.enable(2)  # a worker's output; sys.stderr may be another stream, such as a notebook's


def _fork_rank(group: _RankGroup, rank: int, before: list[Worker]) -> Worker:
    parent = os.getpid()
    reports, reports_end = os.pipe()
    output, output_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pid = fork_process()
        if pid == 0:
            for descriptor in (reports, output, *(d for w in before for d in w.open_pipes)):
                os.close(descriptor)
            _run_output_child(lambda: _run_rank(group, rank, reports_end), parent, output_end)
    except OSError:
        os.close(reports)
        os.close(output)
        raise
    finally:
        os.close(reports_end)
        os.close(output_end)
    return Worker(rank, pid, reports, output)


def _run_output_child(work: Callable[[], int], parent: int, output: int) -> NoReturn:
    """Run a forked rank with its output redirected to the launcher."""

    def run_redirected() -> int:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = _open_stream(sys.stdout, 1), _open_stream(sys.stderr, 2)
        return work()

    run_child(run_redirected, parent)


def _open_stream(stream: TextIO, descriptor: int) -> TextIO:
    """Return a text stream for the descriptor. A notebook's own stream would write to the notebook's sockets."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it may have no descriptor
        if stream.fileno() == descriptor:
            return stream
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _run_rank(group: _RankGroup, rank: int, channel: int) -> int:
    import torch

    reopen_inherited_files()
    _raise_oom_score()
    group.stacks.install_handlers(rank)
    lock, board = threading.Lock(), group.board
    signals = RankSignals(board, group.requests)
    signals.install_handlers()

    def report(message: dict[str, Any]) -> None:
        data = (json.dumps(message, default=str) + "\n").encode()
        with lock:
            while data:
                data = data[os.write(channel, data) :]

    first, store = board.ranks.start, None
    if group.store is not None:
        os.environ["GLOO_SOCKET_IFNAME"], store = LOOPBACK, group.store.open
    elif group.meeting is not None:
        os.environ["GLOO_SOCKET_IFNAME"], store = group.meeting.interface.name, group.meeting.connect_store
    torch.set_num_threads(count_threads(len(board.ranks)))
    place = Place(
        rank,
        group.world,
        group.devices[rank - first],
        store,
        report,
        lambda step, phase: board.write(rank, step, phase),
        lambda phase: board.write_phase(rank, phase),
        lambda: board.mark_read(rank),
        board.is_stopping,
        signals.allow_leaving,
    )
    try:
        result = group.target(PLACE_WRAPPER.get()(place))
        report({"kind": "result", "value": result})
        board.write(rank, 2**62, "end")
        return 0
    except BaseException as error:
        _report_error(error, report)
        return 1


def _raise_oom_score() -> None:
    """Raise this rank's out-of-memory score (Linux), so that the kernel kills a rank before the launcher, which reports it."""
    with contextlib.suppress(OSError, ValueError):
        score = Path("/proc/self/oom_score_adj")
        score.write_text(f"{min(1000, int(score.read_text()) + 200)}")


def _report_error(error: BaseException, report: Callable[[dict[str, Any]], None]) -> None:
    """Report a failure to the launcher in short form, then its full text for the log. Without a launcher, print it."""
    try:
        report({"kind": "failed", **describe_error(error)})
        for text in split_chunks(format_error_trace(error)):
            report({"kind": "log", "text": text})
    except OSError:
        sys.stderr.write(format_error_trace(error))


@contextlib.contextmanager
def _request_stops(board: ProgressBoard, workers: list[Worker]) -> Iterator[Callable[[int], None]]:
    """Inside, signals to this process request its ranks to stop. Yields a function that does the same for a signal of a rank."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda number: board.stop()
        return

    before, request = {number: signal.getsignal(number) for number in STOP_SIGNALS}, StopRequest.get_current(waits=True)

    def on_signal(number: int) -> None:
        board.stop()
        request.handle_with_ranks(board, number)

    def stop(number: int, frame: object) -> None:
        if board.is_end_requested() and number == signal.SIGINT:
            kill_workers(workers)
            raise KeyboardInterrupt
        on_signal(number)

    try:
        for number in before:
            signal.signal(number, stop)
        request.handle_pending(board)
        yield on_signal
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
