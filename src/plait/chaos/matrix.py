"""The fault matrix: all faults, and the loop over them, in a folder that is removed at the end.

Reports: lines on a terminal, a page of Markdown, and JSON.
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

from plait.chaos import disks, launchers, nodes, ranks
from plait.chaos.hosts import isolate_mounts, make_two_hosts
from plait.chaos.scene import (
    AS_EXPECTED,
    NO_PROMISE,
    NOT_AS_EXPECTED,
    NOT_RUN,
    CannotPose,
    Fault,
    Outcome,
    Row,
    Scene,
    Setting,
)
from plait.chaos.watched_run import RunRecord, WaitTimeout, adopt_orphans
from plait.config.errors import FAILED, PlaitError, Problem, summarize_error
from plait.config.version import __version__
from plait.launch import fork
from plait.launch.place import count_cores
from plait.launch.scratch import ScratchFolder
from plait.model.fake_model import sketch_fake_model

HEAD = f"{'fault':<20} {'seen':>6} {'next':>6} {'lost':>4} {'equal':<8} verdict"
LEGEND = (
    "seen: seconds from the fault to the line that reports it · next: to the end of the next new step (r: from the start of --resume)\n"
    "lost: completed steps that were computed again · equal: losses, samples and weights are those of the run without faults, bit for bit\n"
    f"{ranks.RECOVERY}"
)


def _format_seconds(value: float | None, resumed: bool = False) -> str:
    return "" if value is None else f"{value:.2f}" + "r" * resumed


def _format_cells(row: Row) -> tuple[str, str, str, str]:
    found = row.outcome
    lost = "" if found.lost is None else str(found.lost)
    return _format_seconds(found.detected), _format_seconds(found.again, found.resumed), lost, found.equal


def _format_drawn(row: Row) -> str:
    return f" ({', '.join(row.outcome.drawn)})" if row.outcome.drawn else ""


def format_row(row: Row) -> str:
    """One fault on a terminal."""
    seen, again, lost, equal = _format_cells(row)
    why = f": {row.why}" if row.why else ""
    text = f"{row.fault.name:<20} {seen:>6} {again:>6} {lost:>4} {equal:<8} {row.verdict}{why}{_format_drawn(row)}"
    if row.verdict != NOT_AS_EXPECTED:
        return text.rstrip()
    return f"{text}\n{'':<20} {row.fault.injection}; expected: {row.fault.promise}"


def estimate_duration(faults: int, undisturbed: float) -> str:
    """Estimated duration: a fault took 1.7 to 1.9 times as long as the run without faults, on two jobs (`docs/log.md`)."""
    low, high = (f"{max(1, round(faults * times * undisturbed / 60))}" for times in (1.5, 2.5))
    return f"the run without faults took {undisturbed:.1f} s: {faults} faults take about {low} to {high} min"


def format_summary(rows: Iterable[Row], seconds: float) -> str:
    """The last line."""
    count = Counter(row.verdict for row in rows)
    parts = [f"{number} {verdict}" for verdict, number in sorted(count.items(), key=lambda item: item[0] != AS_EXPECTED)]
    return f"{count.total()} faults in {seconds:.0f} s: {', '.join(parts)}"


def build_report(setting: Setting, rows: Iterable[Row]) -> dict[str, Any]:
    rows = list(rows)
    return {
        "plan": str(setting.plan), "steps": setting.steps, "seed": setting.seed, "ok": not any(row.verdict == NOT_AS_EXPECTED for row in rows),
        "faults": [row.to_dict() for row in rows],
    }  # fmt: skip


def format_page(setting: Setting, job: str, rows: Iterable[Row], seconds: float) -> str:
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
        f"on {date}, plait {__version__}, torch {torch.__version__.partition('+')[0]}, {count_cores()} shared CPU cores "
        f"({platform.machine()}, load {os.getloadavg()[1]:.0f}): {format_summary(rows, seconds)}. Any job and plan can be tested this way.",
        "",
        "*Seen*: seconds from the fault to the line that reports it. *Next*: seconds from the fault to the end of the next new step; *r*: from the",
        "start of `--resume`, which a person must run. *Lost*: completed steps that were computed again. *Equal*: losses, samples of every step,",
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
        told = f"**{row.verdict}**{why}" if row.verdict == NOT_AS_EXPECTED else f"{row.verdict}{why}"
        cells = (f"`{row.fault.name}`", row.fault.injection + _format_drawn(row), row.fault.promise, *_format_cells(row), told.replace("|", "\\|"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *_list_limits(rows)]) + "\n"


def _list_limits(rows: list[Row]) -> list[str]:
    left = [row for row in rows if row.verdict == NOT_RUN]
    told = [f"`{row.fault.name}` was not run: {row.why}." for row in left]
    return [
        "",
        "Not covered: seconds on GPUs (NCCL, CUDA contexts); separate machines (the two nodes here share a kernel, a clock and two cores);",
        "a GPU kernel that never ends; a disk that reports writes it has not made.",
        *told,
    ]


FAULTS = (
    *ranks.RANK_FAULTS, *ranks.NUMBER_FAULTS, *disks.CHECKPOINT_FAULTS, *disks.DISK_FAULTS, *launchers.FAULTS, *nodes.FAULTS,
)  # fmt: skip

TIMEOUT_FACTOR = 2.5
"""Lower bound of `--hang-timeout`, relative to the time of the first step without faults."""


def run_matrix(
    setting: Setting, faults: Iterable[Fault], on_row: Callable[[Row], None], on_start: Callable[[float], None] = lambda seconds: None
) -> list[Row]:
    """Try these faults. Raises R008 if the job fails without faults. `on_start` gets the seconds of the run without faults."""
    faults = list(faults)
    with _interrupt_on_signals(), contextlib.ExitStack() as stack:
        folder = stack.enter_context(ScratchFolder("chaos"))
        adopt_orphans()
        _warm_up(setting)
        setting = replace(setting, mounts=isolate_mounts())
        if any(fault in nodes.FAULTS for fault in faults):
            with contextlib.suppress(OSError):
                setting.hosts = stack.enter_context(make_two_hosts())
        on_start(_run_undisturbed(setting, folder))
        rows = list[Row]()
        for fault in faults:
            rows.append(_try_fault(setting, fault, folder / fault.name))
            on_row(rows[-1])
            shutil.rmtree(folder / fault.name, ignore_errors=True)
        return rows


def _warm_up(setting: Setting) -> None:
    """Import the modules of ranks, read the job's data and run its model once on fake tensors, so that each run starts quickly."""
    fork.run_ranks(lambda place: {}, 1)
    fork.stay_forkable()
    with (
        contextlib.redirect_stdout(sys.stderr),
        contextlib.suppress(Exception),
    ):  # the first run reports any error
        sketch_fake_model(setting.job)


