"""Requests to stop: what SIGTERM (a machine is taken away) and SIGUSR1 (Slurm's warning that it will be) do to `plait train`.

Ranks that train finish their step and save. Before that there is nothing to save, and the process ends at once. Either way the exit
code is 75, which means: run me again.
"""

import contextlib
import os
import shlex
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from plait.config.errors import RESUMABLE, PlaitError, Problem
from plait.launch.progress import ProgressBoard

WARNINGS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


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
    def of_process() -> "StopRequest":
        """The one that hears this process's signals; one that hears nothing where there is none."""
        heard = signal.getsignal(signal.SIGTERM)
        return heard if isinstance(heard, StopRequest) else StopRequest()

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
        """Whether somebody asked."""
        return self.number > 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:  # a copy that was forked just now
            return
        first, self.number = not self.number, number
        if first and not (self.waits or self.trains):
            raise Stopped(number)

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


def stoppable(work: Callable[[Namespace], int]) -> Callable[[Namespace], int]:
    """A command during which the signals are requests."""

    def heard(options: Namespace) -> int:
        with StopRequest().heard():
            return work(options)

    return heard


@contextlib.contextmanager
def told() -> Iterator[None]:
    """What ends this process at once is an error like others, which other machines are told."""
    try:
        yield
    except Stopped as stopped:
        raise stopped.error() from None


def command(*more: str, instead: tuple[str, str] = ("", "")) -> str:
    """This process's command line, as it is typed again: with more words, and one instead of another."""
    program, *words = sys.argv
    if Path(program).name not in ("plait", "__main__.py") or words[:1] != ["train"]:
        return " ".join(["the same command", *more])
    old, new = instead
    words = [word.replace(old, new) if old and word in (old, f"--resume={old}") else word for word in words]
    return shlex.join(["plait", *words, *more])
