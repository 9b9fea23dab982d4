"""Train one rank, from its first batch to its last checkpoint. `plait train` calls `train` on every rank.

[Note: Timeline of a run]
All ranks of a run execute this file together: each makes the same steps, on its own local batch. `rank_start.py` has the work before
the first step, and `train_step.py` one step. Around them, in this order:

    batch        the rank's samples of the step, prefetched by loader processes (`Engine.batches`)
    step         forward, backward, reduce, clip, update; then `Callback.on_step`
    record       metrics, events and the live line, once the step's statistics are on the host: on a GPU that is one step later
    snapshot     the state in memory, from which the run restarts if a rank is lost (`elastic.py`)
    save         every `save_every` steps, and after the last: a checkpoint, written in the background; `Callback.on_save`
    evaluate     after the steps that `Job.evaluate` names, and after the last; `Callback.on_evaluation`

Requests to stop, from a user or a callback, are summed with the gradients, so all ranks see them after the same step.

If training ends in an error, a rank keeps the last valid state, its record, and its memory use.
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
from plait.engine.elastic import InMemoryCheckpointer, SnapshotPeers
from plait.engine.engine import Engine
from plait.engine.memory import measure_memory
from plait.engine.memory_use import format_bytes
from plait.engine.metrics import Recorder
from plait.engine.rank_start import (
    RankOptions,
    RunNotes,
    StepTally,
    catch_up,
    evaluate_if_due,
    is_first_except,
    is_last,
    make_engine,
    restore,
)
from plait.engine.run_directory import RunDirectory
from plait.launch.failures import describe_error, format_location
from plait.launch.place import Place
from plait.launch.stopping import StopRequested, stopped_reading_error

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
REQUESTED_SIZE = re.compile(r"Tried to allocate ([0-9.]+) (bytes|[KMGT]iB)")
"""Matches the requested bytes in the message of CUDA's allocator."""
FIXES = ("more micro-batches (--plan microbatches=…)", "a smaller batch (--batch …)")


def make_memory_error(engine: Engine, run: RunDirectory, error: BaseException) -> PlaitError | None:
    """Make M002, with the memory use, if the device is out of memory; None for any other error."""
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    said, use, rank = describe_error(error), measure_memory(engine), engine.place.rank
    wanted = parse_requested_bytes(said["text"])
    run.write_memory(rank, {"step": engine.position.step, "failed": {**use.to_dict(), "wanted": wanted}})
    held = ", ".join(f"{name} {format_bytes(n)}" for name, n in use.group_by_category().items())
    device = (
        f"of {format_bytes(use.total)} of {use.device}, tensors had at most {format_bytes(use.requested)} ({held}); the allocator had reserved"
        f" {format_bytes(use.fragmented)} more; context, NCCL and others {format_bytes(use.beside)}"
    )
    step = engine.position.step
    what = f"out of memory on rank {rank} {f'after step {step}' if step else 'in the first step'}"
    return PlaitError(Problem("M002", what, why=f"{said['text']}\n{device}", where=format_location(said), fix=FIXES), FAILED)


def parse_requested_bytes(text: str) -> int:
    """Parse the bytes of the failed allocation from the allocator's message; 0 if it has no number."""
    found = REQUESTED_SIZE.search(text)
    return round(float(found[1]) * UNITS[found[2]]) if found else 0


@contextmanager
def save_good_state(engine: Engine, recorder: Recorder, keep: int) -> Iterator[None]:
    """Save the state before a non-finite step, which is valid, if that step ends the run.

    Wraps a step and the work after it. All ranks raise then, so all save. With replica groups, only the ranks of one group raise, and the
    other groups are at other steps: nothing is saved, since a checkpoint needs all groups after the same step.
    """
    try:
        yield
    except PlaitError as error:
        cannot_save = engine.plan.rarely or not engine.position.step or not engine.has_complete_state()
        if error.codes[0] not in ("N001", "N002") or cannot_save:
            raise
        recorder.flush()
        first, *rest = error.problems
        fix = (f"the state before it is saved in {engine.save(keep)}", *first.fix)
        raise PlaitError([dataclasses.replace(first, fix=fix), *rest], error.exit_code) from None


def make_failure(
    engine: Engine, run: RunDirectory, recorder: Recorder, keeper: InMemoryCheckpointer | None, cause: Exception | StopRequested
) -> BaseException:
    """Make the error that the rank raises for the cause. Flushes the record, and saves the rank's state for the next start."""
    error = stopped_reading_error(engine.place.rank, engine.position.step) if isinstance(cause, StopRequested) else cause
    with suppress(Exception):  # the device itself may have failed
        recorder.flush()
    if keeper is not None:
        keeper.save_survivor_state(error, recorder.row)
    return make_memory_error(engine, run, error) or error


