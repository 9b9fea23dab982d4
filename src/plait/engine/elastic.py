"""Restart a run after a lost rank: its state is kept in memory, and the launcher forks the ranks again (torch's *elastic*).

The state is kept in three places. The newest complete one is used:

    survivors     a rank that loses another writes its own state; if survivors together hold every shard, no step is lost
    snapshots     ranks copy their shards to memory every few steps, at a cost of at most 2 % of a step
    checkpoints   those of the run, on disk

The first two are in shared memory, in a folder that is removed when the launcher ends for any reason. They have the format of
checkpoints. A run that restarts from one makes the same steps with the same samples and random numbers, and ends with the same
weights.

Snapshots on several nodes: each node stores the shards of its own ranks, and a copy of those of a peer node's ranks.

Memory is not shared between nodes, so no node has the full state, and nothing is published: a snapshot is a folder of parts on each
node. When a rank is lost, the parts of all nodes are collected. When a node is lost, its peer has its parts. Ranks exchange parts
over a separate process group, in the writer thread.
"""

import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from plait.checkpoint import training_state
from plait.checkpoint.carried_state import Training, exchange_json
from plait.checkpoint.checkpoints import Checkpoints, PendingSave
from plait.checkpoint.manifest import seal_json, unseal_json
from plait.checkpoint.safetensors_file import DTYPES, DamagedFileError, ShardFile, find_tiling_error, write_safetensors
from plait.checkpoint.saving import HostSnapshot, estimate_bytes, measure_free_bytes, publish_checkpoint, write_part
from plait.config.errors import PlaitError
from plait.engine.engine import Engine
from plait.launch import limits
from plait.launch.child import fork_process
from plait.launch.failures import BETWEEN_STEP_CODES, describe_error
from plait.launch.node_rows import StoredSteps
from plait.launch.place import count_cores
from plait.launch.scratch import ScratchFolder
from plait.launch.stopping import WARNING_SIGNALS

PARTS_PREFIX = "pieces-"
"""Prefix of the folder of a step's parts; the step number follows."""
KEPT_SNAPSHOTS = 2
"""Snapshots that a node keeps: the newest may differ by one between nodes."""
NO_SNAPSHOTS = "no in-memory snapshots"
"""Start of the note that says why a run has none."""


@dataclass(frozen=True)
class SnapshotPeers:
    """The rank on another node that receives this rank's parts, and the ranks whose parts this one receives."""

    target: int
    sources: tuple[int, ...]
    stored_ranks: int
    """Ranks whose parts are stored on this node."""


class PeerSnapshots(Checkpoints):
    """Snapshots of which this node stores the parts of its own ranks and of their peers. All ranks construct it."""

    def __init__(self, directory: Path, peers: SnapshotPeers):
        super().__init__(directory)
        self.peers = peers
        group = dist.new_group(backend="gloo")
        assert isinstance(group, ProcessGroup)
        self.group = group

    def is_publisher(self, training: Training) -> bool:
        """Return True: every rank tries to publish, and the first one of a node succeeds."""
        return True

    def wrap_writer(self, work: Callable[[Callable[[], bool]], None], building: Path) -> Callable[[Callable[[], bool]], None]:
        """Write this rank's part, then exchange it with the peers."""

        def write_and_exchange(cancelled: Callable[[], bool]) -> None:
            work(cancelled)
            self._exchange(building)

        return write_and_exchange

    def publish_save(self, flight: PendingSave, ranks: int) -> None:
        """Publish the snapshot of this node once all its ranks have written their parts."""
        step = int(flight.path.name[5:])
        with contextlib.suppress(OSError):  # another rank of this node was first
            os.rename(flight.build_dir, flight.path.with_name(f"{PARTS_PREFIX}{step}"))
            for old in sorted(self.directory.glob(f"{PARTS_PREFIX}*"), key=lambda p: -int(p.name.removeprefix(PARTS_PREFIX)))[
                KEPT_SNAPSHOTS:
            ]:
                shutil.rmtree(old, ignore_errors=True)

    def _exchange(self, building: Path) -> None:
        """Send this rank's files to its peer on the next node, and write the files it receives."""
        rank = dist.get_rank()
        files = sorted(building.glob(f"*-{rank:05d}.*"))
        names = json.dumps([[file.name, file.stat().st_size] for file in files]).encode()
        sent: list[Any] = []
        for payload in (
            torch.tensor([len(names)]),
            torch.frombuffer(bytearray(names), dtype=torch.uint8),
            *map(_map_file, files),
        ):
            sent.append((dist.isend(payload, self.peers.target, group=self.group), payload))
        for source in self.peers.sources:
            self._receive(source, building)
        for work, _ in sent:
            work.wait()

    def _receive(self, source: int, building: Path) -> None:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, source, group=self.group)
        names = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(names, source, group=self.group)
        come: list[tuple[Path, Path]] = []
        for name, size in json.loads(bytes(names.tolist())):
            beside = building / f".{Path(name).name}"
            content = torch.from_file(str(beside), shared=True, size=size, dtype=torch.uint8)
            dist.recv(content, source, group=self.group)
            come.append((beside, building / Path(name).name))
        for beside, place in sorted(come, key=lambda pair: pair[1].suffix == ".json"):  # the index of the files last
            os.rename(beside, place)


