"""The job that `plait verify` trains on both sides, hardened so that rare paths are reached.

A small batch divides unevenly over ranks and micro-batches (ragged weights). The data set is short, so that a batch with fewer samples than
ranks and a second epoch occur. The learning rate is still warming up. Clipping is always active, at a fraction of the gradient norm. Adam's
eps is at least `EPS`, so that rounding in a gradient that is truly zero does not cause a full step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from plait.config.job import Job, replace_optimizer
from plait.config.plan import Plan
from plait.data import sampling
from plait.data.batch import Data, is_map, max_micro_batch_size, open_data
from plait.data.sampling import Sampling, epoch_order, open_job_data, token_lengths
from plait.model.sketch import Sketch
from plait.proof import full_batch, phases, reference
from plait.proof.activation_recorder import ChosenSamples, FirstSamples, digest_sample, take_first

CLIP = 0.1
"""Clipping norm, as a fraction of the first gradient norm."""
EPS, UNCLIPPED_EPS = 1e-6, 1e-4
"""Lower bound of Adam's eps. Without clipping, batch statistics of two samples can make a gradient a hundred times as large."""
BATCH_FILL = 0.7
"""Approximate fill of a batch if a token budget ends steps."""


@dataclass(frozen=True)
class Analysis:
    """Results of the process that analyzes the model while the reference trains, so that ranks skip the analysis. None: ranks analyze it."""

    float64: Sketch | None = None
    """The sketch under the plan in float64."""
    own_formats: Sketch | None = None
    """The sketch under the plan in its own number formats."""
    messages: list[dict[str, Any]] | str = ""
    """Messages of every rank in a dry run of the first step in float64, or the reason for having none."""
    own_messages: list[dict[str, Any]] | str = ""
    """The same for the step in the plan's own number formats."""


@dataclass(frozen=True)
class Scenario:
    """The job, plan and limits of a comparison, and the folder for the results of both sides."""

    job: Job
    """As the user wrote it."""
    hard: Job
    """The hardened job of the first part, from `harden`."""
    plan: Plan
    """As given by the user."""
    logic: Plan
    """The same plan in fp32, which the ranks compute in float64."""
    steps: int
    device: str
    """cpu or cuda."""
    clip: float
    """The reference clips at this fraction of its first gradient norm; the ranks clip at the resulting norm."""
    seconds: float
    """Time limit of the full batches on one device. 0: no full batches, and no step in the plan's own formats."""
    folder: Path
    analysis: Analysis = Analysis()


def count_parts(plan: Plan) -> int:
    """Number of parts of a batch that are computed separately."""
    return plan.replica_groups * plan.shares * plan.microbatches


def harden(job: Job, plan: Plan, short: int, batch: int = 0, least_eps: float = EPS) -> Job:
    """Harden the job (see the module's docstring). The last batch of an epoch has `short` samples. `batch`: batch size, 0 for a small one.
    `least_eps`: lower bound of Adam's eps."""
    parts = count_parts(plan)
    batch = batch or 2 * parts + max(1, parts // 2)
    warm, given = 10 * batch, job.schedule

    def schedule(samples: int) -> float:
        return min(1.0, (samples + batch) / warm) * (given(samples) if given else 1.0)

    def eps(make: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def optimizer(parameters: list[Any]) -> Any:
            made = make(parameters)
            full_batch.raise_eps(made, least_eps)
            return made

        return optimizer

    hard = replace(
        replace_optimizer(phases.harden_phases(job), eps),
        batch=batch,
        schedule=schedule,
        data=lambda: limit_data(open_job_data(job), 2 * batch + short, lambda: read_first_batch(job, 2 * batch + short, batch)),
        ema=None if job.ema is None else replace(job.ema, every=min(job.ema.every, 2)),
        evaluate=full_batch.limit_evaluation(job.evaluate, 2 * max_micro_batch_size(batch, plan.shares, plan.microbatches) * plan.ranks + 1),
        steps=10**9,
    )
    if not (job.order or job.token_budget):
        return hard
    hard, begins = _shorten_epochs(job, hard, short)
    return replace(hard, data=lambda: limit_data(open_data(job.data), None, begins))


def limit_data(data: Data, length: int | None, begins: Callable[[], list[Any]]) -> ChosenSamples | FirstSamples:
    """The first `length` samples of a data set (None: all), with a digest of each. `begins` returns the samples of the first step, which
    determine the lengths in the sketch."""
    samples = take_first(data, length, digest_sample)
    if hasattr(data, "collate"):
        samples.sketched_beside = begins
    return samples


def read_first_batch(job: Job, length: int, batch: int) -> list[Any]:
    """Read the samples of the first step, from the first `length` samples of the job's data."""
    data = open_data(job.data)
    if is_map(data):
        length = min(length, len(data))
    else:
        data, length = take_first(data, batch), batch
    return next(reference.iterate_samples(replace(job, batch=batch), data, length))[2]


def _shorten_epochs(job: Job, hard: Job, short: int) -> tuple[Job, Callable[[], list[Any]]]:
    """Harden a job that has its own order or token budget: each epoch has two steps and `short` samples. Also returns a function that reads
    the samples of its first step.

    The order function is called with the length of the full data, and an epoch is the beginning of its result. So the samples and their
    lengths are those at the start of the real training. The token budget is reduced like the batch, so that it ends some of the steps.
    """
    data = sampling.open_job_data(job)
    length, budget = len(data), job.token_budget
    if budget is not None and 2 * short < hard.batch:  # otherwise each part of a batch needs two samples
        some = token_lengths(budget, length)[epoch_order(job.order, job.seed, 0, length)[: 2 * hard.batch + short]]
        mean = (
            float(np.mean([some[i : i + hard.batch].max() for i in range(len(some))])) if budget.padded else some.mean()
        )
        budget = replace(budget, tokens=min(budget.tokens, max(1, round(BATCH_FILL * hard.batch * mean))))
    steps = Sampling(length, hard.batch, job.seed, job.order, budget)
    count, whole = 0, len(steps.epoch_indices(0))
    for _ in range(2):
        count += steps.step_size(0, count)
    count = min(count + short, whole)

    def order(seed: int, epoch: int, length: int) -> np.ndarray:
        return epoch_order(job.order, seed, epoch, length)[:count]

    hard = replace(hard, order=order, token_budget=budget)
    return hard, lambda: next(reference.iterate_samples(replace(hard, data=job.data), open_data(job.data)))[2]
