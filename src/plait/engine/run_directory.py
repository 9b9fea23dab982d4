"""The run directory: everything a run leaves behind, as plain text except tensors.

    runs/stdlib_gpt-7/{plan.toml, job.json, env.json, metrics.jsonl, events/rank0.jsonl, logs/rank0.log, memory/rank0.json,
                          checkpoints/}

`runs/latest` points to the newest. A lock keeps a second launcher out of a run that is going on.
"""

import fcntl
import glob
import json
import os
import platform
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from plait.config.errors import PlaitError, Problem
from plait.config.plan import Plan
from plait.config.version import __version__
from plait.launch.devices import cuda_names
from plait.launch.place import cores, facts


@dataclass(frozen=True)
class RunDirectory:
    """A run directory."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def events(self, rank: int) -> Path:
        return self.path / "events" / f"rank{rank}.jsonl"

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"rank{rank}.log"

    def memory(self, rank: int) -> Path:
        return self.path / "memory" / f"rank{rank}.json"

    def write_memory(self, rank: int, row: dict[str, Any]) -> None:
        """What a rank's memory is used for."""
        path = self.memory(rank)
        path.parent.mkdir(exist_ok=True)
        _write_json(path, row)

    def memories(self) -> dict[int, dict[str, Any]]:
        """What ranks have written of their memory, as far as they have."""
        found = dict[int, dict[str, Any]]()
        for path in self.path.glob("memory/rank*.json"):
            with suppress(ValueError, OSError):  # it is being written
                found[int(path.stem.removeprefix("rank"))] = json.loads(path.read_text(encoding="utf-8"))
        return dict(sorted(found.items()))

    @staticmethod
    def create(job: str, plan: Plan, arguments: dict[str, str], root: Path) -> "RunDirectory":
        """A new directory `root/<job's name>-<number>`, with what is known before the start written into it.

        R002 when it cannot be made.
        """
        try:
            path = _new_folder(root, job_name(job))
        except OSError as error:
            raise _cannot_be_made(root, error) from None
        try:
            for part in ("events", "logs", "checkpoints"):
                (path / part).mkdir()
            RunDirectory(path).describe(job, plan, arguments)
            _point(path)
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise _cannot_be_made(path, error) from None
        return RunDirectory(path)

    @staticmethod
    def latest(job: str, root: Path) -> "RunDirectory":
        """The newest run of this job that has a checkpoint, else its newest. K001 when there is none."""
        name, runs = job_name(job), RunDirectory.all(job, root)
        saved = [p for p in runs if any(_number(c.name, "step") for c in (p / "checkpoints").glob("step-*"))]
        if not runs:
            what = f"there is no run of {name} in {root}/ to resume"
            raise PlaitError(Problem("K001", what, fix=("start without --resume",)))
        return RunDirectory((saved or runs)[0])

    @staticmethod
    def all(job: str, root: Path) -> list[Path]:
        """The directories of this job's runs, the newest first; none where the folder cannot be looked into."""
        name = job_name(job)
        with suppress(OSError):
            found = [p for p in root.glob(f"{glob.escape(name)}-*") if _number(p.name, name)]
            return sorted(found, key=lambda p: -_number(p.name, name))
        return []

    def describe(self, job: str, plan: Plan, arguments: dict[str, str]) -> None:
        """Write down what is known before the start; a resumed run does it again, its plan may be another."""
        (self.path / "plan.toml").write_text(plan.to_toml(), encoding="utf-8")
        _write_json(self.path / "job.json", {"job": job, "arguments": arguments, "command": sys.argv})
        _write_json(self.path / "env.json", environment())

    def point(self) -> None:
        """Make `latest` beside the run point to it. R002 when it cannot be made."""
        try:
            _point(self.path)
        except OSError as error:
            raise _cannot_be_made(self.path, error) from None

    def lock(self) -> IO[bytes]:
        """Hold the run for this process until the returned file is closed. R001 when another one holds it."""
        file = open(self.path / "lock", "ab")  # noqa: SIM115
        for _ in range(30):  # the workers of a killed launcher take a moment to follow it
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except OSError:
                time.sleep(0.1)
        file.close()
        fix = ("wait for it, or stop it", "start a new run without --resume")
        raise PlaitError(Problem("R001", f"another process is running {self.path}", fix=fix))

    def evaluation(self, step: int) -> dict[str, float | None] | None:
        """The evaluation of a step, if the metrics have it."""
        rows = self.metrics.read_bytes().splitlines() if self.metrics.exists() else []
        found = (row for row in rows if b'"evaluation"' in row and step_of(row) == step)
        return next((json.loads(row)["evaluation"] for row in found), None)

    def cut(self, step: int) -> None:
        """Forget the rows of metrics and events after `step`: a resumed run writes them again."""
        for path in (self.metrics, *self.path.glob("events/*.jsonl")):
            if path.exists():
                kept = [row for row in path.read_bytes().splitlines() if step_of(row) <= step]
                beside = path.with_name(path.name + ".tmp")
                beside.write_bytes(b"".join(row + b"\n" for row in kept))
                os.replace(beside, path)

    def remember(self, row: dict[str, Any]) -> None:
        """Add the metrics of a step that rank 0 did not live to write."""
        rows = self.metrics.read_bytes().splitlines() if self.metrics.exists() else []
        if not any(b'"loss"' in line and step_of(line) == row["step"] for line in rows):
            with open(self.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def job_name(job: str) -> str:
    """`examples/digits/job.py` -> digits; `net.py:big` -> net-big."""
    path, _, function = job.partition(":")
    file = Path(path).resolve()
    stem = file.parent.name if file.stem == "job" and file.parent.name else file.stem
    return f"{stem}-{function}" if function and function != "job" else stem


def environment() -> dict[str, Any]:
    """What a run's speed and numbers may depend on besides its job and plan."""
    import torch

    return {
        "plait": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cores": cores(),
        "cuda": cuda_names(),
        "variables": facts(),
    }


def _new_folder(root: Path, name: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    number = 1 + max((_number(p.name, name) for p in root.iterdir()), default=0)
    while True:
        path = root / f"{name}-{number}"
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


def _point(path: Path) -> None:
    link = path.parent / "latest"
    beside = link.with_name(f".latest-{os.getpid()}")
    beside.unlink(missing_ok=True)  # of a process with this number that was killed here
    try:
        beside.symlink_to(path.name)
        os.replace(beside, link)
    finally:
        beside.unlink(missing_ok=True)


def _cannot_be_made(path: Path, error: OSError) -> PlaitError:
    what = f"the run directory {path} cannot be made"
    return PlaitError(Problem("R002", what, why=str(error), fix=("--runs somewhere/else",)))


def _number(name: str, start: str) -> int:
    """7 of a name such as net-7 that starts with `net`; 0 when it is no such name."""
    tail = name.removeprefix(start + "-")
    return int(tail) if tail != name and tail.isascii() and tail.isdecimal() else 0


def step_of(row: bytes) -> float:
    """The step that a line of JSON is of; beyond any, where it has none."""
    try:
        step = json.loads(row)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line torn by a kill
    return step if isinstance(step, (int, float)) else float("inf")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
