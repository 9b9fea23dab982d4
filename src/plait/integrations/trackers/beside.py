"""Trackers beside rank 0: a process for each, which reads what the run writes to `metrics.jsonl` anyway.

Training does nothing for them but look, ten times a second, whether one has something to say. So a package that is slow to
import, starts threads, waits for a network or dies takes no time of a step and harms no rank.
"""

import time
from collections.abc import Callable
from pathlib import Path

from plait.integrations.trackers.packages import QUIET, installed
from plait.launch.companion import Companion

PATIENCE = 30.0
"""Seconds that the end of a run waits for trackers. They go on by themselves after that."""


class Beside:
    """The trackers of a run by their names in `--to`: a `MetricsFollower` that starts a process for each."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def start(self, run: Path, step: int, note: Callable[[str], None]) -> None:
        """Start the processes. `step`: the last step of the run that is made; `note` says a line to the run's user."""
        self._note, self._looked = note, 0.0
        self._running: dict[str, Companion] = {}
        for name in self.names:
            words, log = [name, str(run.resolve()), str(step)], run / "logs" / f"{name}.log"
            try:
                self._running[name] = Companion("plait.integrations.trackers.follow", words, log, QUIET[name])
            except OSError as error:
                note(f"note  {name} does not get the metrics: its process cannot be started ({error})")

    def look(self) -> None:
        """Pass on what trackers say, at most ten times a second."""
        now = time.monotonic()
        if self._running and now - self._looked > 0.1:
            self._looked = now
            self._hear()

    def _hear(self) -> None:
        for name, process in list(self._running.items()):
            status = process.ended()
            for line in process.said():
                self._note(line)
            if status is not None:
                if status:
                    self._note(f"note  {name} gets no more metrics: its process ended with status {status}")
                process.close()
                del self._running[name]

    def close(self, done: bool, alive: Callable[[], None]) -> None:
        """Nothing follows. `done`: the run has ended as it should, or was asked to stop. `alive` is called while trackers are waited for."""
        for process in self._running.values():
            process.done("done" if done else "failed")
        end = time.monotonic() + PATIENCE
        while self._running and time.monotonic() < end:
            next(iter(self._running.values())).wait(0.2)
            self._hear()
            alive()
        for name, process in self._running.items():
            self._note(f"note  {name} has not taken all metrics yet: process {process.number} goes on with that")
            process.close()


def chosen(words: list[str]) -> tuple[Beside, ...]:
    """What follows the metrics for the trackers of `--to`. H004 if the package of one is missing."""
    names = installed(words)
    return (Beside(names),) if names else ()
