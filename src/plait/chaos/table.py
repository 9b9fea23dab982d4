"""What was found, as lines on a terminal, as a page of Markdown, and as JSON."""

import datetime
import os
import platform
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from plait.chaos.fault import KEPT, NOT_RUN, SHORT, Row
from plait.chaos.scene import Setting
from plait.config.version import __version__
from plait.launch.place import cores

HEAD = f"{'fault':<20} {'seen':>6} {'next':>6} {'lost':>4} {'equal':<8} verdict"
KEY = (
    "seen: seconds from the fault to the line that tells of it · next: to the end of the next new step (r: after --resume, from its start)\n"
    "lost: complete steps that were made again · equal: losses, samples and weights are those of the undisturbed run, bit for bit"
)


def _seconds(value: float | None, resumed: bool = False) -> str:
    return "" if value is None else f"{value:.2f}" + "r" * resumed


def _cells(row: Row) -> tuple[str, str, str, str]:
    found = row.measured
    lost = "" if found.lost is None else str(found.lost)
    return _seconds(found.detected), _seconds(found.again, found.resumed), lost, found.equal


def _drawn(row: Row) -> str:
    return f" ({', '.join(row.measured.drawn)})" if row.measured.drawn else ""


def line(row: Row) -> str:
    """One fault on a terminal."""
    seen, again, lost, equal = _cells(row)
    why = f": {row.why}" if row.why else ""
    text = f"{row.fault.name:<20} {seen:>6} {again:>6} {lost:>4} {equal:<8} {row.verdict}{why}{_drawn(row)}"
    if row.verdict != SHORT:
        return text.rstrip()
    return f"{text}\n{'':<20} {row.fault.done}; promised: {row.fault.promise}"


def expected(faults: int, undisturbed: float) -> str:
    """How long they will take: a fault took 1.7 to 1.9 times what the undisturbed run took, on two jobs (`docs/log.md`)."""
    low, high = (f"{max(1, round(faults * times * undisturbed / 60))}" for times in (1.5, 2.5))
    return f"the undisturbed run took {undisturbed:.1f} s: {faults} faults take about {low} to {high} min"


def summary(rows: Iterable[Row], seconds: float) -> str:
    """The last line."""
    count = Counter(row.verdict for row in rows)
    parts = [f"{number} {verdict}" for verdict, number in sorted(count.items(), key=lambda item: item[0] != KEPT)]
    return f"{count.total()} faults in {seconds:.0f} s: {', '.join(parts)}"


def to_dict(setting: Setting, rows: Iterable[Row]) -> dict[str, Any]:
    rows = list(rows)
    return {
        "plan": str(setting.plan), "steps": setting.steps, "seed": setting.seed, "ok": not any(row.verdict == SHORT for row in rows),
        "faults": [row.to_dict() for row in rows],
    }  # fmt: skip


def page(setting: Setting, job: str, rows: Iterable[Row], seconds: float) -> str:
    """A page of Markdown."""
    rows = list(rows)
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    flags = f'--plan "{setting.plan}" --steps {setting.steps} --seed {setting.seed}'
    lines = [
        "# The fault matrix",
        "What goes wrong on purpose in small runs of a job, what plait promises then, and what was measured. Written by",
        "",
        f"    plait chaos {job} {flags} --to docs/faults.md",
        "",
        f"on {date}, plait {__version__}, torch {torch.__version__.partition('+')[0]}, {cores()} shared CPU cores "
        f"({platform.machine()}, load {os.getloadavg()[1]:.0f}): {summary(rows, seconds)}. It takes any job and plan; try it on yours.",
        "",
        "*Seen*: seconds from the fault to the line that tells of it. *Next*: seconds to the end of the next new step; *r* where a person",
        "has to say `--resume`, from that start on. *Lost*: complete steps that were made again. *Equal*: losses, samples of every step,",
        "weights and optimizer state are those of the undisturbed run, bit for bit. Runs are forked from a process that has read the",
        "job's data and run its model once; what a start costs without that, *next* does not have. Where cores are shared, seconds are what",
        "was left of them: read *next* beside the same column of other rows. Where `--patience` is said, it is 4 s, or 2.5 times what the",
        "undisturbed run took to its first step.",
        "",
        "| fault | what is done | promised | seen | next | lost | equal | |",
        "|---|---|---|--:|--:|--:|---|---|",
    ]
    for row in rows:
        why = f": {row.why}" if row.why else ""
        told = f"**{row.verdict}**{why}" if row.verdict == SHORT else f"{row.verdict}{why}"
        cells = (f"`{row.fault.name}`", row.fault.done + _drawn(row), row.fault.promise, *_cells(row), told.replace("|", "\\|"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *_limits(rows)]) + "\n"


def _limits(rows: list[Row]) -> list[str]:
    left = [row for row in rows if row.verdict == NOT_RUN]
    told = [f"`{row.fault.name}` was not run: {row.why}." for row in left]
    return [
        "",
        "What this does not show: seconds on GPUs (NCCL, CUDA contexts); machines of their own (the two here share a kernel, a clock and",
        "two cores); a GPU kernel that never ends; faults of a disk that lies about what it has written.",
        *told,
    ]
