"""The table of a plan (`parallel/spec.py`) describes each rank's real parameters, and the real sums of its gradients.

Each rank is built as in a dry run, with fake process groups. One case is patched: reductions on a GPU.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jobs_moe
import jobs_phased
import jobs_real
import jobs_unlike
import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait
from plait.config.errors import PlaitError
from plait.config.job import Job, load_job
from plait.config.keys import DATA_AXES, INNER_AXES
from plait.config.plan import Plan
from plait.data.batch import BatchShare
from plait.engine.build import build_rank_model
from plait.launch.place import Place
from plait.model.build_model import BuiltModel, make_rank_model
from plait.model.sketch import Sketch
from plait.parallel import apply_order, spec
from plait.parallel.data.buckets import BucketSums
from plait.parallel.mesh import Mesh
from plait.parallel.pipeline.partition import StageLayout
from plait.parallel.rank_model import RankModel
from plait.planner.dryrun.dry_run import CPU, RankKinds, sketch_weights
from plait.planner.dryrun.fake_rank_mode import FakeRankMode, fake_process_group
from plait.tensors.torch_private import FakeTensorMode

Facts = dict[str, Any]


class Gain(nn.Module):
    """A scalar parameter, used on a shard of the sequence under cp."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Any) -> Any:
        return x * self.gain


def scalar_gpt() -> Job:
    plain = jobs_real.gpt()

    def model() -> nn.Module:
        made = plain.model()
        for block in made.blocks:
            block.mlp.append(Gain())
        return made

    return replace(plain, model=model)


def llama() -> Job:
    return load_job(str(Path(plait.__file__).parents[2] / "examples/llama/job.py"), {"length": "8", "batch": "12"})


def muon(job: Job) -> Job:
    return replace(job, optimizer=lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], 1e-2))


JOBS: dict[str, Any] = {
    "gpt": jobs_real.gpt, "llama": llama, "tied": jobs_real.gpt2, "moe_list": jobs_moe.gpt, "scalar_gpt": scalar_gpt,
    "moe_stacked": lambda: jobs_moe.gpt(stacked=True), "moe_uneven": lambda: jobs_moe.gpt(stacked=True, experts=5),
    "gan": jobs_phased.wgan_gp, "vae_gan": jobs_phased.vae_gan, "gpt_muon": lambda: muon(jobs_real.gpt()),
    "llama_muon": lambda: muon(llama()), **jobs_unlike.ALL,
}  # fmt: skip


def ranks_of(group: Any) -> tuple[int, ...] | None:
    ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
    return ranks if len(ranks) > 1 else None


def outline(sketch: Sketch) -> tuple[Any, ...]:
    units = [(u.name, u.parameters, u.weights, u.experts) for u in sketch.units]
    return sketch.parameters, sketch.frozen, units, sketch.rest, sketch.needs


def real(rank_model: RankModel) -> Facts:
    """Return a rank's real parameters, and the sums of its reducers."""
    shards = rank_model.techniques.shards
    outer, inner = rank_model.reducers.values(), [one.sums for one in rank_model.reducers.values()]
    in_buckets = {id(p): one.group for one in inner if isinstance(one, BucketSums) for b in one.buckets for p in b.parameters}
    sharded, scalars = (shards.sharded, {id(p) for p in shards.scalars}) if shards is not None else ({}, set())

    def sums(name: str, parameter: nn.Parameter) -> list[Any]:
        found: list[Any] = []
        if shards is not None and name in sharded:
            where = shards.find_group(name)
            found = [("scatter", ranks_of(where.group), where.dim), ("sum", ranks_of(where.replicas))]
        elif shards is not None and id(parameter) in scalars:
            found = [("sum", ranks_of(shards.same_slices))]
        elif id(parameter) in in_buckets:
            found = [("sum", ranks_of(in_buckets[id(parameter)]))]
        mine = [late for one in outer for late in one.late if name in late.names]
        found += [("mean" if name in one.means else "sum", ranks_of(one.group)) for one in mine]
        return [one for one in found if one[1] is not None]

    trained = {n: p for n, p in rank_model.params.items() if p.requires_grad}
    scattered = {n: shards.find_group(n) for n in sharded} if shards is not None else {}
    masters = rank_model.techniques.masters if rank_model.global_sketch.needs_whole_tensors else None
    masters = {n: p for n, p in (masters or {}).items() if p is not rank_model.params.get(n)}
    return {
        "own": {n: (tuple(p.shape), p.dtype, p.requires_grad) for n, p in rank_model.params.items()},
        "shards": {n: (where.dim, where.group.size(), where.group.rank()) for n, where in scattered.items()},
        "sums": {n: sums(n, p) for n, p in trained.items()},
        "owned": tuple({n for n, p in masters.items() if p.is_meta is kind} for kind in (False, True)),
        "sketch": outline(rank_model.sketch),
        "groups": {axes: ranks_of(rank_model.mesh.group_or_none(*axes)) for axes in (INNER_AXES, DATA_AXES, rank_model.plan.replica_axes)},
    }  # fmt: skip


