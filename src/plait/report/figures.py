"""All figures of the page, as JSON values. `plait report --json` prints them; the page, the terminal and `--svg` show them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from plait.config.errors import PlaitError
from plait.config.version import __version__
from plait.engine.memory_use import MemoryUse, find_fullest, group_bill
from plait.planner.alternatives import Alternative
from plait.report.advice import RunFacts, advise
from plait.report.measured_step import PYTHON_SPANS, Span
from plait.report.run_files import RunFiles, StepMark
from plait.report.step_split import StepSplit, split_steps
from plait.report.summary import NUMBER_TYPES
from plait.report.timeline import StepRows, make_timeline

CURVE_COLUMNS = 1000
"""Pixel columns of a curve. Of more points, each column has its minimum and maximum."""
MOST_RANKS, MOST_BOXES = 16, 6000
"""Maximum number of rows and boxes in a timeline."""
CURVES = {"loss": "loss", "lr": "learning rate", "norm": "gradient norm"}
SPAN_KINDS = {
    "F": "forward", "B": "backward", "I": "backward", "W": "weights", "loss": "forward",
    **dict.fromkeys(("receive", "send", "wait", "reduce", "replicate", "collect"), "communication"), **dict.fromkeys(PYTHON_SPANS, "Python"),
}  # fmt: skip
"""Kinds of spans in a timeline that are not drawn under their own name."""
Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Prediction of one step: seconds, split by cause, and bytes of the fullest rank by category."""

    seconds: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    others: tuple[Alternative, ...] = ()
    note: str = ""
    """The reason why something is not predicted."""


Predict = Callable[[RunFiles, int], Prediction]
"""Predicts a run with steps of the given number of samples."""


