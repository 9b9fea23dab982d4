"""Sharded data parallelism (fsdp, ZeRO): N ranks shard one training state, and each computes its own samples.

What it does
    Under data parallelism, parameters, gradients and optimizer state exist N times. Under `fsdp`, each of N ranks keeps
    a 1/N shard of every tensor. A unit's parameters are gathered just before the unit runs, and freed after. Its
    gradients are reduce-scattered into shards, and the optimizer updates shards. `zero_stage` selects the sharded tensors.
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
    then an owner updates each tensor (`parallel/tensor_owners.py`). Some parameters are tied, or used by several units
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
from plait.config.keys import AXES, DATA_AXES, SAME_SLICES
from plait.config.plan import Plan
from plait.launch import groups as groups_of
from plait.model.sketch import Sketch
from plait.parallel.data import batch_norm
from plait.parallel.fsdp import groups, runtime
from plait.parallel.fsdp.runtime import DeviceScatter, FsdpRuntime, ShardGather, ShardGroup, ShardScatter
from plait.parallel.mutations import list_inexact_buffers
from plait.parallel.precision import find_autocast_dtype
from plait.parallel.rank_model import SplitModel
from plait.parallel.spec import REPLICA_REASON, Reduce, ShardPlan, is_shardable
from plait.tensors.collectives import is_direct_exchange
from plait.tensors.module_state import materialize
from plait.tensors.parameters import ParameterAttributes
from plait.tensors.rows import chunk_range
from plait.tensors.torch_private import (
    hook_after_reduce,
    is_in_backward,
    prefetch_gather,
    reduce_unused_params,
    set_fsdp_comms,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

AXIS = "fsdp"
EXACT = True


def is_enabled(plan: Plan) -> bool:
    return plan.is_sharded


def validate(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    if plan.shares > batch:
        what = f"global batch {batch} does not split over {plan.shares} ranks"
        why = f"dp={plan.dp} × fsdp={plan.fsdp} = {plan.shares} ranks: {plan.shares - batch} would never have a sample"
        yield Problem("P012", what, why=why, fix=(f"--batch {plan.shares}",))


def inexact_reasons(plan: Plan, sketch: Sketch) -> Iterable[str]:
    for name in sketch.batch_coupled:
        yield f"batch statistics in {name} are computed by a direct call, which cannot be synchronized over the ranks"
    yield from list_inexact_buffers(plan, sketch, plan.along(SAME_SLICES))


def _make_mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    """Make torch's mesh of the ranks. The axes over which tensors are sharded are adjacent, and merged into the axis `fsdp`."""
    backend, axes = groups_of.choose_mesh_backend(), tuple(axis for axis in AXES if axis not in plan.shard_axes[1:])
    other: dict[int | str, Any] | None = None if backend is None else {axis: backend for axis in axes}  # noqa: C420
    shape = tuple(plan.shards if axis == "fsdp" else getattr(plan, axis) for axis in axes)
    return init_device_mesh(device.type, shape, mesh_dim_names=axes, backend_override=other)


def shard_specs(job: Job, sketch: Sketch, table: ShardPlan) -> ShardPlan:
    """Add the shard and the reductions to each parameter. A scalar is not sharded: its gradient is reduced over the ranks of all these axes."""
    plan = table.plan
    shard, why = table.make_shard_split(plan.shard_axes, 0), "each keeps a shard, and has other samples (fsdp) or another sequence shard (cp)"
    sums = Reduce(plan.shard_axes, "scatter", why), Reduce(plan.replica_axes, "sum", REPLICA_REASON)
    rest = {name: spec for name, spec in table.specs.items() if not spec.expert}
    return replace(table, specs=table.specs | {n: s.with_split(shard).with_reductions(*sums, first=True) for n, s in rest.items()})


