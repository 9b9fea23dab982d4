"""A machine is preempted: SIGTERM or SIGUSR1, a checkpoint, exit code 75, and the same command again, repeatedly."""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hosts import hosts
from launched import TEST_JOB, Command, free_port, rows
from rarely import rarely

from plait.chaos.hosts import Hosts
from plait.config.errors import PlaitError
from plait.launch import fork, stopping
from plait.launch.place import Place
from plait.launch.progress import ProgressBoard
from plait.launch.stopping import StopRequest, StopRequested
from run.test_mpi import SOURCES
from run.test_resume import ARGV, STEPS, final, same, whole

__all__ = ["hosts", "whole"]


def hears(command: Command) -> bool:
    """Returns whether the process catches SIGUSR1 yet."""
    status = Path(f"/proc/{command.pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (signal.SIGUSR1 - 1) & 1)


def slow_to_build(folder: Path) -> str:
    """A job whose model takes long to build."""
    text = "import time, training, dataclasses\n\ndef model():\n    time.sleep(4)\n    return training.Faulty('', 0, 0.0)\n\n"
    path = folder / "slow.py"
    path.write_text(text + "def job():\n    return dataclasses.replace(training.job(), model=model)\n")
    return str(path)


@pytest.mark.parametrize("number", (signal.SIGUSR1, *rarely(signal.SIGTERM)))
def test_a_signal_while_the_job_is_checked_ends_it_at_once(tmp_path: Path, number: int) -> None:
    command = Command("train", TEST_JOB, "--nproc", "2", "--job.pause", "0.5", folder=tmp_path)
    command.until(lambda: hears(command))
    os.kill(command.pid, number)
    began = time.monotonic()
    assert command.wait() == 75 and time.monotonic() - began < 30, command.output
    assert "error[C011] stopped before the first step" in command.output
    assert f"why    {signal.Signals(number).name} arrived before" in command.output
    assert not list(tmp_path.glob("runs/training-*"))


def test_a_signal_while_ranks_are_built_ends_it_at_once(tmp_path: Path) -> None:
    command = Command("train", slow_to_build(tmp_path), "--nproc", "2", "--check", "none", folder=tmp_path)
    command.until(lambda: len(command.workers()) >= 2 and bool(list(tmp_path.glob("runs/slow-*"))))
    os.kill(command.pid, signal.SIGTERM)
    began = time.monotonic()
    assert command.wait() == 75 and time.monotonic() - began < 30, command.output
    assert "error[C011]" in command.output and not list(tmp_path.glob("runs/slow-*"))


@pytest.mark.prove
def test_a_signal_while_ranks_are_built_ends_all_machines(hosts: Hosts, tmp_path: Path) -> None:
    words = ("train", slow_to_build(tmp_path), "--plan", "dp=4", "--nnodes", "2", "--check", "none")
    master = ("--master", f"{hosts[0].address}:{free_port()}")
    both = [
        Command(*words, *master, "--node-rank", str(k), folder=tmp_path, host=hosts[k].enter) for k in range(2)
    ]  # fmt: skip
    both[1].until(lambda: bool(list(tmp_path.glob("runs/slow-*/logs/rank3.log"))))
    os.kill(both[1].pid, signal.SIGTERM)
    assert [one.wait() for one in both] == [75, 75], both[0].output + both[1].output
    assert all("error[C011]" in one.output for one in both)


def waits(place: Place) -> dict[str, Any]:
    end = time.monotonic() + 20
    while not place.is_stopping() and time.monotonic() < end:
        time.sleep(0.01)
    return {"asked": place.is_stopping()}


def test_a_request_between_two_starts_counts_for_the_next() -> None:
    request = StopRequest()
    with request.handle_signals():
        request.trains = request.waits = True
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.is_set() and StopRequest.get_current() is request
        assert fork.run_ranks(waits, 2) == [{"asked": True}, {"asked": True}]
    assert StopRequest.get_current() is not request


@pytest.mark.parametrize(
    ("steps", "saves"), (((-1, -1), False), ((0, -1), False), ((0, 0), False), ((3, -1), True), ((-1, 3), True))
)
def test_a_stop_between_builds_loses_no_step(steps: tuple[int, ...], saves: bool) -> None:
    """Replica groups do not wait for each other before their first synchronization. One may run steps while another is still building."""
    board, request = ProgressBoard(range(2)), StopRequest()
    request.trains = True
    for rank, step in enumerate(steps):
        board.write(rank, step, "forward" if step >= 0 else "build")
    with pytest.raises(StopRequested) if not saves else nullcontext():
        request.handle_with_ranks(board, signal.SIGTERM)


def test_a_request_while_ranks_are_forked_ends_them() -> None:
    request = StopRequest()
    with pytest.raises(PlaitError, match="SIGTERM arrived before") as caught, request.handle_signals():
        request.trains = True
        os.kill(os.getpid(), signal.SIGTERM)
        fork.run_ranks(waits, 2)
    assert caught.value.codes == ["C011"] and caught.value.exit_code == 75


@pytest.mark.parametrize(
    "words, said",
    (
        (["plait", "train", "my job.py", "--nproc", "2"], "plait train 'my job.py' --nproc 2 --resume"),
        (["x/plait/__main__.py", "train", "job.py", "--resume=runs/a"], "plait train job.py --resume=runs/job-1 --resume"),
        (["plait", "train", "job.py", "--resume", "runs/a"], "plait train job.py --resume runs/job-1 --resume"),
        (["pytest", "tests"], "the same command --resume"),
    ),
)  # fmt: skip
def test_the_command_that_goes_on(monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    monkeypatch.setattr(sys, "argv", words)
    assert stopping.rebuild_command("--resume", resume="runs/a", to="runs/job-1") == said


LOOP = """
while : ; do
    plait train {job} --runs {runs} --resume auto
    code=$?
    [ $code = 75 ] || break
    echo run me again
done
exit $code
"""
"""A user's script, with the loop of a scheduler that restarts a job."""


def loop(folder: Path, job: str) -> subprocess.Popen[bytes]:
    """The loop in a shell, where `plait` is this one."""
    (folder / "bin").mkdir()
    script = folder / "bin/plait"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m plait "$@"\n')
    script.chmod(0o755)
    path = os.pathsep.join((str(script.parent), os.environ["PATH"]))
    environment = os.environ | {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1", "PATH": path}
    with open(folder / "loop.log", "wb") as log:
        return subprocess.Popen(
            ["sh", "-c", LOOP.format(job=job, runs="runs")], cwd=folder, env=environment, stdout=log, stderr=log
        )


def child_of(running: subprocess.Popen[bytes]) -> int | None:
    found = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    return int(found[0]) if found else None


@pytest.mark.slow
@pytest.mark.parametrize("numbers", ((signal.SIGUSR1,), *rarely(((signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM),))))
def test_the_loop_ends_where_an_undisturbed_run_ends(whole: Any, tmp_path: Path, numbers: tuple[int, ...]) -> None:
    job = shlex.join([ARGV[1], *ARGV[2:-1], "0.02"])
    running, moments, done = loop(tmp_path, job), random.Random(7), 0
    log = tmp_path / "loop.log"
    for number in numbers:
        done += moments.randint(2, 8)
        end = time.monotonic() + 60
        while len(rows(tmp_path)) < done:
            assert time.monotonic() < end and running.poll() is None, log.read_text()
            time.sleep(0.01)
        child = child_of(running)
        assert child is not None
        os.kill(child, number)
        while child_of(running) == child:
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.01)
        done = len(rows(tmp_path))
    assert running.wait(60) == 0, log.read_text()
    said = log.read_text()
    assert said.count("run me again\n") == said.count("exit code 75: continue with") == len(numbers), said
    assert said.count("--resume auto\n") == len(numbers) and "plait train" in said
    assert same(final(tmp_path), whole) and [r["step"] for r in rows(tmp_path)] == list(range(1, STEPS + 1))
