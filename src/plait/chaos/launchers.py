"""Launchers that are killed, stopped or started twice; resumes with another job or plan; unknown connections at the run's ports."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace

import psutil

from plait.chaos.disks import copy_reference_run
from plait.chaos.ranks import expect_undisturbed
from plait.chaos.scene import SHARED_MEMORY, SLOW_STRIKE, Fault, Outcome, Scene
from plait.chaos.strike import Strike, read_marks
from plait.chaos.watched_run import WatchedRun
from plait.config.errors import RESUMABLE
from plait.config.plan import Plan

ORPHAN_SECONDS = 2.0
"""Seconds that ranks may outlive their launcher."""


def _wait_for_mark(scene: Scene, run: WatchedRun) -> None:
    run.wait_until(lambda: bool(read_marks(scene.folder)) or run.code is not None, "the moment for the fault")


def _pose_lost_launcher(scene: Scene, number: int) -> Outcome:
    """Send a fatal signal to the launcher alone; its ranks must end."""
    run = scene.start()
    run.wait_for_step(scene.draw_step())
    forked, since = run.list_forked(), time.monotonic()
    os.kill(run.pid, number)
    run.wait()
    gone = _wait_until_gone(forked, ORPHAN_SECONDS)
    scene.outcome.detected = time.monotonic() - since
    scene.expect(gone, f"ranks were alive {ORPHAN_SECONDS:.0f} s after their launcher")
    run.kill()
    scene.resume(lost=scene.checkpoint_loss)
    return scene.outcome


def _wait_until_gone(pids: list[int], patience: float) -> bool:
    end = time.monotonic() + patience
    while any(map(_is_running, pids)) and time.monotonic() < end:
        time.sleep(0.005)
    return not any(map(_is_running, pids))


def _is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _pose_power_loss(scene: Scene) -> Outcome:
    """Kill all processes at once, as in a power failure: also the process that frees the shared memory. A save in progress is torn."""
    run = scene.start()
    run.wait_for_step(scene.draw_step())
    for process in psutil.Process().children(recursive=True):
        if process.pid not in scene.helpers:
            with contextlib.suppress(psutil.Error):
                process.kill()
    run.kill()
    scene.expect(bool(scene.list_shared_files()) or not SHARED_MEMORY.is_dir(), "the run had no files in shared memory")
    scene.resume(lost=scene.checkpoint_loss)
    return scene.outcome


def pose_stop(number: int, phase: str, everyone: bool = False) -> Callable[[Scene], Outcome]:
    """Request a stop at a phase: from the launcher, or (like a terminal) from all its processes."""

    def pose(scene: Scene) -> Outcome:
        step = {"checkpoint": scene.setting.save_every}.get(phase, scene.draw_step())
        run = scene.start(strikes=(SLOW_STRIKE, Strike("mark", phase, step, 0)))
        _wait_for_mark(scene, run)
        since = time.monotonic()
        (os.killpg if everyone else os.kill)(run.pid, number)
        scene.expect_stop(run, since)
        return scene.outcome

    return pose


def _pose_early_stop(scene: Scene) -> Outcome:
    """Stop before the first step: there is no state to save."""
    run = scene.start(strikes=(SLOW_STRIKE, Strike("mark", "build", -1, 0)))
    _wait_for_mark(scene, run)
    since = time.monotonic()
    os.kill(run.pid, signal.SIGTERM)
    code = run.wait()
    scene.expect_lines(run, since, "error[C011]")
    scene.expect(code == RESUMABLE, f"exit code {code}, not {RESUMABLE}")
    again = scene.start()
    if scene.expect(again.wait() == 0, f"the same command ended with exit code {again.code}"):
        scene.outcome.lost = 0
        scene.expect_equal()
    return scene.outcome


def _pose_double_interrupt(scene: Scene) -> Outcome:
    """Press Ctrl-C twice: the run ends at once, and saved checkpoints are intact."""
    run = scene.start()
    run.wait_for_step(scene.draw_step())
    since = time.monotonic()
    for _ in range(2):
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.pid, signal.SIGINT)
        time.sleep(0.005)
    code = run.wait()
    scene.outcome.detected = time.monotonic() - since
    scene.expect(code in (130, 75), f"exit code {code}, neither 130 nor 75")
    scene.resume(lost=scene.checkpoint_loss)
    return scene.outcome


def _pose_second_launcher(scene: Scene) -> Outcome:
    """Resume a run that is still training, with a second launcher."""
    first = scene.start(strikes=(Strike("slow", "forward", rank=0, times=999, text="1.2"),))
    first.wait_for_step(scene.setting.save_every + 1)
    first.wait_until(
        lambda: any(scene.runs.glob("latest/checkpoints/step-??????")) or first.code is not None, "a checkpoint"
    )
    since = time.monotonic()
    second = scene.start("--resume")
    code = second.wait()
    scene.expect_lines(second, since, "error[R001]", within=15.0)
    scene.expect(code == 2, f"the second launcher ended with exit code {code}, not 2")
    return expect_undisturbed(scene, first.wait(), first.find_line("restarting") is None)


def _pose_edited_seed(scene: Scene) -> Outcome:
    """The user has edited the job file."""
    copy_reference_run(scene)
    job, began = scene.setting.job, time.monotonic()
    run = scene.start("--resume", job=replace(job, seed=job.seed + 1))
    code = run.wait()
    scene.expect_lines(run, began, "error[K010]", "seed", within=15.0)
    scene.expect(code == 2, f"exit code {code}, not 2")
    scene.resume(lost=0)
    return scene.outcome


def _pose_edited_batch(scene: Scene) -> Outcome:
    copy_reference_run(scene)
    train, began = scene.setting.train, time.monotonic()
    run = scene.start("--resume", train=replace(train, batch=2 * (train.batch or scene.setting.job.batch)))
    code = run.wait()
    scene.expect_lines(run, began, "changed", within=15.0)
    scene.expect(code == 0, f"exit code {code}")
    scene.outcome.equal, scene.outcome.lost = "as edited", 0
    return scene.outcome


def _pose_other_plan(scene: Scene) -> Outcome:
    """Resume a run of several devices on one device, and a run of one device on two."""
    scene.require_other_plans()
    setting = scene.setting
    copy_reference_run(scene)
    other = Plan.parse("dp=1" if setting.plan.world > 1 else "dp=2")
    run = scene.start("--resume", train=replace(setting.train, plan=str(other)))
    code = run.wait()
    scene.outcome.resumed, scene.outcome.lost = True, 0
    scene.outcome.again = next((t - run.began for t, _ in run.steps), None)
    if scene.expect(code == 0, f"exit code {code}"):
        scene.expect_close()
    return scene.outcome


def _list_ports(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports at which a process and its children listen."""
    everyone = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    found = set[tuple[str, int]]()
    for process in everyone:
        with contextlib.suppress(psutil.Error):
            for one in process.net_connections(kind="inet"):
                if one.status == psutil.CONN_LISTEN:
                    found.add((str(one.laddr[0]), int(one.laddr[1])))
    return sorted(found)


