"""batch_split=auto during training: local batches change until ranks finish together, and results equal those of equal local batches."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import Command, rows
from rarely import sampled
from saved import read_checkpoint_tensors

from run.test_train import ledger

JOB = str(Path(__file__).parents[1] / "jobs_paced.py")
SLOW = "rank 1 computes a sample in"


def train(folder: Path, plan: str, *more: str) -> str:
    command = Command("train", JOB, "--plan", plan, "--save-every", "15", *more, folder=folder)
    assert command.wait() == 0, command.output
    return command.output


def held(folder: Path) -> list[list[int]]:
    return [row["samples_by_rank"] for row in rows(folder) if "samples_by_rank" in row]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return read_checkpoint_tensors(folder / f"runs/latest/checkpoints/step-{step:06d}")


def alike(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(t, b[n], rtol=1e-9, atol=1e-12) for n, t in a.items())


def errors(folder: Path) -> list[float]:
    told = map(json.loads, (folder / "runs/latest/metrics.jsonl").read_text().splitlines())
    return [row["evaluation"]["error"] for row in told if "evaluation" in row]


def used(folder: Path) -> dict[int, Any]:
    found = ledger(folder / "runs/latest", 152)
    assert all(sorted(ids) == list(range(152)) for epoch, ids in found.items() if epoch < max(found))
    return found


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with equal local batches, without any sleep."""
    folder = tmp_path_factory.mktemp("equal")
    train(folder, "dp=2", "--job.pause", "0")
    return folder


@pytest.mark.parametrize(
    ("plan", "more"),
    sampled(
        3,
        [
            ("dp=2 batch_split=auto", ()),
            ("dp=2 batch_split=auto", ("--workers", "2")),
            ("fsdp=2 batch_split=auto microbatches=2", ()),
        ],
    ),
    ids=("dp", "workers", "fsdp"),
)
def test_shares_follow_a_slow_rank(equal: Path, tmp_path: Path, plan: str, more: tuple[str, ...]) -> None:
    output, full = train(tmp_path, plan, *more), held(tmp_path)
    assert full[0] == [8, 8]
    late = [row for row in full[22:] if sum(row) == 16]
    assert late and all(10 <= fast <= 13 for fast, _ in late), full  # with fixed costs of a step, fewer than 12
    assert SLOW in output
    assert used(tmp_path) == used(equal)
    assert alike(weights(tmp_path, 30), weights(equal, 30))
    assert len(errors(tmp_path)) == 2 and errors(tmp_path) == pytest.approx(errors(equal), rel=1e-9)


@pytest.mark.slow
def test_a_resumed_run_has_the_shares_and_the_samples_of_one_that_was_not_stopped(equal: Path, tmp_path: Path) -> None:
    train(tmp_path, "dp=2 batch_split=auto", "--job.steps", "20", "--save-every", "20")
    before = held(tmp_path)
    train(tmp_path, "dp=2 batch_split=auto", "--resume", "--job.steps", "30")
    after = held(tmp_path)
    assert after[: len(before)] == before and after[20] == before[18], after  # step 19 has a short batch
    assert used(tmp_path) == used(equal)
    assert alike(weights(tmp_path, 30), weights(equal, 30))


@pytest.mark.prove
def test_other_plans_go_on_with_equal_shares(equal: Path, tmp_path: Path) -> None:
    """The local batches of two ranks do not apply to three. A plan without them does not request them."""
    train(tmp_path, "dp=2 batch_split=auto", "--job.steps", "20", "--save-every", "20")
    train(tmp_path, "dp=3 batch_split=auto", "--resume", "--job.steps", "25", "--job.pause", "0")
    train(tmp_path, "dp=2", "--resume", "--job.steps", "30", "--job.pause", "0")
    assert held(tmp_path)[20] == [6, 5, 5] and held(tmp_path)[25] == [8, 8]
    assert alike(weights(tmp_path, 30), weights(equal, 30))
