"""Plans and batches to compare a run's plan with: fewer micro-batches, less computed again, larger batches, and the fastest plans."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plait.config.keys import KEYS
from plait.config.plan import Plan

if TYPE_CHECKING:
    from plait.planner.question import PlanRequest
    from plait.planner.search_space import SearchSpace

LARGER = (2, 4)
"""Times the batch."""


@dataclass(frozen=True)
class Alternative:
    """A plan that fits into memory. `parts`: predicted seconds of a step of `batch` samples, by what they are spent on."""

    change: str
    """`micro-batches`, `recompute`, `batch` or `plan`: what is other than in the run's plan."""
    plan: str
    batch: int
    parts: dict[str, float]


def alternatives(asked: "PlanRequest", question: "SearchSpace", plan: Plan) -> list[Alternative]:
    """Those of a plan, as far as they fit and nothing refuses them. Imports torch, and this file does not."""
    from plait.planner.answer import ask
    from plait.planner.search import price
    from plait.planner.search_space import branch_samples

    found, refused = list[Alternative](), asked.refused()
    for change, other, batch in _variants(plan, question.batch):
        space = replace(question, batch=batch)
        got = price(asked.pace, other, space, branch_samples(other, space))
        if not refused(other) and space.holds(got):
            got = asked.learned.applied(got)
            found.append(Alternative(change, str(other), batch, dict(got.parts)))
    rows = ask(asked, {"precision": plan.precision}, devices=plan.devices).rows
    for got in (row.estimate for row in rows if row.fits):
        if got is not None and str(got.plan) != str(plan):
            other = replace(got.plan, batch_split=plan.batch_split)
            found.append(Alternative("plan", str(other), question.batch, dict(got.parts)))
    return found


def _variants(plan: Plan, batch: int) -> Iterator[tuple[str, Plan, int]]:
    """(what is changed, the plan, the batch)."""
    for fewer in (n for n in range(1, plan.microbatches) if plan.microbatches % n == 0):
        yield "micro-batches", replace(plan, microbatches=fewer), batch
    for less in KEYS["activation_checkpointing"].choices[: KEYS["activation_checkpointing"].choices.index(plan.activation_checkpointing)]:
        yield "recompute", replace(plan, activation_checkpointing=less), batch
    for times in LARGER:
        yield "batch", plan, times * batch
