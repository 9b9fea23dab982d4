"""Experts kept as parts: under `ep` beside a larger `fsdp`, the ranks that hold the same experts shard them.

With `fsdp=4 ep=2` ranks 0 and 2 hold the same half of the experts. Each keeps a part of every one of their tensors,
as it keeps a part, between all four, of the rest of the model. FSDP2 has both in the same unit, each as a group of its
own: they are gathered, dropped and summed at the same moments, between other ranks. Where `ep` uses up `fsdp`
(`fsdp=2 ep=4`) no two ranks of an `fsdp` group hold the same experts, and there is nothing to shard.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from plait.config.plan import Plan
from plait.model.experts import Mixture
from plait.model.sketch import Sketch
from plait.parallel.fsdp.collectives import messages
from plait.parallel.fsdp.groups import gathers, homes
from plait.parallel.fsdp.memory import width
from plait.parallel.fsdp.runtime import Where, along, divides, padded
from plait.parallel.role import Role
from plait.parallel.strategy import Charge
from plait.tensors.torch_private import FSDPMeshInfo, ShardPlacementResult


def parted(plan: Plan, shape: tuple[int, ...]) -> bool:
    """Whether ranks that hold an expert's tensor of this shape keep parts of it. A scalar stays whole."""
    return plan.ep > 1 and plan.expert_shards > 1 and divides(shape)


def known() -> bool:
    """Whether the installed torch lets parameters of a sharded unit lie on a mesh of their own."""
    return ShardPlacementResult is not None


def lying(built: Any) -> dict[str, Where]:
    """Which ranks hold the parts of each parameter of this rank's experts that is cut, and along which dim."""
    if built.apart is None:
        return {}
    shapes = {n: tuple(built.own[n].shape) for n in built.own if n in built.experts and divides(built.own[n].shape)}
    return {n: Where(built.apart, built.alike, along(s, built.apart.size())) for n, s in shapes.items()}


def placement(built: Any, where: dict[str, Where], device: torch.device) -> Callable[[nn.Parameter], Any] | None:
    """What tells `fully_shard` the ranks and the dim of each of these parameters. None: there are none."""
    if not where:
        return None
    mesh = FSDPMeshInfo(DeviceMesh.from_group(built.apart, device.type), shard_mesh_dim=0)
    dims = {id(built.own[n]): one.dim for n, one in where.items()}
    return lambda p: ShardPlacementResult(Shard(dims[id(p)]), mesh) if id(p) in dims else None


def price(plan: Plan, sketch: Sketch, role: Role, mixtures: list[Mixture]) -> Iterable[Charge]:
    """Gathers and sums of the experts' parts, unit by unit, and the sums over ranks with the same parts.

    `mixtures`: those of this rank.
    """
    ranks, rank = plan.expert_shards, plan.share(role.rank) % plan.ep
    if ranks == 1:
        return
    often, trained = gathers(plan, sketch, role), 0
    sums = plan.microbatches if plan.zero > 1 and plan.pp == 1 else 1
    copies = plan.shares * plan.cp // (plan.ep * ranks)
    for group, inside in homes(sketch, mixtures).items():
        rows = [(*row, row[0] in m.trained) for m in inside for row in m.held(m.mine(plan.ep, rank))]
        sizes = [(padded(s, ranks, along(s, ranks)), d, t) for _, s, d, t in rows if divides(s)]
        all_bytes = sum(n * width(plan, d) for n, d, _ in sizes)
        bytes_ = sum(n * d.itemsize for n, d, t in sizes if t)
        trained += bytes_
        for op, calls, size, what in messages(ranks, (often[group], all_bytes), (sums, bytes_), role.direct):
            yield Charge("traffic", "ep", op, calls, size, f"{what} experts in {group or 'the root'}")
        if bytes_ and copies > 1 and sums == 1:
            yield Charge("traffic", "ep", "allreduce_", 1, bytes_, f"copies' gradients of experts in {group}")
    if trained and copies > 1 and sums > 1:
        yield Charge("traffic", "ep", "allreduce_", 1, trained, "copies' gradients of experts, once per step")
