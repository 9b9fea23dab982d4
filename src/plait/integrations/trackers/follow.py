"""The process of a tracker, and what rank 0 does for it.

Each tracker has a process of its own. It follows `metrics.jsonl`, which the run writes anyway, and gives the tracker every row once.
Rank 0 only reads, ten times a second, whether the process has a line for the user. So a package that is slow to import, starts
threads, waits for a network, crashes or is killed delays no step and ends no rank; and the last rows of a rank that is killed arrive.

What the tracker has is noted in `RUN/trackers/NAME.json`: its id of the run, and the last row. So a run that is resumed continues
in the same place. Rows of steps that are made again are not sent again: only TensorBoard can take back what it has been
given, and there they replace the ones before. A tracker that raises is tried again, less and less often, and the user reads of it once.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait import Plan
from plait.engine.run_directory import RunDirectory, job_name
from plait.integrations.trackers.packages import TRACKERS, Row, TrackedRun, installed, numbers
from plait.launch.child import Companion, EndOfWork

PATIENCE = 30.0
"""Seconds that the end of a run waits for its trackers. They continue by themselves after that."""
EVERY = 0.5
"""Seconds between two looks at the file."""
AT_ONCE = 500
"""Rows that a tracker is given in a call."""
LONGEST_PAUSE = 60.0
"""Seconds between two tries, at most, while a tracker fails."""


def chosen(words: list[str]) -> "tuple[TrackerProcesses, ...]":
    """What follows the metrics for the trackers of `--tracker`. H004 if the package of one is missing."""
    names = installed(words)
    return (TrackerProcesses(names),) if names else ()


class TrackerProcesses:
    """The `MetricsFollower` of trackers: starts a process for each, and passes on its lines."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def start(self, run: Path, step: int, note: Callable[[str], None]) -> None:
        """Start the processes. `step`: the last step of the run that is made."""
        self._note, self._looked = note, 0.0
        self._running: dict[str, Companion] = {}
        for name in self.names:
            try:
                words, log = [name, str(run.resolve()), str(step)], run / "logs" / f"{name}.log"
                self._running[name] = Companion(__name__, words, log, TRACKERS[name].environment)
            except OSError as error:
                note(f"note  {name} does not get the metrics: its process cannot be started ({error})")

    def look(self) -> None:
        """Pass on what trackers say, at most ten times a second."""
        if self._running and time.monotonic() - self._looked > 0.1:
            self._looked = time.monotonic()
            self._pass_on()

    def _pass_on(self) -> None:
        for name, companion in list(self._running.items()):
            status = companion.process.poll()
            for line in companion.read_lines():
                self._note(line)
            if status is not None:
                if status:
                    self._note(f"note  {name} gets no more metrics: its process ended with status {status}")
                companion.close()
                del self._running[name]

    def close(self, done: bool, alive: Callable[[], None]) -> None:
        """End the processes once they have sent all rows, and wait `PATIENCE` for that."""
        for companion in self._running.values():
            companion.finish("done" if done else "failed")
        end = time.monotonic() + PATIENCE
        while self._running and time.monotonic() < end:
            time.sleep(0.05)
            self._pass_on()
            alive()
        for name, companion in self._running.items():
            number = companion.process.pid
            self._note(f"note  {name} has not taken all metrics yet: process {number} goes on with that")
            companion.close()


def main(end: EndOfWork, say: Callable[[str], None], name: str, path: str, step: str) -> None:
    """The process: follow the run at `path`, which continues after `step`, until its end; `say` sends a line to the user."""
    folder = Path(path) / "trackers"
    folder.mkdir(exist_ok=True)
    with open(folder / f"{name}.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one that a lost rank has left behind finishes first
        MetricsFeed(name, RunDirectory(Path(path)), int(step), say).follow(end)


class MetricsFeed:
    """Reads the rows of a run, and gives them to a tracker."""

    def __init__(self, name: str, run: RunDirectory, step: int, say: Callable[[str], None]):
        self.name, self.run, self.say = name, run, say
        self.tracker = TRACKERS[name]()
        self.note = run.path / "trackers" / f"{name}.json"
        known = json.loads(self.note.read_text(encoding="utf-8")) if self.note.exists() else {}
        self.id: str | None = known.get("id")
        self.sent: tuple[int, int] = tuple(known.get("sent", (0, 0)))
        """Step of the last row that the tracker has, and whether it was the step's evaluation."""
        if self.tracker.forgets:
            self.sent = min(self.sent, (step, 1))
        self.started, self.complained, self.pause = False, "", EVERY
        self.rows: list[tuple[tuple[int, int], Row]] = []
        self.torn = b""

    def follow(self, end: EndOfWork) -> None:
        """Until nothing follows, and everything is sent."""
        with open(self.run.metrics, "rb") as file:
            over = False
            while not over:
                over = end.wait(self.pause)
                self._read(file.read())
                self._try(self._send)
        for _ in range(3):
            if not self.rows or self._try(self._send):
                break
            time.sleep(min(self.pause, 5.0))
        if self.started:
            self._try(lambda: self.tracker.close(end.word == b"done"))
        if self.rows:
            self.say(f"note  {self.name} has the metrics up to step {self.sent[0]} only: {self.complained}")

    def _read(self, data: bytes) -> None:
        *lines, self.torn = (self.torn + data).split(b"\n")
        for line in lines:
            row: dict[str, Any] = json.loads(line)
            step = row.pop("step")
            key = step, int("evaluation" in row)
            if key > self.sent or ("memory" in row and self.started and step >= self.sent[0]):  # it has the key of its step's row
                self.rows.append((key, (step, dict(numbers(row)))))

    def _send(self) -> None:
        if not self.started:
            self.id = self.tracker.start(self._described(), self.id)
            self.started = True
            self._remember()
        while self.rows:
            some = self.rows[:AT_ONCE]
            self.tracker.write([row for _, row in some])
            self.sent = max(self.sent, *(key for key, _ in some))
            del self.rows[:AT_ONCE]
            self._remember()

    def _try(self, work: Callable[[], None]) -> bool:
        """Do it; what goes wrong is said once, and in full in the log."""
        try:
            work()
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            if not self.complained:
                log = self.run.path / "logs" / f"{self.name}.log"
                self.say(f"note  {self.name} does not take the metrics; training goes on, and {log} has more: {words}")
            self.complained, self.pause = words, min(2 * self.pause, LONGEST_PAUSE)
            return False
        self.pause = EVERY
        return True

    def _described(self) -> TrackedRun:
        stored = json.loads((self.run.path / "job.json").read_text(encoding="utf-8"))
        plan = str(Plan.stored(self.run.path / "plan.toml"))
        config = {"job": stored["job"], "plan": plan, "run": str(self.run.path)}
        config |= {f"job.{name}": str(value) for name, value in stored["arguments"].items()}
        return TrackedRun(self.run.path, job_name(stored["job"]), config, self.sent[0])

    def _remember(self) -> None:
        new = self.note.with_suffix(".new")
        new.write_text(json.dumps({"id": self.id, "sent": self.sent}) + "\n", encoding="utf-8")
        os.replace(new, self.note)
