"""Metrics over held-out data, tried before training and evaluated in it.

[Note: Evaluation]
Evaluation that does not know the layout: sums and counts over all ranks, every sample exactly once.

The evaluation set is shared out without padding, ranks add up values and their number, and one sum over the ranks
gives the mean. Averaging the ranks' means instead counts the samples of a smaller share more. Where a forward pass
gathers parameters, a rank whose share has ended runs along on a sample of another's, and its outputs are dropped.
A forward pass has as many samples as the largest micro-batch of training, so what fits in training fits here.

[Note: Trial of metrics]
The job's metrics, tried on one and on two samples before training: a mistake in them must not cost a run its end.

The model's outputs are made up: it runs in eval mode on tensors without numbers, and random numbers get the shapes that
come out. So the trial costs next to nothing, whatever the plan. Where the model cannot run so, or the metrics raise on
such numbers, its real outputs decide, of a model that a rank has whole. Where neither is to be had, nothing is said.

It also shows metrics that give one value for a batch instead of one per sample: the mean of such values depends on how
many samples come at once, so on the plan.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count as numbers
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plait.config.errors import PlaitError, Problem
from plait.config.job import user_line
from plait.data import batch as data
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
from plait.data.iterables import agree, digest, naming_samples
from plait.data.padding import Padding
from plait.model.make import BuiltModel, call
from plait.model.sketch import Sketch
from plait.model.trace import fakes_of
from plait.parallel.precision import autocast, forward_format, plan_format
from plait.parallel.rank_model import RankModel
from plait.parallel.rank_setup import RankSetup
from plait.randomness.keyed import host_kept, seed_host
from plait.tensors import opaque_code
from plait.tensors.collectives import exchange
from plait.tensors.fake import PartlyFake, emptied
from plait.tensors.float64 import proof_format
from plait.tensors.modules import evaluating
from plait.tensors.torch_private import leaves, tree_flatten, tree_map_only, tree_unflatten
from plait.tensors.transfers import move

WHERE = "Evaluate(data=…)"
MOST = 256 << 20
"""Bytes of made-up outputs. Larger ones stay without numbers, and metrics may rightly fail on those."""
CERTAIN = (NameError, AttributeError, ImportError, TypeError)
"""What metrics raise by mistake, whatever numbers they are given; the last also where there are none."""
Metrics = Callable[[Any, Any], dict[str, Any]]


def try_metrics(setup: RankSetup, sketch: Sketch, made: BuiltModel) -> None:
    """Try the metrics of a rank's job, whose model is whole still. J024, J025, J007."""
    wanted = setup.job.evaluate
    if wanted is None:
        return
    try:
        with host_kept():
            seed_host(setup.job.seed, "evaluate", 0)
            held = data.example(wanted.data, data.opened(wanted.data, WHERE), WHERE)
            pairs = [setup.moved(data.first_samples(held, n)) for n in (1, 2)]
            with torch.no_grad(), forward_format(setup.plan, setup.cast, setup.at.type):
                counts = _Trial(setup, made, wanted.metrics, pairs, runs_hollow=not sketch.by_values).counts()
    except PlaitError as error:
        raise PlaitError([replace(p, where=p.where or WHERE) for p in error.problems], error.exit_code) from error
    means = [name for name, n in counts[0].items() if 0 < n == counts[1].get(name)] if counts else []
    if means:
        raise PlaitError(_one_for_all(means[0], counts[0][means[0]], wanted.metrics))


class _Trial:
    """The metrics of one and of two samples (inputs, targets), the second the first once more."""

    def __init__(self, setup: RankSetup, made: BuiltModel, metrics: Metrics, pairs: list[Pair], runs_hollow: bool):
        self.setup, self.made, self.metrics, self.pairs, self.runs_hollow = setup, made, metrics, pairs, runs_hollow
        self.fakes, self.hollow = fakes_of(made.fake), False

    def counts(self) -> list[dict[str, int]]:
        """How many values each metric has, of one and of two samples; nothing when it cannot be tried."""
        outputs = self._made_up() if self.runs_hollow else None
        failure: Exception | None = None
        if outputs is not None:
            try:
                with PartlyFake(self.fakes) if self.hollow else nullcontext():
                    return self._of(outputs)
            except PlaitError:
                raise
            except Exception as error:
                failure = error
        real = None if self.hollow else self._real()
        if real is not None:
            try:
                return self._of(real)
            except PlaitError:
                raise
            except Exception as error:
                raise _raised(error) from error
        if isinstance(failure, CERTAIN[:-1] if self.hollow else CERTAIN):
            raise _raised(failure) from failure
        return []

    def _of(self, outputs: list[Any]) -> list[dict[str, int]]:
        pairs = zip(outputs, self.pairs)
        return [{n: v.numel() for n, v in named(self.metrics(o, t), self.metrics).items()} for o, (_, t) in pairs]

    def _made_up(self) -> list[Any] | None:
        """Random numbers in the shapes that the model returns; None when it does not run on tensors without numbers."""
        fakes = self.fakes
        hide = lambda t: fakes.from_tensor(t) if t.is_floating_point() else t  # noqa: E731
        try:
            model = emptied(self.made.fake, fakes).eval()
            with PartlyFake(fakes), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                hollow = [self.setup.call(model, tree_map_only(Tensor, hide, inputs)) for inputs, _ in self.pairs]
            (one, form), (two, other) = map(_flat, hollow)
            self.hollow = sum(t.nbytes for t in two if isinstance(t, Tensor)) > MOST
            if self.hollow:
                return hollow
            first = [self._numbers(t) for t in one]
            second = [_twice(t, like) for t, like in zip(first, two, strict=True)]
        except Exception:
            return None
        return [tree_unflatten(first, form), tree_unflatten(second, other)]

    def _numbers(self, t: object) -> Any:
        if not isinstance(t, Tensor):
            return t
        made = torch.rand(t.shape) if t.is_floating_point() else torch.zeros(t.shape)
        return made.to(self.setup.at, t.dtype)

    def _real(self) -> list[Any] | None:
        """What the model returns, where this rank has all of it; None when it has not, or when the model raises."""
        model = self.made.model
        if self.made.fake is not model or any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            return None
        try:
            with unchanged(model):
                return [self.setup.call(model, inputs) for inputs, _ in self.pairs]
        except Exception:
            return None


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """In eval mode; afterwards modes and buffers are what they were."""
    buffers = [(b, b.clone()) for b in model.buffers()]
    try:
        with evaluating(model):
            yield
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)


