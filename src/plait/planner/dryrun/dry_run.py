"""The dry run: a plan is built and makes its steps, on any number of ranks, with no process, no device and no weights.

Of each kind of ranks one runs: ranks are of one kind where they hold parts of the same sizes and send messages of the same sizes. Parts are
those of the table (`parallel/spec.py`); samples and rows of sequences, which it does not have, are computed here. It is the real engine
with its real strategies, in a process group whose other ranks are not there, on tensors that have shapes and no numbers
(`planner/dryrun/pretend.py`): so what is allocated and what is sent is what a rank of a run allocates and sends. The bytes at the fullest
moment are metered (`planner/dryrun/allocations.py`), and the messages of ranks that have to do with each other are compared
(`engine/traffic.py`).

A model that looks at values in its forward pass runs on real tensors instead. What its numbers decide, such as how many
rows come to the experts of a rank, is then what it would be if all other ranks did what this one does.
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

from plait.config.errors import PlaitError, Problem, in_a_line
from plait.config.job import Job, user_line
from plait.config.plan import Plan
from plait.data.batch import Batch, BatchShare, whole
from plait.data.batch_rows import Pair
from plait.engine.analyse import analyse, setup_of
from plait.engine.build import check_plan
from plait.engine.engine import Engine
from plait.engine.traffic import Traffic, agree
from plait.launch.place import Place
from plait.model.fake_model import HOLDS, sketched
from plait.model.make import BuiltModel, make, make_model
from plait.model.sketch import Sketch
from plait.model.table import size
from plait.parallel.context import strategy as context
from plait.parallel.mesh import Mesh
from plait.parallel.offload import on_host
from plait.parallel.order import shard_plan
from plait.parallel.spec import At, ShardPlan, sizes
from plait.planner.dryrun.allocations import Peak
from plait.planner.dryrun.measure import measure, measure_evaluation
from plait.planner.dryrun.optimizer_step import read
from plait.planner.dryrun.pretend import Pretending, faked, process_group
from plait.tensors.fake import FAKE_FAILURES, PartlyFake
from plait.tensors.rows import Rows
from plait.tensors.torch_private import FakeTensorMode, tree_map_only


@dataclass(frozen=True)
class RankKinds:
    """The first rank that is like it, of each rank. Replica groups are all unlike, and so are stages."""

    firsts: tuple[int, ...]

    @staticmethod
    def of(table: ShardPlan, sketch: Sketch, batch: int) -> "RankKinds":
        """The kinds of a plan's ranks. `sketch`: of the whole model."""
        plan, parts, first = table.plan, _parts(table), dict[Hashable, int]()
        samples = [tuple(n for _, n in BatchShare.of(plan, share).parts(batch)) for share in range(plan.shares)]
        sequences = [_sequence(table, sketch, i) for i in range(plan.cp)]
        between = [tuple(Rows.even(n, plan.tp).sizes[i] for n in sketch.slices.lengths) for i in range(plan.tp)]
        keys = (
            (at["replica_groups"], at["pp"], samples[plan.share(rank)], sequences[at["cp"]], between[at["tp"]], parts(at))
            for rank, at in enumerate(Mesh(plan, 0).places)
        )
        return RankKinds(tuple(first.setdefault(key, rank) for rank, key in enumerate(keys)))

    def like(self, rank: int) -> int:
        """The first rank that is like this one. Servers come after all others, and are counted from the first again."""
        return self.firsts[rank % len(self.firsts)]

    def counts(self) -> dict[int, int]:
        """The first rank of each kind, and how many there are."""
        return Counter(self.firsts)


def _parts(table: ShardPlan) -> Callable[[At], Hashable]:
    """What of a rank's parts makes it another kind: of parameters that are alike, how many it has and updates alone, their shape at rest and
    gathered (a shard is sent as large as the largest), and among how many ranks their gradients are summed."""
    specs = {name: replace(spec, name="", owners=()) for name, spec in table.specs.items() if not spec.buffer}
    alike = list(dict.fromkeys(replace(spec, homes=()) for spec in specs.values()))
    number = {name: alike.index(replace(spec, homes=())) for name, spec in specs.items()}
    rows = Counter((number[name], spec) for name, spec in specs.items())
    whole = any(spec.owners for spec in table.specs.values())

    def parts(at: At) -> Hashable:
        held = Counter[Hashable]()
        for (form, spec), count in rows.items():
            if spec.is_here(at):
                shapes = sizes(spec.ranges(at)), sizes(spec.ranges(at, at_rest=False))
                held[form, *shapes, tuple(len(one.only(at)) for one in spec.grad)] += count
        owned = Counter(number[name] for name in table.owned(at)) if whole else {}
        return frozenset(held.items()), frozenset(owned.items())

    return parts


