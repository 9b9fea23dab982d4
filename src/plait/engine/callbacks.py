"""Callbacks: what a job has done beside the steps of its training, at five points of a run, on all ranks.

A callback sees the engine and what a step or an evaluation gave. It may end the run (`engine.stop`) and add to a step's metrics
(`engine.log`). What it must remember over a resume, it gives as JSON values in `state_dict`: these are kept in checkpoints.

That a rank wants to end the run is one number in the row that all ranks sum in every step; after an evaluation, which has
messages anyway, ranks ask each other. Without callbacks nothing is sent.

At the end are those that most jobs want: end a run that no longer improves, keep the best checkpoint, trace some steps. A metric is
one of the job's `Evaluate.metrics`, whose values are the same on all ranks; so are what these callbacks decide. A step that is
evaluated a second time after a resume counts once.
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
from plait.config.errors import FAILED, PlaitError, Problem, did_you_mean, in_a_line
from plait.config.job import user_line
from plait.config.plan import Plan
from plait.engine.resume import BEST
from plait.engine.step import Step
from plait.launch.failures import described
from plait.tensors.torch_private import FakeTensor, TorchDispatchMode
from plait.tensors.trees import flat


class RunningEngine(Training, Protocol):
    """What a callback is given: the `Engine` of the rank that it runs on."""

    checkpoints: Checkpoints

    def stop(self, reason: str) -> None:
        """End the run on all ranks; any may call it."""

    def log(self, name: str, value: float) -> None:
        """Add a number to the metrics of the step."""

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int = 64, temperature: float = 0.0,
        top_k: int | None = None, stop: int | None = None, seed: int = 0, length: int | None = None,
        inputs: Callable[[Tensor], Any] | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """Continue prompts."""
        ...


class Callback:
    """What is done at five points of a run. Every method does nothing by default, and is called on all ranks."""

    def on_start(self, engine: RunningEngine) -> None:
        """Before the first step, after a resume."""

    def on_step(self, engine: RunningEngine, step: Step) -> None:
        """After a step."""

    def on_evaluation(self, engine: RunningEngine, values: dict[str, float]) -> None:
        """After an evaluation. `values`: the job's metrics by name, the same on all ranks."""

    def on_save(self, engine: RunningEngine, path: Path) -> None:
        """A checkpoint was published."""

    def on_end(self, engine: RunningEngine) -> None:
        """After the last step, its evaluation and its checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values that are kept in checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave when the checkpoint was saved."""


