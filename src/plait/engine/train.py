"""The training of one rank, from its first batch to its last checkpoint. `plait train` calls `train` on every rank.

[Note: Timeline of a run]
All ranks of a run walk through this file together: each makes the same steps, on its own share of the samples. What comes before the
first step is in `rank_start.py`, and one step is in `train_step.py`. Around them, in this order:

    batch        the rank's samples of the step, read ahead by loader processes (`Engine.batches`)
    step         forward, backward, reduce, clip, update; then `Callback.on_step`
    record       metrics, events and the live line, once the step's numbers are on the host: on a GPU that is one step later
    snapshot     the state in memory, from which the run goes on if a rank is lost (`elastic.py`)
    save         every `save_every` steps, and after the last: a checkpoint, written beside the steps that follow; `Callback.on_save`
    evaluate     after the steps that `Job.evaluate` names, and after the last; `Callback.on_evaluation`

A request to stop, and a callback's wish to end the run, are summed with the gradients, so all ranks know them after the same step.
"""

import gc
from pathlib import Path
from typing import Any

from plait.config.errors import FAILED, PlaitError
from plait.engine.elastic import Keeper, Neighbours
from plait.engine.engine import Engine
from plait.engine.metrics import Recorder
from plait.engine.rank_failures import failure_of, good_state_saved
from plait.engine.rank_start import RankOptions, make_engine, restore
from plait.engine.run_directory import RunDirectory
from plait.engine.run_notes import RunNotes, StepTally
from plait.engine.run_schedule import catch_up, evaluate_if_due, is_last
from plait.launch.place import Place
from plait.launch.stopping import Stopped


def train(
    options: RankOptions, run: RunDirectory, place: Place, *, memory: Path | None = None, neighbours: Neighbours | None = None,
    again: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Train one rank to the end, or until some rank is asked to stop. Returns the result of the run as JSON values.

    `memory`: the folder of snapshots, from which the run goes on if a rank is lost; with several machines, `neighbours` hold copies.
    `again`: a rank was lost, and this goes on from there.
    """
    notes = RunNotes(place)
    notes.take_warnings()

    # The rank's part of the model, at a checkpoint, at given weights, or as the job makes it.
    engine = make_engine(options, run, place)
    notes.report_unsplit(engine)
    keeper = Keeper(engine, memory, neighbours) if memory is not None else None
    restored = restore(engine, options, run, notes, keeper if again else None)
    first = engine.position.step + 1

    # Callbacks begin after the state is there, and before trackers read the metrics.
    engine.callbacks.start(engine)
    notes.report_inexact(engine)
    tally = StepTally(notes)
    recorder = Recorder(engine, run, notes.status, options.trackers, notes.note, tally.add)

    saved, is_done = restored, False
    try:
        if restored is not None:
            catch_up(engine, run, recorder, onward=options.onward)
        saved = _make_steps(engine, options, recorder, keeper, notes) or restored
        is_done = True
    except (Exception, Stopped) as raised:
        error = failure_of(engine, run, recorder, keeper, raised)
        if error is raised:
            raise
        raise error from raised
    finally:
        recorder.close(is_done)

    step, ended = engine.position.step, engine.callbacks.ended
    return {
        "step": step, "made": step + 1 - first, "ended": ended, "device_bytes": recorder.device_bytes,
        "stopped": engine.stopping and step < engine.job.steps and not ended,
        "checkpoint": str(saved) if saved else None, **tally.facts(),
    }  # fmt: skip


def _make_steps(
    engine: Engine, options: RankOptions, recorder: Recorder, keeper: Keeper | None, notes: RunNotes
) -> Path | None:
    """All steps that are left. Returns the newest checkpoint, if one was saved."""
    saved, first = None, engine.position.step + 1

    # Ends after the job's last step, after a request to stop, or when a callback ended the run; then calls `Callback.on_end`.
    for batch in engine.batches():
        # A step that is not finite can end the run (N001). What is saved then is the state before it.
        with good_state_saved(engine, recorder, options.keep):
            # Forward, backward, reduce, clip, update, and `Callback.on_step`. On a GPU this queues the work and returns.
            step = engine.step(batch)

            # Writes the steps whose numbers are on the host, which on a GPU are those before this one: looking at this one would wait.
            recorder.step(batch, step)

            # Every few steps, as often as it costs 2 % of a step.
            if keeper is not None:
                with engine.spans.around("checkpoint"):
                    _keep_snapshot(keeper, recorder, notes)

            notes.report_uncompiled(engine)
            notes.report_nonfinite_checkpoints(engine)
            if step.step == first:
                notes.report_inexact(engine)  # some reasons show in a forward pass
            if step.step == first + 1:  # the numbers of the first are here, so it is over on the device too
                _settle_in(engine, recorder, notes)

            saved = _save_and_evaluate(engine, options, recorder, step.step) or saved

    _finish(engine, recorder)
    return saved


def _keep_snapshot(keeper: Keeper, recorder: Recorder, notes: RunNotes) -> None:
    """After a step: copy the state to memory, if it is time for that."""
    if keeper.due:
        # A snapshot must be of a step that is known to be finite, and the record must reach as far as it does.
        keeper.engine.settle()
        recorder.flush()
    keeper.stepped()
    while keeper.notes:
        line = keeper.notes.pop(0)
        if keeper.engine.place.rank == 0:
            notes.note(line)


def _settle_in(engine: Engine, recorder: Recorder, notes: RunNotes) -> None:
    """The first step is over, and those that follow are alike: a rank that hangs is named sooner, and memory is measured anew.

    The garbage of building is collected on all ranks in the same step, and what is left is frozen. Else later collections would look
    through the model again, on one rank at a time while the others wait for it.
    """
    engine.place.wait(engine.rank_model.device, going=True)
    gc.collect()
    gc.freeze()
    recorder.memory("first")
    notes.report_unsaved(engine)


def _save_and_evaluate(engine: Engine, options: RankOptions, recorder: Recorder, step: int) -> Path | None:
    """After a step, what is due. Returns the checkpoint, if one was saved."""
    saved, last = None, is_last(engine, step)
    if last or step % options.save_every == 0:
        # A checkpoint is of a step that is known to be finite; when it is published, the record reaches as far as it does.
        engine.settle()
        recorder.flush()
        last = is_last(engine, step)  # the step's numbers, which `settle` read, may ask to stop
        with engine.spans.around("checkpoint"):
            saved = engine.save(options.keep, wait=last)

    # The last checkpoint comes before the last evaluation: a run that ends in between evaluates when it is resumed.
    evaluate_if_due(engine, recorder, step)

    # Unless the evaluation is what ends the run, as early stopping does.
    if engine.callbacks.ended and not last:
        recorder.flush()
        saved = engine.save(options.keep)
    return saved


def _finish(engine: Engine, recorder: Recorder) -> None:
    """No step follows: the record is complete, and N003 if weights are not finite."""
    recorder.flush()
    recorder.memory("end")
    poisoned = engine.guard.poisoned(engine, engine.position.step, "found at the end of the run")
    if poisoned is not None:
        raise PlaitError(poisoned, FAILED)
