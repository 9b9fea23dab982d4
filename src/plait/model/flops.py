"""Floating-point operations of one operator: those of products of matrices and convolutions, the rest counts nothing.

The formulas are torch's own (`torch.utils.flop_counter`), and a few for operators it has none for. A multiplication
and an addition are two operations.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """What one call of an operator such as `torch.ops.aten.mm.default` computes."""
    packet = func.overloadpacket
    formula = OURS.get(packet) or flop_registry.get(packet)
    return 0 if formula is None else formula(*args, **kwargs, out_val=result)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Two products: query with key, and the weights with value. [b, h, s, d]; a causal mask is not deducted."""
    b, h, s, d = query.shape
    return 2 * b * h * s * key.shape[2] * (d + value.shape[3])


def _recurrent(input: Tensor, input_weight: Tensor, hidden_weight: Tensor, *_: Any, **__: Any) -> int:
    """One direction of one layer: input [time, batch, width] through both matrices at every step."""
    return 2 * input.shape[0] * input.shape[1] * (input_weight.numel() + hidden_weight.numel())


def _recurrent_cuda(input: Tensor, weights: list[Tensor], *_: Any, **__: Any) -> int:
    """All layers and directions: the matrices among the weights, at every step."""
    return 2 * input.shape[0] * input.shape[1] * sum(w.numel() for w in weights if w.dim() == 2)


def _grouped(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Rows of `left` [rows, k] are dealt out over matrices [groups, k, n]: each row meets one of them."""
    return 2 * left.numel() * right.shape[-1]


def _vector(matrix: Tensor, vector: Tensor, *_: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _ours() -> Mapping[Any, Callable[..., int]]:
    known = {
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "mkldnn_rnn_layer": _recurrent,
        "_cudnn_rnn": _recurrent_cuda,
        "_grouped_mm": _grouped,
        "mv": _vector,
    }
    return {getattr(torch.ops.aten, name): f for name, f in known.items() if hasattr(torch.ops.aten, name)}


OURS = _ours()
