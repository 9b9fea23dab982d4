"""Parameter names are those of the full model wherever a job's optimizer is created, and groups by name train equally everywhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from rarely import rarely, sampled
from torch import Tensor, nn

import plait
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.model.fake_model import sketch_fake_model
from plait.model.parameter_groups import build_optimizer
from plait.planner.dryrun.optimizer_step import measure_state_bytes
from plait.proof.verify import verify


class Deep(nn.Module):
    """A body of layers of equal shapes between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        made = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
        self.layers = nn.ModuleList(made)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def by_name(parameters: Any) -> torch.optim.Optimizer:
    choices = {"*.bias": {"weight_decay": 0.0}, "layers.*.0.*": {"weight_decay": 0.0}, "head.*": {"lr": 5e-2}}
    return torch.optim.AdamW(plait.parameter_groups(parameters, choices, lr=2e-2), lr=1e-2, weight_decay=0.5)


def layerwise(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(plait.layerwise_rates(parameters, 1e-2, 0.5, "layers.*", weight_decay=0.1))


def muon(parameters: Any) -> torch.optim.Optimizer:
    named = plait.named(parameters)
    layers = {n for n, p in named if n.startswith("layers.") and p.ndim == 2}
    return plait.CombinedOptimizer(
        torch.optim.Muon([p for n, p in named if n in layers], lr=2e-2),
        torch.optim.AdamW([p for n, p in named if n not in layers], lr=1e-2),
    )


def tuples(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(plait.named(parameters), lr=1e-2)


def sizes(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(plait.parameter_groups(parameters, {lambda n, p: p.ndim < 2: {"lr": 1e-3}}), lr=1e-2)


CASES = [
    (by_name, "dp=2"), (by_name, "pp=2 microbatches=2"), (layerwise, "fsdp=2"), (muon, "fsdp=2"), (tuples, "tp=2"),
    *rarely((muon, "dp=2"), (muon, "tp=2"), (by_name, "fsdp=2 offload=optimizer"), (by_name, "tp=2 fsdp=2"), (layerwise, "pp=2"),
            (tuples, "pp=2"), (tuples, "fsdp=2"), (sizes, "fsdp=2"), (sizes, "tp=2")),
]  # fmt: skip


@pytest.mark.parametrize("make, plan", sampled(2, CASES))
def test_equal(make: Callable[[Any], torch.optim.Optimizer], plan: str) -> None:
    verdict = verify(jobs.make(Deep, optimizer=make), Plan.parse(plan))
    assert verdict.equal, (verdict.cause, verdict.first_wrong)


NAMES = [name for name, _ in Deep().named_parameters()]


@pytest.mark.parametrize("plan", ("dp=1", "fsdp=2", "pp=2", "tp=2", "dp=2 offload=optimizer"))
def test_names_are_those_of_the_whole_model(plan: str) -> None:
    def rank(place: Place) -> dict[str, Any]:
        told: list[list[str]] = []

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            told.append([name for name, _ in plait.named(parameters)])
            return torch.optim.AdamW(parameters, lr=1e-2)

        Engine(jobs.make(Deep, optimizer=optimizer), plan, place=place, device="cpu")
        return {"told": told}

    for found in fork.run_ranks(rank, Plan.parse(plan).world):
        assert found["told"] and all(names == NAMES for names in found["told"])


def made(optimizer: Callable[[Any], Any]) -> Any:
    return build_optimizer(jobs.make(Deep, optimizer=optimizer), dict(Deep().named_parameters()))


def test_the_first_choice_that_means_a_parameter_counts() -> None:
    groups = made(by_name).param_groups
    assert [(len(g["params"]), g["lr"], g["weight_decay"]) for g in groups] == [
        (8, 1e-2, 0.0), (2, 1e-2, 0.0), (1, 5e-2, 0.5), (5, 2e-2, 0.5)]  # fmt: skip


def test_rates_fall_from_the_head_to_the_embedding() -> None:
    rates = [(len(g["params"]), g["lr"]) for g in made(layerwise).param_groups]
    assert rates == [(2, 1e-2 / 8), (6, 1e-2 / 4), (6, 1e-2 / 2), (2, 1e-2)]


def test_a_choice_that_means_nothing_is_refused() -> None:
    for optimizer in (
        lambda p: torch.optim.SGD(plait.parameter_groups(p, {"norm.*": {"lr": 0.0}}), lr=1e-2),
        lambda p: torch.optim.SGD(plait.layerwise_rates(p, 1e-2, 0.5, "blocks.*")),
    ):
        with pytest.raises(PlaitError) as caught:
            Engine(jobs.make(Deep, optimizer=optimizer), "dp=1", device="cpu")
        assert list(caught.value.codes) == ["J041"] and "embed.weight" in str(caught.value)


def test_names_are_known_inside_alone() -> None:
    for parameters in ([nn.Parameter(torch.ones(1))], list(Deep().parameters())):
        with pytest.raises(PlaitError, match="J040"):
            plait.named(parameters)
    with pytest.raises(PlaitError, match="J040"):
        made(lambda parameters: plait.named([nn.Parameter(torch.ones(1))]))


def test_the_bill_of_what_depends_on_names() -> None:
    """Layers of one shape have one state tensor each under Muon. Other matrices of that shape have two under AdamW."""

    def square() -> nn.Module:
        model = Deep()
        model.extra = nn.Linear(8, 8)
        return model

    job = jobs.make(square, optimizer=muon)
    layers, others = 4 * 64, sum(p.numel() for p in square().parameters()) - 4 * 64
    state = measure_state_bytes(job, sketch_fake_model(job)[1])
    count = len(list(square().parameters())) - 4
    assert state == 4 * (layers + 2 * others) + 4 * count


@pytest.mark.parametrize("make", (muon, tuples))
def test_checkpoints_go_from_plan_to_plan(make: Any, tmp_path: Path) -> None:
    job, found = jobs.make(Deep, optimizer=make), list[float]()
    plans = ("fsdp=2", "pp=2", "dp=1")
    for number, plan in enumerate(plans):

        def run(place: Place, plan: str = plan, number: int = number) -> list[float]:
            engine = Engine(job, plan, place=place, directory=tmp_path, cast=torch.float64, device="cpu")
            if number:
                engine.resume()
                assert not engine.checkpoints.job_changes
            losses = [engine.step(batch).loss for batch, _ in zip(engine.batches(), range(2))]
            engine.save()
            return losses

        found += fork.run_ranks(run, Plan.parse(plan).world)[0]

    def one(place: Place) -> list[float]:
        engine = Engine(job, "dp=1", place=place, cast=torch.float64, directory=tmp_path / "one", device="cpu")
        return [engine.step(batch).loss for batch, _ in zip(engine.batches(), range(2 * len(plans)))]

    assert found == pytest.approx(fork.run_ranks(one, 1)[0], rel=1e-9)