def _sequence(table: ShardPlan, sketch: Sketch, i: int) -> Hashable:
    """Rows of each sequence that rank i of `cp` has, and of the neighbours' (in a ring a rank hands on all rows but the next one's); in a
    ring the first and the last rank see one half of the others' rows only."""
    plan = table.plan
    cuts = [context.layout(plan)(n, plan.cp).sizes for n in (sketch.sequence_plan.lengths if plan.cp > 1 else ())]
    near = [tuple(sizes[k % plan.cp] for k in (i, i + 1, i - 1)) for sizes in cuts]
    return tuple(near), plan.cp_method == "ring" and (i > 0) + (i == plan.cp - 1)


CPU = torch.device("cpu")
Found = TypeVar("Found")


@dataclass(frozen=True)
class RankKind:
    """A rank that ran, and how many it stands for."""

    rank: int
    ranks: int
    at: dict[str, int]
    """Its place on every axis."""
    samples: int
    """Of its largest micro-batch."""
    peak: Peak
    """Bytes at the fullest moment of its step."""
    traffic: dict[str, tuple[int, int]]
    """(messages, bytes) that it sends in a step, by the axes along which the ranks of a group differ."""
    operators: dict[str, tuple[int, int]]
    """(calls, bytes) of each operator of torch.distributed in a step, receives among them."""


@dataclass(frozen=True)
class DryRun:
    """What a dry run found."""

    plan: str
    world: int
    kinds: tuple[RankKind, ...]
    seconds: float

    @property
    def fullest(self) -> RankKind:
        """The kind of rank that needs most memory."""
        return max(self.kinds, key=lambda kind: kind.peak.total)

    @property
    def host(self) -> dict[str, int]:
        """Bytes by category that a host holds for a rank, where they are most."""
        return max((kind.peak.host for kind in self.kinds), key=lambda held: sum(held.values()))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fullest": self.fullest.rank}


def dry_run(job: Job, plan: Plan) -> DryRun:
    """Make a step of every kind of rank, and one that is measured. D001 when ranks would wait for each other."""
    check_plan(job, plan)
    if plan.compile or plan.processes == "one":
        key = "compile=true" if plan.compile else "processes=one"
        raise PlaitError(Problem("D002", f"{key} cannot run dry", why="torch.compile and threads need numbers",
                                 fix=(f"leave out {key}",)))  # fmt: skip
    began, job = time.perf_counter(), replace(job, steps=max(job.steps, 2))
    sketch, weights = known(job, plan)
    kinds = RankKinds.of(shard_plan(job, plan, sketch), sketch, job.batch)
    counts = kinds.counts()

    def measured(rank: int, real: bool) -> tuple[RankKind, Traffic]:
        traffic = Traffic(rank, plan)
        with alone(job, traffic, sketch, real=real) as (engine, given, ready):
            peak = measure(engine, 1, given, partial(on_host, plan))
            if job.evaluate is not None:
                other = measure_evaluation(engine, ready, partial(on_host, plan))
                peak = replace(other, host=peak.host) if other.total > peak.total else peak
            samples = max(n for _, n in engine.share.parts(job.batch))
        ranks, at = counts[rank], plan.at(rank)
        return RankKind(rank, ranks, at, samples, peak, traffic.by_axes(), traffic.totals()), traffic

    found = _each(kinds, measured, sketch.by_values, weights)
    agree({traffic.rank: traffic for _, traffic in found}, kinds.like)
    return DryRun(str(plan), plan.world, tuple(kind for kind, _ in found), time.perf_counter() - began)


@dataclass(frozen=True)
class Sent:
    """What a rank sends in its first step, and the sizes of the micro-batches that it runs there."""

    totals: dict[str, tuple[int, int]]
    """(calls, bytes) by operator."""
    sizes: list[tuple[int, str]]
    """As `Engine.sizes_run` has them, of the rank that stands for it."""


def first_step(job: Job, plan: Plan, cast: torch.dtype | None = None, sketch: Sketch | None = None) -> list[Sent]:
    """What every rank of a plan sends in the job's first step, with tensors and weights in `cast`. `sketch`: of the model in
    `cast`, if it was made before. Errors as `dry_run`."""
    plan = plan.uncompiled  # which sends the same
    if sketch is None:
        made = make(job, CPU, cast, None, None)
        sketch = analyse(setup_of(job, plan, Place(0, plan.world), CPU, cast, made=made), made)
    kinds = RankKinds.of(shard_plan(job, plan, sketch), sketch, job.batch)

    def sent(rank: int, real: bool) -> Sent:
        traffic = Traffic(rank, plan)
        with alone(job, traffic, sketch, real=real, cast=cast) as (engine, given, _):
            batch = next(engine.batches())
            sizes = engine.sizes_run(batch)
            for _ in engine.turns.of(batch.after.step):
                engine.update(batch, engine.backward(given(batch, True)))
        return Sent(traffic.totals(), sizes)

    each = dict(zip(kinds.counts(), _each(kinds, sent, sketch.by_values, 0)))
    return [each[kinds.like(rank)] for rank in range(plan.world)]


