"""Data parallelism (dp): every device holds the whole model and computes a share of the batch.

What it does
    Each process runs the model on its own samples. The gradient of a sum is the sum of the gradients, so adding the
    processes' gradients gives the gradient of the whole batch, and every copy takes the same optimizer step. The
    gradients travel in buckets: as soon as the last micro-batch's backward has filled a bucket, its all-reduce
    starts while backward goes on with the layers before it.

Picture
    rank 0   forward ──► backward ▓▓▓▓▓▓▓▓ ─► step        ▓ backward, bucket by bucket
    rank 1   forward ──► backward ▓▓▓▓▓▓▓▓ ─► step
    links                         └►░░└►░░└►░░            ░ all-reduce of a finished bucket

Costs
    Memory: nothing is saved, every device holds parameters, gradients and optimizer state. Traffic: one all-reduce
    of the gradients per step (2 (N − 1) / N times their bytes per device in a ring), hidden behind backward but for
    the last bucket.

Choose when
    The model, its gradients and its optimizer state fit on one device and the batch has a sample for each.

Avoid when
    They do not fit (shard them), or the share of a device is so small that the all-reduce is longer than backward.

How it stays exact
    Each micro-batch's loss is scaled by its own weight over the weight of the *global* batch before backward, and
    buckets are summed, never averaged: unequal shares need no care. A bucket carries one flag per parameter, so a
    parameter that no rank used keeps no gradient, as on one device, and one that some ranks used gets the sum.
    Buckets start in a fixed order, so conditional branches cannot mix them up. A rank without a sample in a short
    batch adds zeros. Batch normalisation computes its statistics over all ranks (`batchnorm.py`).

Paper
    Li et al. 2020, PyTorch Distributed: Experiences on Accelerating Data Parallel Training (VLDB), for the buckets.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.errors import Problem
from plait.plan import Plan
from plait.sketch import Sketch
from plait.strategies import batchnorm
from plait.strategies.strategy import Charge

AXIS = "dp"
EXACT = True
BUCKET_BYTES = 8 << 20
"""Bytes of gradients per all-reduce; docs/log.md has the measurements behind it."""


def wanted(plan: Plan) -> bool:
    return plan.world > 1


def refuse(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    if plan.world > batch:
        yield Problem(
            "P012",
            f"global batch {batch} does not split over dp={plan.dp}",
            why=f"{plan.dp} ranks, {batch} samples: {plan.dp - batch} ranks would never have one",
            fix=(f'--plan "dp={batch}"', f"--batch {plan.dp}"),
        )


def inexact(plan: Plan, sketch: Sketch) -> Iterable[str]:
    for name in sketch.batch_coupled:
        yield f"batch statistics in {name} are computed by a direct call, which cannot be synchronised over dp={plan.dp}"


def apply(built: Any) -> None:
    batchnorm.synchronise(built.model, built.sketch.batch_norms, built.group)
    built.lockstep = bool(built.sketch.batch_norms or built.sketch.counting)
    built.reducer = Reducer(built.model, built.group, rider_of(built.plan))


def price(plan: Plan, sketch: Sketch, weighted: bool) -> Iterable[Charge]:
    """One all-reduce per bucket (its gradients and one flag per parameter), and what travels beside them."""
    specs = [(shape, dtype) for _, shape, dtype in sketch.parameters]
    buckets = fill(specs)
    total = sum(
        sum(_numel(specs[i][0]) for i in b) * specs[b[0]][1].itemsize + len(b) * specs[b[0]][1].itemsize
        for b in buckets
    )
    rider, tail = rider_of(plan), tail_of(specs, rider_of(plan))
    total += tail * specs[buckets[-1][0]][1].itemsize
    yield Charge(
        "traffic", "dp", "allreduce_", len(buckets), total, "sum of the gradients, and the rider in the last bucket"
    )
    if not tail:
        yield Charge(
            "traffic", "dp", "allreduce_", 1, 8 * rider, "the rider: loss, wish to stop, each rank's samples and time"
        )
    if weighted:
        yield Charge("traffic", "dp", "allreduce_", 1, 8, "weight of the global batch")
    for name in sketch.batch_norms:
        yield from batchnorm.price(name, sketch, plan.microbatches)


def fill(specs: list[tuple[tuple[int, ...], torch.dtype]]) -> list[list[int]]:
    """Indices of parameters per bucket: in reverse order (as backward finishes them), one dtype per bucket."""
    buckets: list[list[int]] = []
    size: dict[torch.dtype, int] = {}
    open_bucket: dict[torch.dtype, list[int]] = {}
    for i in reversed(range(len(specs))):
        shape, dtype = specs[i]
        if dtype not in open_bucket or size[dtype] >= BUCKET_BYTES:
            open_bucket[dtype] = []
            size[dtype] = 0
            buckets.append(open_bucket[dtype])
        open_bucket[dtype].append(i)
        size[dtype] += _numel(shape) * dtype.itemsize
    return buckets


def rider_of(plan: Plan) -> int:
    """Numbers every rank must know after a step: loss, wish to stop, and each rank's samples and busy time."""
    return 2 + 2 * plan.ranks


