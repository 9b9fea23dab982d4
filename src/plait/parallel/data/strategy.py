"""Data parallelism (dp): every rank has a replica of the model and computes a local batch.

What it does
    Each rank runs the model on its own samples. The gradient of a sum is the sum of the gradients, so the sum over the
    ranks is the gradient of the global batch. Every replica then takes the same optimizer step. Gradients are summed in
    buckets. As soon as the last micro-batch's backward has filled a bucket, the all-reduce of this bucket starts, while
    backward continues with the layers before it. On GPUs the buckets have the sizes of DistributedDataParallel's: 1 MiB
    for the first, 25 MiB for the others. Between CPU processes, every bucket has 8 MiB (`parallel/data/buckets.py`).

Picture
    rank 0   forward ──► backward ▓▓▓▓▓▓▓▓ ─► step        ▓ backward, bucket by bucket
    rank 1   forward ──► backward ▓▓▓▓▓▓▓▓ ─► step
    links                         └►░░└►░░└►░░            ░ all-reduce of a finished bucket

Costs
    Memory: nothing is saved, because every device has all parameters, gradients and optimizer state. Traffic: one
    all-reduce of the gradients per step, which is 2 (N − 1) / N times their bytes per device in a ring. Backward hides
    all of it but the last bucket.

Choose when
    The model, its gradients and its optimizer state fit on one device, and the batch has a sample for each device.

Avoid when
    They do not fit, or the local batch is so small that the all-reduce takes longer than backward.

How it stays exact
    Before backward, each micro-batch's loss is scaled by its own weight over the weight of the *global* batch. Buckets
    are summed and never averaged, so unequal local batches are exact too. A bucket has one flag per parameter: a
    parameter that no rank used gets no gradient, as on one device, and one that some ranks used gets the sum. Buckets
    start in a fixed order, so conditional branches cannot mix them up. If a short batch leaves a rank without samples,
    the rank runs a sample of another rank with weight zero. Batch normalization computes its statistics over all ranks
    (`parallel/data/batch_norm.py`).

Paper
    Li et al. 2020, PyTorch Distributed: Experiences on Accelerating Data Parallel Training (VLDB), for the buckets.
"""

from collections.abc import Iterable
from dataclasses import replace

from plait.config.errors import Problem
from plait.config.job import Job
from plait.config.keys import DATA_AXES
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.data import batch_norm
from plait.parallel.data.buckets import BucketSums, CompressedSums
from plait.parallel.mutations import list_inexact_buffers
from plait.parallel.rank_model import SplitModel
from plait.parallel.spec import REPLICA_REASON, Reduce, ShardPlan

AXIS = "dp"
EXACT = True


def is_enabled(plan: Plan) -> bool:
    return plan.along(plan.replica_axes) > 1 and plan.shards == 1 and plan.processes != "one"


def validate(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    if plan.shares > batch:
        why = f"{plan.dp} ranks, {batch} samples: {plan.dp - batch} ranks would never have a sample"
        fix = (f'--plan "dp={batch}"', f"--batch {plan.dp}")
        yield Problem("P012", f"global batch {batch} does not split over dp={plan.dp}", why=why, fix=fix)


def inexact_reasons(plan: Plan, sketch: Sketch) -> Iterable[str]:
    for name in sketch.batch_coupled:
        yield f"batch statistics in {name} are computed by a direct call, which cannot be synchronized over dp={plan.dp}"
    yield from list_inexact_buffers(plan, sketch, plan.along(plan.replica_axes))


def shard_specs(job: Job, sketch: Sketch, table: ShardPlan) -> ShardPlan:
    """Add the reduction over replicas to each parameter. Under `grad_compression` this reduction is last, so that each gradient is
    rounded once."""
    copies = Reduce(table.plan.replica_axes, "sum", REPLICA_REASON)
    last = table.plan.grad_compression != "none"
    return replace(table, specs={n: s if s.expert else s.with_reductions(copies, first=not last) for n, s in table.specs.items()})


def apply(split: SplitModel) -> SplitModel:
    copies = split.mesh.group_or_none(*split.plan.replica_axes)
    batch_norm.sync_batch_norms(split.module, split.sketch.batch_norms, split.mesh.group_or_none(*DATA_AXES), split.batch_peers)
    experts = split.list_expert_params()
    own = {n: p for n, p in split.params.items() if p.requires_grad and n not in experts}
    if split.techniques.compressor is not None:
        return split.with_techniques(sums={"": CompressedSums(own, copies, split.techniques.compressor)})
    lots = {phase.name: {n: p for n, p in own.items() if phase.has(n)} for phase in split.job.phases or ()} or {"": own}
    return split.with_techniques(sums={k: BucketSums(list(lot.values()), copies, _find_uneven(lot, split.sketch)) for k, lot in lots.items()})


def _find_uneven(names: Iterable[str], sketch: Sketch) -> set[int]:
    """Find the indices of parameters whose slices are larger on some ranks than on others."""
    uneven = {cut.parameter for cut in sketch.tp_shards if len({sum(n for _, n in held) for held in cut.ranges}) > 1}
    return {i for i, name in enumerate(names) if name in uneven}
