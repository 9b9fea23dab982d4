"""Values that a job logs are means over the global batch under each split; otherwise `plait verify` reports a difference."""

import dataclasses

import jobs_logged
import pytest
import torch
from rarely import rarely
from torch import Tensor

import plait
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.proof.verify import verify

PLANS = ("dp=2 microbatches=3", "pp=2 microbatches=2 activation_checkpointing=full")


def proved(job: plait.Job, plan: str) -> tuple[bool, str, str]:
    verdict = verify(job, Plan.parse(plan), device="cpu")
    return verdict.equal, verdict.code, {p.code: p.name for p in verdict.probes}.get("L", "nothing")


@pytest.mark.parametrize("plan", [*PLANS, *rarely("fsdp=2", "tp=2", "fsdp=2 activation_checkpointing=full microbatches=2")])
def test_logged_values_are_those_of_one_device(plan: str) -> None:
    equal, code, _ = proved(jobs_logged.job(), plan)
    assert equal, code


@pytest.mark.parametrize("plan", ["dp=2", *rarely("pp=2 microbatches=2", "tp=2")])
def test_they_have_the_weight_of_the_loss(plan: str) -> None:
    equal, code, _ = proved(jobs_logged.weighted(), plan)
    assert equal, code


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    plait.log("total", (outputs - targets).abs().sum())
    return torch.nn.functional.mse_loss(outputs, targets)


def test_a_sum_is_no_mean_and_verify_says_so() -> None:
    assert proved(dataclasses.replace(jobs_logged.job(), loss=summed), "dp=2") == (False, "V028", "total, step 1")


def test_a_step_has_them_and_outside_a_step_nothing_is_recorded() -> None:
    plait.log("outside", "nothing takes it")  # type: ignore[arg-type]
    with Engine(jobs_logged.job(), "dp=1 microbatches=2", device="cpu") as engine:
        steps = [engine.step(batch) for batch in engine.batches()]
    assert [sorted(step.logged) for step in steps] == [["block", "error", "output"]] * 6
    assert all(step.logged["error"] > 0 for step in steps)


def wrong(outputs: Tensor, targets: Tensor) -> Tensor:
    plait.log("all", outputs)
    return torch.nn.functional.mse_loss(outputs, targets)


def test_what_is_no_number_is_refused() -> None:
    engine = Engine(dataclasses.replace(jobs_logged.job(), loss=wrong), "dp=1", device="cpu")
    with engine, pytest.raises(plait.PlaitError, match=r"U014.*shape"):
        engine.step(next(engine.batches()))
