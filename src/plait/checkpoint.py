"""Checkpoints: a directory of safetensors and a JSON manifest, published by one rename, every byte under a digest.

    checkpoints/step-000200/manifest.json      what is inside, where the run was, and a digest of every file
    checkpoints/step-000200/model.safetensors
    checkpoints/step-000200/optimizer.safetensors

A save writes beside the old checkpoints, syncs, and renames; whatever moment it is killed at, the previous one is
whole. A load checks the manifest's own digest and each file's size and digest before it believes a byte. Nothing is
pickled, so loading runs no code.
"""

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from plait.data import Position
from plait.errors import FAILED, PlaitError, Problem

if TYPE_CHECKING:
    from plait.engine import Engine

FORMAT = 1
MANIFEST = "manifest.json"


class Checkpoints:
    """The checkpoints in a directory."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.refused: list[Problem] = []
        """Damaged checkpoints that `resume` passed over."""

    def found(self) -> list[Path]:
        """Published checkpoints, newest first."""
        return sorted(
            (p for p in self.directory.glob("step-*") if p.is_dir() and p.name[5:].isdigit()),
            key=lambda p: -int(p.name[5:]),
        )

    def save(self, engine: "Engine", keep: int) -> Path:
        """Write the engine's state; every rank calls it, rank 0 writes (the copies are equal), all wait."""
        path = self.directory / f"step-{engine.position.step:06d}"
        problem: Problem | None = None
        if engine.place.rank == 0 and not path.exists():
            try:
                self._write(path, *_state(engine))
                self._prune(keep)
            except OSError as error:
                problem = _unwritable(path, error)
        if engine.built.reducer is not None:
            failed = torch.tensor([problem is not None], dtype=torch.int32, device=engine.built.device)
            dist.broadcast(failed, 0, group=engine.built.group)
            if failed.item() and problem is None:
                problem = Problem("K004", f"rank 0 could not write {path}")
        if problem is not None:
            raise PlaitError(problem, FAILED)
        return path

    def _write(self, path: Path, files: dict[str, dict[str, Tensor]], manifest: dict[str, Any]) -> None:
        building = path.with_name(path.name + ".tmp")
        if building.exists():
            shutil.rmtree(building)
        building.mkdir(parents=True)
        try:
            manifest["files"] = {}
            for name, tensors in files.items():
                content = save_tensors(tensors)
                _write_synced(building / name, content)
                manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            manifest["digest"] = _digest(manifest)
            _write_synced(building / MANIFEST, json.dumps(manifest, indent=1).encode())
            _sync_directory(building)
            os.rename(building, path)
            _sync_directory(path.parent)
        except OSError:
            shutil.rmtree(building, ignore_errors=True)
            raise

    def _prune(self, keep: int) -> None:
        for old in self.found()[max(1, keep) :]:
            gone = old.with_name(old.name + ".old")
            os.rename(old, gone)  # a half-deleted directory must not look like a checkpoint
            shutil.rmtree(gone, ignore_errors=True)

    def resume(self, engine: "Engine", missing_ok: bool) -> Path | None:
        """Load the newest good checkpoint into the engine. K001: none; K002: none is good; K003: of another job."""
        self.refused = []
        for path in self.found():
            try:
                manifest, files = read(path)
            except PlaitError as error:
                self.refused += error.problems
                continue
            _restore(engine, path, manifest, files)
            return path
        if self.refused:
            raise PlaitError(self.refused)
        if missing_ok:
            return None
        raise PlaitError(
            Problem(
                "K001",
                f"there is no checkpoint in {self.directory}",
                why="nothing was saved yet",
                fix=("start without --resume",),
            )
        )


def read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """(manifest, tensors by file) of a checkpoint, every byte checked. K002 names the file that is not what it was."""
    manifest = read_manifest(path)
    files = {}
    for name, expected in manifest["files"].items():
        if Path(name).name != name or name in ("", ".", ".."):
            raise _damaged(path, name, "the name leaves the checkpoint's directory")
        file = path / name
        if file.is_symlink() or not file.is_file():
            raise _damaged(path, name, "the file is missing")
        content = file.read_bytes()
        if len(content) != expected["bytes"]:
            raise _damaged(path, name, f"{len(content)} bytes, the manifest says {expected['bytes']}")
        if hashlib.sha256(content).hexdigest() != expected["sha256"]:
            raise _damaged(path, name, "its bytes are not those that were saved (SHA-256 differs)")
        try:
            files[name] = load_tensors(content)
        except SafetensorError as error:
            raise _damaged(path, name, str(error)) from None
    return manifest, files


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, its own digest checked."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        good = isinstance(manifest, dict) and manifest.get("digest") == _digest(manifest)
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, MANIFEST, str(error)) from None
    if not good:
        raise _damaged(path, MANIFEST, "its content is not what was saved (digest differs)")
    if manifest["format"] != FORMAT:
        raise _damaged(path, MANIFEST, f"format {manifest['format']}, this plait reads {FORMAT}")
    return manifest


