"""The norm that gradients are clipped by; and whether numbers are finite: of weights, of an optimizer's state, of what a checkpoint holds.

A trained parameter and the optimizer's tensors are to be finite. Of buffers and frozen parameters a NaN alone is wrong:
a mask of minus infinity is an ordinary buffer. What the job itself starts with is as it should be.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.tensors.torch_private import FakeTensor
from plait.tensors.transfers import upload

LONGEST = 2**12
"""Numbers of a piece: up to here the norm of torch's CPU kernel is off by no more than a rounding of fp32."""


def total_norm(gradients: Iterable[Tensor], device: torch.device | None = None) -> Tensor:
    """As `torch.nn.utils.get_total_norm`, a float64 scalar on the device (None: the gradients'): nothing waits for it. Gradients may lie
    on the host (`offload=all`).

    torch 2.13 sums the squares of a tensor on a CPU one after the other: the norm is off by 1e-5 for 2^20 numbers in fp32 and by 7e-4 for
    2^24, and less for the parts that ranks have. The norms of short rows are not, and take no longer.
    """
    norm = nn.utils.get_total_norm([piece for gradient in gradients for piece in _pieces(gradient)]).double()
    return norm if device is None or norm.device.type == device.type else upload([float(norm)], device)[0]


def square_sum(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Its square."""
    return total_norm(gradients, device).square()


def clip(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """As `torch.nn.utils.clip_grad_norm_`."""
    trained = [p for p in parameters if p.grad is not None]
    nn.utils.clip_grads_with_norm_(trained, limit, total_norm(p.grad for p in trained if p.grad is not None))


def _pieces(gradient: Tensor) -> tuple[Tensor, ...]:
    """Tensors of the same norm, each short enough: the norms of rows of a long one, and the rest of it."""
    if gradient.device.type != "cpu" or gradient.numel() <= LONGEST:
        return (gradient,)
    flat = gradient.reshape(-1)
    end = flat.numel() // LONGEST * LONGEST
    rows = torch.linalg.vector_norm(flat[:end].view(-1, LONGEST), dim=1)
    return (*_pieces(rows), flat[end:])


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
    """Whether all its numbers are finite; unless `strict`, whether none is NaN. A tensor without numbers has no wrong one."""
    if tensor.is_meta or isinstance(tensor, FakeTensor) or not (tensor.is_floating_point() or tensor.is_complex()):
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
