"""The planner's closed form of what a rank has of the parameters, against the table (`parallel/spec.py`), plan by plan."""

from collections.abc import Callable
from math import prod
from statistics import mean

import jobs_moe
import jobs_real
import pytest

from plait.config.job import Job
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.parallel.mesh import Mesh
from plait.parallel.order import shard_plan
from plait.parallel.spec import sizes
from plait.planner.dryrun.dry_run import known
from plait.planner.estimate import estimate
from plait.planner.formulas import sharded, weights
from plait.planner.question import PlanRequest

JOBS: dict[str, Callable[[], Job]] = {
    "gpt": jobs_real.gpt, "tied": jobs_real.gpt2, "moe_list": jobs_moe.gpt, "moe_stacked": lambda: jobs_moe.gpt(stacked=True),
}  # fmt: skip
PLANS = {
    "gpt": ("dp=4", "fsdp=2", "fsdp=3", "fsdp=8", "dp=2 fsdp=4", "tp=2", "fsdp=2 tp=2", "fsdp=3 tp=2", "fsdp=2 cp=2", "offload=all",
            "cp=2 shard_over_cp=true", "cp=3 shard_over_cp=true", "fsdp=2 cp=2 shard_over_cp=true", "dp=2 cp=2 shard_over_cp=true"),
    "tied": ("dp=2", "fsdp=4"),
    "moe_list": ("dp=2", "fsdp=2", "ep=2", "fsdp=2 ep=2", "fsdp=4 ep=2", "dp=2 fsdp=2 ep=2", "dp=2 ep=2 cp=2 shard_over_cp=true"),
    "moe_stacked": ("fsdp=2", "fsdp=3", "ep=2", "fsdp=2 ep=2", "fsdp=4 ep=2", "fsdp=6 ep=2", "fsdp=4 ep=2 cp=2 shard_over_cp=true"),
}
EVEN = {
    "gpt": ("dp=4", "fsdp=2", "dp=2 fsdp=4", "tp=2", "fsdp=2 tp=2", "cp=2 shard_over_cp=true", "fsdp=2 cp=2 shard_over_cp=true"),
    "moe_list": ("ep=2",), "moe_stacked": ("ep=2",),
}  # fmt: skip


@pytest.fixture(scope="module")
def asked() -> dict[str, PlanRequest]:
    return {name: PlanRequest.of(job(), name, Machine.named("h100x8")) for name, job in JOBS.items()}


@pytest.mark.parametrize("name, words", [(name, words) for name, plans in PLANS.items() for words in plans])
def test_a_rank_has_what_the_planner_counts_on_average(asked: dict[str, PlanRequest], name: str, words: str) -> None:
    """All ranks have as much if they divide the parameters; else some have a row more of a tensor, and others less."""
    plan, request = Plan.parse(words), asked[name]
    table = shard_plan(request.job, plan, known(request.job, plan)[0])
    specs = [spec for spec in table.specs.values() if not spec.buffer]
    for planned, at_rest in ((sharded, True), (weights, False)):
        here = lambda at: sum(prod(sizes(s.ranges(at, at_rest))) for s in specs if s.is_here(at))  # noqa: B023, E731
        held, counted = [here(at) for at in Mesh(plan, 0).places], sum(planned(b, plan) * b.count for b in request.pace.work.blocks)
        assert mean(held) == pytest.approx(counted)
        assert words not in EVEN.get(name, ()) or set(held) == {round(counted)}
        if at_rest:
            assert estimate(request.pace, plan, 4).states == pytest.approx(counted)
