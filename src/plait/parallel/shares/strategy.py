"""Shares of the batch by speed (batch_shares): devices of unequal speed get unequal parts of every batch.

What it does
    Ranks that have samples of their own (dp × fsdp) get as many as their parts say, not equally many: given parts, such as
    batch_split=3:1:1:1, one for each of these ranks, or parts that follow what is measured (batch_split=auto). Ranks that
    compute the same samples (tp, cp, pp) share a part, and its speed is that of the slowest of them.

Picture
    equal   rank 0  ▓▓▓▓▓▓▓▓░░░░░░░░░░░░░░░░ ─► step        ▓ computes   ░ waits for the slowest
            rank 1  ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ ─► step        (three times as slow)
    3:1     rank 0  ▓▓▓▓▓▓▓▓▓▓▓▓ ─► step
            rank 1  ▓▓▓▓▓▓▓▓▓▓▓▓ ─► step

Costs
    Memory: activations grow with the share, so the fastest device keeps more; weights and optimizer state are where they were.
    auto gives no rank more than four times the equal part, nor, on a GPU, more than was measured to fit. Time: none in a step.
    A change makes tensors of new shapes. Traffic: none; auto's figures travel in the row that every step sums anyway.

Choose when
    Devices differ: two generations of GPUs, a laptop beside a server, a neighbour on the same machine. Steps then take what
    the devices can do together, not what the slowest can do times their number. auto where nobody knows how much they differ,
    or where it changes; parts where it is known.

Avoid when
    Devices are alike: equal shares are what auto ends with. A device is so slow that one sample takes it longer than the others
    take for the rest of the batch: leave it out. Under compile=true every new size is another graph. With the batch a few
    samples large, parts are coarse: nobody has less than a sample of each micro-batch.

How it stays exact
    The loss is a weighted mean over the batch, whose parts enter with their own weight, whatever their sizes. The samples of a
    step and their order do not depend on the parts, and random numbers are keyed by a sample's place in the global batch. So parts
    may change between any two steps. auto judges by the median of 16 steps' computing, waits for messages of others left out; all
    ranks work the parts out from the same numbers, and change them at the same step, later than what loaders have fetched.
    An iterable is read in full by every rank, also where it could give each its part: its parts are equal.

Paper
    Chen et al. 2020, Semi-Dynamic Load Balancing: Efficient Distributed Learning in Non-Dedicated Environments (SoCC).
"""

from collections.abc import Iterable

from plait.config.errors import Problem
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.rank_model import SplitModel
from plait.parallel.shares.balance import Balance

AXIS = None
EXACT = True


def wanted(plan: Plan) -> bool:
    return plan.batch_split != "equal"


def refuse(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    given, count = plan.parts, plan.ranks
    if count == 1:
        what = f"batch_split={plan.batch_split} shares out nothing: one process has the whole batch"
        why = "processes=one cuts it into equal parts for its threads" if plan.processes == "one" else "dp=1, fsdp=1"
        yield Problem("P015", what, why=why, fix=("dp=2", "leave out batch_split"))
    elif given and len(given) != count:
        axes = f"dp={plan.dp} × fsdp={plan.fsdp} = {count} ranks with samples of their own"
        fitting = ":".join(map(str, (*given, *[1] * count)[:count]))
        fix = (f"batch_split={fitting}", f"dp={len(given)}" if plan.fsdp == 1 else "batch_split=auto")
        yield Problem(
            "P015", f"batch_split={plan.batch_split} has {len(given)} parts for {count} shares", why=axes, fix=fix
        )
    together = [f"{axis}={size}" for axis in ("pp", "fsdp", "ep") if (size := getattr(plan, axis)) > 1]
    together += [plan.word("shard_over_cp")] if plan.shard_over_cp else []
    if plan.batch_split == "auto" and device == "cuda" and together and count > 1:
        what = f"batch_split=auto cannot tell the speeds of GPUs under {' '.join(together)}"
        why = "they wait for each other inside their passes, and the time of a kernel that waits is like that of one that computes"
        yield Problem("P016", what, why=why, fix=("batch_split=3:1    the parts themselves", "dp alone"))


def inexact(plan: Plan, sketch: Sketch) -> Iterable[str]:
    return ()


def apply(split: SplitModel) -> SplitModel:
    """What measures speeds. Parts that are given are the data layer's to cut."""
    if split.plan.batch_split != "auto":
        return split
    return split.using(balance=Balance(split.job.batch, split.plan.ranks, split.plan.microbatches))
