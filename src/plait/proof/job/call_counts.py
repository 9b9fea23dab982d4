"""Values that a model keeps in attributes between calls, and outputs that depend on the number of calls.

One device calls the model once a step; a plan with micro-batches calls it once per micro-batch. A value that counts calls therefore differs
under the plan. If outputs depend on it, they may differ long after the steps that a check or a proof compares. So the counts are set to
their values at later steps, and outputs with the counts of one device are compared with those of the plan.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from plait.config.job import is_user_class
from plait.proof.probes import TOLERANCE
from plait.tensors.module_state import restore_module_state
from plait.tensors.torch_private import FakeTensor

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
LEAVES = (int, float, str, Tensor, np.ndarray, *GENERATORS)
STRUCTURE = frozenset({*vars(nn.Module()), "forward"})
"""Attributes of every module that are not values of its own."""
MAX_DEPTH = 4
"""Depth to which containers are followed."""
STEPS = (*range(1, 17), *(2**k for k in range(5, 24)))
"""Steps of a run for which counts are tried."""


@dataclass(frozen=True)
class KeptValue:
    """One value in an attribute, or in a container or object there: `holder[key]`, as it was. `holder`: None if it cannot be set."""

    holder: "Holder"
    key: object
    value: object
    digest: object
    """Equal for equal values."""

    @property
    def number(self) -> float | None:
        """The value, if it is one number."""
        if isinstance(self.value, Tensor) and self.value.numel() == 1 and self.digest != "":
            return float(self.value)
        return None if isinstance(self.value, bool) or not isinstance(self.value, (int, float)) else float(self.value)

    def set_number(self, number: float) -> None:
        """Replace the number by another of its type."""
        value: object = number
        if isinstance(self.value, Tensor):
            value = torch.full_like(self.value, number)
        elif isinstance(self.value, int):
            value = round(number)
        if self.holder is not None:
            cast(dict[object, object], self.holder)[self.key] = value


Holder = dict[Any, Any] | list[Any] | None
Place = tuple[Holder, object, object]
"""Holder, key and value."""
Values = dict[str, KeptValue]


def collect_kept_values(model: nn.Module) -> Values:
    """Collect the values in plain attributes of the model's modules, by module and attribute name."""
    found, seen = Values(), set[int]()
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in STRUCTURE:
                found |= _walk_value(f"{name or type(module).__name__}.{key}", (vars(module), key, value), seen)
    return found


def _walk_value(name: str, place: Place, seen: set[int], level: int = 0) -> Values:
    holder, key, value = place
    if isinstance(value, LEAVES):
        copied = value.detach().clone() if isinstance(value, Tensor) else value
        return {name: KeptValue(holder, key, copied, _digest_value(copied))}
    if level == MAX_DEPTH or id(value) in seen or isinstance(value, nn.Module):
        return {}
    seen.add(id(value))
    found = Values()
    for word, inner in _iterate_items(value):
        found |= _walk_value(f"{name}{word}", inner, seen, level + 1)
    return found


def _iterate_items(value: object) -> Iterator[tuple[str, Place]]:
    """(end of the name, its place) of each value in a container, or in an object of a user's class."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", (value, key, each)) for key, each in list(value.items()))
    elif isinstance(value, (list, tuple, deque)):
        holder = value if isinstance(value, list) else None
        yield from ((f"[{i}]", (holder, i, each)) for i, each in enumerate(value))
    elif hasattr(value, "__dict__") and not callable(value) and is_user_class(type(value)):
        yield from ((f".{key}", (vars(value), key, each)) for key, each in list(vars(value).items()))


def _digest_value(value: object) -> object:
    if isinstance(value, Tensor):
        if value.is_meta or value.is_sparse or isinstance(value, FakeTensor):
            return ""
        return crc32(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, np.ndarray):
        return crc32(value.tobytes())
    if isinstance(value, torch.Generator):
        return crc32(value.get_state().numpy().tobytes())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    return value.getstate() if isinstance(value, random.Random) else value


@dataclass(frozen=True)
class ChangedValues:
    """Names of values and of random generators that a call of the model changed."""

    values: tuple[str, ...] = ()
    generators: tuple[str, ...] = ()

    @staticmethod
    def from_values(before: Values, after: Values) -> "ChangedValues":
        found = [n for n, kept in after.items() if n not in before or before[n].digest != kept.digest]
        drawn = tuple(n for n in found if isinstance(after[n].value, GENERATORS))
        return ChangedValues(tuple(n for n in found if n not in drawn), drawn)


@dataclass(frozen=True)
class LateDifference:
    """Outputs that depend on counted calls: the first step at which they differ."""

    names: tuple[str, ...]
    step: int
    relative: float
    calls: int
    """Calls of the model in a step."""

    @property
    def description(self) -> str:
        names = ", ".join(self.names[:3]) + (f" and {len(self.names) - 3} more" if len(self.names) > 3 else "")
        each = f"this plan calls the model {self.calls} times per step, one device calls it once"
        return f"{each}: after step {self.step}, outputs differ by a relative {self.relative:.1e} because of {names}"


def find_late_difference(
    model: nn.Module, run: Callable[[], list[Tensor]], calls: int, steps: int
) -> LateDifference | None:
    """Find the first step at which outputs differ if the model is called `calls` times a step instead of once. `run`: a forward pass."""
    if calls == 1:
        return None
    with restore_module_state(model.modules()), torch.no_grad():
        rows = [collect_kept_values(model)]
        for _ in range(3):
            run()
            rows.append(collect_kept_values(model))
        counts = _find_counts(rows)
        if not counts:
            return None
        at = lambda passed: _run_with_counts(counts, passed, run)  # noqa: E731
        if _max_output_diff(at(1), at(1)) > TOLERANCE:
            return None  # other state also changes between calls
        for step in (step for step in STEPS if step < steps):
            far = _max_output_diff(at(step), at(step * calls))
            if far > TOLERANCE:
                return LateDifference(tuple(counts), step, far, calls)
    return None


def _run_with_counts(counts: dict[str, "CallCount"], passed: int, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Outputs of a call after `passed` earlier calls."""
    for count in counts.values():
        count.kept.set_number(count.first + passed * count.each)
    return run()


@dataclass(frozen=True)
class CallCount:
    """A number to which every call adds the same amount."""

    kept: KeptValue
    first: float
    each: float


def _find_counts(rows: list[Values]) -> dict[str, CallCount]:
    """Find counts among values recorded before and after each of some calls."""
    found = dict[str, CallCount]()
    for name, kept in rows[-1].items():
        numbers = [row[name].number if name in row else None for row in rows]
        if None in numbers or kept.holder is None:
            continue
        a, b, c, d = (float(number or 0.0) for number in numbers)
        if b != a and abs((c - b) - (b - a)) + abs((d - c) - (c - b)) <= 1e-12 * (abs(d) + abs(a)):
            found[name] = CallCount(kept, a, b - a)
    return found


def _max_output_diff(expected: list[Tensor], actual: list[Tensor]) -> float:
    """Largest difference of two lists of outputs, relative to their size."""
    worst = 0.0
    for a, b in zip(expected, actual):
        if a.shape == b.shape and a.numel() and a.is_floating_point():
            far = float((a - b).abs().max()) / max(float(a.abs().max()), 1e-12)
            worst = max(worst, far) if far == far else worst
    return worst