def _state(engine: "Engine") -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    model, aliases = _without_aliases(engine.model.state_dict())
    tensors, scalars, groups = _optimizer_state(engine.optimizer, engine.built.names or {})
    try:
        position = json.loads(json.dumps(asdict(engine.position)))
    except TypeError as error:
        raise PlaitError(
            Problem("K005", "the data set's state_dict() is not made of JSON values", why=str(error))
        ) from None
    manifest = {
        "format": FORMAT,
        "position": position,
        "plan": str(engine.plan),
        "seed": engine.job.seed,
        "batch": engine.job.batch,
        "torch": torch.__version__,
        "aliases": aliases,
        "optimizer": {"type": type(engine.optimizer).__name__, "scalars": scalars, "groups": groups},
        "scaler": engine.built.scaler.state_dict() if engine.built.scaler else None,
    }
    return {"model.safetensors": model, "optimizer.safetensors": tensors}, manifest


def _without_aliases(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by name, each storage once, and name -> kept name for tied ones."""
    kept: dict[tuple[Any, ...], str] = {}
    tensors, aliases = {}, {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            continue
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in kept:
            aliases[name] = kept[place]
        else:
            kept[place] = name
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    return tensors, aliases


def _optimizer_state(
    optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> tuple[dict[str, Tensor], dict[str, Any], list[dict[str, Any]]]:
    tensors, scalars = {}, {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            name = f"{names[id(parameter)]}/{key}"
            if isinstance(value, Tensor):
                tensors[name] = value.detach().cpu().contiguous().clone()
            elif value is None or isinstance(value, (bool, int, float, str)):
                scalars[name] = value
            else:
                raise PlaitError(
                    Problem("K005", f"optimizer state {name} is a {type(value).__name__}, which cannot be saved")
                )
    groups = []
    for group in optimizer.param_groups:
        plain = {
            k: v
            for k, v in group.items()
            if k != "params" and (v is None or isinstance(v, (bool, int, float, str, list, tuple)))
        }
        groups.append({**plain, "params": [names[id(p)] for p in group["params"]]})
    return tensors, scalars, groups


def _restore(engine: "Engine", path: Path, manifest: dict[str, Any], files: dict[str, dict[str, Tensor]]) -> None:
    saved = files["model.safetensors"]
    saved |= {alias: saved[name] for alias, name in manifest["aliases"].items()}
    own = {k: v for k, v in engine.model.state_dict().items() if isinstance(v, Tensor)}
    wrong = sorted(set(saved) ^ set(own)) + [k for k in own if k in saved and own[k].shape != saved[k].shape]
    groups = [[(engine.built.names or {})[id(p)] for p in g["params"]] for g in engine.optimizer.param_groups]
    if wrong or groups != [g["params"] for g in manifest["optimizer"]["groups"]] or manifest["seed"] != engine.job.seed:
        why = (
            f"{len(wrong)} tensors differ: {', '.join(wrong[:3])}"
            if wrong
            else "the parameter groups or the seed differ"
        )
        raise PlaitError(
            Problem(
                "K003",
                f"{path} was saved by another job",
                why=why,
                fix=("resume with the job and the --job arguments it was started with",),
            )
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])
    _restore_optimizer(engine, manifest["optimizer"], files["optimizer.safetensors"])
    if engine.built.scaler and manifest["scaler"]:
        engine.built.scaler.load_state_dict(manifest["scaler"])
    engine.position = Position(**manifest["position"])


def _restore_optimizer(engine: "Engine", saved: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    index = {name: i for i, name in enumerate(n for g in saved["groups"] for n in g["params"])}
    state: dict[int, dict[str, Any]] = {}
    for name, value in [*tensors.items(), *saved["scalars"].items()]:
        parameter, _, key = name.rpartition("/")
        state.setdefault(index[parameter], {})[key] = value
    current = engine.optimizer.state_dict()
    for mine, theirs in zip(current["param_groups"], saved["groups"]):
        mine.update({k: tuple(v) if isinstance(mine.get(k), tuple) else v for k, v in theirs.items() if k != "params"})
    engine.optimizer.load_state_dict({"state": state, "param_groups": current["param_groups"]})


def _digest(manifest: dict[str, Any]) -> str:
    content = {k: v for k, v in manifest.items() if k != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _unwritable(path: Path, error: OSError) -> Problem:
    why = str(error)
    with contextlib.suppress(OSError):
        why += f"; {shutil.disk_usage(path.parent).free / 2**20:.1f} MiB are free there"
    return Problem(
        "K004",
        f"the checkpoint {path} could not be written",
        why=why,
        fix=("make room, then --resume: earlier checkpoints are untouched",),
    )


def _damaged(path: Path, name: str, why: str) -> PlaitError:
    return PlaitError(
        Problem(
            "K002", f"{path}/{name} is damaged", why=why, fix=("the checkpoint before it is used when there is one",)
        )
    )
