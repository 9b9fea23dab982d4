"""The moving average of the weights in checkpoints: it continues under another plan, a job may add or drop it, and it is exported."""

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from launched import TEST_JOB, Command, rows
from rarely import every
from safetensors.torch import load_file
from saved import manifest, read_checkpoint_tensors
from torch import Tensor, nn

import plait
from plait.checkpoint.export import ExportOptions, export_weights
from plait.checkpoint.manifest import SavedAverage
from plait.cli.main import main
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place

EMA = plait.EMA(0.8, every=2)


def squares(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"error": (outputs - targets).square().flatten()}


def model() -> nn.Module:
    made = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 1)
    ).double()
    made[0].requires_grad_(False)
    return made


class Doubles(jobs.Numbers):
    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(i)
        return x.double(), y.double()


def averaged(ema: plait.EMA | None = EMA) -> plait.Job:
    return jobs.make(model, Doubles, ema=ema, steps=8, evaluate=plait.Evaluate(Doubles, squares))


def run(folder: Path, plan: str, steps: int, job: plait.Job | None = None, resume: bool = False) -> dict[str, Any]:
    """Continues for some steps and saves. Returns metrics and messages about changes."""

    def rank(place: Place) -> dict[str, Any]:
        engine = Engine(job or averaged(), plan, place=place, device="cpu", directory=folder)
        if resume:
            engine.resume()
        for batch, _ in zip(engine.batches() if steps else (), range(steps)):
            engine.step(batch)
        engine.save(9)
        return {"metrics": engine.evaluate(), "changed": engine.checkpoints.job_changes}

    return fork.run_ranks(rank, Plan.parse(plan).world)[0]


def near(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert float((a[name].double() - b[name].double()).abs().max()) <= 1e-11, name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], dict[str, float]]:
    """A run of eight steps without interruption: its checkpoint and its metrics."""
    folder = tmp_path_factory.mktemp("whole")
    told = run(folder, "dp=1", 8)
    return read_checkpoint_tensors(folder / "step-000008"), told["metrics"]


@pytest.mark.parametrize(
    ("first", "then"),
    every(3, (("dp=2", "fsdp=2"), ("fsdp=3", "pp=2"), ("pp=2", "tp=2"), ("fsdp=2", "dp=2 offload=optimizer"), ("tp=2", "fsdp=2 zero_stage=1"))),
)  # fmt: skip
def test_it_goes_on_under_another_plan(whole: Any, tmp_path: Path, first: str, then: str) -> None:
    run(tmp_path / "a", first, 5)
    before = read_checkpoint_tensors(tmp_path / "a/step-000005")
    assert manifest(tmp_path / "a/step-000005").average == SavedAverage(5, 2)
    (tmp_path / "a").rename(tmp_path / "b")
    told = run(tmp_path / "b", then, 3, resume=True)
    assert told["changed"] == []
    near(read_checkpoint_tensors(tmp_path / "b/step-000008"), whole[0])
    assert told["metrics"]["error"] == pytest.approx(whole[1]["error"], rel=1e-11)
    assert {n for n in before if n.startswith("ema/")} == {f"ema/{n}" for n in TRAINED}


TRAINED = ("2.weight", "2.bias", "4.weight", "4.bias", "5.weight", "5.bias")


def test_what_is_read_is_what_was_saved_bit_for_bit(tmp_path: Path) -> None:
    run(tmp_path / "a", "fsdp=3", 5)
    saved = read_checkpoint_tensors(tmp_path / "a/step-000005")

    def rank(place: Place) -> dict[str, Any]:
        engine = Engine(averaged(), "pp=2", place=place, device="cpu", directory=tmp_path / "a")
        engine.resume()
        average = engine.rank_model.techniques.average
        assert average is not None and average.tensors
        return {n: torch.equal(t, saved[f"ema/{n}"]) for n, t in average.tensors.items()}

    found = fork.run_ranks(rank, 2)
    assert all(value for told in found for value in told.values()) and {n for told in found for n in told} == set(
        TRAINED
    )


