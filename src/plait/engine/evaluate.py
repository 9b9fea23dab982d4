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
from plait.data.iterables import agree, digest
from plait.data.padding import Padding
from plait.data.sample_errors import naming_samples
from plait.engine import try_metrics
from plait.engine.build import move
from plait.model.make import call
from plait.parallel.built import Built
from plait.parallel.precision import autocast, plan_format
from plait.randomness.keyed import seed_host
from plait.tensors import higher_order
from plait.tensors.collectives import exchange
from plait.tensors.float64 import proof_format
from plait.tensors.modules import evaluating

_ENDED = object()
Share = tuple[tuple[object, object], int]


def evaluate(built: Built) -> dict[str, float]:
    """The mean of each of the job's metrics over its evaluation set; {} when it has none. All ranks call it."""
    job, place = built.job, built.place
    if job.evaluate is None:
        return {}
    sums: dict[str, Tensor] = {}
    size, share = forward_size(built), share_now(built)
    together = built.shards is not None or built.plan.ep > 1
    with forward_only(built):
        data = opened(job.evaluate.data, try_metrics.WHERE)
        share = replace(share, microbatches=-(-max(share.sizes(job.batch)) // size))
        held_out = HeldOut(data, job.seed, share, lambda: place.within("evaluation data"))
        if hasattr(data, "collate"):
            shares = held_out.padded(job.batch, Padding(data, built.group))
        else:
            shares = held_out.in_order(size, built.group)
        for pair, count in place.waiting_for(shares):
            place.within("evaluate")
            if not count and not together:
                continue
            for name, row in _sums(built, pair, count).items():
                sums[name] = sums[name] + row if name in sums else row
    return _means(built, sums)


def share_now(built: Built) -> BatchShare:
    """This rank's share of samples, at the present parts."""
    plan, group = built.plan, built.plan.at(built.place.rank)["replica_groups"]
    share = BatchShare.of(plan, plan.share(built.place.rank))
    if plan.replica_groups > 1:  # all of them share out the samples, as if they were one
        groups = plan.replica_groups
        share = replace(
            share,
            rank=group * plan.ranks + share.rank,
            ranks=groups * plan.ranks,
            parted=share.parted * groups,
            groups=1,
        )
    return share if built.balance is None else replace(share, parted=built.balance.course.last[1])


def forward_size(built: Built) -> int:
    """Samples that a forward pass of training has on every rank: those of the smallest share's largest micro-batch."""
    job, plan, share = built.job, built.plan, share_now(built)
    if not share.uneven:
        return largest(job.batch, plan.shares * plan.replica_groups, plan.microbatches)
    return largest(min(share.sizes(job.batch)), 1, plan.microbatches)


def _sums(built: Built, pair: tuple[Any, Any], count: int) -> dict[str, Tensor]:
    """Of a batch with `count` samples that are this rank's: each metric's sum and number of values."""
    assert built.job.evaluate is not None
    built.inputs.begin([pair])
    inputs, targets = move(built.inputs.take(pair), built.device, built.cast)
    built.sharers.begin(idle=not count)
    with proof_format(built.cast):
        outputs, here = outputs_here(built, inputs, count or 1)
    if not (count and here):
        return {}
    metrics, found = built.job.evaluate.metrics, dict[str, Tensor]()
    with proof_format(built.cast):
        returned = metrics(outputs, targets)
    if built.pipe is not None:
        built.pipe.stages.look(returned, "metrics")
    for name, values in try_metrics.named(returned, metrics).items():
        values = values.to(built.device, torch.float64, non_blocking=True)
        found[name] = torch.stack([values.sum(), values.new_full((), values.numel())])
    return found


def first_forward(built: Built, ready: Callable[[Any], Any]) -> None:
    """The first and largest forward pass of an evaluation, and its metrics: for a dry run, which fits what `ready` gives."""
    assert built.job.evaluate is not None
    wanted = built.job.evaluate.data
    count = forward_size(built)
    pair = first_samples(example(wanted, opened(wanted, try_metrics.WHERE), try_metrics.WHERE), count)
    with forward_only(built):
        _sums(built, ready(pair), count)


@contextmanager
def forward_only(built: Built) -> Iterator[None]:
    """In eval mode, without gradients, in the number format of training."""
    precision = autocast(built.device.type, plan_format(built.plan))
    with evaluating(built.model), torch.no_grad(), higher_order.opaque(), precision:
        yield


def outputs_here(built: Built, inputs: object, samples: int) -> tuple[Any, bool]:
    """The model's outputs, and whether this rank has them: in a pipeline the last stage does."""
    if built.pipe is None:
        return call(built.model, inputs), True
    return built.pipe.forward_only(inputs, samples, lambda: call(built.model, inputs))


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


def _means(built: Built, sums: dict[str, Tensor]) -> dict[str, float]:
    if built.group is not None:
        told = exchange("\n".join(sums).encode(), built.group, torch.device("cpu"))  # of hosts: no device is waited for
        names = max(told, key=len).decode().split("\n")  # a rank without samples, or without the outputs, has none
        nothing = torch.zeros(2, dtype=torch.float64, device=built.device)
        rows = torch.stack([sums.get(name, nothing) for name in names])
        dist.all_reduce(rows, group=built.group)
        sums = dict(zip(names, rows))
    means = [row[0] / row[1] for row in sums.values()]
    return dict(zip(sums, torch.stack(means).tolist())) if means else {}
