"""Progress of a command: one line on a terminal, with a bar if the total is known. Other outputs get no progress."""

import re
import sys
import time
from math import inf

from plait.config.errors import escape_controls

BAR_WIDTH = 20
"""Width of a bar in characters."""
MIN_INTERVAL_S = 0.1
"""Minimum seconds between two updates of the same task."""


def format_bar(part: float, room: int) -> str:
    """Format a bar of `room` characters, filled to the fraction `part`."""
    full = int(room * min(max(part, 0.0), 1.0))
    return "━" * full + "╸" * (room > full) + " " * (room - full - 1)


def format_clock(seconds: float) -> str:
    """Format seconds as minutes and seconds, with hours if necessary."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class ProgressLine:
    """The progress line of one command, on standard error if that is a terminal.

    The line is removed during `print` and after the command. `silent` disables it, for example for JSON output.
    """

    def __init__(self, command: str, silent: bool = False):
        self.command, self.is_shown = command, sys.stderr.isatty() and not silent
        self.task, self.began, self.printed = "", 0.0, -inf

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *exception: object) -> None:
        self("")

    def __call__(self, text: str) -> None:
        """Show a task and, after a colon, its progress, such as `3 of 9`. An empty text removes the line."""
        task, _, far = text.partition(": ")
        if found := re.match(r"(\d+) of (\d+)", far):
            self.show(task, *map(int, found.groups()))
        else:
            self._write(task, text and f"{text} …")

    def show(self, task: str, done: int, total: int) -> None:
        """Show how much of a task is done, and the time left at the same speed."""
        left = ""
        if task == self.task and 0 < done < total:
            left = f"  {format_clock((time.monotonic() - self.began) / done * (total - done))} left"
        self._write(task, f"{task} {format_bar(done / max(total, 1), BAR_WIDTH)} {done}/{total}{left}")

    def print(self, text: str) -> None:
        """Print to standard output, above the line."""
        self("")
        print(escape_controls(text), flush=True)

    def _write(self, task: str, text: str) -> None:
        now = time.monotonic()
        if not self.is_shown or (text and task == self.task and now - self.printed < MIN_INTERVAL_S):
            return
        if text and task != self.task:
            self.task, self.began = task, now
        self.printed = now if text else -inf
        print(f"\r\x1b[K{text and f'{self.command}  {text}'}", end="", file=sys.stderr, flush=True)
