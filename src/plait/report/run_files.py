"""Read the files of a run as far as possible: of a running, killed or damaged run, or one of an older version.

Missing or damaged data gives a note, and the rest is used. Only a folder without a run is an error.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.config.version import __version__
from plait.engine.run_directory import RunDirectory
from plait.report.measured_step import KEPT_STEPS, WARMUP_STEPS, RecordedStep, align_step
from plait.report.summary import NUMBER_TYPES, Row, find_bad_metric, find_run_folder

TAIL_BYTES = 4 * 2**20
"""Bytes to read from the end of an events file; typical steps are among the last."""


@dataclass(frozen=True)
class StepMark:
    """An event at a step: an evaluation, a checkpoint, a restart, or a skipped step."""

    step: int
    kind: str
    text: str


@dataclass(frozen=True)
class RunFiles:
    """The contents of one run's files."""

    path: Path
    plan: Plan
    job: str
    arguments: dict[str, str]
    command: tuple[str, ...]
    environment: dict[str, Any]
    rows: tuple[Row, ...]
    """Metric rows of steps and evaluations, by step."""
    marks: tuple[StepMark, ...]
    steps: tuple[RecordedStep, ...]
    """The last steps that every rank recorded."""
    memories: dict[int, Row]
    is_complete: bool
    """Every rank has written its memory at the end of the run."""
    running: bool = False
    """A process trains it now."""
    notes: tuple[str, ...] = ()
    """Missing or damaged data."""

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def step_rows(self) -> list[Row]:
        """Metric rows of steps."""
        return [row for row in self.rows if "loss" in row]

    @property
    def typical_rows(self) -> list[Row]:
        """Metric rows of steps after the first ones, which are slower."""
        return [row for row in self.step_rows if row["step"] > WARMUP_STEPS and not row.get("skipped")] or self.step_rows

    @property
    def typical_steps(self) -> list[RecordedStep]:
        """The measured steps after the first ones with most samples."""
        warm = [m for m in self.steps if m.step > WARMUP_STEPS] or list(self.steps)
        return [m for m in warm if m.size == max(m.size for m in warm)][-KEPT_STEPS:]

    @staticmethod
    def read(path: Path, step: int | None = None) -> "RunFiles":
        """Read a run. `step`: also read the events of this step. Raises R003 for a folder without a run; all other problems are in the notes."""
        path = find_run_folder(path, "plait report {}")
        notes = list[str]()
        directory = RunDirectory(path)
        plan = _read_plan(path, notes)
        told, environment = read_json_object(path / "job.json", notes), read_json_object(path / "env.json", notes)
        rows = _read_metrics(directory.metrics, notes)
        if (other := environment.get("plait", __version__)) != __version__:
            notes.append(f"The run was made by plait {other}, and this is {__version__}: data that the other version did not record is missing.")
        steps = _read_events(directory, plan, step, notes)
        memories = directory.read_memories()
        arguments = told.get("arguments")
        return RunFiles(
            path, plan, str(told.get("job", "unknown")), arguments if isinstance(arguments, dict) else {},
            tuple(map(str, told.get("command") or ())), environment, tuple(r for r in rows if "loss" in r or "evaluation" in r),
            tuple(_iter_marks(path, rows)), tuple(steps), memories,
            len(memories) == plan.world and all("end" in row for row in memories.values()), is_running(path), tuple(notes),
        )  # fmt: skip


