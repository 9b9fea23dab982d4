"""Whether a loss is separable: the loss of a batch, and its gradients, are the weighted mean of those of its parts.

It is tried on outputs that the model returned, and on larger and smaller ones, cut as a plan cuts the batch: a branch
that a loss takes for large values only is met before training gets there.
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
from plait.data.batch import Micro, weigh
from plait.tensors.rows import dense
from plait.tensors.torch_private import leaves, tree_flatten, tree_map, tree_map_only, tree_unflatten

TOLERANCE = 1e-9
SCALES = (1.0, *(round(1.3**k, 3) for k in range(1, 11)), *(round(0.7**k, 3) for k in range(1, 7)))
"""Outputs are tried as they are, and times these."""
STEPS, HALVES = 8, 7
"""Steps down the loss; and how often a stretch is halved between two points with unlike gradients."""
Part = tuple[int, int]


@dataclass(frozen=True)
class Coupled:
    """Outputs at which a loss was tried, and how far from separable it is. `losses`, `weights`: of the parts."""

    scale: float
    """Of the model's own outputs; 0 where they were moved otherwise."""
    whole: float
    losses: list[float]
    weights: list[float]
    apart: float
    """How far apart losses or gradients are, relative to their size."""
    outputs: object
    gradients: list[Tensor | None]
    """Of the whole, by the leaves of the outputs."""

    def told(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("scale", "whole", "losses", "weights", "apart")}


def coupled(
    job: Job, outputs: object, targets: object, parts: list[Part], seconds: float, inside: Callable[[], AbstractContextManager[Any]]
) -> tuple[Coupled | None, int, str]:  # fmt: skip
    """(the first point at which the loss is not separable, points tried, why none was).

    `parts`: (first, count) of each. `inside`: what the loss runs in. No more than `seconds` of processor time are spent.
    """
    size = sum(count for _, count in parts)
    leaves(outputs)  # makes trees of dataclasses
    if not (_by_sample(outputs, size) and _by_sample(targets, size)):
        return None, 0, "the outputs or targets have no dim of samples"
    trial, end = _Trial(job, targets, parts, inside), time.process_time() + seconds
    try:
        first, again = trial.at(outputs, 1.0), trial.whole(outputs)[0]
    except Exception as error:  # the loss may need more samples than a part has
        return None, 0, f"the loss raised {type(error).__name__} on a part"
    if first.whole != again and not math.isnan(again):
        return None, 0, "the loss gives another number when it is asked again"
    tried = 1
    if first.apart > TOLERANCE:
        return first, tried, ""
    for points in (_scaled, _descended):
        way = points(first)
        last, step = first, next(way)
        while step is not None:
            if time.process_time() > end:
                return None, tried, ""
            try:
                found, tried = trial.at(*step), tried + 1
                if found.apart <= TOLERANCE and _turns(last, found):
                    found, more = trial.between(last, found)
                    tried += more
            except Exception:  # the loss may not bear such numbers
                break
            if found.apart > TOLERANCE:
                return found, tried, ""
            last, step = found, way.send(found)
    return None, tried, ""


Way = Generator[tuple[Any, float] | None, Coupled, None]


def _scaled(first: Coupled) -> Way:
    """Outputs that are larger and smaller."""
    for scale in SCALES[1:]:
        yield _map(lambda t, scale=scale: t * scale, first.outputs), scale
    yield None


def _descended(first: Coupled) -> Way:
    """Outputs with a lower and lower loss, as training will have them."""
    at = first
    for _ in range(STEPS):
        flat, form = tree_flatten(at.outputs)
        at = yield tree_unflatten([_lower(t, g) for t, g in zip(flat, at.gradients)], form), 0.0
    yield None


def _lower(t: object, gradient: Tensor | None) -> object:
    if gradient is None or not isinstance(t, Tensor) or not float(gradient.abs().max()):
        return t
    return t - 0.2 * t.square().mean().sqrt().clamp(min=0.1) * gradient / gradient.square().mean().sqrt()