def _flat(outputs: object) -> tuple[list[Any], Any]:
    leaves(outputs)  # makes trees of dataclasses
    return tree_flatten(outputs)


def _twice(one: object, like: object) -> Any:
    """What is returned for two samples that are alike: that of one, twice along the dim that has grown."""
    if not isinstance(one, Tensor) or not isinstance(like, Tensor) or one.shape == like.shape:
        return one
    grown = [d for d, (a, b) in enumerate(zip(one.shape, like.shape)) if a != b]
    if one.dim() == like.dim() and len(grown) == 1 and like.shape[grown[0]] == 2 * one.shape[grown[0]]:
        return torch.cat([one, one], grown[0])
    raise NotImplementedError


def named(returned: object, metrics: Metrics) -> dict[str, Tensor]:
    """What metrics returned: a dict of values. J024 when it is something else."""
    fix = ('return {"error": (outputs - targets).abs()}    a dict, with one value per sample (or per token)',)
    if not isinstance(returned, dict):
        what = f"the job's metrics return {_told(returned)}, not a dict"
        raise PlaitError(Problem("J024", what, where=line_of(metrics), fix=fix))
    found = {}
    for name, values in returned.items():
        try:
            found[str(name)] = torch.as_tensor(values)
        except (TypeError, ValueError, RuntimeError) as error:
            what = f"the job's metric {name!r} is {_told(values)}, not a tensor"
            raise PlaitError(Problem("J024", what, where=line_of(metrics), fix=fix)) from error
    return found


def _told(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _raised(error: Exception) -> PlaitError:
    what = f"the job's metrics raise {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    why = "they were tried on one sample before training: the first evaluation would have ended the run"
    return PlaitError(Problem("J024", what, why=why, where=user_line(error)))


def _one_for_all(name: str, count: int, metrics: Metrics) -> Problem:
    what = f"the job's metric {name!r} has as many values for two samples as for one: {count}"
    why = "it is a mean or a sum over the samples that come at once, and how many come depends on the plan"
    fix = ('one value per sample: leave out .mean(), .sum() or .item(); reduction="none" in torch\'s losses',)
    return Problem("J025", what, why=why, where=line_of(metrics), fix=fix)


def line_of(function: Callable[..., Any]) -> str:
    """file:line of a function of the user's own."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


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
        data = opened(job.evaluate.data, WHERE)
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
    for name, values in named(returned, metrics).items():
        values = values.to(rank_model.device, torch.float64, non_blocking=True)
        found[name] = torch.stack([values.sum(), values.new_full((), values.numel())])
    return found


def first_forward(rank_model: RankModel, ready: Callable[[Any], Any]) -> None:
    """The first and largest forward pass of an evaluation, and its metrics: for a dry run, which fits what `ready` gives."""
    assert rank_model.job.evaluate is not None
    wanted = rank_model.job.evaluate.data
    count = forward_size(rank_model)
    pair = first_samples(example(wanted, opened(wanted, WHERE), WHERE), count)
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
                agree(read, digest([s for s, _ in everyone]), group, WHERE)
            if not everyone:
                break
            samples = [s for s, mine in everyone if mine]
            yield collate(data, samples or [everyone[0][0]]), len(samples)
        if not read:
            raise empty("the iterable ended without a sample", WHERE)

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
                    agree(start + size, digest(list(around.values())), padding.group, WHERE)
            if size == 0 and start == 0:
                raise empty("the iterable ended without a sample", WHERE)
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
