"""`nn.MultiheadAttention` on a rank's heads: the same attention, from slices of its packed parameters.

torch's module passes its parameters to one function that requires the full width. This forward makes the same computations with the sharded
module: `in_proj_weight` is sharded inside each of q, k and v, `out_proj.weight` by input features, and `num_heads` is divided. `out_proj` is
called as a module, so that a hook on it sees the partial sum.

Names of dims: N samples, L queries, S keys, H heads of this rank, D features of a head.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class _Options:
    """Arguments of `nn.MultiheadAttention` after query, key and value, in order."""

    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False


def multihead_forward(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
    first_head: int = 0,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run `nn.MultiheadAttention.forward` for this rank's heads; the returned weights are those of these heads.

    `first_head`: global index of this rank's first head, for slicing a mask per head.

    """
    options = _Options(*rest, **named)
    if options.is_causal and options.attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    batched, heads = query.dim() == 3, module.num_heads
    front = [
        x if batched and module.batch_first else x.transpose(0, 1) if batched else x[None] for x in (query, key, value)
    ]
    q, k, v = _extend_keys(module, *_project_qkv(module, *front))
    added = k.shape[1] - front[1].shape[1]
    of_heads = slice(first_head, first_head + heads)
    mask = _merge_masks(options.attn_mask, options.key_padding_mask, front[0], of_heads, added)
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))  # [N, H, L or S, D]
    p = module.dropout if module.training else 0.0
    weights = None
    if options.need_weights:
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        if p > 0.0:  # as torch's function draws them for this shape, unlike F.dropout
            weights = torch.native_dropout(weights.flatten(0, 1), p, True)[0].unflatten(0, (-1, heads))
        out = weights @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=p)
    out = module.out_proj(out.transpose(1, 2).flatten(2))  # [N, L, E]
    out = out if batched and module.batch_first else out.transpose(0, 1) if batched else out[0]
    if weights is not None:
        weights = weights.mean(1) if options.average_attn_weights else weights
        weights = weights if batched else weights[0]
    return out, weights


def _project_qkv(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Return q, k, v [N, L or S, H·D]."""
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    if module.in_proj_weight is not None:
        rows = module.in_proj_weight.chunk(3)
    else:
        rows = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), rows, biases))


def _extend_keys(module: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, and keys and values with the learned and the zero entries that the module appends."""
    if module.bias_k is not None and module.bias_v is not None:
        k = torch.cat([k, module.bias_k.expand(k.shape[0], -1, -1)], 1)
        v = torch.cat([v, module.bias_v.expand(v.shape[0], -1, -1)], 1)
    if module.add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    return q, k, v


def _merge_masks(attention: Tensor | None, padding: Tensor | None, query: Tensor, heads: slice, added: int) -> Tensor | None:
    """Return both masks as values to add to the scores: [N or 1, H or 1, L or 1, S]. `added`: number of appended keys."""
    total = None
    if attention is not None:
        if attention.dim() == 3:  # one for each sample and global head
            attention = attention.unflatten(0, (query.shape[0], -1))[:, heads]
        else:
            attention = attention[None, None]
        total = _to_additive(attention, query.dtype)
    if padding is not None:
        padding = _to_additive(padding if padding.dim() == 2 else padding[None], query.dtype)[:, None, None]
        total = padding if total is None else total + padding
    return total if total is None or not added else F.pad(total, (0, added))


def _to_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
