"""`plait.ray`: ranks in the workers of Ray Train, with a test double. The long list uses Ray if it is installed."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import faked_ray
import pytest
from launched import TEST_JOB, Command, rows

from plait import ray as plait_ray
from plait.config.errors import PlaitError, Problem
from plait.integrations.ray import _is_recoverable as mended_by_a_start

HERE = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a program that finds the double."""
    faked_ray.install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def undisturbed(folder: Path, *words: str) -> list[tuple[int, float]]:
    (folder / "alone").mkdir()
    alone = Command("train", TEST_JOB, "--plan", "dp=2", *words, folder=folder / "alone")
    assert alone.wait(60) == 0, alone.output
    return [(row["step"], row["loss"]) for row in rows(folder / "alone")]


@pytest.mark.slow
def test_killed_workers_end_with_the_same_weights(folder: Path) -> None:
    fault = {"fault": "kill", "at": 15, "times": 2}
    done = plait_ray.train(TEST_JOB, plan="dp=2", max_failures=2, storage="here", save_every=5, arguments=fault)
    (run,) = (folder / "here").glob("training-*")
    (record,) = (folder / "here/ray").iterdir()
    assert (record / "attempts").read_text() == "2"  # its count of passes is resumed with it
    assert (done.step, done.run, done.checkpoint) == (30, run, run / "checkpoints/step-000030")
    told = [json.loads((one / "plait.json").read_text()) for one in sorted(record.glob("checkpoint_*"))]
    assert told[-1] == {"step": 30, "checkpoint": str(done.checkpoint), "run": str(run)} and len(told) > 2
    (folder / "runs").symlink_to(folder / "here")
    assert [(row["step"], row["loss"]) for row in rows(folder)] == undisturbed(folder, "--save-every", "5")


@pytest.mark.slow
def test_what_starting_again_does_not_mend_ends_the_run(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlaitError, match=r"C005.*the user's own mistake"):
        plait_ray.train(TEST_JOB, plan="dp=2", max_failures=5, check="none", arguments={"fault": "raise", "at": 1})
    (record,) = (folder / "runs/ray").iterdir()
    assert (record / "attempts").read_text() == "1"
    with pytest.raises(PlaitError, match=r"C005.*the user's own mistake"):  # may be repaired, and is not
        plait_ray.train(TEST_JOB, plan="dp=2", max_failures=1, name="two", arguments={"fault": "raise", "at": 9})
    assert (folder / "runs/ray/two/attempts").read_text() == "2"


def test_a_refusal_comes_before_any_worker(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plait_ray.main([TEST_JOB, "--plan", "tp=2 pp=3", "--nproc", "4"]) == 2
    assert "error[P001]" in capsys.readouterr().err and not (folder / "runs").exists()
    assert plait_ray.main([TEST_JOB, "--plan", "dp=2", "--nnodes", "2"]) == 2
    assert "error[U002] --nnodes is not supported by plait.ray" in capsys.readouterr().err
    assert plait_ray.main([TEST_JOB, "--plam", "dp=2"]) == 2
    assert "did you mean  --plan ?" in capsys.readouterr().err
    assert plait_ray.main([TEST_JOB, "--plan", "dp=2", "--max-failures", "-2"]) == 2
    assert "--max-failures -2" in capsys.readouterr().err


@pytest.mark.slow
def test_the_words_of_the_command(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command that `plait submit` writes into a Ray job. If the same name is submitted again, no work is left."""
    words = [TEST_JOB, "--plan", "dp=*", "--nproc", "2", "--steps", "4", "--name", "seven", "--job.batch", "6"]
    assert plait_ray.main(words) == 0
    assert "done  step 4 · checkpoint" in capfd.readouterr().out
    assert plait_ray.main(words) == 0
    said = capfd.readouterr().out
    assert "complete at step 4" in said and len(list((folder / "runs").glob("training-*"))) == 1, said


def test_ray_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plait_ray.main([TEST_JOB, "--plan", "dp=2"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error[U010] Ray is not installed here") and "pip install 'plait[ray]'" in said


@pytest.mark.parametrize(
    ("code", "why", "mended"),
    (
        ("C003", "at step 1, forward", True), ("C004", "", True), ("C005", "at step 1, forward", False),
        ("C005", "at step 7, forward", True), ("C005", "during start", False), ("P001", "", False), ("N001", "at step 9", False),
    ),
)  # fmt: skip
def test_what_starting_again_mends(code: str, why: str, mended: bool) -> None:
    assert mended_by_a_start(PlaitError(Problem(code, "what", why=why))) is mended


REAL = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'ray[train]'"
)


def workers(folder: Path) -> list[int]:
    """Processes of Ray's workers that train in the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"RayTrainWorker" in (process / "cmdline").read_bytes() and (process / "cwd").readlink() == folder:
                found.append(int(process.name))
        except OSError:
            continue
    return sorted(found)


@REAL
@pytest.mark.prove
@pytest.mark.parametrize("plan", ("dp=2", "fsdp=2"))
def test_a_killed_worker_of_ray_itself(tmp_path: Path, plan: str) -> None:
    own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [TEST_JOB, "--plan", plan, "--save-every", "5", "--max-failures", "2", "--job.pause", "0.1"]
    with open(tmp_path / "said.txt", "w") as said:
        run = subprocess.Popen(
            [sys.executable, "-m", "plait.ray", *words],
            cwd=tmp_path,
            env=own,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            end = time.monotonic() + 300
            while len(rows(tmp_path)) < 14:
                assert time.monotonic() < end and run.poll() is None, (tmp_path / "said.txt").read_text()
                time.sleep(0.05)
            os.kill(workers(tmp_path)[1], signal.SIGKILL)
            code = run.wait(300)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGTERM)
    told = (tmp_path / "said.txt").read_text()
    assert code == 0 and "resumed from" in told and "done  step 30" in told, told
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 31))
    (tmp_path / "alone").mkdir()
    alone = Command("train", TEST_JOB, "--plan", plan, "--save-every", "5", folder=tmp_path / "alone")
    assert alone.wait(100) == 0, alone.output
    assert [row["loss"] for row in rows(tmp_path)] == [row["loss"] for row in rows(tmp_path / "alone")]
