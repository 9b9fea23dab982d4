"""`plait verify` at the command line: what it verifies if no plan is given, and what it does not verify."""

import json
from pathlib import Path

import pytest

from plait.cli.main import main

JOB = """
import torch
import plait

class Numbers:
    def __len__(self): return 40
    def __getitem__(self, i): return torch.full((3,), i / 40), torch.tensor([i / 20])

def job():
    return plait.Job(model=lambda: torch.nn.Linear(3, 1), loss=torch.nn.functional.mse_loss, data=Numbers,
                     optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch=8, steps=4)
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return str(path)


def test_without_a_plan_two_copies_are_tried(job: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", job]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("plan        none given: trying dp=2")
    assert any(line.startswith("candidate   2 processes, dp=2") for line in lines)
    assert any(line.startswith("EQUAL") for line in lines)
    assert f'plait verify {job} --plan "fsdp=2"' in lines[-3]


@pytest.mark.slow
def test_one_process_is_not_called_equal(job: str, capfd: pytest.CaptureFixture[str]) -> None:
    for plan in ("dp=1", "activation_checkpointing=full"):
        assert main(["verify", job, "--plan", plan]) == 0
        out = capfd.readouterr().out
        assert "EQUAL" not in out and "NOT SPLIT" in out and f'plait verify {job} --plan "dp=2"' in out, out
    assert main(["verify", job, "--nproc", "1", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["equal"] is None and told["split"] is False


def test_micro_batches_are_a_split(job: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", job, "--plan", "microbatches=2"]) == 0
    assert "EQUAL" in capfd.readouterr().out
