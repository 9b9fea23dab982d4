"""A dry run and its memory table include the memory of an evaluation: logits that training never has, and the metrics' tensors."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.planner.dryrun.dry_run import dry_run
from plait.planner.dryrun.measure import measure_evaluation, measure_step
from plait.planner.dryrun.memory_table import make_memory_table

VOCABULARY, LENGTH = 3000, 8


class Words:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.arange(i, i + LENGTH), torch.arange(i + 1, i + 1 + LENGTH)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.lm_head = nn.Linear(4, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.body(self.embed(x)))


def metrics(out: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"nll": F.cross_entropy(out.transpose(1, 2), y, reduction="none")}


def job() -> plait.Job:
    loss = plait.LinearCrossEntropy(chunk=4)
    return plait.Job(
        model=Model,
        loss=loss,
        weight=loss.weight,
        data=Words,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        batch=16,
        steps=4,
        evaluate=plait.Evaluate(Words, metrics),
    )


def measured(plan: str) -> tuple[int, int]:
    """The peak bytes on rank 0: (of a step, of an evaluation)."""

    def run(place: Place) -> tuple[int, int]:
        engine = Engine(job(), plan, place=place)
        return measure_step(engine).total, measure_evaluation(engine).total

    return tuple(fork.run_ranks(run, Plan.parse(plan).world)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", ["dp=2", *(pytest.param(p, marks=pytest.mark.prove) for p in ("dp=1", "fsdp=2", "dp=2 microbatches=2"))]
)
def test_the_table_has_the_evaluation(plan: str) -> None:
    step, evaluation = measured(plan)
    assert evaluation > step
    found = make_memory_table(job(), Plan.parse(plan))
    assert found.moment == "evaluation"
    assert evaluation <= found.total <= 1.3 * evaluation
    assert make_memory_table(dataclasses.replace(job(), evaluate=None), Plan.parse(plan)).total < evaluation


@pytest.mark.slow
def test_the_dry_run_has_the_evaluation() -> None:
    plan = Plan.parse("pp=2 microbatches=2")
    found, without = dry_run(job(), plan), dry_run(dataclasses.replace(job(), evaluate=None), plan)
    last = found.kinds[-1]
    logits = 4 * 8 * LENGTH * VOCABULARY
    assert last.peak.moment == "evaluation" or last.peak.total >= logits
    assert last.peak.total > without.kinds[-1].peak.total
    assert last.traffic == without.kinds[-1].traffic
