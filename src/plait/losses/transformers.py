"""The balance loss of Hugging Face transformers' mixtures of experts, over the global batch.

Its models compute `load_balancing_loss_func(router logits of every layer, …)` in their own forward. The function
multiplies two means over the batch, so the mean of the ranks' losses is not the loss of the batch. Here the logits of
all ranks are put together first (experts numbers per token and layer, little beside the tokens themselves) and the
library's own function is given the whole: the same number and gradient on every rank, whatever its formula. Where
ranks hold stretches of sequences, the stretches are put together before.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from plait.losses.global_batch import asking, global_batch, whole_sequences
from plait.model.meter import ROUTED
from plait.tensors.fake import is_unknown
from plait.tensors.torch_private import tree_leaves

NAME = "load_balancing_loss_func"


def adapt(model: nn.Module) -> None:
    """Replace the balance loss of the model's library file, if it has one, by that of the global batch; once per file."""
    if "transformers" not in sys.modules:
        return
    for module in {type(m).__module__ for m in model.modules()}:
        file = sys.modules.get(module)
        balance = getattr(file, NAME, None)
        if module.startswith("transformers.") and balance is not None and not hasattr(balance, "__wrapped__"):
            setattr(file, NAME, over_all(balance))


def over_all(balance: Callable[..., Any]) -> Callable[..., Any]:
    """The library's function, given the logits (and the mask) of all ranks; outside a split run it is unchanged."""

    @wraps(balance)
    def over(
        gate_logits: tuple[Tensor, ...] | Tensor | None,
        num_experts: int | None = None,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor | int:
        given = [t for t in tree_leaves((gate_logits, attention_mask)) if isinstance(t, Tensor)]
        if not isinstance(gate_logits, tuple) or not gate_logits:
            return balance(gate_logits, num_experts, top_k, attention_mask)
        for t in gate_logits:
            setattr(t, ROUTED, True)
        whole = any(map(is_unknown, given))
        gathered = gate_logits if whole else whole_sequences(gate_logits)
        if whole or not asking():
            return balance(gathered, num_experts, top_k, attention_mask)
        if len({t.shape for t in gathered}) == 1:
            gathered = global_batch(torch.stack([t.to(gathered[0].device) for t in gathered], 1)).unbind(1)
        else:
            gathered = tuple(global_batch(t) for t in gathered)
        mask = None if attention_mask is None else global_batch(attention_mask)
        return balance(gathered, num_experts, top_k, mask)

    return over
