"""The trackers: how each package is given a run and its numbers. These classes live in a process beside training (`follow.py`).

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
from importlib import import_module
from importlib.util import find_spec
from netrc import netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from plait import PlaitError
from plait.config.errors import Problem
from plait.launch.companion import variables

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

    forgets = True

    def start(self, run: TrackedRun, known: str | None) -> str:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.file = EventFileWriter(str(run.path / "tensorboard"))
        start = _messages("event").SessionLog(
            status=1
        )  # from the second on, one takes back what is there of later steps
        self._add(run.step + 1, session_log=start)
        if known is None:
            words = f"```\n{json.dumps(run.config, indent=1)}\n```".encode()
            self._add(0, summary=_summary([_value("run", "text", dtype="DT_STRING", string_val=[words])]))
        return run.name

    def write(self, rows: list[Row]) -> None:
        for step, values in rows:
            scalars = [_value(name, "scalars", dtype="DT_DOUBLE", double_val=[v]) for name, v in values.items()]
            self._add(step, summary=_summary(scalars))
        self.file.flush()

    def close(self, done: bool) -> None:
        self.file.close()

    def _add(self, step: int, **content: Any) -> None:
        self.file.add_event(_messages("event").Event(wall_time=time.time(), step=step, **content))


def _messages(name: str) -> Any:
    """The kinds of messages that one of TensorBoard's protocols has. They are made when it is imported: no checker knows them."""
    return import_module(f"tensorboard.compat.proto.{name}_pb2")


def _summary(values: list[Any]) -> Any:
    return _messages("summary").Summary(value=values)


def _value(name: str, plugin: str, **tensor: Any) -> Any:
    messages = _messages("summary")
    kind = messages.SummaryMetadata(plugin_data=messages.SummaryMetadata.PluginData(plugin_name=plugin))
    return messages.Summary.Value(tag=name, tensor=_messages("tensor").TensorProto(**tensor), metadata=kind)


class WeightsAndBiases(Tracker):
    """A run of Weights & Biases: online with a key (WANDB_API_KEY, or `wandb login`), else offline in `RUN/wandb`."""

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


TRACKERS: dict[str, tuple[type[Tracker], str, str]] = {
    "tensorboard": (TensorBoard, "tensorboard", "tensorboard"),
    "wandb": (WeightsAndBiases, "wandb", "wandb"),
    "mlflow": (MLflow, "mlflow", "mlflow-skinny"),
    "trackio": (Trackio, "trackio", "trackio"),
}
"""Name in `--to` -> class, the module it imports, the package to install."""

QUIET = {
    "mlflow": {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"},
    "wandb": {"WANDB_ERROR_REPORTING": "false"},
    "trackio": {},
    "tensorboard": {},
}
"""Environment of each tracker's process: no reports of its own to its makers, and MLflow's files where it has no database."""


def listed(words: list[str]) -> list[str]:
    """The names in `--to tensorboard,wandb`, each once."""
    return list(dict.fromkeys(name for word in words for name in word.split(",")))


def unknown(words: list[str]) -> list[Problem]:
    """U002 for names in `--to` that no tracker has."""
    why = f"the trackers are {', '.join(TRACKERS)}"
    return [
        Problem("U002", f"--to {name}: there is no such tracker", why=why)
        for name in listed(words)
        if name not in TRACKERS
    ]


def installed(words: list[str]) -> tuple[str, ...]:
    """The names in `--to`. H004 if the package of one is missing."""
    names = listed(words)
    missing = [(name, TRACKERS[name][2]) for name in names if find_spec(TRACKERS[name][1]) is None]
    if missing:
        raise PlaitError(
            [
                Problem("H004", f"--to {name} needs the package {package}", fix=(f"pip install {package}",))
                for name, package in missing
            ]
        )
    return tuple(names)


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
