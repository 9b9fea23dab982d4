"""Experts kept as parts: under `ep` beside a larger `fsdp`, the ranks that hold the same experts shard them.

With `fsdp=4 ep=2` ranks 0 and 2 hold the same half of the experts. Each keeps a part of every one of their tensors,
as it keeps a part, between all four, of the rest of the model. FSDP2 has both in the same unit, each as a group of its
own: they are gathered, dropped and summed at the same moments, between other ranks. Where `ep` uses up `fsdp`
(`fsdp=2 ep=4`) no two ranks of an `fsdp` group hold the same experts, and there is nothing to shard.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from plait.config.plan import Plan
from plait.parallel.fsdp.runtime import ShardGroup
from plait.parallel.mesh import EXPERT_REPLICAS
from plait.parallel.rank_model import SplitModel
from plait.parallel.spec import is_divisible
from plait.tensors.torch_private import FSDPMeshInfo, ShardPlacementResult


def parted(plan: Plan, shape: tuple[int, ...]) -> bool:
    """Whether ranks that hold an expert's tensor of this shape keep parts of it. A scalar stays whole."""
    return plan.ep > 1 and plan.expert_shards > 1 and is_divisible(shape)


def known() -> bool:
    """Whether the installed torch lets parameters of a sharded unit lie on a mesh of their own."""
    return ShardPlacementResult is not None


def lying(split: SplitModel) -> dict[str, ShardGroup]:
    """Which ranks hold the parts of each parameter of this rank's experts that is cut, and along which dim."""
    if (shards := split.mesh.group_or_none("efsdp")) is None:
        return {}
    replicas = split.mesh.group_or_none(*EXPERT_REPLICAS)
    found = {name: split.table.specs[name].shard(split.mesh.at) for name in split.experts()}
    return {name: ShardGroup(shards, replicas, shard[1]) for name, shard in found.items() if shard is not None}


def placement(split: SplitModel, where: dict[str, ShardGroup], device: torch.device) -> Callable[[nn.Parameter], Any] | None:
    """What tells `fully_shard` the ranks and the dim of each of these parameters. None: there are none."""
    if not where:
        return None
    mesh = FSDPMeshInfo(DeviceMesh.from_group(split.mesh.group("efsdp"), device.type), shard_mesh_dim=0)
    dims = {id(split.params[n]): one.dim for n, one in where.items()}
    return lambda p: ShardPlacementResult(Shard(dims[id(p)]), mesh) if id(p) in dims else None
