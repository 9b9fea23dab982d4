"""Where a rank's training begins: its engine is made, and put at a checkpoint, at given weights, or at the job's own.

Also what goes with it from there: after which steps a run ends and evaluates, and what a rank reports to the process that started it
(lines for the terminal, warnings, the status in the live line).
"""

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from plait.checkpoint import export, optimizer_state
from plait.checkpoint.checkpoints import Checkpoints
from plait.config.job import Job
from plait.config.plan import Plan
from plait.data import sampling
from plait.engine.build import broadcast_text
from plait.engine.callbacks import Callback
from plait.engine.elastic import Keeper
from plait.engine.engine import Engine
from plait.engine.metrics import MetricsFollower, Recorder
from plait.engine.resume import AUTO, writing
from plait.engine.run_directory import RunDirectory
from plait.engine.server.state import left_out
from plait.engine.step import Step
from plait.launch import nccl
from plait.launch.devices import kind_of
from plait.launch.failures import short
from plait.launch.place import Place
from plait.model.sketch import Sketch
from plait.parallel.context.sequences import opened_units
from plait.parallel.tensor import choose
from plait.tensors.norm import number


def is_last(engine: Engine, step: int) -> bool:
    """Whether no step follows this one."""
    return engine.stopping or step == engine.job.steps or bool(engine.callbacks.ended)


def evaluate_if_due(engine: Engine, recorder: Recorder, step: int) -> None:
    """Evaluate, and record the metrics, if an evaluation follows this step. All ranks call it."""
    if is_evaluated(engine, step):
        with engine.spans.around("evaluate"):
            values = engine.evaluate()
        recorder.evaluated(step, values)


def is_evaluated(engine: Engine, step: int) -> bool:
    """Whether an evaluation follows this step."""
    evaluation, last = engine.job.evaluate, step == engine.job.steps or bool(engine.callbacks.ended)
    return evaluation is not None and (last or bool(evaluation.every and step % evaluation.every == 0))


def catch_up(engine: Engine, run: RunDirectory, recorder: Recorder, *, onward: bool) -> None:
    """Evaluate the step that the run resumes from, if it had ended before that was done. If it was done after the checkpoint was
    saved, callbacks are given its values again. `onward`: an early end is not one. All ranks call it."""
    rank, step = engine.place.rank, engine.position.step
    text = "" if rank else json.dumps(run.evaluation(step))
    values = json.loads(broadcast_text(text, rank, engine.rank_model.mesh.everyone, engine.rank_model.device))
    if values is None:
        evaluate_if_due(engine, recorder, step)
    elif _carries_state(engine) and is_evaluated(engine, step):
        # The checkpoint is older than the evaluation, which may have changed what the model carries.
        engine.evaluate(again=True)
    if values is not None and engine.callbacks.evaluated < step:
        engine.callbacks.evaluation(engine, {name: math.nan if v is None else v for name, v in values.items()})
    if onward and step < engine.job.steps:
        engine.callbacks.ended = ""


def _carries_state(engine: Engine) -> bool:
    """Whether the state that the run resumes from holds what the model carries from step to step."""
    return engine.checkpoints.carries or (engine.memory is not None and engine.memory.carries)


