"""torch's attention kernels for CUDA, on the simulated device: their inputs and outputs, computed by plain operators.

Each has the signature, the results and the rules of the real one: number formats and widths, contiguity, the length of a log-sum-exp,
equally many queries and keys in causal flash attention. A violation is an error; the real kernel might return wrong values.
With `MODE["lenient"]`, flash attention accepts float64 too, to prove the surrounding code exactly.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

CALLS = Counter[str]()
SIXTEEN = (torch.float16, torch.bfloat16)
MODE = {"lenient": False, "cudnn": False}
"""`lenient`: allow float64 in flash attention. `cudnn`: a device that prefers cuDNN."""
KEPT: list[Any] = []


class Broken(RuntimeError):
    """A kernel's rule is violated."""


def rule(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(f"attention kernel: {what}")


def wide(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype is torch.float64 else torch.float32


def scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = q.to(wide(q)) @ repeated(k, q).to(wide(q)).mT * scale
    if bias is not None:
        s = s + bias.to(s.dtype)
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf) if causal else s


def repeated(t: Tensor, q: Tensor) -> Tensor:
    return t.repeat_interleave(q.shape[1] // t.shape[1], 1)


def attended(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Return (output, log-sum-exps); a query with all keys masked has zeros and 0."""
    lse = s.logsumexp(-1)
    blind = lse == -torch.inf
    lse = lse.masked_fill(blind, 0.0)
    out = ((s - lse.unsqueeze(-1)).exp() @ repeated(v, q).to(s.dtype)).to(q.dtype)
    return out, lse


def gradients(
    grad: Tensor, qkv: tuple[Tensor, ...], out: Tensor, lse: Tensor, s: Tensor, scale: float | None
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys, values and scores. Output and log-sum-exps may include more keys than these."""
    q, k, v = qkv
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    g, p = grad.to(s.dtype), (s - lse.to(s.dtype).unsqueeze(-1)).exp()
    ds = p * (g @ repeated(v, q).to(s.dtype).mT - (g * out.to(s.dtype)).sum(-1, keepdim=True))
    heads = lambda t, like: t.unflatten(1, (like.shape[1], -1)).sum(2).to(like.dtype)  # noqa: E731
    dq = (ds @ repeated(k, q).to(s.dtype) * scale).to(q.dtype)
    return dq, heads(ds.mT @ q.to(s.dtype) * scale, k), heads(p.mT @ g, v), ds


def check(name: str, formats: tuple[torch.dtype, ...], *tensors: Tensor) -> None:
    rule(all(t.dtype == tensors[0].dtype for t in tensors), "one format")
    rule(
        tensors[0].dtype in formats or (MODE["lenient"] and tensors[0].dtype is torch.float64),
        f"{name} takes no {tensors[0].dtype}",
    )
    rule(all(t.stride(-1) == 1 for t in tensors), "numbers of the last dim one after the other")
    per = 16 // tensors[0].itemsize
    rule(all(t.storage_offset() % per == 0 for t in tensors), "begins at a multiple of 16 bytes")
    rule(
        all(stride % per == 0 for t in tensors for stride, n in zip(t.stride()[:-1], t.shape) if n > 1),
        "rows begin at multiples of 16 bytes",
    )


def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
    scale: float | None = None,
) -> Any:
    CALLS["flash"] += 1
    check("flash attention", SIXTEEN, q, k, v)
    rule(
        q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0,
        "one width, a multiple of 8, at most 256",
    )
    rule(not is_causal or q.shape[2] == k.shape[2], "causal: of as many queries as keys")
    rule(dropout_p == 0.0 and not return_debug_mask, "not here")
    out, lse = attended(q, k, v, scores(q, k, None, is_causal, scale))
    made = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64), out.new_empty(0)
    return out, lse, None, None, q.shape[2], k.shape[2], *made


def flash_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Any, cum_seq_k: Any, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
) -> Any:  # fmt: skip
    CALLS["flash backward"] += 1
    check("flash attention", SIXTEEN, grad_out, q, k, v, out)
    log_sums(logsumexp, q, q.shape[:-1])
    rule(q.shape[-1] % 8 == 0 and q.shape == out.shape == grad_out.shape, "one width, a multiple of 8")
    rule(not is_causal or q.shape[2] == k.shape[2], "causal: of as many queries as keys")
    rule(
        (cum_seq_q, cum_seq_k, max_q, max_k) == (None, None, q.shape[2], k.shape[2]),
        "a batch of sequences of one length",
    )
    rule(
        philox_seed.dtype == philox_offset.dtype == torch.uint64 and philox_seed.shape == (2,),
        "the state of the generator",
    )
    return gradients(grad_out, (q, k, v), out, logsumexp, scores(q, k, None, is_causal, scale), scale)[:3]


def log_sums(lse: Tensor, q: Tensor, shape: Any) -> None:
    rule(
        lse.shape == shape and lse.dtype == wide(q) and lse.is_contiguous(),
        f"log-sum-exps {tuple(lse.shape)}, not {tuple(shape)}",
    )


