"""The gradient norm for clipping, and checks for finite values in weights, optimizer state and checkpoints.

Trained parameters and the optimizer's tensors must be finite. In buffers and frozen parameters only NaN is an error, since a mask of minus
infinity is valid. Tensors that the job itself creates with such values are exempt.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.tensors.torch_private import FakeTensor
from plait.tensors.transfers import upload_row

MAX_LENGTH = 2**12
"""Elements per piece; up to here the norm of torch's CPU kernel is accurate to one rounding of fp32."""


def total_norm(gradients: Iterable[Tensor], device: torch.device | None = None) -> Tensor:
    """As `torch.nn.utils.get_total_norm`, a float64 scalar on the device (None: the gradients'), without waiting for it.

    Gradients may be on the host (`offload=all`). torch 2.13 sums the squares of a CPU tensor sequentially: the norm of 2^20 fp32 values is off
    by 1e-5, of 2^24 by 7e-4, and of shards by less. Norms of short rows are accurate and equally fast.

    """
    norm = nn.utils.get_total_norm([piece for gradient in gradients for piece in _split_long(gradient)]).double()
    return norm if device is None or norm.device.type == device.type else upload_row([float(norm)], device)[0]


def square_sum(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the square of `total_norm`."""
    return total_norm(gradients, device).square()


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """As `torch.nn.utils.clip_grad_norm_`."""
    trained = [p for p in parameters if p.grad is not None]
    nn.utils.clip_grads_with_norm_(trained, limit, total_norm(p.grad for p in trained if p.grad is not None))


def _split_long(gradient: Tensor) -> tuple[Tensor, ...]:
    """Return tensors of the same total norm: the norms of short rows of a long one, and its rest."""
    if gradient.device.type != "cpu" or gradient.numel() <= MAX_LENGTH:
        return (gradient,)
    flat = gradient.reshape(-1)
    end = flat.numel() // MAX_LENGTH * MAX_LENGTH
    rows = torch.linalg.vector_norm(flat[:end].view(-1, MAX_LENGTH), dim=1)
    return (*_split_long(rows), flat[end:])


@dataclass(frozen=True)
class FiniteRule:
    """Which tensors must be finite, by their names in a checkpoint."""

    trained: frozenset[str] = frozenset()
    """Parameters that must be finite, as must the optimizer's tensors; in others only NaN is an error."""
    exempt: frozenset[str] = frozenset()
    """Tensors that broke the rule when the job created them."""

    @staticmethod
    def from_names(trained: Iterable[str], named: Iterable[tuple[str, Tensor]]) -> "FiniteRule":
        """Return the rule of a model before its first step, from the trained names and all its tensors."""
        names = frozenset(trained)
        return FiniteRule(names, frozenset(FiniteRule(names).find_broken(named)))

    def find_broken(self, named: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Return names of the tensors that break the rule."""
        with torch.no_grad():
            names = [n for n, t in named if n not in self.exempt and not is_finite(t, self._is_strict(n))]
        return list(dict.fromkeys(names))

    def _is_strict(self, name: str) -> bool:
        return name in self.trained or name.startswith("optimizer/")


def is_finite(tensor: Tensor, strict: bool = True) -> bool:
    """Return whether all values are finite or, unless `strict`, none is NaN. True for a tensor without data."""
    if tensor.is_meta or isinstance(tensor, FakeTensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    values = values.float() if values.dtype.itemsize == 1 else values
    return bool(torch.isfinite(values).all()) if strict else not bool(torch.isnan(values).any())


def find_bad_scalars(scalars: Mapping[str, Any]) -> list[str]:
    """Return names (in a checkpoint) of the optimizer's scalars that are NaN."""
    values = {name: v["value"] if isinstance(v, dict) else v for name, v in scalars.items()}
    return [f"optimizer/{name}" for name, v in values.items() if isinstance(v, float) and math.isnan(v)]


def shorten_names(names: Iterable[str]) -> str:
    """Return the first names and the number of others: `0.weight, 0.bias, 2.weight and 5 more`."""
    known = list(names)
    return ", ".join(known[:3]) + (f" and {len(known) - 3} more" if len(known) > 3 else "")


def finite_or_none(value: float) -> float | None:
    """Return the number, or None for NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value) else None
