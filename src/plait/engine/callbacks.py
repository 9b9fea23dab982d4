"""Callbacks: user code that runs at five points of a run, on all ranks.

A callback receives the engine and the result of a step or an evaluation. It may end the run (`engine.stop`) and add to a step's
metrics (`engine.log`). State that must survive a resume is returned by `state_dict` as JSON values, which are saved in checkpoints.

A rank's request to end the run is one value in the row that all ranks sum in every step. After an evaluation, which exchanges
messages anyway, ranks exchange their requests directly. Without callbacks nothing is sent.

The common callbacks are defined at the end: end a run that no longer improves, keep the best checkpoint, profile some steps. A metric
is one of the job's `Evaluate.metrics`. Its values are the same on all ranks, so all ranks decide alike. A step that is evaluated
again after a resume counts once.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.checkpoint.carried_state import Training, exchange_json
from plait.checkpoint.checkpoints import Checkpoints
from plait.config.errors import FAILED, PlaitError, Problem, did_you_mean, summarize_error
from plait.config.job import find_user_line
from plait.config.plan import Plan
from plait.engine.resume import BEST
from plait.engine.step import Step
from plait.launch.failures import describe_error
from plait.tensors.torch_private import FakeTensor, TorchDispatchMode
from plait.tensors.trees import flatten_tensors


class RunningEngine(Training, Protocol):
    """The engine that a callback receives: the `Engine` of its rank."""

    checkpoints: Checkpoints

    def stop(self, reason: str) -> None:
        """End the run on all ranks. May be called on any rank."""

    def log(self, name: str, value: float) -> None:
        """Add a value to the metrics of the step."""

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int = 64, temperature: float = 0.0,
        top_k: int | None = None, stop: int | None = None, seed: int = 0, length: int | None = None,
        inputs: Callable[[Tensor], Any] | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """Continue prompts."""
        ...


class Callback:
    """Base class of callbacks, with methods for five points of a run. Every method does nothing by default, and is called on all ranks."""

    def on_start(self, engine: RunningEngine) -> None:
        """Called before the first step, after a resume."""

    def on_step(self, engine: RunningEngine, step: Step) -> None:
        """Called after a step."""

    def on_evaluation(self, engine: RunningEngine, values: dict[str, float]) -> None:
        """Called after an evaluation. `values`: the job's metrics by name, the same on all ranks."""

    def on_save(self, engine: RunningEngine, path: Path) -> None:
        """Called after a checkpoint was published."""

    def on_end(self, engine: RunningEngine) -> None:
        """Called after the last step, its evaluation and its checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values to save in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned when the checkpoint was saved."""


