"""Schedulers of torch as `Job.schedule`: the factor of each step, by samples seen."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jobs
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs
from transformers import get_cosine_schedule_with_warmup

import plait
from plait.checkpoint import fingerprint
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.proof.verify import verify

MADE = {
    "cosine": lambda o: torchs.CosineAnnealingLR(o, 10, eta_min=0.1),
    "chained": lambda o: torchs.SequentialLR(o, [torchs.LinearLR(o, 0.1, 1.0, 3), torchs.StepLR(o, 2)], [3]),
    "one cycle": lambda o: torchs.OneCycleLR(o, 1.0, total_steps=12, cycle_momentum=False),
    "transformers": lambda o: get_cosine_schedule_with_warmup(o, 3, 12),
}


@pytest.mark.parametrize("name", MADE)
def test_the_factors_are_those_of_the_scheduler(name: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=1.0)
    scheduler, expected = MADE[name](optimizer), list[float]()
    for _ in range(12):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    schedule = plait.schedule_of(MADE[name], 8)
    assert schedule(8 * 7) == expected[7], "asked out of order"
    assert [schedule(8 * k) for k in range(12)] == expected
    assert schedule(8 * 4 - 1) == expected[3], "a step that has begun is the one before"


@pytest.mark.parametrize(
    ("make", "told"),
    (
        (torchs.ReduceLROnPlateau, "looks at a metric"),
        (lambda o: torchs.LambdaLR(o, [lambda k: 1.0, lambda k: 0.5]), "one parameter group"),
        (lambda o: torchs.OneCycleLR(o, 1.0, total_steps=9), "also sets momentum"),
        (lambda o: lambda k: 1.0, "returned a function"),
    ),
)
def test_what_is_more_than_a_factor_is_refused(make: Callable[[Any], Any], told: str) -> None:
    with pytest.raises(PlaitError, match="J042") as caught:
        plait.schedule_of(make, 8)
    assert told in str(caught.value)


def test_checkpoints_know_it_again() -> None:
    """Its digest depends on its definition, and not on the number of steps computed so far."""
    one, other = (plait.schedule_of(lambda o: torchs.StepLR(o, 5), 8) for _ in range(2))
    one(800)
    assert fingerprint.digest_function(one) == fingerprint.digest_function(other)
    assert fingerprint.digest_function(one) != fingerprint.digest_function(plait.schedule_of(lambda o: torchs.StepLR(o, 6), 8))


def test_a_job_trains_by_it_everywhere() -> None:
    job = dataclasses.replace(jobs.mlp(), schedule=plait.schedule_of(MADE["transformers"], 12))
    assert verify(job, Plan.parse("dp=2")).equal
