"""Weights out: those of a checkpoint as safetensors files, which other libraries read.

Tensors stream from the checkpoint's pieces, and from the base that it names, one at a time, each checked against its digest; a tied
tensor is stored once, under its first name.

A Hugging Face folder has more than weights. Only the model itself knows its config, and only while the job runs. So the run directory gets
`hf/` with what `save_pretrained` would write: `config.json` and `generation_config.json` of transformers, `adapter/adapter_config.json` of
peft, and the tokenizer's files from the folder of `Job.weights`. `plait checkpoint export` makes a folder of them that `from_pretrained`
opens: of the model; of the adapter alone; or of the model with the adapter merged into it by peft itself.
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

from plait.checkpoint.manifest import Manifest, damaged, read_manifest
from plait.checkpoint.opening import INDEX, bare, of_checkpoint
from plait.checkpoint.reading import Reader
from plait.checkpoint.safetensors_file import DTYPES, Damaged, Spec, write
from plait.config.errors import PlaitError, Problem
from plait.config.files import loads, read_plain
from plait.launch.scratch import Scratch
from plait.model.pretrained import unwrapped


@dataclass(frozen=True)
class Wanted:
    """What files an export makes."""

    limit: int
    """Bytes of tensors in a file of a folder, at most; one tensor may be larger."""
    dtype: torch.dtype | None = None
    """Of floating tensors, instead of their own."""
    base: str | None = None
    """Where the checkpoint's base is now, instead of where it was."""
    renamed: Callable[[str], str | None] = lambda name: name
    """A tensor's name in the files, or None to leave it out."""
    average: bool = False
    """The average of the weights in the place of those that have one."""
    stem: str = "model"
    """How the names of files begin."""


def export(path: Path, to: Path, wanted: Wanted) -> tuple[list[Path], dict[str, str]]:
    """Write the weights of the checkpoint at `path` to a file or a folder; the files, and tied names -> the stored one.

    K002 when the checkpoint is damaged, K009 when the output exists or cannot be written, K012 without an average, K020 without its base.
    """
    try:
        manifest = read_manifest(path)
        reader, specs = of_checkpoint(path, wanted.base, wanted.average), dict[str, tuple[str, torch.dtype, tuple[int, ...]]]()
        for name, (kind, shape) in _specs(manifest, reader, wanted.dtype).items():
            if (new := wanted.renamed(name)) is not None:
                specs.setdefault(new, (name, kind, shape))
        return _written(reader, specs, to, wanted), manifest.aliases
    except Damaged as error:
        raise PlaitError(damaged(path, error)) from None
    except OSError as error:
        raise PlaitError(Problem("K009", f"{to} cannot be written", why=str(error))) from None


def _specs(manifest: Manifest, reader: Reader, dtype: torch.dtype | None) -> dict[str, Spec]:
    """Number format and shape of every tensor of the model."""
    frozen, specs = manifest.base.tensors if manifest.base is not None else {}, dict[str, Spec]()
    for name, entry in reader.entries.items():
        kind = DTYPES[frozen[name][1] if name in frozen else entry.dtype]
        specs[name] = dtype if dtype and kind.is_floating_point else kind, entry.shape
    return specs


def _written(
    reader: Reader, named: dict[str, tuple[str, torch.dtype, tuple[int, ...]]], to: Path, wanted: Wanted
) -> list[Path]:
    """Write tensors, given as name -> (name in the checkpoint, format, shape)."""
    specs, stem = {name: spec[1:] for name, spec in named.items()}, wanted.stem
    single = to.suffix == ".safetensors"
    groups = [list(specs)] if single else _groups(specs, wanted.limit)
    names = [f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    files = [to] if single else [to / f"{stem}.safetensors"] if len(groups) == 1 else [to / name for name in names]
    _free(to, files, stem)
    (to.parent if single else to).mkdir(parents=True, exist_ok=True)
    for file, group in zip(files, groups):
        beside = file.with_name(file.name + ".tmp")
        beside.unlink(missing_ok=True)
        write(beside, {name: specs[name] for name in group}, lambda name: reader.whole(named[name][0], named[name][1]))
        os.replace(beside, file)
    if len(files) > 1:
        total = sum(_bytes(spec) for spec in specs.values())
        where = {name: file.name for file, group in zip(files, groups) for name in group}
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        index = to / INDEX.replace("model", stem, 1)
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        files.append(index)
    return files


def _bytes(spec: Spec) -> int:
    return spec[0].itemsize * torch.Size(spec[1]).numel()


def _groups(specs: dict[str, Spec], limit: int) -> list[list[str]]:
    """Names per output file, in order, each filled up to the limit."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if groups[-1] and size + _bytes(spec) > limit:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += _bytes(spec)
    return groups


def _free(to: Path, files: list[Path], stem: str) -> None:
    old = [p for p in (*files, *(to.glob(f"{stem}*.safetensors*") if to.is_dir() else ())) if p.exists()]
    if old:
        why, fix = "an export does not write over weights", ("--output somewhere/else",)
        raise PlaitError(Problem("K009", f"{old[0]} exists", why=why, fix=fix))


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
        why, fix = "a merged model does not go over anything", ("--output somewhere/else",)
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
