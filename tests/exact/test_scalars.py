"""Parameters without dims, of one element, without elements, of ints and bools: EQUAL under each axis and pair of axes."""

import dataclasses
import math

import jobs_scalars
import pytest
import torch
from rarely import rarely

from plait.config.plan import Plan
from plait.proof.probes import compare_tensors, find_constant_ratio, measure_movement
from plait.proof.verify import verify

PLANS = (
    "dp=2", "fsdp=2", "tp=2", "cp=2", "pp=2 microbatches=2", "dp=2 fsdp=2", "fsdp=2 tp=2", "dp=2 cp=2", "tp=2 cp=2",
    "pp=2 fsdp=2 microbatches=2", "pp=2 tp=2 microbatches=2", "pp=2 cp=2 microbatches=2", "fsdp=2 zero_stage=1 microbatches=2",
    "fsdp=2 cp=2 offload=all activation_checkpointing=full microbatches=2", "replica_groups=2 fsdp=2 sync_every=2",
    "dp=2 grad_compression=powersgd", "replica_groups=2 outer_sync=diloco sync_every=2 grad_compression=powersgd",
)  # fmt: skip
EXPERTS = ("ep=2", "fsdp=2", "fsdp=2 cp=2", "fsdp=2 ep=2", "dp=2 ep=2", "fsdp=4 ep=2", "fsdp=2 ep=2 cp=2", "tp=2")


def equal(verdict: object) -> None:
    assert verdict.equal, repr(verdict)  # type: ignore[attr-defined]


def test_scalars_are_summed_over_cp_under_fsdp() -> None:
    equal(verify(jobs_scalars.gpt(), Plan.parse("fsdp=2 cp=2"), steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("plan", [*PLANS[:2], *rarely(*PLANS[2:9]), *PLANS[9:10], *rarely(*PLANS[10:14]), *PLANS[14:]])
def test_unusual_parameters_are_exact_under_every_axis(plan: str) -> None:
    equal(verify(jobs_scalars.gpt(), Plan.parse(plan), steps=3))


@pytest.mark.slow
@pytest.mark.parametrize("plan", [*EXPERTS[:4], *rarely(*EXPERTS[4:])])
def test_a_scalar_that_no_counted_sample_used_gets_no_gradient(plan: str) -> None:
    """The last batch has one sample. A rank without samples runs it again with weight zero, and may use other experts."""
    equal(verify(jobs_scalars.mixture(), Plan.parse(plan), steps=3))


@pytest.mark.slow
def test_an_optimizer_of_whole_tensors_takes_scalars() -> None:
    adafactor = lambda p: torch.optim.Adafactor([q for q in p if q.numel()], lr=1e-2)  # noqa: E731
    job = dataclasses.replace(jobs_scalars.gpt(), optimizer=adafactor)
    equal(verify(job, Plan.parse("fsdp=2 cp=2"), steps=3))


@pytest.mark.parametrize("value", [torch.tensor([True, False]), torch.tensor(7), torch.tensor([2**60, 1])])
def test_integers_and_bools_are_compared_exactly(value: torch.Tensor) -> None:
    other = value.logical_not() if value.dtype == torch.bool else value + 1
    names, empty = ["w"], {"w": torch.empty(0, 3)}
    assert compare_tensors("U", "weights", {"w": value}, {"w": value.clone()}, names, 1e12).equal
    probe = compare_tensors("U", "weights", {"w": value}, {"w": other}, names, 1e12)
    assert probe.worst >= 1 and probe.name == "w"
    assert measure_movement({"w": value}, {"w": other}) == 0.0  # the tolerance of weights is that of rounding
    assert compare_tensors("U", "weights", empty, empty, names, 0.0).equal and find_constant_ratio(empty["w"], empty["w"]) is None


def test_imaginary_parts_are_compared() -> None:
    value = torch.tensor([1 + 2j, 3j], dtype=torch.complex128)
    assert compare_tensors("G", "gradients", {"w": value}, {"w": value.clone()}, ["w"], 0.0).equal
    assert not compare_tensors("G", "gradients", {"w": value}, {"w": value.real + 1.5j * value.imag}, ["w"], 0.0).equal
    assert math.isclose(measure_movement({"w": value}, {"w": value + 2j}), 2.0)