def _run_undisturbed(setting: Setting, folder: Path) -> float:
    """Run without faults, as the reference of all other runs. Returns its seconds."""
    scene = Scene(setting, "undisturbed", folder / "undisturbed")
    try:
        run = scene.start()
        code = run.wait(600.0)
        if code:
            what = f"the job fails without injected faults: plait train ended with exit code {code}"
            raise PlaitError(Problem("R008", what, why=run.output[-2000:]), FAILED)
        setting.run = (scene.runs / "latest").resolve()
        setting.reference = RunRecord.from_run(setting.run)
        begun = next((when - run.began for when, _ in run.steps), 0.0)
        setting.hang_timeout = max(setting.hang_timeout, math.ceil(TIMEOUT_FACTOR * begun))
        return time.monotonic() - run.began
    except WaitTimeout as error:
        raise PlaitError(Problem("R008", f"the job fails without injected faults: {error}"), FAILED) from None
    finally:
        scene.close()


def _try_fault(setting: Setting, fault: Fault, folder: Path) -> Row:
    """Inject a fault and judge its outcome. Any exception counts as not as expected."""
    began = time.monotonic()
    scene, why = Scene(setting, fault.name, folder), ""
    try:
        fault.pose(scene)
    except CannotPose as reason:
        why = str(reason)
    except WaitTimeout as error:
        scene.add_shortfall(str(error))
    except Exception as error:  # a fault that failed must not look as expected
        scene.add_shortfall(summarize_error(error))
    finally:
        scene.close()
    took = time.monotonic() - began
    if why:
        return Row(fault, NOT_RUN, why, Outcome(), took)
    verdict = NOT_AS_EXPECTED if scene.outcome.short else NO_PROMISE if fault.promise.startswith("none") else AS_EXPECTED
    return Row(fault, verdict, "; ".join(scene.outcome.short), scene.outcome, took)


@contextlib.contextmanager
def _interrupt_on_signals() -> Iterator[None]:
    """End on SIGTERM and SIGHUP as on Ctrl-C: processes are ended and files removed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
