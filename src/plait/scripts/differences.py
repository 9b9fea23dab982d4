"""Differences between the candidate's tensors and the reference's, and their causes. A cause is reported only if data confirms it.

The reference runs three times: unchanged, with its first weights moved by one rounding, and by as many as a correct run may differ
(`proof/rounding.py`). A tensor's limit is the larger of the differences of these runs and the median of all limits, since a single element may
by chance barely move.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

import torch
from torch import Tensor

from plait.config.errors import Problem, problem_from_page
from plait.proof.probes import FLOOR, TOLERANCE, Probe, as_double, relative_diff
from plait.proof.rounding import MAX_ROUNDINGS, StepResult, compute_limits, measure_distances, widen_limits
from plait.scripts.recordings import OptimizerStep, Readers, Recording, find_unlike
from plait.scripts.values import RecordedTensor, TensorFolder
from plait.tensors.norm import shorten_names

CAUSE_TOLERANCE = 1e-3
"""Maximum relative error of a value that explains a difference."""
RATE_TOLERANCE = 1e-6
"""Maximum relative difference of learning rates: a schedule may compute them in a different order."""


@dataclass(frozen=True)
class StepDifference:
    """The differences of an optimizer's step from the reference's.

    `points`: a comparison of each tensor of the gradients `after` backward (in the first step), of `gradients` before clipping, as `applied` by
    the optimizer, of `weights` and of `buffers`.
    """

    candidate: OptimizerStep
    reference: OptimizerStep
    points: Mapping[str, Sequence[Probe]]

    def list_wrong(self, point: str) -> list[str]:
        """List the tensors whose difference exceeds rounding at a point."""
        return [each.name for each in self.points[point] if not each.equal]


@dataclass(frozen=True)
class BothSides:
    """The recordings of both sides. `moved`: recordings of the reference with weights moved by one rounding, and by many."""

    readers: Readers
    reference: Recording
    moved: tuple[Recording, Recording]
    tensors: TensorFolder
    float64: bool

    @cached_property
    def differences(self) -> tuple[StepDifference, ...]:
        """The differences of each optimizer's step, in order."""
        found, recordings = list[StepDifference](), (self.readers.all[0], self.reference, *self.moved)
        weights = [each.start.weights for each in recordings]
        for rounds in zip(*(each.rounds for each in recordings)):
            sides = [{step.optimizer: step for step in steps} for steps in rounds]
            for optimizer in sorted(set.intersection(*map(set, sides))):
                steps = [side[optimizer] for side in sides]
                points = {
                    point: self._compare([StepResult({}, self.read(getattr(step, point)), {}, {}) for step in steps], "gradient")
                    for point in ("after", "gradients", "applied")
                }
                after = [StepResult(self.read(old), {}, self.read(step.weights), self._name_buffers(step)) for old, step in zip(weights, steps)]
                points |= {"weights": self._compare(after, "weight"), "buffers": self._compare(after, "state")}
                if any(find_unlike(steps[0].after, each.after) for each in self.steps_of_ranks(steps[0])):
                    points["after"] = []  # the script reduces over ranks itself, after backward
                found.append(StepDifference(steps[0], steps[1], points))
                weights = [old | step.weights for old, step in zip(weights, steps)]
        return tuple(found)

    def steps_of_ranks(self, step: OptimizerStep) -> list[OptimizerStep]:
        return [each for rank in self.readers.all for each in rank.steps if (each.step, each.optimizer) == (step.step, step.optimizer)]

    def _name_buffers(self, step: OptimizerStep) -> dict[str, Tensor]:
        """Name buffers like optimizer state (`module|buffer`): those of one name are compared at one scale."""
        return {"|".join(name.rpartition(".")[::2]): t for name, t in self.read(step.buffers).items()}

    def _compare(self, results: Sequence[StepResult], kind: str) -> list[Probe]:
        candidate, base, small, large = results
        limit = {
            key: value for key, value in widen_limits(compute_limits(base, [small], MAX_ROUNDINGS), compute_limits(base, [large])).items()
            if key[0] == kind
        }  # fmt: skip
        least = max(median(limit.values()) if limit else 0.0, TOLERANCE * self.float64)
        far = measure_distances(base, candidate).items()
        return [Probe("", "", off, max(limit[key], least), key[1]) for key, off in far if key[0] == kind]

    def read(self, stored: Mapping[str, RecordedTensor]) -> dict[str, Tensor]:
        return {name: self.tensors.load(each) for name, each in stored.items()}


def find_worst_probe(code: str, title: str, compared: Sequence[StepDifference], point: str) -> Probe:
    """Return the tensor farthest beyond its limit in the first step that differs; without one, the closest to its limit in any step."""
    different = next((each for each in compared if each.list_wrong(point)), None)
    tensors = [tensor for each in ([different] if different else compared) for tensor in each.points[point]]
    if not tensors:
        return Probe(code, title)
    worst = max(tensors, key=lambda each: each.worst / each.tolerance)
    detail = f"step {different.candidate.step}, {len(different.list_wrong(point))} of {len(tensors)} tensors" if different else ""
    return replace(worst, code=code, title=title, name=worst.name.replace("|", ".").strip("."), detail=detail)