class Callbacks:
    """The callbacks of a run, in order, and their requests to end it. U011 for an object that is not a callback."""

    def __init__(self, callbacks: Sequence[Callback] = ()):
        self.by_name: dict[str, Callback] = {}
        """By class name; `Name#2` is the second of a class."""
        counts = Counter[str]()
        for callback in check_callbacks(callbacks, "Engine(callbacks=…)"):
            kind = type(callback).__name__
            counts[kind] += 1
            self.by_name[f"{kind}#{counts[kind]}" if counts[kind] > 1 else kind] = callback
        self.stop_reason = ""
        """Why this rank requests the end of the run; empty without a request."""
        self.has_stop_request = False
        """Whether any rank requests the end of the run."""
        self.end_reason = ""
        """Why the run ends before its last step: the same on all ranks."""
        self.logged: dict[str, float] = {}
        """Values that `Engine.log` adds to the metrics of a step."""
        self.evaluated_step = 0
        """The step of the last evaluation that callbacks received."""
        self._published: list[Path] = []
        self._has_started = False

    def start(self, engine: RunningEngine) -> None:
        """Call `on_start` before the first step; a second call does nothing."""
        if not self._has_started:
            self._has_started = True
            self._call("on_start", engine)

    def step(self, engine: RunningEngine, step: Step) -> None:
        if self.has_stop_request:
            self._agree_on_end(engine)
        self._call("on_step", engine, step)
        step.given, self.logged = step.given | self.logged, {}
        self.notify_saves(engine)

    def notify_evaluation(self, engine: RunningEngine, values: dict[str, float]) -> None:
        if self.by_name and values:
            self.evaluated_step = engine.position.step
            self._call("on_evaluation", engine, values)
            self._agree_on_end(engine)

    def add_published(self, path: Path) -> None:
        """Queue a checkpoint that was published, on all ranks in the same step."""
        self._published.append(path)

    def notify_saves(self, engine: RunningEngine) -> None:
        """Call `on_save` for the checkpoints published since the last call."""
        while self._published:
            self._call("on_save", engine, self._published.pop(0))

    def end(self, engine: RunningEngine) -> None:
        self._call("on_end", engine)

    def _agree_on_end(self, engine: RunningEngine) -> None:
        """Agree on whether to end the run, with the reason of the first rank that requests it. All ranks call it."""
        said = (word["wish"] for word in exchange_json(engine, {"wish": self.stop_reason}))
        self.end_reason = next((wish for wish in said if wish), self.end_reason)
        self.stop_reason, self.has_stop_request = "" if self.end_reason else self.stop_reason, False

    def _call(self, hook: str, *values: Any) -> None:
        for name, callback in self.by_name.items():
            with _RejectPlaceholders() if values[0].plan.pp > 1 else nullcontext():
                _call_user(f"{name}.{hook}", getattr(callback, hook), *values, plan=values[0].plan)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: that of each callback, and the pending or final end of the run."""
        states = {name: _call_user(f"{name}.state_dict", c.state_dict) for name, c in self.by_name.items()}
        return {
            "states": {name: state for name, state in states.items() if state},
            "wish": self.stop_reason,
            "ended": self.end_reason,
            "evaluated": self.evaluated_step,
        }

    def load_state_dict(self, kept: dict[str, Any]) -> list[str]:
        """Restore the state from a checkpoint. Returns notes, one per line."""
        states, told = kept.get("states", {}), list[str]()
        self.stop_reason, self.end_reason = kept.get("wish", ""), kept.get("ended", "")
        self.evaluated_step = kept.get("evaluated", 0)
        for name, callback in self.by_name.items():
            if name in states:
                _call_user(f"{name}.load_state_dict", callback.load_state_dict, states[name])
            elif _call_user(f"{name}.state_dict", callback.state_dict):
                told.append(f"callback {name}: no state in the checkpoint; starting without it")
        return told + [
            f"callback {name}: ignored its state in the checkpoint, since the run has no such callback" for name in states if name not in self.by_name
        ]


class _RejectPlaceholders(TorchDispatchMode):
    """Reject operators that mix real tensors with placeholder weights of other stages: torch drops the result of such an operator."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        fake = [isinstance(t, FakeTensor) for t in flatten_tensors((args, kwargs or {})) if t.dim()]
        if any(fake) and not all(fake):
            raise RuntimeError(f"{func} mixes a tensor with a weight of another pipeline stage, which has no data on this rank")
        return func(*args, **(kwargs or {}))


def check_callbacks(callbacks: object, where: str) -> Sequence[Callback]:
    """Return the callbacks if they are a list of callbacks, else raise U011."""
    fix = ("return [plait.EarlyStopping(…), MyCallback()]    instances of plait.Callback, in a list",)
    if not isinstance(callbacks, (list, tuple)):
        what = f"the callbacks are a {type(callbacks).__name__}, not a list"
        raise PlaitError(Problem("U011", what, where=where, fix=fix))
    wrong = next((c for c in callbacks if not isinstance(c, Callback)), None)
    if wrong is not None:
        kind = f"the class {wrong.__name__}" if isinstance(wrong, type) else f"a {type(wrong).__name__}"
        what = f"{kind} is among the callbacks, and is not an instance of a plait.Callback subclass"
        raise PlaitError(Problem("U011", what, where=where, fix=fix))
    return callbacks


def _call_user(name: str, method: Callable[..., Any], *values: Any, plan: Plan | None = None) -> Any:
    """Call a method of a callback and return its result. U013 names the method if it raises; failures of other ranks propagate
    unchanged.

    `plan`: the plan, for methods that may access weights.
    """
    try:
        return method(*values)
    except PlaitError:
        raise
    except Exception as error:
        if describe_error(error)["sort"] == "peer":
            raise
        what = f"the callback {name} raised {summarize_error(error)}"
        cuts = plan.weight_sharding if plan is not None and isinstance(error, RuntimeError) else []  # a RuntimeError of torch about mismatched shapes
        why = f"under {cuts[0]} `engine.model` has the local shard of each weight, whose shape differs from the full weight's" if cuts else ""
        fix = ("use plait.EMA in Job.ema: it averages the weights under every plan", "use a plan with only dp") if cuts else ()
        raise PlaitError(Problem("U013", what, why=why, where=find_user_line(error), fix=fix), FAILED) from error


MODES = ("min", "max")


