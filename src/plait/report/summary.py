"""A run in a few lines of text: how far it came, its loss as a curve, how fast it was, evaluations and checkpoints."""

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

from plait.config.errors import PlaitError, Problem

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60
"""Columns of the curve."""
EVALUATIONS = 5
"""The last evaluations that are shown."""


def summary(folder: Path) -> dict[str, Any]:
    """What a run's files say. R003 when there is no run, R004 when it has made no step."""
    if not (folder / "plan.toml").is_file():
        others = sorted(str(p) for p in folder.parent.glob("*") if (p / "plan.toml").is_file())[-3:]
        fix = tuple(f"plait report {p}" for p in others) or ("plait train JOB    makes one",)
        raise PlaitError(Problem("R003", f"there is no run in {folder}", fix=fix))
    rows = _rows(folder / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    if not steps:
        raise PlaitError(
            Problem("R004", f"{folder} has no metrics", why="no step was recorded", fix=("train for a step or more",))
        )
    losses = [row["loss"] for row in steps if isinstance(row["loss"], (int, float))]
    typical = [row for row in steps if row["step"] > 3] or steps
    rate = "tokens_per_s" if typical[-1].get("tokens_per_s") else "samples_per_s"
    return {
        "run": str(folder), "steps": steps[-1]["step"], "samples": steps[-1]["samples"],
        "loss": {"first": losses[0], "last": losses[-1], "lowest": min(losses)} if losses else None,
        "curve": losses, "unit": "tok/s" if rate == "tokens_per_s" else "samples/s",
        "rate": median(row[rate] for row in typical), "seconds": sum(row["seconds"] for row in steps),
        "skipped": sum(bool(row.get("skipped")) for row in steps),
        "evaluations": [{"step": row["step"], **row["evaluation"]} for row in rows if "evaluation" in row],
        "checkpoints": sorted(p.name for p in (folder / "checkpoints").glob("step-*") if "." not in p.name),
    }  # fmt: skip


def text(found: dict[str, Any]) -> str:
    """The summary as lines for a terminal."""
    loss = found["loss"]
    lines = [f"run         {found['run']}", f"steps       {found['steps']} · {found['samples']:,} samples"]
    if loss:
        lines += [
            f"loss        {loss['first']:.4g} → {loss['last']:.4g} · lowest {loss['lowest']:.4g}",
            f"            {curve(found['curve'])}",
        ]
    lines.append(
        f"speed       {found['rate']:,.0f} {found['unit']} in the median step · {found['seconds']:,.0f} s in all"
    )
    if found["skipped"]:
        lines.append(f"skipped     {found['skipped']} steps")
    for row in found["evaluations"][-EVALUATIONS:]:
        values = ", ".join(f"{k} {'not finite' if v is None else f'{v:.4g}'}" for k, v in row.items() if k != "step")
        lines.append(f"evaluation  step {row['step']}: {values}")
    lines.append(f"saved       {', '.join(found['checkpoints'][-3:]) or 'nothing'}")
    lines.append(f"picture     plait report {found['run']} --timeline    a step on every rank")
    return "\n".join(lines)


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


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a line torn by a kill is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [row for row in found if isinstance(row, dict)]
