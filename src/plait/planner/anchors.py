"""What a few measured steps say about the error of all predictions, and how sure a prediction is.

The logarithm of measured over predicted time is taken to be a sum of independent errors: one that all runs of an occasion
share (a place, its software, what was measured together), one for each device, model, number format, layout and length of a
sample, and noise. A measured run then tells more about a run that is like it than about one that is not, and how sure a
prediction is follows from the same sum
(a Gaussian process over labels). With no measured runs it says how wrong the model itself is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

PARTS = {"occasion": 0.115, "device": 0.054, "model": 0.08, "precision": 0.083, "layout": 0.061, "length": 0.083}
"""Standard deviation of each shared error, as found over all published sources together."""
NOISE = 0.083
"""That of two runs that are alike in all of these."""
ROUTED = 0.305
"""The same for mixtures of experts: releases of one framework alone differ by 76 % there."""
NINETY = 1.645
"""Standard deviations that hold nine tenths of a normal distribution."""

Labels = Mapping[str, str]
"""What a run is like: the keys of `PARTS`, "" where nothing can be wrong; "routed" when its rows go to experts."""


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


def correction(of: Labels, anchors: Sequence[tuple[Labels, float]] = ()) -> Correction:
    """For a run like `of`, from measured ones: (labels, logarithm of measured over predicted seconds)."""
    own = _noise(of)
    total = _alike(of, of) + own
    if not anchors:
        return Correction(1.0, float(np.sqrt(total)))
    between = np.array([[_alike(a, b) for b, _ in anchors] for a, _ in anchors]) + np.diag(
        [_noise(a) for a, _ in anchors]
    )
    towards = np.array([_alike(of, a) for a, _ in anchors])
    solved = np.linalg.solve(between, towards)
    mean = float(solved @ np.array([error for _, error in anchors]))
    return Correction(exp(mean), float(np.sqrt(max(total - solved @ towards, own))))


def _alike(a: Labels, b: Labels) -> float:
    """The covariance of two runs' errors."""
    return sum(size**2 for part, size in PARTS.items() if a.get(part, "") == b.get(part, "") != "")


def _noise(of: Labels) -> float:
    return (ROUTED if of.get("routed") else NOISE) ** 2
