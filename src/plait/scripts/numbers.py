"""How far the candidate's numbers are from the reference's, tensor by tensor, and how far rounding may take them (`proof/rounding.py`).

The reference runs three times: as it is, with its first weights moved by one rounding, and by as many as a right run may be away. A tensor's
limit is the larger of what these runs show and the median of all tensors' limits, since one element may by chance hardly move.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from plait.proof.probes import TOLERANCE, Probe
from plait.proof.rounding import TIMES, Key, StepResult, distances, limits, moved, rounding, wider
from plait.scripts.recordings import OptimizerStep, Recording, Stored, StoredTensors

POINTS = ("after", "gradients", "applied")
"""Where gradients are compared: as backward leaves them (in the first step), before clipping, and as the optimizer gets them."""


@dataclass(frozen=True)
class BothSides:
    """The recordings of both sides."""

    candidate: tuple[Recording, ...]
    reference: Recording
    moved: tuple[Recording, Recording]
    """The reference with weights moved by one rounding, and by many."""
    tensors: Path
    float64: bool

    @property
    def steps(self) -> int:
        """Rounds that both sides made."""
        return min(len(each.rounds) for each in (self.candidate[0], self.reference, *self.moved))

    @cached_property
    def compared(self) -> tuple["StepDifference", ...]:
        """The differences of each optimizer's step, in order."""
        found = list[StepDifference]()
        for k in range(self.steps):
            sides = [{step.optimizer: step for step in each.rounds[k]} for each in (self.candidate[0], self.reference, *self.moved)]
            for optimizer in sorted(set.intersection(*(set(side) for side in sides))):
                found.append(self._difference([side[optimizer] for side in sides]))
        return tuple(found)

    def _difference(self, steps: Sequence[OptimizerStep]) -> "StepDifference":
        found = dict[str, Differences]()
        for point in POINTS:
            gradients: list[Mapping[str, Stored]] = [getattr(step, point) for step in steps]
            found[point] = self._compared([StepResult({}, self.read(each), {}, {}) for each in gradients])
        recordings = (self.candidate[0], self.reference, *self.moved)
        after = [StepResult(self.read(self._start(each, step)), {}, self.read(step.weights), self.read(_grouped(step.buffers)))
                 for each, step in zip(recordings, steps)]  # fmt: skip
        found |= {"weights": self._compared(after, "weight"), "buffers": self._compared(after, "state")}
        return StepDifference(steps[0].step, steps[0], steps[1], found)

    def _start(self, recording: Recording, step: OptimizerStep) -> Mapping[str, Stored]:
        before = [each for each in recording.steps if each.optimizer == step.optimizer and each.step < step.step]
        return before[-1].weights if before else {name: t for name, t in recording.start.weights.items() if name in step.weights}

    def _compared(self, results: Sequence[StepResult], kind: str = "gradient") -> "Differences":
        candidate, base, small, large = results
        limit = {key: value for key, value in wider(limits(base, [small], TIMES), limits(base, [large])).items() if key[0] == kind}
        if self.float64:
            limit = {key: max(value, TOLERANCE) for key, value in limit.items()}
        usual = median(limit.values()) if limit else 0.0
        off = {key: value for key, value in distances(base, candidate).items() if key[0] == kind}
        return Differences(off, {key: max(value, usual) for key, value in limit.items()})

    def read(self, stored: Mapping[str, Stored]) -> StoredTensors:
        """Stored tensors by name."""
        return StoredTensors(self.tensors, stored)


def _grouped(buffers: Mapping[str, Stored]) -> dict[str, Stored]:
    """Buffers as optimizer state is named: those of one name are judged at one scale."""
    return {f"{name.rpartition('.')[0]}|{name.rpartition('.')[2]}": t for name, t in buffers.items()}


@dataclass(frozen=True)
class Differences:
    """How far each tensor is away, relative to its scale, and may be."""

    off: Mapping[Key, float]
    limit: Mapping[Key, float]

    @cached_property
    def wrong(self) -> tuple[str, ...]:
        """The tensors that are farther away than rounding takes them."""
        return tuple(key[1] for key, off in self.off.items() if not off <= self.limit.get(key, math.inf))

    @property
    def worst(self) -> Key | None:
        """The tensor that is farthest beyond its limit, or nearest to it."""
        return max(self.off, key=lambda key: _times(self.off[key], self.limit.get(key, math.inf)), default=None)

    @property
    def times(self) -> float:
        """How many times as far as its limit the worst tensor is."""
        return _times(self.off[self.worst], self.limit.get(self.worst, math.inf)) if self.worst is not None else 0.0


def _times(off: float, limit: float) -> float:
    return math.inf if not math.isfinite(off) else off / limit if limit else 0.0


@dataclass(frozen=True)
class StepDifference:
    """How far an optimizer's step is from the reference's."""

    number: int
    candidate: OptimizerStep
    reference: OptimizerStep
    points: Mapping[str, Differences]

    def wrong(self, point: str) -> tuple[str, ...]:
        """The tensors that differ at a point."""
        return self.points[point].wrong


def first_wrong(compared: Sequence[StepDifference], point: str) -> StepDifference | None:
    """The first step in which a point differs."""
    return next((each for each in compared if each.wrong(point)), None)


def probe(code: str, title: str, compared: Sequence[StepDifference], point: str) -> Probe:
    """The comparison of a point over all steps: the first step that differs, else the tensor that came nearest to its limit."""
    wrong = first_wrong(compared, point)
    seen = [each for each in compared if each.points[point].off]
    shown = wrong or max(seen, key=lambda each: each.points[point].times, default=None)
    if shown is None:
        return Probe(code, title)
    differences = shown.points[point]
    worst = differences.worst
    assert worst is not None
    detail = f"step {shown.number}, {len(differences.wrong)} of {len(differences.off)} tensors" if wrong else ""
    return Probe(code, title, differences.off[worst], differences.limit.get(worst, math.inf), worst[1].replace("|", ".").strip("."), detail)


def moved_weights(tensors: StoredTensors, times: float, narrowest: str) -> dict[str, Tensor]:
    """First weights, each moved at random by up to so many roundings of its own format, or of the narrowest that computes."""
    generator, least = torch.Generator().manual_seed(int(times)), rounding(getattr(torch, narrowest))
    return {name: moved(t, times * max(least, rounding(t.dtype)), generator) if t.is_floating_point() else t for name, t in tensors.items()}
