"""The script of `plait submit slurm`, run by a real Slurm of two nodes from Debian's packages."""

import json
from pathlib import Path

import pytest
from launched import TEST_JOB

from plait.cli.main import main

cluster = pytest.importorskip("slurm", reason="tests/slurm.py starts a cluster")
slurm = cluster.slurm
pytestmark = [pytest.mark.prove, pytest.mark.timeout(900)]


def written(folder: Path, *more: str) -> str:
    out = folder / "job.sbatch"
    own = (
        "--plan",
        "dp=4",
        "--nnodes",
        "2",
        "--device",
        "cpu",
        "--runs",
        str(folder / "a run's $(folder)"),
        "--chdir",
        str(folder),
    )
    assert main(["submit", "slurm", TEST_JOB, *own, "--name", "net", "--output", str(out), *more]) == 0
    return str(out)


def test_it_trains_on_two_machines(slurm, tmp_path: Path) -> None:
    out = written(tmp_path, "--job.steps", "6", "--time", "5m")
    code, said = slurm.run("sbatch", "--wait", out, folder=tmp_path, timeout=300)
    (log,) = tmp_path.glob("net-*.out")
    assert code == 0 and "started by srun: one process on each of 2 machines" in log.read_text(), said + log.read_text()
    assert "dp=4 on 4 CPU processes" in log.read_text() and "done  6 steps" in log.read_text()


def test_words_of_options_arrive(slurm, tmp_path: Path) -> None:
    worst = 'a b\'s "c" #d \\ $(id) 100%'
    code, number = slurm.run(
        "sbatch", "--parsable", "--hold", written(tmp_path, "--option", f"comment={worst}"), folder=tmp_path
    )
    assert code == 0, number
    shown = slurm.output("scontrol", "show", "job", number.strip())
    slurm.output("scancel", number.strip())
    assert f"Comment={worst}" in shown and "NumNodes=2" in shown and "Requeue=1" in shown


def test_before_its_time_is_over_it_is_saved_and_queued_again(slurm, tmp_path: Path) -> None:
    """Of four minutes the warning leaves two for the run. Slurm waits two more before it restarts a job."""
    out = written(tmp_path, "--job.steps", "60", "--job.pause", "3", "--time", "4m")
    code, number = slurm.run("sbatch", "--parsable", out, folder=tmp_path)
    log = tmp_path / f"net-{number.strip()}.out"
    assert code == 0, number
    slurm.until(lambda: log.exists() and "done  " in log.read_text(), "the end of the second start", 600)
    assert "stopped at step" in log.read_text() and "resumed from" in log.read_text(), log.read_text()
    (metrics,) = tmp_path.glob("a run*/net-*/training-*/metrics.jsonl")
    steps = [json.loads(row)["step"] for row in metrics.read_text().splitlines() if '"loss"' in row]
    assert steps == list(range(1, 61))
