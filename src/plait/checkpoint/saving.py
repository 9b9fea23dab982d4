"""A save on its way: copy what this rank writes, let a thread write it, publish when every rank has.

Training waits for the copy only. The thread hashes, writes and syncs this rank's files and leaves a sealed list of them
in the directory being built; no thread ever calls a collective. That all ranks have finished is learnt in the main
thread, by a number that travels with each step's sums (`word`), so all learn it in the same step. Then a thread of
rank 0 merges the lists into the manifest and renames the directory.
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
from plait.checkpoint.manifest import FORMAT, KINDS, MANIFEST, parse, seal, unseal
from plait.checkpoint.reading import rectangle
from plait.checkpoint.safetensors_file import Damaged, HeldChunk, Rect, overlap, write
from plait.tensors.norm import Rule, wrong_scalars
from plait.tensors.rows import Part


class SaveThread(threading.Thread):
    """Something done beside training. `error` is what went wrong. It stops soon after `cancel`."""

    def __init__(self, work: Callable[[Callable[[], bool]], None]):
        super().__init__(daemon=True, name="plait-save")
        self.work = work
        self.error: Exception | None = None
        self.took = 0.0
        """Seconds of a processor."""
        self._cancel = threading.Event()
        self._asked = 0
        self.start()

    def run(self) -> None:
        """Do it; whatever it raises is kept for the main thread."""
        try:
            self.work(self._cancelled)
        except Exception as error:
            self.error = error
        self.took = time.thread_time()

    def _cancelled(self) -> bool:
        self._asked += 1
        return self._cancel.is_set()

    def wait(self, moves: Callable[[], None]) -> None:
        """Wait until it has ended; `moves` is called about once a second while it gets on."""
        asked = self._asked
        while self.is_alive():
            self.join(1.0)
            if self._asked != asked:
                asked = self._asked
                moves()

    def cancel(self) -> None:
        """Ask it to stop, and wait until it has."""
        self._cancel.set()
        self.join()

    @property
    def state(self) -> int:
        """0 while it goes on, 1 when it is done, -1 when it failed."""
        return 0 if self.is_alive() else -1 if self.error else 1


class Snapshot:
    """Copies of tensors on the CPU, their memory used again from save to save (page-locked beside CUDA)."""

    def __init__(self) -> None:
        self._reused: dict[HeldChunk, Tensor] = {}

    def take(self, pieces: list[HeldChunk], parts: Mapping[str, Part]) -> dict[HeldChunk, Tensor]:
        """A copy of each piece, complete when this returns."""
        old, self._reused = self._reused, {}
        cuda = False
        with torch.no_grad():
            for piece in pieces:
                part = next(p for p in parts[piece.name].pieces() if _holds(p, piece.rect))
                source = rectangle(part.tensor, part.start, piece.rect)
                pin = source.device.type == "cuda"
                cuda |= pin
                buffer = old.get(piece)
                if buffer is None:
                    buffer = torch.empty(piece.size, dtype=source.dtype, pin_memory=pin)
                self._reused[piece] = buffer.copy_(source, non_blocking=pin)
        if cuda:
            torch.cuda.synchronize()
        return self._reused


def _holds(part: Part, rect: Rect) -> bool:
    return overlap((part.start, tuple(part.tensor.shape)), rect) == rect or not all(rect[1])


LISTED = 2048
"""Bytes, at most, that a tensor's piece takes in the lists of a checkpoint (place and digest), and a file in its last block."""


def room(shares: list[list[HeldChunk]]) -> int:
    """Bytes that a checkpoint takes in which each rank writes its share."""
    return sum(held.bytes + LISTED for share in shares for held in share) + LISTED * (3 * len(shares) + 2)


def free_bytes(directory: Path) -> float:
    """Bytes that can still be written there; without end where the system cannot tell."""
    try:
        return shutil.disk_usage(next(p for p in (directory, *directory.parents) if p.exists())).free
    except OSError:
        return math.inf


