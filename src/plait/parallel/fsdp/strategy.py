"""Sharded data parallelism (fsdp, ZeRO): N ranks shard one training state, and each computes its own samples.

What it does
    Under data parallelism, parameters, gradients and optimizer state exist N times. Under `fsdp`, each of N ranks keeps
    a 1/N shard of every tensor. A unit's parameters are gathered just before the unit runs, and freed after. Its
    gradients are reduce-scattered into shards, and the optimizer updates shards. `zero_stage` selects what is sharded.
    1 shards the optimizer state, and 2 also the gradients. 3 also shards the parameters between a unit's forward and
    backward. `dp=M fsdp=N` makes M replicas of N shards each (hybrid: sharded over fast links, replicated over slow
    ones). `shard_over_cp=true` shards over all F × C ranks of `fsdp=F cp=C`, also with `fsdp=1`. Ranks of `cp` compute
    sequence shards of the same samples with the same parameters, so each can keep a shard of these too. One
    reduce-scatter over all F × C ranks then gives each rank the gradient of its shard.

Picture
    rank 0   ▒gather 1▒ F1 ▒2▒ F2 … ▒2▒ B2 ░sum 2░ ▒1▒ B1 ░1░ ─► step on my half
    rank 1   ▒gather 1▒ F1 ▒2▒ F2 … ▒2▒ B2 ░sum 2░ ▒1▒ B1 ░1░ ─► step on my half

Costs
    Memory: the training state / N, plus the one or two units that are gathered at the moment. With `zero_stage` 1 and 2
    each rank keeps all gathered parameters from forward to backward. Traffic: `zero_stage=3` gathers the parameters
    twice and reduces the gradients once, which is 1.5 times the traffic of data parallelism. 1 and 2 gather once, which
    is as much as data parallelism. Under `shard_over_cp=true`, N is F × C, and no other reduction over `cp` follows.

Choose when
    Parameters, gradients and optimizer state do not fit next to the activations. With `cp`, whose ranks otherwise keep
    replicas, choose `shard_over_cp=true`.

Avoid when
    They fit: replicas (`dp`) send less. Or the batch has fewer samples than the plan has ranks.

How it stays exact
    As under `dp`, each loss counts with its weight over the weight of the global batch. Gradients are summed and never
    averaged. The norm that clips is that of all shards. Element-wise optimizers (SGD, Adam, RMSprop, …) do the same to
    a shard as to the full tensor. Some optimizers need full tensors (Muon, Adafactor). plait finds them by a test, and
    then an owner updates each tensor (`parallel/whole_tensors.py`). Some parameters are tied, or used by several units
    or by code between units. They are gathered with the root module, for the full step.

Paper
    Rajbhandari et al. 2020, ZeRO (SC); Zhao et al. 2023, PyTorch FSDP (VLDB).
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from plait.config.errors import Problem
from plait.config.job import Job
from plait.config.keys import AXES, OTHER_SAMPLES, SAME_SLICES
from plait.config.plan import Plan
from plait.launch import groups as groups_of
from plait.model.sketch import Sketch
from plait.parallel.data import batch_norm
from plait.parallel.fsdp import runtime
from plait.parallel.fsdp.groups import (
    begins_once,
    check_formats,
    differentiated,
    expert_placement,
    expert_shard_groups,
    groups,
)
from plait.parallel.fsdp.runtime import DeviceScatter, FsdpRuntime, Gather, Scatter, ShardGroup
from plait.parallel.mutations import apart
from plait.parallel.precision import plan_format
from plait.parallel.rank_model import SplitModel
from plait.parallel.spec import REPLICAS, Reduce, ShardPlan, is_divisible
from plait.tensors.collectives import directly
from plait.tensors.modules import materialise
from plait.tensors.parameters import ParameterAttributes
from plait.tensors.rows import chunk
from plait.tensors.torch_private import exchange_by, gather_ahead, in_backward, sum_after, sum_unused

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

AXIS = "fsdp"
EXACT = True


def wanted(plan: Plan) -> bool:
    return plan.is_sharded


def refuse(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    if plan.shares > batch:
        what = f"global batch {batch} does not split over {plan.shares} ranks"
        why = f"dp={plan.dp} × fsdp={plan.fsdp} = {plan.shares} ranks: {plan.shares - batch} would never have a sample"
        yield Problem("P012", what, why=why, fix=(f"--batch {plan.shares}",))


def inexact(plan: Plan, sketch: Sketch) -> Iterable[str]:
    for name in sketch.batch_coupled:
        yield f"batch statistics in {name} are computed by a direct call, which cannot be synchronised over the ranks"
    yield from apart(plan, sketch, plan.along(SAME_SLICES))


def _mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    """The ranks as torch's mesh. Axes over which a tensor is sharded are next to each other, and one axis of it, `fsdp`."""
    backend, axes = groups_of.backend_of_meshes(), tuple(axis for axis in AXES if axis not in plan.shard_axes[1:])
    other: dict[int | str, Any] | None = None if backend is None else {axis: backend for axis in axes}  # noqa: C420
    shape = tuple(plan.shards if axis == "fsdp" else getattr(plan, axis) for axis in axes)
    return init_device_mesh(device.type, shape, mesh_dim_names=axes, backend_override=other)