def find_cause(sides: BothSides, exact: Sequence[Problem]) -> Problem:
    """Return the first confirmed cause of a difference. `exact`: errors in rows, first weights and settings."""
    first = next((each for each in sides.differences if each.list_wrong("gradients") or each.list_wrong("applied")), None)
    of_numbers = iter(())
    if first is not None:
        finds = [_find_token_mean, _find_scale, _find_unaveraged, _find_statistics, _find_some_scaled]
        if first.points["after"] and not first.list_wrong("after"):  # correct after backward
            finds = [_find_unaveraged, _find_some_scaled, _find_clipping]
        of_numbers = itertools.chain.from_iterable(find(sides, first) for find in finds)
    of_buffers = (each for each in compare_ranks(sides) if each.code != "E020")
    unknown = problem_from_page("E020", "unknown: no known mistake explains these values")
    return next(itertools.chain(exact, of_numbers, of_buffers), unknown)


def check_starts(sides: BothSides) -> Iterator[Problem]:
    """Yield a problem for each rank with different first weights."""
    first, *others = sides.readers.all
    for each in others:
        if names := [name for name in find_unlike(first.start.weights, each.start.weights) if name in first.start.trainable]:
            yield problem_from_page("E026", f"parameters start with other values on rank {each.start.rank} than on rank 0: {shorten_names(names)}")


def check_settings(sides: BothSides) -> Iterator[Problem]:
    """Yield the steps with a different optimizer, learning rate, weight decay or parameters."""
    for each in sides.differences:
        mine, other, when = each.candidate, each.reference, f"in step {each.candidate.step}"
        for name in _find_unlike(mine.lr, other.lr)[:1]:
            rates = [step.reference.lr for step in sides.differences if step.reference.optimizer == other.optimizer]
            pace = f", which has this one in its step {rates.index(mine.lr) + 1}" if mine.step > 1 and mine.lr in rates else ""
            what = f"{when} the learning rate of {name} is {mine.lr[name]:.6g}, the reference's {other.lr[name]:.6g}{pace}"
            yield problem_from_page("E027", what)
        if left := sorted(other.weights.keys() - mine.weights.keys()):
            yield problem_from_page("E029", f"parameters are not in the optimizer: {shorten_names(left)}")
        for name in _find_unlike(mine.decay, other.decay)[:1]:
            yield problem_from_page("E028", f"weight decay of {name} is {mine.decay[name]:.6g}, the reference's {other.decay[name]:.6g}")
        if left := sorted((mine.lr.keys() & other.applied.keys()) - mine.applied.keys()):
            yield problem_from_page("E029", f"{when} parameters have no gradient, unlike in the reference: {shorten_names(left)}")
        if mine.kind != other.kind and each.list_wrong("weights") and not each.list_wrong("applied"):
            yield problem_from_page("E028", f"{when} the optimizer is {mine.kind}, the reference's {other.kind}")


def _find_unlike(mine: dict[str, float], other: dict[str, float]) -> list[str]:
    return [name for name, value in other.items() if relative_diff(value, mine.get(name, value)) > RATE_TOLERANCE]


def compare_ranks(sides: BothSides) -> Iterator[Problem]:
    """Yield weights and buffers that are not bitwise equal to rank 0's, for the first such step."""
    for rounds in zip(*(each.rounds for each in sides.readers.all)):
        found = list[Problem]()
        for rank, steps in zip(sides.readers.all, rounds):
            for mine, first in zip(steps, rounds[0]):
                after = f"differ between ranks 0 and {rank.start.rank} after step {mine.step}"
                if names := find_unlike(first.buffers, mine.buffers):
                    found.append(problem_from_page("E035", f"buffers {after}: {shorten_names(names)}"))
                if names := find_unlike(first.weights, mine.weights):
                    found.append(problem_from_page("E020", f"weights {after}: {shorten_names(names)}"))
        if found:
            yield from found
            return


def _find_token_mean(sides: BothSides, step: StepDifference) -> Iterator[Problem]:
    """Detect a mean of means: the weighting of the losses that gives the reference's loss shows over which batches."""
    readers, k = sides.readers.distinct, step.candidate.step - 1
    used, losses = [each.used_batches[k] for each in readers], [each.rounds[k][0].losses for each in readers]
    right, micros = sum(step.reference.losses), len(losses[0])
    if any(len(each) != micros for each in (*used, *losses)):
        return
    of_parts = torch.tensor(losses, dtype=torch.float64)  # rank by rank, micro-batch by micro-batch
    for shifted in (0, 1):
        counts = torch.tensor([[batch.labels[shifted] if batch.labels else 0 for batch in batches] for batches in used])
        weightings = {"rank and micro-batch": counts, "micro-batch": counts.sum(0, keepdim=True), "rank": counts.sum(1, keepdim=True)}
        for (name, weights), times in itertools.product(weightings.items(), {1, micros}):
            weights = weights.expand_as(of_parts)
            weighted, plain = float((of_parts * weights).sum() / weights.sum()), float(of_parts.mean())
            if relative_diff(right, times * weighted) < 2e-6 < relative_diff(right, times * plain):
                shown = f"weighted by these counts the losses give the reference's {right:.7g}, unweighted {times * plain:.7g}: {counts.tolist()}"
                yield problem_from_page("E030", f"a mean over unequal numbers of tokens of each {name}; {shown}")


