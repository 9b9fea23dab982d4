"""Checks whether a loss is separable: the loss of a batch and its gradients are the weighted means of those of its parts.

The loss is tried on outputs of the model, and on larger and smaller ones, split like a plan splits the batch. So a branch for
large values only is found before training reaches it.
"""

import math
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.config.job import Job
from plait.data.batch import MicroBatch, weigh_micro_batch
from plait.tensors.rows import make_dense
from plait.tensors.torch_private import dataclass_leaves, tree_flatten, tree_map, tree_map_only, tree_unflatten

TOLERANCE = 1e-9
SCALES = (1.0, *(round(1.3**k, 3) for k in range(1, 11)), *(round(0.7**k, 3) for k in range(1, 7)))
"""Outputs are tried unchanged, and times these factors."""
STEPS, HALVES = 8, 7
"""Descent steps on the loss, and bisections between two points with different gradients."""
Part = tuple[int, int]


@dataclass(frozen=True)
class SeparabilityPoint:
    """A point (model outputs) at which a loss was tried, and its deviation. `losses`, `weights`: of the parts."""

    scale: float
    """Factor of the model's own outputs; 0 if they were changed in another way."""
    whole: float
    losses: list[float]
    weights: list[float]
    apart: float
    """Largest difference of losses or gradients, relative to their size."""
    outputs: object
    gradients: list[Tensor | None]
    """Gradients of the full loss, by the leaves of the outputs."""

    def to_report(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("scale", "whole", "losses", "weights", "apart")}


def find_coupling(
    job: Job, outputs: object, targets: object, parts: list[Part], seconds: float, inside: Callable[[], AbstractContextManager[Any]]
) -> tuple[SeparabilityPoint | None, int, str]:  # fmt: skip
    """Return (the first point at which the loss is not separable, number of points, the reason if none was tried).

    `parts`: (first, count) of each. `inside`: the context of the loss. At most `seconds` of processor time are used.
    """
    size = sum(count for _, count in parts)
    dataclass_leaves(outputs)  # registers dataclasses as trees
    if not (_is_by_sample(outputs, size) and _is_by_sample(targets, size)):
        return None, 0, "the outputs or targets have no dim of samples"
    trial, end = _LossTrial(job, targets, parts, inside), time.process_time() + seconds
    try:
        first, again = trial.compare_parts(outputs, 1.0), trial.compute_full(outputs)[0]
    except Exception as error:  # the loss may need more samples than a part has
        return None, 0, f"the loss raised {type(error).__name__} on a part"
    if first.whole != again and not math.isnan(again):
        return None, 0, "the loss returns another value when it is computed again"
    tried = 1
    if first.apart > TOLERANCE:
        return first, tried, ""
    for points in (_scale_outputs, _descend_loss):
        way = points(first)
        last, step = first, next(way)
        while step is not None:
            if time.process_time() > end:
                return None, tried, ""
            try:
                found, tried = trial.compare_parts(*step), tried + 1
                if found.apart <= TOLERANCE and _has_branch(last, found):
                    found, more = trial.bisect_branch(last, found)
                    tried += more
            except Exception:  # the loss may reject such values
                break
            if found.apart > TOLERANCE:
                return found, tried, ""
            last, step = found, way.send(found)
    return None, tried, ""


PointGenerator = Generator[tuple[Any, float] | None, SeparabilityPoint, None]


def _scale_outputs(first: SeparabilityPoint) -> PointGenerator:
    """Yield larger and smaller outputs."""
    for scale in SCALES[1:]:
        yield _map_floats(lambda t, scale=scale: t * scale, first.outputs), scale
    yield None


def _descend_loss(first: SeparabilityPoint) -> PointGenerator:
    """Yield outputs with lower and lower loss, as in training."""
    at = first
    for _ in range(STEPS):
        flat, form = tree_flatten(at.outputs)
        at = yield tree_unflatten([_step_down(t, g) for t, g in zip(flat, at.gradients)], form), 0.0
    yield None


def _step_down(t: object, gradient: Tensor | None) -> object:
    if gradient is None or not isinstance(t, Tensor) or not float(gradient.abs().max()):
        return t
    return t - 0.2 * t.square().mean().sqrt().clamp(min=0.1) * gradient / gradient.square().mean().sqrt()


def _has_branch(a: SeparabilityPoint, b: SeparabilityPoint) -> bool:
    """Whether the gradients at two points differ so much that a branch of the loss may be between them."""
    x, y = (torch.cat([g.flatten() for g in at.gradients if g is not None] or [torch.zeros(1)]) for at in (a, b))
    sizes = float(x.norm()), float(y.norm())
    if not min(sizes) > 0:
        return max(sizes) > 0
    return float(x @ y) < 0.7 * sizes[0] * sizes[1] or not 0.5 < sizes[0] / sizes[1] < 2


