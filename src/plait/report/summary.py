"""Summarize a run in a few lines: its progress, loss curve, speed, evaluations and checkpoints.

Rows of `metrics.jsonl` are validated before use, because the file may be damaged or edited.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from plait.config.errors import PlaitError, Problem
from plait.engine.memory_use import MemoryUse, find_fullest
from plait.engine.run_directory import RunDirectory

Row = dict[str, Any]
NUMBER_TYPES = (int, float)


def read_metric_rows(file: Path) -> list[Row]:
    """Read the rows of `metrics.jsonl`. Raises R009 for an invalid row of a step or an evaluation."""
    found = list[Row]()
    for n, line in enumerate(file.read_bytes().splitlines() if file.exists() else [], 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # incomplete after a kill
            continue
        if isinstance(row, dict) and (why := find_bad_metric(row)):
            fix = ("delete the line: checkpoints do not depend on it",)
            raise PlaitError(Problem("R009", f"{file} is damaged", why=why, where=f"{file}:{n}", fix=fix))
        found += [row] * isinstance(row, dict)
    return found


def find_bad_metric(row: Row) -> str:
    """Return the invalid value of a row of a step or an evaluation; empty if it is valid."""
    if "loss" in row:
        numbers = {key: row.get(key) for key in ("step", "samples", "seconds", "samples_per_s")}
        loss = {} if row["loss"] is None else {"loss": row["loss"]}
        return _find_non_number(numbers | loss)
    if "evaluation" in row:
        why = "" if isinstance(row["evaluation"], dict) else f"its `evaluation` is {_format_value(row['evaluation'])}"
        return _find_non_number({"step": row.get("step")}) or why
    return ""


def _find_non_number(values: Row) -> str:
    return next((f"its `{key}` is {_format_value(value)}" for key, value in values.items() if not _is_number(value)), "")


def _is_number(value: object) -> bool:
    return isinstance(value, NUMBER_TYPES) and not isinstance(value, bool)


def _format_value(value: object) -> str:
    return "not there" if value is None else repr(value)[:60]


BAR_CHARACTERS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 60
"""Columns of the curve."""
SHOWN_EVALUATIONS = 5
"""Number of last evaluations in the summary."""


def find_run_folder(path: Path, command: str) -> Path:
    """Return the folder of a run, resolving a link (runs/latest). Raises R003 if it has no run. `command`: shown as the fix, with {} for a folder."""
    folder = path.parent / path.readlink() if path.is_symlink() else path
    if not (folder / "plan.toml").is_file():
        others = sorted(str(p) for p in folder.parent.glob("*") if (p / "plan.toml").is_file())[-3:]
        fix = tuple(map(command.format, others)) or ("plait train JOB    makes one",)
        raise PlaitError(Problem("R003", f"there is no run in {folder}", fix=fix))
    return folder


def summarize_run(folder: Path, rows: Sequence[Row] | None = None) -> dict[str, Any]:
    """Summarize a run's files. `rows`: its metrics, if already read.

    Raises R003 if the folder has no run, R004 before the first step, and R009 for damaged rows.
    """
    find_run_folder(folder, "plait report {}")
    rows = read_metric_rows(folder / "metrics.jsonl") if rows is None else rows
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
        "rate": median(row[rate] for row in typical if isinstance(row.get(rate), NUMBER_TYPES)), "seconds": sum(row["seconds"] for row in steps),
        "skipped": sum(bool(row.get("skipped")) for row in steps),
        "evaluations": [{"step": row["step"], **row["evaluation"]} for row in rows if "evaluation" in row],
        "memory": _read_memory(folder),
        "checkpoints": sorted(p.name for p in (folder / "checkpoints").glob("step-*") if "." not in p.name),
    }  # fmt: skip


def _read_memory(folder: Path) -> dict[str, Any] | None:
    """Return the memory of the fullest rank by category; None if the run has no record of it."""
    found = find_fullest(RunDirectory(folder).read_memories())
    return None if found is None else {"rank": found[0], **found[1].to_dict()}


def format_run_summary(run: dict[str, Any]) -> str:
    """Format a summary as lines for a terminal."""
    loss = run["loss"]
    lines = [f"run         {run['run']}", f"steps       {run['steps']} · {run['samples']:,} samples"]
    if loss:
        lines.append(f"loss        {loss['first']:.4g} → {loss['last']:.4g} · lowest {loss['lowest']:.4g}")
        lines.append(f"            {draw_curve(run['curve'])}")
    speed = f"{run['rate']:,.0f} {run['unit']} in the median step"
    lines.append(f"speed       {speed} · {run['seconds']:,.0f} s in all")
    if run["memory"]:
        lines.append(f"memory      rank {run['memory']['rank']}: {MemoryUse.from_row(run['memory']).summarize()}")
    if run["skipped"]:
        lines.append(f"skipped     {run['skipped']} steps")
    lines += format_evaluations(run["evaluations"])
    for row in run["evaluations"][-SHOWN_EVALUATIONS:]:
        values = ", ".join(f"{k} {'not finite' if v is None else f'{v:.4g}'}" for k, v in row.items() if k != "step")
        lines.append(f"evaluation  step {row['step']}: {values}")
    lines.append(f"saved       {', '.join(run['checkpoints'][-3:]) or 'nothing'}")
    return "\n".join(lines)


def format_evaluations(evaluations: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line and a curve for each metric with more than one evaluation."""
    for name in (key for key in dict.fromkeys(key for row in evaluations for key in row) if key != "step"):
        values = [row[name] for row in evaluations if isinstance(row.get(name), (int, float))]
        if len(values) > 1:
            told = f"{name} {values[0]:.4g} → {values[-1]:.4g} · lowest {min(values):.4g} · highest {max(values):.4g}"
            yield f"evaluation  {told}"
            yield f"            {draw_curve(values)}"


def draw_curve(values: list[float]) -> str:
    """Draw values as a line of bars, at most `CURVE_WIDTH`. Each bar is the mean of its part.

    >>> draw_curve([4.0, 3.0, 2.0, 1.0])
    '█▆▃▁'
    """
    count = min(CURVE_WIDTH, len(values))
    parts = [values[len(values) * i // count : len(values) * (i + 1) // count] for i in range(count)]
    means = [math.fsum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    scale = (len(BAR_CHARACTERS) - 1) / (high - low) if high > low else 0.0
    return "".join(BAR_CHARACTERS[round((mean - low) * scale)] for mean in means)
