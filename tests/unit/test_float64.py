"""How two results of float64 are compared."""

import math

import torch

from plait.proof.probes import apart, size_of
from plait.tensors.float64 import near

X = torch.linspace(-1.0, 2.0, 6, dtype=torch.float64)


def test_rounding_is_near_and_a_difference_is_not() -> None:
    assert near(X, X * (1 + 1e-12))
    assert not near(X, X + 1e-8)
    assert not near(X, X.view(2, 3))
    assert not near(X, X.float())
    assert near(X * math.nan, X * math.nan)
    assert near(torch.arange(3), torch.arange(3)) and not near(torch.arange(3), torch.arange(1, 4))


def test_differences_are_relative_to_the_largest_number_or_a_floor() -> None:
    assert apart(X, X + 1.0, size_of(X)) == 0.5
    assert apart(0 * X, 0 * X + 1.0, size_of(0 * X, 4.0)) == 0.25
    assert apart(X, X * math.nan, size_of(X)) == math.inf
    assert apart(X[:0], X[:0], size_of(X[:0])) == 0.0