def is_running(path: Path) -> bool:
    """Whether a process holds the lock of the run."""
    try:
        with open(path / "lock", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _read_plan(path: Path, notes: list[str]) -> Plan:
    try:
        return Plan.stored(path / "plan.toml").fill(None)
    except PlaitError as error:
        notes.append(f"plan.toml cannot be read ({error.problems[0].what}): the default plan of one rank is shown.")
        return Plan()


def read_json_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """Read the JSON object in a file; empty, with a note, if it has none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}
    return found if isinstance(found, dict) else {}


@dataclass
class _Damage:
    """The skipped lines of a file."""

    count: int = 0
    first: str = ""
    torn: bool = False

    def describe(self, file: Path) -> Iterator[str]:
        if self.count:
            yield f"{file.name}: {self.count} damaged line{'s' * (self.count > 1)} skipped, the first is {self.first}."
        if self.torn:
            yield f"{file.name} ends in the middle of a line, as after a kill: the lines before it are used."


def _iter_rows(lines: list[bytes], damage: _Damage, first: int = 1) -> Iterator[tuple[int, Row]]:
    """Yield (line number, object) of lines of JSON."""
    for n, line in enumerate(lines, first):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            yield n, row
        elif n == first + len(lines) - 1:
            damage.torn = True
        elif line.strip():
            damage.count += 1
            damage.first = damage.first or f"line {n}: no JSON object"


def _read_metrics(file: Path, notes: list[str]) -> list[Row]:
    damage, found = _Damage(), list[Row]()
    for n, row in _iter_rows(file.read_bytes().splitlines() if file.exists() else [], damage):
        if why := find_bad_metric(row):
            damage.count += 1
            damage.first = damage.first or f"line {n}: {why}"
        else:
            found.append(row)
    notes += damage.describe(file)
    if not any("loss" in row for row in found):
        notes.append("No step is recorded: the run ended, or was killed, before its first step was complete.")
    return found


def _read_events(run: RunDirectory, plan: Plan, step: int | None, notes: list[str]) -> list[RecordedStep]:
    """Read the last steps that all ranks recorded."""
    by_rank = list[dict[int, Row]]()
    for rank in range(plan.world):
        damage, file = _Damage(), run.get_events_path(rank)
        rows = dict[int, Row]()
        chosen = [] if step is None else _find_lines(file, b'{"step": %d,' % step)[:1]
        for _, row in _iter_rows([*chosen, *_read_tail(file)[-KEPT_STEPS - 1 :]], damage):
            try:
                rows[int(row["step"])] = {
                    "at": float(row["at"]), "size": int(row["size"]), "spans": [(str(n), float(s), float(t)) for n, s, t in row["spans"]],
                }  # fmt: skip
            except (KeyError, TypeError, ValueError) as error:
                damage.count += 1
                damage.first = damage.first or f"a row with {error}"
        notes += damage.describe(file)
        by_rank.append(rows)
    missing = [rank for rank, rows in enumerate(by_rank) if not rows]
    if missing:
        who = "any rank" if len(missing) == len(by_rank) else f"rank {', '.join(map(str, missing))}"
        notes.append(f"There are no events of {who}: the timeline and the split of the time are missing.")
        return []
    common = sorted(set(by_rank[0]).intersection(*by_rank[1:]))
    if not common:
        notes.append("No step was recorded by every rank: the timeline and the split of the time are missing.")
    return [align_step(n, [rows[n] for rows in by_rank]) for n in common if all(rows[n]["spans"] for rows in by_rank)]


def _read_tail(file: Path) -> list[bytes]:
    """Read the lines at the end of a file."""
    try:
        with open(file, "rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - TAIL_BYTES))
            lines = opened.read().splitlines()
    except OSError:
        return []
    return lines[1:] if size > TAIL_BYTES else lines


def _find_lines(file: Path, word: bytes) -> list[bytes]:
    """Return the lines of a file that contain a word."""
    try:
        with open(file, "rb") as opened:
            return [line for line in opened if word in line]
    except OSError:
        return []


def _iter_marks(path: Path, rows: list[Row]) -> Iterator[StepMark]:
    for row in rows:
        step = row.get("step")
        if not isinstance(step, int):
            continue
        if isinstance(row.get("evaluation"), dict):
            values = ((k, v) for k, v in row["evaluation"].items() if v is None or isinstance(v, NUMBER_TYPES))
            yield StepMark(step, "evaluation", ", ".join(f"{k} {'not finite' if v is None else f'{v:.4g}'}" for k, v in values))
        if row.get("skipped"):
            yield StepMark(step, "skipped", "the update was skipped: its loss or gradient was not finite")
    for line in _find_lines(path / "events" / "rank0.jsonl", b'"restart": '):
        step, ranks = re.search(rb'"step": (\d+)', line), re.search(rb'"restart": (\d+)', line)
        if step and ranks:
            yield StepMark(int(step[1]), "restart", f"continued on {int(ranks[1])} rank{'s' * (int(ranks[1]) > 1)}")
    for saved in sorted(path.glob("checkpoints/step-*")):
        number = saved.name.removeprefix("step-")
        if number.isdecimal():
            yield StepMark(int(number), "checkpoint", saved.name)
