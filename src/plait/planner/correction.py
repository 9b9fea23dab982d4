"""Correction of predicted step times, and their uncertainty, learned from measured runs.

The model is a Gaussian process over labels, sizes and fractions of the step. The logarithm of measured over predicted time is a sum of
independent errors:

- one error shared by all runs of an occasion, and one for each software, device, model, number format and layout;
- errors that runs of similar size share in part, and one for the time of gradient messages at this site;
- noise.

A run that resembles a measured one therefore has a smaller uncertainty. Without measured runs, the sum gives the error of the model itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from typing import Any

import numpy as np

from plait.config.plan import Plan
from plait.planner.estimate import Estimate
from plait.planner.search import TIE_FRACTION, SearchResult

ERROR_DEVIATIONS = {"occasion": 0.143, "software": 0.151, "device": 0.07, "model": 0.052, "precision": 0.09, "layout": 0.062}
"""Standard deviation of each shared error, from published sources predicted without any of their own rows (`bench/fit.py --folds`)."""
SIZE_DEVIATIONS = {"work": 0.142, "devices": 0.072}
"""Standard deviation of errors that depend on size: the correlation of runs whose sizes differ by a factor of `e` is 1/e."""
LOCAL_DEVIATIONS = {"place": 1.0, "axes": 0.1, "plan": 0.1}
"""The same for local runs. The error of the machine is nearly unknown before its first run. Axes and plans that ran are better known."""
PART_DEVIATIONS = {"gradients": 0.655}
"""Standard deviation of the error in one part of the step, scaled by its fraction of the step."""
LOCAL_PART_DEVIATIONS = {"device": 2.0, "tensor": 0.6}
"""The same for local runs. `device` is the part of the step that depends on the speed of the devices."""
NOISE = 0.076
"""Standard deviation between runs that agree in all labels and sizes."""
MOE_NOISE = 0.325
"""The same for mixtures of experts, where releases of one framework differ by 76 %."""
Z_SCORE_90 = 1.645
"""Half-width of the 90 % interval of a normal distribution, in standard deviations."""


@dataclass(frozen=True)
class RunTraits:
    """The properties of a run on which prediction errors depend."""

    labels: Mapping[str, str] = field(default_factory=dict)
    """Values by the keys of `ERROR_DEVIATIONS`; "" if that error cannot occur."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Fraction of the step of each part, by the keys of `PART_DEVIATIONS` and `LOCAL_PART_DEVIATIONS`."""
    sizes: Mapping[str, float] = field(default_factory=dict)
    """Logarithms, by the keys of `SIZE_DEVIATIONS`."""
    has_experts: bool = False
    """The model has mixtures of experts."""


@dataclass(frozen=True)
class Correction:
    """A factor on predicted seconds, and its uncertainty."""

    factor: float
    deviation: float
    """Standard deviation of the logarithm of the factor."""

    @property
    def low(self) -> float:
        """5th percentile of measured over predicted time."""
        return self.factor * exp(-Z_SCORE_90 * self.deviation)

    @property
    def high(self) -> float:
        """95th percentile of measured over predicted time."""
        return self.factor * exp(Z_SCORE_90 * self.deviation)


def fit_correction(traits: RunTraits, anchors: Sequence[tuple[RunTraits, float]] = ()) -> Correction:
    """Predict the correction of a run from measured runs: (traits, logarithm of measured over predicted seconds)."""
    scatter = _estimate_scatter(anchors)
    own = max(_compute_noise(traits), scatter)
    total = _compute_covariance(traits, traits) + own
    if not anchors:
        return Correction(1.0, float(np.sqrt(total)))
    between = np.array([[_compute_covariance(a, b) for b, _ in anchors] for a, _ in anchors])
    between += np.diag([max(_compute_noise(a), scatter) for a, _ in anchors])
    towards = np.array([_compute_covariance(traits, a) for a, _ in anchors])
    solved = np.linalg.solve(between, towards)
    mean = float(solved @ np.array([error for _, error in anchors]))
    return Correction(exp(mean), float(np.sqrt(max(total - solved @ towards, own))))


def _estimate_scatter(anchors: Sequence[tuple[RunTraits, float]]) -> float:
    """Return the variance between repeated runs of one plan, such as on a shared machine; 0 if no plan was repeated."""
    runs: dict[str, list[float]] = {}
    for traits, error in anchors:
        runs.setdefault(traits.labels.get("plan", ""), []).append(error)
    again = [errors for plan, errors in runs.items() if plan and len(errors) > 1]
    squares = sum(float(np.var(errors)) * len(errors) for errors in again)
    return squares / max(1, sum(len(errors) - 1 for errors in again))


