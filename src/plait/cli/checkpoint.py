"""`plait checkpoint list | info | verify | export`: inspect checkpoints without their job."""

import math
import re
from pathlib import Path
from typing import Any

from msgspec import structs

from plait.checkpoint.checkpoint_reader import CheckpointReader
from plait.checkpoint.checkpoints import Checkpoints, nonfinite_problem, read_nonfinite_names, verify_checkpoint
from plait.checkpoint.export import ExportOptions, export_folder, has_adapter
from plait.checkpoint.foreign_weights import PICKLE_SUFFIXES
from plait.checkpoint.manifest import EVAL_PREFIX, MANIFEST_NAME, Manifest, damaged_problem, read_manifest
from plait.checkpoint.safetensors_file import DTYPES, DamagedFileError
from plait.cli.result import print_result
from plait.config.command_options import CheckpointOptions
from plait.config.errors import FAILED, PlaitError, Problem
from plait.tensors.norm import shorten_names

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
OTHER_SUFFIXES = (*PICKLE_SUFFIXES, ".safetensor", ".h5", ".onnx", ".gguf", ".npz", ".npy", ".msgpack", ".json", ".zip", ".tar")
"""File suffixes that are rejected as the name of an export folder."""
DTYPE_NAMES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "fp64": "F64"}


def run(options: CheckpointOptions) -> int:
    """Run the action, and return the exit code."""
    paths = _find_checkpoints(Path(options.path), options.step)
    if options.action == "list":
        rows = [_build_row(path) for path in paths]
        text = "\n".join("{name}  {plan:<24} {size:>10}  {state}".format(**row) for row in rows)
        return _print_result(options, rows, text, 0)
    if options.action == "verify":
        return _verify_hashes(options, paths)
    if options.action == "info":
        found = _read_info(paths[0])
        return _print_result(options, found, "\n".join(f"{name:<11} {value}" for name, value in found.items()), 0)
    if options.output is None:
        raise PlaitError(Problem("U002", "export needs --output", fix=("--output weights/", "--output model.safetensors")))
    dtype = DTYPES[DTYPE_NAMES[options.dtype]] if options.dtype else None
    if options.adapter and options.merge:
        raise PlaitError(Problem("U002", "--adapter and --merge exclude each other", fix=("leave out --adapter or --merge",)))
    wanted = ExportOptions(_parse_size(options.shard), dtype, options.base, average=options.ema)
    written, tied = export_folder(paths[0], _parse_target(options.output), wanted, options.adapter, options.merge)
    files, wrong = [str(file) for file in written], read_nonfinite_names(paths[0]) or ()
    notes = [f"note  {name} is tied to {kept} and stored once: tie them before loading" for name, kept in tied.items()]
    if has_adapter(paths[0]) and not options.adapter and not options.merge:
        notes.append(
            "note  the names are those of a peft model; --adapter or --merge export standard names"
        )
    notes += [f"note  {nonfinite_problem(paths[0], wrong).why}"] if wrong else []
    value = {"checkpoint": str(paths[0]), "files": files, "tied": tied, "not finite": wrong}
    return _print_result(options, value, "\n".join([*files, *notes]), 0)


def _parse_target(text: str) -> Path:
    """Parse the output path of an export. Raises U002 for a file name of an unsupported format."""
    path = Path(text)
    if path.suffix.lower() in OTHER_SUFFIXES and not text.endswith("/"):
        why = f"plait exports safetensors, and {text} would become a folder"
        fix = (f"--output {path.with_suffix('.safetensors')}", f"--output {path.with_suffix('')}/")
        what = f"--output {text} is invalid: the format {path.suffix} is not supported"
        raise PlaitError(Problem("U002", what, why=why, fix=fix))
    return path


def _print_result(options: CheckpointOptions, value: object, text: str, code: int) -> int:
    print_result(options, value, text)
    return code


def _find_checkpoints(path: Path, step: int | None) -> list[Path]:
    """Find the checkpoints of a path, newest first: the path itself, those in it, or those of a run. Raises K001 if there are none."""
    try:
        if (path / MANIFEST_NAME).exists() or (path.is_dir() and re.fullmatch(r"step-\d+", path.name)):
            found = [path]
        else:
            found = Checkpoints(path).list_published() or Checkpoints(path / "checkpoints").list_published()
    except (OSError, ValueError) as error:  # a name that no file can have, or an unreadable folder
        why = getattr(error, "strerror", None) or str(error)
        raise PlaitError(Problem("K001", f"{str(path)[:200]} contains no checkpoint", why=why)) from None
    chosen = [p for p in found if step is None or p.name == f"step-{step:06d}"]
    if not chosen:
        have = f"it contains {', '.join(p.name for p in found)}" if found else "it is neither a checkpoint nor a run with one"
        what = f"{path} contains no checkpoint{'' if step is None else f' of step {step}'}"
        raise PlaitError(Problem("K001", what, why=have))
    return chosen


