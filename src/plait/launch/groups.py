"""Process groups beside one that somebody else made: where that takes no tensors of the host, as NCCL alone does, gloo takes them.

Ray Train, and many a program, makes a group of NCCL before it calls plait, which also sends small tensors of the host.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup


def of_all() -> ProcessGroup:
    """The group of all ranks that exists; or one of the same ranks that also takes tensors of the host. All ranks call it."""
    world = dist.group.WORLD if backend() is None else new_group(None)
    assert isinstance(world, ProcessGroup)
    return world


def new_group(ranks: list[int] | None, **settings: Any) -> object:
    """`dist.new_group`, of which the groups take tensors of the host."""
    return dist.new_group(ranks, backend=backend(), **settings)


def backend() -> str | None:
    """What groups beside the one that exists need as theirs; None: the same as that one."""
    there = dist.get_backend_config()
    return None if "cpu:" in there else f"cpu:gloo,{there}"


def backend_of_meshes() -> str | None:
    """The same for `DeviceMesh`, which splits the communicator of a group that has a device into groups without those of the host,
    unless it is told a backend of all devices."""
    bound = getattr(dist.group.WORLD, "bound_device_id", None) is not None
    return backend() or (str(dist.get_backend_config()) if bound else None)