def _is_by_sample(tree: object, size: int) -> bool:
    found = [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
    return bool(found) and all(t.dim() and t.shape[0] == size for t in found)


class _LossTrial:
    """Computes the full loss and the losses of its parts, for any outputs."""

    def __init__(self, job: Job, targets: object, parts: list[Part], inside: Callable[[], AbstractContextManager[Any]]):
        self.job, self.targets, self.parts, self.inside = job, targets, parts, inside
        self.cut = [tree_map_only(Tensor, lambda t, f=f, n=n: make_dense(t[f : f + n]), targets) for f, n in parts]
        self.weights = [weigh_micro_batch(job.weight, MicroBatch(f, n, None, mine, ())) for mine, (f, n) in zip(self.cut, parts)]

    def compute_full(self, outputs: object) -> tuple[float, list[Tensor | None]]:
        """Compute the loss of all samples, and its gradients by the outputs."""
        with self.inside():
            return _compute_gradients(self.job, _map_floats(lambda t: t.detach().clone(), outputs), self.targets)

    def compare_parts(self, outputs: object, scale: float) -> SeparabilityPoint:
        """Compare the parts with the full loss. The difference is 0 if a value is not finite."""
        whole, expected = self.compute_full(outputs)
        losses, rows = [0.0] * len(self.parts), list[list[Tensor | None]]()
        for k, ((first, count), mine, weight) in enumerate(zip(self.parts, self.cut, self.weights)):
            cut = lambda t, first=first, count=count: t.detach()[first : first + count].clone()  # noqa: E731
            rows.append([])
            if weight:
                with self.inside():
                    losses[k], rows[-1] = _compute_gradients(self.job, tree_map_only(Tensor, cut, outputs), mine)
        total, apart = sum(self.weights), 0.0
        if total and all(math.isfinite(x) for x in (whole, *losses)):
            size = max(abs(whole), max(map(abs, losses)), 1e-12)
            apart = abs(sum(w * x for w, x in zip(self.weights, losses)) / total - whole) / size
            shares = [w / total for w in self.weights]
            for k, gradient in enumerate(expected):
                if gradient is not None:
                    apart = max(apart, _compute_diff(gradient, [row[k] if row else None for row in rows], self.parts, shares))
        return SeparabilityPoint(scale, whole, losses, self.weights, apart, outputs, expected)

    def bisect_branch(self, a: SeparabilityPoint, b: SeparabilityPoint) -> tuple[SeparabilityPoint, int]:
        """Return the first point between two points at which the loss is not separable, else `b`; and the number of points tried."""
        low, high = a, b
        mean = lambda x, y: (x + y) / 2 if isinstance(x, Tensor) and x.is_floating_point() else x  # noqa: E731
        for k in range(HALVES):
            middle = self.compare_parts(tree_map(mean, low.outputs, high.outputs), (low.scale + high.scale) / 2)
            if middle.apart > TOLERANCE:
                return middle, k + 1
            low, high = (low, middle) if _has_branch(low, middle) else (middle, high)
        return b, HALVES


def _map_floats(function: Callable[[Tensor], Tensor], outputs: object) -> Any:
    return tree_map_only(Tensor, lambda t: function(t.detach()) if t.is_floating_point() else t, outputs)


def _compute_diff(whole: Tensor, found: list[Tensor | None], parts: list[Part], shares: list[float]) -> float:
    """Return the largest difference of the parts' gradients from the full gradient, relative to its largest value."""
    scale = max(float(whole.abs().max()), 1e-12)
    if not math.isfinite(scale):
        return 0.0
    worst = 0.0
    for gradient, (first, count), share in zip(found, parts, shares):
        expected = whole[first : first + count]
        difference = expected if gradient is None else expected - gradient * share
        if difference.numel():
            worst = max(worst, float(difference.abs().max()) / scale)
    return worst if math.isfinite(worst) else 0.0


def _compute_gradients(job: Job, outputs: object, targets: object) -> tuple[float, list[Tensor | None]]:
    """Compute the loss and its gradients by the leaves of the outputs; None for leaves without gradient."""
    flat, form = tree_flatten(outputs)
    asked = [t.requires_grad_() for t in flat if isinstance(t, Tensor) and t.is_floating_point()]
    loss = job.loss(tree_unflatten(flat, form), targets)
    gradients = iter(torch.autograd.grad(loss, asked, allow_unused=True) if loss.requires_grad else [None] * len(asked))
    floating = (isinstance(t, Tensor) and t.is_floating_point() for t in flat)
    return float(loss.detach()), [next(gradients) if each else None for each in floating]
