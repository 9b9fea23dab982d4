"""torch's own kernels for the attention of some queries over some keys, where they give the log-sum-exp too.

On a CPU this is torch's flash kernel. On a GPU torch is asked which of its kernels it would take for these tensors: cuDNN's, flash
attention or the memory-efficient one, which is the only one with a mask, or for float32. None of them keeps the weights. What none
can do (float64, weights that are dropped out) is computed in `parallel/context/ring.py`.

A kernel is two functions: forward gives (output, lse) of a block of keys, where a query that sees no key may have any finite lse;
backward takes output and lse over all keys, and gives the gradients of queries, keys, values and (if it is learned) mask.
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

ALIGNED = 8
"""What the GPU kernels want widths and the rows of a mask to be multiples of; torch's own attention pads them so too."""
LSE_ROWS = 32
"""To multiples of this many queries the memory-efficient kernel rounds its log-sum-exps up; those beyond are infinite."""
NEVER = float("-inf")


class AttentionInputs(NamedTuple):
    """What attention is computed of; q [batch, heads, rows, width], k and v [batch, key heads, columns, width]."""

    q: Tensor
    k: Tensor
    v: Tensor


class BlockOutput(NamedTuple):
    """Attention over some of the keys, as a kernel gives it or, in `blockwise.py`, in the format of `wide`."""

    out: Tensor
    """[batch, heads, rows, width]."""
    lse: Tensor
    """[batch, heads, rows]: the logarithm of the sum of the exponentials of a query's scores; minus infinity where it sees no key."""


Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Of queries, keys, values and a learned mask."""


@dataclass(frozen=True)
class Scores:
    """How products of queries and keys become weights."""

    scale: float
    causal: bool = False
    """Query i sees keys 0 … i."""
    mask: Tensor | None = None
    """[batch or 1, heads or 1, rows or 1, columns]: true where a key is seen, or numbers to be added."""
    kept: Tensor | None = None
    """[batch, heads, rows, columns]: what dropout multiplies the weights with."""
    learned: bool = False
    """The mask needs a gradient."""

    def only(self, rows: slice, columns: slice, causal: bool) -> "Scores":
        """The scores of some rows and columns."""
        return replace(self, causal=causal, mask=cut(self.mask, rows, columns), kept=cut(self.kept, rows, columns))


def cut(t: Tensor | None, rows: slice, columns: slice) -> Tensor | None:
    """Some rows and columns of a mask, which may have one for all."""
    if t is None:
        return None
    t = t[..., rows, :] if t.shape[-2] > 1 else t
    return t[..., columns] if t.shape[-1] > 1 else t


@dataclass(frozen=True)
class Kernel:
    """One of torch's kernels. `forward(q, k, v, scores)`; `backward(grad, qkv, output, lse, scores)`."""

    forward: Callable[[Tensor, Tensor, Tensor, Scores], BlockOutput]
    backward: Callable[[Tensor, AttentionInputs, Tensor, Tensor, Scores], Gradients]


