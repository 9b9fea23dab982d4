"""Start the training of a rank: make its engine, and restore a checkpoint, given weights, or the job's initial weights.

Also: after which steps a run ends and evaluates, and the reports of a rank to the process that started it (lines for the terminal,
warnings, the status in the live line).
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
from plait.engine.elastic import InMemoryCheckpointer
from plait.engine.engine import Engine
from plait.engine.metrics import MetricsFollower, Recorder
from plait.engine.resume import AUTO, translate_write_errors
from plait.engine.run_directory import RunDirectory
from plait.engine.server.state import describe_unused_samples
from plait.engine.step import Step
from plait.launch import nccl
from plait.launch.devices import resolve_kind
from plait.launch.failures import format_first_line
from plait.launch.place import Place
from plait.model.sketch import Sketch
from plait.parallel.context.sequences import describe_opened
from plait.parallel.tensor import choose_slices
from plait.tensors.norm import finite_or_none


def is_last(engine: Engine, step: int) -> bool:
    """Return whether no step follows this one."""
    return engine.stopping or step == engine.job.steps or bool(engine.callbacks.end_reason)


def evaluate_if_due(engine: Engine, recorder: Recorder, step: int) -> None:
    """Evaluate and record the metrics if an evaluation is due after this step. All ranks call it."""
    if is_evaluation_due(engine, step):
        with engine.spans.record_span("evaluate"):
            values = engine.evaluate()
        recorder.record_evaluation(step, values)


def is_evaluation_due(engine: Engine, step: int) -> bool:
    """Return whether an evaluation is due after this step."""
    evaluation, last = engine.job.evaluate, step == engine.job.steps or bool(engine.callbacks.end_reason)
    return evaluation is not None and (last or bool(evaluation.every and step % evaluation.every == 0))


def catch_up(engine: Engine, run: RunDirectory, recorder: Recorder, *, onward: bool) -> None:
    """Evaluate the step that the run resumes from if its evaluation is missing. All ranks call it.

    If the evaluation happened after the checkpoint was saved, callbacks receive its values again. `onward`: ignore an earlier end of
    the run.
    """
    rank, step = engine.place.rank, engine.position.step
    text = "" if rank else json.dumps(run.read_evaluation(step))
    values = json.loads(broadcast_text(text, rank, engine.rank_model.mesh.world_group, engine.rank_model.device))
    if values is None:
        evaluate_if_due(engine, recorder, step)
    elif _has_carried_state(engine) and is_evaluation_due(engine, step):
        # The checkpoint is older than the evaluation, which may have changed the model's carried state.
        engine.evaluate(again=True)
    if values is not None and engine.callbacks.evaluated_step < step:
        engine.callbacks.notify_evaluation(engine, {name: math.nan if v is None else v for name, v in values.items()})
    if onward and step < engine.job.steps:
        engine.callbacks.end_reason = ""


def _has_carried_state(engine: Engine) -> bool:
    """Return whether the checkpoint of the resumed run has the state that the model carries from step to step."""
    return engine.checkpoints.has_carried_state or (engine.memory is not None and engine.memory.has_carried_state)


class RunNotes:
    """Reports of one rank. Rank 0 reports facts common to all ranks; the first rank of a stage reports facts of that stage."""

    def __init__(self, place: Place):
        self.place = place
        self.send: Callable[[dict[str, Any]], None] = place.report or (lambda message: None)
        self.reported = set[str]()
        """Reasons for inexact training that were reported."""

    def note(self, text: str) -> None:
        """Print a line on the terminal."""
        self.send({"kind": "note", "text": text})

    def report_status(self, value: dict[str, Any]) -> None:
        self.send({"kind": "status", "value": value})

    def take_warnings(self) -> None:
        """Forward Python warnings to the launcher, which shows each once for all ranks."""
        if self.place.report is not None and not self.place.joined:
            warnings.showwarning = self._report_warning

    def _report_warning(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        text = warnings.formatwarning(message, category, filename, lineno, line)
        self.send({"kind": "warning", "text": text, "short": f"{category.__name__}: {format_first_line(str(message))}"})

    def report_unsplit(self, engine: Engine) -> None:
        """Report the parts of the model that every rank stores or computes in full under tp and cp, and the uncompiled parts."""
        lines = [choose_slices.summarize_slices(engine.rank_model.global_sketch)] if engine.rank_model.plan.tp > 1 else []
        uncompiled = engine.rank_model.techniques.compiled.describe_skips() if engine.rank_model.techniques.compiled is not None else []
        for line in (*lines, *describe_opened(engine.rank_model.global_sketch), *uncompiled) if self.place.rank == 0 else ():
            self.note(f"note  {line}")

    def report_inexact(self, engine: Engine) -> None:
        """Report why training cannot equal one device, each reason once. Some reasons appear in the first step, and those of losses only
        on the last stage."""
        reasons = engine.inexact if self.place.rank == 0 else engine.rank_model.batch_peers.inexact_reasons if is_first_except(engine, "pp") else ()
        for line in reasons:
            if line not in self.reported:
                self.note(f"note  not exact: {line}")
                self.reported.add(line)

    def report_uncompiled(self, engine: Engine) -> None:
        """Report the units that torch.compile gave up on in the last step."""
        for line in engine.rank_model.techniques.compiled.report_failures() if engine.rank_model.techniques.compiled is not None else ():
            self.note(f"note  {line}" if self.place.rank == 0 else f"note  rank {self.place.rank}: {line}")

    def report_nonfinite_checkpoints(self, engine: Engine) -> None:
        """Report checkpoints with non-finite values."""
        while engine.checkpoints.nonfinite_found and self.place.rank == 0:
            problem = engine.checkpoints.nonfinite_found.pop(0)
            self.note(f"note  {problem.what}: {problem.why}")

    def report_unsaved(self, engine: Engine) -> None:
        """Report module state that steps change and checkpoints cannot store."""
        if is_first_except(engine, "pp"):
            for name, kind in engine.carried.snapshot().unsaved.items():
                self.note(f"note  checkpoints cannot hold {name} ({kind}), which steps change: a resumed run starts without it")


class StepTally:
    """The last loss and the number of skipped steps of a run. With replica groups, each group skips steps of its own.

    `reports`: this rank is the first of its group, so it counts and reports them.
    """

    def __init__(self, notes: RunNotes, reports: bool):
        self.notes, self.reports = notes, reports
        self.loss: float | None = None
        self.skipped = 0

    def add(self, step: Step) -> None:
        """Count a recorded step; report why it was skipped, if it was."""
        self.loss, self.skipped = step.loss, self.skipped + (step.skipped and self.reports)
        if step.trouble is not None and self.reports:
            self.notes.note("note  left out " + f"{step.trouble.what}\n{step.trouble.why}".replace("\n", "\n      "))

    def to_result(self) -> dict[str, Any]:
        """Return the values for the result of the run."""
        return {"loss": None if self.loss is None else finite_or_none(self.loss), "skipped": self.skipped}


def is_first_except(engine: Engine, axis: str) -> bool:
    """Return whether this rank is the first along every axis but this one, as the first rank of a stage is for `pp`."""
    return not any(place for other, place in engine.rank_model.mesh.coordinates.items() if other != axis)


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The job, plan, and saving and recording options of one rank. The same on all ranks of a run."""

    name: str
    """The job's name as given: path/to/job.py:function."""
    job: Job
    plan: Plan
    arguments: dict[str, str]
    """Arguments of the job: saved in checkpoints."""
    device: str = "auto"
    workers: int = 0
    """Loader processes of each rank."""
    on_nan: str = "stop"
    """Action if the loss or gradient norm of a step is not finite: stop, skip or ignore."""
    callbacks: Callable[[], list[Callback]] | None = None
    """Makes the callbacks, on each rank."""
    group_norms: bool = False
    """Record the gradient norm of each parameter group."""
    trackers: tuple[MetricsFollower, ...] = ()
    """Experiment trackers, which also receive the metrics."""
    resume: str | None = None
    """The run or checkpoint to resume; empty or `auto`: the newest, if there is one; None: start a new run."""
    allow_changes: bool = False
    """Resume even if the job changed so that its position in the data has a different meaning."""
    onward: bool = False
    """The number of steps was given: resume even after an early end."""
    checkpoint_params: str = "trained"
    """Parameters that checkpoints include if frozen ones were read from `Job.weights`: trained ones, or all."""
    save_every: int = 100
    """Steps between checkpoints."""
    keep: int = 3
    """Checkpoints to keep."""
    sketch: Sketch | None = None
    """Sketch of the full model, if it was made before ranks were forked; None: each rank makes its own."""


