"""The memory of a real training step, measured: what `bill.py` predicts."""

import gc
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from plait.allocations import Allocations, Peak
from plait.engine import Engine
from plait.reducer import Reducer
from plait.torchseam import tree_leaves


def measure(engine: Engine, steps: int = 2) -> Peak:
    """The fullest moment of one step of this rank, after so many steps that came before it. All ranks call it."""
    source = engine.batches()
    for _ in range(steps):
        engine.step(next(source))
    batch = next(source)
    gc.collect()
    with Allocations() as meter:
        hold(meter, engine, batch)
        meter.moment("forward and backward")
        rider = engine.backward(batch)
        for parameter in engine.built.own.values():
            if parameter.grad is not None:
                meter.label("gradients", parameter.grad)
        meter.moment("optimizer")
        engine.update(batch, rider)
    return meter.tape.peak()


def hold(meter: Allocations, engine: Engine, batch: Any) -> None:
    """Tell the meter of what a rank has between two steps."""
    built = engine.built
    meter.hold("parameters", [*built.own.values(), *built.model.parameters()])
    meter.hold("buffers", built.model.buffers())
    meter.hold("host copies", (built.masters or {}).values())
    meter.hold("optimizer", _tensors([list(state.values()) for state in engine.optimizer.state.values()]))
    meter.hold("batch", _tensors([(micro.inputs, micro.targets, micro.spare) for micro in batch.micro]))
    if isinstance(built.reducer, Reducer):
        meter.hold("gradients", [bucket.flat for bucket in built.reducer.buckets])


def _tensors(tree: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
