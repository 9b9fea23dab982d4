"""Requests to stop: SIGTERM (a node is preempted), SIGUSR1 (Slurm's advance warning) and Ctrl-C in `plait train`.

Ranks that train finish their step and save; a rank that waits for samples abandons the step. Before the first step there is nothing to
save, and the process ends at once. In both cases the exit code is 75, which requests another start; for Ctrl-C before the first step it is
130.

Python runs a signal handler between two bytecode instructions, and not while the main thread waits in compiled code for a store or other
ranks. There the number of the signal, which the C handler writes into a pipe at once, is read by another party. For a rank that plait
forked, it is the launcher (`RankSignals`); for any other process, a thread (`end_waits_on_stop`).
"""

import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from plait.config.errors import RESUMABLE, PlaitError, Problem
from plait.launch.progress import ProgressBoard

WARNING_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
STOP_SIGNALS = (signal.SIGINT, *WARNING_SIGNALS)
_END_MARK = b"\0"
WAIT_GRACE_S = 1.0
"""Seconds after a request in which a wait may end by itself, before it is abandoned."""


class StopRequested(KeyboardInterrupt):
    """Raised by a request to stop before there is anything to save. Handlers of `Exception` do not catch it."""

    def error(self) -> PlaitError:
        """Convert to C011."""
        why = f"{signal.Signals(self.args[0]).name} arrived before the first step was saved"
        fix = (f"{rebuild_command()}    runs it again",)
        return PlaitError(Problem("C011", "stopped before the first step", why=why, fix=fix), RESUMABLE)


class StopRequest:
    """Whether this process received a request to stop. Handles the signals, also while there are forked ranks (see `fork.py`).

    `waits`: this process ends after the current or next step. `trains`: its ranks are those of a run.
    """

    def __init__(self, waits: bool = False):
        self.waits, self.trains, self.number, self.process = waits, False, 0, os.getpid()

    @staticmethod
    def get_current(waits: bool = False) -> "StopRequest":
        """Return the request that handles this process's signals, or a new one without signals."""
        heard = signal.getsignal(signal.SIGTERM)
        return heard if isinstance(heard, StopRequest) else StopRequest(waits)

    @contextlib.contextmanager
    def handle_signals(self) -> Iterator["StopRequest"]:
        """Inside, the signals are requests to stop. Raises C011 if one ended this process."""
        before = self.install_handlers()
        try:
            with convert_stop():
                yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def install_handlers(self) -> dict[int, "signal._HANDLER"]:
        """Handle the signals as requests from now on. Returns the previous handlers."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, self) for number in WARNING_SIGNALS}

    def is_set(self) -> bool:
        return self.number > 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:  # a process that was forked just now
            return
        first, self.number = not self.number, number
        if first and self.is_immediate():
            raise StopRequested(number)

    def is_immediate(self) -> bool:
        """Whether a request ends this process while it has no ranks."""
        return not (self.waits or self.trains)

    @contextlib.contextmanager
    def mark_training(self) -> Iterator[None]:
        """Inside, this process has ranks that train."""
        self.trains = True
        try:
            yield
        finally:
            self.trains = False

    def mark_begun(self, step: int) -> None:
        """Record in a rank of another launcher that `step` steps are complete. After the first step, a request waits for the next one."""
        self.waits = self.waits or step > 0

    def handle_with_ranks(self, board: ProgressBoard, number: int) -> None:
        """Handle a request while there are ranks: ranks that train continue until they have saved, once all of them are built."""
        first, self.number = not self.number, number
        if first and not (self.waits or (self.trains and board.has_begun())):
            raise StopRequested(number)

    def handle_pending(self, board: ProgressBoard) -> None:
        """Handle a request that arrived while ranks were forked, or between two starts of them."""
        if self.number and self.trains:
            if not self.waits:
                raise StopRequested(self.number)
            board.stop()


def run_stoppable(work: Callable[[], int]) -> int:
    """Run the work of a command, with signals as requests to stop; afterwards signals are ignored.

    `plait` then prints the result, which takes a moment under torchrun, and `cli/main.py` restores the handlers.
    """
    handled = StopRequest().install_handlers()
    try:
        with convert_stop():
            return work()
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_IGN)


def open_signal_pipe() -> tuple[int, int]:
    """Open an `os.pipe()` for `signal.set_wakeup_fd` with a non-blocking end for writing."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    return reading, writing


