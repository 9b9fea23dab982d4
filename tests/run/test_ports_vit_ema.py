"""The port of a vision transformer with mixup and a moving average: it trains, equals one device on ranks, and its original runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launched import Command
from rarely import rarely
from saved import read_checkpoint_tensors

from plait.config.job import load_job
from plait.config.plan import Plan
from plait.proof.verify import verify

PORT = Path(__file__).parents[2] / "examples/ports/vit_ema"


@pytest.mark.slow
def test_before() -> None:
    """The averaged weights of the original classify stripes."""
    argv = [sys.executable, "-W", "ignore", str(PORT / "before.py")]
    told = subprocess.run(argv, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert told.returncode == 0, told.stderr
    assert float(told.stdout.split()[-1]) > 0.9, told.stdout


@pytest.mark.slow
def test_the_job_trains_on_two_ranks(tmp_path: Path) -> None:
    command = Command("train", str(PORT / "job.py"), "--nproc", "2", "--job.steps", "40", folder=tmp_path)
    assert command.wait(300) == 0, command.output
    line = next(line for line in command.output.splitlines() if line.startswith("evaluation at step 40"))
    assert float(line.split()[-1]) > 0.8, line
    saved = read_checkpoint_tensors(tmp_path / "runs/latest/checkpoints/step-000040")
    assert "ema/classifier.weight" in saved


@pytest.mark.slow
@pytest.mark.parametrize("plan", ("dp=2", *rarely("fsdp=2 microbatches=2", "tp=2", "pp=2")))
def test_the_job_is_the_same_training_on_two_ranks(plan: str) -> None:
    verdict = verify(load_job(str(PORT / "job.py")), Plan.parse(plan), seconds=0.0)
    assert verdict.equal and {"A", "E"} <= {probe.code for probe in verdict.probes}, (
        verdict.cause,
        verdict.first_wrong,
    )
