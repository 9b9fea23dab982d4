"""A run goes on although a rank is lost: its state is kept in memory, and the launcher forks the ranks again (torch's *elastic*).

The state is kept in three places, and the one with the newest whole step counts:

    survivors     a rank that loses another writes what it holds; where they hold copies of everything, no step is lost
    snapshots     every few steps ranks copy their parts, as often as costs 2 % of a step at most
    checkpoints   those of the run, on the disk

The first two lie in shared memory, in a folder that goes with the launcher, whatever ends it. They are checkpoints like any other, so a
run that goes on from one makes the same steps with the same samples and random numbers, and ends with the same weights.

Snapshots on several machines: each keeps in its memory what its own ranks wrote, and a copy of what a neighbour's ranks wrote.

Memory is not shared between machines, so nobody has the whole state, and nothing is published: a snapshot is a folder of pieces on
each machine. When a rank is lost, the pieces of all machines are brought together; when a whole machine is lost,
its neighbour has its pieces. What ranks send each other goes over a group of its own, in the thread that writes.
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

from plait.checkpoint import state
from plait.checkpoint.carried_state import Training, exchange_json
from plait.checkpoint.checkpoints import Checkpoints, PendingSave
from plait.checkpoint.manifest import seal, unseal
from plait.checkpoint.safetensors_file import DTYPES, Damaged, ShardFile, write, wrong_tiling
from plait.checkpoint.saving import Snapshot, free_bytes, publish, room, write_part
from plait.config.errors import PlaitError
from plait.engine.engine import Engine
from plait.launch import limits
from plait.launch.failures import BETWEEN, described
from plait.launch.node_rows import Held
from plait.launch.place import cores
from plait.launch.scratch import Scratch
from plait.launch.stopping import WARNINGS

PIECES = "pieces-"
"""The folder of a step's pieces is called so, and has the step's number."""
KEPT = 2
"""Snapshots that a machine keeps: machines may differ by one in which is the newest."""


@dataclass(frozen=True)
class Neighbours:
    """Which rank of another machine gets a copy of this one's pieces, and whose copies this one gets."""

    to: int
    of: tuple[int, ...]
    kept: int
    """Ranks whose pieces lie on this machine."""


class Pieces(Checkpoints):
    """Snapshots of which this machine has its ranks' pieces and those of their neighbours. All ranks make one."""

    def __init__(self, directory: Path, neighbours: Neighbours):
        super().__init__(directory)
        self.neighbours = neighbours
        group = dist.new_group(backend="gloo")
        assert isinstance(group, ProcessGroup)
        self.group = group

    def publishes(self, training: Training) -> bool:
        """Every rank tries to; the first one of a machine does."""
        return True

    def write(self, work: Callable[[Callable[[], bool]], None], building: Path) -> Callable[[Callable[[], bool]], None]:
        """Write this rank's part, and exchange it."""

        def both(cancelled: Callable[[], bool]) -> None:
            work(cancelled)
            self._exchange(building)

        return both

    def publish(self, flight: PendingSave, ranks: int) -> None:
        """Every rank of this machine has its pieces: now they count."""
        step = int(flight.path.name[5:])
        with contextlib.suppress(OSError):  # another rank of this machine was first
            os.rename(flight.building, flight.path.with_name(f"{PIECES}{step}"))
            for old in sorted(self.directory.glob(f"{PIECES}*"), key=lambda p: -int(p.name.removeprefix(PIECES)))[
                KEPT:
            ]:
                shutil.rmtree(old, ignore_errors=True)

    def _exchange(self, building: Path) -> None:
        """Send this rank's files to a rank of the next machine, and write those that come."""
        rank = dist.get_rank()
        files = sorted(building.glob(f"*-{rank:05d}.*"))
        names = json.dumps([[file.name, file.stat().st_size] for file in files]).encode()
        sent: list[Any] = []
        for payload in (
            torch.tensor([len(names)]),
            torch.frombuffer(bytearray(names), dtype=torch.uint8),
            *map(_mapped, files),
        ):
            sent.append((dist.isend(payload, self.neighbours.to, group=self.group), payload))
        for source in self.neighbours.of:
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
        for beside, place in sorted(come, key=lambda pair: pair[1].suffix == ".json"):  # the list of the files last
            os.rename(beside, place)


def _mapped(file: Path) -> torch.Tensor:
    return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)


