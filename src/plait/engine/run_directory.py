"""The run directory: all files of a run, as plain text except tensors.

    runs/stdlib_gpt-7/{plan.toml, job.json, env.json, metrics.jsonl, events/rank0.jsonl, logs/rank0.log, memory/rank0.json,
                          checkpoints/}

`runs/latest` points to the newest. A lock prevents a second launcher from using a run in progress.
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
from plait.launch.devices import list_cuda_devices
from plait.launch.place import collect_environment, count_cores


@dataclass(frozen=True)
class RunDirectory:
    """The directory of one run under `runs/`: manifest, metrics, events, checkpoints."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def get_events_path(self, rank: int) -> Path:
        return self.path / "events" / f"rank{rank}.jsonl"

    def get_log_path(self, rank: int) -> Path:
        return self.path / "logs" / f"rank{rank}.log"

    def get_memory_path(self, rank: int) -> Path:
        return self.path / "memory" / f"rank{rank}.json"

    def write_memory(self, rank: int, row: dict[str, Any]) -> None:
        """Write a rank's memory use."""
        path = self.get_memory_path(rank)
        path.parent.mkdir(exist_ok=True)
        _write_json(path, row)

    def read_memories(self) -> dict[int, dict[str, Any]]:
        """Read the memory use that ranks have written so far."""
        found = dict[int, dict[str, Any]]()
        for path in self.path.glob("memory/rank*.json"):
            with suppress(ValueError, OSError):  # a partial write
                found[int(path.stem.removeprefix("rank"))] = json.loads(path.read_text(encoding="utf-8"))
        return dict(sorted(found.items()))

    @staticmethod
    def create(job: str, plan: Plan, arguments: dict[str, str], root: Path) -> "RunDirectory":
        """Create a directory `root/<job's name>-<number>`, and write the facts available before the start.

        R002 if it cannot be created.
        """
        try:
            path = _create_folder(root, get_job_name(job))
        except OSError as error:
            raise _make_create_error(root, error) from None
        try:
            for part in ("events", "logs", "checkpoints"):
                (path / part).mkdir()
            RunDirectory(path).write_description(job, plan, arguments)
            _link_latest(path)
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise _make_create_error(path, error) from None
        return RunDirectory(path)

    @staticmethod
    def find_latest(job: str, root: Path) -> "RunDirectory":
        """Find the newest run of this job with a checkpoint, else its newest. K001 if there is none."""
        name, runs = get_job_name(job), RunDirectory.list_runs(job, root)
        saved = [p for p in runs if any(_parse_run_number(c.name, "step") for c in (p / "checkpoints").glob("step-*"))]
        if not runs:
            what = f"there is no run of {name} in {root}/ to resume"
            raise PlaitError(Problem("K001", what, fix=("start without --resume",)))
        return RunDirectory((saved or runs)[0])

    @staticmethod
    def list_runs(job: str, root: Path) -> list[Path]:
        """List the directories of this job's runs, newest first; empty if the folder cannot be read."""
        name = get_job_name(job)
        with suppress(OSError):
            found = [p for p in root.glob(f"{glob.escape(name)}-*") if _parse_run_number(p.name, name)]
            return sorted(found, key=lambda p: -_parse_run_number(p.name, name))
        return []

    def write_description(self, job: str, plan: Plan, arguments: dict[str, str]) -> None:
        """Write the plan, job and environment; a resumed run writes them again, since its plan may differ."""
        (self.path / "plan.toml").write_text(plan.to_toml(), encoding="utf-8")
        _write_json(self.path / "job.json", {"job": job, "arguments": arguments, "command": sys.argv})
        _write_json(self.path / "env.json", describe_environment())

    def link_latest(self) -> None:
        """Point `latest` next to the run to it. R002 if it cannot be created."""
        try:
            _link_latest(self.path)
        except OSError as error:
            raise _make_create_error(self.path, error) from None

    def lock(self) -> IO[bytes]:
        """Lock the run for this process until the returned file is closed. R001 if another process has the lock."""
        file = open(self.path / "lock", "ab")  # noqa: SIM115
        for _ in range(30):  # the workers of a killed launcher take a moment to exit
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except OSError:
                time.sleep(0.1)
        file.close()
        fix = ("wait for it, or stop it", "start a new run without --resume")
        raise PlaitError(Problem("R001", f"another process is running {self.path}", fix=fix))

    def read_evaluation(self, step: int) -> dict[str, float | None] | None:
        """Read the evaluation of a step from the metrics; None if there is none."""
        rows = self.metrics.read_bytes().splitlines() if self.metrics.exists() else []
        found = (row for row in rows if b'"evaluation"' in row and parse_row_step(row) == step)
        return next((json.loads(row)["evaluation"] for row in found), None)

    def truncate(self, step: int) -> None:
        """Remove the rows of metrics and events after `step`: a resumed run writes them again."""
        for path in (self.metrics, *self.path.glob("events/*.jsonl")):
            if path.exists():
                kept = [row for row in path.read_bytes().splitlines() if parse_row_step(row) <= step]
                beside = path.with_name(path.name + ".tmp")
                beside.write_bytes(b"".join(row + b"\n" for row in kept))
                os.replace(beside, path)

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append the metrics of a step that rank 0 did not write before it was lost."""
        rows = self.metrics.read_bytes().splitlines() if self.metrics.exists() else []
        if not any(b'"loss"' in line and parse_row_step(line) == row["step"] for line in rows):
            with open(self.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def get_job_name(job: str) -> str:
    """Return the job's name: `examples/digits/job.py` -> digits; `net.py:big` -> net-big."""
    path, _, function = job.partition(":")
    file = Path(path).resolve()
    stem = file.parent.name if file.stem == "job" and file.parent.name else file.stem
    return f"{stem}-{function}" if function and function != "job" else stem


def describe_environment() -> dict[str, Any]:
    """Collect software and hardware facts that may affect a run's speed and results."""
    import torch

    return {
        "plait": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cores": count_cores(),
        "cuda": list_cuda_devices(),
        "variables": collect_environment(),
    }


def _create_folder(root: Path, name: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    number = 1 + max((_parse_run_number(p.name, name) for p in root.iterdir()), default=0)
    while True:
        path = root / f"{name}-{number}"
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1


def _link_latest(path: Path) -> None:
    link = path.parent / "latest"
    beside = link.with_name(f".latest-{os.getpid()}")
    beside.unlink(missing_ok=True)  # left by a killed process with this id
    try:
        beside.symlink_to(path.name)
        os.replace(beside, link)
    finally:
        beside.unlink(missing_ok=True)


def _make_create_error(path: Path, error: OSError) -> PlaitError:
    what = f"the run directory {path} cannot be created"
    return PlaitError(Problem("R002", what, why=str(error), fix=("--runs somewhere/else",)))


def _parse_run_number(name: str, start: str) -> int:
    """Return 7 for a name such as net-7 that starts with `net`; 0 for any other name."""
    tail = name.removeprefix(start + "-")
    return int(tail) if tail != name and tail.isascii() and tail.isdecimal() else 0


def parse_row_step(row: bytes) -> float:
    """Return the step in a line of JSON; infinity if there is none."""
    try:
        step = json.loads(row)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line torn by a kill
    return step if isinstance(step, (int, float)) else float("inf")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
