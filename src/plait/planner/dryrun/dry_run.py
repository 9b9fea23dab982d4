"""The dry run: build a plan and run its steps, for any number of ranks, without processes, devices or weights.

One rank of each kind runs. Ranks are of one kind if their shards and messages have the same sizes. Shards come from the table
(`parallel/spec.py`). Samples and sequence shards, which the table lacks, are computed here. The real engine runs with its real strategies, in a
process group with simulated peers, on tensors with shapes and no values (`planner/dryrun/fake_rank_mode.py`). Its allocations and messages therefore
equal those of a rank in a run. The peak memory is recorded (`planner/dryrun/allocations.py`), and the messages of communicating ranks are
compared (`engine/traffic.py`).

A model that reads values in its forward pass runs on real tensors. Quantities that depend on values, such as the rows of a rank's experts, are then
computed as if all ranks behaved like this one.
"""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from plait.config.errors import PlaitError, Problem, summarize_error
from plait.config.job import Job, find_user_line
from plait.config.plan import Plan
from plait.data.batch import Batch, BatchShare, unshard_iterable
from plait.data.batch_rows import Pair
from plait.engine.build import check_plan
from plait.engine.engine import Engine
from plait.engine.model_analysis import analyze_model, make_rank_setup
from plait.engine.traffic import Traffic, check_agreement
from plait.launch.place import Place
from plait.model.build_model import BuiltModel, make_model, make_rank_model
from plait.model.fake_model import MOST_REAL_BYTES, sketch_fake_model
from plait.model.sketch import Sketch
from plait.model.sketch_table import format_size
from plait.parallel.apply_order import make_shard_plan
from plait.parallel.context import strategy as context
from plait.parallel.mesh import Mesh
from plait.parallel.offload import is_on_host
from plait.parallel.spec import Coordinates, ShardPlan, compute_shape
from plait.planner.dryrun.allocations import Peak
from plait.planner.dryrun.fake_rank_mode import FakeRankMode, fake_model_tensors, fake_process_group
from plait.planner.dryrun.measure import measure_evaluation, measure_step
from plait.planner.dryrun.optimizer_step import record_reads
from plait.tensors.fake import FAKE_FAILURES, PartlyFakeMode
from plait.tensors.rows import Rows
from plait.tensors.torch_private import FakeTensorMode, tree_map_only


@dataclass(frozen=True)
class RankKinds:
    """The first rank of the same kind, for each rank. Replica groups are always of different kinds, and so are stages."""

    firsts: tuple[int, ...]

    @staticmethod
    def from_table(table: ShardPlan, sketch: Sketch, batch: int) -> "RankKinds":
        """Find the kinds of a plan's ranks. `sketch`: of the unsharded model."""
        plan, parts, first = table.plan, _make_parts_key(table), dict[Hashable, int]()
        samples = [tuple(n for _, n in BatchShare.from_plan(plan, share).locate_micro_batches(batch)) for share in range(plan.shares)]
        sequences = [_key_sequence(table, sketch, i) for i in range(plan.cp)]
        between = [tuple(Rows.make_even(n, plan.tp).sizes[i] for n in sketch.slices.sequence_lengths) for i in range(plan.tp)]
        keys = (
            (at["replica_groups"], at["pp"], samples[plan.dp_rank(rank)], sequences[at["cp"]], between[at["tp"]], parts(at))
            for rank, at in enumerate(Mesh(plan, 0).all_coordinates)
        )
        return RankKinds(tuple(first.setdefault(key, rank) for rank, key in enumerate(keys)))

    def get_first(self, rank: int) -> int:
        """Return the first rank of the same kind. Servers come after all other ranks and wrap around to the first."""
        return self.firsts[rank % len(self.firsts)]

    def count_kinds(self) -> dict[int, int]:
        """Count the ranks of each kind, by its first rank."""
        return Counter(self.firsts)


def _make_parts_key(table: ShardPlan) -> Callable[[Coordinates], Hashable]:
    """Return a function from a rank's position to a key of its parameter shards.

    For equal parameters, the key has their number, the number that only this rank updates, their shapes at rest and gathered (a shard is sent
    with the size of the largest), and the number of ranks in their gradient reductions.
    """
    specs = {name: replace(spec, name="", owners=()) for name, spec in table.specs.items() if not spec.buffer}
    alike = list(dict.fromkeys(replace(spec, placement=()) for spec in specs.values()))
    number = {name: alike.index(replace(spec, placement=())) for name, spec in specs.items()}
    rows = Counter((number[name], spec) for name, spec in specs.items())
    whole = any(spec.owners for spec in table.specs.values())

    def key_parts(at: Coordinates) -> Hashable:
        held = Counter[Hashable]()
        for (form, spec), count in rows.items():
            if spec.is_here(at):
                shapes = compute_shape(spec.ranges(at)), compute_shape(spec.ranges(at, at_rest=False))
                held[form, *shapes, tuple(len(one.find_set(at)) for one in spec.grad_reductions)] += count
        owned = Counter(number[name] for name in table.list_owned(at)) if whole else {}
        return frozenset(held.items()), frozenset(owned.items())

    return key_parts


