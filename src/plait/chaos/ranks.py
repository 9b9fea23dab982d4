"""Ranks that die, raise, hang or are slow: the launcher is expected to detect and report them, and to restart the ranks.
Wrong values on one rank, and clocks that jump.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from plait.chaos.scene import SOON, UNHURRIED, Fault, Outcome, Scene
from plait.chaos.strike import Strike
from plait.chaos.watched import Record

RECOVERS = "recovers"
RECOVERY = (
    "recovers: the run reports the failed rank and the cause, restarts all ranks and continues by itself. No completed step is lost if the ranks\n"
    "have replicas of the full model; otherwise, the steps since the newest complete checkpoint may be lost."
)
"""The definition of `RECOVERS`, for lists and tables of faults."""
AFTER_TIMEOUT = f"{RECOVERS} after --hang-timeout"
FROM_SAVED = f"{RECOVERS} from a snapshot in memory or a checkpoint; steps since then may be lost"
GIVES_UP = "reported, retried twice; then exit 1; --resume continues"


def killed(
    phase: str, act: str = "kill", says: str = "was killed (SIGKILL)", **more: float
) -> Callable[[Scene], Outcome]:
    """One rank, in a phase of a step."""

    def pose(scene: Scene) -> Outcome:
        scene.several()
        strike = Strike(act, phase, scene.a_step(), scene.a_rank(), **more)  # type: ignore[arg-type]
        return scene.survives(strike, says=(f"rank {strike.rank} {says}", "restarting", "going on from step"))

    return pose


def _in_build(scene: Scene) -> Outcome:
    scene.several()
    strike = Strike("kill", "build", -1, scene.a_rank())
    return scene.survives(strike, says=(f"rank {strike.rank} was killed (SIGKILL)", "going on from step 0"), lost=0)


def _in_save(scene: Scene) -> Outcome:
    scene.several()
    strike = Strike(
        "kill", "checkpoint", scene.setting.every, scene.a_rank(), until="runs/latest/checkpoints/step-*.tmp-*/*"
    )
    return scene.survives(strike, says=(f"rank {strike.rank} was killed (SIGKILL)", "going on from step"))


def _in_evaluation(scene: Scene) -> Outcome:
    scene.several()
    evaluate = scene.setting.job.evaluate
    scene.needs("the job has no evaluation", evaluate is not None)
    strike = Strike("kill", "evaluate", -1, scene.a_rank())
    return scene.survives(strike, says=(f"rank {strike.rank} was killed (SIGKILL)", "going on from step"))


def _last_step(scene: Scene) -> Outcome:
    scene.several()
    strike = Strike("kill", "backward", scene.setting.steps - 1, scene.a_rank())
    return scene.survives(strike, says=(f"rank {strike.rank} was killed (SIGKILL)", "going on from step"))


def _all(scene: Scene) -> Outcome:
    scene.several()
    step = scene.a_step()
    strikes = [Strike("kill", "forward", step, rank) for rank in range(scene.world)]
    says = ("was killed (SIGKILL)", "going on from step")
    return scene.survives(*strikes, says=says, lost=scene.since_checkpoint)


def _two(scene: Scene) -> Outcome:
    scene.needs("the plan has fewer than three ranks", scene.world > 2)
    step, first = scene.a_step(), scene.a_rank()
    strikes = [Strike("kill", "forward", step, rank) for rank in (first, (first + 1) % scene.world)]
    says = ("was killed (SIGKILL)", "going on from step")
    return scene.survives(*strikes, says=says, lost=scene.since_checkpoint)


def _in_restart(scene: Scene) -> Outcome:
    scene.several()
    rank, step = scene.a_rank(), scene.a_step()
    strikes = (Strike("kill", "backward", step, rank), Strike("kill", "build", -1, 0, after="kill"))
    return scene.survives(
        *strikes, says=(f"rank {rank} was killed (SIGKILL)", "rank 0 was killed (SIGKILL)", "going on from step")
    )


def _thrice(scene: Scene) -> Outcome:
    scene.several()
    steps = scene.setting.steps
    strikes = [Strike("kill", "backward", at, scene.a_rank()) for at in (2, steps // 2, steps - 3)]
    return scene.survives(*strikes, says=("was killed (SIGKILL)", "going on from step"), lost=3 * scene.allowed)


def _always(scene: Scene) -> Outcome:
    """One device, and it alone, at the same step: as if it were broken."""
    scene.several()
    strike = Strike("kill", "forward", scene.a_step(), scene.a_rank(), times=9)
    run = scene.start(strikes=(strike, UNHURRIED))
    code = run.wait()
    says = (f"rank {strike.rank} was killed (SIGKILL)", "(2 of 2 at this step)", "restarting with fewer ranks")
    scene.told(run, scene.mark().time, *says)
    if scene.expect(code == 0, f"exit code {code}"):
        scene.after(run)
        scene.near()
    return scene.measured


def again(act: str, says: str) -> Callable[[Scene], Outcome]:
    """The same failure at the same step in every retry."""

    def pose(scene: Scene) -> Outcome:
        scene.several()
        strike = Strike(act, "forward", scene.a_step(), scene.a_rank(), times=9)
        return scene.ends(strike, says=(f"rank {strike.rank} {says}", "(2 of 2 at this step)", "error["))

    return pose


def _first_step(scene: Scene) -> Outcome:
    scene.several()
    run = scene.start(strikes=(strike := Strike("raise", "forward", 0, scene.a_rank()),))
    code = run.wait()
    scene.told(run, scene.mark().time, f"error[C005] rank {strike.rank} raised")
    scene.expect(code == 1 and run.told("restarting") is None, f"it was retried, or exit code {code}")
    scene.measured.lost = 0
    return scene.measured


def hangs(
    act: str, phase: str, within: float = 0.0, says: str = "stopped making progress"
) -> Callable[[Scene], Outcome]:
    """A hung rank. `within`: seconds to the end of the run under plait's own limit. If 0, and in a pipeline, `--hang-timeout` is the limit:
    plait's own limit is minutes there, because the progress of one stage says nothing about another."""

    def pose(scene: Scene) -> Outcome:
        scene.several()
        strike = Strike(act, phase, scene.a_step(), scene.a_rank())
        words = (f"rank {strike.rank} {says}", "going on from step")
        if within and scene.setting.plan.pp == 1:
            return scene.survives(strike, says=words, within=within)
        return scene.survives(strike, says=words, flags=scene.patient, within=_hanging(scene))

    return pose


