"""The gradient norm of each parameter group, over all ranks, as an option of a run.

Ranks that hold copies of everything have it without asking. Others have parts of a group's parameters, or none: their shares of the
squared norms are summed, in one small message a step.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from plait.parallel.built import Built
from plait.parallel.fsdp.runtime import FsdpRuntime
from plait.parallel.gradient_sums import CrossGroupSums
from plait.tensors.norm import total_norm


def group_names(built: Built) -> list[str]:
    """How each parameter group is called: by its "name", else its number."""
    return [str(group.get("name", i)) for i, group in enumerate(built.optimizer.param_groups)]


def group_norms(built: Built) -> Tensor:
    """The norm of each group's summed gradients, a float64 tensor of shape [groups] on the device. All ranks call it."""
    groups, names, reducer = built.optimizer.param_groups, built.names or {}, built.reducer
    of = [[names[id(p)] for p in group["params"]] for group in groups]
    if isinstance(reducer, (CrossGroupSums, FsdpRuntime)):
        shares = torch.stack([reducer.square_of(each) for each in of])
        dist.all_reduce(shares, group=reducer.everybody)
        return shares.sqrt()
    found = [[g for n in each if (g := built.own[n].grad) is not None] for each in of]
    return torch.stack([total_norm(gradients, built.device) for gradients in found])