SHARE = 0.02
"""Of a step's time that snapshots may cost."""
SPARE = 2.5
"""Shared memory must have this many times the room of a snapshot: the next one is written beside it."""
HANDED, TENSORS, METRICS = "handed", "tensors.json", "metrics.json"
"""In the folder: what survivors wrote, the names of all tensors of the training, and the metrics of the survivors' last step."""


class Memory:
    """The launcher's part: the folder in shared memory, and what becomes of it between two starts."""

    def __init__(self) -> None:
        shared = Path("/dev/shm")
        self._scratch = Scratch("memory", shared if os.access(shared, os.W_OK) else None)
        self.path = self._scratch.path
        try:
            with limits.forking("the process that frees snapshots"):
                self._held = _remove_after(self.path)
        except BaseException:
            self._scratch.close()
            raise

    def close(self) -> None:
        os.close(self._held)
        self._scratch.close()

    def begin(self) -> None:
        """Ranks are about to start: what survivors of the round before wrote has been used."""
        shutil.rmtree(self.path / HANDED, ignore_errors=True)

    def collect(self) -> None:
        """Make checkpoints of what the ranks left behind when they ended."""
        for step, folder in self._pieces():  # every rank had written its part, none heard of it
            with contextlib.suppress(OSError, ValueError, Damaged, PlaitError):
                ranks = len(list(folder.glob("part-*.json")))
                whole = self.path / _name(step)
                if ranks and not whole.exists() and self._covered(_parts(folder)):
                    publish(folder, whole, ranks, None, [])
        newest = Checkpoints(self.path).newest_step
        for step in sorted(_handed(self.path / HANDED), reverse=True):
            if step > newest and self._whole(self.path / HANDED, step):
                os.rename(self.path / HANDED / _name(step), self.path / _name(step))
                return

    def _pieces(self) -> list[tuple[int, Path]]:
        """Snapshots that are not, or not yet, checkpoints: those on their way, and a machine's own part of one."""
        under_way = [(int(path.name[5:].partition(".")[0]), path) for path in self.path.glob("step-*.tmp-*")]
        return sorted([*under_way, *((int(p.name.removeprefix(PIECES)), p) for p in self.path.glob(f"{PIECES}*"))])

    def _whole(self, handed: Path, step: int) -> bool:
        """Whether survivors hold everything of a step: then it is a checkpoint, beside what they wrote."""
        with contextlib.suppress(OSError, ValueError, Damaged, PlaitError):
            folders = _handed(handed)[step]
            building = _joined(folders, handed / f"{_name(step)}.joined")
            if self._covered(_parts(building)):
                publish(building, handed / _name(step), len(list(building.glob("part-*.json"))), None, [])
                with contextlib.suppress(OSError):
                    shutil.copy(folders[0] / METRICS, self.path / METRICS)
                return True
        return False

    # On several machines

    def held(self) -> Held:
        """The states that this machine has in memory."""
        complete = tuple(int(path.name[5:]) for path in Checkpoints(self.path).found())
        return Held(complete, tuple(sorted({*_handed(self.path / HANDED), *(step for step, _ in self._pieces())})))

    def bring(self, step: int, into: Path) -> dict[str, Any] | None:
        """Copy what this machine has of a step to a folder that all machines see; the metrics of the step."""
        whole, mine = self.path / _name(step), secrets.token_hex(4)
        if whole.exists():
            shutil.copytree(whole, into / whole.name)
        else:
            pieces = [path for n, path in self._pieces() if n == step]
            for number, folder in enumerate([*_handed(self.path / HANDED).get(step, []), *pieces]):
                shutil.copytree(folder, into / f"step-{step}-rank-{mine}{number}")
        with contextlib.suppress(OSError, ValueError):
            found = [self.path / METRICS, *(folder / METRICS for folder in _handed(self.path / HANDED).get(step, []))]
            rows = (json.loads(file.read_text()) for file in found if file.exists())
            return next((row for row in rows if row["step"] == step), None)
        return None

    def published(self, brought: Path, step: int, checkpoints: Path) -> bool:
        """Make a checkpoint of what machines have brought; whether it was everything."""
        whole = brought / _name(step)
        with contextlib.suppress(OSError):
            if whole.exists() or self._whole(brought, step):
                os.rename(whole, checkpoints / whole.name)
                return True
        return False

    def save_newest(self, checkpoints: Path) -> Path | None:
        """Copy the newest checkpoint in memory to the disk, where that has none as new; where it is, if it could be copied."""
        found = Checkpoints(self.path).found()
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

    def remember(self, metrics: dict[str, Any] | None) -> None:
        """The metrics of the step that the next round goes on from, where another machine had them."""
        if metrics is not None:
            (self.path / METRICS).write_text(json.dumps(metrics))

    def _covered(self, parts: list[dict[str, Any]]) -> bool:
        """Whether all pieces together are every tensor of the training, once, with what each rank carries."""
        alone = any(part["carried"]["values"] and not part["carried"]["of_all"] for part in parts)
        if alone and len(parts) < parts[0]["carried"]["world"]:
            return False
        wanted = set(json.loads((self.path / TENSORS).read_text()))
        pieces: dict[str, set[tuple[Any, ...]]] = {}
        shapes: dict[str, list[int]] = {}
        for part in parts:
            for name, entry in part["tensors"].items():
                shapes[name] = entry["shape"]
                pieces.setdefault(name, set()).update((tuple(p["start"]), tuple(p["size"])) for p in entry["pieces"])
        return wanted <= set(shapes) and not any(wrong_tiling(shapes[name], pieces[name]) for name in shapes)