class RunNotes:
    """Reports of one rank. What all ranks know, rank 0 reports; what a pipeline stage knows alone, the first rank of that stage."""

    def __init__(self, place: Place):
        self.place = place
        self.send: Callable[[dict[str, Any]], None] = place.report or (lambda message: None)
        self.reported = set[str]()
        """Reasons why training is not exact that were reported."""

    def note(self, text: str) -> None:
        """A line on the terminal."""
        self.send({"kind": "note", "text": text})

    def status(self, value: dict[str, Any]) -> None:
        self.send({"kind": "status", "value": value})

    def take_warnings(self) -> None:
        """Report Python's warnings, where the launcher shows each once for all ranks."""
        if self.place.report is not None and not self.place.joined:
            warnings.showwarning = self._warning

    def _warning(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        text = warnings.formatwarning(message, category, filename, lineno, line)
        self.send({"kind": "warning", "text": text, "short": f"{category.__name__}: {short(str(message))}"})

    def report_unsplit(self, engine: Engine) -> None:
        """What of the model every rank holds, or computes, in full under tp and cp; and what stays uncompiled."""
        lines = [choose.summary(engine.rank_model.whole_sketch)] if engine.rank_model.plan.tp > 1 else []
        uncompiled = engine.rank_model.techniques.compiled.notes() if engine.rank_model.techniques.compiled is not None else []
        for line in (*lines, *opened_units(engine.rank_model.whole_sketch), *uncompiled) if self.place.rank == 0 else ():
            self.note(f"note  {line}")

    def report_inexact(self, engine: Engine) -> None:
        """Why training cannot equal one device, each reason once. Some show in the first step, and losses' on the last stage only."""
        reasons = engine.inexact if self.place.rank == 0 else engine.rank_model.batch_peers.inexact if first_of_stage(engine) else ()
        for line in reasons:
            if line not in self.reported:
                self.note(f"note  not exact: {line}")
                self.reported.add(line)

    def report_uncompiled(self, engine: Engine) -> None:
        """What torch.compile gave up in the last step."""
        for line in engine.rank_model.techniques.compiled.news() if engine.rank_model.techniques.compiled is not None else ():
            self.note(f"note  {line}" if self.place.rank == 0 else f"note  rank {self.place.rank}: {line}")

    def report_nonfinite_checkpoints(self, engine: Engine) -> None:
        """Checkpoints with values that are not finite."""
        while engine.checkpoints.marked and self.place.rank == 0:
            problem = engine.checkpoints.marked.pop(0)
            self.note(f"note  {problem.what}: {problem.why}")

    def report_unsaved(self, engine: Engine) -> None:
        """State of modules that steps change and checkpoints cannot hold."""
        if first_of_stage(engine):
            for name, kind in engine.carried.take().unsaved.items():
                self.note(f"note  checkpoints cannot hold {name} ({kind}), which steps change: a resumed run begins it anew")


class StepTally:
    """The last loss of a run and its skipped steps, as steps are recorded."""

    def __init__(self, notes: RunNotes):
        self.notes = notes
        self.loss: float | None = None
        self.skipped = 0

    def add(self, step: Step) -> None:
        """A step was recorded; reports why it was skipped, if it was."""
        self.loss, self.skipped = step.loss, self.skipped + step.skipped
        if step.trouble is not None and self.notes.place.rank == 0:
            self.notes.note("note  left out " + f"{step.trouble.what}\n{step.trouble.why}".replace("\n", "\n      "))

    def facts(self) -> dict[str, Any]:
        """For the result of the run."""
        return {"loss": None if self.loss is None else number(self.loss), "skipped": self.skipped}


def first_of_stage(engine: Engine) -> bool:
    """Whether this rank is the first of its pipeline stage."""
    return not any(place for axis, place in engine.rank_model.mesh.at.items() if axis != "pp")


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """What one rank trains, and what it saves and records meanwhile. Ranks of a run have the same."""

    name: str
    """The job's name as given: path/to/job.py:function."""
    job: Job
    plan: Plan
    arguments: dict[str, str]
    """What the job was called with: kept in checkpoints."""
    device: str = "auto"
    workers: int = 0
    """Loader processes of each rank."""
    on_nan: str = "stop"
    """What to do in a step whose loss or gradient norm is not finite: stop, skip or ignore."""
    callbacks: Callable[[], list[Callback]] | None = None
    """Makes the callbacks, on each rank."""
    group_norms: bool = False
    """Record the gradient norm of each parameter group."""
    trackers: tuple[MetricsFollower, ...] = ()
    """Experiment trackers, which also get the metrics."""
    resume: str | None = None
    """The run or checkpoint to resume; empty or `auto`: the newest, if there is one; None: start anew."""
    allow_changes: bool = False
    """Resume although the job changed such that its place in the data means something else."""
    onward: bool = False
    """The number of steps is given: resume also after an early end."""
    checkpoint_params: str = "trained"
    """What checkpoints hold of a model with frozen parameters that were read from `Job.weights`: trained ones, or all."""
    save_every: int = 100
    """Steps between checkpoints."""
    keep: int = 3
    """Checkpoints that are kept."""
    sketch: Sketch | None = None
    """Of the whole model, if it was made before ranks were forked; None: each rank makes its own."""


def make_engine(options: RankOptions, run: RunDirectory, place: Place) -> Engine:
    """The engine of the options. What checkpoints will state of the job is computed here, before the first step."""
    if kind_of(options.device) != "cpu":
        nccl.settle(run.log(place.rank).parent)
    engine = Engine(
        options.job, options.plan, device=options.device, workers=options.workers, place=place, on_nan=options.on_nan,
        sketch=options.sketch, read_weights=False, callbacks=options.callbacks() if options.callbacks is not None else (),
        group_norms=options.group_norms,
    )  # fmt: skip
    engine.checkpoints, engine.arguments = Checkpoints(run.checkpoints), options.arguments
    engine.checkpoints.told = partial(_published, engine)
    optimizer_state.check(engine)
    place.beat(engine.position.step, "data")
    sampling.agreed(engine.job, engine.data, engine.rank_model.mesh.everyone)
    engine.fingerprint.get("data")
    return engine


def _published(engine: Engine, path: Path) -> None:
    engine.place.saved(path)
    engine.callbacks.published(path)


def restore(engine: Engine, options: RankOptions, run: RunDirectory, notes: RunNotes, keeper: Keeper | None) -> Path | None:
    """Put the engine where the run begins. Returns the checkpoint, if that is one. All ranks call it.

    `keeper`: a rank was lost, and this goes on from the newest state in memory or on the disk.
    """
    checkpoint = None
    if keeper is not None:
        checkpoint = _restore_after_loss(engine, keeper, run, notes)
        if engine.position.step and is_last(engine, engine.position.step):  # lost after the last step, maybe before its checkpoint
            engine.save(options.keep)
    elif options.resume is not None:
        checkpoint = _resume(engine, options, run, notes)
    if options.job.weights is not None and checkpoint is None:
        engine.load_weights(options.job.weights)
    if options.checkpoint_params == "all":
        engine.base = None
    if engine.place.rank == 0:
        with writing(run.path):
            export.describe(engine.model, options.job.weights, run.path / export.FOLDER)
    return checkpoint


def _restore_after_loss(engine: Engine, keeper: Keeper, run: RunDirectory, notes: RunNotes) -> Path | None:
    """The newest state there is, and the record of the run up to it."""
    path, where = keeper.goes_on()
    if engine.place.rank == 0:
        notes.note(f"note  going on from step {engine.position.step}, {where}")
    _cut_record(engine, run, keeper.metrics())
    return path


def _resume(engine: Engine, options: RankOptions, run: RunDirectory, notes: RunNotes) -> Path | None:
    path = engine.resume(missing_ok=options.resume in ("", AUTO), allow_changes=options.allow_changes)
    if engine.place.rank == 0:
        for problem in engine.checkpoints.refused:
            notes.note(f"refused {problem.what}: {problem.why}")
        resumed = f"resumed from {path} at step {engine.position.step}"
        notes.note(resumed if path else "nothing saved yet: starting from step 0")
        for line in engine.checkpoints.changed:
            notes.note(f"changed  {line}")
        if path is not None and (line := left_out(path)):
            notes.note(line)
        with writing(run.path):
            run.describe(options.name, options.plan, options.arguments)
    _cut_record(engine, run)
    return path


def _cut_record(engine: Engine, run: RunDirectory, metrics: dict[str, Any] | None = None) -> None:
    """Remove what the run recorded of steps that are made again. All ranks call it: none appends before."""
    if engine.place.rank == 0:
        with writing(run.path):
            run.cut(engine.position.step)
            if metrics is not None:
                run.remember(metrics)
    if engine.rank_model.mesh.everyone is not None:
        broadcast_text("cut", engine.place.rank, engine.rank_model.mesh.everyone, engine.rank_model.device)
