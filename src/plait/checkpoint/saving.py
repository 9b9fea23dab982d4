"""A save in the background: snapshot this rank's chunks, write them in a thread, publish when all ranks have finished.

Training waits for the snapshot only. The thread hashes, writes and syncs this rank's files and leaves a sealed list of them in the build
directory; it never calls a collective. Each step's all-reduce includes `Checkpoints.progress_value`, so the main threads of all ranks see
the end of the save in the same step. Then a thread of rank 0 merges the lists into the manifest and renames the directory.
"""

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint import carried_state, replica_groups
from plait.checkpoint.checkpoint_reader import view_rectangle
from plait.checkpoint.manifest import FORMAT, KINDS, MANIFEST_NAME, parse_manifest, seal_json, unseal_json
from plait.checkpoint.safetensors_file import DamagedFileError, LocalChunk, Rect, intersect_rects, write_safetensors
from plait.tensors.norm import FiniteRule, find_bad_scalars
from plait.tensors.rows import Part


class SaveThread(threading.Thread):
    """A background task. `error`: the exception that it raised. It stops soon after `cancel`."""

    def __init__(self, work: Callable[[Callable[[], bool]], None]):
        super().__init__(daemon=True, name="plait-save")
        self.work = work
        self.error: Exception | None = None
        self.cpu_seconds = 0.0
        """CPU seconds used by the thread."""
        self._cancel = threading.Event()
        self._asked = 0
        self.start()

    def run(self) -> None:
        """Run the task; an exception is kept for the main thread."""
        try:
            self.work(self._cancelled)
        except Exception as error:
            self.error = error
        self.cpu_seconds = time.thread_time()

    def _cancelled(self) -> bool:
        self._asked += 1
        return self._cancel.is_set()

    def wait(self, moves: Callable[[], None]) -> None:
        """Wait until the task has ended; `moves` is called about once a second while it progresses."""
        asked = self._asked
        while self.is_alive():
            self.join(1.0)
            if self._asked != asked:
                asked = self._asked
                moves()

    def cancel(self) -> None:
        """Cancel the task and wait until it has stopped."""
        self._cancel.set()
        self.join()

    @property
    def state(self) -> int:
        """0 while it runs, 1 if it is done, -1 if it failed."""
        return 0 if self.is_alive() else -1 if self.error else 1


class HostSnapshot:
    """Copies of tensors on the CPU, whose memory is reused from save to save (pinned with CUDA)."""

    def __init__(self) -> None:
        self._reused: dict[LocalChunk, Tensor] = {}

    def copy_chunks(self, pieces: list[LocalChunk], parts: Mapping[str, Part]) -> dict[LocalChunk, Tensor]:
        """Copy each chunk; the copies are complete on return."""
        old, self._reused = self._reused, {}
        cuda = False
        with torch.no_grad():
            for piece in pieces:
                part = next(p for p in parts[piece.name].iter_rects() if _contains_rect(p, piece.rect))
                source = view_rectangle(part.tensor, part.start, piece.rect)
                pin = source.device.type == "cuda"
                cuda |= pin
                buffer = old.get(piece)
                if buffer is None:
                    buffer = torch.empty(piece.size, dtype=source.dtype, pin_memory=pin)
                self._reused[piece] = buffer.copy_(source, non_blocking=pin)
        if cuda:
            torch.cuda.synchronize()
        return self._reused


def _contains_rect(part: Part, rect: Rect) -> bool:
    return intersect_rects((part.start, tuple(part.tensor.shape)), rect) == rect or not all(rect[1])


MAX_LISTED = 2048
"""Maximum bytes of a piece's entry in the lists of a checkpoint, and of a file's last partial block."""


def estimate_bytes(shares: list[list[LocalChunk]]) -> int:
    """Return the bytes of a checkpoint in which each rank writes its chunks."""
    return sum(held.num_bytes + MAX_LISTED for share in shares for held in share) + MAX_LISTED * (3 * len(shares) + 2)


def measure_free_bytes(directory: Path) -> float:
    """Return the free bytes of the disk; infinity if the system does not report them."""
    try:
        return shutil.disk_usage(next(p for p in (directory, *directory.parents) if p.exists())).free
    except OSError:
        return math.inf


