"""How far a right run may be from one device: the limits of the step in own formats, measured for each job and tensor.

A right split run adds the same terms in another order. By backward error analysis its result is that of one device with every term
moved by a few roundings. So one device trains the step again with weights, inputs and what the loss is multiplied by moved at random, each
in its own format: `DRAWS` times by one rounding, which counts `TIMES` times, and `DRAWS` times by up to `TIMES` roundings. A tensor's limit is the
largest distance that these runs show, and at least `LEAST` roundings, since clipping and the optimizer round too.

[Note: why both sizes of noise]
Where a step is smooth, a run moved by TIMES roundings is TIMES times as far away as one moved by one, and both give the same limit.
A gradient that is truly zero (of a key's bias in attention, of a bias before batch normalization) is rounding alone, of the same size
however far weights are moved: a distance counted TIMES times allows for it. A jump (an activation's kink, a chosen expert) that
a right run meets with a small probability p, a run moved by TIMES roundings meets with TIMES × p.

[Note: the rate of false alarms]
Let a right run be as far from one device as a run that is moved by r roundings; in measured clean runs r is about one.
The distance of a tensor with many elements hardly varies, and the limit is TIMES / r times as large.
The distance of one element varies like the size of a normal deviate s. A false alarm needs all 2 × DRAWS draws to be near zero by
chance and the run to be far: s > TIMES / r × the largest of them. For r = 1 its probability is 4e-9, for r = 4 it is 1e-5.
A jump causes one if the run meets it and no draw does: p (1 - TIMES × p)^DRAWS, which is 0.3 % for the worst p and less than 1e-3 unless
p is between 1e-3 and 2e-2. Distances leave out the largest elements of a tensor, so that the jump of one element does not count.
`bench/false_alarms.py` counts what this amounts to on clean runs and on faults.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor

DRAWS = 3
"""Runs that are moved by each size of noise."""
TIMES = 32.0
"""Roundings that a right run may be away."""
LEAST = 16.0
"""Roundings that every tensor may be off by: clipping, the optimizer (twice in a square) and the weight round."""
GROUPS = ("gradient", "weight", "state")
Key = tuple[str, str]
"""(kind, name) of a tensor."""


@dataclasses.dataclass
class StepResult:
    """What a run has before the step and after it: by kind, name -> tensor; state is `name|key`."""

    start: Mapping[str, Tensor]
    gradient: Mapping[str, Tensor]
    weight: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    """Of each part, by its first sample."""

    def of(self, kind: str) -> Mapping[str, Tensor]:
        """The tensors of a kind; of weights how far they moved."""
        if kind == "weight":
            return {n: _wide(t) - _wide(self.start[n]) for n, t in self.weight.items() if n in self.start}
        return getattr(self, kind)

    @cached_property
    def scales(self) -> dict[str, dict[str, float]]:
        """By kind, the size of each tensor, or a hundredth of the largest of those like it."""
        return {kind: _scales(getattr(self, kind)) for kind in GROUPS}


@dataclasses.dataclass(frozen=True)
class Noise:
    """Random rounding of weights and inputs for one run. `draw` seeds it."""

    draw: int
    times: float
    """Roundings that they are moved by at most."""
    operands: float
    """One rounding, relative to each element, unless that of the own format is wider."""
    own: bool = True
    """Whether the own format counts; otherwise values in it are rounded up or down by chance."""

    def operand(self, t: Tensor, generator: torch.Generator) -> Tensor:
        """A weight or an input, moved."""
        if not (t.is_floating_point() or t.is_complex()):
            return t
        return moved(t, self.times * (max(self.operands, rounding(t.dtype)) if self.own else self.operands), generator)


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error of rounding a number to a format; a whole number of a quantised state has eight bits."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point or dtype.is_complex else 2.0**-8


def moved(t: Tensor, relative: float, generator: torch.Generator) -> Tensor:
    """A tensor with each element moved by up to `relative` of itself, and rounded to its format up or down by chance, so that
    the mean of many draws is exact. Zero and what would overflow stay."""
    if t.is_complex():
        return torch.view_as_complex(moved(torch.view_as_real(t).contiguous(), relative, generator))
    if t.layout is not torch.strided or not t.numel():
        return t
    exact = t.detach().double()
    first, second = (torch.rand((2, *t.shape), generator=generator, dtype=torch.float64) - 0.5).to(t.device)
    spacing = torch.ldexp(torch.full_like(exact, torch.finfo(t.dtype).eps), torch.frexp(exact).exponent - 1)
    found = (exact + (exact * relative * 2 * first / spacing + second).round() * spacing).to(t.dtype)
    return torch.where(found.isfinite(), found, t)


def limits(base: StepResult, runs: Iterable[StepResult], times: float = 1.0) -> dict[Key, float]:
    """How far each tensor of a right run may be from `base`: `times` as far as the farthest of runs that were moved."""
    found = {(kind, name): LEAST * rounding(t.dtype) for kind in GROUPS for name, t in getattr(base, kind).items()}
    for run in runs:
        for key, off in distances(base, run).items():
            found[key] = max(found.get(key, 0.0), times * off)
    return found


def wider(limit: Mapping[Key, float], other: Mapping[Key, float]) -> dict[Key, float]:
    """The wider of two limits of each tensor."""
    return {key: max(value, other.get(key, 0.0)) for key, value in limit.items()}


def distances(base: StepResult, other: StepResult) -> dict[Key, float]:
    """How far each tensor of another run is, over its scale; of weights, how far their movements are."""
    found = {}
    for kind in GROUPS:
        mine, others, scale = base.of(kind), other.of(kind), base.scales[kind]
        for name in (name for name in others if name in mine):
            off = math.inf
            if mine[name].shape == others[name].shape:
                off = _size(_wide(mine[name]) - _wide(others[name]), trim=True) / scale[name]
            found[kind, name] = off if off == off else math.inf
    return found


def _scales(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    sizes, largest = {name: _size(t) for name, t in tensors.items()}, dict[str, float]()
    for name, value in sizes.items():
        key = name.partition("|")[2]
        largest[key] = max(largest.get(key, 0.0), value)
    return {name: max(value, 1e-2 * largest[name.partition("|")[2]], 1e-300) for name, value in sizes.items()}


def _wide(t: Tensor) -> Tensor:
    return t.detach().to(torch.complex128 if t.is_complex() else torch.float64)


def _size(t: Tensor, trim: bool = False) -> float:
    """The root mean square of the elements. With `trim`, the largest hundredth of those that are not zero counts as zero, and one more;
    a tensor of one element keeps it."""
    flat = _wide(t).abs().flatten()
    if trim and flat.numel() > 1 and bool(flat.isfinite().all()):
        flat = flat.index_fill(0, flat.topk(1 + int(flat.count_nonzero()) // 100).indices, 0.0)
    return float(torch.linalg.vector_norm(flat)) / max(flat.numel(), 1) ** 0.5