def tail_of(specs: list[tuple[tuple[int, ...], torch.dtype]], rider: int) -> int:
    """Elements the rider takes in the last bucket: 0 when its format cannot hold it."""
    last = specs[fill(specs)[-1][0]][1]
    return rider if last in (torch.float32, torch.float64) else 0


def _numel(shape: Iterable[int]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n


class _Bucket:
    """Gradients of some parameters in one flat tensor, one flag per parameter (did this rank use it?), and a tail."""

    def __init__(self, parameters: list[nn.Parameter], tail: int):
        self.parameters = parameters
        total = sum(p.numel() for p in parameters)
        like = parameters[0]
        self.flat = torch.zeros(total + len(parameters) + tail, dtype=like.dtype, device=like.device)
        self.flags = self.flat[total : total + len(parameters)]
        self.tail = self.flat[total + len(parameters) :]
        pieces = self.flat[:total].split([p.numel() for p in parameters])
        self.views = [piece.view(p.shape) for piece, p in zip(pieces, parameters)]
        self.waiting = len(parameters)
        self.work: Any = None


class Reducer:
    """Sums the gradients of all ranks of `group` inside the backward that follows `arm`, and a row of numbers with them.

    The row (the "rider") travels in the tail of the last bucket: a collective of its own would cost as much as a small
    model's gradients. A bucket of 16-bit parameters cannot hold it; there it goes alone.
    """

    def __init__(self, model: nn.Module, group: Any, rider: int):
        self.group = group
        parameters = [p for p in model.parameters() if p.requires_grad]
        specs = [(tuple(p.shape), p.dtype) for p in parameters]
        order, tail = fill(specs), tail_of(specs, rider)
        self.buckets = [_Bucket([parameters[i] for i in b], tail * (k == len(order) - 1)) for k, b in enumerate(order)]
        self.armed = False
        self.next = 0
        self.rider: Tensor = torch.zeros(0)
        self.alone: Any = None
        for bucket in self.buckets:
            for i, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._ready(bucket, i))

    def _ready(self, bucket: _Bucket, i: int):
        view = bucket.views[i]

        def ready(parameter: Tensor) -> None:
            gradient = parameter.grad
            if gradient is not view and gradient is not None:
                view.copy_(gradient)
                parameter.grad = view
            if self.armed:
                bucket.waiting -= 1
                if bucket.waiting == 0:
                    self._launch(complete=False)

        return ready

    def arm(self, rider: Tensor) -> None:
        """The next backward is the last of the step: start each bucket's sum as soon as it is full."""
        self.armed, self.next, self.rider, self.alone = True, 0, rider, None
        for bucket in self.buckets:
            bucket.waiting = len(bucket.parameters)
        tail = self.buckets[-1].tail
        if tail.numel():
            tail.copy_(rider)
        else:
            self.alone = dist.all_reduce(rider, group=self.group, async_op=True)

    def _launch(self, complete: bool) -> None:
        while self.next < len(self.buckets):
            bucket = self.buckets[self.next]
            if bucket.waiting and not complete:
                return
            self._flag(bucket)
            bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
            self.next += 1

    def _flag(self, bucket: _Bucket) -> None:
        bucket.flags.fill_(1.0)
        if bucket.waiting == 0:
            return
        for i, parameter in enumerate(bucket.parameters):
            if parameter.grad is None:  # unused here; others may have used it
                bucket.views[i].zero_()
                bucket.flags[i] = 0.0

    def finish(self) -> Tensor:
        """Start what is left, wait for all sums, give every parameter used anywhere its gradient; the summed rider."""
        self.armed = False
        self._launch(complete=True)
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.work = None
            if bucket.waiting:
                self._give(bucket)
        tail = self.buckets[-1].tail
        if self.alone is not None:
            self.alone.wait()
            return self.rider
        return tail.double()

    def _give(self, bucket: _Bucket) -> None:
        missing = [i for i, p in enumerate(bucket.parameters) if p.grad is None]
        used = bucket.flags.tolist() if missing else []
        for i in missing:
            if used[i] > 0:
                bucket.parameters[i].grad = bucket.views[i]