def _get_ratios(sides: BothSides, step: StepDifference, point: str) -> dict[str, float]:
    """Return the factor to the reference's by tensor; NaN if no single factor fits. Tensors of the size of rounding are omitted."""
    mine, other = (sides.read(getattr(side, point)) for side in (step.candidate, step.reference))
    sizes = {name: float(as_double(t).norm()) for name, t in other.items() if name in mine}
    found = dict[str, float]()
    for name in (name for name, size in sizes.items() if size > FLOOR * max(sizes.values())):
        a, b = as_double(mine[name]), as_double(other[name])
        ratio = float((a * b).sum()) / sizes[name] ** 2
        found[name] = ratio if float((a - ratio * b).norm()) <= CAUSE_TOLERANCE * float(a.norm()) else math.nan
    return found


def _get_common(ratios: Iterable[float]) -> float | None:
    """Return the common factor; None if there is none, or if it is 1."""
    known = [*ratios]
    is_one = all(relative_diff(known[0], each) <= CAUSE_TOLERANCE for each in known)
    return known[0] if known and is_one and relative_diff(1.0, known[0]) > CAUSE_TOLERANCE else None


def _find_scale(sides: BothSides, step: StepDifference) -> Iterator[Problem]:
    factor = _get_common(_get_ratios(sides, step, "gradients").values())
    if factor is None:
        return
    ranks, micros = len(sides.readers.distinct), len(step.candidate.losses)
    known = {
        ranks: ", the number of ranks: summed where a mean belongs", 1 / ranks: ", one over the number of ranks: divided twice",
        micros: ", the number of micro-batches: the loss is not divided by it", 1 / micros: ", one over the number of micro-batches: divided twice",
    }  # fmt: skip
    meaning = next((meaning for n, meaning in known.items() if abs(factor / n - 1) < CAUSE_TOLERANCE), "")
    yield problem_from_page("E031", f"every gradient is {factor:.5g} times the reference's{meaning}")


def _find_some_scaled(sides: BothSides, step: StepDifference) -> Iterator[Problem]:
    point = "gradients" if step.list_wrong("gradients") else "applied"
    found = _get_ratios(sides, step, point)
    names = [name for name in found if name in step.list_wrong(point)]
    factor = _get_common(found[name] for name in names)
    if factor is not None and len(names) < len(found):
        yield problem_from_page("E032", f"{len(names)} of {len(found)} gradients are {factor:.5g} times the reference's: {shorten_names(names)}")


def _find_unaveraged(sides: BothSides, step: StepDifference) -> Iterator[Problem]:
    """Detect gradients that differ between ranks, and whose mean is the reference's."""
    steps = sides.steps_of_ranks(step.candidate)
    names = [name for name in step.list_wrong("gradients") if len({s.gradients.get(name) for s in steps}) > 1]
    known, expected = [sides.read(s.gradients) for s in steps], sides.read(step.reference.gradients)
    for name in names:
        mean, right = torch.stack([as_double(each[name]) for each in known if name in each]).mean(0), as_double(expected[name])
        if float((mean - right).norm()) > CAUSE_TOLERANCE * float(right.norm()):
            return
    if names:
        what = f"{len(names)} of {len(expected)} gradients are not averaged over the ranks: {shorten_names(names)}"
        yield problem_from_page("E034", f"{what}. Each rank has its own, and their mean is the reference's")


def _find_statistics(sides: BothSides, step: StepDifference) -> Iterator[Problem]:
    kinds = sides.readers.all[0].start.batch_norms
    if kinds and (step.list_wrong("buffers") or any(each.code == "E035" for each in compare_ranks(sides))):
        part = "rank" if len(sides.readers.distinct) > 1 else "micro-batch"
        yield problem_from_page("E035", f"the statistics of {kinds[0]} are not synchronized: each {part} is normalized by its own rows")


def _find_clipping(sides: BothSides, step: StepDifference) -> Iterator[Problem]:
    applied = (step.candidate.applied, step.reference.applied)
    mine, other = (sum(float(as_double(t).square().sum()) for t in sides.read(each).values()) ** 0.5 for each in applied)
    factor = _get_common(_get_ratios(sides, step, "applied").values())
    how = f"all by {factor:.5g}" if factor is not None else f"{len(step.list_wrong('applied'))} of {len(step.reference.applied)} not by one factor"
    yield problem_from_page("E033", f"gradients agree after backward but differ as applied, {how}: norm {mine:.5g}, the reference's {other:.5g}")