def told(table: spec.ShardPlan, rank: int, rank_model: RankModel) -> Facts:
    """Return the same from the table."""
    plan, mesh = table.plan, Mesh(table.plan, rank)
    at, here = mesh.coordinates, table.find_local_specs(mesh.coordinates)
    own = {n: s for n, s in here.items() if not s.buffer}
    among = lambda axes, only=(): r if len(r := mesh.ranks(*axes, only=only)) > 1 else None  # noqa: E731
    shards = {n: (found[1], found[0].ranks, found[0].index(at)) for n, s in own.items() if (found := s.find_scatter(at))}

    def sums(one: spec.ParamSpec) -> list[Any]:
        found, as_it_is = list[Any](), one.find_scatter(at) is None  # unsharded parameters are summed with their replicas in one message
        for reduce in one.grad_reductions:
            if reduce.op == "scatter":
                both = ("sum", among((*reduce.axes, *plan.replica_axes)))
                found.append(both if as_it_is else ("scatter", among(reduce.axes), shards[one.name][0]))
            elif not (as_it_is and one.grad_reductions[0].op == "scatter" and reduce is one.grad_reductions[1]):
                found.append((reduce.op, among(reduce.axes, reduce.find_set(at))))
        return [row for row in found if row[1] is not None]

    trained = {n: s for n, s in own.items() if s.trainable}
    return {
        "own": {n: (spec.compute_shape(s.ranges(at)), s.dtype, s.trainable) for n, s in own.items()}, "shards": shards,
        "sums": {n: sums(s) for n, s in trained.items()},
        "owned": (table.list_owned(at), table.list_owned_by_others(at)),
        "sketch": outline(local_sketch(rank_model.job, plan, rank_model.global_sketch, at)),
        "groups": {axes: among(axes) for axes in (INNER_AXES, DATA_AXES, plan.replica_axes)},
    }  # fmt: skip


def local_sketch(job: Job, plan: Plan, sketch: Sketch, at: Any) -> Sketch:
    """Return a rank's sketch after the strategies that distribute parameters."""
    if plan.pp > 1:
        sketch = StageLayout.from_plan(plan, apply_order.context.localize_for_rank(plan, sketch, plan.rank(at)), job.stages)
        sketch = sketch.make_local_sketch(at["pp"])
    sketch = apply_order.expert._remove_experts(sketch, plan) if plan.ep > 1 else sketch
    return sketch.make_local(at["tp"]) if plan.tp > 1 else sketch


def ranks(name: str, plan: Plan, gpu: bool) -> Iterator[tuple[int, Facts, Facts]]:
    """Yield each rank of a plan: its real parameters, and the table's description."""
    job = JOBS[name]()
    sketch = sketch_weights(job, plan)[0]
    table = apply_order.make_shard_plan(job, plan, sketch, not gpu)
    kinds = RankKinds.from_table(table, sketch, job.batch)

    def local(rank: int) -> list[tuple[int, ...]]:
        at = Mesh(plan, rank).coordinates
        return sorted(spec.compute_shape(s.ranges(at)) for s in table.find_local_specs(at).values() if not s.buffer)

    for rank in range(plan.world):
        model = make_rank_model(job, CPU, None, None, None).model
        directly = patch("plait.engine.build.is_direct_exchange", lambda device: not gpu)  # the only place where sums depend on the device
        with directly, fake_process_group(rank, plan.world), FakeRankMode(FakeTensorMode(allow_non_fake_inputs=True), real=True):
            rank_model = build_rank_model(job, plan, Place(rank, plan.world), CPU, made=BuiltModel(model, model), sketch=sketch)
            yield rank, real(rank_model) | {"kind": local(kinds.get_first(rank))}, told(table, rank, rank_model) | {"kind": local(rank)}


def check(name: str, words: str) -> None:
    plan = Plan.parse(words.replace("GPU", "").strip()).fill(None)
    for rank, have, want in ranks(name, plan, "GPU" in words):
        for fact in have:
            assert have[fact] == want[fact], f"{fact} of rank {rank}"


QUICK = (
    ("gpt", "dp=2 tp=2"), ("gpt", "pp=2 fsdp=2 microbatches=2"), ("llama", "tp=4"), ("moe_stacked", "fsdp=4 ep=2"), ("moe_list", "dp=2 ep=2"),
    ("scalar_gpt", "fsdp=2 cp=2"), ("scalar_gpt", "dp=2 fsdp=2 cp=2 shard_over_cp=true"), ("moe_list", "dp=2 ep=2 cp=2 shard_over_cp=true"),
    ("gpt_muon", "fsdp=2 cp=2 tp=2 shard_over_cp=true"), ("gpt_muon", "fsdp=2 tp=2"), ("tied", "pp=2 microbatches=2"), ("uneven", "fsdp=2"),
)  # fmt: skip


@pytest.mark.parametrize("name, plan", QUICK)
def test_ranks_have_what_the_table_says(name: str, plan: str) -> None:
    check(name, plan)