@pytest.mark.slow
def test_a_job_that_gains_or_loses_one(tmp_path: Path) -> None:
    run(tmp_path, "dp=2", 2, averaged(None))
    assert manifest(tmp_path / "step-000002").average is None
    gained = run(tmp_path, "fsdp=2", 2, resume=True)["changed"]
    assert gained == ["ema: none → EMA(decay=0.8, every=2, warmup=False): it starts as a copy of the weights"]
    saved = read_checkpoint_tensors(tmp_path / "step-000004")
    assert all(torch.equal(saved[f"ema/{n}"], saved[f"model/{n}"]) for n in TRAINED)
    other = run(tmp_path, "dp=2", 2, averaged(plait.EMA(0.5)), resume=True)["changed"]
    assert other == ["ema: EMA(decay=0.8, every=2, warmup=False) → EMA(decay=0.5, every=1, warmup=False)"]
    assert manifest(tmp_path / "step-000006").average == SavedAverage(4, 3)
    lost = run(tmp_path, "dp=2", 2, averaged(None), resume=True)["changed"]
    assert lost == ["ema: EMA(decay=0.5, every=1, warmup=False) → none: it is dropped"]
    assert not [n for n in read_checkpoint_tensors(tmp_path / "step-000008") if n.startswith("ema/")]


def test_export(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a", "fsdp=2", 5)
    saved, out = read_checkpoint_tensors(tmp_path / "a/step-000005"), tmp_path / "average.safetensors"
    assert main(["checkpoint", "export", str(tmp_path / "a"), "--ema", "--output", str(out)]) == 0
    written = load_file(out)
    assert set(written) == {*TRAINED, "0.weight", "0.bias"}
    assert all(torch.equal(written[n], saved[f"ema/{n}" if n in TRAINED else f"model/{n}"]) for n in written)
    assert main(["checkpoint", "info", str(tmp_path / "a")]) == 0
    assert "average     6 tensors, 904 bytes, updated 2 times in 5 steps" in capfd.readouterr().out


def test_an_export_of_an_average_that_is_not_there_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "a", "dp=1", 1, averaged(None))
    with pytest.raises(PlaitError) as caught:
        export_weights(tmp_path / "a/step-000001", tmp_path / "w.safetensors", ExportOptions(1 << 30, average=True))
    assert list(caught.value.codes) == ["K012"]


@pytest.mark.slow
def test_a_lost_rank_takes_nothing_of_it(tmp_path: Path) -> None:
    """One rank of two is killed: the run continues from a snapshot in memory, and ends like an undisturbed one."""
    ended = []
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        argv = ("--plan", "fsdp=2", "--steps", "24", "--job.pause", "0.01", "--job.ema", "0.9")
        command = Command("train", TEST_JOB, *argv, folder=tmp_path / name)
        if name == "killed":
            command.until(lambda folder=tmp_path / name: len(rows(folder)) >= 9, 120)
            os.kill(command.workers()[1], signal.SIGKILL)
        assert command.wait(120) == 0, command.output
        assert ("resuming from step" in command.output) is (name == "killed"), command.output
        ended.append(read_checkpoint_tensors(tmp_path / name / "runs/latest/checkpoints/step-000024"))
    assert [n for n in ended[0] if n.startswith("ema/")] and ended[0].keys() == ended[1].keys()
    assert all(torch.equal(ended[0][n], ended[1][n]) for n in ended[0])


@pytest.mark.slow
def test_before_it_moves_it_is_the_weights(tmp_path: Path) -> None:
    job = averaged(plait.EMA(0.5, every=9))
    told = run(tmp_path, "fsdp=2", 3, job)
    saved = read_checkpoint_tensors(tmp_path / "step-000003")
    assert all(torch.equal(saved[f"ema/{n}"], saved[f"model/{n}"]) for n in TRAINED)
    assert told["metrics"] == run(tmp_path / "b", "fsdp=2", 3, dataclasses.replace(job, ema=None))["metrics"]
