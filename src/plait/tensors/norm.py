"""The norm that gradients are clipped by."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

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
