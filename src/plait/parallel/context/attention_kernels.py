"""torch's own kernels for the attention of a block, if they return the log-sum-exp.

On a CPU this is torch's flash kernel. On a GPU, torch chooses among cuDNN's kernel, flash attention and the memory-efficient
kernel. The last is the only one with a mask, or for float32. No kernel stores the weights. Cases without a kernel (float64,
dropout of weights) are computed in `parallel/context/ring.py`.

A kernel is two functions. Forward returns (output, lse) of a block of keys; a query that attends to no key may have any finite
lse. Backward takes output and lse over all keys. It returns the gradients of queries, keys, values and (if it is learned) mask.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from plait.tensors.torch_private import attention_choice, cudnn, flash, flash_cpu, memory_efficient

KERNEL_ALIGNMENT = 8
"""Widths and mask rows of the GPU kernels are multiples of this. torch's own attention pads to the same."""
LSE_MULTIPLE = 32
"""The memory-efficient kernel rounds its log-sum-exps up to a multiple of this number of queries; the padding is infinite."""
MASKED_SCORE = float("-inf")


class AttentionInputs(NamedTuple):
    """The inputs of attention: q [batch, heads, rows, width]; k and v [batch, key heads, columns, width]."""

    q: Tensor
    k: Tensor
    v: Tensor


class BlockOutput(NamedTuple):
    """Attention over some of the keys, in the kernel's format or in the format of sums."""

    out: Tensor
    """[batch, heads, rows, width]."""
    lse: Tensor
    """[batch, heads, rows]: the log-sum-exp of a query's scores; minus infinity if it attends to no key."""


Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Gradients of queries, keys, values and a learned mask."""


@dataclass(frozen=True)
class Scores:
    """How the products of queries and keys become weights."""

    scale: float
    causal: bool = False
    """Query i attends to keys 0 … i."""
    mask: Tensor | None = None
    """[batch or 1, heads or 1, rows or 1, columns]: true where a key is visible, or values to add to the scores."""
    kept: Tensor | None = None
    """[batch, heads, rows, columns]: the factors by which dropout multiplies the weights."""
    learned: bool = False
    """The mask needs a gradient."""

    def select(self, rows: slice, columns: slice, causal: bool) -> "Scores":
        """Select the scores of some rows and columns."""
        return replace(self, causal=causal, mask=slice_mask(self.mask, rows, columns), kept=slice_mask(self.kept, rows, columns))


def slice_mask(t: Tensor | None, rows: slice, columns: slice) -> Tensor | None:
    """Select rows and columns of a mask; a dim of size 1 applies to all."""
    if t is None:
        return None
    t = t[..., rows, :] if t.shape[-2] > 1 else t
    return t[..., columns] if t.shape[-1] > 1 else t


@dataclass(frozen=True)
class Kernel:
    """One of torch's kernels: `forward(q, k, v, scores)` and `backward(grad, qkv, output, lse, scores)`."""

    forward: Callable[[Tensor, Tensor, Tensor, Scores], BlockOutput]
    backward: Callable[[Tensor, AttentionInputs, Tensor, Tensor, Scores], Gradients]


