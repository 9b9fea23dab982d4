"""Weights in and out: safetensors files, Hugging Face folders and plait's checkpoints to start from; checkpoints as such files.

Each rank reads its own parts only. Formats that run code when they are loaded (pickle: .pt, .bin, DCP's .metadata) are
refused by name, without being opened. On the way out, tensors stream from the checkpoint's pieces one at a time, each checked
against its digest; a tied tensor is stored once, under its first name.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint import state
from plait.checkpoint.checkpoints import Checkpoints, damaged
from plait.checkpoint.manifest import MANIFEST, Entry, StoredChunk, read_manifest
from plait.checkpoint.reading import Reader
from plait.checkpoint.safetensors_file import DTYPES, LONGEST_HEADER, Damaged, ShardFile, Spec, write
from plait.checkpoint.training import Training, exchange_json, problems_in, raise_first
from plait.config.errors import PlaitError, Problem, did_you_mean
from plait.config.files import loads, read_plain
from plait.tensors.part import Part

INDEX = "model.safetensors.index.json"
PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".distcp", ".metadata")


def open_weights(path: Path) -> Reader:
    """What reads the weights at `path`, its entries by the names of parameters and buffers.

    K001, K002, K007 for what cannot be read; no byte of a tensor is read yet.
    """
    try:
        if path.is_dir() and (path / MANIFEST).exists():
            return _of_plait(path)
        if path.is_dir() and (path / INDEX).exists():
            return _of_index(path)
        if path.is_dir() and (path / "model.safetensors").exists():
            return _of_files(path, {"model.safetensors": None})
        saved = [p for p in (path, path / "checkpoints") if Checkpoints(p).found()]
        if saved:
            return _of_plait(Checkpoints(saved[0]).found()[0])
        if path.is_file() and path.suffix == ".safetensors":
            file = path.resolve()  # a link that the user names is theirs
            return _of_files(file.parent, {file.name: None})
        wrong = _foreign(path)
    except Damaged as error:
        raise PlaitError(damaged(path if path.is_dir() else path.parent, error)) from None
    except (OSError, ValueError) as error:  # a name that no file can have, a folder that cannot be read
        wrong = Problem("K007", f"there are no weights at {str(path)[:200]}", why=str(error)[:200])
    raise PlaitError(wrong)


def _of_plait(path: Path) -> Reader:
    manifest = read_manifest(path)
    reader = Reader(path, manifest.files, manifest.tensors)
    for file in manifest.files:
        reader.file(file)
    reader.entries = {n.removeprefix("model/"): e for n, e in manifest.tensors.items() if n.startswith("model/")}
    return reader


def _of_index(path: Path) -> Reader:
    """Of a Hugging Face folder: the index says which file has which tensor."""
    try:
        listed = loads(read_plain(path / INDEX, LONGEST_HEADER, follow=False))["weight_map"]
        files = dict[str, Any]()
        for name, file in listed.items():
            if not isinstance(file, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors", file):
                raise ValueError(f"{name[:100]} is in {str(file)[:100]!r}, which is no safetensors file of this folder")
            files.setdefault(file, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(INDEX, str(error)[:300]) from None
    return _of_files(path, files)


def _of_files(folder: Path, files: dict[str, Any]) -> Reader:
    entries = {}
    for file, names in files.items():
        stored = ShardFile(folder / file).tensors
        if names is not None and not names <= stored.keys():
            raise Damaged(file, f"{min(names - stored.keys())[:100]} is not in it, although the index says so")
        for name, tensor in stored.items():
            if names is None or name in names:
                piece = StoredChunk(file, name, (0,) * len(tensor.shape), tensor.shape, None)
                entries[name] = Entry(tensor.dtype, tensor.shape, (piece,) if tensor.end > tensor.begin else ())
    return Reader(folder, None, entries)


def _foreign(path: Path) -> Problem:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    pickled = [p for p in files if p.suffix in PICKLED or p.name in PICKLED]
    fix = ("save it as safetensors where you trust it: safetensors.torch.save_file(model.state_dict(), …)",)
    if pickled:
        why = "the format is pickle, which runs code when it is loaded; plait does not open it"
        return Problem("K007", f"{pickled[0]} is not read", why=why, fix=fix)
    why = "expected a .safetensors file, a folder with model.safetensors or its index, or a checkpoint of plait"
    return Problem("K007", f"there are no weights at {path}", why=why, fix=("--weights path/to/model.safetensors",))


def load_weights(training: Training, path: Path) -> None:
    """Fill the model's parameters and buffers from `path`; every rank calls it, and reads its own parts.

    K008 when names or shapes differ from the model's. Numbers are cast to the model's format. Nothing is changed unless
    all ranks can read all of theirs.
    """
    mine = state.model_parts(training)
    said = exchange_json(training, {"names": list(mine)})
    everyone = list(dict.fromkeys(name for word in said for name in word["names"]))
    word, reader, sources = dict[str, Any](), None, dict[str, str]()
    try:
        reader = open_weights(path)
        sources = _matched(path, reader.entries, everyone, state.aliases_of(training.model))
        wrong = list(_misshaped(path, reader.entries, sources, mine))
        if wrong:
            raise PlaitError(wrong)
        for name, part in mine.items():
            reader.check(sources[name], part)
    except Damaged as error:
        word = {"problems": [vars(damaged(path, error))]}
    except PlaitError as error:
        word = problems_in(error)
    raise_first(exchange_json(training, word))
    assert reader is not None
    for name, part in mine.items():
        reader.read(sources[name], part)
    training.built.refresh()


def _matched(path: Path, entries: dict[str, Entry], wanted: list[str], aliases: dict[str, str]) -> dict[str, str]:
    """Name in the model -> name in the weights: the same, or that of a tensor it is tied to."""
    tied: dict[str, list[str]] = {}
    for name, kept in aliases.items():
        tied.setdefault(kept, []).append(name)
    sources = {w: next((n for n in (w, *tied.get(w, [])) if n in entries), "") for w in wanted}
    missing = [name for name, source in sources.items() if not source]
    unknown = [name for name in entries if name not in sources and name not in aliases]
    problems = []
    fix = _way_out(missing, unknown)
    for kind, names, others in (("lack", missing, unknown), ("have", unknown, missing)):
        if names:
            hint = did_you_mean(names[0], others) if others and kind == "lack" else ""
            hint = hint if hint.startswith("did") else ""
            what = f"the weights at {path} {kind} {names[0]}" + ("" if kind == "lack" else ", which the model has not")
            more = f"{len(names)} names: {', '.join(names[:3])}" + (", …" if len(names) > 3 else "")
            problems.append(Problem("K008", what + (f"        {hint}" if hint else ""), why=more, fix=fix))
    if problems:
        raise PlaitError(problems)
    return sources


def _way_out(missing: list[str], unknown: list[str]) -> tuple[str, ...]:
    """What to do when names differ. A wrapper of the model (LoRA, DDP, compile) puts words before or into its names."""
    bare = {name.replace(".base_layer.", "."): name for name in missing}
    if (words := _prefix(bare, unknown)) or (unknown and len(bare.keys() & set(unknown)) > len(unknown) / 2):
        named = f"its names begin with {words}" if words else "its names have `.base_layer.` in them"
        return (
            f"the model wraps the one that was saved ({named}): load the weights in the job's model function,"
            " before it is wrapped,    model.load_state_dict(load_file(…))    or  from_pretrained",
        )
    if words := _prefix(dict.fromkeys(unknown, ""), missing):
        return (f"the weights are those of a wrapped model: save them again without {words}",)
    return ("the job's model and the one that was saved are built differently: give both the same arguments",)


def _prefix(longer: dict[str, str], shorter: list[str]) -> str:
    """What most of the shorter names lack at their beginning, if it is the same for all of them; else empty."""
    for name in shorter[:1]:
        for other in longer:
            if other.endswith(f".{name}") and (words := other.removesuffix(name)):
                fitting = sum(f"{words}{each}" in longer for each in shorter)
                return words if fitting > len(shorter) / 2 else ""
    return ""


def _misshaped(
    path: Path, entries: dict[str, Entry], sources: dict[str, str], mine: dict[str, Part]
) -> Iterator[Problem]:
    for name, part in mine.items():
        entry = entries[sources[name]]
        if entry.shape != part.shape:
            why = f"it is {list(entry.shape)} there, {list(part.shape)} in the model"
            yield Problem("K008", f"{name} has another shape in the weights at {path}", why=why)
        elif DTYPES[entry.dtype].is_floating_point != part.tensor.dtype.is_floating_point:
            why = f"it is {entry.dtype} there, {part.tensor.dtype} in the model"
            yield Problem("K008", f"{name} has another kind of numbers in the weights at {path}", why=why)


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
            content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            (to / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
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