def bias_of(bias: Tensor | None, q: Tensor, k: Tensor) -> None:
    if bias is None:
        return
    rule(
        bias.dtype == q.dtype and bias.shape == (*q.shape[:3], k.shape[2]),
        "a bias for each head, of the queries' format",
    )
    rule(
        bias.stride(-1) == 1 and all(n % 8 == 0 for n in bias.stride()[:-1]),
        "rows of the bias begin at multiples of 8 numbers",
    )


def efficient(
    q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    CALLS["efficient"] += 1
    check("memory-efficient attention", (*SIXTEEN, torch.float32), q, k, v)
    rule(q.shape[1] == k.shape[1] == v.shape[1], "as many heads of keys as of queries")
    rule(all(t.shape[-1] % (16 // t.itemsize) == 0 for t in (q, v)), "widths of 16 bytes")
    rule(compute_log_sumexp and dropout_p == 0.0, "not here")
    bias_of(attn_bias, q, k)
    out, lse = attended(q, k, v, scores(q, k, attn_bias, is_causal, scale))
    padded = lse.new_full((*lse.shape[:2], -(-q.shape[2] // 32) * 32), torch.inf)
    padded[..., : q.shape[2]] = lse
    drawn = torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)
    return out.transpose(1, 2).contiguous().transpose(1, 2), padded, *drawn


def efficient_backward(
    grad_out_: Tensor, q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None, out: Tensor, logsumexp: Tensor, philox_seed: Tensor,
    philox_offset: Tensor, dropout_p: float, grad_input_mask: list[bool], is_causal: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    CALLS["efficient backward"] += 1
    check("memory-efficient attention", (*SIXTEEN, torch.float32), grad_out_, q, k, v, out)
    log_sums(logsumexp, q, (*q.shape[:2], -(-q.shape[2] // 32) * 32))
    rule(bool((logsumexp[..., q.shape[2] :] == torch.inf).all()), "log-sum-exps of no query are infinite")
    bias_of(attn_bias, q, k)
    s = scores(q, k, attn_bias, is_causal, scale)
    dq, dk, dv, ds = gradients(grad_out_, (q, k, v), out, logsumexp[..., : q.shape[2]], s, scale)
    return dq, dk, dv, ds.to(q.dtype) if grad_input_mask[3] and attn_bias is not None else None


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    CALLS["cudnn"] += 1
    check("cuDNN", SIXTEEN, q, k, v)
    rule(attn_bias is None, "what it does with a query that sees nothing is said nowhere")
    out, lse = attended(q, k, v, scores(q, k, None, is_causal, scale))
    drawn = torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)
    return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], *drawn, None


def cudnn_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, philox_seed: Tensor, philox_offset: Tensor,
    attn_bias: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    CALLS["cudnn backward"] += 1
    check("cuDNN", SIXTEEN, grad_out, q, k, v, out)
    log_sums(logsumexp, q, (*q.shape[:-1], 1))
    rule(
        (attn_bias, cum_seq_q, cum_seq_k, max_q, max_k) == (None, None, None, q.shape[2], k.shape[2]),
        "dense, without a bias",
    )
    return gradients(grad_out, (q, k, v), out, logsumexp[..., 0], scores(q, k, None, is_causal, scale), scale)[:3]


def choice(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> int:  # fmt: skip
    """The choice on sm_90, by torch's constraints: cuDNN's kernel, flash attention, the memory-efficient one, or torch's operators."""
    flat = q.dtype in SIXTEEN or (MODE["lenient"] and q.dtype is torch.float64)
    heads = q.shape[1] == k.shape[1]
    if flat and MODE["cudnn"] and (heads or enable_gqa) and all(t.shape[-1] % 8 == 0 for t in (q, v)):
        return int(SDPBackend.CUDNN_ATTENTION)
    square = not is_causal or q.shape[2] == k.shape[2]
    if flat and mask is None and q.shape[-1] == v.shape[-1] <= 256 and square and (heads or enable_gqa):
        return int(SDPBackend.FLASH_ATTENTION)
    fits = q.dtype in (*SIXTEEN, torch.float32) and all(
        t.shape[-1] % (16 // t.itemsize) == 0 and t.storage_offset() * t.itemsize % 16 == 0 for t in (q, k, v)
    )
    return int(SDPBackend.EFFICIENT_ATTENTION if fits and heads else SDPBackend.MATH)


KERNELS = {
    "_scaled_dot_product_flash_attention": flash, "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient, "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_cudnn_attention": cudnn, "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}  # fmt: skip


def install() -> None:
    """Register the kernels on the simulated device, once."""
    if KEPT:
        return
    KEPT.append(torch.library.Library("aten", "IMPL"))
    host = torch.ops.shadow.host
    lent = lambda t: host(t) if isinstance(t, Tensor) else t  # noqa: E731

    def on_device(kernel: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            at = next(t.device for t in args if isinstance(t, Tensor))
            rule(all(t.device == at for t in args if isinstance(t, Tensor)), "all on one device")
            found = kernel(*map(lent, args), **kwargs)
            return tuple(t.to(at, non_blocking=True) if isinstance(t, Tensor) else t for t in found)

        return run

    for name, kernel in KERNELS.items():
        KEPT[-1].impl(name, on_device(kernel), "CUDA")
    KEPT[-1].impl("_fused_sdp_choice", choice, "CUDA")
    torch.backends.cuda.can_use_efficient_attention = lambda given, debug=False: True
