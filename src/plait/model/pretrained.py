"""Models with weights from a file: they are built from a config without weights, and declare modules that the file lacks.

A job names its weights in `Job.weights`, and each rank reads its own shards (`checkpoint/foreign_weights.py`), which overwrite the initial
weights. Modules that the file lacks, such as a new head, must be declared. All other missing weights are an error.

For Hugging Face transformers, this file disables the cache of keys and values in training, and lets mixtures of experts run in float64.

Decoders of transformers keep the keys and values of every layer by default (`config.use_cache`). Generation reads them; training does not.
As in the library's own Trainer, the cache is off in training. The config is changed only while the model runs, so it has the user's
value when the model is inspected or saved. An explicit `use_cache` in the inputs has precedence.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from plait.config.errors import PlaitError, Problem

DECLARED_ATTRIBUTE = "not_in_the_weights"
"""Attribute of a model: (patterns of names that are new, patterns of names in the file that are not used)."""

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class NameRules:
    """Allowed differences between the names in a weights file and the model's names."""

    prefix: str = ""
    """Prefix of names of the complete model over those of the model without a head, such as `model` or `transformer`."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of names in files that the model's library ignores."""
    new: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


def pretrained(
    folder: str | Path, kind: type, *, new: tuple[str, ...] = (), unused: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32, **config: Any,
) -> Callable[[], nn.Module]:  # fmt: skip
    """Return a `Job.model` that builds a Hugging Face model from `config.json` in `folder`, without its weights.

    Set `Job.weights` to the folder too: training then starts from the weights that `from_pretrained` would read. `kind` is an auto class such as
    `AutoModelForCausalLM`, or a model class. `config` changes values of the config, such as `num_labels=3`. `new` and `unused` are those
    of `new_modules`. The model has dtype `dtype`, whatever the dtype of the file.

    >>> model = plait.pretrained("models/llama", AutoModelForCausalLM, attention_dropout=0.1)     # doctest: +SKIP

    Raises K007 if the folder has no `config.json`.
    """

    def make() -> nn.Module:
        from transformers import AutoConfig

        if not (Path(folder) / "config.json").is_file():
            what, why = f"there is no model in {folder}", "it has no config.json, and plait downloads nothing"
            fix = ("a folder that save_pretrained wrote, or that `hf download NAME --local-dir …` filled",)
            raise PlaitError(Problem("K007", what, why=why, fix=fix))
        found = AutoConfig.from_pretrained(folder, local_files_only=True, **config)
        auto = getattr(kind, "from_config", None)
        model = auto(found, dtype=dtype) if auto is not None else kind(found).to(dtype)
        return new_modules(model, *new, unused=unused)

    return make


def new_modules(model: Model, *new: str, unused: tuple[str, ...] = ()) -> Model:
    """Declare the parts of a model that differ from `Job.weights`, and return the model.

    `new`: names of modules that the file lacks, such as "classifier" or "layers.*.gate"; they keep their initial weights. `unused`: names in the file
    that
    the model lacks, such as "lm_head". In a pattern, `*` matches any text. A name includes everything inside the module.
    """
    setattr(model, DECLARED_ATTRIBUTE, (tuple(new), tuple(unused)))
    return model


def get_name_rules(model: nn.Module) -> NameRules:
    """Return the rules for names in files of a model, or of the model that peft has wrapped."""
    inner = unwrap_peft(model)
    ignored = getattr(inner, "_keys_to_ignore_on_load_unexpected", None) or ()
    declared = [vars(each).get(DECLARED_ATTRIBUTE, ((), ())) for each in {id(m): m for m in (model, inner)}.values()]
    new, unused = (tuple(name for each in declared for name in each[i]) for i in (0, 1))
    return NameRules(str(getattr(inner, "base_model_prefix", "") or ""), tuple(ignored), new, unused)


def unwrap_peft(model: nn.Module) -> nn.Module:
    """Return the model inside peft's wrapper, or the model itself."""
    return getattr(model, "get_base_model")() if hasattr(model, "peft_config") else model  # noqa: B009


KERNEL_CHECK, KERNEL_PRODUCT = "_can_use_grouped_mm", "_grouped_mm"


CONFIGS_ATTRIBUTE = "configs_with_a_cache"
"""Attribute of a model: its configs that can enable a cache."""


@contextmanager
def disable_cache(model: nn.Module) -> Iterator[None]:
    """Disable the generation cache of the model and its submodels inside this context. `use_cache` in the inputs has precedence."""
    if "transformers" not in sys.modules:
        yield
        return
    known = vars(model).get(CONFIGS_ATTRIBUTE)
    if known is None:
        known = vars(model)[CONFIGS_ATTRIBUTE] = _list_configs(model)
    changed = [config for config in known if config.use_cache is True]
    for config in changed:
        config.use_cache = False
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = True


def _list_configs(model: nn.Module) -> list[Any]:
    """Return the transformers configs with `use_cache` of a model and its submodels, including nested ones; each once."""
    kind = getattr(sys.modules["transformers"], "PretrainedConfig", ())
    waiting = [config for m in model.modules() if isinstance(config := vars(m).get("config"), kind)]
    configs: dict[int, Any] = {}
    while waiting:
        config = waiting.pop()
        if id(config) not in configs:
            configs[id(config)] = config
            waiting += [inner for inner in vars(config).values() if isinstance(inner, kind)]
    return [config for config in configs.values() if hasattr(config, "use_cache")]


def enable_float64_experts() -> None:
    """Let experts of transformers compute in float64, as in proofs: their kernel has no float64, so the library's own fallback is used.
    Idempotent."""
    file = sys.modules.get("transformers.integrations.moe")
    able = getattr(file, KERNEL_CHECK, None)
    if able is None or hasattr(able, "__wrapped__"):
        return
    product = getattr(file, KERNEL_PRODUCT)

    @wraps(able)
    def can_use_kernel(input: Tensor, weight: Tensor, *rest: Any, **more: Any) -> bool:
        return weight.dtype != torch.float64 and able(input, weight, *rest, **more)

    @wraps(product)
    def multiply_grouped(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        experts, rows, columns = weight.stride()
        if experts == rows == 0:  # all experts and all matrix rows are equal: nothing is copied for a product
            return input.sum(1, keepdim=True) * weight[0, :1]
        return (input @ weight[0, :, :1]).expand(-1, weight.shape[2]).contiguous() if experts == columns == 0 else product(input, weight, offs)

    setattr(file, KERNEL_PRODUCT, multiply_grouped)
    setattr(file, KERNEL_CHECK, can_use_kernel)
