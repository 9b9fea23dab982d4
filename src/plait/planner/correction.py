"""How far off predictions are, learned from measured runs.

The logarithm of measured over predicted time is taken to be a sum of independent errors: one that all runs of an occasion share, one for each
software, device, model, number format and layout, two that runs of like size share in part, one for what messages of gradients take at this
place, and noise. So a run that is like a measured one is known better than one that is not, and how sure a prediction is follows from the same
sum (a Gaussian process over labels, sizes and shares). With no measured runs it says how wrong the model itself is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from typing import Any

import numpy as np

from plait.config.plan import Plan
from plait.planner.estimate import Estimate
from plait.planner.search import ALIKE, Found

PARTS = {"occasion": 0.143, "software": 0.151, "device": 0.07, "model": 0.052, "precision": 0.09, "layout": 0.062}
"""Standard deviation of each shared error, of published sources that were predicted without any of their rows (`bench/fit.py --folds`)."""
NEAR = {"work": 0.142, "devices": 0.072}
"""The same of errors that change with a size: those of runs that are `e` times as large correlate by 1/e."""
OWN = {"place": 2.0, "axes": 0.2, "plan": 0.1}
"""The same of a user's own runs: what all runs on the machine share is nearly unknown before the first of them; a way to split, and a plan, that were
run are known better than others."""
SPENT = {"gradients": 0.655}
"""That of the seconds of a part of the step, which counts by the part's share of it."""
ON_CORES = {"slices": 4.0}
"""The same for messages inside layers between processes of one host, each of which waits until the others are given a core: what is predicted
of them is little, and wrong by a factor."""
NOISE = 0.076
"""That of two runs that are alike in all of these."""
ROUTED = 0.325
"""The same for mixtures of experts: releases of one framework alone differ by 76 % there."""
NINETY = 1.645
"""Standard deviations that hold nine tenths of a normal distribution."""


@dataclass(frozen=True)
class Traits:
    """What a run is like."""

    labels: Mapping[str, str] = field(default_factory=dict)
    """Of the keys of `PARTS`, "" where nothing can be wrong."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """What parts of the step are of it, by the names of an estimate's."""
    sizes: Mapping[str, float] = field(default_factory=dict)
    """Logarithms, of the keys of `NEAR`."""
    routed: bool = False
    """Its rows go to experts."""


@dataclass(frozen=True)
class Correction:
    """What to multiply a predicted time with, and how sure the product is."""

    factor: float
    deviation: float
    """Standard deviation of the logarithm."""

    @property
    def low(self) -> float:
        """The factor that one of twenty runs falls below."""
        return self.factor * exp(-NINETY * self.deviation)

    @property
    def high(self) -> float:
        """The factor that one of twenty runs exceeds."""
        return self.factor * exp(NINETY * self.deviation)


def correction(of: Traits, anchors: Sequence[tuple[Traits, float]] = ()) -> Correction:
    """For a run like `of`, from measured ones: (traits, logarithm of measured over predicted seconds)."""
    scatter = _scatter(anchors)
    own = max(_noise(of), scatter)
    total = _alike(of, of) + own
    if not anchors:
        return Correction(1.0, float(np.sqrt(total)))
    between = np.array([[_alike(a, b) for b, _ in anchors] for a, _ in anchors])
    between += np.diag([max(_noise(a), scatter) for a, _ in anchors])
    towards = np.array([_alike(of, a) for a, _ in anchors])
    solved = np.linalg.solve(between, towards)
    mean = float(solved @ np.array([error for _, error in anchors]))
    return Correction(exp(mean), float(np.sqrt(max(total - solved @ towards, own))))


def _scatter(anchors: Sequence[tuple[Traits, float]]) -> float:
    """The variance of runs of one plan, as on a machine that others use too; nothing where no plan was run twice."""
    runs: dict[str, list[float]] = {}
    for traits, error in anchors:
        runs.setdefault(traits.labels.get("plan", ""), []).append(error)
    again = [errors for plan, errors in runs.items() if plan and len(errors) > 1]
    squares = sum(float(np.var(errors)) * len(errors) for errors in again)
    return squares / max(1, sum(len(errors) - 1 for errors in again))


