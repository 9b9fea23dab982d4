"""The trackers: how each package is given a run and its numbers. These classes are used in a process of their own (`follow.py`).

Without an account or a server in the environment nothing leaves the machine: W&B writes the files that `wandb sync` uploads
later, MLflow a store in the run directory, Trackio its local database.
"""

import json
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from netrc import netrc
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from plait import PlaitError
from plait.config.errors import Problem
from plait.launch.child import variables

Row = tuple[int, dict[str, float]]
"""A step, and what was measured after it."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run."""

    path: Path
    project: str
    """The job's name."""
    config: dict[str, str]
    """Of the run: job, plan, and the arguments of the job as `job.NAME`."""
    step: int
    """Steps whose numbers it has already."""

    @property
    def name(self) -> str:
        return self.path.name


class Tracker(ABC):
    """A place where the numbers of a run are written a second time. Whatever it raises is told once, and tried again."""

    module: str
    """The module that it imports."""
    package: str
    """The package to install."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Variables that its process has in addition, so that the package reports nothing to its makers."""
    forgets = False
    """It can take back rows of steps that are made again."""

    @abstractmethod
    def start(self, run: TrackedRun, known: str | None) -> str:
        """Begin the run, or go on with the one of this id; the id."""

    @abstractmethod
    def write(self, rows: list[Row]) -> None:
        """Take these rows, in their order."""

    @abstractmethod
    def close(self, done: bool) -> None:
        """Nothing follows. `done`: the run has ended as it should."""


class TensorBoard(Tracker):
    """Event files in `RUN/tensorboard`, scalars as 64-bit floats."""

    module = package = "tensorboard"
    forgets = True

    def start(self, run: TrackedRun, known: str | None) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=run.step + 1)
        if known is None:
            self.writer.add_text("run", f"```\n{json.dumps(run.config, indent=1)}\n```", 0)
        return run.name

    def write(self, rows: list[Row]) -> None:
        for step, values in rows:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step, new_style=True, double_precision=True)
        self.writer.flush()

    def close(self, done: bool) -> None:
        self.writer.close()


class WeightsAndBiases(Tracker):
    """A run of Weights & Biases: online with a key (WANDB_API_KEY, or `wandb login`), else offline in `RUN/wandb`."""

    module = package = "wandb"
    environment: ClassVar[Mapping[str, str]] = {"WANDB_ERROR_REPORTING": "false"}

    def start(self, run: TrackedRun, known: str | None) -> str:
        import wandb

        said = variables("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_BASE_URL")
        signed_in = "WANDB_API_KEY" in said or _in_netrc(said.get("WANDB_BASE_URL", "https://api.wandb.ai"))
        self.run = wandb.init(
            dir=str(run.path), project=said.get("WANDB_PROJECT", run.project), name=run.name, resume="allow",
            id=known or secrets.token_hex(8), config=run.config,
            mode=None if "WANDB_MODE" in said or signed_in else "offline",
            settings=wandb.Settings(console="off", silent=True, save_code=False, x_disable_stats=True),
        )  # fmt: skip
        return self.run.id

    def write(self, rows: list[Row]) -> None:
        for step, values in rows:
            self.run.log(values, step=step)

    def close(self, done: bool) -> None:
        self.run.finish(exit_code=0 if done else 1)


def _in_netrc(url: str) -> bool:
    """Whether the user's .netrc has a key for the host: `wandb login` writes it there."""
    try:
        return netrc().authenticators(urlsplit(url).hostname or "") is not None
    except Exception:  # there is none, or it cannot be read
        return False


class MLflow(Tracker):
    """A run of MLflow: at MLFLOW_TRACKING_URI, else in the run directory, a database where SQLAlchemy is there, else files."""

    module, package = "mlflow", "mlflow-skinny"
    environment: ClassVar[Mapping[str, str]] = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}

    def start(self, run: TrackedRun, known: str | None) -> str:
        from mlflow import MlflowClient

        said = variables("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")
        local = f"sqlite:///{run.path / 'mlflow.db'}" if find_spec("sqlalchemy") else (run.path / "mlflow").as_uri()
        client = self.client = MlflowClient(said.get("MLFLOW_TRACKING_URI", local))
        if known is not None:
            client.update_run(known, status="RUNNING")
            self.id = known
            return known
        name = said.get("MLFLOW_EXPERIMENT_NAME", run.project)
        there = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if there is None else there.experiment_id
        self.id = client.create_run(experiment, run_name=run.name).info.run_id
        for key, value in run.config.items():
            client.log_param(self.id, _plain(key), value[:500])
        return self.id

    def write(self, rows: list[Row]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_plain(name), value, now, step) for step, values in rows for name, value in values.items()]
        for first in range(0, len(metrics), 1000):  # as many as a request may have
            self.client.log_batch(self.id, metrics[first : first + 1000])

    def close(self, done: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if done else "FAILED")


def _plain(name: str) -> str:
    """The name, of letters that MLflow allows."""
    return re.sub(r"[^\w\-. /:]", "_", name, flags=re.ASCII)


class Trackio(Tracker):
    """A run of Trackio, in its local database (TRACKIO_DIR) if the environment names no space or server."""

    module = package = "trackio"

    def start(self, run: TrackedRun, known: str | None) -> str:
        import trackio

        self.run = trackio.init(
            run.project, known or run.name, config=run.config, resume="allow" if known else "never", embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        return self.run.name

    def write(self, rows: list[Row]) -> None:
        for step, values in rows:
            self.run.log(values, step=step)

    def close(self, done: bool) -> None:
        self.run.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow, "trackio": Trackio,
}  # fmt: skip
"""By the name in `--tracker`."""


def listed(words: list[str]) -> list[str]:
    """The names in `--tracker tensorboard,wandb`, each once."""
    return list(dict.fromkeys(name for word in words for name in word.split(",")))


def unknown(words: list[str]) -> list[Problem]:
    """U002 for names in `--tracker` that no tracker has."""
    why = f"the trackers are {', '.join(TRACKERS)}"
    return [
        Problem("U002", f"--tracker {name}: there is no such tracker", why=why)
        for name in listed(words)
        if name not in TRACKERS
    ]


def installed(words: list[str]) -> tuple[str, ...]:
    """The names in `--tracker`. H004 if the package of one is missing."""
    chosen = {name: TRACKERS[name] for name in listed(words)}
    missing = [
        Problem("H004", f"--tracker {name} needs the package {tracker.package}", fix=(f"pip install {tracker.package}",))
        for name, tracker in chosen.items()
        if find_spec(tracker.module) is None
    ]
    if missing:
        raise PlaitError(missing)
    return tuple(chosen)


def numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row of metrics, by name: `{"spans": {"forward": 1.5}}` -> `spans/forward`; a list's by place, `lrs/0`."""
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, (int, float)):
            yield name, float(value)
        elif isinstance(value, list):
            yield from numbers({str(place): each for place, each in enumerate(value)}, f"{name}/")
        elif isinstance(value, dict):
            yield from numbers(value, f"{name}/")
