"""Small unusual jobs, each under some plans: none silently changes the training result, and no correct run is flagged."""

from collections.abc import Callable
from typing import Any

import jobs_odd
import jobs_odd_features
import jobs_odd_models
import jobs_odd_trained
import pytest
from rarely import every, sampled

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.proof.job import check
from plait.proof.verify import verify

JOBS: dict[str, Callable[[], Any]] = {
    f"{module.__name__.removeprefix('jobs_')} {name}": job
    for module in (jobs_odd, jobs_odd_trained, jobs_odd_models, jobs_odd_features)
    for name, job in module.J.items()
}
PLANS = ("dp=2", "tp=2", "cp=2", "pp=2 microbatches=2", "fsdp=2")
CASES = [(name, plan) for k, name in enumerate(JOBS) for plan in (PLANS[k % 5], PLANS[(k + 2) % 5])]


@pytest.mark.parametrize("name, plan", sampled(2, every(20, CASES)))
def test_it_is_the_same_training_or_says_that_it_is_not(name: str, plan: str) -> None:
    """Equal; or rejected with a code; or named as inexact, by the plan or by the job check of `plait train` before the first step."""
    try:
        verdict = verify(JOBS[name](), Plan.parse(plan))
    except PlaitError as error:
        assert error.codes[0][0] in "PJ", error
        return
    if not verdict.equal:
        named = verdict.code == "V010" or check.check_job(JOBS[name](), Plan.parse(plan)).problems
        assert named, str(verdict)
