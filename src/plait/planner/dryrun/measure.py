"""Measure the memory of a training step, on real tensors or on fake ones in a dry run (`planner/dryrun/dry_run.py`)."""

import gc
from collections.abc import Callable
from typing import Any

import torch

from plait.config.errors import PlaitError
from plait.data.batch import Batch
from plait.engine.engine import Engine
from plait.engine.evaluate import run_first_forward
from plait.engine.memory import iterate_kept_tensors
from plait.parallel.pipeline.runtime import StepClock
from plait.parallel.pipeline.schedules import Action
from plait.planner.dryrun.allocations import AllocationRecorder, Peak
from plait.tensors.torch_private import WrapperTensor
from plait.tensors.trees import iter_tensors


def measure_step(
    engine: Engine,
    steps: int = 2,
    prepare: Callable[[Batch, bool], Batch] = lambda batch, _: batch,
    on_host: Callable[[str, bool], bool] = lambda category, updating: False,
) -> Peak:
    """Measure the maximum memory of one step of this rank, after `steps` earlier steps. All ranks call it.

    `prepare` converts a batch for the step; its second argument is True for the measured step. `on_host` separates host from device memory, as in
    `MemoryTape.split_peaks`.
    """
    source = engine.batches()
    for _ in range(steps):
        engine.step(prepare(next(source), False))
    batch = prepare(next(source), True)
    gc.collect()
    with AllocationRecorder() as meter:
        add_rank_tensors(meter, engine, batch)
        mark_units(meter, engine)
        for _ in engine.active_phase.iterate_phases(batch.next_position.step):
            meter.mark_moment("forward")
            step_row = engine.backward(batch)
            for parameter in engine.rank_model.params.values():
                if parameter.grad is not None:
                    meter.label("gradients", parameter.grad)
            meter.mark_moment("optimizer")
            engine.update(batch, step_row)
    meter.tape.label_activations()
    return meter.tape.split_peaks(on_host)


def measure_evaluation(
    engine: Engine,
    prepare: Callable[[Any], Any] = lambda pair: pair,
    on_host: Callable[[str, bool], bool] = lambda category, updating: False,
) -> Peak:
    """Measure the maximum memory of an evaluation's largest forward pass, between two steps. All ranks call it.

    `prepare` converts (inputs, targets) for the model. Metrics that read missing values stop; their allocations until then count. `on_host`: as in
    `measure_step`.
    """
    gc.collect()
    with AllocationRecorder() as meter:
        add_rank_tensors(meter, engine, None)
        meter.mark_moment("evaluation")
        try:
            run_first_forward(engine.rank_model, prepare)
        except PlaitError:
            raise
        except Exception:
            meter.mark_moment("evaluation")
    return meter.tape.split_peaks(on_host)


def add_rank_tensors(meter: AllocationRecorder, engine: Engine, batch: Batch | None) -> None:
    """Register the tensors that a rank has between two steps."""
    micros = batch.micro_batches if batch is not None else ()
    meter.add_existing("batch", iter_tensors([(micro.inputs, micro.targets) for micro in micros]))
    for category, tensors in iterate_kept_tensors(engine):
        meter.add_existing(category, tensors)


def mark_units(meter: AllocationRecorder, engine: Engine) -> None:
    """Mark moments of the recorder: actions of a pipeline, and the start of forward and backward of each unit."""
    rank_model = engine.rank_model
    if rank_model.techniques.pipeline is not None:
        rank_model.techniques.pipeline.clock = _MeteredClock(meter)
    for name in (unit.name for unit in rank_model.sketch.units):
        module = rank_model.module.get_submodule(name)
        module.register_forward_pre_hook(lambda *_, name=name: meter.mark_moment(f"forward {name}"))
        module.register_forward_hook(lambda m, a, output, name=name: _mark_backward(meter, name, output))


def _mark_backward(meter: AllocationRecorder, name: str, output: object) -> None:
    """Mark the start of a unit's backward. The hook is on the local part, because a hook on a sequence-sharded tensor would gather it."""
    parts = (tensor.local if isinstance(tensor, WrapperTensor) else tensor for tensor in iter_tensors(output))
    for tensor in parts:
        if torch.is_grad_enabled() and tensor.requires_grad:
            tensor.register_hook(lambda _: meter.mark_moment(f"backward {name}"))


class _MeteredClock(StepClock):
    """A pipeline clock that marks every action in the recorder."""

    def __init__(self, meter: AllocationRecorder):
        super().__init__()
        self.meter = meter

    def begin(self, action: Action) -> None:
        self.meter.mark_moment(str(action))
        super().begin(action)
