"""Which of torch's kernels update the weights on a GPU, where the job leaves it open.

torch's optimizers have an update for each tensor, one in calls for lists of tensors (`foreach`) and one in a single kernel (`fused`).
Left open, torch takes lists on a GPU, but an update for each tensor where parameters are shards of FSDP2. The fused kernel reads and writes
every number once, takes shards too, and can leave an update out that is not finite without the host's knowing. So it is taken where
the job says neither `fused` nor `foreach`. It rounds otherwise than the others, by about one unit of the last digit.
"""

import torch
from torch import nn

from plait.tensors.torch_private import fuse

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Those of torch's optimizers that have a fused kernel for GPUs."""
OPEN = ("fused", "foreach")
"""What a job says of it; it is no hyperparameter."""


def choose(optimizer: torch.optim.Optimizer) -> None:
    """Fuse the update of parameters on a GPU, where the optimizer can and the job says nothing."""
    groups = optimizer.param_groups
    if type(optimizer) in FUSED and not any(group.get(key) is not None for group in groups for key in OPEN):
        held = [p for group in groups for p in group["params"]]
        plain = not any(group.get("differentiable") for group in groups)
        if plain and any(_there(p) for p in held) and all(_there(p) or p.is_meta for p in held):
            fuse(optimizer)


def _there(p: nn.Parameter) -> bool:
    return p.device.type == "cuda" and p.is_floating_point()
