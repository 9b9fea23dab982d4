"""The strategies, in the order in which they are applied to a model.

The pipeline is first, because everything after it belongs to a stage. The placement of experts, slices of layers and sequence
shards follow. Precision is next, because it decides the format in which everything after it computes. Then come the strategies
that split the samples inside one process (threads, micro-batches), activation checkpointing, and compile inside it. Gradient
compression comes before the replicas and shards between processes, whose hooks must see the final parameters. Offload
comes after them, because only then the tensors of the optimizer are known. Last are replica groups and the server, which send
all that a rank has by then.

A strategy is a module with the names of `Strategy`: no base class, no registry, no state. Its docstring explains the
technique to a newcomer under fixed headings (What it does, Costs, Choose when, Avoid when, Paper).
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from plait.config.errors import Problem
from plait.config.job import Job
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel import accumulate, activation_checkpointing, compiled, offload, precision, threads, whole_tensors
from plait.parallel.compression import strategy as compression
from plait.parallel.context import strategy as context
from plait.parallel.data import strategy as data_parallel
from plait.parallel.expert import strategy as expert
from plait.parallel.fsdp import strategy as fsdp
from plait.parallel.pipeline import strategy as pipeline
from plait.parallel.rank_model import SplitModel
from plait.parallel.replica_groups import strategy as replica_groups
from plait.parallel.server import strategy as server
from plait.parallel.shares import strategy as shares
from plait.parallel.spec import ParamSpec, ShardPlan
from plait.parallel.tensor import strategy as tensor


class Strategy(Protocol):
    """The contract of a technique."""

    @property
    def AXIS(self) -> str | None:
        """The mesh axis it owns."""
        ...

    @property
    def EXACT(self) -> bool:
        """True when the result equals one device's up to the order of rounding."""
        ...

    @staticmethod
    def wanted(plan: Plan) -> bool:
        """Whether this plan uses it."""
        ...

    @staticmethod
    def refuse(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
        """What cannot work, with the arithmetic and what to change. Before any process starts."""
        ...

    @staticmethod
    def apply(split: SplitModel) -> SplitModel:
        """The torch wiring. The rank with what it makes of it."""
        ...

    @staticmethod
    def inexact(plan: Plan, sketch: Sketch) -> Iterable[str]:
        """What cannot equal one device under this plan, by nature: named, never hidden behind a tolerance."""
        ...


class Distributing(Protocol):
    """A strategy that decides which rank has which part of a parameter, and how its gradient is summed."""

    @staticmethod
    def wanted(plan: Plan) -> bool:
        """As of every strategy."""
        ...

    @staticmethod
    def specs(job: Job, sketch: Sketch, table: ShardPlan) -> ShardPlan:
        """The table with what it adds to each parameter. `sketch`: of the whole model."""
        ...


DISTRIBUTING: tuple[Distributing, ...] = (pipeline, expert, tensor, data_parallel, fsdp)


def shard_plan(job: Job, plan: Plan, sketch: Sketch, same_kernels: bool = True) -> ShardPlan:
    """Which rank has which part of which tensor, and how each gradient is summed (`parallel/spec.py`). `sketch`: of the whole model,
    with what the plan's strategies found in it. `same_kernels`: every rank gets the same bits for the same product."""
    rows = {name: ParamSpec(name, shape, dtype, True) for name, shape, dtype in sketch.parameters}
    rows |= {name: ParamSpec(name, shape, dtype, False) for name, shape, dtype in sketch.frozen}
    table = ShardPlan(plan, {name: rows[name] for name in sketch.order}, same_kernels)
    for strategy in DISTRIBUTING:
        if strategy.wanted(plan):
            table = strategy.specs(job, sketch, table)
    if sketch.whole_update:
        table = whole_tensors.specs(table)
    buffers = {n: ParamSpec(n, shape, dtype, False, True, table.homes_of(n)) for n, shape, dtype in sketch.buffers}
    return replace(table, specs=table.specs | buffers)


CUTTING: tuple[Strategy, ...] = (pipeline, expert, tensor, context)
"""Those that leave a rank with a part of the model. They come first."""
INSTALLING: tuple[Strategy, ...] = (
    precision,
    threads,
    shares,
    accumulate,
    activation_checkpointing,
    compiled,
    compression,
    data_parallel,
    fsdp,
    offload,
    replica_groups,
    server,
)
ORDER = (*CUTTING, *INSTALLING)
