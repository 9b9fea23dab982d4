"""Launchers that are killed, asked to stop, or two; who resumes with another job or plan; strangers at the store's port."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace

import psutil

from plait.chaos.disks import laid_out
from plait.chaos.ranks import undisturbed
from plait.chaos.scene import SHARED, UNHURRIED, Fault, Outcome, Scene
from plait.chaos.strike import Strike, marks
from plait.chaos.watched import Watched
from plait.config.errors import RESUMABLE
from plait.config.plan import Plan

ORPHANED = 2.0
"""Seconds that ranks may outlive their launcher."""


def _until_marked(scene: Scene, run: Watched) -> None:
    run.until(lambda: bool(marks(scene.folder)) or run.code is not None, "the moment for the fault")


def _lost(scene: Scene, number: int) -> Outcome:
    """The launcher alone gets a signal that ends it; its ranks follow."""
    run = scene.start()
    run.reaches(scene.a_step())
    forked, since = run.forked(), time.monotonic()
    os.kill(run.pid, number)
    run.wait()
    gone = _gone(forked, ORPHANED)
    scene.measured.detected = time.monotonic() - since
    scene.expect(gone, f"ranks were alive {ORPHANED:.0f} s after their launcher")
    run.end()
    scene.resume(lost=scene.since_checkpoint)
    return scene.measured


def _gone(pids: list[int], patience: float) -> bool:
    end = time.monotonic() + patience
    while any(map(_runs, pids)) and time.monotonic() < end:
        time.sleep(0.005)
    return not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _everything(scene: Scene) -> Outcome:
    """As when the machine loses its power, or a scheduler ends all that a job has: also the process that waits to free its memory. What
    was being saved is torn."""
    run = scene.start()
    run.reaches(scene.a_step())
    for process in psutil.Process().children(recursive=True):
        if process.pid not in scene.helpers:
            with contextlib.suppress(psutil.Error):
                process.kill()
    run.end()
    scene.expect(bool(scene.kept()) or not SHARED.is_dir(), "it had nothing in shared memory")
    scene.resume(lost=scene.since_checkpoint)
    return scene.measured


def stopped(number: int, phase: str, everyone: bool = False) -> Callable[[Scene], Outcome]:
    """A request to stop at a phase: of the launcher, or (as a terminal does) of all its processes."""

    def pose(scene: Scene) -> Outcome:
        step = {"checkpoint": scene.setting.every}.get(phase, scene.a_step())
        run = scene.start(strikes=(UNHURRIED, Strike("mark", phase, step, 0)))
        _until_marked(scene, run)
        since = time.monotonic()
        (os.killpg if everyone else os.kill)(run.pid, number)
        scene.stopped(run, since)
        return scene.measured

    return pose


def _before_steps(scene: Scene) -> Outcome:
    """There is nothing to save yet."""
    run = scene.start(strikes=(UNHURRIED, Strike("mark", "build", -1, 0)))
    _until_marked(scene, run)
    since = time.monotonic()
    os.kill(run.pid, signal.SIGTERM)
    code = run.wait()
    scene.told(run, since, "error[C011]")
    scene.expect(code == RESUMABLE, f"exit code {code}, not {RESUMABLE}")
    again = scene.start()
    if scene.expect(again.wait() == 0, f"the same command ended with exit code {again.code}"):
        scene.measured.lost = 0
        scene.equal()
    return scene.measured


def _twice(scene: Scene) -> Outcome:
    """Whoever has no patience presses Ctrl-C twice: it ends at once, and what was saved is whole."""
    run = scene.start()
    run.reaches(scene.a_step())
    since = time.monotonic()
    for _ in range(2):
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.pid, signal.SIGINT)
        time.sleep(0.005)
    code = run.wait()
    scene.measured.detected = time.monotonic() - since
    scene.expect(code in (130, 75), f"exit code {code}, neither 130 nor 75")
    scene.resume(lost=scene.since_checkpoint)
    return scene.measured


def _second(scene: Scene) -> Outcome:
    """Another launcher resumes the run that is going on."""
    first = scene.start(strikes=(Strike("slow", "forward", rank=0, times=999, text="1.2"),))
    first.reaches(scene.setting.every + 1)
    first.until(
        lambda: any(scene.runs.glob("latest/checkpoints/step-??????")) or first.code is not None, "a checkpoint"
    )
    since = time.monotonic()
    second = scene.start("--resume")
    code = second.wait()
    scene.told(second, since, "error[R001]", within=15.0)
    scene.expect(code == 2, f"the second one ended with exit code {code}, not 2")
    return undisturbed(scene, first.wait(), first.told("restarting") is None)


def _other_seed(scene: Scene) -> Outcome:
    """The user has edited the file."""
    laid_out(scene)
    job, began = scene.setting.job, time.monotonic()
    run = scene.start("--resume", job=replace(job, seed=job.seed + 1))
    code = run.wait()
    scene.told(run, began, "error[K010]", "seed", within=15.0)
    scene.expect(code == 2, f"exit code {code}, not 2")
    scene.resume(lost=0)
    return scene.measured


def _other_batch(scene: Scene) -> Outcome:
    laid_out(scene)
    train, began = scene.setting.train, time.monotonic()
    run = scene.start("--resume", train=replace(train, batch=2 * (train.batch or scene.setting.job.batch)))
    code = run.wait()
    scene.told(run, began, "changed", within=15.0)
    scene.expect(code == 0, f"exit code {code}")
    scene.measured.equal, scene.measured.lost = "as edited", 0
    return scene.measured


def _other_plan(scene: Scene) -> Outcome:
    """The run that `dp=2` began goes on on one device; a run of one device, on two."""
    setting = scene.setting
    laid_out(scene)
    other = Plan.parse("dp=1" if setting.plan.world > 1 else "dp=2")
    run = scene.start("--resume", train=replace(setting.train, plan=str(other)))
    code = run.wait()
    scene.measured.resumed, scene.measured.lost = True, 0
    scene.measured.again = next((t - run.began for t, _ in run.steps), None)
    if scene.expect(code == 0, f"exit code {code}"):
        scene.near()
    return scene.measured


def _listening(pid: int) -> list[tuple[str, int]]:
    """Where a process and its children listen."""
    everyone = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    found = set[tuple[str, int]]()
    for process in everyone:
        with contextlib.suppress(psutil.Error):
            for one in process.net_connections(kind="inet"):
                if one.status == psutil.CONN_LISTEN:
                    found.add((str(one.laddr[0]), int(one.laddr[1])))
    return sorted(found)


def _strangers(scene: Scene) -> Outcome:
    """Connections that say nothing, nonsense, or much, at all ports that the run listens at."""
    scene.several()
    run = scene.start()
    run.reaches(2)
    ports = _listening(run.pid)
    scene.expect(bool(ports), "no port was found")
    scene.expect(all(address.startswith("127.") or address == "::1" for address, _ in ports), f"it listens at {ports}")
    held = list[socket.socket]()
    for address, port in ports:
        for word in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(1 << 20), scene.draw.randbytes(1 << 16)):
            with contextlib.suppress(OSError):
                one = socket.create_connection((address, port), 2.0)
                one.settimeout(0.5)
                held.append(one)
                one.sendall(word)
    done = undisturbed(scene, run.wait(), run.told("restarting") is None)
    for one in held:
        one.close()
    return done


STOPS = "stops after its step and saves, exit 75; --resume loses no step"
FAULTS = (
    Fault("launcher-killed", "kill -9 of the launcher",
          "all ranks end within 2 s; --resume continues", lambda scene: _lost(scene, signal.SIGKILL)),
    Fault("launcher-hangup", "SIGHUP of the launcher: its terminal is closed",
          "all ranks end within 2 s; --resume continues", lambda scene: _lost(scene, signal.SIGHUP)),
    Fault("power", "kill -9 of all processes of a run at once",
          "checkpoints are complete; --resume continues, and deletes the snapshots in memory", _everything),
    Fault("two-launchers", "a second launcher resumes a run that is still training",
          "the second is rejected (R001); the first is undisturbed", _second),
    Fault("sigterm-start", "SIGTERM while ranks build the model",
          "ends at once, exit 75: nothing to save; the same command then trains", _before_steps),
    Fault("sigterm-step", "SIGTERM in a step", STOPS, stopped(signal.SIGTERM, "backward")),
    Fault("sigterm-save", "SIGTERM during a save", STOPS, stopped(signal.SIGTERM, "checkpoint")),
    Fault("sigint-step", "Ctrl-C: SIGINT of launcher and ranks",
          STOPS, stopped(signal.SIGINT, "forward", everyone=True)),
    Fault("sigint-twice", "Ctrl-C twice", "ends at once; saved checkpoints are intact; --resume continues", _twice),
    Fault("sigusr1-step", "SIGUSR1 in a step, as from a batch system before its time limit", STOPS, stopped(signal.SIGUSR1, "forward")),
    Fault("strangers", "random bytes and floods of connections at all ports of the run",
          "ports are on loopback only; the run is undisturbed", _strangers),
    Fault("edited-seed", "the job has another seed at --resume",
          "rejected (K010), exit 2; the unchanged job resumes", _other_seed),
    Fault("edited-batch", "the job has twice the batch at --resume", "the change is printed and used", _other_batch),
    Fault("other-plan", "--resume under another plan",
          "the same samples; losses equal up to the order of summation", _other_plan),
)  # fmt: skip
