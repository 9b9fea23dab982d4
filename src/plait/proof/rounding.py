"""Measure the largest allowed distance from one device for the step in the plan's number formats, for each job and tensor.

A correct split run adds the same terms in another order. By backward error analysis, its result equals that of one device with every term
perturbed by a few roundings. So one device repeats the step with randomly perturbed weights, inputs and loss factors, each in its own
format: `DRAWS` times by one rounding, counted `MAX_ROUNDINGS` times, and `DRAWS` times by up to `MAX_ROUNDINGS` roundings. A tensor's limit
is the largest distance in these runs. It is at least `MIN_ROUNDINGS` roundings, since clipping and the optimizer round too.

[Note: why both sizes of noise]
If a step is smooth, a run perturbed by MAX_ROUNDINGS roundings is MAX_ROUNDINGS times as far away as one perturbed by one, and both give the
same limit. A gradient that is truly zero (of a key's bias in attention, of a bias before batch normalization) is rounding error alone. Its
size does not depend on the perturbation of the weights, and only a distance counted MAX_ROUNDINGS times covers it. A correct run
meets a discontinuity (an activation's kink, a chosen expert) with a small probability p. A run perturbed by MAX_ROUNDINGS roundings meets it
with probability MAX_ROUNDINGS × p.

[Note: the rate of false alarms]
Let a correct run be as far from one device as a run that is perturbed by r roundings; in measured clean runs r is about one.
The distance of a tensor with many elements hardly varies, and the limit is MAX_ROUNDINGS / r times as large.
The distance of one element varies like the size of a normal deviate s. A false alarm needs all 2 × DRAWS draws to be near zero by
chance and the run to be far: s > MAX_ROUNDINGS / r × the largest of them. For r = 1 its probability is 4e-9, for r = 4 it is 1e-5.
A discontinuity causes one if the run meets it and no draw does. The probability is p (1 - MAX_ROUNDINGS × p)^DRAWS: 0.3 % for the worst p,
and less than 1e-3 unless p is between 1e-3 and 2e-2. Distances ignore the largest elements of a tensor, so that a jump of one element does
not count. `bench/false_alarms.py` measures both rates on clean runs and on faults.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor

DRAWS = 3
"""Runs for each size of noise."""
MAX_ROUNDINGS = 32.0
"""Largest allowed distance of a correct run, in roundings."""
MIN_ROUNDINGS = 16.0
"""Smallest limit of any tensor, in roundings: clipping, the optimizer (twice in a square) and the weight round."""
GROUPS = ("gradient", "weight", "state")
Key = tuple[str, str]
"""(kind, name) of a tensor."""


@dataclasses.dataclass
class StepResult:
    """Tensors of a run before and after the step, by kind and name; the names of state are `name|key`."""

    start: Mapping[str, Tensor]
    gradient: Mapping[str, Tensor]
    weight: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    """Loss of each part, by its first sample."""

    def get_tensors(self, kind: str) -> Mapping[str, Tensor]:
        """Tensors of a kind; for weights, their changes in the step."""
        if kind == "weight":
            return {n: _to_double(t) - _to_double(self.start[n]) for n, t in self.weight.items() if n in self.start}
        return getattr(self, kind)

    @cached_property
    def scales(self) -> dict[str, dict[str, float]]:
        """By kind, the size of each tensor, but at least a hundredth of the largest related tensor."""
        return {kind: _compute_scales(getattr(self, kind)) for kind in GROUPS}


@dataclasses.dataclass(frozen=True)
class Noise:
    """Random rounding of weights and inputs for one run. `draw` is the seed."""

    draw: int
    times: float
    """Largest perturbation, in roundings."""
    operands: float
    """One rounding, relative to each element, unless the rounding of its own format is wider."""
    own: bool = True
    """True if the element's own format counts. Otherwise, values are rounded up or down at random."""

    def perturb(self, t: Tensor, generator: torch.Generator) -> Tensor:
        """Perturb a weight or an input."""
        if not (t.is_floating_point() or t.is_complex()):
            return t
        return perturb_tensor(t, self.times * (max(self.operands, compute_unit_roundoff(t.dtype)) if self.own else self.operands), generator)


def compute_unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to a format. Integers of quantized state have eight bits."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point or dtype.is_complex else 2.0**-8


def perturb_tensor(t: Tensor, relative: float, generator: torch.Generator) -> Tensor:
    """Move each element by up to `relative` of itself, and round up or down at random, so that the mean of many draws is exact. Zeros and
    values that would overflow do not change."""
    if t.is_complex():
        return torch.view_as_complex(perturb_tensor(torch.view_as_real(t).contiguous(), relative, generator))
    if t.layout is not torch.strided or not t.numel():
        return t
    exact = t.detach().double()
    first, second = (torch.rand((2, *t.shape), generator=generator, dtype=torch.float64) - 0.5).to(t.device)
    spacing = torch.ldexp(torch.full_like(exact, torch.finfo(t.dtype).eps), torch.frexp(exact).exponent - 1)
    found = (exact + (exact * relative * 2 * first / spacing + second).round() * spacing).to(t.dtype)
    return torch.where(found.isfinite(), found, t)


def compute_limits(base: StepResult, runs: Iterable[StepResult], times: float = 1.0) -> dict[Key, float]:
    """Largest allowed distance of each tensor from `base`: `times` the largest distance of the perturbed runs."""
    found = {(kind, name): MIN_ROUNDINGS * compute_unit_roundoff(t.dtype) for kind in GROUPS for name, t in getattr(base, kind).items()}
    for run in runs:
        for key, off in measure_distances(base, run).items():
            found[key] = max(found.get(key, 0.0), times * off)
    return found


def widen_limits(limit: Mapping[Key, float], other: Mapping[Key, float]) -> dict[Key, float]:
    """The wider of two limits of each tensor."""
    return {key: max(value, other.get(key, 0.0)) for key, value in limit.items()}


def measure_distances(base: StepResult, other: StepResult) -> dict[Key, float]:
    """Distance of each tensor of another run, relative to its scale; for weights, the distance of their changes."""
    found = {}
    for kind in GROUPS:
        mine, others, scale = base.get_tensors(kind), other.get_tensors(kind), base.scales[kind]
        for name in (name for name in others if name in mine):
            off = math.inf
            if mine[name].shape == others[name].shape:
                off = _compute_trimmed_rms(_to_double(mine[name]) - _to_double(others[name]), trim=True) / scale[name]
            found[kind, name] = off if off == off else math.inf
    return found


def _compute_scales(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    sizes, largest = {name: _compute_trimmed_rms(t) for name, t in tensors.items()}, dict[str, float]()
    for name, value in sizes.items():
        key = name.partition("|")[2]
        largest[key] = max(largest.get(key, 0.0), value)
    return {name: max(value, 1e-2 * largest[name.partition("|")[2]], 1e-300) for name, value in sizes.items()}


def _to_double(t: Tensor) -> Tensor:
    return t.detach().to(torch.complex128 if t.is_complex() else torch.float64)


def _compute_trimmed_rms(t: Tensor, trim: bool = False) -> float:
    """Root mean square of the elements. With `trim`, the largest hundredth of the nonzero elements and one more count as zero; a single
    element is kept."""
    flat = _to_double(t).abs().flatten()
    if trim and flat.numel() > 1 and bool(flat.isfinite().all()):
        flat = flat.index_fill(0, flat.topk(1 + int(flat.count_nonzero()) // 100).indices, 0.0)
    return float(torch.linalg.vector_norm(flat)) / max(flat.numel(), 1) ** 0.5