class Callbacks:
    """The callbacks of a run, in order, and what they ask of it. U011 for what is no callback."""

    def __init__(self, callbacks: Sequence[Callback] = ()):
        self.named: dict[str, Callback] = {}
        """By class; `Name#2` is the second of a class."""
        counts = Counter[str]()
        for callback in checked(callbacks, "Engine(callbacks=…)"):
            kind = type(callback).__name__
            counts[kind] += 1
            self.named[f"{kind}#{counts[kind]}" if counts[kind] > 1 else kind] = callback
        self.wish = ""
        """Why this rank wants to end the run."""
        self.asked = False
        """Some rank wants to."""
        self.ended = ""
        """Why the run is at its end before its last step: the same on all ranks."""
        self.logged: dict[str, float] = {}
        """What `Engine.log` adds to the metrics of a step."""
        self.evaluated = 0
        """The step of the last evaluation that callbacks were told of."""
        self._saved: list[Path] = []
        self._begun = False

    def start(self, engine: RunningEngine) -> None:
        """The first step follows. Called again, it does nothing."""
        if not self._begun:
            self._begun = True
            self._call("on_start", engine)

    def step(self, engine: RunningEngine, step: Step) -> None:
        if self.asked:
            self._end_together(engine)
        self._call("on_step", engine, step)
        step.given, self.logged = step.given | self.logged, {}
        self.saves(engine)

    def evaluation(self, engine: RunningEngine, values: dict[str, float]) -> None:
        if self.named and values:
            self.evaluated = engine.position.step
            self._call("on_evaluation", engine, values)
            self._end_together(engine)

    def published(self, path: Path) -> None:
        """A checkpoint was published, on all ranks in the same step."""
        self._saved.append(path)

    def saves(self, engine: RunningEngine) -> None:
        """Tell of the checkpoints that were published meanwhile."""
        while self._saved:
            self._call("on_save", engine, self._saved.pop(0))

    def end(self, engine: RunningEngine) -> None:
        self._call("on_end", engine)

    def _end_together(self, engine: RunningEngine) -> None:
        """Whether any rank wants to end the run, and why: the first that does says it. All ranks call it."""
        said = (word["wish"] for word in exchange_json(engine, {"wish": self.wish}))
        self.ended = next((wish for wish in said if wish), self.ended)
        self.wish, self.asked = "" if self.ended else self.wish, False

    def _call(self, hook: str, *values: Any) -> None:
        for name, callback in self.named.items():
            with _RejectPlaceholders() if values[0].plan.pp > 1 else nullcontext():
                _of_user(f"{name}.{hook}", getattr(callback, hook), *values, plan=values[0].plan)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the state of each callback that has one, and whether the run is at its end, or about to be."""
        states = {name: _of_user(f"{name}.state_dict", c.state_dict) for name, c in self.named.items()}
        return {
            "states": {name: state for name, state in states.items() if state},
            "wish": self.wish,
            "ended": self.ended,
            "evaluated": self.evaluated,
        }

    def load_state_dict(self, kept: dict[str, Any]) -> list[str]:
        """Take up what a checkpoint keeps; what there is to say of it, a line each."""
        states, told = kept.get("states", {}), list[str]()
        self.wish, self.ended = kept.get("wish", ""), kept.get("ended", "")
        self.evaluated = kept.get("evaluated", 0)
        for name, callback in self.named.items():
            if name in states:
                _of_user(f"{name}.load_state_dict", callback.load_state_dict, states[name])
            elif _of_user(f"{name}.state_dict", callback.state_dict):
                told.append(f"callback {name}: not in the checkpoint, it begins anew")
        return told + [
            f"callback {name}: its state is left out, there is none" for name in states if name not in self.named
        ]


class _RejectPlaceholders(TorchDispatchMode):
    """Rejects operators that mix tensors with weights of other stages, which are fake here: torch drops what such an operator writes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        fake = [isinstance(t, FakeTensor) for t in flat((args, kwargs or {})) if t.dim()]
        if any(fake) and not all(fake):
            raise RuntimeError(f"{func} mixes a tensor with a weight of another pipeline stage, which has no data on this rank")
        return func(*args, **(kwargs or {}))


def checked(callbacks: object, where: str) -> Sequence[Callback]:
    """The callbacks, if they are a list of them. U011."""
    fix = ("return [plait.EarlyStopping(…), MyCallback()]    instances of plait.Callback, in a list",)
    if not isinstance(callbacks, (list, tuple)):
        what = f"the callbacks are a {type(callbacks).__name__}, not a list"
        raise PlaitError(Problem("U011", what, where=where, fix=fix))
    wrong = next((c for c in callbacks if not isinstance(c, Callback)), None)
    if wrong is not None:
        kind = f"the class {wrong.__name__}" if isinstance(wrong, type) else f"a {type(wrong).__name__}"
        what = f"{kind} is among the callbacks, and is no object of a class made from plait.Callback"
        raise PlaitError(Problem("U011", what, where=where, fix=fix))
    return callbacks


def _of_user(name: str, method: Callable[..., Any], *values: Any, plan: Plan | None = None) -> Any:
    """What a callback's method returns. U013 when it raises, which names it; the end of another rank goes on as it is. `plan`: where
    the method may look at weights."""
    try:
        return method(*values)
    except PlaitError:
        raise
    except Exception as error:
        if described(error)["sort"] == "peer":
            raise
        what = f"the callback {name} raised {in_a_line(error)}"
        cuts = plan.weight_sharding if plan is not None and isinstance(error, RuntimeError) else []  # torch's, of tensors that do not fit
        why = f"under {cuts[0]} `engine.model` has a rank's part of the weights, which fits no tensor of whole weights" if cuts else ""
        fix = ("plait.EMA in Job.ema averages the weights under every plan", "a plan of dp alone") if cuts else ()
        raise PlaitError(Problem("U013", what, why=why, where=user_line(error), fix=fix), FAILED) from error


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
