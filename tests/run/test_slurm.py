"""A real Slurm with two nodes: steps, allocations, signals, and requeued jobs."""

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from engines import engine
from launched import TEST_JOB, Command, rows
from slurm import Cluster, slurm

from run.test_mpi import ENGINES
from run.test_resume import STEPS, final, same, whole

__all__ = ["slurm", "whole"]
pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]
SHORT = ("plait", "train", TEST_JOB, "--steps", "6")


def own(folder: Path, ranks: int) -> list[float]:
    """Losses of ranks of plait's own launcher."""
    command = Command(*SHORT[1:], "--nproc", str(ranks), folder=folder)
    assert command.wait() == 0, command.output
    return losses(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return own(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return own(tmp_path_factory.mktemp("four"), 4)


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder)]


def test_a_step_of_two_machines(slurm: Cluster, alone: list[float], tmp_path: Path) -> None:
    code, output = slurm.run("srun", "-N2", "-n2", *SHORT, folder=tmp_path)
    assert code == 0 and "started by srun: 2 ranks on 2 machines" in output, output
    assert losses(tmp_path) == alone


def test_a_step_smaller_than_its_allocation(slurm: Cluster, alone: list[float], tmp_path: Path) -> None:
    code, output = slurm.run("salloc", "-N2", "-n6", "srun", "-N2", "-n2", *SHORT, folder=tmp_path)
    assert code == 0 and "started by srun: 2 ranks on 2 machines" in output, output
    assert losses(tmp_path) == alone


def test_two_steps_of_one_job_at_once(slurm: Cluster, alone: list[float], tmp_path: Path) -> None:
    both = " & ".join(f"srun --exact -N2 -n2 {' '.join(SHORT)} --runs {k}" for k in "ab") + " & wait"
    code, output = slurm.run("salloc", "-N2", "-n4", "--ntasks-per-node=2", "sh", "-c", both, folder=tmp_path)
    assert code == 0 and output.count("done  6 steps") == 2, output
    for k in "ab":
        text = next((tmp_path / k).glob("training-*/metrics.jsonl")).read_text()
        assert [float(loss) for loss in re.findall(r'"loss": ([^,}]+)', text)] == alone


@pytest.mark.parametrize("how", ("salloc", "sbatch"))
def test_an_allocation_is_no_start(slurm: Cluster, tmp_path: Path, how: str) -> None:
    if how == "salloc":
        code, output = slurm.run("salloc", "-N2", "-n4", *SHORT, folder=tmp_path)
    else:
        wrapped = ("sbatch", "--wait", "-N2", "-n4", "-o", "out", "--wrap", " ".join(SHORT))
        code, output = slurm.run(*wrapped, folder=tmp_path)
        output += (tmp_path / "out").read_text()
    assert code == 0 and "done  6 steps" in output, output
    assert "Slurm gave 4 tasks on 2 machines, and this process is alone: srun plait train" in output, output


def test_one_task_on_each_machine(slurm: Cluster, tmp_path: Path) -> None:
    code, output = slurm.run("srun", "-N2", "-n2", *SHORT, "--nnodes", "2", "--plan", "dp=4", folder=tmp_path)
    assert code == 0 and "started by srun: one process on each of 2 machines" in output, output
    assert "dp=4 on 4 CPU processes" in output and losses(tmp_path)


def test_torchrun_in_a_step(slurm: Cluster, alone: list[float], tmp_path: Path) -> None:
    start = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-id plait".split()
    start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "n1:29511", "-m"]
    code, output = slurm.run("srun", "-N2", "-n2", *start, *SHORT, folder=tmp_path)
    assert code == 0 and "started by torchrun: 2 ranks on 2 machines" in output, output
    assert losses(tmp_path) == alone


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("where", ("login", "n1"))
def test_an_mpirun_in_an_allocation(slurm: Cluster, four: list[float], tmp_path: Path, name: str, where: str) -> None:
    """It starts helpers on the nodes by srun, whose numbers are not those of the ranks."""
    (program, *_), environment = ENGINES[name](engine("mpi"))
    environment["LD_LIBRARY_PATH"] += os.pathsep + slurm.environment["LD_LIBRARY_PATH"]
    environment["PATH"] = slurm.environment["PATH"]
    options = "--allow-run-as-root --map-by node" if name.startswith("mpirun") else "-ppn 2"
    start = [
        "salloc",
        "-N2",
        "-n4",
        "sh",
        "-c",
        f'hostname {where}; exec "$@"',
        "-",
        program,
        *options.split(),
        "-n",
        "4",
    ]
    code, output = slurm.run(*start, *SHORT, folder=tmp_path, **environment)
    assert code == 0 and f"started by {name}: 4 ranks" in output, output
    assert losses(tmp_path) == four


