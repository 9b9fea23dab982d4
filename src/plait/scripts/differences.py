"""How far the candidate's numbers are from the reference's, tensor by tensor, and why: each cause is shown by what would have been right.

The reference runs three times: as it is, with its first weights moved by one rounding, and by as many as a right run may be away
(`proof/rounding.py`). A tensor's limit is the larger of what these runs show and the median of all tensors' limits, since one element may by
chance hardly move.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

import torch
from torch import Tensor

from plait.config.errors import Problem, problem_of_page
from plait.proof.probes import FLOOR, TOLERANCE, Probe, as_double, off
from plait.proof.rounding import TIMES, StepResult, distances, limits, wider
from plait.scripts.recordings import OptimizerStep, Readers, Recording, unlike
from plait.scripts.values import StoredTensor, TensorFolder
from plait.tensors.norm import several

AGREES = 1e-3
"""How far a number that explains a difference may be from it, relative."""
RATE_AGREES = 1e-6
"""How far learning rates may be from each other, relative: a schedule may compute them in another order."""


@dataclass(frozen=True)
class StepDifference:
    """How far an optimizer's step is from the reference's.

    `points`: a comparison of each tensor of the gradients `after` backward (in the first step), of `gradients` before clipping, as `applied`
    by the optimizer, of `weights` and of `buffers`.
    """

    candidate: OptimizerStep
    reference: OptimizerStep
    points: Mapping[str, Sequence[Probe]]

    def wrong(self, point: str) -> list[str]:
        """The tensors that are farther away at a point than rounding takes them."""
        return [each.name for each in self.points[point] if not each.equal]


@dataclass(frozen=True)
class BothSides:
    """The recordings of both sides. `moved`: of the reference with weights moved by one rounding, and by many."""

    readers: Readers
    reference: Recording
    moved: tuple[Recording, Recording]
    tensors: TensorFolder
    float64: bool

    @cached_property
    def compared(self) -> tuple[StepDifference, ...]:
        """The differences of each optimizer's step, in order."""
        found, recordings = list[StepDifference](), (self.readers.all[0], self.reference, *self.moved)
        weights = [each.start.weights for each in recordings]
        for rounds in zip(*(each.rounds for each in recordings)):
            sides = [{step.optimizer: step for step in steps} for steps in rounds]
            for optimizer in sorted(set.intersection(*map(set, sides))):
                steps = [side[optimizer] for side in sides]
                points = {
                    point: self._compared([StepResult({}, self.read(getattr(step, point)), {}, {}) for step in steps], "gradient")
                    for point in ("after", "gradients", "applied")
                }
                after = [StepResult(self.read(old), {}, self.read(step.weights), self._state(step)) for old, step in zip(weights, steps)]
                points |= {"weights": self._compared(after, "weight"), "buffers": self._compared(after, "state")}
                if any(unlike(steps[0].after, each.after) for each in self.steps_of_ranks(steps[0])):
                    points["after"] = []  # the script sums over ranks itself, after backward
                found.append(StepDifference(steps[0], steps[1], points))
                weights = [old | step.weights for old, step in zip(weights, steps)]
        return tuple(found)

    def steps_of_ranks(self, step: OptimizerStep) -> list[OptimizerStep]:
        """A step of the candidate on every rank."""
        return [each for rank in self.readers.all for each in rank.steps if (each.step, each.optimizer) == (step.step, step.optimizer)]

    def _state(self, step: OptimizerStep) -> dict[str, Tensor]:
        """Buffers as optimizer state is named (`module|buffer`): those of one name are judged at one scale."""
        return {"|".join(name.rpartition(".")[::2]): t for name, t in self.read(step.buffers).items()}

    def _compared(self, results: Sequence[StepResult], kind: str) -> list[Probe]:
        candidate, base, small, large = results
        limit = {key: value for key, value in wider(limits(base, [small], TIMES), limits(base, [large])).items() if key[0] == kind}
        least = max(median(limit.values()) if limit else 0.0, TOLERANCE * self.float64)
        far = distances(base, candidate).items()
        return [Probe("", "", off, max(limit[key], least), key[1]) for key, off in far if key[0] == kind]

    def read(self, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """Stored tensors by name."""
        return {name: self.tensors.load(each) for name, each in stored.items()}


def probe(code: str, title: str, compared: Sequence[StepDifference], point: str) -> Probe:
    """The tensor that is farthest beyond its limit in the first step that differs; if none does, that came nearest to it in any step."""
    different = next((each for each in compared if each.wrong(point)), None)
    tensors = [tensor for each in ([different] if different else compared) for tensor in each.points[point]]
    if not tensors:
        return Probe(code, title)
    worst = max(tensors, key=lambda each: each.worst / each.tolerance)
    detail = f"step {different.candidate.step}, {len(different.wrong(point))} of {len(tensors)} tensors" if different else ""
    return replace(worst, code=code, title=title, name=worst.name.replace("|", ".").strip("."), detail=detail)


def cause_of(sides: BothSides, exact: Sequence[Problem]) -> Problem:
    """The cause of a difference: the first that can be shown. `exact`: what is wrong with rows, first weights and settings."""
    first = next((each for each in sides.compared if each.wrong("gradients") or each.wrong("applied")), None)
    of_numbers = iter(())
    if first is not None:
        finds = [_tokens, _scaled, _not_averaged, _statistics, _some_scaled]
        if first.points["after"] and not first.wrong("after"):  # right after backward
            finds = [_not_averaged, _some_scaled, _clipped]
        of_numbers = itertools.chain.from_iterable(find(sides, first) for find in finds)
    of_buffers = (each for each in unlike_ranks(sides) if each.code != "E020")
    unknown = problem_of_page("E020", "unknown: none of the known mistakes gives these numbers")
    return next(itertools.chain(exact, of_numbers, of_buffers), unknown)


def starts(sides: BothSides) -> Iterator[Problem]:
    """Ranks that begin with other weights."""
    first, *others = sides.readers.all
    for each in others:
        if names := [name for name in unlike(first.start.weights, each.start.weights) if name in first.start.trainable]:
            yield problem_of_page("E026", f"parameters begin with other values on rank {each.start.rank} than on rank 0: {several(names)}")


def settings(sides: BothSides) -> Iterator[Problem]:
    """Steps with another optimizer, or other learning rates, weight decay or parameters."""
    for each in sides.compared:
        mine, other, when = each.candidate, each.reference, f"in step {each.candidate.step}"
        for name in _unlike(mine.lr, other.lr)[:1]:
            rates = [step.reference.lr for step in sides.compared if step.reference.optimizer == other.optimizer]
            pace = f", which has this one in its step {rates.index(mine.lr) + 1}" if mine.step > 1 and mine.lr in rates else ""
            what = f"{when} the learning rate of {name} is {mine.lr[name]:.6g}, the reference's {other.lr[name]:.6g}{pace}"
            yield problem_of_page("E027", what)
        if left := sorted(other.weights.keys() - mine.weights.keys()):
            yield problem_of_page("E029", f"parameters are not in the optimizer: {several(left)}")
        for name in _unlike(mine.decay, other.decay)[:1]:
            yield problem_of_page("E028", f"weight decay of {name} is {mine.decay[name]:.6g}, the reference's {other.decay[name]:.6g}")
        if left := sorted((mine.lr.keys() & other.applied.keys()) - mine.applied.keys()):
            yield problem_of_page("E029", f"{when} parameters have no gradient, as they have in the reference: {several(left)}")
        if mine.kind != other.kind and each.wrong("weights") and not each.wrong("applied"):
            yield problem_of_page("E028", f"{when} the optimizer is {mine.kind}, the reference's {other.kind}")


def _unlike(mine: dict[str, float], other: dict[str, float]) -> list[str]:
    return [name for name, value in other.items() if off(value, mine.get(name, value)) > RATE_AGREES]


def unlike_ranks(sides: BothSides) -> Iterator[Problem]:
    """Weights and buffers that a rank has otherwise than rank 0, bit for bit, after the first step where any are."""
    for rounds in zip(*(each.rounds for each in sides.readers.all)):
        found = list[Problem]()
        for rank, steps in zip(sides.readers.all, rounds):
            for mine, first in zip(steps, rounds[0]):
                after = f"differ between ranks 0 and {rank.start.rank} after step {mine.step}"
                if names := unlike(first.buffers, mine.buffers):
                    found.append(problem_of_page("E035", f"buffers {after}: {several(names)}"))
                if names := unlike(first.weights, mine.weights):
                    found.append(problem_of_page("E020", f"weights {after}: {several(names)}"))
        if found:
            yield from found
            return


def _tokens(sides: BothSides, step: StepDifference) -> Iterator[Problem]:
    """A mean of means: the weights of the losses that give the reference's loss say of what."""
    readers, k = sides.readers.distinct, step.candidate.step - 1
    used, losses = [each.used[k] for each in readers], [each.rounds[k][0].losses for each in readers]
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
            if off(right, times * weighted) < 2e-6 < off(right, times * plain):
                shown = f"weighted by these labels the losses give the reference's {right:.7g}, as they are {times * plain:.7g}: {counts.tolist()}"
                yield problem_of_page("E030", f"a mean over unequal numbers of tokens of each {name}; {shown}")


def _ratios(sides: BothSides, step: StepDifference, point: str) -> dict[str, float]:
    """By tensor, how many times the reference's it is; not a number if no single one says that. Tensors of rounding alone are left out."""
    mine, other = (sides.read(getattr(side, point)) for side in (step.candidate, step.reference))
    sizes = {name: float(as_double(t).norm()) for name, t in other.items() if name in mine}
    found = dict[str, float]()
    for name in (name for name, size in sizes.items() if size > FLOOR * max(sizes.values())):
        a, b = as_double(mine[name]), as_double(other[name])
        ratio = float((a * b).sum()) / sizes[name] ** 2
        found[name] = ratio if float((a - ratio * b).norm()) <= AGREES * float(a.norm()) else math.nan
    return found


def _one(ratios: Iterable[float]) -> float | None:
    """The number that all are; None without one, and for 1."""
    known = [*ratios]
    is_one = all(off(known[0], each) <= AGREES for each in known)
    return known[0] if known and is_one and off(1.0, known[0]) > AGREES else None


def _scaled(sides: BothSides, step: StepDifference) -> Iterator[Problem]:
    factor = _one(_ratios(sides, step, "gradients").values())
    if factor is None:
        return
    ranks, micros = len(sides.readers.distinct), len(step.candidate.losses)
    known = {
        ranks: ", the number of ranks: summed where a mean belongs", 1 / ranks: ", one over the number of ranks: divided twice",
        micros: ", the number of micro-batches: the loss is not divided by it", 1 / micros: ", one over the number of micro-batches: divided twice",
    }  # fmt: skip
    meaning = next((meaning for n, meaning in known.items() if abs(factor / n - 1) < AGREES), "")
    yield problem_of_page("E031", f"every gradient is {factor:.5g} times the reference's{meaning}")


def _some_scaled(sides: BothSides, step: StepDifference) -> Iterator[Problem]:
    point = "gradients" if step.wrong("gradients") else "applied"
    found = _ratios(sides, step, point)
    names = [name for name in found if name in step.wrong(point)]
    factor = _one(found[name] for name in names)
    if factor is not None and len(names) < len(found):
        yield problem_of_page("E032", f"{len(names)} of {len(found)} gradients are {factor:.5g} times the reference's: {several(names)}")


def _not_averaged(sides: BothSides, step: StepDifference) -> Iterator[Problem]:
    """Ranks' own gradients, of which the mean is the reference's."""
    steps = sides.steps_of_ranks(step.candidate)
    names = [name for name in step.wrong("gradients") if len({s.gradients.get(name) for s in steps}) > 1]
    known, expected = [sides.read(s.gradients) for s in steps], sides.read(step.reference.gradients)
    for name in names:
        mean, right = torch.stack([as_double(each[name]) for each in known if name in each]).mean(0), as_double(expected[name])
        if float((mean - right).norm()) > AGREES * float(right.norm()):
            return
    if names:
        what = f"{len(names)} of {len(expected)} gradients are not averaged over the ranks: {several(names)}"
        yield problem_of_page("E034", f"{what}. Each rank has its own, and their mean is the reference's")


def _statistics(sides: BothSides, step: StepDifference) -> Iterator[Problem]:
    kinds = sides.readers.all[0].start.batch_norms
    if kinds and (step.wrong("buffers") or any(each.code == "E035" for each in unlike_ranks(sides))):
        part = "rank" if len(sides.readers.distinct) > 1 else "micro-batch"
        yield problem_of_page("E035", f"the statistics of {kinds[0]} are not synchronized: each {part} is normalized by its own rows")


def _clipped(sides: BothSides, step: StepDifference) -> Iterator[Problem]:
    applied = (step.candidate.applied, step.reference.applied)
    mine, other = (sum(float(as_double(t).square().sum()) for t in sides.read(each).values()) ** 0.5 for each in applied)
    factor = _one(_ratios(sides, step, "applied").values())
    how = f"all by {factor:.5g}" if factor is not None else f"{len(step.wrong('applied'))} of {len(step.reference.applied)} not by one factor"
    yield problem_of_page("E033", f"gradients agree after backward and differ as applied, {how}: norm {mine:.5g}, the reference's {other:.5g}")