def _map_file(file: Path) -> torch.Tensor:
    return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)


MAX_COST = 0.02
"""Maximum fraction of a step's time to spend on snapshots."""
SPACE_FACTOR = 2.5
"""Required free shared memory, in snapshot sizes: the next snapshot is written before the previous one is removed."""
SURVIVORS_FOLDER, TENSOR_LIST, METRICS_FILE = "handed", "tensors.json", "metrics.json"
"""Names in the folder: states of survivors, the list of all tensors, and the metrics of the survivors' last step."""


class SnapshotStore:
    """The launcher's side: the snapshot folder in shared memory, and its recovery between two starts."""

    def __init__(self) -> None:
        shared = Path("/dev/shm")
        self._scratch = ScratchFolder("memory", shared if os.access(shared, os.W_OK) else None)
        self.path = self._scratch.path
        try:
            with limits.catch_fork_failure("the process that frees snapshots"):
                self._exit_pipe = _remove_at_exit(self.path)
        except BaseException:
            self._scratch.close()
            raise

    def close(self) -> None:
        os.close(self._exit_pipe)
        self._scratch.close()

    def begin(self) -> None:
        """Remove the survivors' states of the previous attempt before ranks start."""
        shutil.rmtree(self.path / SURVIVORS_FOLDER, ignore_errors=True)

    def collect(self) -> None:
        """Make checkpoints of the states that ranks left behind."""
        for step, folder in self._find_parts():  # every rank had written its part, but none was notified
            with contextlib.suppress(OSError, ValueError, DamagedFileError, PlaitError):
                ranks = len(list(folder.glob("part-*.json")))
                whole = self.path / _get_step_name(step)
                if ranks and not whole.exists() and self._is_complete(_read_parts(folder)):
                    publish_checkpoint(folder, whole, ranks, None, [])
        newest = Checkpoints(self.path).newest_step
        for step in sorted(_find_survivors(self.path / SURVIVORS_FOLDER), reverse=True):
            if step > newest and self._publish_survivors(self.path / SURVIVORS_FOLDER, step):
                os.rename(self.path / SURVIVORS_FOLDER / _get_step_name(step), self.path / _get_step_name(step))
                return

    def _find_parts(self) -> list[tuple[int, Path]]:
        """List snapshots that are not yet checkpoints: unfinished ones, and this node's part of one."""
        under_way = [(int(path.name[5:].partition(".")[0]), path) for path in self.path.glob("step-*.tmp-*")]
        return sorted([*under_way, *((int(p.name.removeprefix(PARTS_PREFIX)), p) for p in self.path.glob(f"{PARTS_PREFIX}*"))])

    def _publish_survivors(self, survivors: Path, step: int) -> bool:
        """Publish a checkpoint of the survivors' states of a step if they are complete. Returns whether they are."""
        with contextlib.suppress(OSError, ValueError, DamagedFileError, PlaitError):
            folders = _find_survivors(survivors)[step]
            building = _merge_folders(folders, survivors / f"{_get_step_name(step)}.joined")
            if self._is_complete(_read_parts(building)):
                publish_checkpoint(building, survivors / _get_step_name(step), len(list(building.glob("part-*.json"))), None, [])
                with contextlib.suppress(OSError):
                    shutil.copy(folders[0] / METRICS_FILE, self.path / METRICS_FILE)
                return True
        return False

    # Several nodes

    def list_states(self) -> StoredSteps:
        """List the states that this node has in memory."""
        complete = tuple(int(path.name[5:]) for path in Checkpoints(self.path).list_published())
        return StoredSteps(complete, tuple(sorted({*_find_survivors(self.path / SURVIVORS_FOLDER), *(step for step, _ in self._find_parts())})))

    def copy_step(self, step: int, target: Path) -> dict[str, Any] | None:
        """Copy this node's data of a step to a folder visible to all nodes. Returns the metrics of the step."""
        whole, mine = self.path / _get_step_name(step), secrets.token_hex(4)
        if whole.exists():
            shutil.copytree(whole, target / whole.name)
        else:
            pieces = [path for n, path in self._find_parts() if n == step]
            for number, folder in enumerate([*_find_survivors(self.path / SURVIVORS_FOLDER).get(step, []), *pieces]):
                shutil.copytree(folder, target / f"step-{step}-rank-{mine}{number}")
        with contextlib.suppress(OSError, ValueError):
            found = [self.path / METRICS_FILE, *(folder / METRICS_FILE for folder in _find_survivors(self.path / SURVIVORS_FOLDER).get(step, []))]
            rows = (json.loads(file.read_text()) for file in found if file.exists())
            return next((row for row in rows if row["step"] == step), None)
        return None

    def publish_step(self, collected: Path, step: int, checkpoints: Path) -> bool:
        """Publish a checkpoint of the parts that nodes collected. Returns whether they were complete."""
        whole = collected / _get_step_name(step)
        with contextlib.suppress(OSError):
            if whole.exists() or self._publish_survivors(collected, step):
                os.rename(whole, checkpoints / whole.name)
                return True
        return False

    def save_newest(self, checkpoints: Path) -> Path | None:
        """Copy the newest checkpoint in memory to disk if the disk has none as new. Returns its path, or None if it was not copied."""
        found = Checkpoints(self.path).list_published()
        if not found or int(found[0].name[5:]) <= Checkpoints(checkpoints).newest_step:
            return None
        building, path = checkpoints / f"{found[0].name}.tmp-memory", checkpoints / found[0].name
        try:
            shutil.copytree(found[0], building)
            os.rename(building, path)
        except OSError:
            shutil.rmtree(building, ignore_errors=True)
            return None
        return path

    def write_metrics(self, metrics: dict[str, Any] | None) -> None:
        """Store the metrics of the step to restart from, if another node had them."""
        if metrics is not None:
            (self.path / METRICS_FILE).write_text(json.dumps(metrics))

    def _is_complete(self, parts: list[dict[str, Any]]) -> bool:
        """Return whether the parts together cover every tensor exactly once, with the carried state of each rank."""
        alone = any(part["carried"]["values"] and not part["carried"]["of_all"] for part in parts)
        if alone and len(parts) < parts[0]["carried"]["world"]:
            return False
        wanted = set(json.loads((self.path / TENSOR_LIST).read_text()))
        pieces: dict[str, set[tuple[Any, ...]]] = {}
        shapes: dict[str, list[int]] = {}
        for part in parts:
            for name, entry in part["tensors"].items():
                shapes[name] = entry["shape"]
                pieces.setdefault(name, set()).update((tuple(p["start"]), tuple(p["size"])) for p in entry["pieces"])
        return wanted <= set(shapes) and not any(find_tiling_error(shapes[name], pieces[name]) for name in shapes)


