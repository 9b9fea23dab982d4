"""Which of torch's kernels update the weights on a GPU, where the job leaves it open.

torch's optimizers have an update for each tensor, one in calls for lists of tensors (`foreach`) and one in a single kernel (`fused`).
Left open, torch takes lists on a GPU, but an update for each tensor where parameters are shards of FSDP2. The fused kernel reads and writes
every number once, takes shards too, and can leave an update out that is not finite without the host's knowing. So it is taken where
the job says neither `fused` nor `foreach`. Its Adam rounds the betas to fp32: measured on an H200, the squares' average after one step with
beta2 = 0.999 is 1.3e-5 smaller than that of the others, and 2.4e-7 larger with 0.95. That is Adam whose beta2 differs by 1.3e-8.

torch's fused SGD makes all momentum of a group in the group's first step. It fails where a parameter gets its first gradient later, and
keeps memory that nobody has written where that step is one that is left out. So momentum begins as zeros here, which is the same where
`dampening` is 0; with another the update is not fused, and one that the job has fused itself is not made to be left out.
"""

import torch
from torch import nn

from plait.tensors.torch_private import fuse

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Those of torch's optimizers that have a fused kernel for GPUs."""
OPEN = ("fused", "foreach")
"""What a job says of it; it is no hyperparameter."""


def choose(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Fuse the update of the parameters of a rank on a GPU, where the optimizer can and the job says nothing.

    Ranks that hold none, only placeholders of what others hold, choose alike: what is fused decides when they read their numbers.
    """
    groups = optimizer.param_groups
    if device.type == "cuda" and type(optimizer) in FUSED and not any(g.get(key) is not None for g in groups for key in OPEN):
        held = [p for group in groups for p in group["params"]]
        plain = not any(group.get("differentiable") for group in groups)
        if plain and momentum_begins_at_zero(optimizer) and all(_there(p) or p.is_meta for p in held):
            fuse(optimizer)
    if type(optimizer) is torch.optim.SGD and all(group.get("fused") for group in groups):
        optimizer.register_step_pre_hook(_begin_momentum)


def momentum_begins_at_zero(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a first step with momentum of zeros is that without: SGD weighs its first gradient as no other where it has dampening."""
    sgd = isinstance(optimizer, torch.optim.SGD)
    return not (sgd and any(group["momentum"] and group["dampening"] for group in optimizer.param_groups))


def _begin_momentum(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups if momentum_begins_at_zero(optimizer) else ():
        for p in group["params"] if group["momentum"] else ():
            if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)


def _there(p: nn.Parameter) -> bool:
    return p.device.type == "cuda" and p.is_floating_point()
