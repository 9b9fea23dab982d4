"""Pipelines of different models equal one device in float64, or the model is rejected with the unit, the value and the reason.

Each job is tried under a few of the plans, so that each plan is tried with many kinds of jobs; `prove` tries more.
"""

import dataclasses
from typing import Any

import jobs
import jobs_pipeline
import jobs_uncut
import jobs_unlike
import pytest
from rarely import crossed, every, sampled
from torch import Tensor, nn

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.proof.verify import verify

PLANS = (
    "pp=2 microbatches=4",
    "pp=3 microbatches=4 schedule=zb",
    "pp=2 microbatches=4 schedule=interleaved stages_per_rank=2",
    "pp=2 dp=2 microbatches=2 schedule=gpipe activation_checkpointing=selective",
    "pp=2 fsdp=2 microbatches=2",
    "pp=2 microbatches=3 schedule=zbv stages_per_rank=2 offload=optimizer",
    "pp=3 microbatches=4 activation_checkpointing=full",
    "pp=2 dp=2 fsdp=2 microbatches=2 activation_checkpointing=full",
    "pp=2 microbatches=4 schedule=auto activation_checkpointing=selective",
    "pp=2 fsdp=2 zero_stage=2 microbatches=2 schedule=zb offload=all",
    "pp=2 microbatches=3 schedule=sequential",
    "pp=2 fsdp=2 zero_stage=1 microbatches=3 schedule=zbv stages_per_rank=2",
    "pp=2",
)
JOBS = {**jobs_pipeline.LISTED, **jobs_pipeline.HARD, **jobs_uncut.CUT}
OTHERS = {**jobs.ALL, **jobs_unlike.ALL}
UNCUT = {
    "branches": "P024", "batch_norm": "P024", "forces": "P024", "writes_input": "P024", "stream": "P023",
}  # fmt: skip
"""Rejected: branches on input values with random numbers, statistics in no unit, derivatives, writes into inputs, a single layer."""
BY_MICRO_BATCH = ("norm_inside", "odd", "spectral")
FEW = ("mlp", "ragged", "groups", "vae", "recomputed", "odd")
"""Jobs with fewer unit calls than some plans have stages."""


def equal_or_named(job: Any, name: str, text: str) -> None:
    """Equal; or rejected with one of the name's codes; or inexact by nature, and named as such."""
    try:
        verdict = verify(job(), Plan.parse(text))
    except PlaitError as error:
        code = error.problems[0].code
        if name in UNCUT:
            assert code == UNCUT[name], error
        elif code == "P024":
            assert name == "spectral" and "stages_per_rank" in text, error
        else:
            assert code == "P023" and name in FEW, error
        return
    assert name not in UNCUT
    if name in BY_MICRO_BATCH and "microbatches" in text:
        assert verdict.inexact and verdict.code in ("", "V010")
        return
    if name == "counted" and text != "pp=2":
        return  # it counts its own calls: a different number of them is a different model
    assert verdict.equal, (verdict.code, verdict.parameter, verdict.cause, verdict.to_dict())


def spread(names: list[str], each: int, step: int = 5) -> list[tuple[str, str]]:
    return [(name, PLANS[(k + step * i) % len(PLANS)]) for k, name in enumerate(names) for i in range(each)]


@pytest.mark.parametrize(
    "name, text", sampled(2, every(6, spread([n for n in JOBS if n not in jobs_pipeline.HUGGING], 1)))
)
def test_models(name: str, text: str) -> None:
    equal_or_named(JOBS[name], name, text)


@pytest.mark.slow
@pytest.mark.parametrize("name, text", every(6, spread(["llama", "t5", "whisper", "swin", "mamba", "mixtral"], 1)))
def test_hugging_face(name: str, text: str) -> None:
    equal_or_named(JOBS[name], name, text)


@pytest.mark.parametrize("name, text", sampled(4, every(6, spread([n for n in OTHERS if n not in UNCUT], 1))))
def test_unlike_jobs(name: str, text: str) -> None:
    equal_or_named(OTHERS[name], name, text)


