"""Registry of plans that have their own algorithm, with which `verify` compares the split run instead of one device.

An algorithm is a function that trains the job under the plan in one process:

    train(job, plan, steps, clip, dtype, device, moves=…) -> the same values as `train` of `proof/reference.py`

`clip` is the norm itself. The algorithm shares only `Job` and the keyed random numbers with the engine, and may use the one-device code of
`proof/reference.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from plait.config.job import Job
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.apply_order import Strategy
from plait.parallel.compression import strategy as compression
from plait.parallel.replica_groups import strategy as replica_groups
from plait.parallel.server import strategy as technique
from plait.proof.algorithms import compressed_sums, replicas, server
from plait.proof.verdict import Verdict

Train = Callable[..., dict[str, Any]]
Compare = Callable[[Job, Plan, int], Verdict]
"""(job, plan, steps) -> verdict."""


@dataclass(frozen=True)
class ReferenceAlgorithm:
    """The algorithm of a technique that changes the training result."""

    is_enabled: Callable[[Plan], bool]
    train: Train
    describe: Callable[[Plan], str]
    """Names the algorithm in a few words."""
    strategies: tuple[Strategy, ...]
    """Strategies whose `inexact_reasons` report a changed training result. This is no difference from the algorithm."""
    by_local_batch: bool = False
    """True if batch statistics are computed separately for each local batch."""
    shorten: Callable[[Plan, int], tuple[Plan, int]] = lambda plan, steps: (plan, steps)
    """Returns a (plan, steps) that covers all of the algorithm's behavior in fewer steps."""
    compare: Compare | None = None
    """Compares the run with the algorithm, if its processes are not ranks that step together."""


def shorten_schedule(plan: Plan, steps: int) -> tuple[Plan, int]:
    """Shorten the plan's intervals so that every fragment is synchronized twice within few steps, plus one step."""
    if _count_sync_steps(plan) <= steps:
        return plan, steps
    least = max(3, plan.num_fragments, plan.fragment_delay + 1)
    plan = replace(plan, sync_every=min(plan.sync_every, least), warmup_sync_steps=min(plan.warmup_sync_steps, 2))
    return plan, max(steps, _count_sync_steps(plan))


def _count_sync_steps(plan: Plan) -> int:
    """Steps up to the one after the second synchronization, when groups differ again."""
    return plan.warmup_sync_steps + 2 * plan.sync_every + plan.fragment_delay + (plan.sync_every > 1)


ALGORITHMS = (
    ReferenceAlgorithm(
        compression.is_between_replicas,
        compressed_sums.train_reference,
        compression.describe_compression,
        (compression,),
        by_local_batch=True,
    ),
    ReferenceAlgorithm(
        replica_groups.is_enabled,
        replicas.train_reference,
        replica_groups.describe_replica_groups,
        (replica_groups,),
        shorten=shorten_schedule,
    ),
    ReferenceAlgorithm(
        technique.is_enabled, server.train_reference, server.describe_replay, (technique,), compare=server.compare_replay
    ),
)
"""The first enabled algorithm counts. A combination of two must come before each of them."""


def find_algorithm(plan: Plan) -> ReferenceAlgorithm | None:
    """The algorithm that the plan runs, or None if it trains as one device."""
    return next((own for own in ALGORITHMS if own.is_enabled(plan)), None)


def get_train_function(plan: Plan) -> Train | None:
    """Train function of the plan's algorithm; None if the plan trains as one device."""
    own = find_algorithm(plan)
    return own.train if own is not None else None


def list_algorithm_notes(plan: Plan) -> set[str]:
    """Lines in a plan's inexact reasons that exist because it has its own algorithm."""
    own = find_algorithm(plan)
    return {line for s in own.strategies for line in s.inexact_reasons(plan, Sketch(()))} if own is not None else set()