def _key_sequence(table: ShardPlan, sketch: Sketch, i: int) -> Hashable:
    """Return a key of the sequence shard of cp rank `i`.

    It has the rows of each sequence on this rank and on its neighbors. A ring rank passes on all rows but those of the next rank. The first and the
    last ring rank see only half of the other rows.
    """
    plan = table.plan
    cuts = [context.choose_layout(plan)(n, plan.cp).sizes for n in (sketch.sequence_plan.lengths if plan.cp > 1 else ())]
    near = [tuple(sizes[k % plan.cp] for k in (i, i + 1, i - 1)) for sizes in cuts]
    return tuple(near), plan.cp_method == "ring" and (i > 0) + (i == plan.cp - 1)


CPU = torch.device("cpu")
Result = TypeVar("Result")


@dataclass(frozen=True)
class RankKind:
    """A simulated rank, and the number of ranks of its kind."""

    rank: int
    ranks: int
    at: dict[str, int]
    """Its position on every axis."""
    samples: int
    """Samples of its largest micro-batch."""
    peak: Peak
    """Maximum bytes in its step."""
    traffic: dict[str, tuple[int, int]]
    """(messages, bytes) sent per step, by the axes along which the ranks of a group differ."""
    operators: dict[str, tuple[int, int]]
    """(calls, bytes) of each operator of torch.distributed per step, including receives."""


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run."""

    plan: str
    world: int
    kinds: tuple[RankKind, ...]
    seconds: float

    @property
    def fullest(self) -> RankKind:
        """The kind of rank with most memory."""
        return max(self.kinds, key=lambda kind: kind.peak.total)

    @property
    def host(self) -> dict[str, int]:
        """Maximum bytes that a host keeps for a rank, by category."""
        return max((kind.peak.host for kind in self.kinds), key=lambda held: sum(held.values()))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fullest": self.fullest.rank}


def dry_run(job: Job, plan: Plan) -> DryRun:
    """Run a step on every kind of rank, and record a second one. Raises D001 if ranks would wait for each other forever."""
    check_plan(job, plan)
    if plan.compile or plan.processes == "one":
        key = "compile=true" if plan.compile else "processes=one"
        raise PlaitError(Problem("D002", f"{key} does not support a dry run",
                                 why="torch.compile and threads need real tensors; a dry run uses fake tensors",
                                 fix=(f"leave out {key}",)))  # fmt: skip
    began, job = time.perf_counter(), replace(job, steps=max(job.steps, 2))
    sketch, weights = sketch_weights(job, plan)
    kinds = RankKinds.from_table(make_shard_plan(job, plan, sketch), sketch, job.batch)
    counts = kinds.count_kinds()

    def run_rank(rank: int, real: bool) -> tuple[RankKind, Traffic]:
        traffic = Traffic(rank, plan)
        with run_alone(job, traffic, sketch, real=real) as (engine, given, ready):
            peak = measure_step(engine, 1, given, partial(is_on_host, plan))
            if job.evaluate is not None:
                other = measure_evaluation(engine, ready, partial(is_on_host, plan))
                peak = replace(other, host=peak.host) if other.total > peak.total else peak
            samples = max(n for _, n in engine.batch_share.locate_micro_batches(job.batch))
        ranks, at = counts[rank], plan.at(rank)
        return RankKind(rank, ranks, at, samples, peak, traffic.total_by_axes(), traffic.total_by_op()), traffic

    found = _run_kinds(kinds, run_rank, sketch.needs_real_tensors, weights)
    check_agreement({traffic.rank: traffic for _, traffic in found}, kinds.get_first)
    return DryRun(str(plan), plan.world, tuple(kind for kind, _ in found), time.perf_counter() - began)


@dataclass(frozen=True)
class RankTraffic:
    """Messages of a rank in its first step, and the sizes of its micro-batches."""

    totals: dict[str, tuple[int, int]]
    """(calls, bytes) by operator."""
    sizes: list[tuple[int, str]]
    """As in `Engine.list_micro_shapes`, for the rank that represents this one."""


def trace_first_step(job: Job, plan: Plan, cast: torch.dtype | None = None, sketch: Sketch | None = None) -> list[RankTraffic]:
    """Trace the messages of every rank of a plan in the job's first step, with tensors and weights in `cast`.

    `sketch`: an existing sketch of the model in `cast`. Raises the errors of `dry_run`.
    """
    plan = plan.uncompiled  # it sends the same messages
    if sketch is None:
        made = make_rank_model(job, CPU, cast, None, None)
        sketch = analyze_model(make_rank_setup(job, plan, Place(0, plan.world), CPU, cast, made=made), made)
    kinds = RankKinds.from_table(make_shard_plan(job, plan, sketch), sketch, job.batch)

    def trace_rank(rank: int, real: bool) -> RankTraffic:
        traffic = Traffic(rank, plan)
        with run_alone(job, traffic, sketch, real=real, cast=cast) as (engine, given, _):
            batch = next(engine.batches())
            sizes = engine.list_micro_shapes(batch)
            for _ in engine.active_phase.iterate_phases(batch.next_position.step):
                engine.update(batch, engine.backward(given(batch, True)))
        return RankTraffic(traffic.total_by_op(), sizes)

    each = dict(zip(kinds.count_kinds(), _run_kinds(kinds, trace_rank, sketch.needs_real_tensors, 0)))
    return [each[kinds.get_first(rank)] for rank in range(plan.world)]


def _run_kinds(kinds: RankKinds, run_kind: Callable[[int, bool], Result], real: bool, weights: int) -> list[Result]:
    """Call `run_kind` for each kind of rank, on fake tensors or, if the model needs values, on `real` ones."""
    try:
        return [run_kind(rank, real) for rank in kinds.count_kinds()]
    except FAKE_FAILURES as error:  # for example, the job's loss reads values
        if real or weights > MOST_REAL_BYTES:
            why = f"on fake tensors it raised {summarize_error(error)}"
            raise PlaitError(Problem("D002", "this job does not support a dry run", why=why, where=find_user_line(error))) from error
        return [run_kind(rank, True) for rank in kinds.count_kinds()]


def sketch_weights(job: Job, plan: Plan) -> tuple[Sketch, int]:
    """Return the sketch that every rank has of the model, and the bytes of its weights.

    Raises D002 if the sketch needs values and the model is too large for real tensors.
    """
    model, sketch = sketch_fake_model(job)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if plan.cp > 1 or plan.ep > 1:
        if weights > MOST_REAL_BYTES:
            why = f"the sharding of sequences and experts is proved on real tensors, and the weights are too large: {format_size(weights)}"
            fix = ("a smaller model of the same kind",)
            raise PlaitError(Problem("D002", f"{plan} does not support a dry run", why=why, fix=fix))
        model = make_model(job)
    made, again = BuiltModel(model, model), plan.pp > 1 and plan.precision != "fp32"
    setup = make_rank_setup(job, plan, Place(0, plan.world), CPU, None, made=made)
    return analyze_model(setup, made, None if again else sketch), weights


@contextmanager
def run_alone(
    job: Job, traffic: Traffic, sketch: Sketch, *, real: bool, cast: torch.dtype | None = None
) -> Iterator[tuple[Engine, Callable[[Batch, bool], Batch], Callable[[Pair], Pair]]]:
    """Yield the engine of one rank, with functions that prepare a batch and an (inputs, targets) pair for it. The engine runs inside this context
    only.

    `traffic` names the rank; `sketch`: what every rank has of the model; `real`: use real tensors.
    """
    data = job.data
    job = replace(job, data=lambda: unshard_iterable(data()))
    fakes, plan, rank = FakeTensorMode(allow_non_fake_inputs=True), traffic.plan, traffic.rank
    with nullcontext() if real else PartlyFakeMode(fakes):  # a constructor may read its own values
        made = make_rank_model(job, CPU, cast, None, None).model
        model = made if real else fake_model_tensors(made, fakes)
    with warnings.catch_warnings(), fake_process_group(rank, plan.world), FakeRankMode(fakes, real=real) as pretending:
        warnings.filterwarnings("ignore", "The .grad attribute")  # torch reads it when a real tensor becomes fake
        place, built = Place(rank, plan.world), BuiltModel(model, model)
        engine = Engine(job, plan, place=place, device="cpu", on_nan="ignore", cast=cast, made=built, sketch=sketch)
        engine.passes.logged.is_silent = True
        for reducer in engine.rank_model.reducers.values():  # another rank may have the gradient of a shared parameter
            reducer.counts = lambda flags: [1.0] * len(flags)
        _follow_optimizer(engine, pretending)
        hide = lambda t: fakes.from_tensor(t) if t.is_floating_point() else t  # noqa: E731

        def prepare_pair(pair: Pair) -> Pair:
            pretending.traffic = None  # record messages of the step only
            return pair if real else tree_map_only(Tensor, hide, pair)

        def prepare_batch(batch: Batch, last: bool) -> Batch:
            pretending.traffic = traffic if last else None
            if real:
                return batch
            trees = ("inputs", "targets")
            hidden = (replace(m, **{k: tree_map_only(Tensor, hide, getattr(m, k)) for k in trees}) for m in batch.micro_batches)
            return replace(batch, micro_batches=tuple(hidden)[: None if last else 1])  # one micro-batch is enough for lasting state

        yield engine, prepare_batch, prepare_pair


def _follow_optimizer(engine: Engine, pretending: FakeRankMode) -> None:
    """Answer value reads of the optimizer's steps with those of a run on small tensors."""
    rank_model = engine.rank_model
    numbers = record_reads(engine.job, dict(rank_model.module.named_parameters()), set(rank_model.params))

    def start_step(*_: Any) -> None:
        numbers.start_step()
        pretending.optimizer_reads = numbers

    def end_step(*_: Any) -> None:
        pretending.optimizer_reads = None

    engine.optimizer.register_step_pre_hook(start_step)
    engine.optimizer.register_step_post_hook(end_step)
