"""The fault matrix: all faults, and the run through them, one after the other, in a folder that is removed at the end.

What was found, as lines on a terminal, as a page of Markdown, and as JSON.
"""

import contextlib
import datetime
import math
import os
import platform
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from plait.chaos import disks, launchers, machines, ranks
from plait.chaos.hosts import own_mounts, two_hosts
from plait.chaos.scene import KEPT, NO_PROMISE, NOT_RUN, SHORT, CannotPose, Fault, Outcome, Row, Scene, Setting
from plait.chaos.watched import NotInTime, Record, adopt
from plait.config.errors import FAILED, PlaitError, Problem, in_a_line
from plait.config.version import __version__
from plait.launch import fork
from plait.launch.place import cores
from plait.launch.scratch import Scratch
from plait.model.fake_model import sketched

HEAD = f"{'fault':<20} {'seen':>6} {'next':>6} {'lost':>4} {'equal':<8} verdict"
KEY = (
    "seen: seconds from the fault to the line that reports it · next: to the end of the next new step (r: from the start of --resume)\n"
    "lost: completed steps that were computed again · equal: losses, samples and weights are those of the run without faults, bit for bit\n"
    f"{ranks.RECOVERY}"
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
    return f"{text}\n{'':<20} {row.fault.done}; expected: {row.fault.promise}"


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
        "Faults injected into small runs of a job, the expected outcome, and the measured one. Written by",
        "",
        f"    plait chaos {job} {flags} --output docs/faults.md",
        "",
        f"on {date}, plait {__version__}, torch {torch.__version__.partition('+')[0]}, {cores()} shared CPU cores "
        f"({platform.machine()}, load {os.getloadavg()[1]:.0f}): {summary(rows, seconds)}. Any job and plan can be tested so.",
        "",
        "*Seen*: seconds from the fault to the line that reports it. *Next*: seconds from the fault to the end of the next new step; *r*: from the",
        "start of `--resume`, which a person has to run. *Lost*: completed steps that were computed again. *Equal*: losses, samples of every step,",
        "weights and optimizer state are those of the run without faults, bit for bit.",
        "",
        *ranks.RECOVERY.replace("recovers", "*Recovers*", 1).splitlines(),
        "",
        "Runs are forked from a process that has already read the job's data and run its model once, so *next* excludes these. On",
        "shared cores, seconds depend on the load: compare *next* between rows. In rows with `--hang-timeout`, the limit is 4 s, or 2.5 times the",
        "time to the first step of the run without faults if that is more.",
        "",
        "| fault | injected | expected | seen | next | lost | equal | outcome |",
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
        "Not covered: seconds on GPUs (NCCL, CUDA contexts); separate machines (the two nodes here share a kernel, a clock and two cores);",
        "a GPU kernel that never ends; a disk that reports writes that it has not made.",
        *told,
    ]


FAULTS = (
    *ranks.RANK_FAULTS, *ranks.NUMBER_FAULTS, *disks.CHECKPOINT_FAULTS, *disks.DISK_FAULTS, *launchers.FAULTS, *machines.FAULTS,
)  # fmt: skip

PATIENT = 2.5
"""`--hang-timeout` is at least so many times what the undisturbed run took to its first step."""


def run(
    setting: Setting, faults: Iterable[Fault], tell: Callable[[Row], None], began: Callable[[float], None] = lambda seconds: None
) -> list[Row]:
    """Try these faults. R008 when the job does not train undisturbed. `began`: is told how long the undisturbed run took."""
    faults = list(faults)
    with _interruptible(), contextlib.ExitStack() as stack:
        folder = stack.enter_context(Scratch("chaos"))
        adopt()
        _warm(setting)
        setting = replace(setting, mounts=own_mounts())
        if any(fault in machines.FAULTS for fault in faults):
            with contextlib.suppress(OSError):
                setting.hosts = stack.enter_context(two_hosts())
        began(_undisturbed(setting, folder))
        rows = list[Row]()
        for fault in faults:
            rows.append(_tried(setting, fault, folder / fault.name))
            tell(rows[-1])
            shutil.rmtree(folder / fault.name, ignore_errors=True)
        return rows


def _warm(setting: Setting) -> None:
    """Import what ranks need, read the job's data and run its model once, on fake tensors: so that each run starts at once."""
    fork.run(lambda place: {}, 1)
    fork.stay_forkable()
    with (
        contextlib.redirect_stdout(sys.stderr),
        contextlib.suppress(Exception),
    ):  # what is wrong, the first run will tell
        sketched(setting.job)


def _undisturbed(setting: Setting, folder: Path) -> float:
    """The run that all others are held against; returns the seconds that it took."""
    scene = Scene(setting, "undisturbed", folder / "undisturbed")
    try:
        run = scene.start()
        code = run.wait(600.0)
        if code:
            what = f"the job does not train undisturbed: plait train ended with exit code {code}"
            raise PlaitError(Problem("R008", what, why=run.output[-2000:]), FAILED)
        setting.run = (scene.runs / "latest").resolve()
        setting.reference = Record.of(setting.run)
        begun = next((when - run.began for when, _ in run.steps), 0.0)
        setting.patience = max(setting.patience, math.ceil(PATIENT * begun))
        return time.monotonic() - run.began
    except NotInTime as error:
        raise PlaitError(Problem("R008", f"the job does not train undisturbed: {error}"), FAILED) from None
    finally:
        scene.close()


def _tried(setting: Setting, fault: Fault, folder: Path) -> Row:
    """Pose a fault, and judge. Whatever comes in between is a shortfall."""
    began = time.monotonic()
    scene, why = Scene(setting, fault.name, folder), ""
    try:
        fault.pose(scene)
    except CannotPose as reason:
        why = str(reason)
    except NotInTime as error:
        scene.fell(str(error))
    except Exception as error:  # a fault that could not be carried through must not look kept
        scene.fell(in_a_line(error))
    finally:
        scene.close()
    took = time.monotonic() - began
    if why:
        return Row(fault, NOT_RUN, why, Outcome(), took)
    verdict = SHORT if scene.measured.short else NO_PROMISE if fault.promise.startswith("none") else KEPT
    return Row(fault, verdict, "; ".join(scene.measured.short), scene.measured, took)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end this as Ctrl-C does: what was started is ended, and what was made is removed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
