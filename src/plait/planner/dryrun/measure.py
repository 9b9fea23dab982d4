"""The memory of a training step, measured: on real tensors, or on fake ones in a dry run (`planner/dryrun/dry_run.py`)."""

import gc
from collections.abc import Callable
from typing import Any

import torch

from plait.config.errors import PlaitError
from plait.data.batch import Batch
from plait.engine.engine import Engine
from plait.engine.evaluate import first_forward
from plait.engine.memory import kept
from plait.parallel.pipeline.runtime import Clock
from plait.parallel.pipeline.schedules import Action
from plait.planner.dryrun.allocations import Allocations, Peak
from plait.tensors.torch_private import WrapperTensor
from plait.tensors.trees import tensors_in


def measure(
    engine: Engine,
    steps: int = 2,
    given: Callable[[Batch, bool], Batch] = lambda batch, _: batch,
    on_host: Callable[[str, bool], bool] = lambda category, updating: False,
) -> Peak:
    """The fullest moment of one step of this rank, after so many steps that came before it. All ranks call it.

    `given` makes of a batch what a step is given, and is told whether it is the one that is measured. `on_host`, as in
    `MemoryTape.apart`, tells the host's memory from the device's.
    """
    source = engine.batches()
    for _ in range(steps):
        engine.step(given(next(source), False))
    batch = given(next(source), True)
    gc.collect()
    with Allocations() as meter:
        hold(meter, engine, batch)
        mark(meter, engine)
        for _ in engine.turns.of(batch.after.step):
            meter.moment("forward")
            step_row = engine.backward(batch)
            for parameter in engine.rank_model.params.values():
                if parameter.grad is not None:
                    meter.label("gradients", parameter.grad)
            meter.moment("optimizer")
            engine.update(batch, step_row)
    meter.tape.keep()
    return meter.tape.apart(on_host)


def measure_evaluation(
    engine: Engine,
    ready: Callable[[Any], Any] = lambda pair: pair,
    on_host: Callable[[str, bool], bool] = lambda category, updating: False,
) -> Peak:
    """The fullest moment of an evaluation's largest forward pass, between two steps. All ranks call it.

    `ready` makes of (inputs, targets) what the model is given. Metrics that look at values which are not there stop;
    what they had made until then is counted. `on_host`: as for `measure`.
    """
    gc.collect()
    with Allocations() as meter:
        hold(meter, engine, None)
        meter.moment("evaluation")
        try:
            first_forward(engine.rank_model, ready)
        except PlaitError:
            raise
        except Exception:
            meter.moment("evaluation")
    return meter.tape.apart(on_host)


def hold(meter: Allocations, engine: Engine, batch: Batch | None) -> None:
    """Tell the meter of what a rank has between two steps."""
    micros = batch.micro if batch is not None else ()
    meter.hold("batch", tensors_in([(micro.inputs, micro.targets) for micro in micros]))
    for category, tensors in kept(engine):
        meter.hold(category, tensors)


def mark(meter: Allocations, engine: Engine) -> None:
    """Let the meter know what goes on: actions of a pipeline, and whose forward or backward begins."""
    rank_model = engine.rank_model
    if rank_model.techniques.pipeline is not None:
        rank_model.techniques.pipeline.clock = _Telling(meter)
    for name in (unit.name for unit in rank_model.sketch.units):
        module = rank_model.module.get_submodule(name)
        module.register_forward_pre_hook(lambda *_, name=name: meter.moment(f"forward {name}"))
        module.register_forward_hook(lambda m, a, output, name=name: _behind(meter, name, output))


def _behind(meter: Allocations, name: str, output: object) -> None:
    """A hook on what stands for a whole sequence would gather it: it goes on the part that this rank holds."""
    parts = (tensor.local if isinstance(tensor, WrapperTensor) else tensor for tensor in tensors_in(output))
    for tensor in parts:
        if torch.is_grad_enabled() and tensor.requires_grad:
            tensor.register_hook(lambda _: meter.moment(f"backward {name}"))


class _Telling(Clock):
    """A pipeline's clock that tells a meter of every action."""

    def __init__(self, meter: Allocations):
        super().__init__()
        self.meter = meter

    def begin(self, action: Action) -> None:
        self.meter.moment(str(action))
        super().begin(action)