class Keeper:
    """A rank's part: snapshots while all goes well, and what it holds when it loses another rank."""

    def __init__(self, engine: Engine, folder: Path, neighbours: Neighbours | None = None):
        self.engine, self.folder, self.neighbours = engine, folder, neighbours
        engine.memory = Checkpoints(folder) if neighbours is None else Pieces(folder, neighbours)
        self.next = 0
        """The step after which a snapshot is taken; the first one after the first step."""
        self.began = time.monotonic()
        self.steps, self.taken, self.cost = 0, 0, 0.0
        self.listed: bool | None = None
        """Whether the names of the tensors are written down; None before that."""
        self.notes: list[str] = []
        """What there is to say: how often a snapshot is taken, or why none is."""
        if engine.plan.rarely:
            self._stop(
                "all ranks agree on one, and replica groups would wait for each other; a lost rank goes back to a checkpoint"
            )

    @property
    def due(self) -> bool:
        """Whether a snapshot is taken after this step, unless there is no room for it."""
        return self.engine.memory is not None and self.engine.position.step >= self.next

    def stepped(self) -> None:
        """A step was made. Takes a snapshot when it is time for one; all ranks agree when the next one is."""
        engine, self.steps = self.engine, self.steps + 1
        if engine.memory is None:
            return
        if self.listed is None:
            self.listed = self._list()
        if not self.due:
            return
        began = time.monotonic()
        each = max((began - self.began - self.cost) / self.steps, 1e-6)
        said = exchange_json(engine, {"cost": self.cost + self._written(), "each": each, "room": self.listed and self._room()})
        if not all(word["room"] for word in said):
            self._stop("there is no room for them")
            return
        self.taken, period = self.taken + 1, 1
        if self.taken > 2:  # the first is slow, and so is the step before it
            period = max(1, math.ceil(max(word["cost"] for word in said) / SHARE / max(word["each"] for word in said)))
            if self.taken == 3:
                self.notes.append(f"note  a snapshot in memory every {period} steps, for when a rank is lost")
        try:
            engine.memory.save(engine, 1, wait=False)
        except PlaitError as error:  # on all ranks
            self._stop(error.problems[0].why)
        self.next = engine.position.step + period
        self.cost, self.steps, self.began = time.monotonic() - began, 0, began

    def _stop(self, why: str) -> None:
        self.engine.memory = None
        self.notes.append(f"note  no snapshots in memory, in {self.folder.parent}: {why}")

    def _list(self) -> bool:
        """Write down which tensors there are, on all ranks together, once the optimizer has made its own. Whether there was room for it."""
        said = exchange_json(self.engine, {"names": list(state.parts_of(self.engine))})
        beside = self.folder / f"{TENSORS}-{os.getpid()}"
        try:
            beside.write_text(json.dumps(sorted({name for word in said for name in word["names"]})))
            os.replace(beside, self.folder / TENSORS)  # all ranks of a machine write the same
        except OSError:
            return False
        return True

    def goes_on(self) -> tuple[Path | None, str]:
        """Load the newest state that is whole, in memory or on the disk; (where it was, in words). All ranks call it."""
        engine, memory, useless = self.engine, self.engine.memory, ""
        if self.neighbours is None and memory is not None and memory.newest_step > engine.checkpoints.newest_step:
            try:
                path = memory.resume(engine, missing_ok=True)
                if path is not None:
                    return path, "which was kept in memory"
            except PlaitError as error:  # then the disk's
                useless = f", as what was kept in memory cannot be used: {error.problems[0].what}"
        path = engine.resume(missing_ok=True)
        return path, (f"of {path}" if path else "from the beginning") + useless

    def _written(self) -> float:
        """Seconds of a processor that the last snapshot's thread took from a step, where ranks share processors."""
        memory = self.engine.memory
        if memory is None or self.engine.rank_model.device.type != "cpu":
            return 0.0
        return memory.took * max(1.0, self.engine.place.world / cores())

    def _room(self) -> bool:
        held = state.held_of(state.parts_of(self.engine))
        ranks = self.engine.place.world if self.neighbours is None else self.neighbours.kept
        return SPARE * ranks * room([held]) < free_bytes(self.folder)

    def metrics(self) -> dict[str, Any] | None:
        """Of the step that this goes on from, where survivors kept it."""
        with contextlib.suppress(OSError, ValueError):
            row = json.loads((self.folder / METRICS).read_text())
            return row if row["step"] == self.engine.position.step else None
        return None

    def lost(self, error: BaseException, metrics: dict[str, Any]) -> None:
        """After an error that another rank's end made, or a sample: write what this rank holds, as it was before the step that broke."""
        engine, sample = self.engine, isinstance(error, PlaitError) and error.codes[0] in BETWEEN
        if not (sample or described(error)["sort"] == "peer") or not engine.whole() or engine.position.step < 1:
            return
        with contextlib.suppress(Exception):  # what cannot be kept is in the snapshot before
            engine.put_back()
            if (carried := engine.carried.of_survivor()) is None:
                return  # what the other rank carried is lost with it
            rank, world = engine.place.rank, engine.place.world
            parts, values = state.parts_of(engine) | carried.parts(rank), state.values_of(engine)
            values["carried"] = carried.told(rank, world, of_all=True)
            held = [
                one for one in state.held_of(parts) if one.bytes or 0 in one.shape
            ]  # a shard may have nothing of a tensor
            if all(one.bytes for one in held) and 2 * room([held]) < free_bytes(self.folder):
                place = self.folder / HANDED / f"step-{engine.position.step}-rank-{engine.place.rank}"
                building = place.with_name(f".{place.name}")
                write_part(building, engine.place.rank, Snapshot().take(held, parts), values, rule=engine.rule)
                (building / METRICS).write_text(json.dumps(metrics))
                os.rename(building, place)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _handed(folder: Path) -> dict[int, list[Path]]:
    """What survivors wrote, by step."""
    by_step: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("step-*-rank-*")):
        by_step.setdefault(int(path.name.split("-")[1]), []).append(path)
    return by_step