class InMemoryCheckpointer:
    """The rank's side: snapshots during training, and the state it writes when another rank is lost."""

    def __init__(self, engine: Engine, folder: Path, peers: SnapshotPeers | None = None):
        self.engine, self.folder, self.peers = engine, folder, peers
        engine.memory = Checkpoints(folder) if peers is None else PeerSnapshots(folder, peers)
        self.next_step = 0
        """The step after which the next snapshot is taken; the first is taken after the first step."""
        self.period_start = time.monotonic()
        self.steps, self.snapshot_count, self.cost = 0, 0, 0.0
        self.has_tensor_list: bool | None = None
        """Whether the names of the tensors were written; None before the first attempt."""
        self.notes: list[str] = []
        """Notes for the terminal: how often snapshots are taken, or why there are none."""
        if engine.plan.rarely:
            self._disable(
                "replica groups would have to wait for each other to agree on one; after a lost rank the run restarts from a checkpoint"
            )

    @property
    def is_due(self) -> bool:
        """Whether a snapshot is due after this step, if memory permits."""
        return self.engine.memory is not None and self.engine.position.step >= self.next_step

    def end_step(self) -> None:
        """Count a step, and take a snapshot if one is due. All ranks agree on the next one."""
        engine, self.steps = self.engine, self.steps + 1
        if engine.memory is None:
            return
        if self.has_tensor_list is None:
            self.has_tensor_list = self._write_tensor_list()
        if not self.is_due:
            return
        began = time.monotonic()
        each = max((began - self.period_start - self.cost) / self.steps, 1e-6)
        said = exchange_json(engine, {"cost": self.cost + self._get_write_cost(), "each": each, "room": self.has_tensor_list and self._has_room()})
        if not all(word["room"] for word in said):
            self._disable("not enough free memory")
            return
        self.snapshot_count, period = self.snapshot_count + 1, 1
        if self.snapshot_count > 2:  # the first snapshot is slow, as is the step before it
            period = max(1, math.ceil(max(word["cost"] for word in said) / MAX_COST / max(word["each"] for word in said)))
            if self.snapshot_count == 3:
                self.notes.append(f"note  taking an in-memory snapshot every {period} steps, to restart after a lost rank")
        try:
            engine.memory.save(engine, 1, wait=False)
        except PlaitError as error:  # on all ranks
            self._disable(error.problems[0].why)
        self.next_step = engine.position.step + period
        self.cost, self.steps, self.period_start = time.monotonic() - began, 0, began

    def _disable(self, why: str) -> None:
        self.engine.memory = None
        self.notes.append(f"note  {NO_SNAPSHOTS} in {self.folder.parent}: {why}")

    def _write_tensor_list(self) -> bool:
        """Write the names of all tensors, together with all ranks, once the optimizer has state. Returns whether memory sufficed."""
        said = exchange_json(self.engine, {"names": list(training_state.collect_parts(self.engine))})
        beside = self.folder / f"{TENSOR_LIST}-{os.getpid()}"
        try:
            beside.write_text(json.dumps(sorted({name for word in said for name in word["names"]})))
            os.replace(beside, self.folder / TENSOR_LIST)  # all ranks of a node write the same content
        except OSError:
            return False
        return True

    def restore(self) -> tuple[Path | None, str]:
        """Load the newest complete state, from memory or disk. Returns its path and a description. All ranks call it."""
        engine, memory, useless = self.engine, self.engine.memory, ""
        if self.peers is None and memory is not None and memory.newest_step > engine.checkpoints.newest_step:
            try:
                path = memory.resume(engine, missing_ok=True)
                if path is not None:
                    return path, "from an in-memory snapshot"
            except PlaitError as error:  # fall back to the disk
                useless = f", since the in-memory snapshot cannot be used: {error.problems[0].what}"
        path = engine.resume(missing_ok=True)
        return path, (f"of {path}" if path else "from the beginning") + useless

    def _get_write_cost(self) -> float:
        """Return the processor seconds that the last snapshot's writer thread took from steps, if ranks share processors."""
        memory = self.engine.memory
        if memory is None or self.engine.rank_model.device.type != "cpu":
            return 0.0
        return memory.save_seconds * max(1.0, self.engine.place.world / count_cores())

    def _has_room(self) -> bool:
        held = training_state.list_local_chunks(training_state.collect_parts(self.engine))
        ranks = self.engine.place.world if self.peers is None else self.peers.stored_ranks
        return SPACE_FACTOR * ranks * estimate_bytes([held]) < measure_free_bytes(self.folder)

    def read_metrics(self) -> dict[str, Any] | None:
        """Return the metrics of the restored step, if survivors saved them."""
        with contextlib.suppress(OSError, ValueError):
            row = json.loads((self.folder / METRICS_FILE).read_text())
            return row if row["step"] == self.engine.position.step else None
        return None

    def save_survivor_state(self, error: BaseException, metrics: dict[str, Any]) -> None:
        """After a failure of another rank or a bad sample, write this rank's state as it was before the failed step."""
        engine, sample = self.engine, isinstance(error, PlaitError) and error.codes[0] in BETWEEN_STEP_CODES
        if not (sample or describe_error(error)["sort"] == "peer") or not engine.has_complete_state() or engine.position.step < 1:
            return
        with contextlib.suppress(Exception):  # if this fails, the previous snapshot is used
            engine.undo_step()
            if (carried := engine.carried.snapshot_survivor()) is None:
                return  # the lost rank's carried state is gone
            rank, world = engine.place.rank, engine.place.world
            parts, values = training_state.collect_parts(engine) | carried.checkpoint_parts(rank), training_state.collect_values(engine)
            values["carried"] = carried.to_manifest(rank, world, of_all=True)
            held = [
                one for one in training_state.list_local_chunks(parts) if one.num_bytes or 0 in one.shape
            ]  # a shard of a tensor may be empty
            if all(one.num_bytes for one in held) and 2 * estimate_bytes([held]) < measure_free_bytes(self.folder):
                place = self.folder / SURVIVORS_FOLDER / f"step-{engine.position.step}-rank-{engine.place.rank}"
                building = place.with_name(f".{place.name}")
                write_part(building, engine.place.rank, HostSnapshot().copy_chunks(held, parts), values, rule=engine.rule)
                (building / METRICS_FILE).write_text(json.dumps(metrics))
                os.rename(building, place)


