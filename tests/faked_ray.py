"""A double of Ray Train with the documented interface that `plait.ray` uses. It forks the workers, sets their variables and starts gloo."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from plait.config.errors import PlaitError
from plait.launch import fork
from plait.launch.place import Place
from plait.launch.supervisor import Listener


class WorkersFailed(Exception):
    """As `ray.train.WorkerGroupError`."""

    def __init__(self, worker_failures: dict[int, Exception]):
        super().__init__("Training failed due to worker errors")
        self.worker_failures = worker_failures


class Checkpoint:
    """A checkpoint: a folder."""

    def __init__(self, path: str):
        self.path = path

    @classmethod
    def from_directory(cls, path: str) -> "Checkpoint":
        return cls(path)


@dataclass
class Trainer:
    """A double of `TorchTrainer`. It forks the workers, and forks them again after a worker failure."""

    work: Callable[[dict[str, Any]], None]
    train_loop_config: dict[str, Any]
    scaling_config: SimpleNamespace
    run_config: SimpleNamespace
    torch_config: SimpleNamespace
    attempts: list[dict[int, Exception]] = field(default_factory=list)

    @property
    def record(self) -> Path:
        return Path(self.run_config.storage_path) / self.run_config.name

    def fit(self) -> SimpleNamespace:
        self.record.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                fork.run_ranks(self.worker, self.scaling_config.num_workers, Listener(on_text=shown))
                break
            except PlaitError as error:
                self.attempts.append({0: error})
                (self.record / "attempts").write_text(str(len(self.attempts)))
                if len(self.attempts) > self.run_config.failure_config.max_failures >= 0:
                    raise WorkersFailed(self.attempts[-1]) from None
        told = sorted(self.record.glob("checkpoint_*/plait.json"))
        facts = json.loads(told[-1].read_text()) if told else None
        return SimpleNamespace(metrics=facts, checkpoint=Checkpoint(str(told[-1].parent)) if told else None)

    def worker(self, place: Place) -> None:
        os.environ |= {
            "RANK": str(place.rank), "WORLD_SIZE": str(place.world), "LOCAL_RANK": str(place.rank), "NODE_RANK": "0",
            "LOCAL_WORLD_SIZE": str(place.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999",
        }  # fmt: skip
        assert place.store is not None
        dist.init_process_group(self.torch_config.backend, store=place.store(), rank=place.rank, world_size=place.world)
        train = sys.modules["ray.train"]
        train.get_context = lambda: SimpleNamespace(get_world_rank=lambda: place.rank)
        train.report = self.report
        self.work(self.train_loop_config)

    def report(self, metrics: dict[str, Any], checkpoint: Checkpoint | None = None) -> None:
        dist.barrier()  # as in Ray, each worker must call it equally often
        if checkpoint is not None:
            shutil.copytree(checkpoint.path, self.record / f"checkpoint_{metrics['step']:06d}")


def shown(rank: int, text: bytes) -> None:
    """Print a worker's output in Ray's format."""
    sys.stdout.write(text.decode())


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the double as the module `ray`."""
    ray, train, torch = ModuleType("ray"), ModuleType("ray.train"), ModuleType("ray.train.torch")
    begun: list[object] = []
    ray.is_initialized = lambda: bool(begun)
    ray.init = lambda **words: begun.append(words)
    ray.shutdown = begun.clear
    ray.cluster_resources = lambda: {"CPU": 2.0}
    for name in ("ScalingConfig", "RunConfig", "FailureConfig", "CheckpointConfig"):
        setattr(train, name, SimpleNamespace)
    train.Checkpoint = Checkpoint
    torch.TorchTrainer = lambda work, **words: Trainer(work, **words)
    torch.TorchConfig = SimpleNamespace
    ray.train, train.torch = train, torch
    ray.__spec__ = SimpleNamespace(name="ray")
    for module in (ray, train, torch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
