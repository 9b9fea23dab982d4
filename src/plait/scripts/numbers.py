"""How far the candidate's numbers are from the reference's, tensor by tensor, and how far rounding may take them (`proof/rounding.py`).

The reference runs three times: as it is, with its first weights moved by one rounding, and by as many as a right run may be away. A tensor's
limit is the larger of what these runs show and the median of all tensors' limits, since one element may by chance hardly move.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from plait.proof.probes import TOLERANCE, Probe
from plait.proof.rounding import TIMES, Key, Noise, StepResult, distances, limits, rounding, wider
from plait.scripts.recordings import OptimizerStep, Recording, Stored, StoredTensors, unlike
from plait.scripts.rows import Readers

POINTS = ("after", "gradients", "applied")
"""Where gradients are compared: as backward leaves them (in the first step), before clipping, and as the optimizer gets them."""


@dataclass(frozen=True)
class Drift:
    """Tensors that a rank has otherwise than rank 0, bit for bit, from a step on."""

    rank: int
    step: int
    names: list[str]


@dataclass(frozen=True)
class BothSides:
    """The recordings of both sides."""

    readers: Readers
    reference: Recording
    moved: tuple[Recording, Recording]
    """The reference with weights moved by one rounding, and by many."""
    tensors: Path
    float64: bool

    @property
    def ranks(self) -> tuple[Recording, ...]:
        """The candidate's."""
        return self.readers.all

    @cached_property
    def all(self) -> tuple[Recording, ...]:
        """The candidate's rank 0, and the runs of the reference."""
        return (self.ranks[0], self.reference, *self.moved)

    @property
    def steps(self) -> int:
        """Rounds that both sides made."""
        return min(len(each.rounds) for each in self.all)

    @cached_property
    def compared(self) -> tuple["StepDifference", ...]:
        """The differences of each optimizer's step, in order."""
        found = list[StepDifference]()
        for rounds in zip(*(each.rounds for each in self.all)):
            sides = [{step.optimizer: step for step in steps} for steps in rounds]
            for optimizer in sorted(set.intersection(*map(set, sides))):
                found.append(self._difference([side[optimizer] for side in sides]))
        return tuple(found)

    @property
    def drifts(self) -> Iterator[Drift]:
        """Where ranks have other weights or buffers after a step."""
        for k, mine in enumerate(self.ranks[0].rounds[: self.steps]):
            for rank in self.ranks[1:]:
                for a, b in zip(mine, rank.rounds[k] if k < len(rank.rounds) else ()):
                    if names := unlike({**a.weights, **a.buffers}, {**b.weights, **b.buffers}):
                        yield Drift(rank.rank, k + 1, names)

    def _difference(self, steps: Sequence[OptimizerStep]) -> "StepDifference":
        found = dict[str, Differences]()
        for point in POINTS:
            found[point] = self._compared([StepResult({}, self.read(getattr(step, point)), {}, {}) for step in steps])
        after = [StepResult(self.read(_start(each, step)), {}, self.read(step.weights), self.read(_grouped(step.buffers)))
                 for each, step in zip(self.all, steps)]  # fmt: skip
        found |= {"weights": self._compared(after, "weight"), "buffers": self._compared(after, "state")}
        return StepDifference(steps[0].step, steps[0], steps[1], found)

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


def _start(recording: Recording, step: OptimizerStep) -> Mapping[str, Stored]:
    before = [each for each in recording.steps if each.optimizer == step.optimizer and each.step < step.step]
    return before[-1].weights if before else {name: t for name, t in recording.start.weights.items() if name in step.weights}


def _grouped(buffers: Mapping[str, Stored]) -> dict[str, Stored]:
    """Buffers as optimizer state is named: those of one name are judged at one scale."""
    return {f"{name.rpartition('.')[0]}|{name.rpartition('.')[2]}": t for name, t in buffers.items()}


@dataclass(frozen=True)
class Differences:
    """How far each tensor is away, relative to its scale, and may be."""

    off: Mapping[Key, float]
    limit: Mapping[Key, float]

    @cached_property
    def times(self) -> dict[Key, float]:
        """How many times as far away as it may be each tensor is."""
        return {key: off / self.limit[key] if math.isfinite(off) else math.inf for key, off in self.off.items()}

    @cached_property
    def wrong(self) -> tuple[str, ...]:
        """The tensors that are farther away than rounding takes them."""
        return tuple(key[1] for key, times in self.times.items() if times > 1)

    @property
    def most(self) -> float:
        """How many times as far as it may be the worst tensor is."""
        return max(self.times.values(), default=0.0)


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


def probe(code: str, title: str, compared: Sequence[StepDifference], point: str) -> Probe:
    """The comparison of a point over all steps: the first step that differs, else the tensor that came nearest to its limit."""
    seen = [each for each in compared if each.points[point].off]
    if not seen:
        return Probe(code, title)
    shown = next((each for each in seen if each.wrong(point)), max(seen, key=lambda each: each.points[point].most))
    differences = shown.points[point]
    worst = max(differences.times, key=lambda key: differences.times[key])
    detail = f"step {shown.number}, {len(differences.wrong)} of {len(differences.off)} tensors"
    return Probe(code, title, differences.off[worst], differences.limit[worst], worst[1].replace("|", ".").strip("."), detail)


def moved_weights(tensors: StoredTensors, times: float, narrowest: str) -> dict[str, Tensor]:
    """First weights, each moved at random by up to so many roundings of its own format, or of the narrowest that computes."""
    generator, noise = torch.Generator().manual_seed(int(times)), Noise(0, times, rounding(getattr(torch, narrowest)))
    return {name: noise.operand(t, generator) for name, t in tensors.items()}
