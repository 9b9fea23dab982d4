"""A run that is killed and resumed under other layouts ends with the result of an uninterrupted one. Each sample is used once."""

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs_pipeline
import jobs_real
import pytest
import torch
from launched import TEST_JOB, Command, rows
from rarely import rarely, sampled
from saved import read_checkpoint_tensors

import plait
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.parallel.fsdp import groups
from run.test_train import ledger

STEPS = 24
ARGV = ("train", TEST_JOB, "--save-every", "3", "--job.steps", str(STEPS), "--job.pause", "0.005")
LAYOUTS = ("dp=4", "fsdp=2", "dp=1", "dp=2 fsdp=2", "fsdp=3 zero_stage=1 activation_checkpointing=full",
    "fsdp=2 microbatches=2 zero_stage=2 offload=optimizer",
           "dp=2 microbatches=2", "fsdp=4 activation_checkpointing=selective offload=all", "pp=2 microbatches=2",
           "pp=2 dp=2 microbatches=2 schedule=zb", "pp=2 fsdp=2 activation_checkpointing=full", "tp=2", "fsdp=2 tp=2 microbatches=2",
           "tp=4 offload=optimizer")  # fmt: skip
TOLERANCE = 1e-9


@pytest.fixture(autouse=True)
def units_are_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unit is a group, even in a small model."""
    monkeypatch.setattr(groups, "GROUP_BYTES", 0)
    monkeypatch.setattr(groups, "TINY_BYTES", 0)


def final(folder: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint_tensors(folder / f"runs/latest/checkpoints/step-{STEPS:06d}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("whole")
    command = Command(*ARGV, "--plan", "dp=1", folder=folder)
    assert command.wait() == 0, command.output
    return final(folder)


def begun(folder: Path, layout: str, first: bool) -> Command:
    return Command(*ARGV, "--plan", layout, *([] if first else ["--resume"]), folder=folder)


def same(found: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert float((found[name].double() - tensor.double()).abs().max()) <= TOLERANCE, name


def trained(folder: Path, layouts: tuple[str, ...], moments: random.Random) -> None:
    """One attempt under each layout. All but the last are killed after a few steps of their own."""
    for i, layout in enumerate(layouts):
        command = begun(folder, layout, first=i == 0)
        if i < len(layouts) - 1:
            target = min(len(rows(folder)) + moments.randint(2, 8), STEPS)
            command.until(lambda target=target: len(rows(folder)) >= target)
            time.sleep(moments.random() * 0.03)
            command.kill()
            command.wait()
        else:
            assert command.wait() == 0, command.output


def check(folder: Path, whole: dict[str, torch.Tensor]) -> None:
    same(final(folder), whole)
    assert [r["step"] for r in rows(folder)] == list(range(1, STEPS + 1))
    used = ledger(folder / "runs/latest")
    assert all(sorted(ids) == list(range(41)) for epoch, ids in used.items() if epoch < max(used))


@pytest.mark.slow
def test_resumed_under_another_layout_each_time(whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    trained(tmp_path, ("dp=4", "fsdp=2", "dp=1", "dp=2 fsdp=2"), random.Random(1))
    check(tmp_path, whole)


@pytest.mark.slow
def test_resumed_with_stages_and_without(whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    trained(tmp_path, ("dp=2", "pp=2 microbatches=2", "pp=2 fsdp=2 microbatches=2", "dp=1"), random.Random(2))
    check(tmp_path, whole)


def test_resumed_with_slices_and_without(whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    trained(tmp_path, ("tp=2", "fsdp=2", "dp=2 tp=2", "pp=2 microbatches=2", "tp=4", "dp=1"), random.Random(3))
    check(tmp_path, whole)


def losses(job: plait.Job, plan: str, folder: Path) -> list[float]:
    """Losses of three further steps, from the checkpoint in the folder if there is one. Saves a checkpoint."""

    def run(place: Place) -> dict[str, list[float]]:
        engine = Engine(replace(job, steps=100), plan, place=place, directory=folder, cast=torch.float64)
        engine.resume(missing_ok=True)
        source = engine.batches()
        found = [engine.step(next(source)).loss for _ in range(3)]
        engine.save()
        return {"losses": found}

    told = fork.run_ranks(run, Plan.parse(plan).world)
    assert all(other == told[0] for other in told)
    return told[0]["losses"]


FUSED = ("tp=2", "fsdp=2", "pp=2 tp=2 microbatches=2", "dp=1", "fsdp=2 tp=2", "pp=2 microbatches=2", "tp=2", "dp=2")
SHARED = ("tp=4", "dp=1", "tp=2", "fsdp=2", "tp=4 fsdp=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "job, plans",
    (
        pytest.param(jobs_real.llama, SHARED[:2], marks=pytest.mark.prove), (jobs_pipeline.gpt2, FUSED[:2]),
        pytest.param(jobs_pipeline.gpt2, FUSED, marks=pytest.mark.prove),
        pytest.param(jobs_real.llama, SHARED, marks=pytest.mark.prove),
    ),
    ids=("shared", "fused", "fused-more", "shared-more"),
)  # fmt: skip
def test_slices_of_several_ranges_are_resumed(job: Any, plans: tuple[str, ...], tmp_path: Path) -> None:
    """Query, key and value in one matrix: a rank's slice has three ranges of it. Two ranks may share a head."""
    alone = [loss for _ in plans for loss in losses(job(), "dp=1", tmp_path / "whole")]
    found = [loss for plan in plans for loss in losses(job(), plan, tmp_path / "parts")]
    assert found == pytest.approx(alone, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.prove) for s in range(2, 40))])
def test_drawn_layouts_and_moments(whole: dict[str, torch.Tensor], tmp_path: Path, seed: int) -> None:
    moments = random.Random(f"layouts {seed}")
    trained(tmp_path, tuple(moments.choices(LAYOUTS, k=moments.randint(2, 4))), moments)
    check(tmp_path, whole)


@pytest.mark.parametrize(
    "fault, code, layout",
    sampled(3, (
        ("kill", "C003", "dp=2 fsdp=2"), ("raise", "C005", "fsdp=3"), pytest.param("stop", "C001", "fsdp=3", marks=pytest.mark.prove),
        ("kill", "C003", "pp=2 microbatches=2"), *rarely(("raise", "C005", "dp=2 tp=2"), ("raise", "C005", "pp=2 dp=2")),
        pytest.param("stop", "C001", "pp=2 microbatches=2", marks=pytest.mark.prove),
    )),
)  # fmt: skip
def test_a_failing_rank_is_named(fault: str, code: str, layout: str, tmp_path: Path) -> None:
    plan = ("--plan", layout)
    command = Command(
        "train", TEST_JOB, *plan, "--max-restarts", "0", "--job.fault", fault, "--job.at", "9", "--job.pause", "0.05",
        folder=tmp_path,
    )  # fmt: skip
    command.until(lambda: len(rows(tmp_path)) >= 3)
    began = time.monotonic()
    assert command.wait(20) == 1
    assert time.monotonic() - began < 10.0
    assert f"error[{code}] rank 1" in command.output, command.output
    assert command.output.count("error[") == 1 and "Traceback" not in command.output
