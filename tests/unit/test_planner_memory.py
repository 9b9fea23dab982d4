"""The planner's closed form for a rank's part of the parameters, compared with the table (`parallel/spec.py`), plan by plan."""

from collections.abc import Callable
from math import prod
from statistics import mean

import jobs_moe
import jobs_real
import pytest

from plait.config.job import Job
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.parallel.apply_order import make_shard_plan
from plait.parallel.mesh import Mesh
from plait.parallel.spec import compute_shape
from plait.planner.dryrun.dry_run import sketch_weights
from plait.planner.estimate import estimate_plan
from plait.planner.formulas import count_rank_weights, count_shard_weights
from plait.planner.plan_request import PlanRequest

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
    return {name: PlanRequest.from_job(job(), name, Machine.from_name("h100x8")) for name, job in JOBS.items()}


@pytest.mark.parametrize("name, words", [(name, words) for name, plans in PLANS.items() for words in plans])
def test_a_rank_has_what_the_planner_counts_on_average(asked: dict[str, PlanRequest], name: str, words: str) -> None:
    """All ranks have equal parts if they divide the parameters. Otherwise some have one row more of a tensor than others."""
    plan, request = Plan.parse(words), asked[name]
    table = make_shard_plan(request.job, plan, sketch_weights(request.job, plan)[0])
    specs = [spec for spec in table.specs.values() if not spec.buffer]
    for planned, at_rest in ((count_shard_weights, True), (count_rank_weights, False)):
        here = lambda at: sum(prod(compute_shape(s.ranges(at, at_rest))) for s in specs if s.is_here(at))  # noqa: B023, E731
        held, counted = [here(at) for at in Mesh(plan, 0).all_coordinates], sum(planned(b, plan) * b.count for b in request.pace.work.blocks)
        assert mean(held) == pytest.approx(counted)
        assert words not in EVEN.get(name, ()) or set(held) == {round(counted)}
        if at_rest:
            assert estimate_plan(request.pace, plan, 4).updated_weights == pytest.approx(counted)
