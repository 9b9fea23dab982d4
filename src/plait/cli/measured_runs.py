"""Step times of earlier runs: the seconds of a step of each run directory, with its plan and job, as input of the planner."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.report.summary import NUMBER_TYPES, read_metric_rows

WARMUP_STEPS = 3
"""First steps of a run, which are slower than the others."""
MIN_STEPS = 5
"""Minimum number of steps for a median."""
MAX_RUNS = 32
"""Maximum number of runs to read, newest first."""
COMPARED_ENV = MappingProxyType({"plait": "version", "torch": "version", "platform": "machine", "cores": "machine", "cuda": "machine"})
"""Keys of `env.json` that must equal this environment, with the word for a difference."""


def describe_env_mismatch(before: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """Describe the first difference between two environments, such as "version (torch)". Empty if none matters."""
    return next((f"{other} ({name})" for name, other in COMPARED_ENV.items() if before.get(name) != environment[name]), "")


class UnusableRun(Exception):
    """A run without usable measurements. The text is the reason, as in "runs skipped: 2 …"."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run with the median duration of its typical steps."""

    path: Path
    job: str
    arguments: dict[str, str]
    plan: Plan
    batch: int
    seconds: float
    on_cpu: bool
    """The run used --device cpu."""


@dataclass(frozen=True)
class MeasuredRuns:
    """The usable runs of a folder, newest first, and the number of skipped runs by reason."""

    runs: tuple[MeasuredRun, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def read(folder: Path, environment: Mapping[str, Any], before: Path | None = None) -> "MeasuredRuns":
        """Read the runs of a folder. `environment` is that of the current process. Only runs that started before the run `before` count."""
        skipped, found = Counter[str](), list[MeasuredRun]()
        for path in _list_run_folders(folder, before)[:MAX_RUNS]:
            try:
                found.append(_measure_run(path, environment))
            except UnusableRun as why:
                skipped[str(why)] += 1
            except (PlaitError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                skipped["damaged"] += 1
        return MeasuredRuns(tuple(found), dict(skipped))


def _list_run_folders(folder: Path, before: Path | None) -> list[Path]:
    """List the run directories of a folder, newest first. Only runs that started before the run `before` count."""
    try:
        plans = {p: p / "plan.toml" for p in folder.iterdir() if not p.is_symlink() and (p / "plan.toml").is_file()}
        started = inf if before is None else (before / "plan.toml").stat().st_mtime
        found = [(p.stat().st_mtime, p) for p, plan in plans.items() if plan.stat().st_mtime < started]
    except OSError:
        return []
    return [path for _, path in sorted(found, reverse=True)]


def _measure_run(path: Path, environment: Mapping[str, Any]) -> MeasuredRun:
    """Measure a run. Raises `UnusableRun`, or any exception for damaged files."""
    before = json.loads((path / "env.json").read_text(encoding="utf-8"))
    told = json.loads((path / "job.json").read_text(encoding="utf-8"))
    if other := describe_env_mismatch(before, environment):
        raise UnusableRun(f"of another {other.partition(' ')[0]}")
    plan = Plan.stored(path / "plan.toml").fill(None)
    rows = read_metric_rows(path / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    batches = [after["samples"] - row["samples"] for row, after in pairwise(steps) if after["step"] == row["step"] + 1]
    typical = [*_find_typical_seconds(path, rows, steps)]
    if len(typical) < MIN_STEPS or not batches:
        raise UnusableRun("of too few steps")
    words = " ".join(map(str, told.get("command", ())))
    on_cpu = "--device=cpu" in words or "--device cpu" in words
    return MeasuredRun(path, str(told["job"]), dict(told["arguments"]), plan, round(median(batches)), median(typical), on_cpu)


def _find_typical_seconds(path: Path, rows: list[dict[str, Any]], steps: list[dict[str, Any]]) -> Iterator[float]:
    """Yield the seconds of steps that only trained: no first steps, no checkpoints, no steps after an evaluation."""
    busy = {row["step"] + 1 for row in rows if "evaluation" in row}
    for saved in path.glob("checkpoints/step-*"):
        number = saved.name.removeprefix("step-").partition(".")[0]
        busy |= {int(number), int(number) + 1} if number.isdecimal() else set()
    first = min((row["step"] for row in steps), default=0)
    for row in steps:
        usual = row["step"] not in busy and not row.get("skipped") and row.get("ranks") == steps[-1].get("ranks")
        if row["step"] >= first + WARMUP_STEPS and usual and isinstance(row["seconds"], NUMBER_TYPES) and row["seconds"] > 0:
            yield row["seconds"]
