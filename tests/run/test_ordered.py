"""Runs with a custom order and a token budget: stopped, and resumed under another plan or another order."""

from pathlib import Path

import jobs_ordered
import pytest
from launched import Command, rows

JOB = jobs_ordered.__file__


def run(folder: Path, *words: str, code: int = 0) -> str:
    command = Command("train", JOB, "--save-every", "1", *words, folder=folder)
    assert command.wait() == code, command.output
    return command.output


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """14 steps under dp=2."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, "--plan", "dp=2")
    return folder


@pytest.mark.slow
def test_a_run_goes_on_under_another_plan_with_the_same_steps(whole: Path, tmp_path: Path) -> None:
    run(tmp_path, "--plan", "dp=2", "--steps", "5")
    run(tmp_path, "--plan", "dp=3 microbatches=2", "--steps", "14", "--resume")
    sizes = [[row["samples"] for row in rows(folder)] for folder in (whole, tmp_path)]
    assert sizes[0] == sizes[1] and len({b - a for a, b in zip(sizes[0], sizes[0][1:])}) > 2
    losses = [[row["loss"] for row in rows(folder)] for folder in (whole, tmp_path)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
def test_another_order_in_the_middle_of_an_epoch_is_refused(whole: Path, tmp_path: Path) -> None:
    run(tmp_path, "--plan", "dp=1", "--steps", "3")
    said = run(tmp_path, "--plan", "dp=1", "--steps", "4", "--resume", "--job.order", "weighted", code=2)
    assert "K010" in said and "order: own" in said, said
    said = run(tmp_path, "--plan", "dp=1", "--steps", "4", "--resume", "--job.order", "weighted", "--allow-changes")
    assert "changed  order: own" in said, said
    said = run(tmp_path, "--plan", "dp=1", "--steps", "5", "--resume", "--job.order", "weighted", "--job.tokens", "70")
    assert "token budget 60 padded → 70 padded" in said, said
