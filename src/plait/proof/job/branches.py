"""Find models that branch on values of the batch, so that parts of a batch take another branch than the full batch.

A branch on a batch mean is harmless as long as all parts take the same side. So the weights are scaled up and down in steps. If a branch
changes between two scales, the interval is bisected until the mean of a part and that of the batch are on different sides.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.batch import MicroBatch
from plait.engine.engine import Engine
from plait.launch.place import Place
from plait.proof.job.mismatch import ALL_ROWS, PartRows, run_micro_forward, split_into_micros
from plait.proof.job.trial import AnalyzedModel, Point
from plait.tensors.torch_private import TorchDispatchMode, dataclass_leaves

SCALES = (*(1.2**k for k in range(1, 9)), *(0.8**k for k in range(1, 7)))
BISECTIONS = 8
BranchMismatch = tuple[float, int, float, int]
"""(scale of the weights, sample, difference of its output, samples in its part)."""


class _ChoiceRecorder(TorchDispatchMode):
    """Records the truth values read from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = list[bool]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, bool):
            self.choices.append(result)
        return result


class _ScaledRuns:
    """Forward passes of a batch and its parts, with scaled weights."""

    def __init__(self, engine: Engine, whole: MicroBatch, parts: list[MicroBatch], step: int):
        self.engine, self.whole, self.parts, self.step = engine, whole, parts, step
        self.given = [(p, p.detach().clone()) for p in engine.rank_model.module.parameters()]

    def run_scaled(self, scale: float) -> tuple[list[bool], BranchMismatch | None]:
        """The branches taken for the full batch, and the first sample whose output differs in a part."""
        with torch.no_grad():
            for parameter, value in self.given:
                parameter.copy_(value * scale)
        expected, chosen = self._run_outputs(self.whole)
        for part in self.parts:
            for a, b in zip(expected, self._run_outputs(part)[0]):
                unlike = PartRows.from_micro(part, self.whole).worst_row(a, b)
                if unlike is not None and self._is_repeatable(expected):
                    return chosen, (scale, self.whole.ids[part.first + unlike[0]], unlike[1], part.count)
        return chosen, None

    def _is_repeatable(self, expected: list[Tensor]) -> bool:
        return all(ALL_ROWS.worst_row(a, b) is None for a, b in zip(expected, self._run_outputs(self.whole)[0]))

    def _run_outputs(self, micro: MicroBatch) -> tuple[list[Tensor], list[bool]]:
        choices = _ChoiceRecorder()
        outputs = run_micro_forward(self.engine, micro, self.step, choices)
        return [t for t in dataclass_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()], choices.choices


def find_branch(job: Job, cut: Plan, known: AnalyzedModel, point: Point, place: Place, *, seconds: float) -> dict[str, Any]:
    """{"found": …}: the first scale of the weights at which parts take another branch. `seconds`: limit of processor time."""
    runs, end = _ScaledRuns(*split_into_micros(job, cut, known, point, place), point.step), time.process_time() + seconds
    first = runs.run_scaled(1.0)
    if first[1] is not None or not first[0]:
        return {"found": None}
    for direction in (SCALES[:8], SCALES[8:]):
        last, before = 1.0, first[0]
        for scale in direction:
            if time.process_time() > end:
                return {"found": None}
            chosen, found = runs.run_scaled(scale)
            if found is None and chosen != before:
                found = _bisect_branch(runs.run_scaled, before, last, scale)
            if found is not None:
                return {"found": found}
            last, before = scale, chosen
    return {"found": None}


def _bisect_branch(
    at: Callable[[float], tuple[list[bool], BranchMismatch | None]], before: list[bool], low: float, high: float
) -> BranchMismatch | None:
    """Bisect the interval in which the branches change from `before`, those at `low`."""
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        chosen, found = at(middle)
        if found is not None:
            return found
        low, high = (middle, high) if chosen == before else (low, middle)
    return None
