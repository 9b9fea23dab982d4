"""Export of a checkpoint's weights as safetensors files for other libraries.

Tensors stream one at a time from the checkpoint's pieces and its base weights, each checked against its digest. A tied tensor is stored
once, under its first name.

A Hugging Face folder has more than weights, and its config is available only while the job runs. So the run directory has `hf/` with the
files of `save_pretrained`: `config.json` and `generation_config.json` of transformers, `adapter/adapter_config.json` of peft, and the
tokenizer's files from the folder of `Job.weights`. `plait checkpoint export` makes a folder that `from_pretrained` opens: the model, the
adapter alone, or the model with the adapter merged by peft.
"""

import copy
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from plait.checkpoint.checkpoint_reader import CheckpointReader
from plait.checkpoint.foreign_weights import INDEX_NAME, open_checkpoint_weights, strip_adapter_name
from plait.checkpoint.manifest import Manifest, damaged_problem, read_manifest
from plait.checkpoint.safetensors_file import DTYPES, DamagedFileError, Spec, write_safetensors
from plait.config.errors import PlaitError, Problem
from plait.config.files import parse_strict_json, read_plain_file
from plait.launch.scratch import ScratchFolder
from plait.model.pretrained import unwrap_peft


@dataclass(frozen=True)
class ExportOptions:
    """Options for the files of an export."""

    max_file_bytes: int
    """Maximum bytes of tensors per file; a single tensor may be larger."""
    dtype: torch.dtype | None = None
    """Replaces the dtype of floating tensors."""
    base: str | None = None
    """Path of the base weights if they have moved."""
    rename: Callable[[str], str | None] = lambda name: name
    """Maps a tensor's name to its name in the files, or to None to omit it."""
    average: bool = False
    """Export the moving average for the weights that have one."""
    stem: str = "model"
    """Prefix of the file names."""


def export_weights(path: Path, to: Path, wanted: ExportOptions) -> tuple[list[Path], dict[str, str]]:
    """Write the weights of the checkpoint at `path` to a file or a folder. Return the files, and tied names -> the stored name.

    K002 if the checkpoint is damaged, K009 if the output exists or cannot be written, K012 without an average, K020 without its base.

    """
    try:
        manifest = read_manifest(path)
        reader, specs = open_checkpoint_weights(path, wanted.base, wanted.average), dict[str, tuple[str, torch.dtype, tuple[int, ...]]]()
        for name, (kind, shape) in _read_specs(manifest, reader, wanted.dtype).items():
            if (new := wanted.rename(name)) is not None:
                specs.setdefault(new, (name, kind, shape))
        return _write_files(reader, specs, to, wanted), manifest.aliases
    except DamagedFileError as error:
        raise PlaitError(damaged_problem(path, error)) from None
    except OSError as error:
        raise PlaitError(Problem("K009", f"{to} cannot be written", why=str(error))) from None


def _read_specs(manifest: Manifest, reader: CheckpointReader, dtype: torch.dtype | None) -> dict[str, Spec]:
    """Return dtype and shape of every tensor of the model."""
    frozen, specs = manifest.base.tensors if manifest.base is not None else {}, dict[str, Spec]()
    for name, entry in reader.entries.items():
        kind = DTYPES[frozen[name][1] if name in frozen else entry.dtype]
        specs[name] = dtype if dtype and kind.is_floating_point else kind, entry.shape
    return specs


