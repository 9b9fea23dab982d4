"""Ranks that die, raise, hang or are slow: the launcher is expected to detect and report them, and to restart the ranks. Wrong values on one
rank, and clocks that jump."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from plait.chaos.scene import REPORT_SECONDS, SLOW_STRIKE, Fault, Outcome, Scene
from plait.chaos.strike import Strike
from plait.chaos.watched_run import RunRecord

RECOVERS = "recovers"
RECOVERY = (
    "recovers: the run reports the failed rank and the cause, restarts all ranks and continues by itself. No completed step is lost if the ranks\n"
    "have replicas of the full model; otherwise, the steps since the newest complete checkpoint may be lost."
)
"""The definition of `RECOVERS`, for lists and tables of faults."""
AFTER_TIMEOUT = f"{RECOVERS} after --hang-timeout"
FROM_SAVED = f"{RECOVERS} from a snapshot in memory or a checkpoint; steps since then may be lost"
GIVES_UP = "reported, retried twice; then exit 1; --resume continues"


def pose_kill(
    phase: str, act: str = "kill", says: str = "was killed (SIGKILL)", **more: float
) -> Callable[[Scene], Outcome]:
    """Kill one rank in a phase of a step."""

    def pose(scene: Scene) -> Outcome:
        scene.require_ranks()
        strike = Strike(act, phase, scene.draw_step(), scene.draw_rank(), **more)  # type: ignore[arg-type]
        return scene.expect_recovery(strike, says=(f"rank {strike.rank} {says}", "restarting", "resuming from step"))

    return pose


def _pose_kill_in_build(scene: Scene) -> Outcome:
    scene.require_ranks()
    strike = Strike("kill", "build", -1, scene.draw_rank())
    return scene.expect_recovery(strike, says=(f"rank {strike.rank} was killed (SIGKILL)", "resuming from step 0"), lost=0)


def _pose_kill_in_save(scene: Scene) -> Outcome:
    scene.require_ranks()
    strike = Strike(
        "kill", "checkpoint", scene.setting.save_every, scene.draw_rank(), until="runs/latest/checkpoints/step-*.tmp-*/*"
    )
    return scene.expect_recovery(strike, says=(f"rank {strike.rank} was killed (SIGKILL)", "resuming from step"))


def _pose_kill_in_eval(scene: Scene) -> Outcome:
    scene.require_ranks()
    evaluate = scene.setting.job.evaluate
    scene.require("the job has no evaluation", evaluate is not None)
    strike = Strike("kill", "evaluate", -1, scene.draw_rank())
    return scene.expect_recovery(strike, says=(f"rank {strike.rank} was killed (SIGKILL)", "resuming from step"))


def _pose_kill_last_step(scene: Scene) -> Outcome:
    scene.require_ranks()
    strike = Strike("kill", "backward", scene.setting.steps - 1, scene.draw_rank())
    return scene.expect_recovery(strike, says=(f"rank {strike.rank} was killed (SIGKILL)", "resuming from step"))


def _pose_kill_all(scene: Scene) -> Outcome:
    scene.require_ranks()
    step = scene.draw_step()
    strikes = [Strike("kill", "forward", step, rank) for rank in range(scene.world)]
    says = ("was killed (SIGKILL)", "resuming from step")
    return scene.expect_recovery(*strikes, says=says, lost=scene.checkpoint_loss)


def _pose_kill_two(scene: Scene) -> Outcome:
    scene.require("the plan has fewer than three ranks", scene.world > 2)
    step, first = scene.draw_step(), scene.draw_rank()
    strikes = [Strike("kill", "forward", step, rank) for rank in (first, (first + 1) % scene.world)]
    says = ("was killed (SIGKILL)", "resuming from step")
    return scene.expect_recovery(*strikes, says=says, lost=scene.checkpoint_loss)


def _pose_kill_in_restart(scene: Scene) -> Outcome:
    scene.require_ranks()
    rank, step = scene.draw_rank(), scene.draw_step()
    strikes = (Strike("kill", "backward", step, rank), Strike("kill", "build", -1, 0, after="kill"))
    return scene.expect_recovery(
        *strikes, says=(f"rank {rank} was killed (SIGKILL)", "rank 0 was killed (SIGKILL)", "resuming from step")
    )


def _pose_kill_thrice(scene: Scene) -> Outcome:
    scene.require_ranks()
    steps = scene.setting.steps
    strikes = [Strike("kill", "backward", at, scene.draw_rank()) for at in (2, steps // 2, steps - 3)]
    return scene.expect_recovery(*strikes, says=("was killed (SIGKILL)", "resuming from step"), lost=3 * scene.allowed_loss)


def _pose_kill_always(scene: Scene) -> Outcome:
    """Kill the same rank at the same step in every attempt, as if its device were broken."""
    scene.require_ranks()
    scene.require_other_plans()
    strike = Strike("kill", "forward", scene.draw_step(), scene.draw_rank(), times=9)
    run = scene.start(strikes=(strike, SLOW_STRIKE))
    code = run.wait()
    says = (f"rank {strike.rank} was killed (SIGKILL)", "(2 of 2 at this step)", "restarting with fewer ranks")
    scene.expect_lines(run, scene.find_mark().time, *says)
    if scene.expect(code == 0, f"exit code {code}"):
        scene.measure_recovery(run)
        scene.expect_close()
    return scene.outcome


def pose_repeated(act: str, says: str) -> Callable[[Scene], Outcome]:
    """The same failure at the same step in every attempt."""

    def pose(scene: Scene) -> Outcome:
        scene.require_ranks()
        strike = Strike(act, "forward", scene.draw_step(), scene.draw_rank(), times=9)
        return scene.expect_ending(strike, says=(f"rank {strike.rank} {says}", "(2 of 2 at this step)", "error["))

    return pose


def _pose_first_step(scene: Scene) -> Outcome:
    scene.require_ranks()
    run = scene.start(strikes=(strike := Strike("raise", "forward", 0, scene.draw_rank()),))
    code = run.wait()
    scene.expect_lines(run, scene.find_mark().time, f"error[C005] rank {strike.rank} raised")
    scene.expect(code == 1 and run.find_line("restarting") is None, f"the run was retried, or exit code {code}")
    scene.outcome.lost = 0
    return scene.outcome


def pose_hang(
    act: str, phase: str, within: float = 0.0, says: str = "stopped making progress"
) -> Callable[[Scene], Outcome]:
    """A hung rank. `within`: seconds to the end of the run under plait's default limit. If it is 0, and in a pipeline, `--hang-timeout` is
    set: the default limit there is minutes, because the progress of one stage implies nothing about another."""

    def pose(scene: Scene) -> Outcome:
        scene.require_ranks()
        strike = Strike(act, phase, scene.draw_step(), scene.draw_rank())
        words = (f"rank {strike.rank} {says}", "resuming from step")
        if within and scene.setting.plan.pp == 1:
            return scene.expect_recovery(strike, says=words, within=within)
        return scene.expect_recovery(strike, says=words, flags=scene.hang_flags, within=_compute_hang_limit(scene))

    return pose


def _compute_hang_limit(scene: Scene) -> float:
    """Seconds until a rank without progress must be ended."""
    return 2 * scene.setting.hang_timeout + REPORT_SECONDS


def _pose_loader_fault(act: str, says: str) -> Callable[[Scene], Outcome]:
    """A fault in the process that reads samples for a rank, after the rank has reached a step."""

    def pose(scene: Scene) -> Outcome:
        scene.require_ranks()
        rank = scene.draw_rank()
        strikes = (Strike("mark", "forward", scene.draw_step(), rank), Strike(act, "loader", -1, rank, after="mark"))
        words = (says.format(rank=rank), "resuming from step")
        flags = ("--workers", "1", *scene.hang_flags)
        return scene.expect_recovery(*strikes, says=words, flags=flags, within=_compute_hang_limit(scene))

    return pose


def _pose_short_stop(scene: Scene) -> Outcome:
    """Stop a rank for a second, which is less than the limit."""
    scene.require_ranks()
    run = scene.start(strikes=(Strike("stop", "forward", scene.draw_step(), scene.draw_rank()),))
    run.wait_until(lambda: any(scene.folder.glob("mark-*.json")) or run.code is not None, "the strike")
    time.sleep(1.0)
    os.kill(scene.find_mark().pid, signal.SIGCONT)
    return expect_undisturbed(scene, run.wait(), run.find_line("restarting") is None)


def expect_undisturbed(scene: Scene, code: int, has_no_restart: bool) -> Outcome:
    """Expect no false alarm: the run must end as without the fault."""
    scene.expect(has_no_restart, "ranks were restarted although none was lost")
    if scene.expect(code == 0, f"exit code {code}"):
        scene.outcome.lost = 0
        scene.expect_equal()
    return scene.outcome


def _pose_slow_rank(scene: Scene) -> Outcome:
    scene.require_ranks()
    strike = Strike("slow", "forward", rank=scene.draw_rank(), times=999, text="0.15")
    run = scene.start(strikes=(strike,))
    return expect_undisturbed(scene, run.wait(), run.find_line("restarting") is None)


def _pose_out_of_memory(scene: Scene) -> Outcome:
    scene.require_ranks()
    strike = Strike("allocate", "forward", scene.draw_step(), scene.draw_rank())
    return scene.expect_ending(strike, says=(f"error[M002] out of memory on rank {strike.rank}",))


def _make_memory_group() -> Path | None:
    """Make a control group with limited memory; None if this is not possible."""
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


def _pose_oom_kill(scene: Scene) -> Outcome:
    scene.require_ranks()
    group = _make_memory_group()
    scene.require("cannot create a memory control group", group is not None)
    assert group is not None
    scene.undo.append(group.rmdir)
    strike = Strike("eat", "forward", scene.draw_step(), scene.draw_rank(), text=str(group / "cgroup.procs"))
    return scene.expect_recovery(
        strike, says=(f"rank {strike.rank} was killed (SIGKILL)", "ran out of memory", "resuming from step")
    )


def _pose_hang_in_save(scene: Scene) -> Outcome:
    scene.require_ranks()
    strike = Strike("sleep", "checkpoint", 2 * scene.setting.save_every, scene.draw_rank())
    return scene.expect_recovery(
        strike,
        says=(f"rank {strike.rank} stopped making progress", "resuming from step"),
        flags=scene.hang_flags,
        within=_compute_hang_limit(scene),
    )


RANK_FAULTS = (
    Fault("kill-build", "kill -9 of a rank while it builds the model", f"{RECOVERS} from step 0", _pose_kill_in_build),
    Fault("kill-data", "kill -9 of a rank while it reads samples", RECOVERS, pose_kill("data")),
    Fault("kill-forward", "kill -9 of a rank in forward", RECOVERS, pose_kill("forward", within=0.9)),
    Fault("kill-backward", "kill -9 of a rank in backward", RECOVERS, pose_kill("backward", within=0.9)),
    Fault("kill-collective", "kill -9 of a rank in the all-reduce of gradients",
          RECOVERS, pose_kill("reduce", within=0.9)),
    Fault("kill-optimizer", "kill -9 of a rank in the optimizer's step",
          RECOVERS, pose_kill("optimizer", within=0.5)),
    Fault("kill-save", "kill -9 of a rank while a checkpoint is written", RECOVERS, _pose_kill_in_save),
    Fault("kill-evaluation", "kill -9 of a rank in an evaluation", RECOVERS, _pose_kill_in_eval),
    Fault("kill-last-step", "kill -9 of a rank in the last step", RECOVERS, _pose_kill_last_step),
    Fault("kill-two", "kill -9 of two ranks at once", FROM_SAVED, _pose_kill_two),
    Fault("kill-all", "kill -9 of all ranks at once", FROM_SAVED, _pose_kill_all),
    Fault("kill-restart", "kill -9 of a rank, and of another during the restart", RECOVERS, _pose_kill_in_restart),
    Fault("kill-thrice", "kill -9 of a rank at three steps", RECOVERS, _pose_kill_thrice),
    Fault("kill-always", "kill -9 of a rank, at the same step each time",
          "reported, retried twice; then continues without its device, under another plan", _pose_kill_always),
    Fault("raise-once", "an exception on one rank, once",
          RECOVERS, pose_kill("forward", "raise", "raised ValueError")),
    Fault("raise-always", "an exception at the same step each time", GIVES_UP, pose_repeated("raise", "raised ValueError")),
    Fault("raise-first", "an exception in the first step", "reported at once, not retried, exit 1", _pose_first_step),
    Fault("segv", "a crash in compiled code (SIGSEGV)",
          RECOVERS, pose_kill("forward", "segv", "was killed (SIGSEGV)")),
    Fault("abort", "SIGABRT of a rank by its own code",
          RECOVERS, pose_kill("backward", "abort", "aborted itself (SIGABRT)")),
    Fault("exit", "a rank's code ends the process (exit code 7)",
          RECOVERS, pose_kill("forward", "exit", "ended with exit code 7")),
    Fault("no-memory", "a rank runs out of memory in an allocation",
          "reported as out of memory, not retried, exit 1; --resume continues", _pose_out_of_memory),
    Fault("oom-kill", "the kernel's OOM killer kills a rank (control group)",
          f"{RECOVERS}; out of memory is reported as the cause", _pose_oom_kill),
    Fault("stop", "SIGSTOP of a rank",
          f"{RECOVERS} within seconds", pose_hang("stop", "forward", 6.0, says="was stopped")),
    Fault("stop-short", "SIGSTOP of a rank for one second", "no false alarm: the run continues", _pose_short_stop),
    Fault("hang-sleep", "a rank sleeps in forward",
          f"{RECOVERS} after about 10 s, or ten times the phase's duration before",
          pose_hang("sleep", "forward", 45.0)),
    Fault("hang-lock", "a rank sleeps with the GIL locked",
          AFTER_TIMEOUT, pose_hang("hold", "backward")),
    Fault("hang-loop", "a rank is in an endless loop", AFTER_TIMEOUT, pose_hang("spin", "forward")),
    Fault("hang-collective", "a rank calls a collective that no other rank calls",
          AFTER_TIMEOUT, pose_hang("barrier", "optimizer")),
    Fault("hang-save", "a rank sleeps before it saves", AFTER_TIMEOUT, _pose_hang_in_save),
    Fault("hang-read", "reading a sample never ends in a rank", AFTER_TIMEOUT, pose_hang("sleep", "read")),
    Fault("hang-loader", "reading a sample never ends in a loader worker",
          AFTER_TIMEOUT, _pose_loader_fault("sleep", "rank {rank} stopped making progress")),
    Fault("kill-loader", "kill -9 of a loader worker",
          RECOVERS, _pose_loader_fault("kill", "a loader process of rank {rank} died")),
    Fault("slow-rank", "a rank takes 0.15 s longer in each step", "no false alarm: the run continues", _pose_slow_rank),
)  # fmt: skip


HOUR = 3600.0


def _pose_nan(scene: Scene) -> Outcome:
    strike = Strike("nan", "forward", scene.draw_step(), scene.draw_rank())
    saves = not scene.setting.plan.rarely  # a checkpoint needs all replica groups after the same step
    return scene.expect_ending(strike, says=("error[N001]", *(["is saved in"] * saves)))


def _pose_nan_skipped(scene: Scene) -> Outcome:
    strike = Strike("nan", "forward", scene.draw_step(), scene.draw_rank())
    run = scene.start("--on-nan", "skip", strikes=(strike,))
    code = run.wait()
    scene.expect_lines(run, scene.find_mark().time, "left out", "1 steps were left out")
    scene.expect(code == 0, f"exit code {code}")
    scene.outcome.lost, scene.outcome.equal = 0, "without that step"
    return scene.outcome


def _pose_drift(scene: Scene) -> Outcome:
    """Flip a bit of one replica's weight. The comparison of replicas before the next checkpoint must find it."""
    scene.require("the plan has no replicas of the full model", scene.setting.has_replicas)
    strike = Strike("flip", "forward", scene.draw_step(), scene.draw_rank())
    return scene.expect_ending(strike, says=("error[C006]", "have diverged"), within=30.0)