def _each(kinds: RankKinds, one: Callable[[int, bool], Found], real: bool, weights: int) -> list[Found]:
    """`one` of each kind of rank: on tensors without numbers, unless the model needs them; else on `real` ones."""
    try:
        return [one(rank, real) for rank in kinds.counts()]
    except FAKE_FAILURES as error:  # the job's loss looks at values, for example
        if real or weights > HOLDS:
            why = f"on tensors without numbers it raised {in_a_line(error)}"
            raise PlaitError(Problem("D002", "this job cannot run dry", why=why, where=user_line(error))) from error
        return [one(rank, True) for rank in kinds.counts()]


def known(job: Job, plan: Plan) -> tuple[Sketch, int]:
    """What every rank knows of the model, and the bytes of its weights.

    D002 when to know it takes numbers, and the model is too large to have them.
    """
    model, sketch = sketched(job)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if plan.cp > 1 or plan.ep > 1:
        if weights > HOLDS:
            why = f"how sequences and experts are shared out is proved on numbers; the weights are {size(weights)}"
            fix = ("a smaller model of the same kind",)
            raise PlaitError(Problem("D002", f"{plan} cannot run dry", why=why, fix=fix))
        model = make_model(job)
    made, again = BuiltModel(model, model), plan.pp > 1 and plan.precision != "fp32"
    setup = setup_of(job, plan, Place(0, plan.world), CPU, None, made=made)
    return analyse(setup, made, None if again else sketch), weights


@contextmanager
def alone(
    job: Job, traffic: Traffic, sketch: Sketch, *, real: bool, cast: torch.dtype | None = None
) -> Iterator[tuple[Engine, Callable[[Batch, bool], Batch], Callable[[Pair], Pair]]]:
    """The engine of the rank that `traffic` is of, and what makes of a batch, and of (inputs, targets), one that it can be
    given. It runs inside only. `sketch`: what every rank knows of the model; `real`: it runs on real tensors.
    """
    data = job.data
    job = replace(job, data=lambda: whole(data()))
    fakes, plan, rank = FakeTensorMode(allow_non_fake_inputs=True), traffic.plan, traffic.rank
    with nullcontext() if real else PartlyFake(fakes):  # a constructor may look at what it makes
        made = make(job, CPU, cast, None, None).model
        model = made if real else faked(made, fakes)
    with warnings.catch_warnings(), process_group(rank, plan.world), Pretending(fakes, real=real) as pretending:
        warnings.filterwarnings("ignore", "The .grad attribute")  # torch looks at it when a real tensor becomes a fake one
        place, built = Place(rank, plan.world), BuiltModel(model, model)
        engine = Engine(job, plan, place=place, device="cpu", on_nan="ignore", cast=cast, made=built, sketch=sketch)
        engine.passes.logged.silent = True
        for reducer in engine.rank_model.reducers.values():  # another rank may have the gradient of a parameter they share
            reducer.counts = lambda flags: [1.0] * len(flags)
        _followed(engine, pretending)
        hide = lambda t: fakes.from_tensor(t) if t.is_floating_point() else t  # noqa: E731

        def ready(pair: Pair) -> Pair:
            pretending.traffic = None  # of the messages of a step alone
            return pair if real else tree_map_only(Tensor, hide, pair)

        def given(batch: Batch, last: bool) -> Batch:
            pretending.traffic = traffic if last else None
            if real:
                return batch
            trees = ("inputs", "targets")
            hidden = (replace(m, **{k: tree_map_only(Tensor, hide, getattr(m, k)) for k in trees}) for m in batch.micro)
            return replace(batch, micro=tuple(hidden)[: None if last else 1])  # what lasts is there after one

        yield engine, given, ready


def _followed(engine: Engine, pretending: Pretending) -> None:
    """What the optimizer's steps read is what they would read of small tensors."""
    rank_model = engine.rank_model
    numbers = read(engine.job, dict(rank_model.module.named_parameters()), set(rank_model.params))

    def begins(*_: Any) -> None:
        numbers.begin()
        pretending.numbers = numbers

    def ends(*_: Any) -> None:
        pretending.numbers = None

    engine.optimizer.register_step_pre_hook(begins)
    engine.optimizer.register_step_post_hook(ends)
