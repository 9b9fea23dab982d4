"""Values that a model keeps in attributes from call to call, and whether its outputs depend on how often it was called.

One device calls the model once a step, a plan with micro-batches once for each of them. A value that counts calls, and that outputs
depend on, therefore has another value under the plan: perhaps long after the steps that a check or a proof compares. So counts are
set to what they will be at later steps, and outputs with the count of one device are compared with those of the plan.
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
from plait.tensors.modules import state_kept
from plait.tensors.torch_private import FakeTensor

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
LEAVES = (int, float, str, Tensor, np.ndarray, *GENERATORS)
STRUCTURE = frozenset({*vars(nn.Module()), "forward"})
"""Attributes of every module that are not its own values."""
LEVELS = 4
"""How deep containers are followed."""
STEPS = (*range(1, 17), *(2**k for k in range(5, 24)))
"""Steps of a run whose counts are tried."""


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

    def put(self, number: float) -> None:
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


def values(model: nn.Module) -> Values:
    """What the model's modules hold in plain attributes now, by the names of module and attribute."""
    found, seen = Values(), set[int]()
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in STRUCTURE:
                found |= _inside(f"{name or type(module).__name__}.{key}", (vars(module), key, value), seen)
    return found


def _inside(name: str, place: Place, seen: set[int], level: int = 0) -> Values:
    holder, key, value = place
    if isinstance(value, LEAVES):
        copied = value.detach().clone() if isinstance(value, Tensor) else value
        return {name: KeptValue(holder, key, copied, _digest(copied))}
    if level == LEVELS or id(value) in seen or isinstance(value, nn.Module):
        return {}
    seen.add(id(value))
    found = Values()
    for word, inner in _items(value):
        found |= _inside(f"{name}{word}", inner, seen, level + 1)
    return found


def _items(value: object) -> Iterator[tuple[str, Place]]:
    """(end of the name, its place) of what a container, or an object of a user's class, holds."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", (value, key, each)) for key, each in list(value.items()))
    elif isinstance(value, (list, tuple, deque)):
        holder = value if isinstance(value, list) else None
        yield from ((f"[{i}]", (holder, i, each)) for i, each in enumerate(value))
    elif hasattr(value, "__dict__") and not callable(value) and is_user_class(type(value)):
        yield from ((f".{key}", (vars(value), key, each)) for key, each in list(vars(value).items()))


def _digest(value: object) -> object:
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
class Changed:
    """Names of values, and of random generators, that a call of the model changed."""

    values: tuple[str, ...] = ()
    generators: tuple[str, ...] = ()

    @staticmethod
    def of(before: Values, after: Values) -> "Changed":
        found = [n for n, kept in after.items() if n not in before or before[n].digest != kept.digest]
        drawn = tuple(n for n in found if isinstance(after[n].value, GENERATORS))
        return Changed(tuple(n for n in found if n not in drawn), drawn)


@dataclass(frozen=True)
class LateDifference:
    """Outputs depend on values that count calls: first seen at a step of the run."""

    names: tuple[str, ...]
    step: int
    relative: float
    calls: int
    """Of the model in a step."""

    @property
    def why(self) -> str:
        names = ", ".join(self.names[:3]) + (f" and {len(self.names) - 3} more" if len(self.names) > 3 else "")
        each = f"this plan calls the model {self.calls} times a step, one device calls it once"
        return f"{each}: after step {self.step} outputs differ by {self.relative:.1e} of their size, because of {names}"


def late_difference(
    model: nn.Module, run: Callable[[], list[Tensor]], calls: int, steps: int
) -> LateDifference | None:
    """Where outputs first differ when the model is called `calls` times a step instead of once. `run`: a forward pass."""
    if calls == 1:
        return None
    with state_kept(model.modules()), torch.no_grad():
        rows = [values(model)]
        for _ in range(3):
            run()
            rows.append(values(model))
        counts = _counts(rows)
        if not counts:
            return None
        at = lambda passed: _after(counts, passed, run)  # noqa: E731
        if _relative(at(1), at(1)) > TOLERANCE:
            return None  # something else changes from call to call, too
        for step in (step for step in STEPS if step < steps):
            far = _relative(at(step), at(step * calls))
            if far > TOLERANCE:
                return LateDifference(tuple(counts), step, far, calls)
    return None


def _after(counts: dict[str, "Count"], passed: int, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """The outputs of a call before which the model was called so often."""
    for count in counts.values():
        count.kept.put(count.first + passed * count.each)
    return run()


@dataclass(frozen=True)
class Count:
    """A number to which every call adds the same."""

    kept: KeptValue
    first: float
    each: float


def _counts(rows: list[Values]) -> dict[str, Count]:
    """The counts among the values that were there before and after each of some calls."""
    found = dict[str, Count]()
    for name, kept in rows[-1].items():
        numbers = [row[name].number if name in row else None for row in rows]
        if None in numbers or kept.holder is None:
            continue
        a, b, c, d = (float(number or 0.0) for number in numbers)
        if b != a and abs((c - b) - (b - a)) + abs((d - c) - (c - b)) <= 1e-12 * (abs(d) + abs(a)):
            found[name] = Count(kept, a, b - a)
    return found


def _relative(expected: list[Tensor], actual: list[Tensor]) -> float:
    """The largest difference of two lists of outputs, relative to their size."""
    worst = 0.0
    for a, b in zip(expected, actual):
        if a.shape == b.shape and a.numel() and a.is_floating_point():
            far = float((a - b).abs().max()) / max(float(a.abs().max()), 1e-12)
            worst = max(worst, far) if far == far else worst
    return worst
