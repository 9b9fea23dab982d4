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

What a rank keeps when its training ends in an error: the last good state, its record, and what its memory was used for.
"""

import dataclasses
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from plait.config.errors import FAILED, PlaitError, Problem
from plait.engine.elastic import Keeper, Neighbours
from plait.engine.engine import Engine
from plait.engine.memory import measured
from plait.engine.memory_use import size
from plait.engine.metrics import Recorder
from plait.engine.rank_start import (
    RankOptions,
    RunNotes,
    StepTally,
    catch_up,
    evaluate_if_due,
    is_last,
    make_engine,
    restore,
)
from plait.engine.run_directory import RunDirectory
from plait.launch.failures import described, located
from plait.launch.place import Place
from plait.launch.stopping import Stopped, given_up

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
WANTED = re.compile(r"Tried to allocate ([0-9.]+) (bytes|[KMGT]iB)")
"""In the message of CUDA's allocator: the bytes that it could not give."""
FIXES = ("more micro-batches (--plan microbatches=…)", "a smaller batch (--batch …)")


def out_of_memory(engine: Engine, run: RunDirectory, error: BaseException) -> PlaitError | None:
    """M002 if the device is full, with what its memory is used for; None: it is another error."""
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    said, use, rank = described(error), measured(engine), engine.place.rank
    wanted = asked(said["text"])
    run.write_memory(rank, {"step": engine.position.step, "failed": {**use.to_dict(), "wanted": wanted}})
    held = ", ".join(f"{name} {size(n)}" for name, n in use.by_category().items())
    device = (
        f"of {size(use.total)} of {use.device}, tensors had at most {size(use.requested)} ({held}); the allocator kept"
        f" {size(use.fragmented)} beside them; context, NCCL and others {size(use.beside)}"
    )
    step = engine.position.step
    what = f"out of memory on rank {rank} {f'after step {step}' if step else 'in the first step'}"
    return PlaitError(Problem("M002", what, why=f"{said['text']}\n{device}", where=located(said), fix=FIXES), FAILED)


def asked(text: str) -> int:
    """Bytes that the allocator could not give, from its message; 0 if that has no number."""
    found = WANTED.search(text)
    return round(float(found[1]) * UNITS[found[2]]) if found else 0


@contextmanager
def good_state_saved(engine: Engine, recorder: Recorder, keep: int) -> Iterator[None]:
    """Around a step and what follows it. If the step is not finite and the run stops, the state before it, which is good, is saved
    first. All ranks raise then, so all save."""
    try:
        yield
    except PlaitError as error:
        if error.codes[0] not in ("N001", "N002") or not engine.position.step or not engine.whole():
            raise
        recorder.flush()
        first, *rest = error.problems
        fix = (f"the state before it is saved in {engine.save(keep)}", *first.fix)
        raise PlaitError([dataclasses.replace(first, fix=fix), *rest], error.exit_code) from None


def failure_of(
    engine: Engine, run: RunDirectory, recorder: Recorder, keeper: Keeper | None, raised: Exception | Stopped
) -> BaseException:
    """What the rank raises for what ended its training. Flushes the record, and hands the rank's state to the launcher's next start."""
    error = given_up(engine.place.rank, engine.position.step) if isinstance(raised, Stopped) else raised
    with suppress(Exception):  # the device may be what failed
        recorder.flush()
    if keeper is not None:
        keeper.lost(error, recorder.row)
    return out_of_memory(engine, run, error) or error


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
            with engine.spans.around("record"):
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