class MetricTracker(Callback):
    """Tracks the best value of an evaluation metric and its step. U011 for a `mode` other than min or max."""

    def __init__(self, metric: str, mode: str = "min", min_delta: float = 0.0):
        if mode not in MODES:
            what = f'{type(self).__name__}(mode="{mode}") is neither "min" nor "max"'
            raise PlaitError(Problem("U011", what, fix=('mode="min"    of a loss', 'mode="max"    of an accuracy')))
        self.metric, self.mode, self.min_delta = metric, mode, min_delta
        self.best: float | None = None
        self.best_step, self.seen = 0, 0
        """Step of the best value, and of the last evaluation."""

    def on_start(self, engine: RunningEngine) -> None:
        """Raise U012 if the job has no evaluation."""
        if engine.job.evaluate is None:
            what = f'{type(self).__name__}("{self.metric}") needs an evaluation metric, but the job has no evaluation'
            raise PlaitError(Problem("U012", what, fix=("Job(evaluate=plait.Evaluate(data, metrics, every=100))",)))

    def improved(self, step: int, values: dict[str, float]) -> bool | None:
        """Return whether the metric improved on its best value by more than `min_delta`; None for a step evaluated before. U012 if it is
        missing."""
        if self.metric not in values:
            what = f"unknown metric {self.metric}        {did_you_mean(self.metric, [*values])}"
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
        """Restore the state, unless it belongs to another metric."""
        if state["metric"] == self.metric:
            self.best, self.best_step, self.seen = state["best"], state["best_step"], state["seen"]


class EarlyStopping(MetricTracker):
    """Ends the run when a metric has not improved for `patience` evaluations.

    `metric`: one of `Evaluate.metrics`; `mode`: "min" if lower is better, else "max". An improvement must exceed `min_delta`. A value
    that is not finite is not an improvement. The run ends at the step of that evaluation, with exit code 0.
    """

    def __init__(self, metric: str, patience: int, mode: str = "min", min_delta: float = 0.0):
        super().__init__(metric, mode, min_delta)
        if patience < 1:
            what = f"EarlyStopping(patience={patience}) is invalid: it must be at least 1 evaluation"
            raise PlaitError(Problem("U011", what, fix=("patience=5",)))
        self.patience, self.waited = patience, 0

    def on_evaluation(self, engine: RunningEngine, values: dict[str, float]) -> None:
        improved = self.improved(engine.position.step, values)
        if improved is not None:
            self.waited = 0 if improved else self.waited + 1
        if self.waited >= self.patience:
            self.waited = 0  # a run resumed from here starts counting again
            best = "no finite value yet" if self.best is None else f"best {self.best:.6g} at step {self.best_step}"
            engine.stop(f"{self.metric} has not improved for {self.patience} evaluations ({best})")

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.waited = state["waited"] if state["metric"] == self.metric else 0


class BestCheckpoint(MetricTracker):
    """Keeps the checkpoint with the best value of a metric, in the folder `best` of the run.

    `metric` and `mode` as for `EarlyStopping`. `keep`: how many of the best checkpoints so far to keep. They do not count toward
    `--keep`. A checkpoint holds the state after the evaluation of those callbacks that precede this one in the list, so list it last.
    """

    def __init__(self, metric: str, mode: str = "min", keep: int = 1):
        super().__init__(metric, mode)
        if keep < 1:
            raise PlaitError(Problem("U011", f"BestCheckpoint(keep={keep}) keeps no checkpoint", fix=("keep=1",)))
        self.keep = keep
        self._checkpoints: Checkpoints | None = None

    def on_evaluation(self, engine: RunningEngine, values: dict[str, float]) -> None:
        """Save the state if it is the best so far."""
        if not self.improved(engine.position.step, values):
            return
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(get_run_path(engine) / BEST)
        engine.place.beat(engine.position.step, "checkpoint")
        self._checkpoints.save(engine, self.keep)
        engine.place.beat(engine.position.step, "checkpoint")


class Profile(Callback):
    """Traces steps `first` to `last` on every rank with torch.profiler, into `profile/rankN.json` of the run.

    The files are in Chrome's format, for Perfetto. With CUDA its activities are traced too.
    """

    def __init__(self, first: int, last: int):
        if not 1 <= first <= last:
            what = f"Profile({first}, {last}) is not a valid range of steps, counted from 1"
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
        """Write the trace of a run that ends within the profiled steps."""
        self._write(engine)

    def _begin(self, engine: RunningEngine) -> None:
        """Start the profiler if the next step is the first to be traced."""
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
        folder = get_run_path(engine) / "profile"
        folder.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(folder / f"rank{engine.place.rank}.json"))
        self._profiler = None


def get_run_path(engine: RunningEngine) -> Path:
    """Return the run's directory, which contains its checkpoints."""
    return engine.checkpoints.directory.parent
