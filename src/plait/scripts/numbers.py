"""How far the candidate's numbers are from the reference's, tensor by tensor, and how far rounding may take them (`proof/rounding.py`).

The reference runs three times: as it is, with its first weights moved by one rounding, and by as many as a right run may be away. A tensor's
limit is the larger of what these runs show and the median of all tensors' limits, since one element may by chance hardly move.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

import torch
from torch import Tensor

from plait.proof.probes import TOLERANCE, Probe
from plait.proof.rounding import TIMES, Noise, StepResult, distances, limits, rounding, wider
from plait.scripts.recordings import OptimizerStep, Recording, unlike
from plait.scripts.rows import Readers
from plait.scripts.values import StoredTensor, TensorFolder

POINTS = ("after", "gradients", "applied")
"""Where gradients are compared: as backward leaves them (in the first step), before clipping, and as the optimizer gets them."""


@dataclass(frozen=True)
class StepDifference:
    """How far an optimizer's step is from the reference's: by point, a comparison of each tensor."""

    number: int
    candidate: OptimizerStep
    reference: OptimizerStep
    points: Mapping[str, Sequence[Probe]]

    def wrong(self, point: str) -> list[str]:
        """The tensors that are farther away at a point than rounding takes them."""
        return [each.name for each in self.points[point] if not each.equal]

    def worst(self, point: str) -> Probe:
        """The tensor that is farthest beyond its limit, or nearest to it."""
        return max(self.points[point], key=_times)


def _times(probe: Probe) -> float:
    return probe.worst / probe.tolerance


@dataclass(frozen=True)
class BothSides:
    """The recordings of both sides."""

    readers: Readers
    reference: Recording
    moved: tuple[Recording, Recording]
    """The reference with weights moved by one rounding, and by many."""
    tensors: TensorFolder
    float64: bool

    @cached_property
    def compared(self) -> tuple[StepDifference, ...]:
        """The differences of each optimizer's step, in order."""
        found, recordings = list[StepDifference](), (self.readers.all[0], self.reference, *self.moved)
        for rounds in zip(*(each.rounds for each in recordings)):
            sides = [{step.optimizer: step for step in steps} for steps in rounds]
            for optimizer in sorted(set.intersection(*map(set, sides))):
                steps = [side[optimizer] for side in sides]
                points = {point: self._compared([StepResult({}, self.read(getattr(step, point)), {}, {}) for step in steps]) for point in POINTS}
                after = [
                    StepResult(self.read(_start(each, step)), {}, self.read(step.weights), self.read(_grouped(step.buffers)))
                    for each, step in zip(recordings, steps)
                ]
                points |= {"weights": self._compared(after, "weight"), "buffers": self._compared(after, "state")}
                if any(unlike(steps[0].after, each.after) for each in self.steps_of_ranks(steps[0])):
                    points["after"] = []  # the script sums over ranks itself, after backward
                found.append(StepDifference(steps[0].step, steps[0], steps[1], points))
        return tuple(found)

    def steps_of_ranks(self, step: OptimizerStep) -> list[OptimizerStep]:
        """A step of the candidate on every rank."""
        return [each for rank in self.readers.all for each in rank.steps if (each.step, each.optimizer) == (step.step, step.optimizer)]

    def _compared(self, results: Sequence[StepResult], kind: str = "gradient") -> list[Probe]:
        candidate, base, small, large = results
        limit = {key: value for key, value in wider(limits(base, [small], TIMES), limits(base, [large])).items() if key[0] == kind}
        least = max(median(limit.values()) if limit else 0.0, TOLERANCE * self.float64)
        far = distances(base, candidate).items()
        return [Probe("", "", off, max(limit[key], least), key[1]) for key, off in far if key[0] == kind]

    def read(self, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """Stored tensors by name."""
        return {name: self.tensors.load(each) for name, each in stored.items()}


def _start(recording: Recording, step: OptimizerStep) -> Mapping[str, StoredTensor]:
    before = [each for each in recording.steps if each.optimizer == step.optimizer and each.step < step.step]
    return before[-1].weights if before else {name: t for name, t in recording.start.weights.items() if name in step.weights}


def _grouped(buffers: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Buffers as optimizer state is named: those of one name are judged at one scale."""
    return {f"{name.rpartition('.')[0]}|{name.rpartition('.')[2]}": t for name, t in buffers.items()}


def probe(code: str, title: str, compared: Sequence[StepDifference], point: str) -> Probe:
    """The comparison of a point over all steps: the first step that differs, else the tensor that came nearest to its limit."""
    seen = [each for each in compared if each.points[point]]
    if not seen:
        return Probe(code, title)
    shown = next((each for each in seen if each.wrong(point)), max(seen, key=lambda each: _times(each.worst(point))))
    detail = f"step {shown.number}, {len(shown.wrong(point))} of {len(shown.points[point])} tensors"
    worst = shown.worst(point)
    return replace(worst, code=code, title=title, name=worst.name.replace("|", ".").strip("."), detail=detail)


def moved_weights(weights: Mapping[str, Tensor], times: float, formats: Sequence[str]) -> dict[str, Tensor]:
    """First weights, each moved at random by up to so many roundings of its own format, or of the narrowest that computes."""
    coarsest = max((rounding(getattr(torch, each)) for each in formats), default=0.0)
    generator, noise = torch.Generator().manual_seed(int(times)), Noise(0, times, coarsest)
    return {name: noise.operand(t, generator) for name, t in weights.items()}