def _turns(a: Coupled, b: Coupled) -> bool:
    """Whether the gradients at two points differ so much that a branch of the loss may lie between."""
    x, y = (torch.cat([g.flatten() for g in at.gradients if g is not None] or [torch.zeros(1)]) for at in (a, b))
    sizes = float(x.norm()), float(y.norm())
    if not min(sizes) > 0:
        return max(sizes) > 0
    return float(x @ y) < 0.7 * sizes[0] * sizes[1] or not 0.5 < sizes[0] / sizes[1] < 2


def _by_sample(tree: object, size: int) -> bool:
    found = [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
    return bool(found) and all(t.dim() and t.shape[0] == size for t in found)


class _Trial:
    """Computes the loss, whole and in parts, for outputs of any size."""

    def __init__(self, job: Job, targets: object, parts: list[Part], inside: Callable[[], AbstractContextManager[Any]]):
        self.job, self.targets, self.parts, self.inside = job, targets, parts, inside
        self.cut = [tree_map_only(Tensor, lambda t, f=f, n=n: dense(t[f : f + n]), targets) for f, n in parts]
        self.weights = [weigh(job.weight, Micro(f, n, None, mine, ())) for mine, (f, n) in zip(self.cut, parts)]

    def whole(self, outputs: object) -> tuple[float, list[Tensor | None]]:
        """The loss of all samples, and its gradients by the outputs."""
        with self.inside():
            return _graded(self.job, _map(lambda t: t.detach().clone(), outputs), self.targets)

    def at(self, outputs: object, scale: float) -> Coupled:
        """How far the parts are from the whole; 0 where something is not finite."""
        whole, expected = self.whole(outputs)
        losses, rows = [0.0] * len(self.parts), list[list[Tensor | None]]()
        for k, ((first, count), mine, weight) in enumerate(zip(self.parts, self.cut, self.weights)):
            cut = lambda t, first=first, count=count: t.detach()[first : first + count].clone()  # noqa: E731
            rows.append([])
            if weight:
                with self.inside():
                    losses[k], rows[-1] = _graded(self.job, tree_map_only(Tensor, cut, outputs), mine)
        total, apart = sum(self.weights), 0.0
        if total and all(math.isfinite(x) for x in (whole, *losses)):
            size = max(abs(whole), max(map(abs, losses)), 1e-12)
            apart = abs(sum(w * x for w, x in zip(self.weights, losses)) / total - whole) / size
            shares = [w / total for w in self.weights]
            for k, gradient in enumerate(expected):
                if gradient is not None:
                    apart = max(apart, _apart(gradient, [row[k] if row else None for row in rows], self.parts, shares))
        return Coupled(scale, whole, losses, self.weights, apart, outputs, expected)

    def between(self, a: Coupled, b: Coupled) -> tuple[Coupled, int]:
        """The first point found between two at which the loss is not separable, else `b`; and how many were tried."""
        low, high = a, b
        mean = lambda x, y: (x + y) / 2 if isinstance(x, Tensor) and x.is_floating_point() else x  # noqa: E731
        for k in range(HALVES):
            middle = self.at(tree_map(mean, low.outputs, high.outputs), (low.scale + high.scale) / 2)
            if middle.apart > TOLERANCE:
                return middle, k + 1
            low, high = (low, middle) if _turns(low, middle) else (middle, high)
        return b, HALVES


def _map(function: Callable[[Tensor], Tensor], outputs: object) -> Any:
    return tree_map_only(Tensor, lambda t: function(t.detach()) if t.is_floating_point() else t, outputs)


def _apart(whole: Tensor, found: list[Tensor | None], parts: list[Part], shares: list[float]) -> float:
    """How far the gradients of the parts are from those of the whole, relative to the largest."""
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


def _graded(job: Job, outputs: object, targets: object) -> tuple[float, list[Tensor | None]]:
    """The loss and its gradients by the leaves of the outputs; None of those that have none."""
    flat, form = tree_flatten(outputs)
    asked = [t.requires_grad_() for t in flat if isinstance(t, Tensor) and t.is_floating_point()]
    loss = job.loss(tree_unflatten(flat, form), targets)
    gradients = iter(torch.autograd.grad(loss, asked, allow_unused=True) if loss.requires_grad else [None] * len(asked))
    floating = (isinstance(t, Tensor) and t.is_floating_point() for t in flat)
    return float(loss.detach()), [next(gradients) if each else None for each in floating]
