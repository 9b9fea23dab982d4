"""Metrics over held-out data: tried before training, and computed during training.

[Note: Evaluation]
Evaluation is independent of the parallel layout: sums and counts are reduced over all ranks, and every sample counts exactly once.

The evaluation set is split across ranks without padding. Ranks add up values and counts, and one all-reduce gives the mean. Averaging
the means of ranks would overweight samples of ranks with fewer. If a forward pass gathers parameters, a rank without remaining
samples runs along on a sample of another rank and drops the outputs. A forward pass has as many samples as the largest micro-batch of
training, so evaluation needs no more memory than training.

[Note: Trial of metrics]
The job's metrics are tried on one and on two samples before training, so that a mistake in them does not end a long run.

The model runs in eval mode on fake tensors, and its outputs are replaced by random values of the same shapes. So the trial costs
almost nothing under any plan. If the model cannot run on fake tensors, or the metrics raise on random values, the real outputs of an
unsharded model decide. If neither is available, the trial reports nothing.

The trial also detects metrics that return one value per batch instead of one per sample. The mean of such values depends on the batch
size, and so on the plan.
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
from plait.config.job import find_user_line
from plait.data import batch as data
from plait.data.batch import (
    BatchShare,
    Data,
    MapStyle,
    collate,
    empty_data_error,
    is_map,
    make_micro_batch,
    make_sketch_batch,
    max_micro_batch_size,
    open_data,
    open_first_sample,
)
from plait.data.batch_rows import Pair
from plait.data.iterables import agree_on_samples, digest_samples, name_failing_samples
from plait.data.padding import BatchPadder
from plait.model.build_model import BuiltModel, run_model
from plait.model.sketch import Sketch
from plait.model.trace import get_fake_mode
from plait.parallel.precision import find_autocast_dtype, make_autocast, make_forward_context
from plait.parallel.rank_model import RankModel
from plait.parallel.rank_setup import RankSetup
from plait.randomness.keyed import preserve_host_state, seed_host
from plait.tensors import opaque_code
from plait.tensors.collectives import all_gather_bytes
from plait.tensors.fake import PartlyFakeMode, make_fake_copy
from plait.tensors.float64 import use_proof_dtype
from plait.tensors.module_state import use_eval_mode
from plait.tensors.torch_private import dataclass_leaves, tree_flatten, tree_map_only, tree_unflatten
from plait.tensors.transfers import move_tree

DATA_ARGUMENT = "Evaluate(data=…)"
MAX_FAKE_BYTES = 256 << 20
"""Maximum bytes of random outputs. Larger outputs stay fake, and metrics may legitimately fail on those."""
USER_ERRORS = (NameError, AttributeError, ImportError, TypeError)
"""Exceptions that indicate a mistake in the metrics for any input; the last also occurs on fake tensors."""
Metrics = Callable[[Any, Any], dict[str, Any]]


def try_metrics(setup: RankSetup, sketch: Sketch, made: BuiltModel) -> None:
    """Try the metrics of a rank's job while its model is unsharded. J024, J025, J007."""
    wanted = setup.job.evaluate
    if wanted is None:
        return
    try:
        with preserve_host_state():
            seed_host(setup.job.seed, "evaluate", 0)
            held = data.open_first_sample(wanted.data, data.open_data(wanted.data, DATA_ARGUMENT), DATA_ARGUMENT)
            pairs = [setup.move_tree(data.make_sketch_batch(held, n)) for n in (1, 2)]
            with torch.no_grad(), make_forward_context(setup.plan, setup.cast, setup.model_device.type):
                counts = _MetricTrial(setup, made, wanted.metrics, pairs, can_run_fake=not sketch.needs_real_tensors).count_values()
    except PlaitError as error:
        raise PlaitError([replace(p, where=p.where or DATA_ARGUMENT) for p in error.problems], error.exit_code) from error
    means = [name for name, n in counts[0].items() if 0 < n == counts[1].get(name)] if counts else []
    if means:
        raise PlaitError(_make_mean_problem(means[0], counts[0][means[0]], wanted.metrics))