@pytest.mark.parametrize("name", sampled(2, [n for n in OTHERS if n in UNCUT]))
def test_unlike_jobs_that_are_refused(name: str) -> None:
    with pytest.raises(PlaitError) as caught:
        verify(OTHERS[name](), Plan.parse("pp=2 microbatches=2"))
    assert caught.value.problems[0].code == UNCUT[name], caught.value


@pytest.mark.parametrize("name", sampled(3, jobs_uncut.REFUSED))
def test_what_cannot_be_cut_is_refused(name: str) -> None:
    job, words = jobs_uncut.REFUSED[name]
    with pytest.raises(PlaitError) as caught:
        verify(job(), Plan.parse("pp=2 microbatches=2"))
    problem = caught.value.problems[0]
    assert problem.code == "P024" and words in problem.what and problem.why and problem.fix, caught.value


@pytest.mark.slow
def test_a_loss_over_the_batch_is_named() -> None:
    """The contrastive loss of two towers depends on the batch, and micro-batches are different batches."""
    verdict = verify(jobs_pipeline.clip(), Plan.parse("pp=2 microbatches=3"))
    assert not verdict.equal and verdict.code == "V013"
    assert verify(jobs_pipeline.clip(), Plan.parse("pp=2")).equal


@pytest.mark.parametrize("stages", (("blocks.1",), ("last",)))
def test_the_users_own_cuts(stages: tuple[str, ...]) -> None:
    job = dataclasses.replace(jobs_pipeline.LISTED["deep"](), stages=stages)
    assert verify(job, Plan.parse("pp=2 microbatches=3 schedule=zb")).equal


@pytest.mark.parametrize(
    "stages, words",
    sampled(2, (
        (("blocks.9",), "contains an unknown unit"), (("first",), "order"), (("blocks.1", "blocks.2"), "names 2 units"),
        (("blocks.1.up",), "contains an unknown unit"),
    )),
)  # fmt: skip
def test_wrong_cuts(stages: tuple[str, ...], words: str) -> None:
    with pytest.raises(PlaitError) as caught:
        verify(dataclasses.replace(jobs_pipeline.LISTED["deep"](), stages=stages), Plan.parse("pp=2"))
    assert caught.value.problems[0].code == "P023" and words in caught.value.problems[0].what


def test_cuts_out_of_order() -> None:
    with pytest.raises(PlaitError, match="order"):
        verify(dataclasses.replace(jobs_pipeline.LISTED["deep"](), stages=("blocks.3", "blocks.1")), Plan.parse("pp=3"))


@pytest.mark.prove
@pytest.mark.parametrize("name, text", crossed(5, JOBS, PLANS))
def test_every_model(name: str, text: str) -> None:
    equal_or_named(JOBS[name], name, text)


@pytest.mark.prove
@pytest.mark.parametrize("name, text", crossed(5, [n for n in OTHERS if n not in UNCUT], PLANS))
def test_every_unlike_job(name: str, text: str) -> None:
    equal_or_named(OTHERS[name], name, text)


class Turned(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).t().contiguous().t()


class PassedOn(nn.Module):
    """A value with noncontiguous rows: the next unit reads it, and so does a later one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.turned, self.next, self.last = nn.Linear(6, 5), Turned(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.turned(self.first(x))
        return self.last(h + self.next(h).tanh())


@pytest.mark.slow
def test_gradients_of_a_value_that_passes_through_lie_as_it_does() -> None:
    """Between two stages of one rank the layout is preserved. torch warns of a gradient with a different layout, which is an error here."""
    plan = "pp=2 microbatches=2 schedule=zbv stages_per_rank=2"
    assert verify(jobs.make(PassedOn), Plan.parse(plan), 2).equal


@pytest.mark.slow
def test_a_scalar_enters_the_norm_of_a_sharded_stage_once() -> None:
    assert verify(jobs_unlike.ALL["scalars"](), Plan.parse("pp=2 fsdp=2 microbatches=2")).equal