def apply(split: SplitModel) -> SplitModel:
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    plan, model, device = split.plan, split.module, split.device
    where = groups.find_expert_shards(split)
    groups.check_formats(split.sketch, [m for m in split.sketch.moe_layers if m.names & where.keys()])
    batch_norm.sync_batch_norms(model, split.sketch.batch_norms, split.mesh.group_or_none(*DATA_AXES), split.batch_peers)
    copies = split.mesh.group_or_none(*plan.replica_axes)
    split.setup.place.make_single_group(device)
    mesh = _make_mesh(plan, device)
    for parameter in split.params.values():
        parameter.data = parameter.data.contiguous()
    experts = split.list_expert_params()
    mine = {n: ParameterAttributes.capture(p) for n, p in split.params.items() if n not in experts or n in where}
    options: dict[str, Any] = {
        "mesh": mesh["fsdp"],
        "ignored_params": {p for n, p in model.named_parameters() if not is_shardable(p.shape) or n not in mine},
        "shard_placement_fn": groups.make_expert_placement(split, where, device),
        "offload_policy": CPUOffloadPolicy(device.type == "cuda") if plan.offload == "all" else OffloadPolicy(),
    }
    units = [[model.get_submodule(name) for name in names] for names in groups.group_units(split.sketch)]
    half = find_autocast_dtype(plan) if split.setup.cast is None else None
    policy = MixedPrecisionPolicy(half, torch.float32 if half else None, cast_forward_inputs=False)
    gathered = list[FSDPModule]()
    for modules in (*units, [model]):
        for module in modules:
            module.register_forward_hook(runtime.copy_views)
        fully_shard(modules, mp_policy=policy, reshard_after_forward=plan.zero_stage == 3 and modules != [model], **options)
        for module in modules:
            runtime.keep_arguments(module)
        assert isinstance(modules[0], FSDPModule)
        gathered.append(modules[0])
    _set_prefetch(split, units, gathered)
    scatter = _wire_scatter(gathered, copies, {one.group.group_name: one.replicas for one in where.values()}, is_direct_exchange(device))
    if split.setup.meta_shards:
        materialize(model, device)
    usual = ShardGroup(mesh["fsdp"].get_group(), copies)
    same_slices = split.mesh.group_or_none(*(SAME_SLICES if plan.cp > 1 else DATA_AXES))
    shards = FsdpRuntime(model, plan, mine, scatter, main_group=usual, expert_groups=where, same_slices=same_slices)
    own = shards.own | {n: p for n, p in split.params.items() if n not in mine}
    for name in split.setup.meta_shards.keys() & own.keys():
        own[name].data.copy_(split.setup.meta_shards.pop(name))
    return replace(split, params=own).with_techniques(shards=shards)


def _wire_scatter(
    modules: "list[FSDPModule]", copies: ProcessGroup | None, others: dict[str, ProcessGroup | None], direct: bool
) -> ShardScatter:  # fmt: skip
    """Let these modules reduce-scatter their gradients, and all-reduce them over replicas. `others`: the replicas of groups of other
    ranks, by group name."""
    scatter = (ShardScatter if direct else DeviceScatter)(copies)
    scatter.others = others
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        reduce_unused_params(module)
        set_fsdp_comms(module, scatter, ShardGather() if direct else None)
        if isinstance(scatter, DeviceScatter) and (copies is not None or others):
            hook_after_reduce(module, scatter.sum_over_replicas)
    return scatter


def _set_prefetch(split: SplitModel, units: list[list[nn.Module]], gathered: "list[FSDPModule]") -> None:
    """Set the group that each group prefetches, in forward and in backward. `gathered`: the first module of each group, the root last.

    A phase of the job may skip any group. Then each group is gathered when it is needed.
    """
    if split.job.phases is not None:
        for module in gathered:
            module.set_modules_to_backward_prefetch([module])
        return
    for (here, *_), ahead in zip(units, gathered[1:-1]):
        here.register_forward_pre_hook(_make_prefetch_hook(ahead, is_direct_exchange(split.device)))
    root, twice = gathered[-1], groups.list_differentiated(split.sketch)
    again = [*(module for names, module in zip(groups.group_units(split.sketch), gathered) if names[0] in twice), root]
    for before, here in zip(again[:1] + again, again):  # FSDP2 itself would also gather groups that backward never reaches
        here.set_modules_to_backward_prefetch([before])
    if not groups.has_one_backward_start(split.global_sketch):
        root.set_modules_to_backward_prefetch([root])


def _make_prefetch_hook(ahead: "FSDPModule", direct: bool) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """Make a hook that prefetches a group in forward only. `direct`: by plait's messages, which use no streams.

    FSDP2's own forward prefetch would also gather during a recomputation in backward, without use.
    """

    def gather(module: nn.Module, args: tuple[Any, ...]) -> None:
        if is_in_backward():
            return
        if direct:
            ahead.unshard(async_op=True)
        else:
            prefetch_gather(ahead)

    return gather


def make_shard_slicer(plan: Plan, rank: int) -> Callable[[Tensor], Tensor]:
    """Make a function that takes a rank's shard of a full parameter, along dim 0."""
    return lambda t: t.narrow(0, *chunk_range(t.shape[0], plan.fsdp, rank % plan.fsdp))
