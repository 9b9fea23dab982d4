"""Hugging Face transformers: no cache of keys and values in training, and its mixtures of experts in float64.

Its decoders keep the keys and values of every layer (`config.use_cache`, on by default), which generation reads and training
does not. As with the library's own Trainer, training goes without; the config is changed while the model runs and no longer, so
that whoever looks at the model, or saves it, finds what they set. Inputs that say `use_cache` themselves are obeyed.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

ABLE = "_can_use_grouped_mm"


CONFIGS = "configs_with_a_cache"
"""Attribute of a model: the configs in it that can turn a cache on."""


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
    configs: dict[int, Any] = {}
    while waiting:
        config = waiting.pop()
        if id(config) not in configs:
            configs[id(config)] = config
            waiting += [inner for inner in vars(config).values() if isinstance(inner, kind)]
    return [config for config in configs.values() if hasattr(config, "use_cache")]


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
