"""Gradient accumulation (microbatches): a local batch is computed in parts, with one optimizer step for all of them.

What it does
    Each rank splits its local batch into m micro-batches, and runs forward and backward on one after the other.
    Gradients are accumulated in place. Only the last backward reduces them over the ranks.

Picture
    rank 0   F0 B0 F1 B1 F2 B2▓ ─► step        ▓ gradients are summed over the ranks in the last backward only
    rank 1   F0 B0 F1 B1 F2 B2▓ ─► step

Costs
    Memory: activations of one micro-batch instead of the full local batch. Time: matrix products are smaller, and the
    launch overhead is m times as large. Traffic: that of one step.

Choose when
    The activations of the full local batch do not fit.

Avoid when
    They fit: a larger matrix product is faster.

How it stays exact
    A micro-batch's loss is a mean over its own weight. It is scaled by that weight over the weight of the global batch.
    The mean of the micro-batches' means would be wrong if they are unequal (a short batch, masked tokens). Batch
    statistics are the exception: a layer that normalizes over the batch sees one micro-batch at a time.

    Dynamic padding is that of the global batch. A micro-batch with shorter samples is collated together with the
    batch's longest sample, whose row is then dropped (`data/padding.py`). So dropout, and all other code that reads
    padded positions, gets the same padding as on one device. The micro-batch also computes this padding. plait does not change
    a `collate` that sorts, packs, crops or draws random numbers, and reports it if the model draws random numbers.

Paper
    Ott et al. 2018, Scaling Neural Machine Translation.
"""

from collections.abc import Iterable

from plait.config.errors import Problem
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.rank_model import SplitModel

AXIS = None
EXACT = True


def is_enabled(plan: Plan) -> bool:
    return plan.microbatches > 1


def validate(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    smallest = batch // plan.shares
    if plan.microbatches > smallest >= 1:
        what = f"a local batch of {smallest} samples does not split into {plan.microbatches} micro-batches"
        why = f"batch {batch} / {plan.shares} local batches = {batch / plan.shares:.4g} samples each"
        fix = (f"microbatches={smallest}", f"--batch {plan.microbatches * plan.shares}")
        yield Problem("P014", what, why=why, fix=fix)


def inexact_reasons(plan: Plan, sketch: Sketch) -> Iterable[str]:
    for name in (*sketch.batch_norms, *sketch.batch_coupled):
        yield f"batch statistics in {name} are computed per micro-batch ({plan.microbatches} per step), not over the batch"
    changing = [f"buffer {name}" for name in sketch.changed_buffers] + [f"weight {name}" for name in sketch.rewritten]
    changing += [f"a tensor outside of the model that receives {name}" for name in sketch.outside_writes]
    for name in changing:
        yield f"{name} changes in every forward pass, and a step has {plan.microbatches} forward passes"


def apply(split: SplitModel) -> SplitModel:
    """Return `split` unchanged: the engine runs the micro-batches that the data layer makes."""
    return split
