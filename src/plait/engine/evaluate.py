"""Evaluation that does not know the layout: sums and counts over all ranks, every sample exactly once.

The evaluation set is shared out without padding, ranks add up values and their number, and one sum over the ranks
gives the mean. Averaging the ranks' means instead counts the samples of a smaller share more. Where a forward pass
gathers parameters, a rank whose share has ended runs along on a sample of another's, and its outputs are dropped.
A forward pass has as many samples as the largest micro-batch of training, so what fits in training fits here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count as numbers
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.data.batch import (
    BatchShare,
    Data,
    MapStyle,
    collate,
    empty,
    example,
    first_samples,
    is_map,
    largest,
    opened,
    part,
)
from plait.data.batch_rows import Pair
from plait.data.iterables import agree, digest
from plait.data.padding import Padding
from plait.data.sample_errors import naming_samples
from plait.engine import try_metrics
from plait.model.make import call
from plait.parallel.precision import autocast, plan_format
from plait.parallel.rank_model import RankModel
from plait.randomness.keyed import seed_host
from plait.tensors import opaque_code
from plait.tensors.collectives import exchange
from plait.tensors.float64 import proof_format
from plait.tensors.modules import evaluating
from plait.tensors.transfers import move

_ENDED = object()
Share = tuple[tuple[object, object], int]


def evaluate(rank_model: RankModel) -> dict[str, float]:
    """The mean of each of the job's metrics over its evaluation set; {} when it has none. All ranks call it."""
    job, place = rank_model.job, rank_model.setup.place
    if job.evaluate is None:
        return {}
    sums: dict[str, Tensor] = {}
    size, share = forward_size(rank_model), share_now(rank_model)
    together = rank_model.techniques.shards is not None or rank_model.plan.ep > 1
    with forward_only(rank_model):
        data = opened(job.evaluate.data, try_metrics.WHERE)
        share = replace(share, microbatches=-(-max(share.sizes(job.batch)) // size))
        held_out = HeldOut(data, job.seed, share, lambda: place.within("evaluation data"))
        if hasattr(data, "collate"):
            shares = held_out.padded(job.batch, Padding(data, rank_model.mesh.everyone))
        else:
            shares = held_out.in_order(size, rank_model.mesh.everyone)
        for pair, count in place.waiting_for(shares):
            place.within("evaluate")
            if not count and not together:
                continue
            for name, row in _sums(rank_model, pair, count).items():
                sums[name] = sums[name] + row if name in sums else row
    return _means(rank_model, sums)


def share_now(rank_model: RankModel) -> BatchShare:
    """This rank's share of samples, at the present parts."""
    plan, group = rank_model.plan, rank_model.plan.at(rank_model.setup.place.rank)["replica_groups"]
    share = BatchShare.of(plan, plan.share(rank_model.setup.place.rank))
    if plan.replica_groups > 1:  # all of them share out the samples, as if they were one
        groups = plan.replica_groups
        share = replace(
            share,
            rank=group * plan.ranks + share.rank,
            ranks=groups * plan.ranks,
            parted=share.parted * groups,
            groups=1,
        )
    return share if rank_model.techniques.balance is None else replace(share, parted=rank_model.techniques.balance.course.last[1])


def forward_size(rank_model: RankModel) -> int:
    """Samples that a forward pass of training has on every rank: those of the smallest share's largest micro-batch."""
    job, plan, share = rank_model.job, rank_model.plan, share_now(rank_model)
    if not share.uneven:
        return largest(job.batch, plan.shares * plan.replica_groups, plan.microbatches)
    return largest(min(share.sizes(job.batch)), 1, plan.microbatches)


def _sums(rank_model: RankModel, pair: Pair, count: int) -> dict[str, Tensor]:
    """Of a batch with `count` samples that are this rank's: each metric's sum and number of values."""
    assert rank_model.job.evaluate is not None
    rank_model.setup.inputs.begin([pair])
    inputs, targets = move(rank_model.setup.inputs.take(pair), rank_model.device, rank_model.setup.cast)
    rank_model.batch_peers.begin(idle=not count)
    with proof_format(rank_model.setup.cast):
        outputs, here = outputs_here(rank_model, inputs, count or 1)
    if not (count and here):
        return {}
    metrics, found = rank_model.job.evaluate.metrics, dict[str, Tensor]()
    with proof_format(rank_model.setup.cast):
        returned = metrics(outputs, targets)
    if rank_model.techniques.pipeline is not None:
        rank_model.techniques.pipeline.stages.look(returned, "metrics")
    for name, values in try_metrics.named(returned, metrics).items():
        values = values.to(rank_model.device, torch.float64, non_blocking=True)
        found[name] = torch.stack([values.sum(), values.new_full((), values.numel())])
    return found


def first_forward(rank_model: RankModel, ready: Callable[[Any], Any]) -> None:
    """The first and largest forward pass of an evaluation, and its metrics: for a dry run, which fits what `ready` gives."""
    assert rank_model.job.evaluate is not None
    wanted = rank_model.job.evaluate.data
    count = forward_size(rank_model)
    pair = first_samples(example(wanted, opened(wanted, try_metrics.WHERE), try_metrics.WHERE), count)
    with forward_only(rank_model):
        _sums(rank_model, ready(pair), count)


@contextmanager
def forward_only(rank_model: RankModel) -> Iterator[None]:
    """In eval mode, without gradients, in the number format of training."""
    precision = autocast(rank_model.device.type, plan_format(rank_model.plan))
    with evaluating(rank_model.module), torch.no_grad(), opaque_code.opaque(), precision:
        yield


def outputs_here(rank_model: RankModel, inputs: object, samples: int) -> tuple[Any, bool]:
    """The model's outputs, and whether this rank has them: in a pipeline the last stage does."""
    if rank_model.techniques.pipeline is None:
        return call(rank_model.module, inputs), True
    return rank_model.techniques.pipeline.forward_only(inputs, samples, lambda: call(rank_model.module, inputs))


@dataclass(frozen=True)
class HeldOut:
    """Held-out data, as a rank reads it: its share of each batch, and how many of the samples are its own.

    None are its own where a batch is only there to make up the number of batches, which is the same on all ranks.
    """

    data: Data
    seed: int
    share: BatchShare
    reads: Callable[[], None]
    """Called before each sample."""

    def in_order(self, batch: int, group: ProcessGroup | None) -> Iterator[Share]:
        """This rank's part of the data, in order, every sample on exactly one rank."""
        data, share = self.data, self.share
        if is_map(data):
            held = share.sizes(len(data))
            first, count = sum(held[: share.rank]), held[share.rank]
            for offset in range(0, max(held), batch):
                ids = range(first + offset, first + min(offset + batch, count))
                yield collate(data, [self._read(data, i) for i in ids or [0]]), len(ids)
            return
        source, read = enumerate(self._keyed()), 0
        while True:
            everyone = [(s, i % share.ranks == share.rank) for i, s in islice(source, batch * share.ranks)]
            read += len(everyone)
            if group is not None:
                agree(read, digest([s for s, _ in everyone]), group, try_metrics.WHERE)
            if not everyone:
                break
            samples = [s for s, mine in everyone if mine]
            yield collate(data, samples or [everyone[0][0]]), len(samples)
        if not read:
            raise empty("the iterable ended without a sample", try_metrics.WHERE)

    def padded(self, batch: int, padding: Padding) -> Iterator[Share]:
        """Of data with a `collate`: batches of as many samples as a step has, each shared out as in training and padded to
        the longest sample of the batch."""
        data, source, start = self.data, self._keyed(), 0
        while True:
            if is_map(data):
                size, fetch = min(batch, len(data) - start), partial(self._read, data)
            else:
                around = dict(enumerate(islice(source, batch), start))
                size, fetch = len(around), around.__getitem__
                if padding.group is not None:
                    agree(start + size, digest(list(around.values())), padding.group, try_metrics.WHERE)
            if size == 0 and start == 0:
                raise empty("the iterable ended without a sample", try_metrics.WHERE)
            if size == 0:
                return
            micros = []
            for first, count in self.share.parts(size):
                ids = list(range(start + first, start + first + count))
                micros.append(part(data, [fetch(i) for i in ids or [start]], first, ids))
            most = max(self.share.sizes(size))  # of so many samples, the first parts have one each
            for i, micro in enumerate(padding.alike(micros, fetch)):
                if i < most:
                    yield (micro.inputs, micro.targets), micro.count
            start += size

    def _read(self, data: MapStyle, i: int) -> object:
        self.reads()
        seed_host(self.seed, "evaluate", i)
        with naming_samples([i], "of Job.evaluate"):
            return data[i]

    def _keyed(self) -> Iterator[object]:
        """Samples of an iterable, the host generators seeded before each."""
        seed_host(self.seed, "evaluate")
        source = iter(self.data)
        for i in numbers():
            self.reads()
            seed_host(self.seed, "evaluate", i)
            with naming_samples([i], "of Job.evaluate"):
                sample = next(source, _ENDED)
            if sample is _ENDED:
                return
            yield sample


def _means(rank_model: RankModel, sums: dict[str, Tensor]) -> dict[str, float]:
    if rank_model.mesh.everyone is not None:
        told = exchange("\n".join(sums).encode(), rank_model.mesh.everyone, torch.device("cpu"))  # of hosts: no device is waited for
        names = max(told, key=len).decode().split("\n")  # a rank without samples, or without the outputs, has none
        nothing = torch.zeros(2, dtype=torch.float64, device=rank_model.device)
        rows = torch.stack([sums.get(name, nothing) for name in names])
        dist.all_reduce(rows, group=rank_model.mesh.everyone)
        sums = dict(zip(names, rows))
    means = [row[0] / row[1] for row in sums.values()]
    return dict(zip(sums, torch.stack(means).tolist())) if means else {}