class _MetricTrial:
    """The metrics on one and on two samples (inputs, targets); the second sample repeats the first."""

    def __init__(self, setup: RankSetup, made: BuiltModel, metrics: Metrics, pairs: list[Pair], can_run_fake: bool):
        self.setup, self.made, self.metrics, self.pairs, self.can_run_fake = setup, made, metrics, pairs, can_run_fake
        self.fakes, self.are_fake = get_fake_mode(made.fake), False

    def count_values(self) -> list[dict[str, int]]:
        """Count the values of each metric for one and for two samples; empty if the metrics cannot be tried."""
        outputs = self._make_fake_outputs() if self.can_run_fake else None
        failure: Exception | None = None
        if outputs is not None:
            try:
                with PartlyFakeMode(self.fakes) if self.are_fake else nullcontext():
                    return self._apply_metrics(outputs)
            except PlaitError:
                raise
            except Exception as error:
                failure = error
        real = None if self.are_fake else self._run_model()
        if real is not None:
            try:
                return self._apply_metrics(real)
            except PlaitError:
                raise
            except Exception as error:
                raise _make_metrics_error(error) from error
        if isinstance(failure, USER_ERRORS[:-1] if self.are_fake else USER_ERRORS):
            raise _make_metrics_error(failure) from failure
        return []

    def _apply_metrics(self, outputs: list[Any]) -> list[dict[str, int]]:
        pairs = zip(outputs, self.pairs)
        return [{n: v.numel() for n, v in parse_metrics(self.metrics(o, t), self.metrics).items()} for o, (_, t) in pairs]

    def _make_fake_outputs(self) -> list[Any] | None:
        """Make random values in the shapes that the model returns; None if the model does not run on fake tensors."""
        fakes = self.fakes
        hide = lambda t: fakes.from_tensor(t) if t.is_floating_point() else t  # noqa: E731
        try:
            model = make_fake_copy(self.made.fake, fakes).eval()
            with PartlyFakeMode(fakes), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                hollow = [self.setup.call(model, tree_map_only(Tensor, hide, inputs)) for inputs, _ in self.pairs]
            (one, form), (two, other) = map(_flatten_outputs, hollow)
            self.are_fake = sum(t.nbytes for t in two if isinstance(t, Tensor)) > MAX_FAKE_BYTES
            if self.are_fake:
                return hollow
            first = [self._make_random(t) for t in one]
            second = [_double_samples(t, like) for t, like in zip(first, two, strict=True)]
        except Exception:
            return None
        return [tree_unflatten(first, form), tree_unflatten(second, other)]

    def _make_random(self, t: object) -> Any:
        if not isinstance(t, Tensor):
            return t
        made = torch.rand(t.shape) if t.is_floating_point() else torch.zeros(t.shape)
        return made.to(self.setup.model_device, t.dtype)

    def _run_model(self) -> list[Any] | None:
        """Return the real outputs of the model; None if this rank does not have the full model, or if it raises."""
        model = self.made.model
        if self.made.fake is not model or any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            return None
        try:
            with restore_after_eval(model):
                return [self.setup.call(model, inputs) for inputs, _ in self.pairs]
        except Exception:
            return None


@contextmanager
def restore_after_eval(model: nn.Module) -> Iterator[None]:
    """Run the model in eval mode within this context; restore modes and buffers afterwards."""
    buffers = [(b, b.clone()) for b in model.buffers()]
    try:
        with use_eval_mode(model):
            yield
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)


def _flatten_outputs(outputs: object) -> tuple[list[Any], Any]:
    dataclass_leaves(outputs)  # registers dataclasses as pytrees
    return tree_flatten(outputs)


def _double_samples(one: object, like: object) -> Any:
    """Make the output for two equal samples from that for one: repeat it along the dim that has grown."""
    if not isinstance(one, Tensor) or not isinstance(like, Tensor) or one.shape == like.shape:
        return one
    grown = [d for d, (a, b) in enumerate(zip(one.shape, like.shape)) if a != b]
    if one.dim() == like.dim() and len(grown) == 1 and like.shape[grown[0]] == 2 * one.shape[grown[0]]:
        return torch.cat([one, one], grown[0])
    raise NotImplementedError


def parse_metrics(returned: object, metrics: Metrics) -> dict[str, Tensor]:
    """Convert the result of the metrics to a dict of tensors. J024 if it is not a dict of values."""
    fix = ('return {"error": (outputs - targets).abs()}    a dict, with one value per sample (or per token)',)
    if not isinstance(returned, dict):
        what = f"the job's metrics return {_describe_value(returned)}, not a dict"
        raise PlaitError(Problem("J024", what, where=find_source_line(metrics), fix=fix))
    found = {}
    for name, values in returned.items():
        try:
            found[str(name)] = torch.as_tensor(values)
        except (TypeError, ValueError, RuntimeError) as error:
            what = f"the job's metric {name!r} is {_describe_value(values)}, not a tensor"
            raise PlaitError(Problem("J024", what, where=find_source_line(metrics), fix=fix)) from error
    return found


