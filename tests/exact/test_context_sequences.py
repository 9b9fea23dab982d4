"""Several sequences under context parallelism, and sequences whose length is no size of the input: equal to one device."""

import jobs_twosided
import pytest
from rarely import crossed, every
from test_context import MORE, PLANS

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.proof.verify import verify

SPREAD = (
    ("bart", "cp=2"),
    ("aligned", "cp=2 cp_method=ulysses microbatches=2"),
    ("transformer", "dp=2 cp=2"),
    ("whisper", "cp=2 cp_method=ulysses activation_checkpointing=selective"),
    ("vit", "cp=2 activation_checkpointing=full"),
    ("latents", "cp=2"),
    ("latents", "tp=2 cp=2"),
    ("latents", "fsdp=2 tp=2"),
)


def equal(name: str, text: str) -> None:
    plan = Plan.parse(text)
    try:
        verdict = verify(jobs_twosided.ALL[name](), plan, steps=3)
    except PlaitError as error:
        named = {"P041": plan.pp > 1, "P042": plan.cp * plan.tp > 2, "P023": plan.stages_per_rank > 1}
        assert named.get(error.codes[0]), error  # code between stages gathers; few positions, heads or units
        return
    assert verdict.equal, (verdict.code, verdict.parameter, verdict.cause, verdict.to_dict())


@pytest.mark.slow
@pytest.mark.parametrize("name, text", every(7, SPREAD[1:]))
def test_equal(name: str, text: str) -> None:
    equal(name, text)


@pytest.mark.prove
@pytest.mark.parametrize("name, text", crossed(4, jobs_twosided.ALL, (*PLANS, *MORE)))
def test_every_model(name: str, text: str) -> None:
    equal(name, text)
