"""What `plait verify` trains on both sides: the job made hard, so that rare paths cannot hide.

A small batch divides unevenly over ranks and micro-batches (ragged weights); the data set is short enough that a batch with fewer
samples than ranks and a second epoch come up; the learning rate is still warming up; and clipping is at a fraction of the gradient norm
(always active). Adam's eps is at least `EPS`, so that a gradient which is truly zero does not blow rounding up to a full step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from plait.config.job import Job, optimized
from plait.config.plan import Plan
from plait.data import sampling
from plait.data.batch import Data, is_map, largest, opened
from plait.data.sampling import Sampling, data_of, epoch_order, token_lengths
from plait.model.sketch import Sketch
from plait.proof import own_batch, phases, reference
from plait.proof.notes import ChosenSamples, FirstSamples, first_of, sample_digest

CLIP = 0.1
"""Clipping at this share of the first gradient norm."""
EPS, UNCLIPPED_EPS = 1e-6, 1e-4
"""Adam's eps is at least this; where gradients are not clipped, batch statistics of two samples can make one a hundred times as large."""
FULL = 0.7
"""A step of a proof has about so much of its batch, where a token budget ends steps."""


@dataclass(frozen=True)
class Analysis:
    """What one process finds about the model while the reference trains, so that ranks need not. None: ranks find it themselves."""

    float64: Sketch | None = None
    """The sketch under the plan in float64."""
    own_formats: Sketch | None = None
    """The sketch under the plan in its own number formats."""
    messages: list[dict[str, Any]] | str = ""
    """The messages of every rank in a dry run of the first step in float64, or why there is none."""
    own_messages: list[dict[str, Any]] | str = ""
    """The same of the step in the plan's own number formats."""


@dataclass(frozen=True)
class Scenario:
    """What is compared: what both sides train, for how long, and where they put what they have."""

    job: Job
    """As the user wrote it."""
    hard: Job
    """What both sides train first, as `harden` returns it."""
    plan: Plan
    """As it was given."""
    logic: Plan
    """The same in fp32, which the ranks compute in float64."""
    steps: int
    device: str
    """cpu or cuda."""
    clip: float
    """The reference clips at this share of its first gradient norm, and the ranks at the norm that this gave."""
    seconds: float
    """What batches of the job's own size may take on one device; 0: none, and no step in the plan's own formats."""
    folder: Path
    analysis: Analysis = Analysis()


def parts_of(plan: Plan) -> int:
    """So many parts of a batch are computed by themselves."""
    return plan.replica_groups * plan.shares * plan.microbatches


def harden(job: Job, plan: Plan, short: int, batch: int = 0, least_eps: float = EPS) -> Job:
    """The job with the rare paths forced: see the module's text. The last batch of an epoch has `short` samples. `batch`, unless
    it is 0: instead of a small one. `least_eps`: of Adam."""
    parts = parts_of(plan)
    batch = batch or 2 * parts + max(1, parts // 2)
    warm, given = 10 * batch, job.schedule

    def schedule(samples: int) -> float:
        return min(1.0, (samples + batch) / warm) * (given(samples) if given else 1.0)

    def eps(make: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def optimizer(parameters: list[Any]) -> Any:
            made = make(parameters)
            own_batch.raise_eps(made, least_eps)
            return made

        return optimizer

    hard = replace(
        optimized(phases.hard(job), eps),
        batch=batch,
        schedule=schedule,
        data=lambda: limited(data_of(job), 2 * batch + short, lambda: first_batch(job, 2 * batch + short, batch)),
        ema=None if job.ema is None else replace(job.ema, every=min(job.ema.every, 2)),
        evaluate=own_batch.held_out(job.evaluate, 2 * largest(batch, plan.shares, plan.microbatches) * plan.ranks + 1),
        steps=10**9,
    )
    if not (job.order or job.token_budget):
        return hard
    hard, begins = _own_epochs(job, hard, short)
    return replace(hard, data=lambda: limited(opened(job.data), None, begins))


def limited(data: Data, length: int | None, begins: Callable[[], list[Any]]) -> ChosenSamples | FirstSamples:
    """The first `length` samples of a data set (None: all), each noted as it is read. `begins` gives those of the first step, whose
    length the sketch is made of."""
    samples = first_of(data, length, sample_digest)
    if hasattr(data, "collate"):
        samples.sketched_beside = begins
    return samples


def first_batch(job: Job, length: int, batch: int) -> list[Any]:
    """The samples of the first step, of the first `length` of the job's data."""
    data = opened(job.data)
    if is_map(data):
        length = min(length, len(data))
    else:
        data, length = first_of(data, batch), batch
    return next(reference.samples(replace(job, batch=batch), data, length))[2]


def _own_epochs(job: Job, hard: Job, short: int) -> tuple[Job, Callable[[], list[Any]]]:
    """`hard` for a job with an order or a token budget of its own: its own epochs, of which each has two steps and `short` samples. And
    what reads the samples of its first step.

    The order is asked with the length of the whole data, and the first of what it returns are an epoch here; so the samples, and their
    lengths, are those that the job itself begins with. The budget is made as small as the batch is, so that it, and not the batch, ends
    some steps.
    """
    data = sampling.data_of(job)
    length, budget = len(data), job.token_budget
    if budget is not None and 2 * short < hard.batch:  # else each part of a batch needs two samples
        some = token_lengths(budget, length)[epoch_order(job.order, job.seed, 0, length)[: 2 * hard.batch + short]]
        mean = (
            float(np.mean([some[i : i + hard.batch].max() for i in range(len(some))])) if budget.padded else some.mean()
        )
        budget = replace(budget, tokens=min(budget.tokens, max(1, round(FULL * hard.batch * mean))))
    steps = Sampling(length, hard.batch, job.seed, job.order, budget)
    count, whole = 0, len(steps.epoch(0))
    for _ in range(2):
        count += steps.size(0, count)
    count = min(count + short, whole)

    def order(seed: int, epoch: int, length: int) -> np.ndarray:
        return epoch_order(job.order, seed, epoch, length)[:count]

    hard = replace(hard, order=order, token_budget=budget)
    return hard, lambda: next(reference.samples(replace(hard, data=job.data), opened(job.data)))[2]