def make_figures(runs: Sequence[RunFiles], step: int | None = None, predict: Predict = lambda run, batch: Prediction()) -> Figures:
    """Return the figures of some runs, with details of the first. `step`: the step of the timeline; a typical one if None."""
    splits = [split_steps(run.plan, run.steps) for run in runs]
    predicted = [predict(run, _get_batch(run)) if run.step_rows else Prediction() for run in runs]
    made = [_describe_run(*each) for each in zip(runs, splits, predicted)]
    first, notes = runs[0], [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    notes += [f"{run.name}: {p.note}" if len(runs) > 1 else p.note for run, p in zip(runs, predicted) if p.note]
    if not splits[0].is_complete and splits[0].ranks:
        notes.append("This run did not record waits inside passes, so their communication counts as computing.")
    facts = RunFacts(first.plan, first.job, first.command, predicted[0].parts, predicted[0].others, _get_batch(first) if first.step_rows else 0)
    shown = _make_timeline(first, step, predicted[0], notes)
    jobs = list(dict.fromkeys(f"{run.job} {run.arguments or ''}".strip() for run in runs))
    if len(jobs) > 1:
        notes.append(f"The runs are of {len(jobs)} different jobs ({', '.join(jobs)}): curves are overlaid, and scaling is not shown.")
    return {
        "plait": __version__, "runs": made, "head": _make_head(made[0]), "notes": list(dict.fromkeys(notes)),
        "advice": [vars(a) | {"measured": None, "note": ""} for a in advise(splits[0], facts)],
        "curves": {name: [_make_curve(run, name) for run in runs] for name in CURVES},
        "marks": [{"run": i, **vars(mark)} for i, run in enumerate(runs) for mark in _pick_evenly(run.marks)],
        "evaluations": _make_evaluations(runs), "timeline": shown, "memory": _make_memory(first, predicted[0]),
        "scaling": _make_scaling(made) if len(jobs) == 1 else [],
    }  # fmt: skip


def _get_batch(run: RunFiles) -> int:
    sizes = [b["samples"] - a["samples"] for a, b in pairwise(run.step_rows) if b["step"] == a["step"] + 1]
    return int(median(sizes)) if sizes else int(run.step_rows[0]["samples"] / max(1, run.step_rows[0]["step"]))


def _describe_run(run: RunFiles, found: StepSplit, predicted: Prediction) -> Figures:
    """Describe the run: its job and plan, its progress and its speed."""
    steps, typical = run.step_rows, run.typical_rows
    rate = "tokens_per_s" if typical and typical[-1].get("tokens_per_s") else "samples_per_s"
    seconds = median(row["seconds"] for row in typical) if typical else None
    rates = [row[rate] for row in typical if isinstance(row.get(rate), NUMBER_TYPES)]
    speed = median(rates) if rates else None
    losses = [row["loss"] for row in steps if row["loss"] is not None]
    return {
        "name": run.name, "path": str(run.path), "job": run.job, "arguments": run.arguments, "plan": str(run.plan), "devices": run.plan.devices,
        "steps": steps[-1]["step"] if steps else 0, "samples": steps[-1]["samples"] if steps else 0,
        "state": "running" if run.running else "complete" if run.is_complete else "ended early: no end was recorded",
        "command": " ".join(run.command),
        "seconds": seconds, "speed": speed, "unit": rate.replace("_per_s", "/s"), "took": sum(row["seconds"] for row in steps),
        "loss": {"first": losses[0], "last": losses[-1], "lowest": min(losses)} if losses else None,
        "skipped": sum(bool(row.get("skipped")) for row in steps), "environment": run.environment,
        "predicted": {
            "seconds": predicted.seconds or None, "parts": dict(predicted.parts),
            "speed": speed * seconds / predicted.seconds if speed and seconds and predicted.seconds else None,
        },
        "split": {
            "steps": found.steps, "mean": found.mean,
            "ranks": [{"rank": r.rank, "seconds": r.seconds, "late": r.late_seconds, "parts": r.parts} for r in found.ranks],
        },
        "memory": _find_fullest(run, predicted),
    }  # fmt: skip


def _find_fullest(run: RunFiles, predicted: Prediction) -> Figures | None:
    """Return the bytes of the fullest rank: at its maximum on a device, or between two steps on CPU processes without more data."""
    found = find_fullest(run.memories, "end") or find_fullest(run.memories, "first")
    if found is None:
        return None
    rank, use = found
    between = {name: n for name, n in group_bill(predicted.memory).items() if name in use.group_by_category()} if predicted.memory else {}
    billed = sum(between.values()) or None
    return {"rank": rank, "bytes": sum(use.group_by_category().values()), "predicted": billed,
            "what": "fullest moment" if use.total else "between steps"}


def _make_head(run: Figures) -> list[Figures]:
    """Return three figures, each with its prediction: step time, speed and memory."""
    memory = run["memory"] or {"bytes": None, "predicted": None, "what": "not recorded"}
    return [
        {"name": "median step", "unit": "s", "measured": run["seconds"], "predicted": run["predicted"]["seconds"]},
        {"name": "speed", "unit": run["unit"], "measured": run["speed"], "predicted": run["predicted"]["speed"]},
        {"name": f"memory of a rank, {memory['what']}", "unit": "bytes", "measured": memory["bytes"], "predicted": memory["predicted"]},
    ]


def _make_curve(run: RunFiles, name: str) -> Figures:
    """Return one metric by step, thinned: [steps], [values]. A value is None if it is not finite."""
    points = [(row["step"], row[name]) for row in run.step_rows if name in row and (row[name] is None or isinstance(row[name], NUMBER_TYPES))]
    points = thin_points(points)
    return {"run": run.name, "steps": [step for step, _ in points], "values": [value for _, value in points]}


Point = tuple[int, float | None]


def thin_points(points: Sequence[Point], columns: int = CURVE_COLUMNS) -> list[Point]:
    """Keep the minimum and maximum of each column, and the first and last point. One point without a value is kept per column.

    >>> thin_points([(1, 2.0), (2, 5.0), (3, 1.0), (4, 3.0)], 1)
    [(1, 2.0), (2, 5.0), (3, 1.0), (4, 3.0)]
    """
    if len(points) <= 2 * columns:
        return list(points)
    keep = {0, len(points) - 1}
    for k in range(columns):
        part = range(len(points) * k // columns, len(points) * (k + 1) // columns)
        finite = [(value, i) for i in part if (value := points[i][1]) is not None]
        keep |= {min(finite)[1], max(finite)[1]} if finite else set()
        keep |= {next(i for i in part if points[i][1] is None)} if len(finite) < len(part) else set()
    return [points[i] for i in sorted(keep)]


def _pick_evenly(many: Sequence[StepMark], most: int = 400) -> list[StepMark]:
    """Pick at most `most` marks, evenly spaced."""
    return list(many) if len(many) <= most else [many[i * (len(many) - 1) // (most - 1)] for i in range(most)]


def _make_evaluations(runs: Sequence[RunFiles]) -> list[Figures]:
    """Return each evaluation metric of each run as a curve."""
    found = list[Figures]()
    for run in runs:
        rows = [row for row in run.rows if "evaluation" in row]
        for name in dict.fromkeys(key for row in rows for key in row["evaluation"]):
            points = thin_points([(r["step"], v) for r in rows if isinstance(v := r["evaluation"].get(name), NUMBER_TYPES) and math.isfinite(v)])
            found.append({"run": run.name, "metric": name, "steps": [s for s, _ in points], "values": [v for _, v in points]})
    return found


def get_box_kind(name: str) -> str:
    """Return the drawing kind of a timeline box."""
    sort = Span(name, 0.0, 0.0).kind
    return SPAN_KINDS.get(sort, sort)


def _make_timeline(run: RunFiles, step: int | None, predicted: Prediction, notes: list[str]) -> Figures | None:
    """Return a typical step: boxes [kind, start, seconds, name] for each rank, in microseconds."""
    if not run.steps and step is None:
        return None
    try:
        found = make_timeline(run, step)
    except PlaitError as error:
        if step is not None:
            raise
        notes.append(f"The timeline cannot be shown: {error.problems[0].what}.")
        return None
    if found.note:
        notes.append(found.note)
    ranks = len(found.measured.rows)
    drawn = sorted({round(i * (ranks - 1) / max(1, min(MOST_RANKS, ranks) - 1)) for i in range(min(MOST_RANKS, ranks))})
    if len(drawn) < ranks:
        notes.append(f"Of {ranks} ranks, the timeline shows {', '.join(map(str, drawn))}.")
    return {
        "step": found.step, "steps": found.steps, "bubble": {name: block.bubble for name, block in found.blocks.items()},
        "seconds": {"predicted": predicted.seconds} | {name: block.makespan for name, block in found.blocks.items()},
        "blocks": {name: _make_rows(block, drawn) for name, block in found.blocks.items()} | _make_planned(predicted, found.predicted is None, drawn),
    }  # fmt: skip


def _make_planned(predicted: Prediction, alone: bool, drawn: Sequence[int]) -> dict[str, list[Figures]]:
    """Return the predicted step of a plan without a pipeline table: its parts in sequence, equal on all ranks."""
    if not alone or not predicted.seconds:
        return {}
    take = predicted.parts.get
    compute, recompute, tensor = take("compute", 0.0), take("recompute", 0.0), take("tensor", 0.0)
    parts = [
        ("data", take("data", 0.0), "data"), ("forward", compute / 3, "forward"), ("communication", tensor / 3, "messages inside layers"),
        ("backward", compute * 2 / 3 + recompute, "backward"), ("communication", tensor * 2 / 3, "messages inside layers"),
        ("communication", take("gradients", 0.0), "gradients"), ("optimizer", take("optimizer", 0.0), "optimizer"),
    ]  # fmt: skip
    at, boxes = 0.0, list[list[Any]]()
    for kind, seconds, name in parts:
        if seconds > 0:
            boxes.append([kind, round(at * 1e6, 1), round(seconds * 1e6, 1), name])
            at += seconds
    return {"predicted": [{"rank": rank, "label": f"rank {rank}", "boxes": boxes} for rank in drawn]}


def _make_rows(block: StepRows, drawn: Sequence[int]) -> list[Figures]:
    rows = [row for row in block.rows if row.rank in drawn]
    most = MOST_BOXES // max(1, len(rows))
    return [
        {
            "rank": row.rank, "label": row.label,
            "boxes": [[get_box_kind(b.name), round(b.start * 1e6, 1), round((b.end - b.start) * 1e6, 1), b.name]
            for b in _pick_longest(row.boxes, most)],
        }
        for row in rows
    ]  # fmt: skip


def _pick_longest(boxes: Sequence[Any], most: int) -> Iterable[Any]:
    """Pick at most `most` boxes of a row, the longest ones."""
    if len(boxes) <= most:
        return boxes
    least = sorted((b.end - b.start for b in boxes), reverse=True)[most - 1]
    return [b for b in boxes if b.end - b.start >= least][:most]


def _make_memory(run: RunFiles, predicted: Prediction) -> Figures:
    """Return bytes by category of each rank, and of the prediction."""
    ranks = []
    for rank, row in run.memories.items():
        use = MemoryUse.from_row(row.get("end") or row.get("first") or {"device": ""})
        parts = use.group_by_category() | {f"{name}, on the host": n for name, n in use.host.items() if n}
        parts |= {"kept free by the allocator": use.fragmented} if use.total and use.fragmented else {}
        parts |= {"context and others": use.beside} if use.beside else {}
        ranks.append({"rank": rank, "parts": parts, "resident": use.resident_peak, "device": use.total})
    return {"ranks": ranks, "predicted": group_bill(predicted.memory) if predicted.memory else {}, "bill": dict(predicted.memory)}


def _make_scaling(runs: Sequence[Figures]) -> list[Figures]:
    """Return the speed by device count: the fastest run of each, the ideal from the fewest devices, the prediction, and the parts that take the
    rest."""
    best = dict[int, Figures]()
    for run in runs:
        if run["speed"] and (run["devices"] not in best or run["speed"] > best[run["devices"]]["speed"]):
            best[run["devices"]] = run
    if len(best) < 2:
        return []
    least = min(best)
    found = list[Figures]()
    for devices, run in sorted(best.items()):
        ideal, total = best[least]["speed"] * devices / least, sum(run["split"]["mean"].values())
        rest = {n: s / total for n, s in run["split"]["mean"].items() if n != "computing"} if total else {}
        found.append({
            "devices": devices, "run": run["name"], "plan": run["plan"], "speed": run["speed"], "unit": run["unit"], "ideal": ideal,
            "predicted": run["predicted"]["speed"], "efficiency": run["speed"] / ideal, "rest": rest,
        })  # fmt: skip
    return found
