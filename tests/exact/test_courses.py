"""Pipelines of models whose passes vary from step to step, and of units that return objects, equal one device."""

import random
from typing import Any

import jobs_courses
import numpy as np
import pytest
import torch
from rarely import crossed, every, sampled
from torch import nn

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.model.build_model import run_model
from plait.model.fake_model import sketch_fake_model
from plait.model.meter import OUTPUT
from plait.model.sketch import sketch_model
from plait.parallel.pipeline.partition import (
    ForwardPath,
    ForwardPaths,
    ForwardRequest,
    check_partition,
    partition_stages,
)
from plait.proof.verify import verify

PLANS = (
    "pp=2 microbatches=2",
    "pp=3 microbatches=4 schedule=zb",
    "pp=2 dp=2 microbatches=2",
    "pp=2 microbatches=4 schedule=interleaved stages_per_rank=2",
    "pp=2 microbatches=3 activation_checkpointing=full",
    "pp=2 fsdp=2 microbatches=2",
)
JOBS = {**jobs_courses.VARYING, **jobs_courses.RANDOM, **jobs_courses.OBJECTS}


@pytest.mark.parametrize("name, text", sampled(2, every(8, [(n, PLANS[i % len(PLANS)]) for i, n in enumerate(JOBS)])))
def test_models(name: str, text: str) -> None:
    verdict = verify(JOBS[name](), Plan.parse(text))
    assert verdict.equal and not verdict.inexact, (verdict.code, verdict.parameter, verdict.cause, verdict.to_dict())


@pytest.mark.prove
@pytest.mark.parametrize("name, text", crossed(3, JOBS, PLANS))
def test_every_model(name: str, text: str) -> None:
    test_models(name, text)


@pytest.mark.slow
def test_a_unit_that_changes_an_object_it_is_given_is_not_run_again() -> None:
    assert verify(JOBS["changed"](), Plan.parse("pp=2 microbatches=3 activation_checkpointing=full")).equal


@pytest.mark.slow
@pytest.mark.parametrize("text", ("pp=2 fsdp=2 microbatches=2", "pp=2 tp=2 microbatches=2 schedule=zbv stages_per_rank=2"))
def test_a_function_that_knows_the_model_and_not_its_copy_meets_no_shards(text: str) -> None:
    """With tp, the copy also adds fake tensors, for which torch draws a random number."""
    assert verify(JOBS["drop_inside"](), Plan.parse(text)).equal


@pytest.mark.parametrize("name", sampled(2, jobs_courses.UNFOLLOWED))
def test_what_cannot_be_followed_is_refused(name: str) -> None:
    job, words = jobs_courses.UNFOLLOWED[name]
    with pytest.raises(PlaitError) as caught:
        verify(job(), Plan.parse("pp=2 microbatches=2"))
    problem = caught.value.problems[0]
    assert problem.code == "P024" and words in problem.what + problem.why and problem.fix, caught.value


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n == "attribute" else pytest.param(n, marks=pytest.mark.prove) for n in jobs_courses.UNREAD]
)
def test_what_units_leave_in_objects_and_no_loss_reads_is_no_hindrance(name: str) -> None:
    assert verify(jobs_courses.UNREAD[name](), Plan.parse("pp=2 microbatches=2"), 3).equal


@pytest.mark.parametrize("name", jobs_courses.READ)
def test_what_units_leave_in_objects_is_refused_where_the_loss_depends_on_it(name: str) -> None:
    found = sketch_fake_model(jobs_courses.READ[name]())[1]
    with pytest.raises(PlaitError, match="the loss depends on a tensor of it"):
        check_partition(found, partition_stages(found, 2), False)


@pytest.mark.parametrize("name", jobs_courses.UNREAD)
def test_what_the_loss_does_not_depend_on_is_unknown_on_other_stages(name: str) -> None:
    found = sketch_fake_model(jobs_courses.UNREAD[name]())[1]
    made = partition_stages(found, 2)
    check_partition(found, made, False)
    assert ForwardPath(found.calls, made).side_effect_calls
    with pytest.raises(PlaitError, match="under tp, cp or ep"):
        check_partition(found, made, False, True)


def test_a_cache_that_the_inputs_ask_for_is_no_hindrance() -> None:
    job = jobs_courses.llama_caching()
    found = sketch_fake_model(job)[1]
    check_partition(found, partition_stages(found, 2), False)
    assert {call.aside for call in found.calls if "layers" in call.unit} == {(OUTPUT,)}


def courses(model: nn.Module, *shape: int) -> ForwardPaths:
    inputs = lambda n: torch.ones(n, *shape, dtype=torch.long if len(shape) == 1 and shape[0] > 6 else None)  # noqa: E731
    found = sketch_model(model, inputs, run_model)
    made = ForwardPaths(model, found, partition_stages(found, 2), run_model, inputs, torch.device("cpu"))
    made.seed = 0
    return made


def shapes(made: ForwardPaths, inputs: Any, **where: int) -> list[tuple[int, ...]]:
    return [slot.shape_for(len(inputs)) for slot in made.find_path(ForwardRequest(inputs, len(inputs), **where)).crossing_slots(1)]


def test_the_sketchs_own_sizes_need_no_run_and_others_one() -> None:
    made = courses(jobs_courses.Padded(), 9)
    assert made.find_path(ForwardRequest(torch.ones(7, 9, dtype=torch.long), 7)) is made.sketch_path
    other = torch.ones(3, 5, dtype=torch.long)
    assert made.find_path(ForwardRequest(other, 3)) is made.find_path(ForwardRequest(other + 1, 3)) is not made.sketch_path
    assert shapes(made, other) == [(3, 5, 8), (3, 5, 8)]
    assert all(not p.requires_grad or p.grad is None for p in made.model.parameters())


@pytest.mark.slow
def test_a_course_is_that_of_the_step_and_leaves_the_generators_alone() -> None:
    made = courses(jobs_courses.NumpyDrop(), 6)
    random.seed(5), np.random.seed(5)
    found = {len(made.find_path(ForwardRequest(torch.ones(3, 6), 3, step=step)).calls) for step in range(8)}
    assert len(found) > 1
    after = random.random(), np.random.rand()
    random.seed(5), np.random.seed(5)
    assert after == (random.random(), np.random.rand())


class Turns(nn.Module):
    """Applies its layers in reverse order to long inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers if x.shape[1] < 5 else reversed(self.layers):
            x = layer(x)
        return x


def test_another_order_of_calls_is_refused() -> None:
    made = courses(Turns(), 3, 4)
    assert shapes(made, torch.ones(2, 4, 4)) == [(2, 4, 4)]
    with pytest.raises(PlaitError, match="is called after a unit of stage 1") as caught:
        shapes(made, torch.ones(2, 6, 4))
    assert caught.value.problems[0].code == "P024"


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x[:, : max(2, int(x.abs().max() * 0) + 2)]
        return x


def test_sizes_that_depend_on_values_are_refused() -> None:
    made = courses(Looks(), 3, 4)
    with pytest.raises(PlaitError) as caught:
        shapes(made, torch.ones(2, 9, 4))
    assert caught.value.problems[0].code == "P025"