def _alike(a: Traits, b: Traits) -> float:
    """The covariance of two runs' errors."""
    same = sum(size**2 for part, size in (PARTS | OWN).items() if a.labels.get(part, "") == b.labels.get(part, "") != "")
    near = sum(size**2 * exp(-abs(a.sizes[part] - b.sizes[part])) for part, size in NEAR.items() if part in a.sizes and part in b.sizes)
    return same + near + sum(size**2 * a.shares.get(part, 0.0) * b.shares.get(part, 0.0) for part, size in (SPENT | ON_CORES).items())


def _noise(of: Traits) -> float:
    return (ROUTED if of.routed else NOISE) ** 2


def sizes_of(found: Estimate) -> dict[str, float]:
    """How large a run is: operations of a micro-batch on one device, and devices."""
    return {"work": log(found.flops / found.plan.microbatches), "devices": log(found.plan.devices)}


def layout_of(plan: Plan) -> str:
    """What is split, as a label of runs."""
    return f"{plan.tp} {plan.pp} {plan.cp} {plan.ep} {plan.zero_stage if plan.fsdp > 1 else 0} {plan.activation_checkpointing}"


@dataclass(frozen=True)
class Learned:
    """What runs of this machine say of predictions: each as (traits, logarithm of measured over predicted seconds)."""

    anchors: tuple[tuple[Traits, float], ...] = ()
    model: str = ""
    """The job whose plans are predicted."""
    routed: bool = False
    """It has mixtures of experts."""
    on_cores: bool = False
    """Devices are the cores of a host."""
    folder: str = ""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Runs that nothing was learned from, by the reason."""

    def traits(self, found: Estimate) -> Traits:
        """What a run of this job would be like."""
        plan = found.plan
        labels = {"place": "here", "model": self.model, "precision": plan.precision, "layout": layout_of(plan),
                  "axes": f"{plan.tp} {plan.pp} {plan.cp} {plan.ep}", "plan": f"{self.model} {plan}"}  # fmt: skip
        shares = {part: found.share(part) for part in SPENT}
        return Traits(labels, shares | ({"slices": found.share("tensor")} if self.on_cores else {}), sizes_of(found), self.routed)

    def of(self, found: Estimate) -> Correction:
        """What the runs say of one prediction."""
        return correction(self.traits(found), self.anchors)

    def applied(self, found: Estimate) -> Estimate:
        """A prediction, corrected: the parts of its step are as much longer as all of it."""
        factor = self.of(found).factor if self.anchors else 1.0
        return replace(found, seconds=found.seconds * factor, parts={name: each * factor for name, each in found.parts.items()})

    def corrected(self, found: Found) -> Found:
        """What a search found, corrected and in the order of the corrected times."""
        if not self.anchors:
            return found
        best = [replace(c, estimate=c.estimate and self.applied(c.estimate)) for c in found.best]
        least = min((c.cost for c in best), default=0.0)
        first = next((c for c in best if c.cost <= least * (1 + ALIKE)), None)  # of plans as fast, what was first without runs
        return replace(found, best=tuple(sorted(best, key=lambda c: (c is not first, c.cost, str(c.plan)))))

    def describe(self) -> str:
        """The end of the line that says how sure predictions are; nothing where there are no runs."""
        skipped = ", ".join(f"{n} {why}" for why, n in sorted(self.skipped.items()))
        if not self.anchors:
            return f"; learned from no run in {self.folder}: {skipped}" if skipped else ""
        mean = exp(sum(error for _, error in self.anchors) / len(self.anchors))
        runs = f"{len(self.anchors)} run{'s' * (len(self.anchors) > 1)}"
        wrong = f"{100 * abs(1 - 1 / mean):.0f} % too {'fast' if mean > 1 else 'slow'}" if mean < 2 else f"{mean:.1f} × too fast"
        return f"; learned from {runs} in {self.folder} (predictions were {wrong})" + (f"; skipped: {skipped}" if skipped else "")

    def to_dict(self) -> dict[str, Any]:
        return {"runs": len(self.anchors), "folder": self.folder, "errors": [error for _, error in self.anchors], "skipped": dict(self.skipped)}


NOTHING = Learned()
"""Of no run."""
