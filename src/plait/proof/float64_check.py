"""Check that float64 computes the job's own model. Otherwise, equality in float64 proves nothing about the real training.

Before the comparison with the split run, one step is computed twice on one device, from the same weights, samples and random numbers: once
in the job's own number formats and once in float64, as in proofs. Unit outputs, losses and gradients may differ by rounding only.

The effect of rounding is measured: the step in the job's own formats is repeated with every weight and input perturbed by one rounding of
the coarsest format in the step. A value differs if its error exceeds `FACTOR` times the largest such change, and a floor for long sums. A
discrete choice that flips by rounding (the sign before a ReLU, the larger of two equal values) can look like this in one step. So a value
is reported only if it differs in each of `TRIALS` steps from different weights. The first unit in forward order is reported.
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
from plait.engine.step_log import use_recorder
from plait.proof import reference
from plait.proof.probes import as_double
from plait.randomness.keyed import Randomness, seed_host
from plait.tensors import opaque_code
from plait.tensors.float64 import Float64Mode
from plait.tensors.module_state import choose_dtype, convert_module, restore_loss_state
from plait.tensors.torch_private import TorchDispatchMode, dataclass_leaves, tree_map_only

FACTOR = 64.0
"""A value differs if its error exceeds the largest change by rounding times this factor,"""
FLOOR, ROUNDINGS = 1e-4, 16.0
"""and this fraction of its size, and this many roundings: the bounds for long sums."""
SMALL = 1e-3
"""Errors are relative to a value's size, or to this fraction of the largest value of its kind."""
TRIALS = 4


@dataclass(frozen=True)
class StepValue:
    """A value that a step computes."""

    unit: str
    kind: str
    """`output`, `loss` or `gradient`."""
    tensor: Tensor


@dataclass(frozen=True)
class ValueDifference:
    """The first value that differs in float64."""

    value: StepValue
    relative: float
    """Relative to the size of the value."""
    limit: float


