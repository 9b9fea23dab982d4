"""Requests to stop: what SIGTERM (a machine is taken away), SIGUSR1 (Slurm's warning that it will be) and Ctrl-C do to `plait train`.

Ranks that train finish their step and save; a rank that waits for samples gives the step up. Before the first step there is nothing to
save, and the process ends at once. Either way the exit code is 75, which means: run me again; Ctrl-C before the first step is 130.

Python runs a signal's handler between two of its own instructions: not while the main thread waits in compiled code, for a store or
for other ranks. There the number of the signal, which the system's handler writes into a pipe at once, is read by somebody else: for
a rank that plait forked by the launcher (`RankSignals`), for any other process by a thread (`ending_waits`).
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

WARNINGS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
REQUESTS = (signal.SIGINT, *WARNINGS)
_OVER = b"\0"
HEARD = 1.0
"""Seconds after a request in which a wait may end by itself, before it is given up."""


class Stopped(KeyboardInterrupt):
    """Somebody asked this process to stop, and nothing is lost by that. What goes on after an `Exception` must not go on."""

    def error(self) -> PlaitError:
        """C011."""
        why = f"{signal.Signals(self.args[0]).name} came before there was anything to save"
        fix = (f"{command()}    runs it again",)
        return PlaitError(Problem("C011", "stopped before the first step", why=why, fix=fix), RESUMABLE)


class StopRequest:
    """Whether this process was asked to stop: the handler of the signals, also while there are forked ranks (see `fork.py`).

    `waits`: it ends after a step that will be made, whatever it does now. `trains`: its ranks are those of a run.
    """

    def __init__(self, waits: bool = False):
        self.waits, self.trains, self.number, self.process = waits, False, 0, os.getpid()

    @staticmethod
    def of_process(waits: bool = False) -> "StopRequest":
        """The one that hears this process's signals; one that hears nothing where there is none."""
        heard = signal.getsignal(signal.SIGTERM)
        return heard if isinstance(heard, StopRequest) else StopRequest(waits)

    @contextlib.contextmanager
    def heard(self) -> Iterator["StopRequest"]:
        """Meanwhile the signals are requests. C011 where one ended this process."""
        before = self.listen()
        try:
            with told():
                yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def listen(self) -> dict[int, "signal._HANDLER"]:
        """From now on the signals are requests. Returns what they were before."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, self) for number in WARNINGS}

    def is_set(self) -> bool:
        return self.number > 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:  # a copy that was forked just now
            return
        first, self.number = not self.number, number
        if first and self.ends_at_once():
            raise Stopped(number)

    def ends_at_once(self) -> bool:
        """Whether a request ends this process while it has no ranks."""
        return not (self.waits or self.trains)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """While this process has ranks that train."""
        self.trains = True
        try:
            yield
        finally:
            self.trains = False

    def begun(self, step: int) -> None:
        """Said by a rank that another launcher started: `step` steps are made, and if there are any a request waits for the next."""
        self.waits = self.waits or step > 0

    def beside(self, board: ProgressBoard, number: int) -> None:
        """The same while there are ranks: those that train go on to save, once all of them are built."""
        first, self.number = not self.number, number
        if first and not (self.waits or (self.trains and board.begun())):
            raise Stopped(number)

    def before(self, board: ProgressBoard) -> None:
        """The same of a signal that came while ranks were forked, or between two starts of them."""
        if self.number and self.trains:
            if not self.waits:
                raise Stopped(self.number)
            board.stop()


def stoppable(work: Callable[[], int]) -> int:
    """Do the work of a command; during it the signals are requests. Then they do nothing: `plait` says how it ended, which takes a
    moment under torchrun, and `cli/main.py` puts them back."""
    handled = StopRequest().listen()
    try:
        with told():
            return work()
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_IGN)


def signal_pipe() -> tuple[int, int]:
    """`os.pipe()` for `signal.set_wakeup_fd`: writing into it never blocks."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    return reading, writing


@contextlib.contextmanager
def ending_waits() -> Iterator[None]:
    """Inside, a request that ends this process at once does so in `HEARD` seconds, also while the main thread is in compiled code."""
    request = StopRequest.of_process()
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not request:
        yield
        return
    reading, writing = signal_pipe()
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    over = threading.Event()
    thread = threading.Thread(target=_end_late, args=(request, reading, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        os.write(writing, _OVER)  # closing it would not do: a process that was forked inside has it too
        thread.join()
        os.close(writing)
        os.close(reading)


def _end_late(request: StopRequest, reading: int, over: threading.Event) -> None:
    """The thread: ends the process if its main thread has not run the handler of a request `HEARD` seconds after it."""
    while not (numbers := os.read(reading, 64)).endswith(_OVER):
        asked = next((number for number in numbers if number in REQUESTS), None)
        if asked is None or over.wait(HEARD) or request.number or not request.ends_at_once():
            continue
        if asked != signal.SIGINT:
            print(Stopped(asked).error(), file=sys.stderr, flush=True)
        os._exit(130 if asked == signal.SIGINT else RESUMABLE)


class RankSignals:
    """What a rank that plait forked does with requests to stop: its launcher reads them from `pipe`, whatever the rank does.

    The launcher asks all ranks by the board. It has a rank give up the samples that it waits for by a signal too, in `leaving`.
    """

    def __init__(self, board: ProgressBoard, pipe: int):
        self.board, self.pipe, self.waits = board, pipe, False

    def listen(self) -> None:
        """From now on. Processes that the rank forks have no part in it: what ends a helper process is no request."""
        for number in REQUESTS:
            signal.signal(number, self)
        signal.set_wakeup_fd(self.pipe, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_not_a_rank)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.waits and self.board.leaves():
            self.waits = False
            raise Stopped(number)

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Inside, a rank that reads samples raises `Stopped` where the launcher asks it to give them up."""
        self.waits = True
        try:
            if self.board.leaves():
                raise Stopped(signal.SIGTERM)
            yield
        finally:
            self.waits = False


def _not_a_rank() -> None:
    """A process that a rank has forked: it can be ended as usual, but not by a Ctrl-C that is meant for the launcher."""
    signal.set_wakeup_fd(-1)
    for number in REQUESTS:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)


def given_up(rank: int, done: int) -> PlaitError:
    """C011 of a rank that received a request to stop while it read samples, of a step or of an evaluation."""
    why = "the run received a request to stop, and a rank does not wait for samples then: they are read again after --resume"
    what = f"stopped while rank {rank} read samples after step {done}"
    return PlaitError(Problem("C011", what, why=why, fix=("--resume    continues after that step",)), RESUMABLE)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """What ends this process at once is an error like others, which other machines are told; a Ctrl-C needs no explanation."""
    try:
        yield
    except Stopped as stopped:
        if stopped.args[0] == signal.SIGINT:
            raise
        raise stopped.error() from None


def command(*more: str, resume: str = "", to: str = "") -> str:
    """This process's command line, as it is typed again: with more words, and resuming from `to` where it says `resume`."""
    program, *words = sys.argv
    if Path(program).name not in ("plait", "__main__.py") or words[:1] != ["train"]:
        return " ".join(["the same command", *more])
    words = [word.replace(resume, to) if resume and word in (resume, f"--resume={resume}") else word for word in words]
    return shlex.join(["plait", *words, *more])