def _write_files(
    reader: CheckpointReader, named: dict[str, tuple[str, torch.dtype, tuple[int, ...]]], to: Path, wanted: ExportOptions
) -> list[Path]:
    """Write tensors, given as name -> (name in the checkpoint, dtype, shape)."""
    specs, stem = {name: spec[1:] for name, spec in named.items()}, wanted.stem
    single = to.suffix == ".safetensors"
    groups = [list(specs)] if single else _group_by_file(specs, wanted.max_file_bytes)
    names = [f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    files = [to] if single else [to / f"{stem}.safetensors"] if len(groups) == 1 else [to / name for name in names]
    _check_unused(to, files, stem)
    (to.parent if single else to).mkdir(parents=True, exist_ok=True)
    for file, group in zip(files, groups):
        beside = file.with_name(file.name + ".tmp")
        beside.unlink(missing_ok=True)
        write_safetensors(beside, {name: specs[name] for name in group}, lambda name: reader.read_full(named[name][0], named[name][1]))
        os.replace(beside, file)
    if len(files) > 1:
        total = sum(_count_bytes(spec) for spec in specs.values())
        where = {name: file.name for file, group in zip(files, groups) for name in group}
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        index = to / INDEX_NAME.replace("model", stem, 1)
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        files.append(index)
    return files


def _count_bytes(spec: Spec) -> int:
    return spec[0].itemsize * torch.Size(spec[1]).numel()


def _group_by_file(specs: dict[str, Spec], limit: int) -> list[list[str]]:
    """Return the names per output file, in order, each file filled up to the limit."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if groups[-1] and size + _count_bytes(spec) > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += _count_bytes(spec)
    return groups


def _check_unused(to: Path, files: list[Path], stem: str) -> None:
    old = [p for p in (*files, *(to.glob(f"{stem}*.safetensors*") if to.is_dir() else ())) if p.exists()]
    if old:
        why, fix = "an export never overwrites weights", ("--output somewhere/else",)
        raise PlaitError(Problem("K009", f"{old[0]} exists", why=why, fix=fix))


HF_FOLDER, ADAPTER, ADAPTER_CONFIG = "hf", "adapter", "adapter_config.json"
SIDE_FILES = ("token*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "chat_template*",
          "preprocessor_config.json", "processor_config.json")  # fmt: skip
"""Files of tokenizers and processors."""
MAX_SIDE_BYTES = 64 << 20
"""Maximum bytes of a config file."""


def write_model_config(model: nn.Module, weights: str | None, folder: Path) -> None:
    """Write the config files of a transformers or peft model; nothing for other models. One rank calls it."""
    adapters = getattr(model, "peft_config", None) or {}
    inner = unwrap_peft(model)
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
        _copy_matching(Path(weights), folder)


def export_folder(
    path: Path, to: Path, wanted: ExportOptions, adapter: bool, merge: bool
) -> tuple[list[Path], dict[str, str]]:
    """Export weights with the other files of a Hugging Face folder. `adapter`: the adapters alone; `merge`: merged into the model.

    K022 for `adapter` or `merge` if peft does not wrap the run's model.

    """
    about = path.resolve().parent.parent / HF_FOLDER
    configs = _find_adapters(about)
    if (adapter or merge) and not configs:
        what, why = f"the run of {path} has no adapter", f"there is no {about / ADAPTER / ADAPTER_CONFIG}"
        raise PlaitError(Problem("K022", what, why=why, fix=("export without --adapter and --merge",)))
    if merge:
        return _merge_adapter(path, to, wanted, about), {}
    if adapter:
        return _export_adapters(path, to, wanted, about), {}
    files, tied = export_weights(path, to, wanted)
    if to.suffix != ".safetensors" and about.is_dir() and not configs:
        files += _copy_matching(about, to, ("*.json", *SIDE_FILES))
    return files, tied


def has_adapter(path: Path) -> bool:
    """Return whether the run of a checkpoint trained a model wrapped by peft."""
    return bool(_find_adapters(path.resolve().parent.parent / HF_FOLDER))


def _find_adapters(about: Path) -> dict[str, Path]:
    """Return the adapters' names and the folders of their configs."""
    found = sorted((about / ADAPTER).glob(f"*/{ADAPTER_CONFIG}"))
    first = {"default": about / ADAPTER} if (about / ADAPTER / ADAPTER_CONFIG).is_file() else {}
    return first | {file.parent.name: file.parent for file in found}


def _export_adapters(path: Path, to: Path, wanted: ExportOptions, about: Path) -> list[Path]:
    """Export the adapters in the layout of peft's `save_pretrained`: `default` in the folder, the others in subfolders."""
    files = list[Path]()
    for name, config in _find_adapters(about).items():
        bias = str(parse_strict_json(read_plain_file(config / ADAPTER_CONFIG, MAX_SIDE_BYTES)).get("bias", "none"))
        folder = to / ("" if name == "default" else name)
        one = replace(wanted, max_file_bytes=1 << 62, rename=_adapter_name(name, bias), stem="adapter_model")
        files += [*export_weights(path, folder, one)[0], *_copy_matching(config, folder, (ADAPTER_CONFIG,))]
    return [*files, *_copy_matching(about, to)]


def _adapter_name(adapter: str, bias: str) -> Callable[[str], str | None]:
    """Return a function from a parameter's name to its name in peft's file, or None for base weights. `bias`: which biases are trained."""
    trained = {"all": ".bias", "lora_only": ".base_layer.bias"}.get(bias)

    def renamed(name: str) -> str | None:
        plain = name.replace(f".modules_to_save.{adapter}.", ".")
        plain = re.sub(rf"\.{re.escape(adapter)}(?=\.|$)", "", plain, count=1) if plain == name else plain
        return plain if plain != name or (trained is not None and name.endswith(trained)) else None

    return renamed


def _merge_adapter(path: Path, to: Path, wanted: ExportOptions, about: Path) -> list[Path]:
    """Export the model with its adapter merged by peft. Loads the full model into this process."""
    import transformers
    from peft import PeftModel

    (name, _), *others = _find_adapters(about).items()
    if others:
        what, fix = f"the run of {path} has {len(others) + 1} adapters", ("--adapter, and merge them with peft",)
        raise PlaitError(Problem("K022", what, why="--merge merges one", fix=fix))
    if to.exists() and any(to.iterdir()):
        why, fix = "a merged model needs an empty folder", ("--output somewhere/else",)
        raise PlaitError(Problem("K009", f"{to} is not empty", why=why, fix=fix))
    of_adapter = _adapter_name(name, "none")
    with ScratchFolder("merge") as folder:
        base, adapter = folder / "base", folder / "adapter"
        of_base = lambda n: None if of_adapter(n) else strip_adapter_name(n)  # noqa: E731
        export_weights(path, base, replace(wanted, rename=of_base))
        _copy_matching(about, base, ("*.json", *SIDE_FILES))
        _export_adapters(path, adapter, wanted, about)
        architecture = parse_strict_json(read_plain_file(base / "config.json", MAX_SIDE_BYTES))["architectures"][0]
        model = getattr(transformers, str(architecture)).from_pretrained(base, dtype=wanted.dtype or "auto")
        where = adapter if name == "default" else adapter / name
        merged = PeftModel.from_pretrained(model, str(where)).merge_and_unload()
        merged.save_pretrained(to, max_shard_size=wanted.max_file_bytes)
    return [*sorted(to.iterdir()), *_copy_matching(about, to)]


def _copy_matching(folder: Path, to: Path, patterns: tuple[str, ...] = SIDE_FILES) -> list[Path]:
    """Copy plain files that match a pattern and do not exist yet. Return the copies."""
    to.mkdir(parents=True, exist_ok=True)
    found = {file.name: file for pattern in patterns for file in sorted(folder.glob(pattern)) if file.is_file()}
    made = list[Path]()
    for name, file in found.items():
        if not (to / name).exists() and not name.endswith((".safetensors", ".index.json")):
            made.append(Path(shutil.copy(file, to / name)))
    return made
