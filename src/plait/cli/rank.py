"""`plait train`, the side of a rank: the loop from step to step, and what is saved, evaluated and told on the way."""

import dataclasses
import gc
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from plait.checkpoint import hugging_face, optimizer_state
from plait.checkpoint.checkpoints import Checkpoints
from plait.cli import out_of_memory
from plait.cli.request import Request
from plait.config.errors import FAILED, PlaitError
from plait.data import sampling
from plait.engine.build import broadcast_text, inexact
from plait.engine.elastic import Keeper
from plait.engine.engine import Engine
from plait.engine.metrics import Recorder
from plait.engine.pieces import Neighbours
from plait.engine.resume import AUTO, writing
from plait.engine.run_directory import RunDirectory
from plait.engine.server.facts import left_out
from plait.engine.step import Step
from plait.launch import nccl
from plait.launch.devices import kind_of
from plait.launch.failure_report import short
from plait.launch.place import Place
from plait.launch.stopping import Stopped, given_up
from plait.parallel.context.sequences import opened_units
from plait.parallel.tensor import choose
from plait.tensors.finite import number

Note = Callable[[str], None]
"""Says a line beside training, on the terminal of who started it."""


def train(
    request: Request, run: RunDirectory, place: Place, memory: Path | None = None, neighbours: Neighbours | None = None,
    again: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Train one rank to the end, or until somebody asks to stop. `memory`: where its state is kept for when a rank is lost,
    on several machines with copies on `neighbours`; `again`: there was a round before, and this goes on from there."""
    report = place.report or (lambda message: None)
    note = lambda text: report({"kind": "note", "text": text})  # noqa: E731
    if place.report is not None and not place.joined:
        warnings.showwarning = _reporter(report)
    engine = _engine(request, run, place)
    keeper = Keeper(engine, memory, neighbours) if memory is not None else None
    resumed = _begun(engine, request, run, note, keeper if again else None)
    engine.callbacks.start(engine)
    named: set[str] = set()
    _inexact(engine, note, named)
    status = lambda value: report({"kind": "status", "value": value})  # noqa: E731
    tally = _Tally(engine, note)
    recorder = Recorder(engine, run, status, request.trackers, note, tally.step)
    saved, made, done = resumed, 0, False
    try:
        if resumed is not None:
            _catch_up(engine, run, recorder, request.onward)
        for batch in engine.batches():
            with _good_state_saved(engine, recorder, request.keep):
                step = engine.step(batch)
                recorder.step(batch, step)
                _kept(keeper, recorder, note)
                made += 1
                _sound(engine, note)
                if made == 1:
                    _inexact(engine, note, named)
                if made == 2:  # the numbers of the first are here, so it is over on the device too
                    _going(engine, recorder, note)
                saved = _save_and_evaluate(engine, request, recorder, step.step) or saved
        _ended(engine, recorder)
        done = True
    except (Exception, Stopped) as raised:
        error = _lost(engine, run, recorder, keeper, raised)
        if error is raised:
            raise
        raise error from raised
    finally:
        recorder.close(done)
    facts = {"step": engine.position.step, "made": made, "ended": engine.callbacks.ended, "device_bytes": recorder.device_bytes}
    stopped = engine.stopping and engine.position.step < engine.job.steps and not engine.callbacks.ended
    return facts | {"stopped": stopped, "checkpoint": str(saved) if saved else None, **tally.facts()}


def _lost(engine: Engine, run: RunDirectory, recorder: Recorder, keeper: Keeper | None, raised: Exception | Stopped) -> BaseException:
    """What a rank raises for what ended its training, once what it holds is kept."""
    error = given_up(engine.place.rank, engine.position.step) if isinstance(raised, Stopped) else raised
    with suppress(Exception):  # the device may be what failed
        recorder.flush()
    if keeper is not None:
        keeper.lost(error, recorder.row)
    return out_of_memory.met(engine, run, error) or error


def _going(engine: Engine, recorder: Recorder, note: Note) -> None:
    """The first step is over: what follows is alike, so nobody waits as long any more, and memory counts anew.

    The garbage of building is collected, on all ranks in the same step, and what is left stays: later collections do not look
    through the model again, on one rank at a time while the others wait for it.
    """
    engine.place.wait(engine.built.device, going=True)
    gc.collect()
    gc.freeze()
    recorder.memory("first")
    _unsaved(engine, note)


def _unsaved(engine: Engine, note: Note) -> None:
    """Name what modules keep that no checkpoint will hold: of each stage once."""
    if not any(place for axis, place in engine.built.mesh.at.items() if axis != "pp"):
        for name, kind in engine.carried.take().unsaved.items():
            note(f"note  checkpoints cannot hold {name} ({kind}), which steps change: a resumed run begins it anew")


def _ended(engine: Engine, recorder: Recorder) -> None:
    """All steps are made: what there is to record is recorded, and the state is good."""
    recorder.flush()
    recorder.memory("end")
    poisoned = engine.guard.poisoned(engine, engine.position.step, "found at the end of the run")
    if poisoned is not None:
        raise PlaitError(poisoned, FAILED)


def _begun(engine: Engine, request: Request, run: RunDirectory, note: Note, keeper: Keeper | None) -> Path | None:
    """Put the engine where the run begins: at a checkpoint, which is returned, at given weights, or at the job's own."""
    _whole(engine, note)
    if keeper is not None:
        resumed = _goes_on(engine, keeper, run, note)
        if engine.position.step and _last(engine, engine.position.step):  # lost after the last step, and maybe before its checkpoint
            engine.save(request.keep)
    else:
        resumed = _resume(engine, request, run, note) if request.resume is not None else None
    if request.job.weights is not None and resumed is None:
        engine.load_weights(request.job.weights)
    if request.save == "all":
        engine.base = None
    if engine.place.rank == 0:
        with writing(run.path):
            hugging_face.describe(engine.model, request.job.weights, run.path / hugging_face.FOLDER)
    return resumed


def _engine(request: Request, run: RunDirectory, place: Place) -> Engine:
    """The engine of the request. What checkpoints will say of the job is found out here, not beside a step."""
    if kind_of(request.device) != "cpu":
        nccl.settle(run.log(place.rank).parent)
    engine = Engine(
        request.job, request.plan, device=request.device, workers=request.workers, place=place, on_nan=request.on_nan,
        read_weights=False, callbacks=request.callbacks() if request.callbacks is not None else (),
        group_norms=request.group_norms,
    )  # fmt: skip
    engine.checkpoints, engine.arguments = Checkpoints(run.checkpoints), request.arguments
    engine.checkpoints.told = partial(_published, engine)
    optimizer_state.check(engine)
    place.beat(engine.position.step, "data")
    sampling.agreed(engine.job, engine.built.data, engine.built.group)
    engine.fingerprint.get("data")
    return engine


def _published(engine: Engine, path: Path) -> None:
    engine.place.saved(path)
    engine.callbacks.published(path)


class _Tally:
    """What a run says of its steps, as they are recorded."""

    def __init__(self, engine: Engine, note: Note):
        self.engine, self.note = engine, note
        self.loss: float | None = None
        """Of the last step."""
        self.skipped = 0
        """Steps that were left out."""

    def facts(self) -> dict[str, Any]:
        """For the result of the run."""
        return {"loss": None if self.loss is None else number(self.loss), "skipped": self.skipped}

    def step(self, step: Step) -> None:
        """A step was recorded."""
        self.loss, self.skipped = step.loss, self.skipped + step.skipped
        if step.trouble is not None and self.engine.place.rank == 0:
            self.note("note  left out " + f"{step.trouble.what}\n{step.trouble.why}".replace("\n", "\n      "))


@contextmanager
def _good_state_saved(engine: Engine, recorder: Recorder, keep: int) -> Iterator[None]:
    """Around a step, and what follows it. If the step is found not to be finite and the run stops, the state before it, which is good,
    is saved first."""
    try:
        yield
    except PlaitError as error:
        if error.codes[0] not in ("N001", "N002") or not engine.position.step or not engine.whole():
            raise
        recorder.flush()
        first, *rest = error.problems
        fix = (f"the state before it is saved in {engine.save(keep)}", *first.fix)
        raise PlaitError([dataclasses.replace(first, fix=fix), *rest], error.exit_code) from None


def _sound(engine: Engine, note: Note) -> None:
    """Tell of checkpoints whose numbers are not finite, and of what torch.compile gave up."""
    _compiled(engine, note)
    while engine.checkpoints.marked and engine.place.rank == 0:
        problem = engine.checkpoints.marked.pop(0)
        note(f"note  {problem.what}: {problem.why}")


def _whole(engine: Engine, note: Note) -> None:
    """Say what of the model ranks hold, or compute, whole under tp and cp."""
    lines = [choose.summary(engine.built.whole)] if engine.built.plan.tp > 1 else []
    left = engine.built.compiled.notes() if engine.built.compiled is not None else []
    for line in (*lines, *opened_units(engine.built.whole), *left) if engine.place.rank == 0 else ():
        note(f"note  {line}")


def _compiled(engine: Engine, note: Note) -> None:
    """Say what torch.compile gave up."""
    for line in engine.built.compiled.news() if engine.built.compiled is not None else ():
        note(f"note  {line}" if engine.place.rank == 0 else f"note  rank {engine.place.rank}: {line}")


def _inexact(engine: Engine, note: Note, named: set[str]) -> None:
    """Say what cannot equal one device; some of it shows in the first step, and what losses ask for on the last stage only."""
    built = engine.built
    first = not any(place for axis, place in built.mesh.at.items() if axis != "pp")
    for line in inexact(built) if engine.place.rank == 0 else built.sharers.inexact if first else ():
        if line not in named:
            note(f"note  not exact: {line}")
            named.add(line)


def _goes_on(engine: Engine, keeper: Keeper, run: RunDirectory, note: Note) -> Path | None:
    """After a rank was lost: the newest state there is, and the record of the run up to it."""
    path, where = keeper.goes_on()
    if engine.place.rank == 0:
        note(f"note  going on from step {engine.position.step}, {where}")
    _cut(engine, run, keeper.metrics())
    return path


def _kept(keeper: Keeper | None, recorder: Recorder, note: Note) -> None:
    """After a step: keep the state in memory, when it is time for that."""
    if keeper is None:
        return
    if keeper.due:
        keeper.engine.settle()
        recorder.flush()
    keeper.stepped()
    while keeper.notes:
        line = keeper.notes.pop(0)
        if keeper.engine.place.rank == 0:
            note(line)


def _cut(engine: Engine, run: RunDirectory, metrics: dict[str, Any] | None = None) -> None:
    """Forget what a run recorded of steps that are made again. All ranks call it: nobody appends before."""
    if engine.place.rank == 0:
        with writing(run.path):
            run.cut(engine.position.step)
            if metrics is not None:
                run.remember(metrics)
    if engine.built.group is not None:
        broadcast_text("cut", engine.place.rank, engine.built.group, engine.built.device)


def _resume(engine: Engine, request: Request, run: RunDirectory, note: Note) -> Path | None:
    path = engine.resume(missing_ok=request.resume in ("", AUTO), allow_changes=request.allow_changes)
    if engine.place.rank == 0:
        for problem in engine.checkpoints.refused:
            note(f"refused {problem.what}: {problem.why}")
        resumed = f"resumed from {path} at step {engine.position.step}"
        note(resumed if path else "nothing saved yet: starting from step 0")
        for line in engine.checkpoints.changed:
            note(f"changed  {line}")
        if path is not None and (line := left_out(path)):
            note(line)
        with writing(run.path):
            run.describe(request.name, request.plan, request.arguments)
    _cut(engine, run)
    return path


def _last(engine: Engine, step: int) -> bool:
    return engine.stopping or step == engine.job.steps or bool(engine.callbacks.ended)


def _save_and_evaluate(engine: Engine, request: Request, recorder: Recorder, step: int) -> Path | None:
    """After a step, what is due; the last checkpoint comes before the last evaluation, unless that is what ends the run."""
    saved, last = None, _last(engine, step)
    if last or step % request.save_every == 0:
        engine.settle()
        recorder.flush()
        last = _last(engine, step)  # what the step's numbers say of stopping is known now
        saved = engine.save(request.keep, wait=last)
    _evaluate(engine, recorder, step)
    if engine.callbacks.ended and not last:
        recorder.flush()
        saved = engine.save(request.keep)
    return saved


def _evaluate(engine: Engine, recorder: Recorder, step: int) -> None:
    if _evaluated(engine, step):
        recorder.evaluated(step, engine.evaluate())


def _evaluated(engine: Engine, step: int) -> bool:
    """Whether an evaluation follows this step."""
    wanted, last = engine.job.evaluate, step == engine.job.steps or bool(engine.callbacks.ended)
    return wanted is not None and (last or bool(wanted.every and step % wanted.every == 0))


def _carries(engine: Engine) -> bool:
    """Whether the state that the run goes on from holds what the model carries from step to step."""
    return engine.checkpoints.carries or (engine.memory is not None and engine.memory.carries)


def _catch_up(engine: Engine, run: RunDirectory, recorder: Recorder, onward: bool) -> None:
    """Evaluate the step that the run goes on from, if it had ended before that was done. If it was done after the checkpoint was
    saved, callbacks are told of it again. `onward`: an early end is not one. All ranks call it."""
    rank, step = engine.place.rank, engine.position.step
    word = "" if rank else json.dumps(run.evaluation(step))
    values = json.loads(broadcast_text(word, rank, engine.built.group, engine.built.device))
    if values is None:
        _evaluate(engine, recorder, step)
    elif _carries(engine) and _evaluated(engine, step):
        engine.evaluate(
            again=True
        )  # the checkpoint is older than the evaluation, which may have changed what the model carries
    if values is not None and engine.callbacks.evaluated < step:
        engine.callbacks.evaluation(engine, {name: math.nan if v is None else v for name, v in values.items()})
    if onward and step < engine.job.steps:
        engine.callbacks.ended = ""


def _reporter(report: Callable[[dict[str, Any]], None]):
    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        report({"kind": "warning", "text": text, "short": f"{category.__name__}: {short(str(message))}"})

    return show