def write_part(
    building: Path, rank: int, tensors: Mapping[HeldChunk, Tensor], values: dict[str, Any],
    cancelled: Callable[[], bool] = lambda: False, rule: Rule | None = None,
) -> None:  # fmt: skip
    """Write this rank's files and, when they are safe on the disk, the sealed list of them.

    `rule`: which tensors are to be finite.
    """
    building.mkdir(parents=True, exist_ok=True)
    files, entries = {}, {}
    for kind in KINDS:
        keys = {_key(held): held for held in tensors if held.name.startswith(f"{kind}/")}
        if not keys:
            continue
        name = f"{kind}-{rank:05d}.safetensors"
        specs = {key: (tensors[held].dtype, held.size) for key, held in keys.items()}
        written = write(building / name, specs, lambda key, keys=keys: tensors[keys[key]], cancelled)
        files[name] = {"bytes": written.bytes, "header": written.header}
        for key, held in keys.items():
            entry = entries.setdefault(held.name, {"dtype": held.dtype, "shape": held.shape, "pieces": []})
            piece = {"file": name, "key": key, "start": held.start, "size": held.size}
            entry["pieces"].append({**piece, "sha256": written.tensors[key]})
    wrong = (rule or Rule()).broken((held.name, t) for held, t in tensors.items())
    wrong += wrong_scalars(values.get("optimizer", {}).get("scalars", {}))
    content = {**values, "files": files, "tensors": entries, "nonfinite": wrong}
    _write_synced(building / f"part-{rank:05d}.json", seal(content))


def _key(held: HeldChunk) -> str:
    """`0.weight` of a whole tensor, `0.weight@8,0` of a piece that begins there."""
    name = held.name if held.name.startswith("groups/") else held.name.partition("/")[2]
    return name if held.size == held.shape else f"{name}@{','.join(map(str, held.start))}"


def publish(building: Path, path: Path, world: int, parent: str | None, empty: list[HeldChunk]) -> tuple[str, ...]:
    """Merge the ranks' lists into the manifest and make the directory a checkpoint by one rename.

    `empty` are tensors without elements: they have no pieces, so no list has them. Returns the names of what is not finite.
    """
    lists = [building / f"part-{rank:05d}.json" for rank in range(world)]
    content = merge([unseal(file.read_bytes(), file.name) for file in lists], parent)
    for held in empty:
        content["tensors"].setdefault(held.name, {"dtype": held.dtype, "shape": held.shape, "pieces": []})
    raw = seal(content)
    manifest = parse(json.loads(raw))
    for name, file in manifest.files.items():
        if (building / name).stat().st_size != file.bytes:
            raise Damaged(name, "it is not as long as it was written")
    _write_synced(building / MANIFEST, raw)
    for file in lists:
        file.unlink()
    sync_directory(building)
    if path.exists():  # a damaged one that was refused, or it would not have come to this
        discard(path)
    os.rename(building, path)
    sync_directory(path.parent)
    return manifest.nonfinite


def merge(parts: list[dict[str, Any]], parent: str | None) -> dict[str, Any]:
    """One manifest from what each rank wrote down."""
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
    result["carried"] = carried_state.merged([part["carried"] for part in parts])
    result["groups"] = replica_groups.merged([part.get("groups", {}) for part in parts])
    groups = [dict(group) for group in parts[0]["optimizer"]["groups"]]
    for i, group in enumerate(groups):
        names = (name for part in parts for name in part["optimizer"]["groups"][i]["params"])
        group["params"] = list(dict.fromkeys(names))
    scalars = {name: value for part in reversed(parts) for name, value in part["optimizer"]["scalars"].items()}
    result["optimizer"] = {**parts[0]["optimizer"], "groups": groups, "scalars": scalars}
    return result


def discard(path: Path) -> None:
    """Delete a directory such that no moment shows half of it under its name."""
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
    """The names in it are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
