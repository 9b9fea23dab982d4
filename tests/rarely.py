"""Cases of the long lists, which `make prove` runs: a cross-section of them stays in `make test`."""

from collections.abc import Iterable
from typing import Any

import pytest


def rarely(*cases: Any) -> list[Any]:
    """Parameters of `pytest.mark.parametrize` that only `make prove` runs."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.prove) for case in cases]


def every(n: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, of which `make test` runs each `n`-th alone."""
    return [case if k % n == 0 else rarely(case)[0] for k, case in enumerate(cases)]
