"""Local batches by speed (batch_split): devices of unequal speed get unequal parts of every batch.

What it does
    Ranks with different samples (dp × fsdp) get local batches of unequal size. `batch_split=3:1:1:1` fixes the ratio,
    with one part for each of these ranks. `batch_split=auto` follows the measured speeds. Ranks that compute the same
    samples (tp, cp, pp) have one part together, and its speed is that of the slowest of them.

Picture
    equal   rank 0  ▓▓▓▓▓▓▓▓░░░░░░░░░░░░░░░░ ─► step        ▓ computes   ░ waits for the slowest
            rank 1  ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ ─► step        (three times as slow)
    3:1     rank 0  ▓▓▓▓▓▓▓▓▓▓▓▓ ─► step
            rank 1  ▓▓▓▓▓▓▓▓▓▓▓▓ ─► step

Costs
    Memory: activations grow with the local batch, so the fastest device stores more; weights and optimizer state do not
    change. `auto` gives no rank more than four times the equal part and, on a GPU, no more than was measured to fit.
    Time: none in a step. A change of the ratio makes tensors of new shapes. Traffic: none. The measurements of `auto`
    travel in the step row, which every step sums anyway.

Choose when
    Devices differ: two generations of GPUs, a laptop and a server, other load on one of the machines. A step then takes
    the time of all devices' combined speed, not that of the slowest device for an equal part. Choose `auto` if the
    speeds are unknown or change, and a fixed ratio if they are known.

Avoid when
    Devices are equal: `auto` ends with equal local batches. Or one device needs longer for one sample than the others
    for the rest of the batch: leave it out. Under `compile=true`, every new size is compiled again. If the batch is
    only a few samples large, the parts are coarse: no rank has less than a sample of each micro-batch.

How it stays exact
    The loss is a weighted mean over the batch. Local batches of any size count with their own weight. The samples of a
    step and their order do not depend on the split. Random numbers are keyed by a sample's place in the global batch.
    So the split may change between any two steps. `auto` uses the median of 16 steps' compute times, without waits for
    messages of other ranks. All ranks compute the split from the same measurements. They change it at the same step,
    which is later than the steps whose samples the loaders have already fetched. Every rank reads an iterable data set
    in full, even one with `shard`, because its shards are equal.

Paper
    Chen et al. 2020, Semi-Dynamic Load Balancing: Efficient Distributed Learning in Non-Dedicated Environments (SoCC).
"""

from collections.abc import Iterable

from plait.config.errors import Problem
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.batch_split.batch_balancer import BatchBalancer
from plait.parallel.rank_model import SplitModel

AXIS = None
EXACT = True


def is_enabled(plan: Plan) -> bool:
    return plan.batch_split != "equal"


def validate(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    given, count = plan.parts, plan.ranks
    if count == 1:
        what = f"batch_split={plan.batch_split} has no effect: one process computes the full batch"
        why = "processes=one splits the batch into equal parts for its threads" if plan.processes == "one" else "dp=1, fsdp=1"
        yield Problem("P015", what, why=why, fix=("dp=2", "remove batch_split"))
    elif given and len(given) != count:
        axes = f"dp={plan.dp} × fsdp={plan.fsdp} = {count} ranks with different samples"
        fitting = ":".join(map(str, (*given, *[1] * count)[:count]))
        fix = (f"batch_split={fitting}", f"dp={len(given)}" if plan.fsdp == 1 else "batch_split=auto")
        yield Problem(
            "P015", f"batch_split={plan.batch_split} has {len(given)} parts for {count} local batches", why=axes, fix=fix
        )
    together = [f"{axis}={size}" for axis in ("pp", "fsdp", "ep") if (size := getattr(plan, axis)) > 1]
    together += [plan.word("shard_over_cp")] if plan.shard_over_cp else []
    if plan.batch_split == "auto" and device == "cuda" and together and count > 1:
        what = f"batch_split=auto cannot measure the speed of GPUs under {' '.join(together)}"
        why = "ranks wait for each other inside forward and backward, and a waiting kernel takes time like a computing one"
        yield Problem("P016", what, why=why, fix=("batch_split=3:1    give the parts", "dp alone"))


def inexact_reasons(plan: Plan, sketch: Sketch) -> Iterable[str]:
    return ()


def apply(split: SplitModel) -> SplitModel:
    """Add the balancer that measures speeds. Parts of a fixed ratio are applied by the data layer."""
    if split.plan.batch_split != "auto":
        return split
    return split.with_techniques(balance=BatchBalancer(split.job.batch, split.plan.ranks, split.plan.microbatches))
