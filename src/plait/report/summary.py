"""A run in a few lines of text: how far it came, its loss as a curve, how fast it was, evaluations and checkpoints.

The rows of `metrics.jsonl`, each looked at before it is used: a disk or a hand may have changed them.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from plait.config.errors import PlaitError, Problem
from plait.engine.memory_use import MemoryUse, fullest
from plait.engine.run_directory import RunDirectory

Row = dict[str, Any]
NUMBER = (int, float)


def metrics(file: Path) -> list[Row]:
    """Of `metrics.jsonl`. R009 for a row of a step or an evaluation that is none."""
    found = list[Row]()
    for n, line in enumerate(file.read_bytes().splitlines() if file.exists() else [], 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # torn by a kill
            continue
        if isinstance(row, dict) and (why := wrong_in_metrics(row)):
            fix = ("delete the line: checkpoints do not depend on it",)
            raise PlaitError(Problem("R009", f"{file} is damaged", why=why, where=f"{file}:{n}", fix=fix))
        found += [row] * isinstance(row, dict)
    return found


def wrong_in_metrics(row: Row) -> str:
    """What of a row of a step or an evaluation cannot be; empty if nothing."""
    if "loss" in row:
        numbers = {key: row.get(key) for key in ("step", "samples", "seconds", "samples_per_s")}
        loss = {} if row["loss"] is None else {"loss": row["loss"]}
        return _no_number(numbers | loss)
    if "evaluation" in row:
        why = "" if isinstance(row["evaluation"], dict) else f"its `evaluation` is {_shown(row['evaluation'])}"
        return _no_number({"step": row.get("step")}) or why
    return ""


def _no_number(values: Row) -> str:
    return next((f"its `{key}` is {_shown(value)}" for key, value in values.items() if not _number(value)), "")


def _number(value: object) -> bool:
    return isinstance(value, NUMBER) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return "not there" if value is None else repr(value)[:60]


BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60
"""Columns of the curve."""
EVALUATIONS = 5
"""The last evaluations that are shown."""


def run_folder(path: Path, command: str) -> Path:
    """The folder of a run, which `path` names or links to (runs/latest). R003 when it holds no run; `command` shows one, with {} for its
    folder."""
    folder = path.parent / path.readlink() if path.is_symlink() else path
    if not (folder / "plan.toml").is_file():
        others = sorted(str(p) for p in folder.parent.glob("*") if (p / "plan.toml").is_file())[-3:]
        fix = tuple(map(command.format, others)) or ("plait train JOB    makes one",)
        raise PlaitError(Problem("R003", f"there is no run in {folder}", fix=fix))
    return folder


def summary(folder: Path, rows: Sequence[Row] | None = None) -> dict[str, Any]:
    """What a run's files say. `rows`: of its metrics, if they were read. R003 when there is no run, R004 when it has made no step, R009 for rows
    that are damaged."""
    run_folder(folder, "plait report {}")
    rows = metrics(folder / "metrics.jsonl") if rows is None else rows
    steps = [row for row in rows if "loss" in row]
    if not steps:
        what, fix = f"{folder} has no metrics", ("train for a step or more",)
        raise PlaitError(Problem("R004", what, why="no step was recorded", fix=fix))
    losses = [row["loss"] for row in steps if isinstance(row["loss"], (int, float))]
    typical = [row for row in steps if row["step"] > 3] or steps
    rate = "tokens_per_s" if typical[-1].get("tokens_per_s") else "samples_per_s"
    return {
        "run": str(folder), "steps": steps[-1]["step"], "samples": steps[-1]["samples"],
        "loss": {"first": losses[0], "last": losses[-1], "lowest": min(losses)} if losses else None,
        "curve": losses, "unit": "tok/s" if rate == "tokens_per_s" else "samples/s",
        "rate": median(row[rate] for row in typical if isinstance(row.get(rate), NUMBER)), "seconds": sum(row["seconds"] for row in steps),
        "skipped": sum(bool(row.get("skipped")) for row in steps),
        "evaluations": [{"step": row["step"], **row["evaluation"]} for row in rows if "evaluation" in row],
        "memory": _memory(folder),
        "checkpoints": sorted(p.name for p in (folder / "checkpoints").glob("step-*") if "." not in p.name),
    }  # fmt: skip


def _memory(folder: Path) -> dict[str, Any] | None:
    """What the rank that needed most memory used it for; None of a run that says nothing of it."""
    found = fullest(RunDirectory(folder).memories())
    return None if found is None else {"rank": found[0], **found[1].to_dict()}


def text(run: dict[str, Any]) -> str:
    """A summary as lines for a terminal."""
    loss = run["loss"]
    lines = [f"run         {run['run']}", f"steps       {run['steps']} · {run['samples']:,} samples"]
    if loss:
        lines.append(f"loss        {loss['first']:.4g} → {loss['last']:.4g} · lowest {loss['lowest']:.4g}")
        lines.append(f"            {curve(run['curve'])}")
    speed = f"{run['rate']:,.0f} {run['unit']} in the median step"
    lines.append(f"speed       {speed} · {run['seconds']:,.0f} s in all")
    if run["memory"]:
        lines.append(f"memory      rank {run['memory']['rank']}: {MemoryUse.of(run['memory']).line()}")
    if run["skipped"]:
        lines.append(f"skipped     {run['skipped']} steps")
    lines += evaluation_curves(run["evaluations"])
    for row in run["evaluations"][-EVALUATIONS:]:
        values = ", ".join(f"{k} {'not finite' if v is None else f'{v:.4g}'}" for k, v in row.items() if k != "step")
        lines.append(f"evaluation  step {row['step']}: {values}")
    lines.append(f"saved       {', '.join(run['checkpoints'][-3:]) or 'nothing'}")
    return "\n".join(lines)


def evaluation_curves(evaluations: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each metric that was measured more than once, with its curve."""
    for name in (key for key in dict.fromkeys(key for row in evaluations for key in row) if key != "step"):
        values = [row[name] for row in evaluations if isinstance(row.get(name), (int, float))]
        if len(values) > 1:
            told = f"{name} {values[0]:.4g} → {values[-1]:.4g} · lowest {min(values):.4g} · highest {max(values):.4g}"
            yield f"evaluation  {told}"
            yield f"            {curve(values)}"


def curve(values: list[float]) -> str:
    """Values as a line of bars, at most `WIDTH`; each is the mean of its part.

    >>> curve([4.0, 3.0, 2.0, 1.0])
    '█▆▃▁'
    """
    count = min(WIDTH, len(values))
    parts = [values[len(values) * i // count : len(values) * (i + 1) // count] for i in range(count)]
    means = [math.fsum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)