def _get_step_name(step: int) -> str:
    return f"step-{step:06d}"


def _find_survivors(folder: Path) -> dict[int, list[Path]]:
    """Find the folders that survivors wrote, by step."""
    by_step: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("step-*-rank-*")):
        by_step.setdefault(int(path.name.split("-")[1]), []).append(path)
    return by_step


def _read_parts(folder: Path) -> list[dict[str, Any]]:
    return [unseal_json(file.read_bytes(), file.name) for file in sorted(folder.glob("part-*.json"))]


def _merge_folders(folders: list[Path], building: Path) -> Path:
    """Merge several part folders into one; of duplicate parts, the first is used."""
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    known: set[tuple[Any, ...]] = set()
    parts = [(folder, part) for folder in sorted(folders) for part in _read_parts(folder)]
    for number, (folder, part) in enumerate(parts):
        by_file: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        for name, entry in part["tensors"].items():
            place = lambda p, name=name: (name, tuple(p["start"]), tuple(p["size"]))  # noqa: E731
            entry["pieces"] = [p for p in entry["pieces"] if place(p) not in known]
            known |= set(map(place, entry["pieces"]))
            for piece in entry["pieces"]:
                by_file.setdefault(piece["file"], []).append((entry["dtype"], piece))
        files = {}
        for file, pieces in by_file.items():
            new = f"{file.partition('-')[0]}-{number:05d}.safetensors"
            files[new] = _rewrite_file(ShardFile(folder / file, *part["files"][file].values()), pieces, building / new)
            for _, piece in pieces:
                piece["file"] = new
        part["files"] = files
        (building / f"part-{number:05d}.json").write_bytes(seal_json(part))
    return building


def _rewrite_file(file: ShardFile, pieces: list[tuple[str, dict[str, Any]]], path: Path) -> dict[str, Any]:
    """Copy some tensors of a file to a new file. Returns its manifest entry."""
    specs = {piece["key"]: (DTYPES[dtype], tuple(piece["size"])) for dtype, piece in pieces}
    written = write_safetensors(path, specs, file.read_tensor)
    return {"bytes": written.num_bytes, "header": written.header}


def _remove_at_exit(folder: Path) -> int:
    """Fork a process that removes the folder when this process ends, or earlier when the returned descriptor is closed.

    The process is not a child of this one: no wait is needed, and killing this process group does not end it.
    """
    reading, writing = os.pipe()
    between = fork_process()
    if between == 0:
        with contextlib.suppress(BaseException):
            os.setsid()
            if fork_process() == 0:
                for number in (signal.SIGINT, signal.SIGHUP, *WARNING_SIGNALS):
                    signal.signal(number, signal.SIG_IGN)
                os.closerange(0, reading)
                os.closerange(reading + 1, 1 << 16)
                os.read(reading, 1)  # no process writes: it returns when the other end is closed everywhere
                shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    os.waitpid(between, 0)
    os.close(reading)
    return writing