def _count_bytes(manifest: Manifest) -> int:
    return sum(file.bytes for file in manifest.files.values())


def _build_row(path: Path) -> dict[str, Any]:
    """Build a row of the list. Checks the manifest, file sizes and headers, but not the tensors."""
    row: dict[str, Any] = {"name": path.name, "step": None, "plan": "?", "bytes": None, "size": "?", "state": "good"}
    try:
        manifest = read_manifest(path)
        size = _count_bytes(manifest)
        row |= {"step": manifest.position.step, "plan": manifest.plan, "bytes": size, "size": _format_size(size)}
        reader = CheckpointReader(path, manifest.files, manifest.tensors)
        for file in manifest.files:
            reader.open_file(file)
        if manifest.nonfinite:
            row["state"] = f"not finite: {shorten_names(manifest.nonfinite)}"
    except DamagedFileError as error:
        row["state"] = f"damaged: {error.file}: {error.why}"
    return row


def _read_info(path: Path) -> dict[str, Any]:
    try:
        manifest = read_manifest(path)
    except DamagedFileError as error:
        raise PlaitError(damaged_problem(path, error)) from None
    model = {name: entry for name, entry in manifest.tensors.items() if name.startswith("model/")}
    average = [entry for name, entry in manifest.tensors.items() if name.startswith("ema/")]
    state = [entry for name, entry in manifest.tensors.items() if not name.startswith(("model/", "ema/", EVAL_PREFIX))]
    moved = f"{len(average)} tensors, {sum(e.num_bytes for e in average)} bytes, updated {{moved}} times in {{steps}} steps"
    at = manifest.position
    return {
        "checkpoint": str(path), "step": at.step, "epoch": at.epoch, "samples": at.samples, "plan": manifest.plan,
        "batch": manifest.batch, "seed": manifest.seed, "parent": manifest.parent, "bytes": _count_bytes(manifest),
        "files": len(manifest.files), "tensors": len(model), "elements": sum(math.prod(e.shape) for e in model.values()),
        "formats": sorted({entry.dtype for entry in model.values()}), "tied": manifest.aliases,
        "optimizer": manifest.optimizer.type, "state": f"{len(state)} tensors, {sum(e.num_bytes for e in state)} bytes",
        "average": None if manifest.average is None else moved.format(**structs.asdict(manifest.average)),
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in manifest.optimizer.groups],
        "versions": manifest.versions, "not finite": list(manifest.nonfinite),
        "base": None if manifest.base is None else f"{len(manifest.base.tensors)} frozen tensors of {manifest.base.path}, "
        f"SHA-256 {manifest.base.digest[:12]}…",
    }  # fmt: skip


def _verify_hashes(options: CheckpointOptions, paths: list[Path]) -> int:
    """Verify all hashes. Returns 1 if a checkpoint is damaged or contains values that are not finite."""
    lines, rows = [], []
    for path in paths:
        problems = _check_file(path)
        rows.append({"checkpoint": str(path), "good": not problems, "errors": [vars(p) for p in problems]})
        lines += [f"{path.name}  good" if not problems else "\n".join(map(str, problems))]
    bad = [row for row in rows if not row["good"]]
    siblings = Checkpoints(paths[0].parent).list_published() if bad else []
    names = {row["checkpoint"] for row in bad}
    good = next((p for p in siblings if str(p) not in names and not _check_file(p)), None)
    if bad:
        lines.append(f"the newest good checkpoint is {good}" if good else f"no checkpoint in {paths[0].parent} is good")
    value = {"ok": not bad, "checkpoints": rows, "good": str(good) if good else None}
    return _print_result(options, value if bad else {"ok": True, "checkpoints": rows}, "\n".join(lines), FAILED if bad else 0)


def _check_file(path: Path) -> list[Problem]:
    manifest, problems = verify_checkpoint(path)
    return [*problems, nonfinite_problem(path, manifest.nonfinite)] if manifest and manifest.nonfinite else problems


def _format_size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]?I?)B?", text.strip().upper())
    if match is None or match[2] not in UNITS or float(match[1]) <= 0:
        raise PlaitError(Problem("U002", f"--shard {text} is not a size", fix=("--shard 5GiB",)))
    return int(float(match[1]) * UNITS[match[2]])
