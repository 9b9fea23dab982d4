"""Callbacks that most jobs want: end a run that no longer improves, keep the best checkpoint, trace some steps.

A metric is one of the job's `Evaluate.metrics`, whose values are the same on all ranks; so are what these callbacks decide. A step
that is evaluated a second time after a resume counts once.
"""

import math
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.checkpoints import Checkpoints
from plait.config.errors import FAILED, PlaitError, Problem, did_you_mean
from plait.engine.callbacks import Callback, RunningEngine
from plait.engine.resume import BEST
from plait.engine.step import Step

MODES = ("min", "max")


class Improvement(Callback):
    """Follows a metric of the evaluations: its best value, and the step of it. U011 for a `mode` that is neither min nor max."""

    def __init__(self, metric: str, mode: str = "min", min_delta: float = 0.0):
        if mode not in MODES:
            what = f'{type(self).__name__}(mode="{mode}") is neither "min" nor "max"'
            raise PlaitError(Problem("U011", what, fix=('mode="min"    of a loss', 'mode="max"    of an accuracy')))
        self.metric, self.mode, self.min_delta = metric, mode, min_delta
        self.best: float | None = None
        self.best_step, self.seen = 0, 0
        """Steps of the best value, and of the last evaluation."""

    def on_start(self, engine: RunningEngine) -> None:
        """U012 when the job evaluates nothing."""
        if engine.job.evaluate is None:
            what = f'{type(self).__name__}("{self.metric}") follows a metric, and the job has no evaluation'
            raise PlaitError(Problem("U012", what, fix=("Job(evaluate=plait.Evaluate(data, metrics, every=100))",)))

    def improved(self, step: int, values: dict[str, float]) -> bool | None:
        """Whether the metric is better than ever, by more than `min_delta`; None for a step that was seen before. U012."""
        if self.metric not in values:
            what = f"there is no metric {self.metric}        {did_you_mean(self.metric, [*values])}"
            why = f"the job's evaluation has {', '.join(values)}"
            raise PlaitError(Problem("U012", what, why=why), FAILED)
        if step == self.seen:
            return None
        self.seen, value = step, values[self.metric]
        sign = 1.0 if self.mode == "min" else -1.0
        if math.isfinite(value) and (self.best is None or sign * value < sign * self.best - self.min_delta):
            self.best, self.best_step = value, step
            return True
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "best": self.best, "best_step": self.best_step, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it up; another metric's is not taken."""
        if state["metric"] == self.metric:
            self.best, self.best_step, self.seen = state["best"], state["best_step"], state["seen"]


class EarlyStopping(Improvement):
    """Ends the run when a metric has not improved for `patience` evaluations.

    `metric`: one of `Evaluate.metrics`; `mode`: "min" when less is better, or "max"; an improvement is by more than `min_delta`. A
    value that is not finite is none. The run ends in the step of that evaluation, with exit code 0.
    """

    def __init__(self, metric: str, patience: int, mode: str = "min", min_delta: float = 0.0):
        super().__init__(metric, mode, min_delta)
        if patience < 1:
            what = f"EarlyStopping(patience={patience}) is not a number of evaluations ≥ 1"
            raise PlaitError(Problem("U011", what, fix=("patience=5",)))
        self.patience, self.waited = patience, 0

    def on_evaluation(self, engine: RunningEngine, values: dict[str, float]) -> None:
        """Count the evaluations without improvement."""
        improved = self.improved(engine.position.step, values)
        if improved is not None:
            self.waited = 0 if improved else self.waited + 1
        if self.waited >= self.patience:
            self.waited = 0  # who goes on from here has the patience anew
            best = "no finite value yet" if self.best is None else f"best {self.best:.6g} at step {self.best_step}"
            engine.stop(f"{self.metric} has not improved for {self.patience} evaluations ({best})")

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.waited = state["waited"] if state["metric"] == self.metric else 0


class BestCheckpoint(Improvement):
    """Keeps the checkpoint with the best value of a metric, in the folder `best` of the run.

    `metric` and `mode` as for `EarlyStopping`. `keep`: how many of the checkpoints that were the best so far remain. They are
    not among those that `--keep` counts. A checkpoint holds the state of the callbacks before this one in the list as it is after the
    evaluation: so it is best the last.
    """

    def __init__(self, metric: str, mode: str = "min", keep: int = 1):
        super().__init__(metric, mode)
        if keep < 1:
            raise PlaitError(Problem("U011", f"BestCheckpoint(keep={keep}) keeps no checkpoint", fix=("keep=1",)))
        self.keep = keep
        self._checkpoints: Checkpoints | None = None

    def on_evaluation(self, engine: RunningEngine, values: dict[str, float]) -> None:
        """Save the state, if it is the best so far."""
        if not self.improved(engine.position.step, values):
            return
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(beside_checkpoints(engine) / BEST)
        engine.place.beat(engine.position.step, "checkpoint")
        self._checkpoints.save(engine, self.keep)
        engine.place.beat(engine.position.step, "checkpoint")


class Profile(Callback):
    """Traces steps `first` to `last` on every rank with torch.profiler, into `profile/rankN.json` of the run.

    The files are in Chrome's format, for Perfetto. With CUDA its activities are traced too.
    """

    def __init__(self, first: int, last: int):
        if not 1 <= first <= last:
            what = f"Profile({first}, {last}) is not a first and a last step, counted from 1"
            raise PlaitError(Problem("U011", what, fix=("Profile(10, 13)",)))
        self.first, self.last = first, last
        self._profiler: torch.profiler.profile | None = None

    def on_start(self, engine: RunningEngine) -> None:
        self._begin(engine)

    def on_step(self, engine: RunningEngine, step: Step) -> None:
        if self._profiler is not None and step.step >= self.last:
            self._write(engine)
        self._begin(engine)

    def on_end(self, engine: RunningEngine) -> None:
        """A run that ended among the steps leaves what there is."""
        self._write(engine)

    def _begin(self, engine: RunningEngine) -> None:
        """Begin when the next step is the first to be traced."""
        if engine.position.step + 1 == self.first:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if engine.rank_model.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()

    def _write(self, engine: RunningEngine) -> None:
        if self._profiler is None:
            return
        self._profiler.stop()
        folder = beside_checkpoints(engine) / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(folder / f"rank{engine.place.rank}.json"))
        self._profiler = None


def beside_checkpoints(engine: RunningEngine) -> Path:
    """The run's directory, in which its checkpoints are."""
    return engine.checkpoints.directory.parent
