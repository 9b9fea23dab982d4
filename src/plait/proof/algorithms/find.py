"""Which plan has an algorithm of its own, to which `verify` holds the split run instead of to one device.

An algorithm is a function that trains the job as the plan means it, in one process:

    train(job, plan, steps, clip, dtype, device, moves=…) -> what `train` of `proof/reference.py` returns

`clip` is the norm itself. It shares nothing with the engine but `Job` and the keyed random numbers, and may use what
`proof/reference.py` has of one device.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from plait.config.job import Job
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.compression import strategy as compression
from plait.parallel.order import Strategy
from plait.parallel.replica_groups import strategy as replica_groups
from plait.parallel.server import strategy as technique
from plait.proof.algorithms import compressed, replicas, server
from plait.proof.verdict import Verdict

Train = Callable[..., dict[str, Any]]
Compare = Callable[[Job, Plan, int], Verdict]
"""(job, plan, steps) -> verdict."""


@dataclass(frozen=True)
class OwnTraining:
    """A technique that is another training than one device's."""

    wanted: Callable[[Plan], bool]
    train: Train
    named: Callable[[Plan], str]
    """The algorithm in a few words."""
    strategies: tuple[Strategy, ...]
    """Those whose `inexact` says that it is another training: no reason to differ from the algorithm."""
    by_share: bool = False
    """It computes the batch share by share, with what is made of the batch as a whole (its statistics) of each share."""
    shortened: Callable[[Plan, int], tuple[Plan, int]] = lambda plan, steps: (plan, steps)
    """(plan, steps) that come to everything that it does, of a plan that would want many more steps."""
    compare: Compare | None = None
    """What compares the run with the algorithm, if its processes are no ranks that step together."""


def shortened(plan: Plan, steps: int) -> tuple[Plan, int]:
    """A plan and steps in which every fragment is synchronised twice, and one step more: with fewer steps between, where it wants many."""
    if _enough(plan) <= steps:
        return plan, steps
    least = max(3, plan.num_fragments, plan.fragment_delay + 1)
    plan = replace(plan, sync_every=min(plan.sync_every, least), warmup_sync_steps=min(plan.warmup_sync_steps, 2))
    return plan, max(steps, _enough(plan))


def _enough(plan: Plan) -> int:
    """Steps up to one after the second synchronisation, where groups are apart again."""
    return plan.warmup_sync_steps + 2 * plan.sync_every + plan.fragment_delay + (plan.sync_every > 1)


OWN = (
    OwnTraining(compression.of_copies, compressed.train, compression.named, (compression,), by_share=True),
    OwnTraining(replica_groups.wanted, replicas.train, replica_groups.named, (replica_groups,), shortened=shortened),
    OwnTraining(technique.wanted, server.train, server.named, (technique,), compare=server.compare),
)
"""The first that is wanted counts: a combination of two comes before each of them."""


def found(plan: Plan) -> OwnTraining | None:
    """The technique whose algorithm the plan runs, if it has one."""
    return next((own for own in OWN if own.wanted(plan)), None)


def algorithm_of(plan: Plan) -> Train | None:
    """What trains as the plan means it, in one process; None: that is one device's training."""
    own = found(plan)
    return own.train if own is not None else None


def by_algorithm(plan: Plan) -> set[str]:
    """What is named inexact of a plan because it has an algorithm of its own."""
    own = found(plan)
    return {line for s in own.strategies for line in s.inexact(plan, Sketch(()))} if own is not None else set()
