"""Plans and batches to compare a run's plan with: fewer micro-batches, less computed again, larger batches, and the fastest plans; and what
they are predicted to save of a step that was measured.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plait.config.keys import KEYS
from plait.config.plan import Plan

if TYPE_CHECKING:
    from plait.planner.question import PlanRequest
    from plait.planner.search import SearchSpace

SENT, COMPUTED = ("tensor", "gradients"), ("compute", "recompute", "optimizer", "fixed", "bubble")
"""Parts of a prediction."""
COMPUTING, AROUND = ("computing", "gradients", "optimizer", "bubble"), ("Python", "checkpoint", "other")
"""Parts of a measured step."""
OVER_TP = "tp over a slow link"
KNOWN = 2.0
"""Times the predicted seconds of computing: what a step takes beyond them is work that the planner does not know, which each sample needs."""
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
    from plait.planner.search import branch_samples, price

    found, refused = list[Alternative](), asked.refused()
    for change, other, batch in _variants(plan, question.batch):
        space = replace(question, batch=batch)
        got = price(asked.pace, other, space, branch_samples(other, space))
        if not refused(other) and space.holds(got):
            got = asked.learned.applied(got)
            found.append(Alternative(change, str(other), batch, dict(got.parts)))
    rows = ask(asked, {"precision": plan.precision}, devices=plan.devices).rows
    for got in (row.candidate.estimate for row in rows if row.fits):
        if got is not None and str(got.plan) != str(plan):
            other = replace(got.plan, batch_shares=plan.batch_shares)
            found.append(Alternative("plan", str(other), question.batch, dict(got.parts)))
    return found


def _variants(plan: Plan, batch: int) -> Iterator[tuple[str, Plan, int]]:
    """(what is changed, the plan, the batch)."""
    for fewer in (n for n in range(1, plan.microbatches) if plan.microbatches % n == 0):
        yield "micro-batches", replace(plan, microbatches=fewer), batch
    for less in KEYS["recompute"].choices[: KEYS["recompute"].choices.index(plan.recompute)]:
        yield "recompute", replace(plan, recompute=less), batch
    for times in LARGER:
        yield "batch", plan, times * batch


@dataclass(frozen=True)
class StepCosts:
    """A run's step of `batch` samples: measured seconds by the parts of its split, those of communication by axes after all ranks have arrived,
    and the seconds that were predicted of it, by what they are spent on."""

    plan: Plan
    batch: int
    measured: Mapping[str, float]
    sent: Mapping[str, float]
    predicted: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.measured.values())

    def saved(self, other: Alternative) -> float:
        """The part of a step that another plan or batch saves, per sample. Measured communication and known computing change as the planner's
        predictions do; what surrounds a step's passes does not depend on the number of samples."""
        times = other.batch / self.batch
        saved = _sum(self.measured, AROUND) * (1 - 1 / times)
        known = min(_sum(self.measured, COMPUTING), KNOWN * _sum(self.predicted, COMPUTED))
        for names, took in ((COMPUTED, known), (SENT, sum(self.sent.values()))):
            own, others = _sum(self.predicted, names), _sum(other.parts, names) / times
            saved += took * (1 - others / own) if own else -others
        return saved / self.seconds


def _sum(parts: Mapping[str, float], names: Sequence[str]) -> float:
    return sum(parts.get(name, 0.0) for name in names)


@dataclass(frozen=True)
class BetterPlan:
    """A plan or a batch that saves `gain`, a part of the run's step."""

    cause: str
    what: str
    why: str
    gain: float
    plan: str
    batch: int


def improvements(costs: StepCosts, others: Sequence[Alternative]) -> Iterable[BetterPlan]:
    """The best of each kind of change."""
    for change in ("micro-batches", "batch", "plan"):
        if same := [other for other in others if other.change == change]:
            yield _improvement(costs, max(same, key=costs.saved))


def _improvement(costs: StepCosts, best: Alternative) -> BetterPlan:
    gain, by_axis, other = costs.saved(best), costs.sent, Plan.parse(best.plan)
    cause, what, why = "plan", f"Use the plan {best.plan}", "The planner predicts that it is faster on this machine."
    if best.change == "micro-batches":
        cause, what = "too many micro-batches", f"Use {other.microbatches} micro-batch{'es' * (other.microbatches > 1)}"
        why = f"Each of {costs.plan.microbatches} micro-batches starts the same operators again; larger ones fit into memory."
    elif best.change == "batch":
        cause, what = "small batch", f"The batch is small: use {best.batch} samples"
        why = f"Much of a step of {costs.batch} samples does not depend on their number, and {best.batch} fit. This changes the training result."
    elif costs.plan.tp > other.tp and max(by_axis, key=lambda axis: by_axis[axis], default="") == "tp":
        cause = OVER_TP
        why = f"Messages of tp take {100 * by_axis['tp'] / costs.seconds:.0f} % of a step, and this plan sends less over the same link."
    return BetterPlan(cause, what, why, gain, best.plan, best.batch)