def _hanging(scene: Scene) -> float:
    """Seconds in which a rank is ended that makes no progress."""
    return 2 * scene.setting.patience + SOON


def _in_loader(act: str, says: str) -> Callable[[Scene], Outcome]:
    """In the process that reads samples for a rank, once the rank has come to a step."""

    def pose(scene: Scene) -> Outcome:
        scene.several()
        rank = scene.a_rank()
        strikes = (Strike("mark", "forward", scene.a_step(), rank), Strike(act, "loader", -1, rank, after="mark"))
        words = (says.format(rank=rank), "going on from step")
        flags = ("--workers", "1", *scene.patient)
        return scene.survives(*strikes, says=words, flags=flags, within=_hanging(scene))

    return pose


def _short_stop(scene: Scene) -> Outcome:
    """Stopped for a second, which is less than a rank is ended for."""
    scene.several()
    run = scene.start(strikes=(Strike("stop", "forward", scene.a_step(), scene.a_rank()),))
    run.until(lambda: any(scene.folder.glob("mark-*.json")) or run.code is not None, "the strike")
    time.sleep(1.0)
    os.kill(scene.mark().pid, signal.SIGCONT)
    return undisturbed(scene, run.wait(), run.told("restarting") is None)


def undisturbed(scene: Scene, code: int, left_alone: bool) -> Outcome:
    """No false alarm: the run ends as if nothing had been."""
    scene.expect(left_alone, "ranks were restarted although none was lost")
    if scene.expect(code == 0, f"exit code {code}"):
        scene.measured.lost = 0
        scene.equal()
    return scene.measured


def _slow(scene: Scene) -> Outcome:
    scene.several()
    strike = Strike("slow", "forward", rank=scene.a_rank(), times=999, text="0.15")
    run = scene.start(strikes=(strike,))
    return undisturbed(scene, run.wait(), run.told("restarting") is None)


def _memory(scene: Scene) -> Outcome:
    scene.several()
    strike = Strike("allocate", "forward", scene.a_step(), scene.a_rank())
    return scene.ends(strike, says=(f"error[M002] out of memory on rank {strike.rank}",))


def _group() -> Path | None:
    """A control group whose memory is limited; None where none can be made."""
    for base, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(base) / f"plait-chaos-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(256 << 20))
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        return group
    return None


def _oom_kill(scene: Scene) -> Outcome:
    scene.several()
    group = _group()
    scene.needs("cannot create a memory control group", group is not None)
    assert group is not None
    scene.undo.append(group.rmdir)
    strike = Strike("eat", "forward", scene.a_step(), scene.a_rank(), text=str(group / "cgroup.procs"))
    return scene.survives(
        strike, says=(f"rank {strike.rank} was killed (SIGKILL)", "ran out of memory", "going on from step")
    )


def _hang_in_save(scene: Scene) -> Outcome:
    scene.several()
    strike = Strike("sleep", "checkpoint", 2 * scene.setting.every, scene.a_rank())
    return scene.survives(
        strike,
        says=(f"rank {strike.rank} stopped making progress", "going on from step"),
        flags=scene.patient,
        within=_hanging(scene),
    )