def specs(job: Job, sketch: Sketch, table: ShardPlan) -> ShardPlan:
    """A shard of what the other axes leave. A scalar is not sharded: its gradient is summed over the ranks of all these axes."""
    plan = table.plan
    shard, why = table.shard_split(plan.shard_axes, 0), "each keeps a shard, and has other samples (fsdp) or another shard of the sequence (cp)"
    sums = Reduce(plan.shard_axes, "scatter", why), Reduce(plan.replica_axes, "sum", REPLICAS)
    rest = {name: spec for name, spec in table.specs.items() if not spec.expert}
    return replace(table, specs=table.specs | {n: s.split(shard).reduced(*sums, first=True) for n, s in rest.items()})


def apply(split: SplitModel) -> SplitModel:
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    plan, model, device = split.plan, split.module, split.device
    where = expert_shard_groups(split)
    check_formats(split.sketch, [m for m in split.sketch.mixtures if m.names & where.keys()])
    batch_norm.synchronise(model, split.sketch.batch_norms, split.mesh.group_or_none(*OTHER_SAMPLES), split.batch_peers)
    copies = split.mesh.group_or_none(*plan.replica_axes)
    split.setup.place.alone(device)
    mesh = _mesh(plan, device)
    for parameter in split.params.values():
        parameter.data = parameter.data.contiguous()
    experts = split.experts()
    mine = {n: ParameterAttributes.of(p) for n, p in split.params.items() if n not in experts or n in where}
    options: dict[str, Any] = {
        "mesh": mesh["fsdp"],
        "ignored_params": {p for n, p in model.named_parameters() if not is_divisible(p.shape) or n not in mine},
        "shard_placement_fn": expert_placement(split, where, device),
        "offload_policy": CPUOffloadPolicy(device.type == "cuda") if plan.offload == "all" else OffloadPolicy(),
    }
    units = [[model.get_submodule(name) for name in names] for names in groups(split.sketch)]
    half = plan_format(plan) if split.setup.cast is None else None
    policy = MixedPrecisionPolicy(half, torch.float32 if half else None, cast_forward_inputs=False)
    gathered = list[FSDPModule]()
    for modules in (*units, [model]):
        for module in modules:
            module.register_forward_hook(runtime.without_views)
        fully_shard(modules, mp_policy=policy, reshard_after_forward=plan.zero_stage == 3 and modules != [model], **options)
        for module in modules:
            runtime.keep_arguments(module)
        assert isinstance(modules[0], FSDPModule)
        gathered.append(modules[0])
    _gather_ahead(split, units, gathered)
    scatter = _scattering(gathered, copies, {one.group.group_name: one.copies for one in where.values()}, directly(device))
    if split.setup.shares:
        materialise(model, device)
    usual = ShardGroup(mesh["fsdp"].get_group(), copies)
    same_slices = split.mesh.group_or_none(*(SAME_SLICES if plan.cp > 1 else OTHER_SAMPLES))
    shards = FsdpRuntime(model, plan, mine, scatter, usual=usual, apart=where, same_slices=same_slices)
    own = shards.own | {n: p for n, p in split.params.items() if n not in mine}
    for name in split.setup.shares.keys() & own.keys():
        own[name].data.copy_(split.setup.shares.pop(name))
    return replace(split, params=own).using(shards=shards)


def _scattering(
    modules: "list[FSDPModule]", copies: ProcessGroup | None, others: dict[str, ProcessGroup | None], direct: bool
) -> Scatter:  # fmt: skip
    """What sums these modules' gradients into shards, and then over replicas: those in `others` for groups of other ranks, by their name."""
    scatter = (Scatter if direct else DeviceScatter)(copies)
    scatter.others = others
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        sum_unused(module)
        exchange_by(module, scatter, Gather() if direct else None)
        if isinstance(scatter, DeviceScatter) and (copies is not None or others):
            sum_after(module, scatter.sum_over_copies)
    return scatter


def _gather_ahead(split: SplitModel, units: list[list[nn.Module]], gathered: "list[FSDPModule]") -> None:
    """Which group each gathers ahead, in forward and in backward. `gathered`: the first module of each group, the root last.
    A phase of a job may leave out any of them: there each is gathered when it is wanted."""
    if split.job.phases is not None:
        for module in gathered:
            module.set_modules_to_backward_prefetch([module])
        return
    for (here, *_), ahead in zip(units, gathered[1:-1]):
        here.register_forward_pre_hook(_gather_next(ahead, directly(split.device)))
    root, twice = gathered[-1], differentiated(split.sketch)
    again = [*(module for names, module in zip(groups(split.sketch), gathered) if names[0] in twice), root]
    for before, here in zip(again[:1] + again, again):  # FSDP2 itself would also gather what backward never comes to
        here.set_modules_to_backward_prefetch([before])
    if not begins_once(split.whole_sketch):
        root.set_modules_to_backward_prefetch([root])


def _gather_next(ahead: "FSDPModule", direct: bool) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """FSDP2's own forward prefetch would also gather when a unit runs again in backward, for nobody. `direct`: by plait's messages,
    which know no streams."""

    def gather(module: nn.Module, args: tuple[Any, ...]) -> None:
        if in_backward():
            return
        if direct:
            ahead.unshard(async_op=True)
        else:
            gather_ahead(ahead)

    return gather


def share(plan: Plan, rank: int) -> Callable[[Tensor], Tensor]:
    """Takes a rank's part of a whole parameter: its stretch of dim 0."""
    return lambda t: t.narrow(0, *chunk(t.shape[0], plan.fsdp, rank % plan.fsdp))
