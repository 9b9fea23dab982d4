"""Whether float64 computes the job's own model: without that, equality in float64 proves nothing about what trains.

Before the split run is compared, one step is computed twice on one device from the same weights and samples, with the same
random numbers: as the job is, in its own number formats, and as proofs are, in float64. What each unit returns, the losses
and the gradients may differ by rounding only.

How much rounding explains is measured: the step in the job's own formats is repeated with every weight and input moved by
one rounding of the coarsest format that occurs in the step. A value differs if it is off by more than `FACTOR` times the
largest movement, and by more than a floor for long sums. A choice that flips by rounding (the sign before a ReLU, the
largest of two equal values) may look like that in one step, so a value is named only if it differs in each of `TRIALS`
steps from different weights. The first unit in the order of the forward pass is named.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from plait.config.errors import FAILED, PlaitError, Problem
from plait.config.phases import Phase
from plait.data.batch_rows import Pair
from plait.engine.logged import recording
from plait.proof import reference
from plait.proof.probes import as_double
from plait.randomness.keyed import Randomness, seed_host
from plait.tensors import opaque_code
from plait.tensors.float64 import Wide
from plait.tensors.modules import convert, format_in, loss_kept
from plait.tensors.torch_private import TorchDispatchMode, leaves, tree_map_only

FACTOR = 64.0
"""A value differs if it is off by more than the largest movement times this."""
FLOOR, ROUNDINGS = 1e-4, 16.0
"""And by more than this share of its size, and by more than this many roundings: what long sums may be off by."""
SMALL = 1e-3
"""Values are compared relative to their size, or to this share of the largest of their kind."""
TRIALS = 4


@dataclass(frozen=True)
class Value:
    """Something that a step computes."""

    unit: str
    kind: str
    """`output`, `loss` or `gradient`."""
    tensor: Tensor


@dataclass(frozen=True)
class Difference:
    """The first value that float64 computes otherwise."""

    value: Value
    off: float
    """Relative to the size of the value."""
    limit: float


@dataclass
class _Step:
    """One device's step on the first batch of the job, from given weights in given formats."""

    one: reference.OneDevice
    pair: Pair
    samples: int
    rounding: float = 0.0
    """Of the coarsest format that occurred so far."""
    values: list[Value] = field(default_factory=list)

    def run(self, wide: bool, trial: int) -> list[Value]:
        """What a step computes, in float64 (`wide`) or in the job's own formats. Trial 0: from the job's initial weights; others:
        from weights and inputs that are moved by a rounding."""
        one, generator, self.values = self.one, torch.Generator().manual_seed(trial), []
        model = reference.make_model(one.job, None, one.device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(self._moved(parameter, trial, generator))
        inputs = tree_map_only(Tensor, lambda t: self._moved(t, trial, generator), self.pair[0])
        if wide:
            convert(model, None, torch.float64)
        pair = tree_map_only(
            Tensor, lambda t: t.to(format_in(t, torch.float64 if wide else None)), (inputs, self.pair[1])
        )
        keyed = Randomness(one.job.seed, one.keyed.places, one.keyed.needed).install(model)
        for phase in one.job.phases or (None,):
            with self._noted(model), recording(lambda name, value: None), opaque_code.opaque():
                with Wide() if wide else _Formats(self), keyed.at(0, 0, self.samples, turn=phase.name if phase else ""):
                    loss = self._loss(model, pair, phase)
                seed_host(trial, "backward")  # draws there are keyed by nothing: they count as movement between trials
                with keyed.replay():
                    loss.backward()
            self.values.append(Value("", "loss", loss.detach()))
        gradients = reference.gradients(model)
        self.values += [Value(name, "gradient", g) for name, g in gradients.items()]
        return self.values

    def _loss(self, model: nn.Module, pair: Pair, phase: Phase | None) -> Tensor:
        if phase is None:
            outputs = reference.call(model, pair[0])
            with loss_kept(self.one.job.loss, model):
                return self.one.job.loss(outputs, pair[1])
        model.turn = phase.name  # type: ignore[assignment]
        return phase.loss(reference.call(model, pair[0])[phase.name], pair[1])

    def _moved(self, t: Tensor, trial: int, generator: torch.Generator) -> Tensor:
        """The tensor with every element moved by up to one rounding; in trial 0, and if it does not round, as it is."""
        if not trial or not (t.is_floating_point() or t.is_complex()):
            return t.detach()
        noise = torch.rand(t.shape, generator=generator, dtype=torch.float64).mul_(2).sub_(1).to(t.device)
        rounding = max(self.rounding, torch.finfo(t.dtype).eps)
        return (t.detach().to(format_in(t, torch.float64)) * (1.0 + rounding * noise)).to(t.dtype)

    @contextmanager
    def _noted(self, model: nn.Module) -> Iterator[None]:
        """Inside, what each call of a unit returns is noted."""

        def note(name: str) -> Any:
            def hook(module: nn.Module, args: object, output: object) -> None:
                found = (leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.layout is torch.strided)
                self.values += [Value(name, "output", leaf.detach().clone()) for leaf in found]

            return torch.compiler.disable(hook)

        units = {unit.name: model.get_submodule(unit.name) for unit in self.one.units}
        handles = [module.register_forward_hook(note(name)) for name, module in units.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Formats(TorchDispatchMode):
    """Notes the coarsest floating format of what operators return."""

    def __init__(self, step: _Step):
        super().__init__()
        self.step = step

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()):
                self.step.rounding = max(self.step.rounding, torch.finfo(t.dtype).eps)
        return result


def first_difference(one: reference.OneDevice) -> Difference | None:
    """The first value of the job's first step that float64 computes otherwise, if there is one. `one`: the job in float64."""
    data = one.job.data()
    _, ids, samples = next(reference.samples(one.job, data))
    step = _Step(one, reference.collated(data, samples, None, one.device), len(ids))
    own, wide = step.run(False, 0), step.run(True, 0)
    suspects, movement = _off(own, wide), [0.0] * len(own)
    for trial in range(1, TRIALS):
        moved = step.run(False, trial)
        movement = [max(pair) for pair in zip(movement, _off(own, moved))]
        floor = max(FLOOR, ROUNDINGS * step.rounding)
        limits = [max(FACTOR * by, floor) for by in movement]
        found = [k for k, off in enumerate(suspects) if not off <= limits[k]]
        if not found:
            return None
        if trial == TRIALS - 1:
            return Difference(own[found[0]], suspects[found[0]], limits[found[0]])
        suspects = [min(pair) for pair in zip(suspects, _off(moved, step.run(True, trial)))]
    return None


def _off(values: list[Value], others: list[Value]) -> list[float]:
    """How far each of the other values is off, relative to its size: root mean squares. Infinite where a value is missing."""
    largest, found = dict[str, float](), list[float]()
    for value in values:
        largest[value.kind] = max(largest.get(value.kind, 0.0), _size(as_double(value.tensor)))
    for k, value in enumerate(values):
        other = others[k] if k < len(others) else None
        if other is None or (other.unit, other.tensor.shape) != (value.unit, value.tensor.shape):
            found.append(math.inf)
            continue
        a, b = as_double(value.tensor), as_double(other.tensor)
        alike = (a == b) | (a.isnan() & b.isnan())
        difference = torch.where(alike, 0.0, a - b)
        scale = max(_size(a), SMALL * largest[value.kind], 1e-300)
        found.append(_size(difference) / scale if bool(difference.isfinite().all()) else math.inf)
    return found


def _size(t: Tensor) -> float:
    """The root mean square of what is finite."""
    return float(torch.linalg.vector_norm(t.nan_to_num(0.0, 0.0, 0.0))) / max(t.numel(), 1) ** 0.5


def check(one: reference.OneDevice) -> dict[str, Any]:
    """Raise V030 if float64 computes another model than the job's own formats do. Nothing is added to what the reference returns."""
    found = first_difference(one)
    if found is None:
        return {}
    name, kind = found.value.unit, found.value.kind
    what = {
        "output": f"unit {name or 'of the whole model'} returns values that are",
        "loss": "all units return the same, and the loss is",
        "gradient": f"the forward pass is the same, and the gradient of {name} is",
    }[kind]
    why = f"{what} off by {found.off:.1e} of their size between float64 and the job's own formats; rounding explains {found.limit:.1e}"
    fix = (
        "remove what goes by the number format: tests of x.dtype, torch.finfo, extensions that read memory as float32",
        "draw with torch's functions: a generator of your own draws other values in float64",
    )
    where = f"{name} ({type(one.model.get_submodule(name)).__name__})" if kind == "output" else "Job(loss=…, model=…)"
    problem = Problem("V030", "no proof: float64 computes another model", why=why, where=where, fix=fix)
    raise PlaitError(problem, FAILED)
