"""Models whose weights come from a file: built from a config without them, and what of a model no file has.

A job names its weights in `Job.weights`, and each rank reads its own parts of them (`checkpoint/opening.py`). The model is then
built with the numbers its constructor draws, which are written over. What is not in the file, such as a new head, must be
declared: everything else that is missing is an error.

Hugging Face transformers: no cache of keys and values in training, and its mixtures of experts in float64.

Its decoders keep the keys and values of every layer (`config.use_cache`, on by default), which generation reads and training
does not. As with the library's own Trainer, training goes without; the config is changed while the model runs and no longer, so
that whoever looks at the model, or saves it, finds what they set. Inputs that say `use_cache` themselves are obeyed.
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

DECLARED = "not_in_the_weights"
"""Attribute of a model: (patterns of names that are new, patterns of names in the file that are not used)."""

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class NameRules:
    """How the names in a file of weights may differ from the model's."""

    prefix: str = ""
    """What names of the whole model have before those of the model without a head, such as `model` or `transformer`."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of names in files that the library of the model leaves out."""
    new: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


def pretrained(
    folder: str | Path, kind: type, *, new: tuple[str, ...] = (), unused: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32, **config: Any,
) -> Callable[[], nn.Module]:  # fmt: skip
    """A `Job.model` that builds a Hugging Face model from `config.json` in `folder`, without its weights.

    Give the folder to `Job.weights` too: training then starts from the numbers that `from_pretrained` would read. `kind` is an
    auto class such as `AutoModelForCausalLM`, or a model class; `config` changes values of the config, such as `num_labels=3`.
    `new` and `unused` are those of `new_modules`. The model is in float32 whatever the file has, unless `dtype` says otherwise.

    >>> model = plait.pretrained("models/llama", AutoModelForCausalLM, attention_dropout=0.1)     # doctest: +SKIP

    K007 when the folder has no `config.json`.
    """

    def make() -> nn.Module:
        from transformers import AutoConfig

        if not (Path(folder) / "config.json").is_file():
            what, why = f"there is no model in {folder}", "it has no config.json, and nothing is downloaded"
            fix = ("a folder that save_pretrained wrote, or that `hf download NAME --local-dir …` filled",)
            raise PlaitError(Problem("K007", what, why=why, fix=fix))
        found = AutoConfig.from_pretrained(folder, local_files_only=True, **config)
        auto = getattr(kind, "from_config", None)
        model = auto(found, dtype=dtype) if auto is not None else kind(found).to(dtype)
        return new_modules(model, *new, unused=unused)

    return make


def new_modules(model: Model, *new: str, unused: tuple[str, ...] = ()) -> Model:
    """The model, with the declaration of what it does not take from `Job.weights`.

    `new`: names of modules that the file lacks, such as "classifier" or "layers.*.gate"; they keep the numbers that their
    constructor drew. `unused`: names in the file that the model has not, such as "lm_head". A pattern is a name, with `*` for
    anything in it, and stands for all that is inside.
    """
    setattr(model, DECLARED, (tuple(new), tuple(unused)))
    return model


def name_rules(model: nn.Module) -> NameRules:
    """What a model, or the one that peft has wrapped, says of names in files."""
    inner = unwrapped(model)
    ignored = getattr(inner, "_keys_to_ignore_on_load_unexpected", None) or ()
    declared = [vars(each).get(DECLARED, ((), ())) for each in {id(m): m for m in (model, inner)}.values()]
    new, unused = (tuple(name for each in declared for name in each[i]) for i in (0, 1))
    return NameRules(str(getattr(inner, "base_model_prefix", "") or ""), tuple(ignored), new, unused)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, where peft has wrapped it."""
    return getattr(model, "get_base_model")() if hasattr(model, "peft_config") else model  # noqa: B009


ABLE, PRODUCT = "_can_use_grouped_mm", "_grouped_mm"


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
    product = getattr(file, PRODUCT)

    @wraps(able)
    def unless_double(input: Tensor, weight: Tensor, *rest: Any, **more: Any) -> bool:
        return weight.dtype != torch.float64 and able(input, weight, *rest, **more)

    @wraps(product)
    def grouped(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        experts, rows, columns = weight.stride()
        if experts == rows == 0:  # all experts are alike, and all rows of their matrices: nothing is to be copied for a product
            return input.sum(1, keepdim=True) * weight[0, :1]
        return (input @ weight[0, :, :1]).expand(-1, weight.shape[2]).contiguous() if experts == columns == 0 else product(input, weight, offs)

    setattr(file, PRODUCT, grouped)
    setattr(file, ABLE, unless_double)
