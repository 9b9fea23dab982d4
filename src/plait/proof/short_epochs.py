"""A proof of a job with an order or a token budget of its own: its own epochs, of which each has a few steps only.

The order is asked with the length of the whole data, and the first of what it returns are an epoch here; so the samples, and their
lengths, are those that the job itself begins with. The budget is made as small as the batch is, so that it, and not the batch, ends
some steps.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from plait.config.job import Job
from plait.data import sampling
from plait.data.batch import is_map, opened
from plait.data.sampling import Sampling, epoch_order, token_lengths
from plait.proof import reference

FULL = 0.7
"""A step of a proof has about so much of its batch."""


def hardened(job: Job, hard: Job, short: int) -> tuple[Job, Callable[[], list[Any]]]:
    """`hard` with epochs of two steps and `short` samples, and what reads the samples of its first step. `job`: as it was written."""
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


def first_step(job: Job) -> Job:
    """The job with batches as large as its first step, as far as a token budget decides that, and no budget."""
    if job.token_budget is None or not is_map(data := opened(job.data)):
        return job
    return replace(job, batch=Sampling.of(job, len(data)).size(0, 0), token_budget=None)