def test_a_rank_that_raises_ends_the_step(slurm: Cluster, tmp_path: Path) -> None:
    code, output = slurm.run("srun", "-N2", "-n2", *SHORT, "--job.fault", "raise", folder=tmp_path)
    assert code == 1 and "error[C005] rank 1 raised ValueError: the user's own mistake" in output, output


SCRIPT = """#!/bin/sh
#SBATCH --nodes=2 --ntasks=2 --requeue --open-mode=append --output=out {options}
srun plait train {job} --save-every 1000 --job.steps {steps} --job.pause {pause} --resume auto
code=$?
echo "restart ${{SLURM_RESTART_COUNT:-0}} ended with $code"
[ $code = 75 ] && scontrol requeue $SLURM_JOB_ID
exit $code
"""


class Batch:
    """A batch job that requeues itself if plait's exit code requests another run."""

    def __init__(self, slurm: Cluster, folder: Path, options: str = "", pause: float = 0.3):
        self.slurm, self.folder = slurm, folder
        (folder / "job.sh").write_text(SCRIPT.format(job=TEST_JOB, steps=STEPS, options=options, pause=pause))
        code, said = slurm.run("sbatch", "--parsable", "job.sh", folder=folder)
        assert code == 0, said
        self.number = said.strip()

    @property
    def output(self) -> str:
        path = self.folder / "out"
        return path.read_text() if path.exists() else ""

    def state(self) -> str:
        return self.slurm.output("squeue", "-h", "-j", self.number, "-o", "%T")

    def until_step(self, step: int) -> None:
        self.slurm.until(lambda: len(rows(self.folder)) >= step, f"step {step} of {self.output}")

    def ended(self, timeout: float = 150) -> None:
        """Waits for the end of the last start."""
        end = time.monotonic() + timeout
        while "ended with 0" not in self.output:
            assert time.monotonic() < end, f"{self.state()}\n{self.output}\n{self.slurm.logs()}"
            time.sleep(0.5)


def undisturbed(batch: Batch, whole: Any) -> None:
    """The run ends with the result of an undisturbed one."""
    assert same(final(batch.folder), whole), batch.output
    assert [row["step"] for row in rows(batch.folder)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("name", ("USR1", "TERM"))
def test_a_signalled_job_is_requeued_and_ends_as_if_undisturbed(
    slurm: Cluster, whole: Any, tmp_path: Path, name: str
) -> None:
    batch = Batch(slurm, tmp_path)
    for step in (4, 9):
        batch.until_step(step)
        slurm.output("scancel", f"--signal={name}", batch.number)
        slurm.until(lambda step=step: batch.output.count("ended with 75") == (1 if step == 4 else 2), "the end")
    batch.ended()
    assert "restart 0 ended with 75" in batch.output and "restart 2 ended with 0" in batch.output, batch.output
    assert "continue with\n    srun … plait train" in batch.output
    undisturbed(batch, whole)


def test_a_job_that_another_preempts(slurm: Cluster, whole: Any, tmp_path: Path) -> None:
    """Slurm sends SIGTERM, and waits for the partition's GraceTime."""
    batch = Batch(slurm, tmp_path, "--partition=low", pause=0.5)
    batch.until_step(4)
    code, output = slurm.run("srun", "-p", "high", "-N2", "--exclusive", "true", folder=tmp_path)
    assert code == 0 and "restart 0 ended with 75" in batch.output, output + batch.output
    batch.ended()
    undisturbed(batch, whole)


def test_the_warning_before_the_time_limit(slurm: Cluster, whole: Any, tmp_path: Path) -> None:
    """Slurm may send it up to a minute before the time of `--signal=USR1@60`."""
    batch = Batch(slurm, tmp_path, "--time=3 --signal=USR1@60", pause=3.5)
    batch.ended(400)
    assert "restart 0 ended with 75" in batch.output, batch.output
    undisturbed(batch, whole)
