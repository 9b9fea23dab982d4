"""How far a command is: one line on a terminal, with a bar where it is known how much is left. Elsewhere nothing is printed."""

import re
import sys
import time
from math import inf

from plait.config.errors import shown

ROOM = 20
"""Characters of a bar."""
OFTEN = 0.1
"""Seconds between two states of the same task."""


def bar(part: float, room: int) -> str:
    """A bar of this many characters, of which a part is full."""
    full = int(room * min(max(part, 0.0), 1.0))
    return "━" * full + "╸" * (room > full) + " " * (room - full - 1)


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours if there are any."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class ProgressLine:
    """The line of one command, on standard error if that is a terminal. It is gone inside of `print`, and after the command. `silent`: there
    is none, as where the result is printed as JSON."""

    def __init__(self, command: str, silent: bool = False):
        self.command, self.is_shown = command, sys.stderr.isatty() and not silent
        self.task, self.began, self.printed = "", 0.0, -inf

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *exception: object) -> None:
        self("")

    def __call__(self, text: str) -> None:
        """Show what the command does: a task, and after a colon how far it is, such as `3 of 9`. No text takes the line away."""
        task, _, far = text.partition(": ")
        if found := re.match(r"(\d+) of (\d+)", far):
            self.show(task, *map(int, found.groups()))
        else:
            self._write(task, text and f"{text} …")

    def show(self, task: str, done: int, total: int) -> None:
        """Show how much of a task is done, and the time that the rest takes if it takes as long as what is done."""
        left = ""
        if task == self.task and 0 < done < total:
            left = f"  {clock((time.monotonic() - self.began) / done * (total - done))} left"
        self._write(task, f"{task} {bar(done / max(total, 1), ROOM)} {done}/{total}{left}")

    def print(self, text: str) -> None:
        """Print to standard output, above the line."""
        self("")
        print(shown(text), flush=True)

    def _write(self, task: str, text: str) -> None:
        now = time.monotonic()
        if not self.is_shown or (text and task == self.task and now - self.printed < OFTEN):
            return
        if text and task != self.task:
            self.task, self.began = task, now
        self.printed = now if text else -inf
        print(f"\r\x1b[K{text and f'{self.command}  {text}'}", end="", file=sys.stderr, flush=True)
