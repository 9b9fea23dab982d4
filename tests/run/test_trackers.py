"""Trackers receive the values of `metrics.jsonl`, each exactly once, and cannot disturb a run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launched import TEST_JOB, Command, alive, rows
from tracked import Told, read_back

from plait.config.errors import PlaitError
from plait.integrations.trackers import packages, tracker_processes
from plait.launch.child import Companion

(
    pytest.importorskip("tensorboard"),
    pytest.importorskip("mlflow"),
    pytest.importorskip("wandb"),
    pytest.importorskip("trackio"),
)
ALL = "tensorboard,wandb,mlflow,trackio"


def written(run: Path) -> Told:
    """The values of the metrics in the trackers' format."""
    found: Told = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        step = row.pop("step")
        for name, value in packages.flatten_metrics(row):
            found.setdefault(name, []).append([step, value])
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_number_arrives_once_and_again_after_a_resume(tmp_path: Path) -> None:
    """The run ends after 15 steps, its newest checkpoint is lost, and it continues from step 10: five steps run twice."""
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
    words = ("train", TEST_JOB, "--nproc", "2", "--save-every", "10", "--tracker", ALL, "--tracker=wandb", "--job.loud", "false")
    first = Command(*words, "--steps", "15", folder=tmp_path, environment=environment)
    assert first.wait(100) == 0, first.output
    run = (tmp_path / "runs" / "latest").resolve()
    before = written(run)
    assert len(before["loss"]) == 15 and before["evaluation/error"] and before["spans/forward"]
    shutil.rmtree(run / "checkpoints" / "step-000015")
    second = Command(*words, "--resume", folder=tmp_path, environment=environment)
    assert second.wait(100) == 0, second.output
    assert "at step 10" in second.output and "note  tensorboard" not in second.output
    after, told = written(run), read_back(run, environment)
    assert by_name(told["tensorboard"]) == by_name(after)
    kept = {name: [p for p in points if p[0] > 15] for name, points in after.items()}
    both = {n: before.get(n, []) + kept.get(n, []) for n in before.keys() | after.keys()}
    for name in ("wandb", "mlflow", "trackio"):
        assert by_name(told[name]) == by_name(both), name
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(run) in (p.info["cmdline"] or [])]  # they have ended


def by_name(told: Told) -> Told:
    return {name: sorted(points) for name, points in sorted(told.items()) if points}


@pytest.mark.slow
def test_trackers_that_fail_are_told_of_once_and_training_goes_on(tmp_path: Path) -> None:
    """MLflow's folder cannot be created. The process of TensorBoard is killed in the middle of the run."""
    environment = {"MLFLOW_TRACKING_URI": "file:///proc/no-such-place"}
    words = ("--tracker", "mlflow,tensorboard", "--job.pause", "0.1")
    command = Command("train", TEST_JOB, *words, folder=tmp_path, environment=environment)
    command.until(lambda: (tmp_path / "runs" / "latest" / "trackers" / "tensorboard.json").exists())
    (process,) = (p for p in psutil.process_iter(["cmdline"]) if "tensorboard" in (p.info["cmdline"] or []))
    os.kill(process.pid, signal.SIGKILL)
    assert command.wait(100) == 0, command.output
    assert len(rows(tmp_path)) == 30
    assert command.output.count("note  mlflow rejects the metrics; training continues") == 1, command.output
    assert "note  mlflow has the metrics up to step 0 only: " in command.output
    assert command.output.count("note  tensorboard gets no more metrics: its process ended with status -9") == 1


def test_a_companion_ends_when_its_rank_dies(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    rank = os.fork()
    if rank == 0:
        companion = Companion("companions", ["until", "it", "ends"], tmp_path / "log", {})
        os.write(writing, str(companion.process.pid).encode())
        signal.pause()
    number = int(os.read(reading, 64))
    time.sleep(0.3)
    assert alive(number)
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    end = time.monotonic() + 20
    while alive(number) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(number)
    found = (tmp_path / "log").read_text().splitlines()
    assert found in (
        ["until it ends", "b''"],
        ["until it ends", "b''", "the end"],
    )  # not reported if its rank is already gone


def test_a_companion_says_lines_and_ends_with_a_word(tmp_path: Path) -> None:
    companion, said = Companion("companions", ["a"], tmp_path / "log", {}), list[str]()
    companion.finish("done")
    assert companion.process.wait(20) == 0
    said += companion.read_lines()
    companion.close()
    assert said == ["said a", "the end"] and (tmp_path / "log").read_text().splitlines() == ["a", "b'done'"]


def test_what_to_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    (processes,) = tracker_processes.make_trackers(["wandb,mlflow", "wandb"])
    assert processes.names == ("wandb", "mlflow") and tracker_processes.make_trackers([]) == ()
    (problem,) = packages.find_unknown_trackers(["wandb,aim"])
    assert problem.code == "U002" and "aim" in problem.what and "tensorboard, wandb, mlflow, trackio" in problem.why
    monkeypatch.setattr(packages.WeightsAndBiases, "module", "no_such_module")
    with pytest.raises(PlaitError) as caught:
        tracker_processes.make_trackers(["wandb"])
    assert caught.value.codes == ["H004"] and caught.value.problems[0].fix == ("pip install wandb",)


@pytest.mark.prove
@pytest.mark.timeout(400)
def test_nobody_is_called_without_an_account(tmp_path: Path) -> None:
    """Under strace, the trackers' processes connect to nothing but sockets of this machine."""
    trace = tmp_path / "trace"
    words = ["strace", "-f", "-qq", "-e", "trace=connect,sendto", "-o", str(trace), sys.executable, "-m", "plait"]
    words += ["train", TEST_JOB, "--steps", "5", "--tracker", ALL]

    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
    subprocess.run(words, cwd=tmp_path, env=environment, check=True, timeout=300, capture_output=True)
    outward = [
        line
        for line in trace.read_text().splitlines()
        if "AF_INET" in line and "127.0.0.1" not in line and '"::1"' not in line
    ]
    assert not outward, outward[:5]
