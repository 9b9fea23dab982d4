"""State that a model carries from step to step is restored on resume, per rank. If that is impossible, the run reports it."""

from pathlib import Path

import pytest
import torch
from launched import Command
from saved import read_checkpoint_tensors

from run.test_elastic import kill_once, step_of

JOB, STEPS = str(Path(__file__).parents[1] / "jobs_stateful.py"), 12


def end(folder: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint_tensors(folder / f"runs/latest/checkpoints/step-{STEPS:06d}")


def command(folder: Path, kind: str, plan: str, *more: str) -> Command:
    folder.mkdir(exist_ok=True)
    argv = (
        "train",
        JOB,
        "--job.kind",
        kind,
        "--job.steps",
        str(STEPS),
        "--job.every",
        "3",
        "--plan",
        plan,
        "--check",
        "none",
    )
    return Command(*argv, *more, folder=folder)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


PLANS = (
    ("recurrent", "dp=2"),
    ("queued", "fsdp=2 microbatches=2"),
    ("ofsamples", "dp=2"),
    ("growing", "dp=2"),
    ("running", "pp=2"),
    ("collecting", "dp=2"),
    ("collecting", "fsdp=2"),
    ("lazily", "dp=2"),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind, plan", PLANS)
def test_each_rank_goes_on_with_its_own(kind: str, plan: str, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder, more in ((whole, ()), (stopped, ("--steps", "6")), (stopped, ("--resume",))):
        run = command(folder, kind, plan, *more)
        assert run.wait(120) == 0, run.output
    assert same(end(whole), end(stopped))


@pytest.mark.slow
def test_another_plan_is_refused_where_ranks_had_different_values(tmp_path: Path) -> None:
    first = command(tmp_path, "recurrent", "dp=2", "--steps", "6")
    assert first.wait(120) == 0, first.output
    other = command(tmp_path, "recurrent", "dp=1", "--resume")
    assert other.wait(120) == 2 and "K010" in other.output and "hidden" in other.output, other.output
    allowed = command(tmp_path, "recurrent", "dp=1", "--resume", "--allow-changes")
    assert allowed.wait(120) == 0 and "changed  the carried state hidden" in allowed.output, allowed.output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cached", "scratch", "extra"])
def test_another_plan_goes_on_with_what_all_ranks_had(kind: str, tmp_path: Path) -> None:
    first = command(tmp_path, kind, "dp=2", "--steps", "6")
    assert first.wait(120) == 0, first.output
    other = command(tmp_path, kind, "dp=1", "--resume")
    assert other.wait(120) == 0, other.output


@pytest.mark.slow
def test_a_killed_rank_goes_on_with_what_it_carried(tmp_path: Path) -> None:
    whole = command(tmp_path / "whole", "recurrent", "dp=2")
    assert whole.wait(120) == 0, whole.output
    killed = command(tmp_path / "killed", "recurrent", "dp=2", "--job.pause", "0.1")
    killed.until(lambda: step_of(tmp_path / "killed") >= 4, 120)
    kill_once(killed, tmp_path / "killed", 1, 0.0)
    assert killed.wait(120) == 0, killed.output
    assert "resuming from step" in killed.output
    assert same(end(tmp_path / "whole"), end(tmp_path / "killed")), killed.output
