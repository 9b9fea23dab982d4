"""Evaluation and 16-bit training in a pipeline: each sample counts once, whichever rank has the last stage."""

import dataclasses
from typing import Any

import jobs
import jobs_pipeline
import jobs_uncut
import pytest
import torch
from rarely import every, rarely

import plait
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place

PLANS = ("pp=2", "pp=2 schedule=zbv stages_per_rank=2 microbatches=2", "pp=2 fsdp=2", "pp=2 dp=2 microbatches=2")


def told(job: plait.Job, plan: str, cast: torch.dtype | None = torch.float64, steps: int = 2) -> list[list[float]]:
    """For each rank: losses, norms and metrics of a few steps."""

    def run(place: Place) -> list[float]:
        with torch.random.fork_rng():
            engine = Engine(job, plan, place=place, cast=cast)
            source, found = engine.batches(), []
            for _ in range(steps):
                step = engine.step(next(source))
                found += [step.loss, step.norm, *engine.evaluate().values()]
        return found

    return fork.run_ranks(run, Plan.parse(plan).world)


def watched(job: plait.Job, n: int) -> plait.Job:
    evaluate = plait.Evaluate(lambda: jobs.Numbers(n), lambda out, y: {"error": (out - y).abs(), "sum": out + y})
    return dataclasses.replace(job, evaluate=evaluate, batch=4)


@pytest.mark.slow
@pytest.mark.parametrize("plan", every(2, PLANS))
@pytest.mark.parametrize("n", (13, 1))
def test_the_mean_is_that_of_one_device(plan: str, n: int) -> None:
    job = watched(jobs_pipeline.LISTED["deep"](), n)
    (one,) = told(job, "dp=1")
    for rank in told(job, plan):
        assert rank == pytest.approx(one, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("plan", (*rarely("pp=2 microbatches=2"), "pp=2 fsdp=2 schedule=zbv stages_per_rank=2 zero_stage=2"))
def test_outputs_cross_in_sixteen_bits(plan: str) -> None:
    """Under autocast a linear layer returns 16 bits, and the next stage expects them."""
    job = watched(jobs_pipeline.LISTED["deep"](), 5)
    (one,) = told(job, "precision=bf16", None)
    for rank in told(job, f"{plan} precision=bf16", None):
        assert rank == pytest.approx(one, rel=3e-2)


def test_a_head_that_only_training_has() -> None:
    """Evaluation calls other units than the sketch recorded: a named error, not a hang."""
    job: Any = watched(jobs.make(jobs_uncut.OnlyTraining), 5)
    with pytest.raises(PlaitError) as caught:
        told(job, "pp=2")
    assert caught.value.problems[0].code == "P024", caught.value