def make_engine(options: RankOptions, run: RunDirectory, place: Place) -> Engine:
    """Make the engine. Values that checkpoints record about the job are computed here, before the first step."""
    if resolve_kind(options.device) != "cpu":
        nccl.set_nccl_defaults(run.get_log_path(place.rank).parent)
    engine = Engine(
        options.job, options.plan, device=options.device, workers=options.workers, place=place, on_nan=options.on_nan,
        sketch=options.sketch, read_weights=False, callbacks=options.callbacks() if options.callbacks is not None else (),
        group_norms=options.group_norms,
    )  # fmt: skip
    engine.checkpoints, engine.arguments = Checkpoints(run.checkpoints), options.arguments
    engine.checkpoints.on_published = partial(_handle_published, engine)
    optimizer_state.check_resumable(engine)
    place.beat(engine.position.step, "data")
    sampling.check_same_order(engine.job, engine.data, engine.rank_model.mesh.world_group)
    engine.fingerprint.get("data")
    return engine


def _handle_published(engine: Engine, path: Path) -> None:
    engine.place.saved(path)
    engine.callbacks.add_published(path)


def restore(engine: Engine, options: RankOptions, run: RunDirectory, notes: RunNotes, keeper: InMemoryCheckpointer | None) -> Path | None:
    """Restore the state where the run begins. Returns the checkpoint, if there is one. All ranks call it.

    `keeper`: a rank was lost; restore the newest state in memory or on disk.
    """
    checkpoint = None
    if keeper is not None:
        checkpoint = _restore_after_failure(engine, keeper, run, notes)
        if engine.position.step and is_last(engine, engine.position.step):  # the rank was lost after the last step, maybe before its checkpoint
            engine.save(options.keep)
    elif options.resume is not None:
        checkpoint = _resume(engine, options, run, notes)
    if options.job.weights is not None and checkpoint is None:
        engine.load_weights(options.job.weights)
    if options.checkpoint_params == "all":
        engine.base = None
    if engine.place.rank == 0:
        with translate_write_errors(run.path):
            export.write_model_config(engine.model, options.job.weights, run.path / export.HF_FOLDER)
    return checkpoint


