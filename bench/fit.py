"""Fits the planner's constants to the published runs: `plait/planner/constants.py` and the errors of `plait/planner/correction.py`.

    python bench/fit.py [--rounds 4] [--folds 4]

Each constant in turn is moved up and down by a step. The move is kept if it lowers the error, and the step is halved if no move
does. The error is the mean over sources of the mean |logarithm of predicted over measured|, so that a source counts as one
for any number of rows. Single-node layouts, the one complete set, count as five, and sources of fewer than five rows as a third.
Mixtures of experts count as a third, too, because releases of one framework differ more there than models do. If several plans
are possible for a row, the row keeps the one that was fastest under the constants of the last round. The second part fits the
standard deviations to these errors. With them, four measured rows of a source leave the least error in its other rows, and nine
of ten intervals contain the measured value.

It prints new text for the two files and changes neither. With --folds, the sources are divided into parts. Each part is
predicted with constants that are fitted only to the others, from the middles of their bounds. This is done once with the assumed
facts of its stacks (`bench/stacks.py`), and once without the facts that only its own sources show. The second errors are those of
a user with unknown runs, and the standard deviations are fitted to them by the same rule.
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import log
from typing import Any

import numpy as np
from planner import DATA, Planner, Prediction, kind, traits
from published import Run, read, run_of

from plait.config.plan import Plan
from plait.planner import correction
from plait.planner.constants import FITTED, Fitted
from plait.planner.estimate import estimate_plan

BOUNDS = {
    "top": (0.6, 1.0), "plain": (0.5, 1.0), "windows32": (0.2, 1.0), "windows": (0.1, 1.0), "windows_tuned": (0.3, 1.0),
    "ramp": (1e-6, 3e-5), "waves": (0.2, 1.0), "fused": (0.4, 0.65), "portable": (0.45, 0.75), "earlier": (0.4, 0.7), "tuned": (0.38, 0.62),
    "stream": (0.7, 0.92), "moved": (0.8, 1.5), "joined": (0.3, 0.7), "scores": (0.3, 1.2), "cast": (1.0, 6.0), "narrow": (0.5, 2.0),
    "back": (1.5, 2.2), "host": (1e-5, 4e-5), "sums": (0.8, 1.2), "tiled": (0.05, 0.6), "apart": (1e-6, 5e-5), "overlap": (0.6, 1.0),
    "contention": (0.05, 0.35), "fixed": (1e-3, 0.02),
}  # fmt: skip
"""The bounds within which a constant keeps its meaning."""
COMPLETE = "VIA-Research/vTrain"
DRAWS = 12
"""The number of draws of four rows from each source."""

Row = tuple[Run, Plan, float, float]
"""A run, its assumed plan, the samples of a micro-batch and of a step."""


def sampled(runs: Sequence[Run]) -> list[Run]:
    """Return at most 36 rows of a source, 150 of the complete one, and 20 more of its mixtures."""
    by: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by[run.source].append(run)
    draw, found = random.Random(0), []
    for source, rows in sorted(by.items()):
        routed = [r for r in rows if kind(r) == "experts"]
        rest = [r for r in rows if kind(r) != "experts"]
        found += draw.sample(rest, min(150 if source == COMPLETE else 36, len(rest)))
        found += draw.sample(routed, min(20, len(routed)))
    return found


def settled(runs: Sequence[Run], fitted: Fitted) -> list[Row]:
    """Return the assumed plan of each run."""
    planner, found = Planner(fitted), []
    for run in runs:
        got = planner(run)
        if got is not None:
            found.append((run, got.estimate.plan, got.samples, got.batch))
    return found


def error(rows: Sequence[Row], fitted: Fitted) -> float:
    """Return the error to minimize."""
    planner, by = Planner(fitted), defaultdict(list)
    for run, plan, samples, batch in rows:
        pace = planner.pace(run)
        assert run.rate
        off = abs(log(estimate_plan(pace, plan, samples).seconds / batch * run.rate))
        by[run.source].append(min(0.7, off) * (0.3 if kind(run) == "experts" else 1.0))
    weight = {s: 5.0 if s == COMPLETE else 1.0 if len(v) >= 5 else 0.3 for s, v in by.items()}
    return sum(weight[s] * sum(v) / len(v) for s, v in by.items()) / sum(weight.values())


def descend(
    loss: Callable[[dict[str, float]], float],
    start: dict[str, float],
    bounds: dict[str, tuple[float, float]],
    rounds: int,
) -> tuple[dict[str, float], float]:
    """Minimize by coordinate descent in the logarithms of the constants."""
    found, best, step = dict(start), loss(start), 0.12
    for _ in range(rounds):
        moved = False
        for name, (low, high) in bounds.items():
            for factor in (1 + step, 1 / (1 + step)):
                tried = found | {name: min(high, max(low, found[name] * factor))}
                while tried != found and (now := loss(tried)) < best - 1e-6:
                    found, best, moved = tried, now, True
                    tried = found | {name: min(high, max(low, found[name] * factor))}
        step = step if moved else step / 2
    return found, best


@dataclass(frozen=True)
class Errors:
    """The errors of a source's rows, as logarithms of measured over predicted, with the traits that rows have in common."""

    off: np.ndarray
    words: np.ndarray
    """[rows, labels], 0 if no error is possible."""
    shares: np.ndarray
    """[rows, parts of a step]."""
    sizes: np.ndarray
    """[rows, sizes]."""
    routed: np.ndarray

    @staticmethod
    def of(pairs: list[tuple[correction.RunTraits, float]]) -> "Errors":
        """Build the errors from the traits and errors of rows."""
        known: dict[str, int] = {"": 0}
        words = [[known.setdefault(t.labels[part], len(known)) for part in correction.ERROR_DEVIATIONS] for t, _ in pairs]
        shares = [[t.shares[part] for part in correction.PART_DEVIATIONS] for t, _ in pairs]
        near = [[t.sizes[part] for part in correction.SIZE_DEVIATIONS] for t, _ in pairs]
        routed = np.array([t.has_experts for t, _ in pairs])
        return Errors(np.array([e for _, e in pairs]), np.array(words), np.array(shares), np.array(near), routed)

    def left(self, sizes: dict[str, float], anchored: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return (remaining errors, standard deviations) of the other rows, after the anchored rows are measured."""
        chosen = np.array(anchored, dtype=int)
        rest = np.setdiff1d(np.arange(len(self.off)), chosen)
        spread = np.diag(np.square([sizes[part] for part in correction.PART_DEVIATIONS]))
        parts, near = (np.square([sizes[part] for part in named]) for named in (correction.ERROR_DEVIATIONS, correction.SIZE_DEVIATIONS))

        def like(a: Any, b: Any) -> np.ndarray:
            same = (self.words[a][:, None] == self.words[b]) & (self.words[b] != 0)
            apart = np.exp(-abs(self.sizes[a][:, None] - self.sizes[b]))
            return same @ parts + apart @ near + self.shares[a] @ spread @ self.shares[b].T

        noise = np.where(self.routed, sizes["routed"], sizes["noise"]) ** 2
        solved = np.linalg.solve(like(chosen, chosen) + np.diag(noise[chosen]), like(chosen, rest)).T
        own = ((self.words[rest] != 0) @ parts) + near.sum() + np.einsum("ij,jk,ik->i", self.shares[rest], spread, self.shares[rest])
        variance = np.maximum(own - (solved * like(rest, chosen)).sum(1), 0) + noise[rest]
        return self.off[rest] - solved @ self.off[chosen], np.sqrt(variance)


def astray(errors: list[Errors], sizes: dict[str, float]) -> float:
    """Return the mean error over sources, in per cent, that four measured rows leave; higher if intervals contain too few or too many values.

    `planner.py` draws these rows in another way.
    """
    wrong, held = [], []
    for seed, source in product(range(DRAWS), errors):
        chosen = random.Random(f"fit {seed} {len(source.off)}").sample(range(len(source.off)), 4)
        off, deviation = source.left(sizes, chosen)
        wrong.append(100 * float(np.mean(abs(np.expm1(-off)))))
        held += (abs(off) < correction.Z_SCORE_90 * deviation).tolist()
    alone = [abs(off) < correction.Z_SCORE_90 * deviation for off, deviation in (one.left(sizes, []) for one in errors)]
    shares = sum(held) / len(held), float(np.mean(np.concatenate(alone)))
    return sum(wrong) / len(wrong) + sum(40 * max(0.0, 0.88 - inside, inside - 0.93) for inside in shares)


def errors_of(pairs: Sequence[tuple[Run, Prediction]]) -> list[Errors]:
    """Return the errors of sources that have four rows and more."""
    found: dict[str, list[tuple[correction.RunTraits, float]]] = defaultdict(list)
    for run, got in pairs:
        assert run.rate
        found[run.source].append((traits(run, got.estimate), -log(got.estimate.seconds / got.batch * run.rate)))
    return [Errors.of(own) for own in found.values() if len(own) > 4]


def fitted_to(runs: Sequence[Run], fitted: Fitted, rounds: int, times: int = 2) -> Fitted:
    """Fit the constants to these runs, starting from `fitted`. `times`: the number of fits, because plans of some runs change after a fit."""
    for _ in range(times):
        rows = settled(runs, fitted)
        start = {f.name: getattr(fitted, f.name) for f in fields(Fitted) if f.name in BOUNDS}
        loss = lambda values: error(rows, replace(fitted, **values))  # noqa: B023, E731
        print(f"error {loss(start):.4f} on {len(rows)} rows", flush=True)
        values, best = descend(loss, start, BOUNDS, rounds)
        fitted = replace(fitted, **{name: float(f"{value:.3g}") for name, value in values.items()})
        print(f"error {best:.4f}: {fitted}", flush=True)
    return fitted


@dataclass(frozen=True)
class Unseen:
    """Predictions of sources by constants that were fitted to other sources. Pairs (run, prediction)."""

    constants: list[tuple[Run, Prediction]]
    """Predictions with the assumed facts of their stacks."""
    beliefs: list[tuple[Run, Prediction]]
    """Predictions without the facts that only their own sources show."""


def unseen(rows: Sequence[dict[str, str]], folds: int, rounds: int) -> Unseen:
    """Divide the sources into parts, and predict each by constants fitted to the others, from the middles of their bounds."""
    runs = [run for row in rows if not (run := run_of(row)).why and run.rate]
    names = sorted({run.source for run in runs})
    middle = replace(FITTED, **{name: (low * high) ** 0.5 for name, (low, high) in BOUNDS.items()})
    found = Unseen([], [])
    for fold in range(folds):
        apart = set(names[fold::folds])
        others = [run for run in runs if run.source not in apart]
        planner = Planner(fitted_to(sampled([run for run in others if not run.lora]), middle, rounds))
        known = frozenset(run.stack.name for run in others)
        for run in runs:
            if run.source in apart:
                less = run_of(run.row, known)
                for pairs, one in ((found.constants, run), (found.beliefs, less)):
                    if not one.why and (got := planner(one)) is not None:
                        pairs.append((one, got))
    return found


def summary(pairs: Sequence[tuple[Run, Prediction]]) -> tuple[float, float, float]:
    """For sources with four measured rows: mean error in per cent without and with them, and per cent of rows within their interval."""
    sizes = (
        correction.ERROR_DEVIATIONS
        | correction.SIZE_DEVIATIONS
        | correction.PART_DEVIATIONS
        | {"noise": correction.NOISE, "routed": correction.MOE_NOISE}
    )
    errors = errors_of(pairs)
    alone, four = [], []
    for source in errors:
        alone.append(source.left(sizes, []))
        for seed in range(DRAWS):
            chosen = random.Random(f"fit {seed} {len(source.off)}").sample(range(len(source.off)), 4)
            four.append(source.left(sizes, chosen)[0])
    mean = lambda many: sum(100 * float(np.mean(abs(np.expm1(-off)))) for off in many) / len(many)  # noqa: E731
    inside = float(np.mean(np.concatenate([abs(off) < correction.Z_SCORE_90 * deviation for off, deviation in alone])))
    return mean([off for off, _ in alone]), mean(four), 100 * inside


def by_source(pairs: Sequence[tuple[Run, Prediction]]) -> dict[str, float]:
    """Return the mean absolute error of each source, in per cent."""
    errors: dict[str, list[float]] = defaultdict(list)
    for run, got in pairs:
        assert run.rate
        errors[run.source].append(100 * abs(got.estimate.seconds / got.batch * run.rate - 1))
    return {source: sum(own) / len(own) for source, own in sorted(errors.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=4, help="over all constants, twice (4)")
    parser.add_argument("--folds", type=int, default=0, help="parts of sources that are predicted by the others; deviations of the errors")
    options = parser.parse_args()
    rows = [row for path in sorted(DATA.glob("*.csv")) for row in read(path)]
    if not options.folds:
        runs = [run for row in rows if not (run := run_of(row)).why and run.rate and not run.lora]
        fitted_to(sampled(runs), FITTED, options.rounds)
        return
    found = unseen(rows, options.folds, options.rounds)
    for name, pairs in (("constants", found.constants), ("constants and beliefs", found.beliefs)):
        by = by_source(pairs)
        print({source: round(error, 1) for source, error in by.items()})
        print(f"{name} unseen, mean of sources: {sum(by.values()) / len(by):.1f} %", flush=True)
    errors = errors_of(found.beliefs)
    start = (
        correction.ERROR_DEVIATIONS
        | correction.SIZE_DEVIATIONS
        | correction.PART_DEVIATIONS
        | {"noise": correction.NOISE, "routed": correction.MOE_NOISE}
    )
    sizes, best = descend(lambda s: astray(errors, s), start, dict.fromkeys(start, (0.01, 1.0)), 12)
    print(f"errors, {astray(errors, start):.2f} to {best:.2f}: { {name: round(size, 3) for name, size in sizes.items()} }")


if __name__ == "__main__":
    main()
