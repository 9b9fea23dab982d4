"""What a Hugging Face folder has besides weights: written when a run begins, put beside the weights when they are exported.

Only the model itself knows its config, and only while the job runs. So the run directory gets `hf/` with what `save_pretrained` would
write: `config.json` and `generation_config.json` of transformers, `adapter/adapter_config.json` of peft, and the tokenizer's files
from the folder of `Job.weights`. `plait checkpoint export` makes a folder of them that `from_pretrained` opens: of the model; of the
adapter alone; or of the model with the adapter merged into it by peft itself.
"""

import copy
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import nn

from plait.checkpoint.export import Wanted, export
from plait.checkpoint.names import bare
from plait.config.errors import PlaitError, Problem
from plait.config.files import loads, read_plain
from plait.launch.scratch import Scratch
from plait.model.pretrained import unwrapped

FOLDER, ADAPTER, ADAPTER_CONFIG = "hf", "adapter", "adapter_config.json"
BESIDE = ("token*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template*",
          "preprocessor_config.json", "processor_config.json")  # fmt: skip
"""Files of tokenizers and processors."""
MOST = 64 << 20
"""Bytes of the largest config that is read."""


def describe(model: nn.Module, weights: str | None, folder: Path) -> None:
    """Write what is known of the model besides its weights; nothing for one of no library. One rank calls it."""
    adapters = getattr(model, "peft_config", None) or {}
    inner = unwrapped(model)
    if not hasattr(getattr(inner, "config", None), "save_pretrained"):
        return
    folder.mkdir(exist_ok=True)
    config = copy.deepcopy(getattr(inner, "config"))  # noqa: B009
    config.architectures = [type(inner).__name__.removeprefix("FSDP")]
    config.dtype = next((p.dtype for p in inner.parameters() if p.is_floating_point()), None)
    config.save_pretrained(folder)
    if (generation := getattr(inner, "generation_config", None)) is not None:
        generation.save_pretrained(folder)
    for name, adapter in adapters.items():
        adapter = copy.deepcopy(adapter)
        adapter.inference_mode = True
        adapter.base_model_name_or_path = weights or adapter.base_model_name_or_path
        adapter.save_pretrained(folder / ADAPTER / ("" if name == "default" else name))
    if weights is not None and Path(weights).is_dir():
        _copy(Path(weights), folder)


def export_folder(
    path: Path, to: Path, wanted: Wanted, adapter: bool, merge: bool
) -> tuple[list[Path], dict[str, str]]:
    """As `export`, with what else a Hugging Face folder has. `adapter`: the adapters alone; `merge`: merged into the model.

    K022 for `adapter` or `merge` of a run whose model peft has not wrapped.
    """
    about = path.resolve().parent.parent / FOLDER
    configs = _adapters(about)
    if (adapter or merge) and not configs:
        what, why = f"the run of {path} has no adapter", f"there is no {about / ADAPTER / ADAPTER_CONFIG}"
        raise PlaitError(Problem("K022", what, why=why, fix=("export without --adapter and --merge",)))
    if merge:
        return _merged(path, to, wanted, about), {}
    if adapter:
        return _exported_adapters(path, to, wanted, about), {}
    files, tied = export(path, to, wanted)
    if to.suffix != ".safetensors" and about.is_dir() and not configs:
        files += _copy(about, to, ("*.json", *BESIDE))
    return files, tied


def has_adapter(path: Path) -> bool:
    """Whether the run of a checkpoint trained a model that peft has wrapped."""
    return bool(_adapters(path.resolve().parent.parent / FOLDER))


def _adapters(about: Path) -> dict[str, Path]:
    """Names of adapters, and where their configs are."""
    found = sorted((about / ADAPTER).glob(f"*/{ADAPTER_CONFIG}"))
    first = {"default": about / ADAPTER} if (about / ADAPTER / ADAPTER_CONFIG).is_file() else {}
    return first | {file.parent.name: file.parent for file in found}


def _exported_adapters(path: Path, to: Path, wanted: Wanted, about: Path) -> list[Path]:
    """The adapters alone, as `save_pretrained` of peft writes them: one named `default` in the folder, others in folders of theirs."""
    files = list[Path]()
    for name, config in _adapters(about).items():
        bias = str(loads(read_plain(config / ADAPTER_CONFIG, MOST)).get("bias", "none"))
        folder = to / ("" if name == "default" else name)
        one = replace(wanted, limit=1 << 62, renamed=_of_adapter(name, bias), stem="adapter_model")
        files += [*export(path, folder, one)[0], *_copy(config, folder, (ADAPTER_CONFIG,))]
    return [*files, *_copy(about, to)]


def _of_adapter(adapter: str, bias: str) -> Callable[[str], str | None]:
    """The name that a parameter of an adapter has in peft's file; None for those of the base. `bias`: which biases are trained."""
    trained = {"all": ".bias", "lora_only": ".base_layer.bias"}.get(bias)

    def renamed(name: str) -> str | None:
        plain = name.replace(f".modules_to_save.{adapter}.", ".")
        plain = re.sub(rf"\.{re.escape(adapter)}(?=\.|$)", "", plain, count=1) if plain == name else plain
        return plain if plain != name or (trained is not None and name.endswith(trained)) else None

    return renamed


def _merged(path: Path, to: Path, wanted: Wanted, about: Path) -> list[Path]:
    """The model with its adapter merged by peft. It is held whole in this process."""
    import transformers
    from peft import PeftModel

    (name, _), *others = _adapters(about).items()
    if others:
        what, fix = f"the run of {path} has {len(others) + 1} adapters", ("--adapter, and merge them with peft",)
        raise PlaitError(Problem("K022", what, why="--merge merges one", fix=fix))
    if to.exists() and any(to.iterdir()):
        why, fix = "a merged model does not go over anything", ("--to somewhere/else",)
        raise PlaitError(Problem("K009", f"{to} is not empty", why=why, fix=fix))
    of_adapter = _of_adapter(name, "none")
    with Scratch("merge") as folder:
        base, adapter = folder / "base", folder / "adapter"
        of_base = lambda n: None if of_adapter(n) else bare(n)  # noqa: E731
        export(path, base, replace(wanted, renamed=of_base))
        _copy(about, base, ("*.json", *BESIDE))
        _exported_adapters(path, adapter, wanted, about)
        architecture = loads(read_plain(base / "config.json", MOST))["architectures"][0]
        model = getattr(transformers, str(architecture)).from_pretrained(base, dtype=wanted.dtype or "auto")
        where = adapter if name == "default" else adapter / name
        merged = PeftModel.from_pretrained(model, str(where)).merge_and_unload()
        merged.save_pretrained(to, max_shard_size=wanted.limit)
    return [*sorted(to.iterdir()), *_copy(about, to)]


def _copy(folder: Path, to: Path, patterns: tuple[str, ...] = BESIDE) -> list[Path]:
    """Copy plain files that fit a pattern and are not there yet; where they are now."""
    to.mkdir(parents=True, exist_ok=True)
    found = {file.name: file for pattern in patterns for file in sorted(folder.glob(pattern)) if file.is_file()}
    made = list[Path]()
    for name, file in found.items():
        if not (to / name).exists() and not name.endswith((".safetensors", ".index.json")):
            made.append(Path(shutil.copy(file, to / name)))
    return made
