"""How the allocator of a device takes memory: chosen before the first allocation of a rank, never over what the user has set.

A segment of the device has by itself the size of what was first asked for, and is cut into blocks: after batches of other lengths, an
evaluation, or micro-batches of several stages there are holes that nothing fits into. With `expandable_segments` a segment grows
page by page, and holes of the address space cost no memory. Not on ROCm, where the virtual memory that this takes is missing from
many versions; a driver without it (WSL, some virtual machines) says so in a warning, and nothing else changes.
"""

import os

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names of torch's variable; the first is that of torch 2.9 and later."""
CHOSEN = "expandable_segments:True"


def settle() -> None:
    """Choose for this process, and say it in the environment. Before the first allocation on a device."""
    import torch

    from plait.tensors.torch_private import set_allocator

    if torch.version.hip is None and not any(name in os.environ for name in NAMES):
        os.environ[NAMES[0]] = CHOSEN
        set_allocator(CHOSEN)  # torch has read the variable already, where something asked the allocator