def _describe_value(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _make_metrics_error(error: Exception) -> PlaitError:
    what = f"the job's metrics raise {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    why = "plait tried them on one sample before training, since an error in the first evaluation would end the run"
    return PlaitError(Problem("J024", what, why=why, where=find_user_line(error)))


def _make_mean_problem(name: str, count: int, metrics: Metrics) -> Problem:
    what = f"the job's metric {name!r} has as many values for two samples as for one: {count}"
    why = "it is a mean or a sum over the batch, and the batch size per rank depends on the plan"
    fix = ('return one value per sample: remove .mean(), .sum() or .item(); use reduction="none" in torch\'s losses',)
    return Problem("J025", what, why=why, where=find_source_line(metrics), fix=fix)


def find_source_line(function: Callable[..., Any]) -> str:
    """Return file:line of a function in the user's code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


_ENDED = object()
EvalBatch = tuple[tuple[object, object], int]


def evaluate(rank_model: RankModel) -> dict[str, float]:
    """Return the mean of each of the job's metrics over its evaluation set; {} if there is none. All ranks call it."""
    job, place = rank_model.job, rank_model.setup.place
    if job.evaluate is None:
        return {}
    sums: dict[str, Tensor] = {}
    size, share = get_forward_size(rank_model), get_current_share(rank_model)
    together = rank_model.techniques.shards is not None or rank_model.plan.ep > 1
    with forward_only(rank_model):
        data = open_data(job.evaluate.data, DATA_ARGUMENT)
        share = replace(share, microbatches=-(-max(share.compute_sizes(job.batch)) // size))
        held_out = EvalData(data, job.seed, share, lambda: place.set_phase("evaluation data"))
        if hasattr(data, "collate"):
            shares = held_out.iterate_padded(job.batch, BatchPadder(data, rank_model.mesh.world_group))
        else:
            shares = held_out.iterate_in_order(size, rank_model.mesh.world_group)
        for pair, count in place.iterate_samples(shares):
            place.set_phase("evaluate")
            if not count and not together:
                continue
            for name, row in _sum_metrics(rank_model, pair, count).items():
                sums[name] = sums[name] + row if name in sums else row
    return _reduce_means(rank_model, sums)


def get_current_share(rank_model: RankModel) -> BatchShare:
    """Return this rank's share of the samples under the current batch split."""
    plan, group = rank_model.plan, rank_model.plan.at(rank_model.setup.place.rank)["replica_groups"]
    share = BatchShare.from_plan(plan, plan.dp_rank(rank_model.setup.place.rank))
    if plan.replica_groups > 1:  # the samples are split over all groups, as over one
        groups = plan.replica_groups
        share = replace(
            share,
            rank=group * plan.ranks + share.rank,
            ranks=groups * plan.ranks,
            weights=share.weights * groups,
            groups=1,
        )
    return share if rank_model.techniques.balance is None else replace(share, weights=rank_model.techniques.balance.course.last_change[1])


def get_forward_size(rank_model: RankModel) -> int:
    """Return the samples of a forward pass of training that every rank supports: the smallest local batch's largest micro-batch."""
    job, plan, share = rank_model.job, rank_model.plan, get_current_share(rank_model)
    if not share.is_uneven:
        return max_micro_batch_size(job.batch, plan.shares * plan.replica_groups, plan.microbatches)
    return max_micro_batch_size(min(share.compute_sizes(job.batch)), 1, plan.microbatches)


def _sum_metrics(rank_model: RankModel, pair: Pair, count: int) -> dict[str, Tensor]:
    """Compute the sum and count of each metric on a batch with `count` samples of this rank."""
    assert rank_model.job.evaluate is not None
    rank_model.setup.device_copies.start_copies([pair])
    inputs, targets = move_tree(rank_model.setup.device_copies.take_tree(pair), rank_model.device, rank_model.setup.cast)
    rank_model.batch_peers.begin(idle=not count)
    with use_proof_dtype(rank_model.setup.cast):
        outputs, here = compute_outputs(rank_model, inputs, count or 1)
    if not (count and here):
        return {}
    metrics, found = rank_model.job.evaluate.metrics, dict[str, Tensor]()
    with use_proof_dtype(rank_model.setup.cast):
        returned = metrics(outputs, targets)
    if rank_model.techniques.pipeline is not None:
        rank_model.techniques.pipeline.stages.check_job_result(returned, "metrics")
    for name, values in parse_metrics(returned, metrics).items():
        values = values.to(rank_model.device, torch.float64, non_blocking=True)
        found[name] = torch.stack([values.sum(), values.new_full((), values.numel())])
    return found


def run_first_forward(rank_model: RankModel, ready: Callable[[Any], Any]) -> None:
    """Run the first and largest forward pass of an evaluation, with its metrics, for a dry run. `ready` converts the sample."""
    assert rank_model.job.evaluate is not None
    wanted = rank_model.job.evaluate.data
    count = get_forward_size(rank_model)
    pair = make_sketch_batch(open_first_sample(wanted, open_data(wanted, DATA_ARGUMENT), DATA_ARGUMENT), count)
    with forward_only(rank_model):
        _sum_metrics(rank_model, ready(pair), count)


@contextmanager
def forward_only(rank_model: RankModel) -> Iterator[None]:
    """Run in eval mode, without gradients, in the number format of training."""
    precision = make_autocast(rank_model.device.type, find_autocast_dtype(rank_model.plan))
    with use_eval_mode(rank_model.module), torch.no_grad(), opaque_code.hide_higher_order(), precision:
        yield


def compute_outputs(rank_model: RankModel, inputs: object, samples: int) -> tuple[Any, bool]:
    """Return the model's outputs, and whether this rank has them: in a pipeline only the last stage does."""
    if rank_model.techniques.pipeline is None:
        return run_model(rank_model.module, inputs), True
    return rank_model.techniques.pipeline.forward_only(inputs, samples, lambda: run_model(rank_model.module, inputs))


@dataclass(frozen=True)
class EvalData:
    """Held-out data as one rank reads it: its part of each batch, with the count of its own samples.

    The count is zero for batches that only equalize the number of batches across ranks.
    """

    data: Data
    seed: int
    share: BatchShare
    on_read: Callable[[], None]
    """Called before each sample."""

    def iterate_in_order(self, batch: int, group: ProcessGroup | None) -> Iterator[EvalBatch]:
        """Iterate over this rank's part of the data in order; every sample is on exactly one rank."""
        data, share = self.data, self.share
        if is_map(data):
            held = share.compute_sizes(len(data))
            first, count = sum(held[: share.rank]), held[share.rank]
            for offset in range(0, max(held), batch):
                ids = range(first + offset, first + min(offset + batch, count))
                yield collate(data, [self._read_sample(data, i) for i in ids or [0]]), len(ids)
            return
        source, read = enumerate(self._iterate_seeded()), 0
        while True:
            everyone = [(s, i % share.ranks == share.rank) for i, s in islice(source, batch * share.ranks)]
            read += len(everyone)
            if group is not None:
                agree_on_samples(read, digest_samples([s for s, _ in everyone]), group, DATA_ARGUMENT)
            if not everyone:
                break
            samples = [s for s, mine in everyone if mine]
            yield collate(data, samples or [everyone[0][0]]), len(samples)
        if not read:
            raise empty_data_error("the iterable ended without a sample", DATA_ARGUMENT)

    def iterate_padded(self, batch: int, padding: BatchPadder) -> Iterator[EvalBatch]:
        """Iterate over data with a `collate`: batches of the size of a step, split as in training and padded to the longest sample."""
        data, source, start = self.data, self._iterate_seeded(), 0
        while True:
            if is_map(data):
                size, fetch = min(batch, len(data) - start), partial(self._read_sample, data)
            else:
                around = dict(enumerate(islice(source, batch), start))
                size, fetch = len(around), around.__getitem__
                if padding.group is not None:
                    agree_on_samples(start + size, digest_samples(list(around.values())), padding.group, DATA_ARGUMENT)
            if size == 0 and start == 0:
                raise empty_data_error("the iterable ended without a sample", DATA_ARGUMENT)
            if size == 0:
                return
            micros = []
            for first, count in self.share.locate_micro_batches(size):
                ids = list(range(start + first, start + first + count))
                micros.append(make_micro_batch(data, [fetch(i) for i in ids or [start]], first, ids))
            most = max(self.share.compute_sizes(size))  # the first parts have one sample each
            for i, micro in enumerate(padding.pad_micro_batches(micros, fetch)):
                if i < most:
                    yield (micro.inputs, micro.targets), micro.count
            start += size

    def _read_sample(self, data: MapStyle, i: int) -> object:
        self.on_read()
        seed_host(self.seed, "evaluate", i)
        with name_failing_samples([i], "of Job.evaluate"):
            return data[i]

    def _iterate_seeded(self) -> Iterator[object]:
        """Iterate over an iterable, with the host generators seeded before each sample."""
        seed_host(self.seed, "evaluate")
        source = iter(self.data)
        for i in numbers():
            self.on_read()
            seed_host(self.seed, "evaluate", i)
            with name_failing_samples([i], "of Job.evaluate"):
                sample = next(source, _ENDED)
            if sample is _ENDED:
                return
            yield sample


def _reduce_means(rank_model: RankModel, sums: dict[str, Tensor]) -> dict[str, float]:
    if rank_model.mesh.world_group is not None:
        # Names are exchanged between hosts, without waiting for devices.
        told = all_gather_bytes("\n".join(sums).encode(), rank_model.mesh.world_group, torch.device("cpu"))
        names = max(told, key=len).decode().split("\n")  # a rank without samples or outputs has no names
        nothing = torch.zeros(2, dtype=torch.float64, device=rank_model.device)
        rows = torch.stack([sums.get(name, nothing) for name in names])
        dist.all_reduce(rows, group=rank_model.mesh.world_group)
        sums = dict(zip(names, rows))
    means = [row[0] / row[1] for row in sums.values()]
    return dict(zip(sums, torch.stack(means).tolist())) if means else {}
