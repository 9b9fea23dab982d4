"""Where a rank's training begins: its engine is made, and put at a checkpoint, at given weights, or at the job's own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from plait.checkpoint import export, optimizer_state
from plait.checkpoint.checkpoints import Checkpoints
from plait.config.job import Job
from plait.config.plan import Plan
from plait.data import sampling
from plait.engine.build import broadcast_text
from plait.engine.callbacks import Callback
from plait.engine.elastic import Keeper
from plait.engine.engine import Engine
from plait.engine.metrics import MetricsFollower
from plait.engine.resume import AUTO, writing
from plait.engine.run_directory import RunDirectory
from plait.engine.run_notes import RunNotes
from plait.engine.run_schedule import is_last
from plait.engine.server.state import left_out
from plait.launch import nccl
from plait.launch.devices import kind_of
from plait.launch.place import Place
from plait.model.sketch import Sketch


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
    save: str = "trained"
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
    if options.save == "all":
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
