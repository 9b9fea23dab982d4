"""A run goes on although a rank is lost: its state is kept in memory, and the launcher forks the ranks again (torch's *elastic*).

The state is kept in three places, and the one with the newest whole step counts:

    survivors     a rank that loses another writes what it holds; where they hold copies of everything, no step is lost
    snapshots     every few steps ranks copy their parts, as often as costs 2 % of a step at most
    checkpoints   those of the run, on the disk

The first two lie in shared memory, in a folder that goes with the launcher, whatever ends it. They are checkpoints like any other, so a
run that goes on from one makes the same steps with the same samples and random numbers, and ends with the same weights.
"""

import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from plait.checkpoint import state
from plait.checkpoint.checkpoints import Checkpoints
from plait.checkpoint.chunks import wrong_tiling
from plait.checkpoint.manifest import seal, unseal
from plait.checkpoint.safetensors_file import DTYPES, Damaged, ShardFile, write
from plait.checkpoint.saving import Snapshot, free_bytes, publish, room, write_part
from plait.checkpoint.training import exchange_json
from plait.config.errors import PlaitError
from plait.engine.engine import Engine
from plait.launch.failure_report import described
from plait.launch.place import cores

AGAIN = ("C001", "C003", "C004", "C005", "C008")
"""Errors of a rank that is lost: it hangs, was killed, lost its connection, raised, or its loader died."""
SHARE = 0.02
"""Of a step's time that snapshots may cost."""
SPARE = 2.5
"""Shared memory must have this many times the room of a snapshot: the next one is written beside it."""
HANDED, TENSORS, METRICS = "handed", "tensors.json", "metrics.json"
"""In the folder: what survivors wrote, the names of all tensors of the training, and the metrics of the survivors' last step."""