RANK_FAULTS = (
    Fault("kill-build", "kill -9 of a rank while it builds the model", f"{RECOVERS} from step 0", _in_build),
    Fault("kill-data", "kill -9 of a rank while it reads samples", RECOVERS, killed("data")),
    Fault("kill-forward", "kill -9 of a rank in forward", RECOVERS, killed("forward", within=0.9)),
    Fault("kill-backward", "kill -9 of a rank in backward", RECOVERS, killed("backward", within=0.9)),
    Fault("kill-collective", "kill -9 of a rank in the all-reduce of gradients",
          RECOVERS, killed("reduce", within=0.9)),
    Fault("kill-optimizer", "kill -9 of a rank in the optimizer's step",
          RECOVERS, killed("optimizer", within=0.5)),
    Fault("kill-save", "kill -9 of a rank while a checkpoint is written", RECOVERS, _in_save),
    Fault("kill-evaluation", "kill -9 of a rank in an evaluation", RECOVERS, _in_evaluation),
    Fault("kill-last-step", "kill -9 of a rank in the last step", RECOVERS, _last_step),
    Fault("kill-two", "kill -9 of two ranks at once", FROM_SAVED, _two),
    Fault("kill-all", "kill -9 of all ranks at once", FROM_SAVED, _all),
    Fault("kill-restart", "kill -9 of a rank, and of another during the restart", RECOVERS, _in_restart),
    Fault("kill-thrice", "kill -9 of a rank at three steps", RECOVERS, _thrice),
    Fault("kill-always", "kill -9 of a rank, at the same step each time",
          "reported, retried twice; then continues without its device, under another plan", _always),
    Fault("raise-once", "an exception on one rank, once",
          RECOVERS, killed("forward", "raise", "raised ValueError")),
    Fault("raise-always", "an exception at the same step each time", GIVES_UP, again("raise", "raised ValueError")),
    Fault("raise-first", "an exception in the first step", "reported at once, not retried, exit 1", _first_step),
    Fault("segv", "a crash in compiled code (SIGSEGV)",
          RECOVERS, killed("forward", "segv", "was killed (SIGSEGV)")),
    Fault("abort", "SIGABRT of a rank by its own code",
          RECOVERS, killed("backward", "abort", "aborted itself (SIGABRT)")),
    Fault("exit", "a rank's code ends the process (exit code 7)",
          RECOVERS, killed("forward", "exit", "ended with exit code 7")),
    Fault("no-memory", "a rank runs out of memory in an allocation",
          "reported as out of memory, not retried, exit 1; --resume continues", _memory),
    Fault("oom-kill", "the kernel's OOM killer kills a rank (control group)",
          f"{RECOVERS}; out of memory is reported as the cause", _oom_kill),
    Fault("stop", "SIGSTOP of a rank",
          f"{RECOVERS} within seconds", hangs("stop", "forward", 6.0, says="was stopped")),
    Fault("stop-short", "SIGSTOP of a rank for one second", "no false alarm: the run continues", _short_stop),
    Fault("hang-sleep", "a rank sleeps in forward",
          f"{RECOVERS} after about 10 s, or ten times the phase's duration before",
          hangs("sleep", "forward", 45.0)),
    Fault("hang-lock", "a rank sleeps with the GIL locked",
          AFTER_TIMEOUT, hangs("hold", "backward")),
    Fault("hang-loop", "a rank is in an endless loop", AFTER_TIMEOUT, hangs("spin", "forward")),
    Fault("hang-collective", "a rank calls a collective that no other rank calls",
          AFTER_TIMEOUT, hangs("barrier", "optimizer")),
    Fault("hang-save", "a rank sleeps before it saves", AFTER_TIMEOUT, _hang_in_save),
    Fault("hang-read", "reading a sample never ends in a rank", AFTER_TIMEOUT, hangs("sleep", "read")),
    Fault("hang-loader", "reading a sample never ends in a loader worker",
          AFTER_TIMEOUT, _in_loader("sleep", "rank {rank} stopped making progress")),
    Fault("kill-loader", "kill -9 of a loader worker",
          RECOVERS, _in_loader("kill", "a loader process of rank {rank} died")),
    Fault("slow-rank", "a rank takes 0.15 s longer in each step", "no false alarm: the run continues", _slow),
)  # fmt: skip


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
    scene.needs("the plan has no replicas of the full model", scene.setting.copies)
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
    return undisturbed(scene, run.wait(), run.told("restarting") is None)


def _clock_on_one(scene: Scene) -> Outcome:
    scene.several()
    run = scene.start(strikes=(Strike("clock", "forward", scene.a_step(), scene.a_rank(), text="-1"),))
    return undisturbed(scene, run.wait(), run.told("restarting") is None)


NUMBER_FAULTS = (
    Fault("nan-stop", "one rank computes a NaN, once",
          "reported on all ranks before the update; the state before is saved, exit 1; --resume continues", _nan),
    Fault("nan-skip", "one rank computes a NaN, with --on-nan skip",
          "all ranks skip the step, and the run continues", _nan_skipped),
    Fault("flip-weight", "one bit of a weight flips on one of several replicas",
          "C006 before the next checkpoint is written; exit 1; --resume continues", _drift),
    Fault("flip-gradient", "one bit of a gradient flips before the all-reduce",
          "none: all ranks receive the same wrong gradient", _flipped_gradient),
    Fault("clock", "the wall clock jumps by an hour and by a day, forward and back",
          "no false alarm: monotonic clocks are used", _clock),
    Fault("clock-one", "the wall clock of one rank jumps back by an hour", "no false alarm", _clock_on_one),
)  # fmt: skip