def write_part(
    building: Path, rank: int, tensors: Mapping[LocalChunk, Tensor], values: dict[str, Any],
    cancelled: Callable[[], bool] = lambda: False, rule: FiniteRule | None = None,
) -> None:  # fmt: skip
    """Write this rank's files and, once they are synced to disk, the sealed list of them.

    `rule`: which tensors must be finite.

    """
    building.mkdir(parents=True, exist_ok=True)
    files, entries = {}, {}
    for kind in KINDS:
        keys = {_chunk_key(held): held for held in tensors if held.name.startswith(f"{kind}/")}
        if not keys:
            continue
        name = f"{kind}-{rank:05d}.safetensors"
        specs = {key: (tensors[held].dtype, held.size) for key, held in keys.items()}
        written = write_safetensors(building / name, specs, lambda key, keys=keys: tensors[keys[key]], cancelled)
        files[name] = {"bytes": written.num_bytes, "header": written.header}
        for key, held in keys.items():
            entry = entries.setdefault(held.name, {"dtype": held.dtype, "shape": held.shape, "pieces": []})
            piece = {"file": name, "key": key, "start": held.start, "size": held.size}
            entry["pieces"].append({**piece, "sha256": written.tensors[key]})
    wrong = (rule or FiniteRule()).find_broken((held.name, t) for held, t in tensors.items())
    wrong += find_bad_scalars(values.get("optimizer", {}).get("scalars", {}))
    content = {**values, "files": files, "tensors": entries, "nonfinite": wrong}
    _write_synced(building / f"part-{rank:05d}.json", seal_json(content))


def _chunk_key(held: LocalChunk) -> str:
    """Return `0.weight` for a full tensor, `0.weight@8,0` for a piece that starts there."""
    name = held.name if held.name.startswith("groups/") else held.name.partition("/")[2]
    return name if held.size == held.shape else f"{name}@{','.join(map(str, held.start))}"


def publish_checkpoint(building: Path, path: Path, world: int, parent: str | None, empty: list[LocalChunk]) -> tuple[str, ...]:
    """Merge the ranks' lists into the manifest and publish the directory by one rename.

    `empty`: tensors without elements, which have no pieces and so appear in no list. Returns the names of nonfinite tensors.

    """
    lists = [building / f"part-{rank:05d}.json" for rank in range(world)]
    content = merge_rank_lists([unseal_json(file.read_bytes(), file.name) for file in lists], parent)
    for held in empty:
        content["tensors"].setdefault(held.name, {"dtype": held.dtype, "shape": held.shape, "pieces": []})
    raw = seal_json(content)
    manifest = parse_manifest(json.loads(raw))
    for name, file in manifest.files.items():
        if (building / name).stat().st_size != file.bytes:
            raise DamagedFileError(name, "its length differs from the written one")
    _write_synced(building / MANIFEST_NAME, raw)
    for file in lists:
        file.unlink()
    sync_directory(building)
    if path.exists():  # a damaged checkpoint that was rejected
        delete_directory(path)
    os.rename(building, path)
    sync_directory(path.parent)
    return manifest.nonfinite


def merge_rank_lists(parts: list[dict[str, Any]], parent: str | None) -> dict[str, Any]:
    """Merge the lists of all ranks into one manifest."""
    result: dict[str, Any] = {**parts[0], "format": FORMAT, "parent": parent}
    tensors: dict[str, Any] = {}
    for part in parts:
        for name, entry in part["tensors"].items():
            tensors.setdefault(name, {**entry, "pieces": []})["pieces"].extend(entry["pieces"])
    result["tensors"] = dict(sorted(tensors.items()))
    for key in ("files", "aliases"):
        result[key] = {name: value for part in parts for name, value in part[key].items()}
    if base := parts[0].get("base"):
        tensors_of = {name: value for part in parts for name, value in part["base"]["tensors"].items()}
        result["base"] = {**base, "tensors": tensors_of}
    named = {f"model/{name}" for name in result["base"]["tensors"]} if base else set()
    result["nonfinite"] = sorted({name for part in parts for name in part["nonfinite"]})
    result["aliases"] = {k: v for k, v in result["aliases"].items() if f"model/{v}" in tensors or f"model/{v}" in named}
    result["carried"] = carried_state.merge_carried([part["carried"] for part in parts])
    result["groups"] = replica_groups.merge_group_values([part.get("groups", {}) for part in parts])
    groups = [dict(group) for group in parts[0]["optimizer"]["groups"]]
    for i, group in enumerate(groups):
        names = (name for part in parts for name in part["optimizer"]["groups"][i]["params"])
        group["params"] = list(dict.fromkeys(names))
    scalars = {name: value for part in reversed(parts) for name, value in part["optimizer"]["scalars"].items()}
    result["optimizer"] = {**parts[0]["optimizer"], "groups": groups, "scalars": scalars}
    return result


def delete_directory(path: Path) -> None:
    """Delete a directory, renaming it first so that a partial one never has its name."""
    gone = path.with_name(f"{path.name}.old")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _write_synced(path: Path, content: bytes) -> None:
    beside = path.with_name(path.name + ".new")
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.rename(beside, path)


def sync_directory(path: Path) -> None:
    """Sync the directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