def _parts(folder: Path) -> list[dict[str, Any]]:
    return [unseal(file.read_bytes(), file.name) for file in sorted(folder.glob("part-*.json"))]


def _joined(folders: list[Path], building: Path) -> Path:
    """The files of several folders in one; of pieces that several hold, the first one's count."""
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    known: set[tuple[Any, ...]] = set()
    parts = [(folder, part) for folder in sorted(folders) for part in _parts(folder)]
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
            files[new] = _rewritten(ShardFile(folder / file, *part["files"][file].values()), pieces, building / new)
            for _, piece in pieces:
                piece["file"] = new
        part["files"] = files
        (building / f"part-{number:05d}.json").write_bytes(seal(part))
    return building


def _rewritten(file: ShardFile, pieces: list[tuple[str, dict[str, Any]]], path: Path) -> dict[str, Any]:
    """Some of the pieces of a file in a file of their own; what a manifest says of it."""
    specs = {piece["key"]: (DTYPES[dtype], tuple(piece["size"])) for dtype, piece in pieces}
    written = write(path, specs, file.tensor)
    return {"bytes": written.bytes, "header": written.header}


def _remove_after(folder: Path) -> int:
    """Have a process remove the folder when this one has ended, whatever ends it; or sooner, when what is returned is closed.

    It is no child of this one: nobody waits for it, and what ends a group of processes does not end it.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        with contextlib.suppress(BaseException):
            os.setsid()
            if os.fork() == 0:
                for number in (signal.SIGINT, signal.SIGHUP, *WARNINGS):
                    signal.signal(number, signal.SIG_IGN)
                os.closerange(0, reading)
                os.closerange(reading + 1, 1 << 16)
                os.read(reading, 1)  # nobody writes: it returns when no process has the other end
                shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    os.waitpid(between, 0)
    os.close(reading)
    return writing