def _compute_covariance(a: RunTraits, b: RunTraits) -> float:
    """Return the covariance of the errors of two runs."""
    same = sum(size**2 for part, size in (ERROR_DEVIATIONS | LOCAL_DEVIATIONS).items() if a.labels.get(part, "") == b.labels.get(part, "") != "")
    near = sum(size**2 * exp(-abs(a.sizes[part] - b.sizes[part])) for part, size in SIZE_DEVIATIONS.items() if part in a.sizes and part in b.sizes)
    parts = PART_DEVIATIONS | LOCAL_PART_DEVIATIONS
    return same + near + sum(size**2 * a.shares.get(part, 0.0) * b.shares.get(part, 0.0) for part, size in parts.items())


def _compute_noise(traits: RunTraits) -> float:
    return (MOE_NOISE if traits.has_experts else NOISE) ** 2


def compute_log_sizes(found: Estimate) -> dict[str, float]:
    """Return the logarithms of the operations of a micro-batch on one device, and of the device count."""
    return {"work": log(found.flops / found.plan.microbatches), "devices": log(found.plan.devices)}


def label_layout(plan: Plan) -> str:
    """Return the label of a plan's layout: its parallel sizes, ZeRO stage and activation checkpointing."""
    return f"{plan.tp} {plan.pp} {plan.cp} {plan.ep} {plan.zero_stage if plan.fsdp > 1 else 0} {plan.activation_checkpointing}"


@dataclass(frozen=True)
class LearnedCorrection:
    """Runs measured on this machine, as (traits, logarithm of measured over predicted seconds), and corrections from them."""

    anchors: tuple[tuple[RunTraits, float], ...] = ()
    model: str = ""
    """Name of the job whose plans are predicted."""
    has_experts: bool = False
    """The job has mixtures of experts."""
    folder: str = ""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Number of runs that were not used, by reason."""

    def make_traits(self, found: Estimate) -> RunTraits:
        """Return the traits of a run of this job under an estimated plan."""
        plan = found.plan
        labels = {"place": "here", "model": self.model, "precision": plan.precision, "layout": label_layout(plan),
                  "axes": f"{plan.tp} {plan.pp} {plan.cp} {plan.ep}", "plan": f"{self.model} {plan}"}  # fmt: skip
        shares = {part: found.get_fraction(part) for part in (*PART_DEVIATIONS, "tensor")}
        shares["device"] = sum(map(found.get_fraction, ("compute", "recompute", "bubble", "optimizer")))
        return RunTraits(labels, shares, compute_log_sizes(found), self.has_experts)

    def predict_correction(self, found: Estimate) -> Correction:
        """Predict the correction of one estimate."""
        return fit_correction(self.make_traits(found), self.anchors)

    def correct_estimate(self, found: Estimate) -> Estimate:
        """Return the corrected estimate. All parts of the step scale by the same factor."""
        factor = self.predict_correction(found).factor if self.anchors else 1.0
        return replace(found, seconds=found.seconds * factor, parts={name: each * factor for name, each in found.parts.items()})

    def correct_result(self, found: SearchResult) -> SearchResult:
        """Return a search result with corrected times, sorted by them."""
        if not self.anchors:
            return found
        best = [replace(c, estimate=c.estimate and self.correct_estimate(c.estimate)) for c in found.best]
        least = min((c.cost for c in best), default=0.0)
        first = next((c for c in best if c.cost <= least * (1 + TIE_FRACTION)), None)  # among ties, the plan that was first without runs
        return replace(found, best=tuple(sorted(best, key=lambda c: (c is not first, c.cost, str(c.plan)))))

    def describe(self) -> str:
        """Describe the runs used, as the end of the confidence line; empty without runs."""
        skipped = ", ".join(f"{n} {why}" for why, n in sorted(self.skipped.items()))
        if not self.anchors:
            return f"; learned from no run in {self.folder}: {skipped}" if skipped else ""
        mean = exp(sum(error for _, error in self.anchors) / len(self.anchors))
        runs = f"{len(self.anchors)} run{'s' * (len(self.anchors) > 1)}"
        wrong = f"{100 * abs(1 - 1 / mean):.0f} % too {'fast' if mean > 1 else 'slow'}" if mean < 2 else f"{mean:.1f} × too fast"
        return f"; learned from {runs} in {self.folder} (predictions were {wrong})" + (f"; skipped: {skipped}" if skipped else "")

    def to_dict(self) -> dict[str, Any]:
        return {"runs": len(self.anchors), "folder": self.folder, "errors": [error for _, error in self.anchors], "skipped": dict(self.skipped)}


NO_RUNS = LearnedCorrection()
"""A correction without runs."""
