"""The statistics row of a step: ranks unpack what they packed, and sums of fractions are integers again."""

from dataclasses import replace

import pytest
import torch

from plait.config.plan import Plan
from plait.engine.stats_reader import PendingStats
from plait.engine.step_log import StepLog
from plait.parallel.gradient_reducer import RunSignals, StepStats, WeightedSum
from plait.tensors.transfers import HostCopy

CPU = torch.device("cpu")


def of_rank(rank: int, plan: Plan, samples: int) -> StepStats:
    stats = StepStats.zeros(plan)
    stats.add_losses([torch.tensor(0.25 + rank)], plan, CPU)
    stats.add_rank(rank, plan, samples=samples, busy=1.0 + rank, waited=0.5 * rank, room=4 + rank)
    stats.signals = RunSignals(stop=float(rank == 1), disk_save=1.0, memory_save=2.0, end=float(rank == 2))
    stats.new_names, stats.logged = float(rank), [WeightedSum(torch.tensor(3.0 * rank), 0.5), WeightedSum(7.0, 1.0)]
    return stats


@pytest.mark.parametrize("text", ["dp=1", "dp=4", "dp=2 tp=2", "dp=2 pp=2", "dp=2 tp=2 batch_split=auto", "fsdp=2 cp=2"])
def test_ranks_read_what_they_packed(text: str) -> None:
    plan = Plan.parse(text)
    rows = [of_rank(rank, plan, 3).pack(CPU) for rank in range(plan.world)]
    width = len(replace(StepStats.zeros(plan), logged=[WeightedSum(0.0, 0.0)] * 2).pack(CPU))
    assert all(row.dtype is torch.float64 and len(row) == width for row in rows)
    summed = torch.stack(rows).sum(0)
    totals = StepStats.unpack(summed.tolist(), plan)
    ranks = range(plan.world)
    assert totals.loss == float(StepStats.loss_in(summed))
    assert totals.samples == [3.0] * plan.ranks and totals.busy == [1.0 + r for r in ranks]
    assert totals.waited == [0.5 * r for r in ranks]
    assert totals.room == ([4.0 + r for r in ranks] if "auto" in text else [])
    assert totals.signals == RunSignals(float(1 in ranks), plan.world, 2.0 * plan.world, float(2 in ranks))
    assert totals.new_names == sum(ranks) and len(totals.logged) == 2
    assert totals.logged[0] == WeightedSum(3.0 * sum(ranks), 0.5 * plan.world)


def test_the_order_of_the_row_is_that_of_the_fields() -> None:
    """The tail of a bucket contains it. In another order, sums over three or more ranks would have other bits."""
    plan = Plan.parse("dp=2 batch_split=auto")
    row = of_rank(1, plan, 3).pack(CPU).tolist()
    assert row == [1.25, 1.0, 0.0, 3.0, 0.0, 2.0, 0.0, 0.5, 0.0, 5.0, 1.0, 2.0, 0.0, 1.0, 3.0, 0.5, 7.0, 1.0]


@pytest.mark.parametrize("alike", ["tp=6", "tp=3 pp=2", "pp=6"])
def test_fractions_of_samples_sum_to_samples(alike: str) -> None:
    """Six times a sixth is less than one in float64. A count is rounded to the nearest integer."""
    plan = Plan.parse(alike)
    stats = StepStats.zeros(plan)
    for rank in range(plan.world):
        one = StepStats.zeros(plan)
        one.add_rank(rank, plan, samples=1, busy=0.0, waited=0.0, room=0)
        stats.samples[0] += one.samples[0]
    assert stats.samples[0] < 1.0
    pending = PendingStats(plan, None, [], StepLog(CPU).sent, [], True, has_loss_scale=False, loss_factor=1.0)  # type: ignore[arg-type]
    pending.spans = list
    pending.copy = HostCopy(pending.pack(stats.pack(CPU), torch.tensor(2.0), torch.ones(1), None))
    assert pending.numbers.by_rank == [(1, 0.0)] and pending.norm == 2.0
