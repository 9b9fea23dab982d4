"""Models that look at numbers and choose what to compute: whether the choice is the batch's, and parts would choose otherwise.

A branch on a mean over the batch is harmless as long as all parts are on the same side of it. So the weights are made larger
and smaller step by step, and where a choice changes between two steps the stretch is halved, until the mean of a part and that
of the batch lie on two sides.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.batch import Micro
from plait.engine.engine import Engine
from plait.launch.place import Place
from plait.proof.job.look import WHOLE, PartRows, forward, parted
from plait.proof.job.trial import KnownModel, Point
from plait.tensors.torch_private import TorchDispatchMode, leaves

SCALES = (*(1.2**k for k in range(1, 9)), *(0.8**k for k in range(1, 7)))
HALVES = 8
Found = tuple[float, int, float, int]
"""Weights times this, sample, how far its output differs, samples that it was computed with."""


class _Choices(TorchDispatchMode):
    """Notes the truth values that are read from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.read = list[bool]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, bool):
            self.read.append(result)
        return result


class _Runs:
    """Forward passes of a batch and its parts, with weights of any size."""

    def __init__(self, engine: Engine, whole: Micro, parts: list[Micro], step: int):
        self.engine, self.whole, self.parts, self.step = engine, whole, parts, step
        self.given = [(p, p.detach().clone()) for p in engine.rank_model.module.parameters()]

    def at(self, scale: float) -> tuple[list[bool], Found | None]:
        """What was chosen for the whole batch, and the first sample for which a part's output is another."""
        with torch.no_grad():
            for parameter, value in self.given:
                parameter.copy_(value * scale)
        expected, chosen = self._outputs(self.whole)
        for part in self.parts:
            for a, b in zip(expected, self._outputs(part)[0]):
                unlike = PartRows.of(part, self.whole).worst_row(a, b)
                if unlike is not None and self._again(expected):
                    return chosen, (scale, self.whole.ids[part.first + unlike[0]], unlike[1], part.count)
        return chosen, None

    def _again(self, expected: list[Tensor]) -> bool:
        return all(WHOLE.worst_row(a, b) is None for a, b in zip(expected, self._outputs(self.whole)[0]))

    def _outputs(self, micro: Micro) -> tuple[list[Tensor], list[bool]]:
        choices = _Choices()
        outputs = forward(self.engine, micro, self.step, choices)
        return [t for t in leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()], choices.read


def look(job: Job, cut: Plan, known: KnownModel, point: Point, place: Place, *, seconds: float) -> dict[str, Any]:
    """{"found": …} of the first sizes of weights at which parts choose otherwise. `seconds`: of processor time, to look for them."""
    runs, end = _Runs(*parted(job, cut, known, point, place), point.step), time.process_time() + seconds
    first = runs.at(1.0)
    if first[1] is not None or not first[0]:
        return {"found": None}
    for direction in (SCALES[:8], SCALES[8:]):
        last, before = 1.0, first[0]
        for scale in direction:
            if time.process_time() > end:
                return {"found": None}
            chosen, found = runs.at(scale)
            if found is None and chosen != before:
                found = _between(runs.at, before, last, scale)
            if found is not None:
                return {"found": found}
            last, before = scale, chosen
    return {"found": None}


def _between(
    at: Callable[[float], tuple[list[bool], Found | None]], before: list[bool], low: float, high: float
) -> Found | None:
    """What is found where the choices become others than those `before`, at `low`."""
    for _ in range(HALVES):
        middle = (low + high) / 2
        chosen, found = at(middle)
        if found is not None:
            return found
        low, high = (middle, high) if chosen == before else (low, middle)
    return None