def choose_kernel(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Kernel | None:
    """Choose the kernel for this block of keys; None if torch has no suitable one."""
    same, any_there = q.dtype == k.dtype == v.dtype, min(q.numel(), k.numel()) > 0
    if scores.kept is not None or not (same and any_there):
        return None
    if q.device.type == "cpu":
        return CPU if v.shape[-1] == q.shape[-1] and not scores.learned else None
    return _choose_cuda_kernel(q, k, v, scores) if q.device.type == "cuda" else None


def _choose_cuda_kernel(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Kernel | None:
    """Choose torch's kernel for training on this GPU, by the switches of `torch.nn.attention`."""
    mask, grouped = to_additive_mask(scores.mask, q, k), k.shape[1] != q.shape[1]
    found = _query_backend(q, k, v, mask, scores)
    if (
        grouped and found == SDPBackend.MATH
    ):  # some kernels need as many key heads as query heads: torch repeats them, as `expand_kv_heads` does
        found = _query_backend(q, k[:, :1].expand(-1, q.shape[1], -1, -1), v[:, :1].expand(-1, q.shape[1], -1, -1), mask, scores)
        found = found if found == SDPBackend.EFFICIENT_ATTENTION else SDPBackend.MATH
    if mask is not None:  # cuDNN does not document the output of a query that attends to no key
        if found == SDPBackend.CUDNN_ATTENTION:
            given = torch.backends.cuda.SDPAParams(q, k, v, mask, 0.0, scores.causal, grouped)
            found = SDPBackend.EFFICIENT_ATTENTION if torch.backends.cuda.can_use_efficient_attention(given) else found
        return EFFICIENT if found == SDPBackend.EFFICIENT_ATTENTION else None
    return {
        SDPBackend.FLASH_ATTENTION: FLASH,
        SDPBackend.EFFICIENT_ATTENTION: EFFICIENT,
        SDPBackend.CUDNN_ATTENTION: CUDNN,
    }.get(found)


def _query_backend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> SDPBackend:
    with torch.enable_grad():  # some kernels have no backward on some devices, which torch checks only if gradients are needed
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        grouped = k.shape[1] != q.shape[1]
        number = attention_choice(q, k, v, mask, 0.0, scores.causal, scale=scores.scale, enable_gqa=grouped)
    return SDPBackend(number)  # pyrefly: ignore[bad-argument-count]  (torch's stub has no constructor)


def to_additive_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Convert a mask to values to add to the scores, with full size in its last two dims."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, MASKED_SCORE)
    return mask.to(q.dtype).expand(*mask.shape[:-2], q.shape[2], k.shape[2])


def expand_kv_heads(t: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values for every head of the queries."""
    return t if t.shape[1] == q.shape[1] else t.repeat_interleave(q.shape[1] // t.shape[1], 1)


def sum_kv_gradients(grad: Tensor, heads: int) -> Tensor:
    """Sum the gradients of all heads that use the same key head."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


# — CPU —


def _forward_cpu(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> BlockOutput:
    out, lse = flash_cpu[0](q, k, v, 0.0, scores.causal, attn_mask=to_additive_mask(scores.mask, q, k), scale=scores.scale)
    return BlockOutput(out, lse)


def _backward_cpu(grad: Tensor, qkv: AttentionInputs, out: Tensor, lse: Tensor, scores: Scores) -> Gradients:
    mask, known = to_additive_mask(scores.mask, *qkv[:2]), (out, lse)
    return *flash_cpu[1](grad, *qkv, *known, 0.0, scores.causal, attn_mask=mask, scale=scores.scale), None


CPU = Kernel(_forward_cpu, _backward_cpu)


# — flash attention —


def _pad_width(t: Tensor) -> Tensor:
    """Pad to a width that the kernel supports: zeros add nothing to a product."""
    return t if t.shape[-1] % KERNEL_ALIGNMENT == 0 else F.pad(t, (0, -t.shape[-1] % KERNEL_ALIGNMENT))


def _forward_flash(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> BlockOutput:
    out, lse, *_ = flash[0](_pad_width(q), _pad_width(k), _pad_width(v), 0.0, scores.causal, False, scale=scores.scale)
    return BlockOutput(out[..., : v.shape[-1]], lse)


def _backward_flash(grad: Tensor, qkv: AttentionInputs, out: Tensor, lse: Tensor, scores: Scores) -> Gradients:
    q, k, v = qkv
    drawn = (lse.new_empty(2, dtype=torch.uint64), lse.new_empty((), dtype=torch.uint64))  # no dropout
    found = flash[1](
        _pad_width(grad).contiguous(), _pad_width(q), _pad_width(k), _pad_width(v), _pad_width(out).contiguous(), lse.contiguous(), None, None,
        q.shape[2], k.shape[2], 0.0, scores.causal, *drawn, scale=scores.scale,
    )  # fmt: skip
    dq, dk, dv = (g[..., : t.shape[-1]] for g, t in zip(found, qkv))
    return dq, dk, dv, None


FLASH = Kernel(_forward_flash, _backward_flash)


# — memory-efficient attention —


def _align_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Convert the mask for the kernel: one for every head, with each row starting at a multiple of `KERNEL_ALIGNMENT` values."""
    mask = to_additive_mask(mask, q, k)
    if mask is None:
        return None
    if mask.stride(-1) != 1 or any(stride % KERNEL_ALIGNMENT for stride in mask.stride()[:-1]):
        room = mask.new_empty(*mask.shape[:-1], mask.shape[-1] + -mask.shape[-1] % KERNEL_ALIGNMENT)
        mask = room[..., : mask.shape[-1]].copy_(mask)
    return mask.expand(*q.shape[:2], *mask.shape[2:])


def _forward_efficient(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> BlockOutput:
    mask = _align_mask(scores.mask, q, k)
    found = memory_efficient[0](q, expand_kv_heads(k, q), expand_kv_heads(v, q), mask, True, 0.0, scores.causal, scale=scores.scale)
    return BlockOutput(found[0], found[1][..., : q.shape[2]])


def _backward_efficient(grad: Tensor, qkv: AttentionInputs, out: Tensor, lse: Tensor, scores: Scores) -> Gradients:
    q, k, v = qkv
    if torch.version.hip is None:
        lse = F.pad(lse, (0, -lse.shape[-1] % LSE_MULTIPLE), value=float("inf"))
    drawn = [lse.new_empty((), dtype=torch.int64) for _ in range(2)]  # no dropout
    mask, wanted = _align_mask(scores.mask, q, k), [True, True, True, scores.learned]
    dq, dk, dv, dmask = memory_efficient[1](
        grad.contiguous(), q, expand_kv_heads(k, q), expand_kv_heads(v, q), mask, out.contiguous(), lse.contiguous(), *drawn, 0.0, wanted,
        scores.causal, scale=scores.scale,
    )  # fmt: skip
    asked = scores.mask if scores.learned else None
    return dq, sum_kv_gradients(dk, k.shape[1]), sum_kv_gradients(dv, k.shape[1]), None if asked is None else dmask.sum_to_size(asked.shape)


EFFICIENT = Kernel(_forward_efficient, _backward_efficient)


# — cuDNN —


def _forward_cudnn(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> BlockOutput:
    out, lse, *_ = cudnn[0](q, k, v, None, True, 0.0, scores.causal, False, scale=scores.scale)
    return BlockOutput(out, lse.reshape(q.shape[:-1]))


@cache
def _count_lse_dims(device: torch.device) -> int:
    """Count the dims of the log-sum-exps of cuDNN's kernel. Some torch releases add a last dim of 1, and backward needs the dims
    that forward returns."""
    tried = torch.zeros(1, 1, 64, 64, dtype=torch.float16, device=device)
    return cudnn[0](tried, tried, tried, None, True)[1].dim()


def _backward_cudnn(grad: Tensor, qkv: AttentionInputs, out: Tensor, lse: Tensor, scores: Scores) -> Gradients:
    q, k, _ = qkv
    lse = lse.contiguous().reshape(*lse.shape, *(1,) * (_count_lse_dims(q.device) - lse.dim()))
    drawn = [lse.new_empty((), dtype=torch.int64) for _ in range(2)]  # no dropout
    found = cudnn[1](
        grad.contiguous(), *qkv, out.contiguous(), lse, *drawn, None, None, None, q.shape[2], k.shape[2], 0.0, scores.causal,
        scale=scores.scale,
    )  # fmt: skip
    return *found, None


CUDNN = Kernel(_forward_cudnn, _backward_cudnn)
