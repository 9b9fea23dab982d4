"""What a few measured steps say about the error of all predictions, and how sure a prediction is.

The logarithm of measured over predicted time is taken to be a sum of independent errors: one that all runs of an occasion
share (a place, its software, what was measured together), one for each device, model, number format, layout and length of a
sample, one for what a part of the step takes at this place, and noise. A measured run then tells more about a run that is
like it than about one that is not (a slow network shows where much of a step is messages), and how sure a prediction is
follows from the same sum (a Gaussian process over labels and shares). With no measured runs it says how wrong the model
itself is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp

import numpy as np

PARTS = {"occasion": 0.06, "device": 0.041, "model": 0.045, "precision": 0.041, "layout": 0.068, "length": 0.04}
"""Standard deviation of each shared error, as found over all published sources together."""
SPENT = {"recompute": 0.35, "bubble": 0.44, "gradients": 1.0}
"""That of the seconds of a part of the step, which counts by the part's share of it."""
NOISE = 0.07
"""That of two runs that are alike in all of these."""
ROUTED = 0.35
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
    own = _noise(of)
    total = _alike(of, of) + own
    if not anchors:
        return Correction(1.0, float(np.sqrt(total)))
    between = np.array([[_alike(a, b) for b, _ in anchors] for a, _ in anchors])
    between += np.diag([_noise(a) for a, _ in anchors])
    towards = np.array([_alike(of, a) for a, _ in anchors])
    solved = np.linalg.solve(between, towards)
    mean = float(solved @ np.array([error for _, error in anchors]))
    return Correction(exp(mean), float(np.sqrt(max(total - solved @ towards, own))))


def _alike(a: Traits, b: Traits) -> float:
    """The covariance of two runs' errors."""
    same = sum(size**2 for part, size in PARTS.items() if a.labels.get(part, "") == b.labels.get(part, "") != "")
    return same + sum(size**2 * a.shares.get(part, 0.0) * b.shares.get(part, 0.0) for part, size in SPENT.items())


def _noise(of: Traits) -> float:
    return (ROUTED if of.routed else NOISE) ** 2