def _pose_flipped_gradient(scene: Scene) -> Outcome:
    """Flip a bit of a gradient before the all-reduce: all ranks get the same wrong sum."""
    assert scene.setting.reference is not None
    run = scene.start(strikes=(Strike("flip gradient", "forward", scene.draw_step(), scene.draw_rank()),))
    code = run.wait()
    scene.find_mark()
    scene.expect(code == 0, f"exit code {code}")
    wrong = RunRecord.from_run(scene.runs / "latest").list_differences(scene.setting.reference)
    scene.outcome.equal, scene.outcome.lost = "no" if wrong else "yes", 0
    scene.outcome.said = "not reported"
    return scene.outcome


def make_clock_jumps(*hours: float, every: float = 1.0) -> Callable[[], None]:
    """Return a function that makes the wall clock jump in the launcher and all ranks, every `every` seconds."""

    def before() -> None:
        real, began = time.time, time.monotonic()

        def now() -> float:
            number = int((time.monotonic() - began) / every)
            return real() + HOUR * hours[min(number, len(hours) - 1)]

        time.time = now

    return before


def _pose_clock_jump(scene: Scene) -> Outcome:
    run = scene.start(before=make_clock_jumps(0.0, 1.0, -1.0, 24.0, 0.0))
    return expect_undisturbed(scene, run.wait(), run.find_line("restarting") is None)


def _pose_rank_clock(scene: Scene) -> Outcome:
    scene.require_ranks()
    run = scene.start(strikes=(Strike("clock", "forward", scene.draw_step(), scene.draw_rank(), text="-1"),))
    return expect_undisturbed(scene, run.wait(), run.find_line("restarting") is None)


NUMBER_FAULTS = (
    Fault("nan-stop", "one rank computes a NaN, once",
          "reported on all ranks before the update; the state before is saved, exit 1; --resume continues", _pose_nan),
    Fault("nan-skip", "one rank computes a NaN, with --on-nan skip",
          "all ranks skip the step, and the run continues", _pose_nan_skipped),
    Fault("flip-weight", "one bit of a weight flips on one of several replicas",
          "C006 before the next checkpoint is written; exit 1; --resume continues", _pose_drift),
    Fault("flip-gradient", "one bit of a gradient flips before the all-reduce",
          "none: all ranks receive the same wrong gradient", _pose_flipped_gradient),
    Fault("clock", "the wall clock jumps by an hour and by a day, forward and back",
          "no false alarm: monotonic clocks are used", _pose_clock_jump),
    Fault("clock-one", "the wall clock of one rank jumps back by an hour", "no false alarm", _pose_rank_clock),
)  # fmt: skip
