"""Users' optimizers that need full tensors, or stack them, are exact under plans that shard tensors or distribute lists of them."""

from pathlib import Path
from typing import Any

import jobs
import own_optimizers
import pytest
import torch
from rarely import sampled
from torch import nn

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.model.sketch import Sketch
from plait.parallel.fsdp.optimizer_check import OptimizerKind, inspect_optimizer
from plait.proof.verify import verify

PLANS = ("fsdp=2", "tp=2", "pp=2 microbatches=2", "fsdp=2 tp=2")
CASES = [(name, plan) for name in own_optimizers.OWNED for plan in PLANS]


class Layers(nn.Module):
    """Layers; some of them have the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h)


def job(name: str) -> Any:
    return jobs.make(Layers, optimizer=own_optimizers.OWNED[name])


@pytest.mark.parametrize("name, plan", sampled(len(CASES), CASES))
def test_they_are_exact(name: str, plan: str) -> None:
    verdict = verify(job(name), Plan.parse(plan), steps=4)
    assert verdict.equal and not verdict.inexact, verdict.cause


@pytest.mark.parametrize("plan", ("fsdp=2", "tp=2", "pp=2 microbatches=2"))
def test_one_that_couples_all_parameters_is_refused_by_name(plan: str) -> None:
    def run(place: Any) -> None:
        Engine(jobs.make(Layers, optimizer=own_optimizers.Coupled), plan, place=place)

    with pytest.raises(PlaitError, match="P022") as error:
        fork.run_ranks(run, 2)
    assert "Coupled" in str(error.value) and "dp=2" in str(error.value)


def test_what_an_optimizer_is_is_found_by_trying_it() -> None:
    shapes = [("a", (8, 6), torch.float32), ("b", (8, 6), torch.float32), ("c", (8,), torch.float32)]
    kind = lambda made: inspect_optimizer(jobs.make(Layers, optimizer=made), Sketch(tuple(shapes)))  # noqa: E731
    assert kind(own_optimizers.StackedMuon) == OptimizerKind(singly=True)
    assert kind(own_optimizers.Foreach) == OptimizerKind(singly=True)
    assert kind(own_optimizers.Drawing) == OptimizerKind(declared="Drawing")
    assert kind(own_optimizers.Factored) == kind(torch.optim.AdamW) == OptimizerKind()


@pytest.mark.slow
@pytest.mark.parametrize("name", ("stacked", "stacked_and_adam"))
def test_what_is_kept_of_stacked_tensors_goes_from_plan_to_plan(name: str, tmp_path: Path) -> None:
    found, plans = list[float](), ("fsdp=2", "pp=2 microbatches=2", "dp=1", "dp=2", "tp=2")
    for number, plan in enumerate(plans):

        def run(place: Any, plan: str = plan, number: int = number) -> list[float]:
            engine = Engine(job(name), plan, place=place, directory=tmp_path, cast=torch.float64)
            if number:
                engine.resume()
            losses = [engine.step(batch).loss for batch, _ in zip(engine.batches(), range(2))]
            engine.save()
            return losses

        found += fork.run_ranks(run, Plan.parse(plan).world)[-1]

    def one(place: Any) -> list[float]:
        engine = Engine(job(name), "dp=1", place=place, cast=torch.float64, directory=tmp_path / "one")
        return [engine.step(batch).loss for batch, _ in zip(engine.batches(), range(2 * len(plans)))]

    assert found == pytest.approx(fork.run_ranks(one, 1)[0], rel=1e-9)
