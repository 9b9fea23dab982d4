"""Weights out: those of a checkpoint as safetensors files, which other libraries read.

Tensors stream from the checkpoint's pieces, and from the base that it names, one at a time, each checked against its digest; a tied
tensor is stored once, under its first name.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from plait.checkpoint.manifest import Manifest, damaged, read_manifest
from plait.checkpoint.opening import INDEX, of_checkpoint
from plait.checkpoint.reading import Reader
from plait.checkpoint.safetensors_file import DTYPES, Damaged, Spec, write
from plait.config.errors import PlaitError, Problem


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
        why, fix = "an export does not write over weights", ("--to somewhere/else",)
        raise PlaitError(Problem("K009", f"{old[0]} exists", why=why, fix=fix))
