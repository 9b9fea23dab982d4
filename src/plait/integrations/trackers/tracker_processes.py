"""The process of a tracker, and its control by rank 0.

Each tracker has its own process. It follows `metrics.jsonl`, which the run writes anyway, and sends every row to the tracker once. Rank 0
only polls ten times a second whether the process has a line for the user. So a package that is slow to import, starts threads, waits for a
network, crashes or is killed delays no step and ends no rank. The last rows of a killed rank still arrive.

The tracker's progress is stored in `RUN/trackers/NAME.json`: its ID of the run, and the last row sent. So a resumed run continues the same
tracker run. Rows of repeated steps are not sent again, except to TensorBoard, which can replace the earlier rows. After an error the call
is retried at increasing intervals, and the user gets one note.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait import Plan
from plait.engine.run_directory import RunDirectory, get_job_name
from plait.integrations.trackers.packages import TRACKERS, Row, TrackedRun, check_installed, flatten_metrics
from plait.launch.child import Companion, EndOfWork

CLOSE_WAIT_S = 30.0
"""Seconds that the end of a run waits for its trackers, which continue by themselves after that."""
POLL_S = 0.5
"""Seconds between two reads of the file."""
MAX_ROWS = 500
"""Maximum number of rows per call of a tracker."""
MAX_PAUSE_S = 60.0
"""Maximum seconds between two retries while a tracker fails."""


def make_trackers(words: list[str]) -> "tuple[TrackerProcesses, ...]":
    """Return a follower of the metrics for the trackers of `--tracker`. Raises H004 if a package is missing."""
    names = check_installed(words)
    return (TrackerProcesses(names),) if names else ()


class TrackerProcesses:
    """The `MetricsFollower` of trackers: starts a process for each, and prints its lines."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def start(self, run: Path, step: int, note: Callable[[str], None]) -> None:
        """Start the processes. `step`: the last completed step of the run."""
        self._note, self._looked = note, 0.0
        self._running: dict[str, Companion] = {}
        for name in self.names:
            try:
                words, log = [name, str(run.resolve()), str(step)], run / "logs" / f"{name}.log"
                self._running[name] = Companion(__name__, words, log, TRACKERS[name].environment)
            except OSError as error:
                note(f"note  {name} does not get the metrics: its process cannot be started ({error})")

    def notify_row(self) -> None:
        """Print lines of the trackers, at most ten times a second."""
        if self._running and time.monotonic() - self._looked > 0.1:
            self._looked = time.monotonic()
            self._relay_lines()

    def _relay_lines(self) -> None:
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
        """End the processes after they have sent all rows; wait at most `CLOSE_WAIT_S`."""
        for companion in self._running.values():
            companion.finish("done" if done else "failed")
        end = time.monotonic() + CLOSE_WAIT_S
        while self._running and time.monotonic() < end:
            time.sleep(0.05)
            self._relay_lines()
            alive()
        for name, companion in self._running.items():
            number = companion.process.pid
            self._note(f"note  {name} has not received all metrics yet: process {number} continues to send them")
            companion.close()


def main(end: EndOfWork, say: Callable[[str], None], name: str, path: str, step: str) -> None:
    """Process of a tracker: follow the run at `path`, which continues after `step`, to its end; `say` sends a line to the user."""
    folder = Path(path) / "trackers"
    folder.mkdir(exist_ok=True)
    with open(folder / f"{name}.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process of a lost rank finishes first
        MetricsFeed(name, RunDirectory(Path(path)), int(step), say).follow(end)


class MetricsFeed:
    """Reads the rows of a run, and sends them to a tracker."""

    def __init__(self, name: str, run: RunDirectory, step: int, say: Callable[[str], None]):
        self.name, self.run, self.say = name, run, say
        self.tracker = TRACKERS[name]()
        self.state_file = run.path / "trackers" / f"{name}.json"
        known = json.loads(self.state_file.read_text(encoding="utf-8")) if self.state_file.exists() else {}
        self.id: str | None = known.get("id")
        self.sent: tuple[int, int] = tuple(known.get("sent", (0, 0)))
        """Step of the last row that was sent, and whether it was the step's evaluation."""
        if self.tracker.can_rewind:
            self.sent = min(self.sent, (step, 1))
        self.started, self.last_error, self.pause = False, "", POLL_S
        self.rows: list[tuple[tuple[int, int], Row]] = []
        self.partial_line = b""

    def follow(self, end: EndOfWork) -> None:
        """Follow the file to the end of the run, and send all rows."""
        with open(self.run.metrics, "rb") as file:
            over = False
            while not over:
                over = end.wait(self.pause)
                self._read_rows(file.read())
                self._try_call(self._send_rows)
        for _ in range(3):
            if not self.rows or self._try_call(self._send_rows):
                break
            time.sleep(min(self.pause, 5.0))
        if self.started:
            self._try_call(lambda: self.tracker.close(end.word == b"done"))
        if self.rows:
            self.say(f"note  {self.name} has the metrics up to step {self.sent[0]} only: {self.last_error}")

    def _read_rows(self, data: bytes) -> None:
        *lines, self.partial_line = (self.partial_line + data).split(b"\n")
        for line in lines:
            row: dict[str, Any] = json.loads(line)
            step = row.pop("step")
            key = step, int("evaluation" in row)
            if key > self.sent or ("memory" in row and self.started and step >= self.sent[0]):  # it has the key of its step's row
                self.rows.append((key, (step, dict(flatten_metrics(row)))))

    def _send_rows(self) -> None:
        if not self.started:
            self.id = self.tracker.start(self._describe_run(), self.id)
            self.started = True
            self._save_state()
        while self.rows:
            some = self.rows[:MAX_ROWS]
            self.tracker.write([row for _, row in some])
            self.sent = max(self.sent, *(key for key, _ in some))
            del self.rows[:MAX_ROWS]
            self._save_state()

    def _try_call(self, work: Callable[[], None]) -> bool:
        """Call `work`. An error is printed once, with its full text in the log."""
        try:
            work()
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            if not self.last_error:
                log = self.run.path / "logs" / f"{self.name}.log"
                self.say(f"note  {self.name} rejects the metrics; training continues, and {log} has details: {words}")
            self.last_error, self.pause = words, min(2 * self.pause, MAX_PAUSE_S)
            return False
        self.pause = POLL_S
        return True

    def _describe_run(self) -> TrackedRun:
        stored = json.loads((self.run.path / "job.json").read_text(encoding="utf-8"))
        plan = str(Plan.stored(self.run.path / "plan.toml"))
        config = {"job": stored["job"], "plan": plan, "run": str(self.run.path)}
        config |= {f"job.{name}": str(value) for name, value in stored["arguments"].items()}
        return TrackedRun(self.run.path, get_job_name(stored["job"]), config, self.sent[0])

    def _save_state(self) -> None:
        new = self.state_file.with_suffix(".new")
        new.write_text(json.dumps({"id": self.id, "sent": self.sent}) + "\n", encoding="utf-8")
        os.replace(new, self.state_file)
