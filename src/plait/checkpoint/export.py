"""A checkpoint's weights as Hugging Face has them: `model.safetensors`, or numbered files and an index.

Tensors stream from the checkpoint's pieces to the output one at a time, each checked against its digest; a tied tensor
is stored once, under its first name.
"""

import json
import os
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.checkpoints import damaged
from plait.checkpoint.manifest import read_manifest
from plait.checkpoint.reading import Reader
from plait.checkpoint.safetensors_file import DTYPES, Damaged, Spec, write
from plait.checkpoint.weights import INDEX
from plait.config.errors import PlaitError, Problem


def export(path: Path, to: Path, limit: int, dtype: torch.dtype | None = None) -> tuple[list[Path], dict[str, str]]:
    """Write the weights of the checkpoint at `path` to a file or a folder; the files, and tied names -> the stored one.

    A folder gets files of at most `limit` bytes of tensors (one tensor may be larger). `dtype` changes floating tensors.
    K002 when the checkpoint is damaged, K009 when the output exists or cannot be written.
    """
    try:
        manifest = read_manifest(path)
    except Damaged as error:
        raise PlaitError(damaged(path, error)) from None
    reader = Reader(path, manifest.files, manifest.tensors)
    specs: dict[str, Spec] = {}
    for name, entry in manifest.tensors.items():
        if name.startswith("model/"):
            kind = DTYPES[entry.dtype]
            specs[name.removeprefix("model/")] = dtype if dtype and kind.is_floating_point else kind, entry.shape
    single = to.suffix == ".safetensors"
    groups = [list(specs)] if single else _groups(specs, limit)
    names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    files = [to] if single else [to / "model.safetensors"] if len(groups) == 1 else [to / name for name in names]
    _free(to, files)

    def get(name: str) -> Tensor:
        return reader.whole(f"model/{name}", specs[name][0])

    try:
        (to.parent if single else to).mkdir(parents=True, exist_ok=True)
        for file, group in zip(files, groups):
            beside = file.with_name(file.name + ".tmp")
            beside.unlink(missing_ok=True)
            write(beside, {name: specs[name] for name in group}, get)
            os.replace(beside, file)
        if len(files) > 1:
            total = sum(_bytes(spec) for spec in specs.values())
            where = {name: file.name for file, group in zip(files, groups) for name in group}
            content = json.dumps(
                {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=2
            )
            (to / INDEX).write_text(content + "\n", encoding="utf-8")
            files.append(to / INDEX)
    except Damaged as error:
        raise PlaitError(damaged(path, error)) from None
    except OSError as error:
        raise PlaitError(Problem("K009", f"{to} cannot be written", why=str(error))) from None
    return files, manifest.aliases


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


def _free(to: Path, files: list[Path]) -> None:
    old = [p for p in (*files, *(to.glob("model*.safetensors*") if to.is_dir() else ())) if p.exists()]
    if old:
        why, fix = "an export does not write over weights", ("--to somewhere/else",)
        raise PlaitError(Problem("K009", f"{old[0]} exists", why=why, fix=fix))
