"""Numbers that are wrong on one rank, and clocks that jump."""

import time
from collections.abc import Callable

from plait.chaos.fault import Fault
from plait.chaos.ranks import undisturbed
from plait.chaos.scene import Outcome, Scene
from plait.chaos.strike import Strike
from plait.chaos.watched import Record

HOUR = 3600.0


def _nan(scene: Scene) -> Outcome:
    strike = Strike("nan", "forward", scene.a_step(), scene.a_rank())
    return scene.ends(strike, says=("error[N001]", "is saved in"))


def _nan_skipped(scene: Scene) -> Outcome:
    strike = Strike("nan", "forward", scene.a_step(), scene.a_rank())
    run = scene.start("--on-nan", "skip", strikes=(strike,))
    code = run.wait()
    scene.told(run, scene.mark().time, "left out", "1 steps were left out")
    scene.expect(code == 0, f"exit code {code}")
    scene.measured.lost, scene.measured.equal = 0, "without that step"
    return scene.measured


def _drift(scene: Scene) -> Outcome:
    """One copy's weight: the comparison of copies before the next checkpoint finds it."""
    scene.needs("no rank holds a copy of another", scene.setting.copies)
    strike = Strike("flip", "forward", scene.a_step(), scene.a_rank())
    return scene.ends(strike, says=("error[C006]", "drifted apart"), within=30.0)


def _flipped_gradient(scene: Scene) -> Outcome:
    """The sum over ranks gives all of them the same wrong number."""
    assert scene.setting.reference is not None
    run = scene.start(strikes=(Strike("flip gradient", "forward", scene.a_step(), scene.a_rank()),))
    code = run.wait()
    scene.mark()
    scene.expect(code == 0, f"exit code {code}")
    wrong = Record.of(scene.runs / "latest").differs(scene.setting.reference)
    scene.measured.equal, scene.measured.lost = "no" if wrong else "yes", 0
    scene.measured.said = "nothing was said"
    return scene.measured


def jumping(*hours: float, every: float = 1.0) -> Callable[[], None]:
    """Have the wall's clock jump, each so many seconds after the last, in the launcher and all ranks."""

    def before() -> None:
        real, began = time.time, time.monotonic()

        def now() -> float:
            number = int((time.monotonic() - began) / every)
            return real() + HOUR * hours[min(number, len(hours) - 1)]

        time.time = now

    return before


def _clock(scene: Scene) -> Outcome:
    run = scene.start(before=jumping(0.0, 1.0, -1.0, 24.0, 0.0))
    return undisturbed(scene, run.wait(), run.told("starting again") is None)


def _clock_on_one(scene: Scene) -> Outcome:
    scene.several()
    run = scene.start(strikes=(Strike("clock", "forward", scene.a_step(), scene.a_rank(), text="-1"),))
    return undisturbed(scene, run.wait(), run.told("starting again") is None)


FAULTS = (
    Fault("nan-stop", "NaN in what one rank computes, once",
          "named on all ranks before an update; the state before is saved, exit 1", _nan),
    Fault("nan-skip", "the same with --on-nan skip",
          "the step is left out on all ranks, and the run goes on", _nan_skipped),
    Fault("flip-weight", "one bit of a weight flips on one of several copies",
          "C006 before the next checkpoint is written; exit 1, --resume goes on", _drift),
    Fault("flip-gradient", "one bit of a gradient flips before the sum over ranks",
          "none: all ranks get the same wrong number", _flipped_gradient),
    Fault("clock", "the wall's clock jumps by an hour and by a day, forth and back",
          "no alarm: clocks that only go forward are used", _clock),
    Fault("clock-one", "the same by an hour back on one rank", "no alarm", _clock_on_one),
)  # fmt: skip