def choose(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Kernel | None:
    """The kernel for this block of keys; None where torch has none that gives what is needed."""
    same, any_there = q.dtype == k.dtype == v.dtype, min(q.numel(), k.numel()) > 0
    if scores.kept is not None or not (same and any_there):
        return None
    if q.device.type == "cpu":
        return CPU if v.shape[-1] == q.shape[-1] and not scores.learned else None
    return _by_torch(q, k, v, scores) if q.device.type == "cuda" else None


def _by_torch(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Kernel | None:
    """What torch would take on this GPU, among its kernels and by the switches of `torch.nn.attention`, for training."""
    mask, grouped = added(scores.mask, q, k), k.shape[1] != q.shape[1]
    found = _asked(q, k, v, mask, scores)
    if (
        grouped and found == SDPBackend.MATH
    ):  # some take as many heads of keys as of queries alone: torch repeats them, and so does `spread`
        found = _asked(q, k[:, :1].expand(-1, q.shape[1], -1, -1), v[:, :1].expand(-1, q.shape[1], -1, -1), mask, scores)
        found = found if found == SDPBackend.EFFICIENT_ATTENTION else SDPBackend.MATH
    if mask is not None:  # how cuDNN treats a query that sees nothing is said nowhere
        if found == SDPBackend.CUDNN_ATTENTION:
            given = torch.backends.cuda.SDPAParams(q, k, v, mask, 0.0, scores.causal, grouped)
            found = SDPBackend.EFFICIENT_ATTENTION if torch.backends.cuda.can_use_efficient_attention(given) else found
        return EFFICIENT if found == SDPBackend.EFFICIENT_ATTENTION else None
    return {
        SDPBackend.FLASH_ATTENTION: FLASH,
        SDPBackend.EFFICIENT_ATTENTION: EFFICIENT,
        SDPBackend.CUDNN_ATTENTION: CUDNN,
    }.get(found)


def _asked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> SDPBackend:
    with torch.enable_grad():  # some kernels have no backward on some devices, which torch heeds where one is needed
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        grouped = k.shape[1] != q.shape[1]
        number = attention_choice(q, k, v, mask, 0.0, scores.causal, scale=scores.scale, enable_gqa=grouped)
    return SDPBackend(number)  # pyrefly: ignore[bad-argument-count]  (torch's stub has no constructor)


def added(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as numbers to be added, of full shape in its last two dims."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, NEVER)
    return mask.to(q.dtype).expand(*mask.shape[:-2], q.shape[2], k.shape[2])


def spread(t: Tensor, q: Tensor) -> Tensor:
    """Keys or values for every head of the queries."""
    return t if t.shape[1] == q.shape[1] else t.repeat_interleave(q.shape[1] // t.shape[1], 1)


def gather(grad: Tensor, heads: int) -> Tensor:
    """The sum of the gradients of all heads that share a head of keys."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


# — the CPU's —


def _cpu(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> BlockOutput:
    out, lse = flash_cpu[0](q, k, v, 0.0, scores.causal, attn_mask=added(scores.mask, q, k), scale=scores.scale)
    return BlockOutput(out, lse)


def _cpu_back(grad: Tensor, qkv: AttentionInputs, out: Tensor, lse: Tensor, scores: Scores) -> Gradients:
    mask, known = added(scores.mask, *qkv[:2]), (out, lse)
    return *flash_cpu[1](grad, *qkv, *known, 0.0, scores.causal, attn_mask=mask, scale=scores.scale), None


CPU = Kernel(_cpu, _cpu_back)


# — flash attention —


def _wide(t: Tensor) -> Tensor:
    """Of a width that the kernel takes: zeros add nothing to a product."""
    return t if t.shape[-1] % ALIGNED == 0 else F.pad(t, (0, -t.shape[-1] % ALIGNED))


def _flash(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> BlockOutput:
    out, lse, *_ = flash[0](_wide(q), _wide(k), _wide(v), 0.0, scores.causal, False, scale=scores.scale)
    return BlockOutput(out[..., : v.shape[-1]], lse)


def _flash_back(grad: Tensor, qkv: AttentionInputs, out: Tensor, lse: Tensor, scores: Scores) -> Gradients:
    q, k, v = qkv
    drawn = (lse.new_empty(2, dtype=torch.uint64), lse.new_empty((), dtype=torch.uint64))  # nothing is dropped out
    found = flash[1](
        _wide(grad).contiguous(), _wide(q), _wide(k), _wide(v), _wide(out).contiguous(), lse.contiguous(), None, None,
        q.shape[2], k.shape[2], 0.0, scores.causal, *drawn, scale=scores.scale,
    )  # fmt: skip
    dq, dk, dv = (g[..., : t.shape[-1]] for g, t in zip(found, qkv))
    return dq, dk, dv, None


FLASH = Kernel(_flash, _flash_back)


# — the memory-efficient one —


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as the kernel takes it: for every head, and each row begins at a multiple of `ALIGNED` numbers."""
    mask = added(mask, q, k)
    if mask is None:
        return None
    if mask.stride(-1) != 1 or any(stride % ALIGNED for stride in mask.stride()[:-1]):
        room = mask.new_empty(*mask.shape[:-1], mask.shape[-1] + -mask.shape[-1] % ALIGNED)
        mask = room[..., : mask.shape[-1]].copy_(mask)
    return mask.expand(*q.shape[:2], *mask.shape[2:])


def _efficient(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> BlockOutput:
    mask = _aligned(scores.mask, q, k)
    found = memory_efficient[0](q, spread(k, q), spread(v, q), mask, True, 0.0, scores.causal, scale=scores.scale)
    return BlockOutput(found[0], found[1][..., : q.shape[2]])


def _efficient_back(grad: Tensor, qkv: AttentionInputs, out: Tensor, lse: Tensor, scores: Scores) -> Gradients:
    q, k, v = qkv
    if torch.version.hip is None:
        lse = F.pad(lse, (0, -lse.shape[-1] % LSE_ROWS), value=float("inf"))
    drawn = [lse.new_empty((), dtype=torch.int64) for _ in range(2)]  # nothing is dropped out
    mask, wanted = _aligned(scores.mask, q, k), [True, True, True, scores.learned]
    dq, dk, dv, dmask = memory_efficient[1](
        grad.contiguous(), q, spread(k, q), spread(v, q), mask, out.contiguous(), lse.contiguous(), *drawn, 0.0, wanted,
        scores.causal, scale=scores.scale,
    )  # fmt: skip
    asked = scores.mask if scores.learned else None
    return dq, gather(dk, k.shape[1]), gather(dv, k.shape[1]), None if asked is None else dmask.sum_to_size(asked.shape)


EFFICIENT = Kernel(_efficient, _efficient_back)


# — cuDNN's —


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> BlockOutput:
    out, lse, *_ = cudnn[0](q, k, v, None, True, 0.0, scores.causal, False, scale=scores.scale)
    return BlockOutput(out, lse.reshape(q.shape[:-1]))


@cache
def _lse_dims(device: torch.device) -> int:
    """How many dims the log-sum-exps of cuDNN's kernel have: releases of torch differ in a last one of 1, and backward takes what
    forward gives."""
    tried = torch.zeros(1, 1, 64, 64, dtype=torch.float16, device=device)
    return cudnn[0](tried, tried, tried, None, True)[1].dim()


def _cudnn_back(grad: Tensor, qkv: AttentionInputs, out: Tensor, lse: Tensor, scores: Scores) -> Gradients:
    q, k, _ = qkv
    lse = lse.contiguous().reshape(*lse.shape, *(1,) * (_lse_dims(q.device) - lse.dim()))
    drawn = [lse.new_empty((), dtype=torch.int64) for _ in range(2)]  # nothing is dropped out
    found = cudnn[1](
        grad.contiguous(), *qkv, out.contiguous(), lse, *drawn, None, None, None, q.shape[2], k.shape[2], 0.0, scores.causal,
        scale=scores.scale,
    )  # fmt: skip
    return *found, None


CUDNN = Kernel(_cudnn, _cudnn_back)