GPT = (
    "dp=2,fsdp=2,fsdp=2 zero_stage=1,dp=2 fsdp=2,tp=2,tp=4,fsdp=2 tp=2,pp=2 microbatches=2,pp=4 microbatches=4,"
    "pp=2 tp=2 microbatches=2,cp=2,fsdp=2 cp=2,"
    "pp=2 cp=2 microbatches=2,pp=2 dp=2 tp=2 microbatches=2,pp=2 stages_per_rank=2 schedule=interleaved microbatches=2,"
    "pp=2 fsdp=2 tp=2 microbatches=2,tp=2 cp=2,replica_groups=2 tp=2 sync_every=4,replica_groups=2 dp=2 sync_every=2,"
    "dp=2 offload=optimizer,fsdp=2 offload=all,tp=2 GPU,dp=2 tp=2 GPU,"
    "cp=2 shard_over_cp=true,cp=3 zero_stage=1 shard_over_cp=true,fsdp=2 cp=2 shard_over_cp=true,dp=2 cp=2 shard_over_cp=true,"
    "tp=2 cp=2 shard_over_cp=true,pp=2 fsdp=2 cp=2 shard_over_cp=true microbatches=2,replica_groups=2 cp=2 shard_over_cp=true sync_every=4,"
    "fsdp=2 cp=2 shard_over_cp=true offload=all"
)
MOE = (
    "ep=2,dp=4 ep=2,fsdp=4 ep=2,pp=2 ep=2 microbatches=2,fsdp=2 ep=2 cp=2,fsdp=4 ep=2 cp=2,dp=2 tp=2 GPU,"
    "fsdp=2 ep=2 cp=2 shard_over_cp=true,fsdp=4 ep=2 cp=2 shard_over_cp=true"
)
MUON = "fsdp=2,dp=2 fsdp=2,tp=2,fsdp=2 tp=2,pp=2 tp=2 microbatches=2,fsdp=2 cp=2,fsdp=2 cp=2 shard_over_cp=true,cp=2 tp=2 shard_over_cp=true"
PHASED = "dp=2,fsdp=2,dp=2 fsdp=2,tp=2,dp=2 tp=2"
UNLIKE = "fsdp=2,tp=2,pp=2 microbatches=2"
EVERY = [
    *((name, plan) for name in ("gpt", "llama", "tied", "scalar_gpt") for plan in GPT.split(",")),
    *((name, plan) for name in ("moe_list", "moe_stacked", "moe_uneven") for plan in MOE.split(",")),
    *((name, plan) for name in ("gpt_muon", "llama_muon") for plan in MUON.split(",")),
    *((name, plan) for name in ("gan", "vae_gan") for plan in PHASED.split(",")),
    *((name, plan) for name in jobs_unlike.ALL for plan in UNLIKE.split(",")),
]


@pytest.mark.prove
@pytest.mark.parametrize("name, plan", [one for one in EVERY if one not in QUICK])
def test_ranks_of_more_plans_have_what_the_table_says(name: str, plan: str) -> None:
    """If plait rejects a plan for a model, the error has a code. All other plans match the table."""
    try:
        check(name, plan)
    except PlaitError as error:
        assert error.codes[0] in ("P024", "P034", "P040", "P023", "P070"), error


KINDS = (
    ("gpt", "fsdp=3 tp=2"), ("gpt", "pp=2 fsdp=3 microbatches=2"), ("moe_list", "fsdp=4 ep=2"), ("moe_uneven", "dp=2 ep=2"),
    ("moe_uneven", "fsdp=4 ep=2"), ("gpt_muon", "fsdp=2 tp=2"), ("scalar_gpt", "fsdp=3"), ("llama", "tp=4"),
)  # fmt: skip


@pytest.mark.parametrize("name, words", KINDS)
def test_ranks_of_a_kind_have_the_same_rows_of_the_table_and_others_do_not(name: str, words: str) -> None:
    plan, job = Plan.parse(words), JOBS[name]()
    sketch = sketch_weights(job, plan)[0]
    table = apply_order.make_shard_plan(job, plan, sketch)
    kinds = RankKinds.from_table(table, sketch, job.batch)

    def rows(rank: int) -> Any:
        mesh = Mesh(plan, rank)
        samples = BatchShare.from_plan(plan, plan.dp_rank(rank)).locate_micro_batches(job.batch)
        held = [(s.shape, spec.compute_shape(s.ranges(mesh.coordinates)), spec.compute_shape(s.ranges(mesh.coordinates, at_rest=False)),
            s.name in table.list_owned(mesh.coordinates),
                 [len(mesh.ranks(*one.axes, only=one.find_set(mesh.coordinates))) for one in s.grad_reductions])
                     for s in table.find_local_specs(mesh.coordinates).values()]  # fmt: skip
        return str((mesh.coordinates["pp"], [n for _, n in samples], sorted(held)))

    found = [rows(rank) for rank in range(plan.world)]
    assert [kinds.get_first(rank) for rank in range(plan.world)] == [found.index(one) for one in found]