class Memory:
    """The launcher's part: the folder in shared memory, and what becomes of it between two starts."""

    def __init__(self, limit: int):
        self.limit, self.tries, self.reached = limit, 0, -1
        shared = Path("/dev/shm")
        base = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
        self.path = base / f"plait-{os.getuid()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.path.mkdir(mode=0o700)
        self._held = _remove_after(self.path)

    @staticmethod
    def of(limit: int) -> "Memory | None":
        """None where a lost rank ends the run."""
        return Memory(limit) if limit else None

    def close(self) -> None:
        """Free it."""
        os.close(self._held)
        shutil.rmtree(self.path, ignore_errors=True)

    def again(self, error: BaseException, reached: int) -> bool:
        """Whether the run is to be started again after this; `reached`: steps that were done by then."""
        if not isinstance(error, PlaitError) or error.codes[0] not in AGAIN:
            return False
        if error.codes[0] in ("C001", "C005") and reached < 1:
            return False  # most likely the job's own code, and nothing is lost by saying so
        self.tries = self.tries + 1 if abs(reached - self.reached) <= 1 else 1
        self.reached = reached
        return self.tries <= self.limit

    def told(self, error: PlaitError) -> str:
        """A line on what was lost."""
        problem = error.problems[0]
        why = f" ({problem.why.splitlines()[0]})" if problem.why else ""
        return f"note  {problem.what}{why}: starting again ({self.tries} of {self.limit} at this step)"

    def collect(self) -> None:
        """Make checkpoints of what the ranks left behind when they ended."""
        for folder in sorted(self.path.glob("step-*.tmp-*")):  # every rank had written its part, none heard of it
            with contextlib.suppress(OSError, ValueError, Damaged, PlaitError):
                ranks = len(list(folder.glob("part-*.json")))
                whole = self.path / folder.name.partition(".")[0]
                if ranks and not whole.exists() and self._covered(_parts(folder)):
                    publish(folder, whole, ranks, None, [])
        self._survivors()
        shutil.rmtree(self.path / HANDED, ignore_errors=True)

    def _survivors(self) -> None:
        """The newest step of which survivors hold everything becomes a checkpoint."""
        by_step: dict[int, list[Path]] = {}
        for folder in (self.path / HANDED).glob("step-*-rank-*"):
            by_step.setdefault(int(folder.name.split("-")[1]), []).append(folder)
        newest = Checkpoints(self.path).newest_step
        for step in sorted(by_step, reverse=True):
            whole = self.path / f"step-{step:06d}"
            if step <= newest:
                break
            with contextlib.suppress(OSError, ValueError, Damaged, PlaitError):
                building = _joined(by_step[step], whole.with_name(f"{whole.name}.joined"))
                if self._covered(_parts(building)):
                    publish(building, whole, len(by_step[step]), None, [])
                    shutil.copy(by_step[step][0] / METRICS, self.path / METRICS)
                    return

    def _covered(self, parts: Iterable[dict[str, Any]]) -> bool:
        """Whether all pieces together are every tensor of the training, once."""
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

    def __init__(self, engine: Engine, folder: Path):
        self.engine, self.folder = engine, folder
        engine.memory = Checkpoints(folder)
        self.next = 0
        """The step after which a snapshot is taken; the first one after the first step."""
        self.began = time.monotonic()
        self.steps, self.taken, self.cost = 0, 0, 0.0
        self.listed = False
        self.notes: list[str] = []
        """What there is to say: how often a snapshot is taken, or why none is."""

    def stepped(self) -> None:
        """A step was made. Takes a snapshot when it is time for one; all ranks agree when the next one is."""
        engine, self.steps = self.engine, self.steps + 1
        if not self.listed:
            self._list()
        if engine.position.step < self.next or engine.memory is None:
            return
        began = time.monotonic()
        each = max((began - self.began - self.cost) / self.steps, 1e-6)
        said = exchange_json(engine, {"cost": self.cost + self._written(), "each": each, "room": self._room()})
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

    def _list(self) -> None:
        """Write down which tensors there are, on all ranks together, once the optimizer has made its own."""
        self.listed = True
        said = exchange_json(self.engine, {"names": list(state.parts_of(self.engine))})
        if self.engine.place.rank == 0:
            (self.folder / TENSORS).write_text(json.dumps(sorted({name for word in said for name in word["names"]})))

    def goes_on(self) -> tuple[Path | None, str]:
        """Load the newest state that is whole, in memory or on the disk; (where it was, in words). All ranks call it."""
        engine, memory = self.engine, self.engine.memory
        if memory is not None and memory.newest_step > engine.checkpoints.newest_step:
            with contextlib.suppress(PlaitError):  # then the disk's
                path = memory.resume(engine, missing_ok=True)
                if path is not None:
                    return path, "which was kept in memory"
        path = engine.resume(missing_ok=True)
        return path, f"of {path}" if path else "from the beginning"

    def _written(self) -> float:
        """Seconds of a processor that the last snapshot's thread took from a step, where ranks share processors."""
        memory = self.engine.memory
        if memory is None or self.engine.built.device.type != "cpu":
            return 0.0
        return memory.took * max(1.0, self.engine.place.world / cores())

    def _room(self) -> bool:
        held = state.held_of(state.parts_of(self.engine))
        return SPARE * self.engine.place.world * room([held]) < free_bytes(self.folder)

    def metrics(self) -> dict[str, Any] | None:
        """Of the step that this goes on from, where survivors kept it."""
        with contextlib.suppress(OSError, ValueError):
            row = json.loads((self.folder / METRICS).read_text())
            return row if row["step"] == self.engine.position.step else None
        return None

    def lost(self, error: BaseException, metrics: dict[str, Any]) -> None:
        """After an error that another rank's end made: write what this rank holds, as it was before the step that broke."""
        engine = self.engine
        if described(error)["sort"] != "peer" or not engine.whole() or engine.position.step < 1:
            return
        with contextlib.suppress(Exception):  # what cannot be kept is in the snapshot before
            engine.put_back()
            parts, values = state.parts_of(engine), state.values_of(engine)
            held = state.held_of(parts)
            if all(one.bytes for one in held) and 2 * room([held]) < free_bytes(self.folder):
                place = self.folder / HANDED / f"step-{engine.position.step}-rank-{engine.place.rank}"
                building = place.with_name(f".{place.name}")
                write_part(building, engine.place.rank, Snapshot().take(held, parts), values, rule=engine.rule)
                (building / METRICS).write_text(json.dumps(metrics))
                os.rename(building, place)


def _parts(folder: Path) -> list[dict[str, Any]]:
    return [unseal(file.read_bytes(), file.name) for file in sorted(folder.glob("part-*.json"))]


def _joined(folders: list[Path], building: Path) -> Path:
    """The files of several survivors in one folder; of pieces that several hold, the first one's count."""
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    known: set[tuple[Any, ...]] = set()
    for number, folder in enumerate(sorted(folders)):
        (part,) = _parts(folder)
        by_file: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        for name, entry in part["tensors"].items():
            place = lambda p, name=name: (name, tuple(p["start"]), tuple(p["size"]))  # noqa: E731
            entry["pieces"] = [p for p in entry["pieces"] if place(p) not in known]
            known |= set(map(place, entry["pieces"]))
            for piece in entry["pieces"]:
                by_file.setdefault(piece["file"], []).append((entry["dtype"], piece))
        part["files"] = {
            file: _rewritten(ShardFile(folder / file, *part["files"][file].values()), by_file[file], building / file)
            for file in part["files"] if file in by_file
        }  # fmt: skip
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
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                    signal.signal(number, signal.SIG_IGN)
                os.closerange(0, reading)
                os.closerange(reading + 1, 1 << 16)
                os.read(reading, 1)  # nobody writes: it returns when no process has the other end
                shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    os.waitpid(between, 0)
    os.close(reading)
    return writing
