"""Scores predictions: error, order, choice, memory, intervals. One `Case` is one published run."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import mean, median
from typing import Any


@dataclass(frozen=True)
class Case:
    """One run, measured and predicted. Times are seconds of a step per sample, so that they compare across batches."""

    row: str
    source: str
    group: str
    measured: float | None
    predicted: float
    low: float = 0.0
    high: float = 0.0
    memory: float | None = None
    reserved: float = 0.0
    fits: bool | None = None
    said: bool = True
    """Whether the prediction is that it fits."""
    kind: str = ""
    what: dict[str, Any] = field(default_factory=dict)


def percent(values: Sequence[float]) -> float | None:
    return round(100 * mean(values), 1) if values else None


def times(cases: Iterable[Case]) -> dict[str, Any]:
    """Error of step times: mean and median absolute percentage, 90th percentile, signed bias, share in the interval."""
    pairs = [(c, c.predicted / c.measured) for c in cases if c.measured]
    if not pairs:
        return {}
    errors = sorted(abs(q - 1) for _, q in pairs)
    inside = [c.low <= c.measured <= c.high for c, _ in pairs if c.measured]
    return {
        "rows": len(pairs),
        "mape": percent(errors),
        "median": round(100 * median(errors), 1),
        "p90": round(100 * errors[int(0.9 * (len(errors) - 1))], 1),
        "bias": round(100 * (median(q for _, q in pairs) - 1), 1),
        "inside_90": percent(inside),
    }


def ranks(values: Sequence[float]) -> list[float]:
    """Return ranks in ascending order; equal values get the mean of their ranks."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    found = [0.0] * len(values)
    at = 0
    while at < len(order):
        end = at
        while end + 1 < len(order) and values[order[end + 1]] == values[order[at]]:
            end += 1
        for i in order[at : end + 1]:
            found[i] = (at + end) / 2
        at = end + 1
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation; None when one of them is constant."""
    x, y = ranks(a), ranks(b)
    mx, my = mean(x), mean(y)
    above = sum((p - mx) * (q - my) for p, q in zip(x, y))
    below = (sum((p - mx) ** 2 for p in x) * sum((q - my) ** 2 for q in y)) ** 0.5
    return above / below if below else None


def groups(cases: Iterable[Case], *, measured: bool = True) -> list[list[Case]]:
    """Group the runs of one source that differ only in their layout, in groups of two or more."""
    found: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        if case.group and (case.measured or not measured):
            found[case.source, case.group].append(case)
    return [group for group in found.values() if len(group) > 1]


def choice(cases: Iterable[Case], price: Callable[[Case], float] = lambda c: c.predicted) -> dict[str, Any]:
    """Return the regret of the layout predicted best and of a random one, the correctly ordered pairs, and the rank correlation."""
    regret, random, top, right, spear = [], [], [], {0.05: [], 0.10: []}, []
    for group in groups(cases):
        real = [c.measured or 0.0 for c in group]
        told = [price(c) for c in group]
        fitting = [i for i, c in enumerate(group) if c.said] or range(len(group))
        best = min(real)
        least = min(told[i] for i in fitting)
        regret.append(mean(real[i] for i in fitting if told[i] == least) / best)  # equal predictions choose at random
        random.append(mean(real) / best)
        top.append(min(real[i] for i in sorted(fitting, key=lambda i: told[i])[:3]) / best)
        if len(group) > 2 and (found := spearman(told, real)) is not None:
            spear.append(found)
        for a, b in combinations(range(len(group)), 2):
            apart = abs(real[a] / real[b] - 1)
            for much, hits in right.items():
                if apart > much:
                    tie = told[a] == told[b]
                    hits.append(0.5 if tie else float((told[a] < told[b]) == (real[a] < real[b])))
    if not regret:
        return {}
    return {
        "groups": len(regret),
        "regret": round(mean(regret), 4),
        "regret_max": round(max(regret), 3),
        "regret_random": round(mean(random), 4),
        "regret_top3": round(mean(top), 4),
        "spearman": round(mean(spear), 3) if spear else None,
        "pairs_5": percent(right[0.05]),
        "pairs_10": percent(right[0.10]),
        "pairs_10_count": len(right[0.10]),
    }


def memory(cases: Iterable[Case]) -> dict[str, Any]:
    """Return the error of reserved memory, and the confusion matrix of "fits"."""
    cases = list(cases)
    pairs = [c.reserved / c.memory for c in cases if c.memory and c.fits is not False]
    known = [c for c in cases if c.fits is not None]
    false_fits = sum(1 for c in known if c.said and not c.fits)
    found: dict[str, Any] = {
        "said_fits": sum(1 for c in known if c.said), "false_fits": false_fits,
        "out_of_memory": sum(1 for c in known if not c.fits),
        "out_of_memory_recognised": sum(1 for c in known if not c.fits and not c.said),
        "ran_but_refused": sum(1 for c in known if c.fits and not c.said),
    }  # fmt: skip
    if pairs:
        found |= {
            "rows": len(pairs), "mape": percent([abs(q - 1) for q in pairs]),
            "bias": round(100 * (median(pairs) - 1), 1),
            "within_10": percent([abs(q - 1) <= 0.1 for q in pairs]),
        }  # fmt: skip
    return found
