"""Which cases of a long list run when: a cross-section in `make test`, more of them in CI, all in `make prove`.

A test or a case without a mark runs everywhere. One with the mark `slow` takes seconds, and CI runs it (`make slow`). One with the mark
`prove` belongs to a long list.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

PARAM = type(pytest.param())


def rarely(*cases: Any) -> list[Any]:
    """Parameters of `pytest.mark.parametrize` that only `make prove` runs."""
    return [_marked(case, pytest.mark.prove) for case in cases]


def every(n: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, of which only `make prove` runs others than each `n`-th."""
    return [case if k % n == 0 else rarely(case)[0] for k, case in enumerate(cases)]


def seldom(n: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, of which each `n`-th is slow; only `make prove` runs the others."""
    return [_marked(case, pytest.mark.slow if k % n == 0 else pytest.mark.prove) for k, case in enumerate(cases)]


def sampled(n: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, of which `make test` runs each `n`-th; the others are slow. Those of `make prove` stay there."""
    found, k = list[Any](), 0
    for case in cases:
        if isinstance(case, PARAM) and any(mark.name == "prove" for mark in case.marks):
            found.append(case)
            continue
        found.append(case if k % n == 0 else _marked(case, pytest.mark.slow))
        k += 1
    return found


def crossed(n: int, names: Iterable[str], plans: Sequence[str]) -> list[tuple[str, str]]:
    """Each `n`-th pair along the diagonals of names × plans: every plan meets unlike names, and every name unlike plans."""
    return [(name, plan) for i, name in enumerate(names) for k, plan in enumerate(plans) if (i + k) % n == 0]


def _marked(case: Any, mark: pytest.MarkDecorator) -> Any:
    if isinstance(case, PARAM):
        return pytest.param(*case.values, marks=(*case.marks, mark), id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
