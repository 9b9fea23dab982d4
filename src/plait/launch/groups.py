"""Process groups in addition to an existing one. If that one takes no host tensors, as with NCCL alone, gloo handles them.

Ray Train and other programs make an NCCL group before they call plait, which also sends small host tensors.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup


def get_world_group() -> ProcessGroup:
    """Return the existing group of all ranks, or a new group of the same ranks that also takes host tensors. All ranks call it."""
    world = dist.group.WORLD if choose_backend() is None else new_group(None)
    assert isinstance(world, ProcessGroup)
    return world


def new_group(ranks: list[int] | None, **settings: Any) -> object:
    """`dist.new_group` with support for host tensors."""
    return dist.new_group(ranks, backend=choose_backend(), **settings)


def choose_backend() -> str | None:
    """Return the backend for new groups; None: the backend of the existing group."""
    there = dist.get_backend_config()
    return None if "cpu:" in there else f"cpu:gloo,{there}"


def choose_mesh_backend() -> str | None:
    """Return the backend for a `DeviceMesh`.

    If a group is bound to a device, `DeviceMesh` splits its communicator into groups without host tensors, unless a backend is given.
    """
    bound = getattr(dist.group.WORLD, "bound_device_id", None) is not None
    return choose_backend() or (str(dist.get_backend_config()) if bound else None)
