"""The strategies, in the order in which they are applied to a model.

The pipeline first, because everything after it belongs to a stage. Then whose experts are where, which
slices of layers and which stretches of sequences; then precision, because it decides in which format
everything after it computes; what splits the samples inside one process (threads, micro-batches); what is recomputed,
inside of which compile works; then the copies and shards between processes, because their hooks must see the parameters
as they finally are; and last where the optimizer's tensors live, because only now it is known which they are.
"""

from plait.config.plan import Plan
from plait.model.experts import without
from plait.model.sketch import Sketch
from plait.parallel import accumulate, compiled, offload, precision, recompute, threads
from plait.parallel.context import strategy as context
from plait.parallel.data import strategy as copies
from plait.parallel.expert import strategy as expert
from plait.parallel.fsdp import strategy as shard
from plait.parallel.pipeline import strategy as pipeline
from plait.parallel.strategy import Charge, Role, Strategy
from plait.parallel.tensor import strategy as tensor

ORDER: tuple[Strategy, ...] = (
    pipeline,
    expert,
    tensor,
    context,
    precision,
    threads,
    accumulate,
    recompute,
    compiled,
    copies,
    shard,
    offload,
)

__all__ = ["ORDER", "Charge", "Role", "Strategy", "charges"]


def charges(plan: Plan, sketch: Sketch, role: Role) -> list[Charge]:
    """What all strategies of a plan cost one rank in one step. `sketch`: of the whole model."""
    mine = (sketch if role.layout is None else role.layout.part(role.index(plan))).local(plan.at(role.rank)["tp"])
    mine = without(mine, plan)
    found = [charge for s in ORDER if s.wanted(plan) for charge in s.price(plan, mine, role)]
    if plan.across:
        names = {name for name, _, _ in sketch.parameters}.union(*(m.trained for m in sketch.mixtures))
        count = len(names) if shard.wanted(plan) else 0  # without shards a rank knows by itself which were used
        told = "loss, norm, stop, samples and time" + ("; which parameters were used" if count else "")
        found.append(Charge("traffic", "all", "allreduce_", 1, 8 * (copies.rider_of(plan) + 1 + count), told))
    return found
