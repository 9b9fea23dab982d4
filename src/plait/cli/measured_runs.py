"""What earlier runs measured: the seconds of a step of each run directory, with its plan and its job, for the planner to learn from."""

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
from plait.report.summary import NUMBER, metrics

WARM = 3
"""Steps at the beginning of a run that are not typical."""
LEAST = 5
"""Steps without which a run's median is not used."""
NEWEST = 32
"""Runs that are read, the newest."""
SAME = MappingProxyType({"plait": "version", "torch": "version", "platform": "machine", "cores": "machine", "cuda": "machine"})
"""Of `env.json`: what a run has in common with one that would be started now, and what is another where it differs."""


def other_kind(before: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """Why an environment is another than a run's: "version (torch)", "machine (cores)", …; empty if it is not."""
    return next((f"{other} ({name})" for name, other in SAME.items() if before.get(name) != environment[name]), "")


class Unusable(Exception):
    """A run that nothing is learned from. Its text says why, as the end of "runs skipped: 2 …"."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run, and the median of the seconds of its typical steps."""

    path: Path
    job: str
    arguments: dict[str, str]
    plan: Plan
    batch: int
    seconds: float
    on_cpu: bool
    """It was started with --device cpu."""


@dataclass(frozen=True)
class MeasuredRuns:
    """The usable runs of a folder, the newest first, and how many of the others were skipped for each reason."""

    runs: tuple[MeasuredRun, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def read(folder: Path, environment: Mapping[str, Any], before: Path | None = None) -> "MeasuredRuns":
        """`environment`: that of a run which would be started now. `before`: a run of the folder; only runs that were started before it count."""
        skipped, found = Counter[str](), list[MeasuredRun]()
        for path in _directories(folder, before)[:NEWEST]:
            try:
                found.append(_measured(path, environment))
            except Unusable as why:
                skipped[str(why)] += 1
            except (PlaitError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                skipped["damaged"] += 1
        return MeasuredRuns(tuple(found), dict(skipped))


def _directories(folder: Path, before: Path | None) -> list[Path]:
    """The run directories in a folder, the newest first; only those that were started before this one, if it is given."""
    try:
        plans = {p: p / "plan.toml" for p in folder.iterdir() if not p.is_symlink() and (p / "plan.toml").is_file()}
        started = inf if before is None else (before / "plan.toml").stat().st_mtime
        found = [(p.stat().st_mtime, p) for p, plan in plans.items() if plan.stat().st_mtime < started]
    except OSError:
        return []
    return [path for _, path in sorted(found, reverse=True)]


def _measured(path: Path, environment: Mapping[str, Any]) -> MeasuredRun:
    """A run that can be used. Unusable, or anything that damaged files raise."""
    before = json.loads((path / "env.json").read_text(encoding="utf-8"))
    told = json.loads((path / "job.json").read_text(encoding="utf-8"))
    if other := other_kind(before, environment):
        raise Unusable(f"of another {other.partition(' ')[0]}")
    plan = Plan.stored(path / "plan.toml").fill(None)
    rows = metrics(path / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    batches = [after["samples"] - row["samples"] for row, after in pairwise(steps) if after["step"] == row["step"] + 1]
    typical = [*_typical(path, rows, steps)]
    if len(typical) < LEAST or not batches:
        raise Unusable("of too few steps")
    words = " ".join(map(str, told.get("command", ())))
    on_cpu = "--device=cpu" in words or "--device cpu" in words
    return MeasuredRun(path, str(told["job"]), dict(told["arguments"]), plan, round(median(batches)), median(typical), on_cpu)


def _typical(path: Path, rows: list[dict[str, Any]], steps: list[dict[str, Any]]) -> Iterator[float]:
    """Seconds of steps that did nothing but train: not the first, none that wrote a checkpoint or came after an evaluation."""
    busy = {row["step"] + 1 for row in rows if "evaluation" in row}
    for saved in path.glob("checkpoints/step-*"):
        number = saved.name.removeprefix("step-").partition(".")[0]
        busy |= {int(number), int(number) + 1} if number.isdecimal() else set()
    first = min((row["step"] for row in steps), default=0)
    for row in steps:
        usual = row["step"] not in busy and not row.get("skipped") and row.get("ranks") == steps[-1].get("ranks")
        if row["step"] >= first + WARM and usual and isinstance(row["seconds"], NUMBER) and row["seconds"] > 0:
            yield row["seconds"]
