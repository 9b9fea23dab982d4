"""Which cases of a long list run when: a cross-section in `make test`, more of them in CI, all in `make prove`.

A test or a case without a mark runs always. One with the mark `slow` takes seconds, and runs in CI (`make slow`). One with the mark
`prove` belongs to a long list.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

PARAM = type(pytest.param())


def rarely(*cases: Any) -> list[Any]:
    """Return parameters of `pytest.mark.parametrize` that only `make prove` runs."""
    return [_marked(case, pytest.mark.prove) for case in cases]


def every(n: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases; only each `n`-th runs without `make prove`."""
    return [case if k % n == 0 else rarely(case)[0] for k, case in enumerate(cases)]


def seldom(n: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases; each `n`-th is slow, and only `make prove` runs the others."""
    return [_marked(case, pytest.mark.slow if k % n == 0 else pytest.mark.prove) for k, case in enumerate(cases)]


def sampled(n: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases; `make test` runs each `n`-th, and the others are slow. Cases with the mark `prove` keep it."""
    found, k = list[Any](), 0
    for case in cases:
        if isinstance(case, PARAM) and any(mark.name == "prove" for mark in case.marks):
            found.append(case)
            continue
        found.append(case if k % n == 0 else _marked(case, pytest.mark.slow))
        k += 1
    return found


def crossed(n: int, names: Iterable[str], plans: Sequence[str]) -> list[tuple[str, str]]:
    """Return each `n`-th pair along the diagonals of names × plans: each plan is tried with different names, and each name with different plans."""
    return [(name, plan) for i, name in enumerate(names) for k, plan in enumerate(plans) if (i + k) % n == 0]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    if isinstance(case, PARAM):
        return pytest.param(*case.values, marks=(*case.marks, mark), id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
