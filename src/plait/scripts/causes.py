"""Why a script trains another model: each cause is shown by what would have been right, else it is unknown."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from plait.config.errors import Problem, problem_of_page
from plait.proof.probes import as_double, off
from plait.scripts.numbers import BothSides, StepDifference
from plait.scripts.recordings import unlike
from plait.tensors.norm import several

AGREES = 1e-3
"""How far a number that explains a difference may be from it, relative."""
RATE_AGREES = 1e-6
"""How far learning rates may be from each other, relative: a schedule may compute them in another order."""


def cause_of(sides: BothSides, exact: Sequence[Problem]) -> Problem:
    """The cause of a difference: the first that can be shown. `exact`: what is wrong with rows, first weights and settings."""
    first = next((each for each in sides.compared if each.wrong("gradients") or each.wrong("applied")), None)
    of_numbers = _gradients(sides, first) if first is not None else iter(())
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
        mine, other, when = each.candidate, each.reference, f"in step {each.number}"
        for name in _unlike(mine.lr, other.lr)[:1]:
            rate = f"{when} the learning rate of {name} is {mine.lr[name]:.6g}, the reference's {other.lr[name]:.6g}"
            yield problem_of_page("E027", rate + _pace(sides, each))
        if left := sorted(other.weights.keys() - mine.weights.keys()):
            yield problem_of_page("E029", f"parameters are not in the optimizer: {several(left)}")
        for name in _unlike(mine.decay, other.decay)[:1]:
            yield problem_of_page("E028", f"weight decay of {name} is {mine.decay[name]:.6g}, the reference's {other.decay[name]:.6g}")
        if left := sorted({*mine.without} - {*other.without}):
            yield problem_of_page("E029", f"{when} parameters have no gradient, as they have in the reference: {several(left)}")
        if mine.kind != other.kind and each.wrong("weights") and not each.wrong("applied"):
            yield problem_of_page("E028", f"{when} the optimizer is {mine.kind}, the reference's {other.kind}")


def _unlike(mine: dict[str, float], other: dict[str, float]) -> list[str]:
    return [name for name, value in other.items() if off(value, mine.get(name, value)) > RATE_AGREES]


def _pace(sides: BothSides, each: StepDifference) -> str:
    """How often a schedule is stepped, if its rate is the reference's of another step."""
    rates = [other.reference.lr for other in sides.compared if other.reference.optimizer == each.reference.optimizer]
    is_ahead = each.number > 1 and each.candidate.lr in rates
    return f", which has this one in its step {rates.index(each.candidate.lr) + 1}" if is_ahead else ""


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


def _gradients(sides: BothSides, step: StepDifference) -> Iterator[Problem]:
    if step.wrong("after") or not step.points["after"]:
        finds = (_tokens, _scaled, _not_averaged, _statistics, _some_scaled)
    else:  # right after backward
        finds = (_not_averaged, _some_scaled, _clipped)
    for find in finds:
        yield from find(sides, step)


def _tokens(sides: BothSides, step: StepDifference) -> Iterator[Problem]:
    """A mean of means: the weights of the losses that give the reference's loss say of what."""
    readers, k = sides.readers.distinct, step.number - 1
    used = [each.used[k] for each in readers if k < len(each.used)]
    losses, right = [each.rounds[k][0].losses for each in readers], sum(step.reference.losses)
    micros = len(losses[0])
    if not used or any(len(each) != micros for each in (*used, *losses)):
        return
    plain = _mean(losses, [[1] * micros] * len(losses))
    for shifted in (0, 1):
        counts = [[batch.labels[shifted] if batch.labels else 0 for batch in batches] for batches in used]
        of_micros = [sum(each) for each in zip(*counts)]
        weightings = {"rank and micro-batch": counts, "micro-batch": [of_micros] * len(counts), "rank": [[sum(each)] * micros for each in counts]}
        for (name, weights), times in itertools.product(weightings.items(), {1, micros}):
            weighted = _mean(losses, weights)
            if off(right, times * weighted) < 2e-6 < off(right, times * plain):
                shown = f"weighted by these labels the losses give the reference's {right:.7g}, as they are {times * plain:.7g}: {counts}"
                yield problem_of_page("E030", f"a mean over unequal numbers of tokens of each {name}; {shown}")


def _mean(losses: Sequence[Sequence[float]], weights: Sequence[Sequence[int]]) -> float:
    """The mean of the losses of each rank and micro-batch, weighted; not a number without weights."""
    total = sum(map(sum, weights))
    pairs = (pair for each in zip(losses, weights) for pair in zip(*each))
    return sum(loss * weight for loss, weight in pairs) / total if total else math.nan


def _ratios(sides: BothSides, step: StepDifference, point: str) -> dict[str, float]:
    """By tensor, how many times the reference's it is; not a number if no single one says that. Tensors of rounding alone are left out."""
    mine, other = (sides.read(getattr(side, point)) for side in (step.candidate, step.reference))
    sizes = {name: float(as_double(t).norm()) for name, t in other.items() if name in mine}
    found = dict[str, float]()
    for name in (name for name, size in sizes.items() if size > 1e-5 * max(sizes.values())):
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