def train_rank(
    options: RankOptions, run: RunDirectory, place: Place, *, memory: Path | None = None, peers: SnapshotPeers | None = None,
    is_restart: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Train one rank to the end, or until a stop is requested on any rank. Returns the result of the run as JSON values.

    `memory`: the folder of snapshots, from which the run restarts if a rank is lost; with several nodes, `peers` store copies.
    `is_restart`: a rank was lost, and the run restarts from a snapshot.
    """
    notes = RunNotes(place)
    notes.take_warnings()

    # The rank's shard of the model, restored from a checkpoint or given weights, or initialized by the job.
    engine = make_engine(options, run, place)
    notes.report_unsplit(engine)
    keeper = InMemoryCheckpointer(engine, memory, peers) if memory is not None else None
    restored = restore(engine, options, run, notes, keeper if is_restart else None)
    first = engine.position.step + 1

    # Callbacks start after the state is restored, and before trackers read the metrics.
    engine.callbacks.start(engine)
    notes.report_inexact(engine)
    tally = StepTally(notes, is_first_except(engine, "replica_groups"))
    recorder = Recorder(engine, run, notes.report_status, options.trackers, notes.note, tally.add)

    saved, is_done = restored, False
    try:
        if restored is not None:
            catch_up(engine, run, recorder, onward=options.onward)
        saved = _make_steps(engine, options, recorder, keeper, notes) or restored
        is_done = True
    except (Exception, StopRequested) as raised:
        error = make_failure(engine, run, recorder, keeper, raised)
        if error is raised:
            raise
        raise error from raised
    finally:
        recorder.close(is_done)

    step, ended = engine.position.step, engine.callbacks.end_reason
    return {
        "step": step, "made": step + 1 - first, "ended": ended, "device_bytes": recorder.device_bytes,
        "stopped": engine.stopping and step < engine.job.steps and not ended,
        "checkpoint": str(saved) if saved else None, **tally.to_result(),
    }  # fmt: skip


def _make_steps(
    engine: Engine, options: RankOptions, recorder: Recorder, keeper: InMemoryCheckpointer | None, notes: RunNotes
) -> Path | None:
    """Make all remaining steps. Returns the newest checkpoint, if one was saved."""
    saved, first = None, engine.position.step + 1

    # Ends after the job's last step, after a request to stop, or when a callback ended the run; then calls `Callback.on_end`.
    for batch in engine.batches():
        # A step that is not finite can end the run (N001). Then the state before it is saved, if all ranks stop there.
        with save_good_state(engine, recorder, options.keep):
            # Forward, backward, reduce, clip, update, and `Callback.on_step`. On a GPU this queues the work and returns.
            step = engine.step(batch)

            # Writes the steps whose statistics are on the host; on a GPU those before this one, since reading this one would wait.
            with engine.spans.record_span("record"):
                recorder.step(batch, step)

            # Every few steps, at a cost of at most 2 % of a step.
            if keeper is not None:
                with engine.spans.record_span("checkpoint"):
                    _keep_snapshot(keeper, recorder, notes)

            notes.report_uncompiled(engine)
            notes.report_nonfinite_checkpoints(engine)
            if step.step == first:
                notes.report_inexact(engine)  # some reasons show in a forward pass
            if step.step == first + 1:  # the statistics of the first step are read, so it is complete on the device too
                _end_first_step(engine, recorder, notes)

            saved = _save_and_evaluate(engine, options, recorder, step.step) or saved

    _finish(engine, recorder)
    return saved


def _keep_snapshot(keeper: InMemoryCheckpointer, recorder: Recorder, notes: RunNotes) -> None:
    """Copy the state to memory after a step, if a snapshot is due."""
    if keeper.is_due:
        # A snapshot must be of a step confirmed as finite, and the record must include that step.
        keeper.engine.settle()
        recorder.flush()
    keeper.end_step()
    while keeper.notes:
        line = keeper.notes.pop(0)
        if keeper.engine.place.rank == 0:
            notes.note(line)


def _end_first_step(engine: Engine, recorder: Recorder, notes: RunNotes) -> None:
    """Finish the first step: later steps take similar time, so hang detection tightens, and memory is measured again.

    The garbage of building is collected on all ranks in the same step, and remaining objects are frozen. Otherwise later collections
    would scan the model again, on one rank at a time while the others wait for it.
    """
    engine.place.set_timeouts(engine.rank_model.device, going=True)
    gc.collect()
    gc.freeze()
    recorder.record_memory("first")
    notes.report_unsaved(engine)


def _save_and_evaluate(engine: Engine, options: RankOptions, recorder: Recorder, step: int) -> Path | None:
    """Save and evaluate after a step, if due. Returns the checkpoint, if one was saved."""
    saved, last = None, is_last(engine, step)
    if last or step % options.save_every == 0:
        # A checkpoint is of a step confirmed as finite; the record includes that step before it is published.
        engine.settle()
        recorder.flush()
        last = is_last(engine, step)  # the step's statistics, which `settle` read, may request a stop
        with engine.spans.record_span("checkpoint"):
            saved = engine.save(options.keep, wait=last)

    # The last checkpoint comes before the last evaluation: a run that ends in between evaluates when it is resumed.
    evaluate_if_due(engine, recorder, step)

    # An evaluation may end the run, as early stopping does.
    if engine.callbacks.end_reason and not last:
        recorder.flush()
        saved = engine.save(options.keep)
    return saved


def _finish(engine: Engine, recorder: Recorder) -> None:
    """Flush the record after the last step. N003 if weights are not finite."""
    recorder.flush()
    recorder.record_memory("end")
    poisoned = engine.guard.find_bad_weights(engine, engine.position.step, "found at the end of the run")
    if poisoned is not None:
        raise PlaitError(poisoned, FAILED)
