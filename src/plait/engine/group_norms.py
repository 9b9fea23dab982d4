"""The gradient norm of each parameter group, over all ranks, as an option of a run.

Ranks that hold copies of everything have it without asking. Others have parts of a group's parameters, or none: their shares of the
squared norms are summed, in one small message a step.
"""

import torch
import torch.distributed as dist

from plait.parallel.built import Built
from plait.parallel.fsdp.runtime import FsdpRuntime
from plait.parallel.gradient_sums import CrossGroupSums


def group_norms(built: Built, unscale: float = 1.0) -> dict[str, float]:
    """The norm of each group's summed gradients × `unscale`, by the group's "name", else its number. All ranks call it."""
    groups, names, reducer = built.optimizer.param_groups, built.names or {}, built.reducer
    of = [[names[id(p)] for p in group["params"]] for group in groups]
    if isinstance(reducer, (CrossGroupSums, FsdpRuntime)):
        shares = torch.tensor([reducer.square_of(each) for each in of], dtype=torch.float64, device=built.device)
        dist.all_reduce(shares, group=reducer.everybody)
        norms = shares.sqrt().tolist()
    else:
        found = [[g for n in each if (g := built.own[n].grad) is not None] for each in of]
        norms = [float(torch.nn.utils.get_total_norm(gradients)) for gradients in found]
    return {str(group.get("name", i)): norm * unscale for i, (group, norm) in enumerate(zip(groups, norms))}
