"""What each micro-batch of a step weighs in the loss of the global batch, and which of them a rank runs."""

import math
from typing import Protocol

import torch
import torch.distributed as dist

from plait.checkpoint.carried_state import Training
from plait.config.errors import PlaitError, Problem
from plait.config.job import Job
from plait.config.keys import OTHER_SAMPLES
from plait.data.batch import Batch, BatchShare, weigh
from plait.tensors.collectives import host_or


class SharesBatch(Training, Protocol):
    """A training of which every rank computes a share of the batch."""

    @property
    def share(self) -> BatchShare:
        ...


def weights_of(job: Job, batch: Batch) -> list[float]:
    """The weight of each of this rank's micro-batches: its number of samples, or what `Job.weight` counts in it."""
    return [weigh(job.weight, micro) for micro in batch.micro]


def run_here(share: BatchShare, batch: Batch, weights: list[float]) -> list[int]:
    """Numbers of the micro-batches that this rank runs: as many as the rank with most samples, because a forward pass may
    communicate, change buffers or count its calls. A rank without samples for one runs another rank's, with weight zero."""
    most = batch.most or max(share.sizes(batch.size))  # of so many samples, the first parts have one each
    return [i for i, w in enumerate(weights) if w or i < most]


def total_weight(training: SharesBatch, batch: Batch, weights: list[float]) -> float:
    """Weight of the global batch. Without `Job.weight` it is its number of samples, and nothing is sent. J009 if it is not positive.

    In a step that replica groups make on their own: what makes the mean of the groups' losses that of the batch, when all samples
    weigh the same, without a message between groups: a group's weight × size / (groups × its samples). It is 0 without a sample.
    """
    plan, rare, size = training.plan, training.rank_model.techniques.replica_groups, training.share.of_group(batch.size)[1]
    on_its_own = rare is not None and not rare.sums(batch.after.step)
    if training.job.weight is None:
        return batch.size / (plan.replica_groups if on_its_own else 1) if size else 0.0
    total = torch.tensor(sum(weights), dtype=torch.float64)
    if plan.ranks > 1:
        peers = training.rank_model.mesh.group(*OTHER_SAMPLES)
        total = total.to(host_or(training.rank_model.device, peers))
        dist.all_reduce(total, group=peers)
    if on_its_own:
        return float(total) * batch.size / (plan.replica_groups * size) if size else 0.0
    if rare is not None:
        rare.total(total)
    if not 0 < float(total) < math.inf:
        raise PlaitError(Problem("J009", f"the weights of step {batch.position.step + 1} sum to {float(total)}",
                                 why="Job.weight counts nothing in the whole batch, so its mean loss is 0 / 0"))  # fmt: skip
    return float(total)
