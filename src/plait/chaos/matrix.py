"""The fault matrix: all faults, and the run through them, one after the other, in a folder that is removed at the end."""

import contextlib
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

from plait.chaos import damage, disks, launchers, machines, numbers, ranks
from plait.chaos.fault import KEPT, NO_PROMISE, NOT_RUN, SHORT, Fault, Row
from plait.chaos.hosts import own_mounts, two_hosts
from plait.chaos.scene import CannotPose, Outcome, Scene, Setting
from plait.chaos.watched import NotInTime, Record, adopt
from plait.config.errors import FAILED, PlaitError, Problem, in_a_line
from plait.launch import fork
from plait.launch.scratch import Scratch
from plait.model.fake_model import sketched

FAULTS = (
    *ranks.FAULTS, *numbers.FAULTS, *damage.FAULTS, *disks.FAULTS, *launchers.FAULTS, *machines.FAULTS,
)  # fmt: skip

PATIENT = 2.5
"""`--patience` is at least so many times what the undisturbed run took to its first step."""


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
