"""Whether numbers are finite: of weights, of an optimizer's state, of what a checkpoint holds.

A trained parameter and the optimizer's tensors are to be finite. Of buffers and frozen parameters a NaN alone is wrong:
a mask of minus infinity is an ordinary buffer. What the job itself starts with is as it should be.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """What is expected of tensors, by their names in a checkpoint."""

    trained: frozenset[str] = frozenset()
    """Parameters that are to be finite, beside the optimizer's tensors; of others a NaN alone is wrong."""
    given: frozenset[str] = frozenset()
    """Tensors that broke the rule when the job made them: nothing is expected of these."""

    @staticmethod
    def of(trained: Iterable[str], named: Iterable[tuple[str, Tensor]]) -> "Rule":
        """The rule of a model before its first step, from the names of what is trained and all its tensors."""
        names = frozenset(trained)
        return Rule(names, frozenset(Rule(names).broken(named)))

    def broken(self, named: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Names of the tensors that are not as expected."""
        with torch.no_grad():
            names = [n for n, t in named if n not in self.given and not finite(t, self._strict(n))]
        return list(dict.fromkeys(names))

    def _strict(self, name: str) -> bool:
        return name in self.trained or name.startswith("optimizer/")


def finite(tensor: Tensor, strict: bool = True) -> bool:
    """Whether all its numbers are finite; unless `strict`, whether none is NaN."""
    if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    values = values.float() if values.dtype.itemsize == 1 else values
    return bool(torch.isfinite(values).all()) if strict else not bool(torch.isnan(values).any())


def wrong_scalars(scalars: Mapping[str, Any]) -> list[str]:
    """Numbers of the optimizer that are NaN, by their names in a checkpoint."""
    values = {name: v["value"] if isinstance(v, dict) else v for name, v in scalars.items()}
    return [f"optimizer/{name}" for name, v in values.items() if isinstance(v, float) and math.isnan(v)]


def several(names: Iterable[str]) -> str:
    """The first names, and how many more there are: `0.weight, 0.bias, 2.weight and 5 more`."""
    known = list(names)
    return ", ".join(known[:3]) + (f" and {len(known) - 3} more" if len(known) > 3 else "")


def number(value: float) -> float | None:
    """The number for JSON, which knows neither NaN nor infinity: None for these."""
    return value if math.isfinite(value) else None
