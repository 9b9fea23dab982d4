"""The strategies, in the order in which they are applied to a model.

The pipeline is first, because everything after it belongs to a stage. The placement of experts, slices of layers and sequence
shards follow. Precision is next, because it decides the format in which everything after it computes. Then come the strategies
that split the samples inside one process (threads, micro-batches), activation checkpointing, and compile inside it. Gradient
compression comes before the replicas and shards between processes, whose hooks need the final parameters. Offload comes after
them, because only then the tensors of the optimizer exist. Last are replica groups and the server, which send everything that a
rank has by then.

A strategy is a module with the names of `Strategy`: no base class, no registry, no state. Its docstring explains the technique to
a newcomer under fixed headings (What it does, Costs, Choose when, Avoid when, Paper).
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from plait.config.errors import Problem
from plait.config.job import Job
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel import accumulate, activation_checkpointing, compiled, offload, precision, tensor_owners, threads
from plait.parallel.batch_split import strategy as shares
from plait.parallel.compression import strategy as compression
from plait.parallel.context import strategy as context
from plait.parallel.data import strategy as data_parallel
from plait.parallel.expert import strategy as expert
from plait.parallel.fsdp import strategy as fsdp
from plait.parallel.pipeline import strategy as pipeline
from plait.parallel.rank_model import SplitModel
from plait.parallel.replica_groups import strategy as replica_groups
from plait.parallel.server import strategy as server
from plait.parallel.spec import ParamSpec, ShardPlan
from plait.parallel.tensor import strategy as tensor


class Strategy(Protocol):
    """The protocol of a technique."""

    @property
    def AXIS(self) -> str | None:
        """The mesh axis of the technique."""
        ...

    @property
    def EXACT(self) -> bool:
        """Whether the result equals that of one device up to the order of rounding."""
        ...

    @staticmethod
    def is_enabled(plan: Plan) -> bool:
        """Whether this plan uses the technique."""
        ...

    @staticmethod
    def validate(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
        """Yield the problems of a plan, with the arithmetic and the fix, before any process starts."""
        ...

    @staticmethod
    def apply(split: SplitModel) -> SplitModel:
        """Wire the technique into the rank's model. Returns the new rank."""
        ...

    @staticmethod
    def inexact_reasons(plan: Plan, sketch: Sketch) -> Iterable[str]:
        """Yield the reasons why the result under this plan differs from that of one device."""
        ...


class ShardingStrategy(Protocol):
    """A strategy that decides which rank has which part of a parameter, and how its gradient is reduced."""

    @staticmethod
    def is_enabled(plan: Plan) -> bool:
        """As in `Strategy`."""
        ...

    @staticmethod
    def shard_specs(job: Job, sketch: Sketch, table: ShardPlan) -> ShardPlan:
        """Add the strategy's splits and reductions to the table. `sketch`: of the full model."""
        ...


SHARDING: tuple[ShardingStrategy, ...] = (pipeline, expert, tensor, data_parallel, fsdp)


def make_shard_plan(job: Job, plan: Plan, sketch: Sketch, same_kernels: bool = True) -> ShardPlan:
    """Make the table of which rank has which part of each tensor, and how each gradient is reduced (`parallel/spec.py`).

    `sketch`: of the full model, with the results of the plan's strategies. `same_kernels`: every rank gets the same bits for the
    same product.
    """
    rows = {name: ParamSpec(name, shape, dtype, True) for name, shape, dtype in sketch.parameters}
    rows |= {name: ParamSpec(name, shape, dtype, False) for name, shape, dtype in sketch.frozen}
    table = ShardPlan(plan, {name: rows[name] for name in sketch.order}, same_kernels)
    for strategy in SHARDING:
        if strategy.is_enabled(plan):
            table = strategy.shard_specs(job, sketch, table)
    if sketch.needs_whole_tensors:
        table = tensor_owners.shard_specs(table)
    buffers = {n: ParamSpec(n, shape, dtype, False, True, table.find_placement(n)) for n, shape, dtype in sketch.buffers}
    return replace(table, specs=table.specs | buffers)


PARTITIONING: tuple[Strategy, ...] = (pipeline, expert, tensor, context)
"""The strategies that leave a rank with a part of the model. They come first."""
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
ORDER = (*PARTITIONING, *INSTALLING)
