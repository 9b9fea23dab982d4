"""Evaluation under each axis: forward passes are no larger than in training, and the mean is that of one device."""

import dataclasses

import jobs
import jobs_context
import jobs_pipeline
import pytest
import torch

import plait
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place

DEEP = (
    "dp=2 microbatches=2",
    "fsdp=2 microbatches=2",
    "pp=2 microbatches=2",
    "tp=2 microbatches=3",
    "dp=2 processes=one",
)


def watched(job: plait.Job, sizes: list[int]) -> plait.Job:
    """The job with metrics that record the number of samples per call."""

    def metrics(out: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        sizes.append(len(out))
        return {"sum": out.double().flatten(1).sum(1), "each": out.square()}

    return dataclasses.replace(job, batch=12, evaluate=plait.Evaluate(job.data, metrics))


def told(job: plait.Job, plan: str) -> list[tuple[dict[str, float], int]]:
    """For each rank: the means after a step, and the largest number of samples per call."""

    def run(place: Place) -> tuple[dict[str, float], int]:
        with torch.random.fork_rng():
            sizes: list[int] = []
            engine = Engine(watched(job, sizes), plan, place=place, cast=torch.float64)
            engine.step(next(engine.batches()))
            sizes.clear()
            return engine.evaluate(), max(sizes, default=0)

    return [tuple(row) for row in fork.run_ranks(run, Plan.parse(plan).world)]


def compare(job: plait.Job, plan: str) -> None:
    ((expected, most),) = told(job, "dp=1")
    assert most == 12
    parsed = Plan.parse(plan)
    for means, most in told(job, plan):
        assert means == pytest.approx(expected, rel=1e-10)
        assert most in (0, -(-12 // (parsed.shares * parsed.microbatches)))


@pytest.mark.parametrize("plan", [DEEP[2], *(pytest.param(p, marks=pytest.mark.prove) for p in DEEP if p != DEEP[2])])
def test_forward_passes_are_those_of_training(plan: str) -> None:
    compare(dataclasses.replace(jobs_pipeline.LISTED["deep"](), data=lambda: jobs.Numbers(31)), plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["cp=2 microbatches=2", pytest.param("cp=2 pp=2", marks=pytest.mark.prove)])
def test_forward_passes_on_stretches(plan: str) -> None:
    compare(jobs_context.OWN["plain"](), plan)