@contextlib.contextmanager
def end_waits_on_stop() -> Iterator[None]:
    """Inside, a request that ends this process takes effect within `WAIT_GRACE_S` seconds, even in compiled code."""
    request = StopRequest.get_current()
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not request:
        yield
        return
    reading, writing = open_signal_pipe()
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    over = threading.Event()
    thread = threading.Thread(target=_end_stuck_process, args=(request, reading, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        os.write(writing, _END_MARK)  # closing it is not enough: a process that was forked inside has it too
        thread.join()
        os.close(writing)
        os.close(reading)


def _end_stuck_process(request: StopRequest, reading: int, over: threading.Event) -> None:
    """Thread: end the process if its main thread has not handled a request within `WAIT_GRACE_S` seconds."""
    while not (numbers := os.read(reading, 64)).endswith(_END_MARK):
        asked = next((number for number in numbers if number in STOP_SIGNALS), None)
        if asked is None or over.wait(WAIT_GRACE_S) or request.number or not request.is_immediate():
            continue
        if asked != signal.SIGINT:
            print(StopRequested(asked).error(), file=sys.stderr, flush=True)
        os._exit(130 if asked == signal.SIGINT else RESUMABLE)


class RankSignals:
    """Requests to stop in a rank that plait forked: its launcher reads them from `pipe`, in any state of the rank.

    The launcher requests all ranks to stop through the board. With a signal it also makes a rank abandon samples, in `allow_leaving`.
    """

    def __init__(self, board: ProgressBoard, pipe: int):
        self.board, self.pipe, self.waits = board, pipe, False

    def install_handlers(self) -> None:
        """Handle signals in this rank from now on. Processes that the rank forks are excluded; signals to them are no requests."""
        for number in STOP_SIGNALS:
            signal.signal(number, self)
        signal.set_wakeup_fd(self.pipe, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_reset_signals)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.waits and self.board.is_leave_requested():
            self.waits = False
            raise StopRequested(number)

    @contextlib.contextmanager
    def allow_leaving(self) -> Iterator[None]:
        """Inside, a rank that reads samples raises `StopRequested` if the launcher requests it to abandon them."""
        self.waits = True
        try:
            if self.board.is_leave_requested():
                raise StopRequested(signal.SIGTERM)
            yield
        finally:
            self.waits = False


def _reset_signals() -> None:
    """Restore the signals in a process that a rank has forked: SIGTERM ends it, Ctrl-C is for the launcher."""
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)


def stopped_reading_error(rank: int, done: int) -> PlaitError:
    """C011 of a rank that received a request to stop while it read samples, of a step or of an evaluation."""
    why = "the run received a request to stop, and a rank does not wait for samples then: they are read again after --resume"
    what = f"stopped while rank {rank} read samples after step {done}"
    return PlaitError(Problem("C011", what, why=why, fix=("--resume    continues after that step",)), RESUMABLE)


@contextlib.contextmanager
def convert_stop() -> Iterator[None]:
    """Convert `StopRequested` to an error that other nodes can read; a Ctrl-C stays as it is, since it needs no explanation."""
    try:
        yield
    except StopRequested as stopped:
        if stopped.args[0] == signal.SIGINT:
            raise
        raise stopped.error() from None


def rebuild_command(*more: str, resume: str = "", to: str = "") -> str:
    """Return this process's command line with `more` options, and with `to` in place of the `resume` value."""
    program, *words = sys.argv
    if Path(program).name not in ("plait", "__main__.py") or words[:1] != ["train"]:
        return " ".join(["the same command", *more])
    words = [word.replace(resume, to) if resume and word in (resume, f"--resume={resume}") else word for word in words]
    return shlex.join(["plait", *words, *more])
