"""The trackers: how each package gets a run and its values. These classes run in a separate process (`tracker_processes.py`).

Without an account or a server in the environment, no data leaves the machine. W&B writes the files that `wandb sync` uploads later, MLflow
a store in the run directory, Trackio its local database.
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
from plait.launch.child import read_variables

Row = tuple[int, dict[str, float]]
"""A step, and its measured values."""


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run for a tracker."""

    path: Path
    project: str
    """The job's name."""
    config: dict[str, str]
    """Settings of the run: job, plan, and the arguments of the job as `job.NAME`."""
    step: int
    """Last step whose values the tracker already has."""

    @property
    def name(self) -> str:
        return self.path.name


class Tracker(ABC):
    """A second destination for the values of a run. An error in it is printed once, and the call is retried."""

    module: str
    """Module that it imports."""
    package: str
    """Package to install."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Variables for its process in addition to the rank's; they disable the package's own telemetry."""
    can_rewind = False
    """It can replace rows of steps that are repeated."""

    @abstractmethod
    def start(self, run: TrackedRun, known: str | None) -> str:
        """Start the run, or continue the run with this ID; return the ID."""

    @abstractmethod
    def write(self, rows: list[Row]) -> None:
        """Write these rows, in order."""

    @abstractmethod
    def close(self, done: bool) -> None:
        """Close the run. `done`: it has ended without a failure."""


class TensorBoard(Tracker):
    """Event files in `RUN/tensorboard`, scalars as 64-bit floats."""

    module = package = "tensorboard"
    can_rewind = True

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

        said = read_variables("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_BASE_URL")
        signed_in = "WANDB_API_KEY" in said or _has_netrc_key(said.get("WANDB_BASE_URL", "https://api.wandb.ai"))
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


def _has_netrc_key(url: str) -> bool:
    """Whether the user's .netrc has a key for the host; `wandb login` writes it there."""
    try:
        return netrc().authenticators(urlsplit(url).hostname or "") is not None
    except Exception:  # it is missing, or cannot be read
        return False


class MLflow(Tracker):
    """A run of MLflow: at MLFLOW_TRACKING_URI, else in the run directory, as a database if SQLAlchemy is installed, else as files."""

    module, package = "mlflow", "mlflow-skinny"
    environment: ClassVar[Mapping[str, str]] = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}

    def start(self, run: TrackedRun, known: str | None) -> str:
        from mlflow import MlflowClient

        said = read_variables("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")
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
            client.log_param(self.id, _clean_name(key), value[:500])
        return self.id

    def write(self, rows: list[Row]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_clean_name(name), value, now, step) for step, values in rows for name, value in values.items()]
        for first in range(0, len(metrics), 1000):  # maximum number per request
            self.client.log_batch(self.id, metrics[first : first + 1000])

    def close(self, done: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if done else "FAILED")


def _clean_name(name: str) -> str:
    """Replace characters that MLflow rejects in names."""
    return re.sub(r"[^\w\-. /:]", "_", name, flags=re.ASCII)


class Trackio(Tracker):
    """A run of Trackio, in its local database (TRACKIO_DIR), unless the environment names a space or server."""

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
"""Trackers by their name in `--tracker`."""


def parse_tracker_names(words: list[str]) -> list[str]:
    """Parse `--tracker tensorboard,wandb` to distinct names."""
    return list(dict.fromkeys(name for word in words for name in word.split(",")))


def find_unknown_trackers(words: list[str]) -> list[Problem]:
    """Return U002 for each unknown name in `--tracker`."""
    why = f"the trackers are {', '.join(TRACKERS)}"
    return [
        Problem("U002", f"--tracker {name}: unknown tracker", why=why)
        for name in parse_tracker_names(words)
        if name not in TRACKERS
    ]


def check_installed(words: list[str]) -> tuple[str, ...]:
    """Return the names in `--tracker`. Raises H004 if a package is missing."""
    chosen = {name: TRACKERS[name] for name in parse_tracker_names(words)}
    missing = [
        Problem("H004", f"--tracker {name} needs the package {tracker.package}", fix=(f"pip install {tracker.package}",))
        for name, tracker in chosen.items()
        if find_spec(tracker.module) is None
    ]
    if missing:
        raise PlaitError(missing)
    return tuple(chosen)


def flatten_metrics(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row of metrics by name: `{"spans": {"forward": 1.5}}` -> `spans/forward`; of a list by index, `lrs/0`."""
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, (int, float)):
            yield name, float(value)
        elif isinstance(value, list):
            yield from flatten_metrics({str(place): each for place, each in enumerate(value)}, f"{name}/")
        elif isinstance(value, dict):
            yield from flatten_metrics(value, f"{name}/")
