"""Tensor parallelism of different models equals one device in float64, with any other axes in the plan.

Each plan is tried with a few kinds of models here; `prove` tries each model under each plan.
"""

import jobs
import jobs_pipeline
import jobs_real
import jobs_unlike
import pytest
from rarely import crossed, every, sampled

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.proof.verify import verify

PLANS = (
    "tp=2",
    "tp=4",
    "tp=2 dp=2",
    "fsdp=2 tp=2",
    "pp=2 tp=2 microbatches=2",
    "dp=2 fsdp=2 tp=2",
    "tp=2 activation_checkpointing=full",
    "tp=2 activation_checkpointing=selective",
    "tp=2 microbatches=3",
    "tp=2 offload=optimizer",
    "tp=2 sequence_parallel=false",
    "pp=2 tp=2 microbatches=2 schedule=zb activation_checkpointing=full",
    "pp=2 tp=2 microbatches=3 schedule=zbv stages_per_rank=2 activation_checkpointing=selective",
)
JOBS = {**jobs_real.ALL, **jobs.ALL, **jobs_pipeline.LISTED, **jobs_pipeline.HARD, **jobs_unlike.ALL}
FIRST = (
    ("mlp", "tp=4"), ("llama", "fsdp=2 tp=2"), ("gpt2", "pp=2 tp=2 microbatches=2"),
    ("gpt", "tp=2 activation_checkpointing=full"), ("attention", "tp=2 microbatches=3"), ("attention", "tp=2 activation_checkpointing=selective"),
    ("root_gpt", "tp=2 dp=2"), ("root_gpt", "tp=2 sequence_parallel=false"), ("deep", "dp=2 fsdp=2 tp=2"),
    ("ragged", "tp=2 offload=optimizer"), ("chunked_tied", "fsdp=2 tp=2"), ("multihead", "tp=2 activation_checkpointing=full"),
    ("scalars", "pp=2 tp=2 microbatches=2"), ("tied_across", "fsdp=2 tp=2"), ("twice", "tp=2 microbatches=3"),
    ("frozen_middle", "tp=2 activation_checkpointing=selective"),
    ("digits", "tp=2"), ("frozen_first", "pp=2 tp=2 microbatches=2"),
    ("gpt", "pp=2 tp=2 microbatches=2 schedule=zb activation_checkpointing=full"),
    ("own_checkpoint", "tp=2"), ("layer_drop", "tp=2"), ("unused", "tp=2 dp=2"),
)  # fmt: skip
UNCUT = {
    "branches": "P024", "batch_norm": "P024", "objects": "P024", "forces": "P024",
    "writes_input": "P024", "stream": "P023",
}  # fmt: skip
"""Models that a pipeline of two stages rejects; see test_pipeline.py."""
BY_MICRO_BATCH = ("batch_norm", "norm_inside", "odd", "spectral", "digits")


def equal_or_named(name: str, text: str) -> None:
    """Equal; or rejected like a pipeline; or inexact by nature, and named as such."""
    plan = Plan.parse(text)
    try:
        verdict = verify(JOBS[name](), plan)
    except PlaitError as error:
        code = error.problems[0].code
        if code == "P034":  # no layer can be sliced, which the error states
            return
        few = plan.stages_per_rank > 1 and code == "P023"
        assert plan.pp > 1 and (few or code == UNCUT.get(name, "")), error
        return
    if name in BY_MICRO_BATCH and plan.microbatches > 1:
        assert verdict.inexact and verdict.code in ("", "V010"), verdict.to_dict()
        return
    if name == "counted" and (plan.microbatches > 1 or plan.shares == plan.dp > 1):
        return  # it counts its own calls: a different number of them, or none without samples, is a different model
    assert verdict.equal and not verdict.inexact, (verdict.code, verdict.parameter, verdict.cause, verdict.to_dict())


@pytest.mark.parametrize("name, text", sampled(6, every(4, FIRST)))
def test_models(name: str, text: str) -> None:
    equal_or_named(name, text)


@pytest.mark.slow
def test_the_jobs_own_choice() -> None:
    job = jobs.make(jobs_unlike.Chain, tensor={"blocks.0.up": "whole"})
    verdict = verify(job, Plan.parse("tp=2"))
    assert verdict.equal, verdict.to_dict()


@pytest.mark.parametrize(
    "tensor, plan, code",
    (
        ({"blocks.0.up": "row"}, "tp=2", "J021"),
        ({"block.up": "row"}, "tp=2", "J021"),
        (None, "tp=2 processes=one", "P033"),
    ),
)
def test_what_cannot_be_sliced_is_refused(tensor: dict[str, str] | None, plan: str, code: str) -> None:
    with pytest.raises(PlaitError) as caught:
        verify(jobs.make(jobs_unlike.Chain, tensor=tensor), Plan.parse(plan))
    assert caught.value.problems[0].code == code, caught.value


@pytest.mark.prove
@pytest.mark.parametrize("name, text", [pair for pair in crossed(5, JOBS, PLANS) if pair not in FIRST])
def test_every_model(name: str, text: str) -> None:
    equal_or_named(name, text)


@pytest.mark.slow
def test_a_model_of_which_nothing_can_be_cut_is_refused_with_the_reasons() -> None:
    with pytest.raises(PlaitError) as refused:
        verify(jobs.ALL["batch_norm"](), Plan.parse("tp=2"))
    assert refused.value.problems[0].code == "P034" and refused.value.problems[0].why
