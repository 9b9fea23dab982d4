"""The table of conflicting plan options: each row rejects a plan with both options, and its fixes are plans without the conflict."""

import re

import jobs_phased
import jobs_small
import pytest

from plait.config.conflicts import CONFLICTS, Conflict, find_conflicts
from plait.config.errors import PlaitError
from plait.config.job import EMA, Job
from plait.config.plan import Plan
from plait.engine.build import check_plan

VALUES = {"activation_checkpointing": "full", "offload": "all", "grad_compression": "bf16", "batch_split": "auto", "shard_over_cp": "true"}
"""Non-default values for keys that are not numbers."""
IDS = [f"{row.first}, {row.second}{''.join(f', {term}' for term in row.requires)}" for row in CONFLICTS]


def both(row: Conflict) -> tuple[Job, Plan]:
    """A job and a plan with both options of a row."""
    words = {}
    for term in (row.first, row.second, *row.requires):
        key, _, values = term.partition("=")
        if not key.startswith("Job."):
            words[key] = values.split("|")[0] or VALUES.get(key, "2")
    job = jobs_phased.wgan_gp() if row.first == "Job.phases" else jobs_small.job("cnn")
    job = job if row.first != "Job.ema" else Job(**{**vars(job), "ema": EMA(0.9)})
    return job, Plan.parse(" ".join(f"{key}={value}" for key, value in words.items())).fill(None)


@pytest.mark.parametrize("row", CONFLICTS, ids=IDS)
def test_a_plan_with_both_is_refused(row: Conflict) -> None:
    job, plan = both(row)
    with pytest.raises(PlaitError) as caught:
        check_plan(job, plan)
    (mine,) = [p for p in caught.value.problems if p.code == row.code and p.why == row.why]
    for term in (row.first, row.second):
        assert term.partition("=")[0] in mine.what
    assert mine.fix and "{" not in " ".join(mine.fix)


@pytest.mark.parametrize("row", CONFLICTS, ids=IDS)
def test_a_plan_that_is_proposed_instead_has_no_conflict(row: Conflict) -> None:
    job, plan = both(row)
    mine = row.find_problem(job, plan)
    assert mine is not None
    for text in re.findall(r'--plan "([^"]*)"', " ".join(mine.fix)):
        assert not [*find_conflicts(job, Plan.parse(text).fill(None))]