def _pose_strangers(scene: Scene) -> Outcome:
    """Send nothing, random bytes and floods to all ports of the run."""
    scene.require_ranks()
    run = scene.start()
    run.wait_for_step(2)
    ports = _list_ports(run.pid)
    scene.expect(bool(ports), "no port was found")
    scene.expect(all(address.startswith("127.") or address == "::1" for address, _ in ports), f"the run listens at {ports}")
    held = list[socket.socket]()
    for address, port in ports:
        for word in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(1 << 20), scene.rng.randbytes(1 << 16)):
            with contextlib.suppress(OSError):
                one = socket.create_connection((address, port), 2.0)
                one.settimeout(0.5)
                held.append(one)
                one.sendall(word)
    done = expect_undisturbed(scene, run.wait(), run.find_line("restarting") is None)
    for one in held:
        one.close()
    return done


STOP_PROMISE = "stops after its step and saves, exit 75; --resume loses no step"
FAULTS = (
    Fault("launcher-killed", "kill -9 of the launcher",
          "all ranks end within 2 s; --resume continues", lambda scene: _pose_lost_launcher(scene, signal.SIGKILL)),
    Fault("launcher-hangup", "SIGHUP of the launcher: its terminal is closed",
          "all ranks end within 2 s; --resume continues", lambda scene: _pose_lost_launcher(scene, signal.SIGHUP)),
    Fault("power", "kill -9 of all processes of a run at once",
          "checkpoints are complete; --resume continues, and deletes the snapshots in memory", _pose_power_loss),
    Fault("two-launchers", "a second launcher resumes a run that is still training",
          "the second is rejected (R001); the first is undisturbed", _pose_second_launcher),
    Fault("sigterm-start", "SIGTERM while ranks build the model",
          "ends at once, exit 75: nothing to save; the same command then trains", _pose_early_stop),
    Fault("sigterm-step", "SIGTERM in a step", STOP_PROMISE, pose_stop(signal.SIGTERM, "backward")),
    Fault("sigterm-save", "SIGTERM during a save", STOP_PROMISE, pose_stop(signal.SIGTERM, "checkpoint")),
    Fault("sigint-step", "Ctrl-C: SIGINT of launcher and ranks",
          STOP_PROMISE, pose_stop(signal.SIGINT, "forward", everyone=True)),
    Fault("sigint-twice", "Ctrl-C twice", "ends at once; saved checkpoints are intact; --resume continues", _pose_double_interrupt),
    Fault("sigusr1-step", "SIGUSR1 in a step, as from a batch system before its time limit", STOP_PROMISE, pose_stop(signal.SIGUSR1, "forward")),
    Fault("strangers", "random bytes and floods of connections at all ports of the run",
          "ports are on loopback only; the run is undisturbed", _pose_strangers),
    Fault("edited-seed", "the job has another seed at --resume",
          "rejected (K010), exit 2; the unchanged job resumes", _pose_edited_seed),
    Fault("edited-batch", "the job has twice the batch at --resume", "the change is printed and used", _pose_edited_batch),
    Fault("other-plan", "--resume under another plan",
          "the same samples; losses equal up to the order of summation", _pose_other_plan),
)  # fmt: skip