@dataclass
class _Step:
    """One device's step on the first batch of the job, with given weights and formats."""

    one: reference.OneDevice
    pair: Pair
    samples: int
    rounding: float = 0.0
    """Of the coarsest format so far."""
    values: list[StepValue] = field(default_factory=list)

    def run(self, wide: bool, trial: int) -> list[StepValue]:
        """Run a step in float64 (`wide`) or in the job's own formats, and return its values. Trial 0 starts from the job's initial weights,
        later trials from weights and inputs perturbed by one rounding."""
        one, generator, self.values = self.one, torch.Generator().manual_seed(trial), []
        model = reference.make_reference_model(one.job, None, one.device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(self._perturb(parameter, trial, generator))
        inputs = tree_map_only(Tensor, lambda t: self._perturb(t, trial, generator), self.pair[0])
        if wide:
            convert_module(model, None, torch.float64)
        pair = tree_map_only(
            Tensor, lambda t: t.to(choose_dtype(t, torch.float64 if wide else None)), (inputs, self.pair[1])
        )
        keyed = Randomness(one.job.seed, one.keyed.places, one.keyed.is_needed).install(model)
        for phase in one.job.phases or (None,):
            with self._record_units(model), use_recorder(lambda name, value: None), opaque_code.hide_higher_order():
                with Float64Mode() if wide else _CoarsestFormat(self), keyed.forward_pass(0, 0, self.samples, turn=phase.name if phase else ""):
                    loss = self._compute_loss(model, pair, phase)
                seed_host(trial, "backward")  # backward draws are not keyed: they count as rounding between trials
                with keyed.replay():
                    loss.backward()
            self.values.append(StepValue("", "loss", loss.detach()))
        gradients = reference.copy_gradients(model)
        self.values += [StepValue(name, "gradient", g) for name, g in gradients.items()]
        return self.values

    def _compute_loss(self, model: nn.Module, pair: Pair, phase: Phase | None) -> Tensor:
        if phase is None:
            outputs = reference.call_model(model, pair[0])
            with restore_loss_state(self.one.job.loss, model):
                return self.one.job.loss(outputs, pair[1])
        model.turn = phase.name  # type: ignore[assignment]
        return phase.loss(reference.call_model(model, pair[0])[phase.name], pair[1])

    def _perturb(self, t: Tensor, trial: int, generator: torch.Generator) -> Tensor:
        """Move every element by up to one rounding. In trial 0, and for tensors that do not round, return the tensor unchanged."""
        if not trial or not (t.is_floating_point() or t.is_complex()):
            return t.detach()
        noise = torch.rand(t.shape, generator=generator, dtype=torch.float64).mul_(2).sub_(1).to(t.device)
        rounding = max(self.rounding, torch.finfo(t.dtype).eps)
        return (t.detach().to(choose_dtype(t, torch.float64)) * (1.0 + rounding * noise)).to(t.dtype)

    @contextmanager
    def _record_units(self, model: nn.Module) -> Iterator[None]:
        """Record the output of every unit call inside this context."""

        def make_hook(name: str) -> Any:
            def hook(module: nn.Module, args: object, output: object) -> None:
                found = (leaf for leaf in dataclass_leaves(output) if isinstance(leaf, Tensor) and leaf.layout is torch.strided)
                self.values += [StepValue(name, "output", leaf.detach().clone()) for leaf in found]

            return torch.compiler.disable(hook)

        units = {unit.name: model.get_submodule(unit.name) for unit in self.one.units}
        handles = [module.register_forward_hook(make_hook(name)) for name, module in units.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _CoarsestFormat(TorchDispatchMode):
    """Records the coarsest floating format that operators return."""

    def __init__(self, step: _Step):
        super().__init__()
        self.step = step

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()):
                self.step.rounding = max(self.step.rounding, torch.finfo(t.dtype).eps)
        return result


def find_first_difference(one: reference.OneDevice) -> ValueDifference | None:
    """Return the first value of the job's first step that differs in float64, or None. `one`: the job in float64."""
    data = one.job.data()
    _, ids, samples = next(reference.iterate_samples(one.job, data))
    step = _Step(one, reference.collate_to_device(data, samples, None, one.device), len(ids))
    own, wide = step.run(False, 0), step.run(True, 0)
    suspects, movement = _measure_differences(own, wide), [0.0] * len(own)
    for trial in range(1, TRIALS):
        moved = step.run(False, trial)
        movement = [max(pair) for pair in zip(movement, _measure_differences(own, moved))]
        floor = max(FLOOR, ROUNDINGS * step.rounding)
        limits = [max(FACTOR * by, floor) for by in movement]
        found = [k for k, off in enumerate(suspects) if not off <= limits[k]]
        if not found:
            return None
        if trial == TRIALS - 1:
            return ValueDifference(own[found[0]], suspects[found[0]], limits[found[0]])
        suspects = [min(pair) for pair in zip(suspects, _measure_differences(moved, step.run(True, trial)))]
    return None


def _measure_differences(values: list[StepValue], others: list[StepValue]) -> list[float]:
    """Relative error of each value of `others`, as root mean square. Infinite if a value is missing."""
    largest, found = dict[str, float](), list[float]()
    for value in values:
        largest[value.kind] = max(largest.get(value.kind, 0.0), _compute_rms(as_double(value.tensor)))
    for k, value in enumerate(values):
        other = others[k] if k < len(others) else None
        if other is None or (other.unit, other.tensor.shape) != (value.unit, value.tensor.shape):
            found.append(math.inf)
            continue
        a, b = as_double(value.tensor), as_double(other.tensor)
        alike = (a == b) | (a.isnan() & b.isnan())
        difference = torch.where(alike, 0.0, a - b)
        scale = max(_compute_rms(a), SMALL * largest[value.kind], 1e-300)
        found.append(_compute_rms(difference) / scale if bool(difference.isfinite().all()) else math.inf)
    return found


def _compute_rms(t: Tensor) -> float:
    """Root mean square, with non-finite elements as zero."""
    return float(torch.linalg.vector_norm(t.nan_to_num(0.0, 0.0, 0.0))) / max(t.numel(), 1) ** 0.5


def check_float64(one: reference.OneDevice) -> dict[str, Any]:
    """Raise V030 if float64 computes another model than the job's own formats. Returns no facts for the reference."""
    found = find_first_difference(one)
    if found is None:
        return {}
    name, kind = found.value.unit, found.value.kind
    what = {
        "output": f"the output of {name or 'the model'} is",
        "loss": "the outputs of all units agree, but the loss is",
        "gradient": f"the forward pass agrees, but the gradient of {name} is",
    }[kind]
    why = f"{what} off by a relative {found.relative:.1e} between float64 and the job's own formats; rounding explains at most {found.limit:.1e}"
    fix = (
        "remove code that depends on the number format: tests of x.dtype, torch.finfo, extensions that read memory as float32",
        "draw random numbers with torch's functions: your own generator draws other values in float64",
    )
    where = f"{name} ({type(one.model.get_submodule(name)).__name__})" if kind == "output" else "Job(loss=…, model=…)"
    problem = Problem("V030", "no proof: in float64 the job computes another model", why=why, where=where, fix=fix)
    raise PlaitError(problem, FAILED)
