"""After which steps a run ends and evaluates; and the evaluation that a run which ended too early still owes when it is resumed."""

import json
import math

from plait.engine.build import broadcast_text
from plait.engine.engine import Engine
from plait.engine.metrics import Recorder
from plait.engine.run_directory import RunDirectory


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
