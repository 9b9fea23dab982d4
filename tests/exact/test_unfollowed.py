"""Models that fake tensors cannot follow run on real ones: plans without units train like one device, and others reject them by name."""

import jobs_unfollowed
import pytest

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.model.fake_model import sketch_of
from plait.parallel import mutations
from plait.planner.refusals import validate_plan
from plait.proof.verify import verify

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse (invariant|CSR):UserWarning"),
]
UNMEASURED = ("jagged", "nested")
NEED_NO_UNITS = ("dp=2", "fsdp=2 microbatches=2", "dp=2 microbatches=2 offload=optimizer", "dp=2 fsdp=2")
NEED_UNITS = ("tp=2", "cp=2", "pp=2 microbatches=2", "dp=2 ep=2", "dp=2 activation_checkpointing=full", "dp=2 activation_checkpointing=selective")


def equal(kind: str, plan: str) -> None:
    verdict = verify(jobs_unfollowed.job(kind), Plan.parse(plan))
    assert verdict.equal and not verdict.inexact, verdict.cause


@pytest.mark.parametrize("kind", UNMEASURED)
def test_the_sketch_names_the_line_that_cannot_be_measured(kind: str) -> None:
    found = sketch_of(jobs_unfollowed.job(kind))
    assert found.needs_real_tensors and not found.units and "jobs_unfollowed.py" in found.unmeasured_at
    assert found.places == {"drop#1#1": 0, "drop#2#1": 0} and not found.unkeyed
    for plan in NEED_NO_UNITS:
        assert mutations.find_unmeasured(Plan.parse(plan), found) is None


@pytest.mark.slow
@pytest.mark.parametrize("plan", NEED_UNITS)
def test_plans_that_need_units_are_refused_before_processes_start(plan: str) -> None:
    with pytest.raises(PlaitError, match="P073") as error:
        validate_plan(jobs_unfollowed.job("jagged"), Plan.parse(plan), "cpu")
    problem = error.value.problems[0]
    assert error.value.exit_code == 2 and "jobs_unfollowed.py" in problem.where
    assert any(word in problem.what for word in plan.split())


@pytest.mark.slow
@pytest.mark.parametrize("kind, plan", [("jagged", "dp=2"), ("memory", "fsdp=2"), ("nested", "dp=2 offload=optimizer")])
def test_some_are_the_same_training(kind: str, plan: str) -> None:
    equal(kind, plan)


@pytest.mark.prove
@pytest.mark.parametrize("kind", jobs_unfollowed.KINDS)
@pytest.mark.parametrize("plan", NEED_NO_UNITS)
def test_all_are_the_same_training(kind: str, plan: str) -> None:
    equal(kind, plan)
