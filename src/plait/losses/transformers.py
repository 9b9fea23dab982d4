"""Hugging Face transformers: no cache of keys and values in training; its mixtures of experts in float64, and their balance loss
over the global batch.

Its decoders keep the keys and values of every layer (`config.use_cache`, on by default), which generation reads and training
does not. As with the library's own Trainer, training goes without; the config is changed while the model runs and no longer, so
that whoever looks at the model, or saves it, finds what they set. Inputs that say `use_cache` themselves are obeyed.

Its models compute `load_balancing_loss_func(router logits of every layer, …)` in their own forward. The function
multiplies two means over the batch, so the mean of the ranks' losses is not the loss of the batch. Here the logits of
all ranks are put together first (experts numbers per token and layer, little beside the tokens themselves) and the
library's own function is given the whole: the same number and gradient on every rank, whatever its formula. Where
ranks hold stretches of sequences, the stretches are put together before.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from plait.losses.global_batch import asking, global_batch, whole_sequences
from plait.model.meter import ROUTED
from plait.tensors.torch_private import is_unknown, tree_leaves

NAME = "load_balancing_loss_func"
ABLE = "_can_use_grouped_mm"
CONFIGS = "configs_with_a_cache"
"""Attribute of a model: the configs in it that can turn a cache on."""


def adapt(model: nn.Module) -> None:
    """Let the model's balance loss, if the library gives it one, be that of the global batch. Once for each library file."""
    if "transformers" not in sys.modules:
        return
    for module in {type(m).__module__ for m in model.modules()}:
        file = sys.modules.get(module)
        balance = getattr(file, NAME, None)
        if module.startswith("transformers.") and balance is not None and not hasattr(balance, "__wrapped__"):
            setattr(file, NAME, over_all(balance))


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """While it runs, the model and the models in it keep no keys and values for generation, unless its inputs ask for them."""
    if "transformers" not in sys.modules:
        yield
        return
    known = vars(model).get(CONFIGS)
    if known is None:
        known = vars(model)[CONFIGS] = _configs(model)
    changed = [config for config in known if config.use_cache is True]
    for config in changed:
        config.use_cache = False
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = True


def _configs(model: nn.Module) -> list[Any]:
    """The library's configs of a model and of the models in it, and those inside of them, that have `use_cache`; each once."""
    kind = getattr(sys.modules["transformers"], "PretrainedConfig", ())
    waiting = [config for m in model.modules() if isinstance(config := vars(m).get("config"), kind)]
    found: dict[int, Any] = {}
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            waiting += [inner for inner in vars(config).values() if isinstance(inner, kind)]
    return [config for config in found.values() if hasattr(config, "use_cache")]


def in_doubles() -> None:
    """Let its experts compute in float64, as proofs do: the kernel that they call has no such numbers, and the library's own
    fallback takes its place. Once."""
    file = sys.modules.get("transformers.integrations.moe")
    able = getattr(file, ABLE, None)
    if able is None or hasattr(able, "__wrapped__"):
        return

    @wraps(able)
    def unless_double(input: Tensor, weight: Tensor, *rest: Any, **more: Any) -> bool:
        return weight.dtype != torch.float64 and able(input, weight, *rest, **more)

    setattr(file, ABLE, unless_double)


def over_all(balance: Callable[..., Any]) -> Callable[..., Any]:
    """The library's function, given the logits (and the mask) of all ranks. Outside a split run it is what it was."""

    @wraps(balance)
    def over(gate_logits: Any, num_experts: Any = None, top_k: Any = 2, attention_mask: Any = None) -> Any:
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
