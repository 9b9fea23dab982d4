"""Plans and batch sizes to compare with a run's plan: fewer micro-batches, less recomputation, larger batches, and the fastest plans."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plait.config.keys import KEYS
from plait.config.plan import Plan

if TYPE_CHECKING:
    from plait.planner.plan_request import PlanRequest
    from plait.planner.search_space import SearchSpace

BATCH_FACTORS = (2, 4)
"""Factors on the batch size of larger batches to compare."""


@dataclass(frozen=True)
class Alternative:
    """A plan that fits into memory. `parts`: predicted seconds of a step of `batch` samples, by cause."""

    change: str
    """`micro-batches`, `recompute`, `batch` or `plan`: the change from the run's plan."""
    plan: str
    batch: int
    parts: dict[str, float]


def find_alternatives(request: "PlanRequest", base_space: "SearchSpace", plan: Plan) -> list[Alternative]:
    """Price variants of a plan that are valid and fit into memory, and the fastest plans.

    Imports torch; importing this module does not.
    """
    from plait.planner.answer import find_answer
    from plait.planner.search import price_plan
    from plait.planner.search_space import count_branch_samples

    found, refused = list[Alternative](), request.make_refusal()
    for change, other, batch in _vary_plan(plan, base_space.batch):
        space = replace(base_space, batch=batch)
        got = price_plan(request.pace, other, space, count_branch_samples(other, space))
        if not refused(other) and space.can_hold(got):
            got = request.learned.correct_estimate(got)
            found.append(Alternative(change, str(other), batch, dict(got.parts)))
    rows = find_answer(request, {"precision": plan.precision}, devices=plan.devices).rows
    for got in (row.estimate for row in rows if row.fits):
        if got is not None and str(got.plan) != str(plan):
            other = replace(got.plan, batch_split=plan.batch_split)
            found.append(Alternative("plan", str(other), base_space.batch, dict(got.parts)))
    return found


def _vary_plan(plan: Plan, batch: int) -> Iterator[tuple[str, Plan, int]]:
    """Yield (kind of change, plan, batch size)."""
    for fewer in (n for n in range(1, plan.microbatches) if plan.microbatches % n == 0):
        yield "micro-batches", replace(plan, microbatches=fewer), batch
    for less in KEYS["activation_checkpointing"].choices[: KEYS["activation_checkpointing"].choices.index(plan.activation_checkpointing)]:
        yield "recompute", replace(plan, activation_checkpointing=less), batch
    for times in BATCH_FACTORS:
        yield "batch", plan, times * batch
