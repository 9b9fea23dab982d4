"""The best table for measured times and limits on memory: the textbook's tables, and lists packed greedily."""

from plait.actions import Table
from plait.schedules import SCHEDULES, problems, table
from plait.simulate import simulate


def best(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Table:
    """The table with the smallest makespan among those that hold at most what 1f1b's first rank does."""
    limit = ranks * stages_per_rank
    fitting = [
        table(name, ranks, microbatches, stages_per_rank)
        for name in SCHEDULES
        if name != "auto" and not problems(name, ranks, microbatches, stages_per_rank)
    ]
    one = [1.0] * limit
    return min(
        (t for t in fitting if max(t.live) <= limit),
        key=lambda t: (simulate(t, one, one, one).makespan, sum(t.live)),
    )
