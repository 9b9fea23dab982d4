"""The files of a run as far as they can be read: of a run that goes on, that was killed, that is damaged or of an older version.

What is missing or damaged is a note, and the rest is used. Only a folder that is no run is an error.
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
from plait.report.measured_step import KEPT, WARM_UP, Measured, measured_step
from plait.report.summary import NUMBER, Row, run_folder, wrong_in_metrics

TAIL = 4 * 2**20
"""Bytes of an events file that are read, from its end: typical steps are among the last."""


@dataclass(frozen=True)
class StepMark:
    """Something that happened at a step: an evaluation, a checkpoint, a restart, or a step that was skipped."""

    step: int
    kind: str
    text: str


@dataclass(frozen=True)
class RunFiles:
    """What the files of one run say."""

    path: Path
    plan: Plan
    job: str
    arguments: dict[str, str]
    command: tuple[str, ...]
    environment: dict[str, Any]
    rows: tuple[Row, ...]
    """Of metrics, those of steps and of evaluations, by step."""
    marks: tuple[StepMark, ...]
    steps: tuple[Measured, ...]
    """The last steps that every rank recorded."""
    memories: dict[int, Row]
    ends: bool
    """Every rank has written its memory at the end of the run."""
    running: bool = False
    """A process trains it."""
    notes: tuple[str, ...] = ()
    """What is missing or damaged."""

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def trained(self) -> list[Row]:
        """The rows of steps."""
        return [row for row in self.rows if "loss" in row]

    @property
    def typical(self) -> list[Row]:
        """The rows of steps after the first ones, which are slower."""
        return [row for row in self.trained if row["step"] > WARM_UP and not row.get("skipped")] or self.trained

    @property
    def typical_steps(self) -> list[Measured]:
        """Of the measured steps, those after the first ones that have most samples."""
        warm = [m for m in self.steps if m.step > WARM_UP] or list(self.steps)
        return [m for m in warm if m.size == max(m.size for m in warm)][-KEPT:]

    @staticmethod
    def read(path: Path, step: int | None = None) -> "RunFiles":
        """`step`: one whose events are wanted, however long ago. R003 for a folder that holds no run; what else is wrong is in the notes."""
        path = run_folder(path, "plait report {}")
        notes = list[str]()
        directory = RunDirectory(path)
        plan = _plan(path, notes)
        told, environment = json_object(path / "job.json", notes), json_object(path / "env.json", notes)
        rows = _metrics(directory.metrics, notes)
        if (other := environment.get("plait", __version__)) != __version__:
            notes.append(f"The run was made by plait {other}, and this is {__version__}: what that version did not record is missing.")
        steps = _events(directory, plan, step, notes)
        memories = directory.memories()
        arguments = told.get("arguments")
        return RunFiles(
            path, plan, str(told.get("job", "unknown")), arguments if isinstance(arguments, dict) else {},
            tuple(map(str, told.get("command") or ())), environment, tuple(r for r in rows if "loss" in r or "evaluation" in r),
            tuple(_marks(path, rows)), tuple(steps), memories,
            len(memories) == plan.world and all("end" in row for row in memories.values()), is_running(path), tuple(notes),
        )  # fmt: skip


def is_running(path: Path) -> bool:
    """Whether a process holds the run."""
    try:
        with open(path / "lock", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _plan(path: Path, notes: list[str]) -> Plan:
    try:
        return Plan.stored(path / "plan.toml").fill(None)
    except PlaitError as error:
        notes.append(f"plan.toml cannot be read ({error.problems[0].what}): the plan is shown as that of one rank.")
        return Plan()


def json_object(path: Path, notes: list[str]) -> dict[str, Any]:
    """The JSON object in a file; empty, with a note, if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}
    return found if isinstance(found, dict) else {}


@dataclass
class _Damage:
    """Lines of a file that were skipped."""

    count: int = 0
    first: str = ""
    torn: bool = False

    def describe(self, file: Path) -> Iterator[str]:
        if self.count:
            yield f"{file.name}: {self.count} damaged line{'s' * (self.count > 1)} skipped, the first is {self.first}."
        if self.torn:
            yield f"{file.name} ends in the middle of a line, as after a kill: the lines before it are used."


def _rows(lines: list[bytes], damage: _Damage, first: int = 1) -> Iterator[tuple[int, Row]]:
    """(number, object) of lines of JSON."""
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


def _metrics(file: Path, notes: list[str]) -> list[Row]:
    damage, found = _Damage(), list[Row]()
    for n, row in _rows(file.read_bytes().splitlines() if file.exists() else [], damage):
        if why := wrong_in_metrics(row):
            damage.count += 1
            damage.first = damage.first or f"line {n}: {why}"
        else:
            found.append(row)
    notes += damage.describe(file)
    if not any("loss" in row for row in found):
        notes.append("No step is recorded: the run ended, or was killed, before its first step was complete.")
    return found


def _events(run: RunDirectory, plan: Plan, step: int | None, notes: list[str]) -> list[Measured]:
    """The last steps that all ranks recorded."""
    by_rank = list[dict[int, Row]]()
    for rank in range(plan.world):
        damage, file = _Damage(), run.events(rank)
        rows = dict[int, Row]()
        chosen = [] if step is None else _lines_with(file, b'{"step": %d,' % step)[:1]
        for _, row in _rows([*chosen, *_tail(file)[-KEPT - 1 :]], damage):
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
        notes.append(f"There are no events of {who}: neither the timeline nor where the time went can be shown.")
        return []
    common = sorted(set(by_rank[0]).intersection(*by_rank[1:]))
    if not common:
        notes.append("No step was recorded by every rank: neither the timeline nor where the time went can be shown.")
    return [measured_step(n, [rows[n] for rows in by_rank]) for n in common if all(rows[n]["spans"] for rows in by_rank)]


def _tail(file: Path) -> list[bytes]:
    """The lines at the end of a file."""
    try:
        with open(file, "rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - TAIL))
            lines = opened.read().splitlines()
    except OSError:
        return []
    return lines[1:] if size > TAIL else lines


def _lines_with(file: Path, word: bytes) -> list[bytes]:
    """The lines of a file that have this word in them."""
    try:
        with open(file, "rb") as opened:
            return [line for line in opened if word in line]
    except OSError:
        return []


def _marks(path: Path, rows: list[Row]) -> Iterator[StepMark]:
    for row in rows:
        step = row.get("step")
        if not isinstance(step, int):
            continue
        if isinstance(row.get("evaluation"), dict):
            values = ((k, v) for k, v in row["evaluation"].items() if v is None or isinstance(v, NUMBER))
            yield StepMark(step, "evaluation", ", ".join(f"{k} {'not finite' if v is None else f'{v:.4g}'}" for k, v in values))
        if row.get("skipped"):
            yield StepMark(step, "skipped", "the step updated nothing: its loss or gradient was not finite")
    for line in _lines_with(path / "events" / "rank0.jsonl", b'"restart": '):
        step, ranks = re.search(rb'"step": (\d+)', line), re.search(rb'"restart": (\d+)', line)
        if step and ranks:
            yield StepMark(int(step[1]), "restart", f"continued on {int(ranks[1])} rank{'s' * (int(ranks[1]) > 1)}")
    for saved in sorted(path.glob("checkpoints/step-*")):
        number = saved.name.removeprefix("step-")
        if number.isdecimal():
            yield StepMark(int(number), "checkpoint", saved.name)
