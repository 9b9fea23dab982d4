"""A DistributedDataParallel script and its port to a job have equal losses, from the first to the last."""

import subprocess
import sys
from pathlib import Path

import pytest

import plait

PORT = Path(__file__).parents[2] / "examples" / "ports" / "ddp"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_job_trains_as_the_script_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(PORT / "before.py"), str(tmp_path)], capture_output=True, text=True, check=True, timeout=200
    )
    before = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step ")]
    monkeypatch.chdir(tmp_path)
    run = plait.train(f"{PORT}/job.py", "dp=2 microbatches=2", quiet=True)
    assert len(before) == run.steps == 96 and before[-1] < 0.75 * before[0]
    assert run.losses == pytest.approx(before, rel=1e-3)
    assert run.losses[:10] == pytest.approx(before[:10], rel=1e-5)


@pytest.mark.slow
def test_the_split_job_is_the_job() -> None:
    assert plait.verify(f"{PORT}/job.py", "dp=2 microbatches=2").equal
