"""The run directory: everything a run leaves behind, as plain text except tensors.

    runs/stdlib_gpt-7/{plan.toml, job.json, env.json, metrics.jsonl, events/rank0.jsonl, logs/rank0.log, checkpoints/}

`runs/latest` points to the newest. A lock keeps a second launcher out of a run that is going on.
"""

import fcntl
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from plait import __version__
from plait.errors import PlaitError, Problem
from plait.launch.devices import cuda_names
from plait.launch.place import cores, facts
from plait.plan import Plan


@dataclass(frozen=True)
class Run:
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

    @staticmethod
    def create(job: str, plan: Plan, arguments: dict[str, str], root: Path) -> "Run":
        """A new directory `root/<job's name>-<number>`, with what is known before the start written into it."""
        name = job_name(job)
        root.mkdir(parents=True, exist_ok=True)
        number = 1 + max((_number(p.name, name) for p in root.iterdir()), default=0)
        while True:
            path = root / f"{name}-{number}"
            try:
                path.mkdir()
                break
            except FileExistsError:
                number += 1
        for part in ("events", "logs", "checkpoints"):
            (path / part).mkdir()
        run = Run(path)
        (path / "plan.toml").write_text(plan.to_toml(), encoding="utf-8")
        _write_json(path / "job.json", {"job": job, "arguments": arguments, "command": sys.argv})
        _write_json(path / "env.json", environment())
        run.point()
        return run

    @staticmethod
    def latest(job: str, root: Path) -> "Run":
        """The newest run of this job that has a checkpoint, else its newest. K001 when there is none."""
        name = job_name(job)
        runs = sorted(
            (p for p in root.glob(f"{name}-*") if _number(p.name, name)), key=lambda p: -_number(p.name, name)
        )
        saved = [p for p in runs if any((p / "checkpoints").glob("step-*"))]
        if not runs:
            raise PlaitError(
                Problem("K001", f"there is no run of {name} in {root}/ to resume", fix=("start without --resume",))
            )
        return Run((saved or runs)[0])

    def point(self) -> None:
        """Make `latest` beside the run point to it."""
        link = self.path.parent / "latest"
        beside = link.with_name(f".latest-{os.getpid()}")
        beside.symlink_to(self.path.name)
        os.replace(beside, link)

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
        raise PlaitError(
            Problem(
                "R001",
                f"another process is running {self.path}",
                fix=("wait for it, or stop it", "start a new run without --resume"),
            )
        )

    def cut(self, step: int) -> None:
        """Forget the rows of metrics and events after `step`: a resumed run writes them again."""
        for path in (self.metrics, *self.path.glob("events/*.jsonl")):
            if path.exists():
                kept = [row for row in path.read_text(encoding="utf-8").splitlines() if _step_of(row) <= step]
                beside = path.with_name(path.name + ".tmp")
                beside.write_text("".join(row + "\n" for row in kept), encoding="utf-8")
                os.replace(beside, path)


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


def _number(name: str, job: str) -> int:
    tail = name.removeprefix(job + "-")
    return int(tail) if name.startswith(job + "-") and tail.isdigit() else 0


def _step_of(row: str) -> float:
    try:
        return json.loads(row)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line torn by a kill


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