def _restore_after_failure(engine: Engine, keeper: InMemoryCheckpointer, run: RunDirectory, notes: RunNotes) -> Path | None:
    """Restore the newest state, and truncate the record of the run to it."""
    path, where = keeper.restore()
    if engine.place.rank == 0:
        notes.note(f"note  resuming from step {engine.position.step}, {where}")
    _truncate_record(engine, run, keeper.read_metrics())
    return path


def _resume(engine: Engine, options: RankOptions, run: RunDirectory, notes: RunNotes) -> Path | None:
    path = engine.resume(missing_ok=options.resume in ("", AUTO), allow_changes=options.allow_changes)
    if engine.place.rank == 0:
        for problem in engine.checkpoints.damaged_found:
            notes.note(f"refused {problem.what}: {problem.why}")
        resumed = f"resumed from {path} at step {engine.position.step}"
        notes.note(resumed if path else "no checkpoint yet: starting from step 0")
        for line in engine.checkpoints.job_changes:
            notes.note(f"changed  {line}")
        if path is not None and (line := describe_unused_samples(path)):
            notes.note(line)
        with translate_write_errors(run.path):
            run.write_description(options.name, options.plan, options.arguments)
    _truncate_record(engine, run)
    return path


def _truncate_record(engine: Engine, run: RunDirectory, metrics: dict[str, Any] | None = None) -> None:
    """Remove records of steps that will be repeated. All ranks call it: none appends before."""
    if engine.place.rank == 0:
        with translate_write_errors(run.path):
            run.truncate(engine.position.step)
            if metrics is not None:
                run.append_metrics(metrics)
    if engine.rank_model.mesh.world_group is not None:
        broadcast_text("cut", engine.place.rank, engine.rank_model.mesh.world_group, engine.rank_model.device)
