"""One rank's model under a plan, with what trains it. All classes are frozen; `engine/build.py` builds them step by
step.

SplitModel       input and result of each strategy: the module, its parameters, and the techniques applied so far
RankModel        a split model with its optimizer and its gradient reducers
CompiledUnits    the units that torch.compile compiles (see `parallel/compiled.py`)
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn

from plait.config.job import Job
from plait.config.plan import Plan
from plait.losses.global_batch import BatchPeers
from plait.model.sketch import Sketch
from plait.parallel.batch_split.batch_balancer import BatchBalancer
from plait.parallel.compression.compressor import Compressor
from plait.parallel.fsdp.runtime import FsdpRuntime
from plait.parallel.gradient_reducer import GradientReducer, ReplicaSums
from plait.parallel.loss_scale import LossScale
from plait.parallel.mesh import Mesh
from plait.parallel.pipeline.runtime import PipelineRuntime
from plait.parallel.rank_setup import RankSetup
from plait.parallel.replica_groups.outer_synchronizer import OuterSynchronizer
from plait.parallel.replicas import Replicas
from plait.parallel.spec import ShardPlan
from plait.randomness.keyed import Randomness
from plait.tensors.moving_average import MovingAverage
from plait.tensors.rows import Part, make_full_part
from plait.tensors.torch_private import count_compiled


class CompiledUnits:
    """The compiled forward of each class, one for all units of a class, and the reasons why others stay uncompiled."""

    def __init__(self, names: list[str], left: dict[str, str]):
        self.names, self.skip_reasons = names, left
        self.compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        self.last_counts = count_compiled()
        self.has_reported = False

    def compile_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled function (module, *arguments) -> output of a forward."""
        if forward not in self.compiled:
            own = not forward.__module__.startswith("torch.")
            self.compiled[forward] = torch.compile(forward if own else _wrap_forward(forward))
        return self.compiled[forward]

    def describe_skips(self) -> list[str]:
        """Describe the units that stay uncompiled or are skipped under this plan, one line per group of similar units."""
        rows = dict.fromkeys((re.sub(r"\d+", "*", name), why) for name, why in self.skip_reasons.items())
        return [f"compile: {name} {why}" for name, why in rows]

    def report_failures(self) -> list[str]:
        """Report once, after a step, what torch.compile did not compile, or that it compiled nothing."""
        (graphs, given_up), before = count_compiled(), self.last_counts
        lines = []
        if self.compiled and graphs == before[0] and not self.has_reported:
            lines.append(
                "compile: torch.compile made no graph; everything runs uncompiled (TORCH_LOGS=graph_breaks shows the reason)"
            )
        if given_up > before[1]:
            lines.append(
                "compile: a part of a unit runs uncompiled now, because it was recompiled too often (TORCH_LOGS=recompiles)"
            )
        self.has_reported, self.last_counts = True, (graphs, given_up)
        return lines


def _wrap_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward of torch's own modules in a function of plait, because torch.compile skips torch's modules."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    return call


@dataclass(frozen=True)
class Hooks:
    """Functions that run after a rank is built, each list in the order in which strategies appended to it."""

    optimizer_created: list[Callable[[torch.optim.Optimizer], object]] = field(default_factory=list)
    """Called with the optimizer, after it is created."""
    gradients_summed: list[Callable[[GradientReducer], None]] = field(default_factory=list)
    """Called with the gradient reducer, after gradients are reduced and before they are measured and clipped. All ranks
    call it."""
    before_update: list[Callable[[], None]] = field(default_factory=list)
    """Called before the optimizer's step, to set the gradients of the tensors that it updates. The job's hooks on the optimizer run
    later."""
    after_update: list[Callable[[], None]] = field(default_factory=list)
    """Called after the optimizer's step and the job's hooks on it, to copy updated tensors to where they are used."""
    state_loaded: list[Callable[[], None]] = field(default_factory=list)
    """Called after the parts were written from outside, such as by loading a checkpoint."""
    masters_written: list[Callable[[], None]] = field(default_factory=list)
    """Called after `Techniques.masters` were written outside of a step, to copy them into `params`. All ranks call it."""
    close: list[Callable[[], None]] = field(default_factory=list)
    """Called when the engine is closed, in reverse order, to restore settings of this process."""


@dataclass(frozen=True)
class Techniques:
    """Runtime objects of the plan's techniques in a step; None for techniques that the plan does not use."""

    sums: Mapping[str, ReplicaSums] = field(default_factory=dict)
    """Reduces gradients over replicas, by name of the phase ("" in a job without phases)."""
    shards: FsdpRuntime | None = None
    """Gathers and frees the shards of an fsdp model."""
    pipeline: PipelineRuntime | None = None
    """This rank's stages of the pipeline."""
    replicas: Replicas | None = None
    """Replicas of the model in threads."""
    replica_groups: OuterSynchronizer | None = None
    """Synchronizes this rank with the ranks of other replica groups that have the same part of the model."""
    compressor: Compressor | None = None
    """Reduces gradients under `grad_compression`, and stores the residuals."""
    loss_scale: LossScale | None = None
    balance: BatchBalancer | None = None
    """Adapts local batches to measured speeds, under `batch_split=auto`."""
    average: MovingAverage | None = None
    """Moving average of the weights, if the job has one."""
    compiled: CompiledUnits | None = None
    masters: Mapping[str, nn.Parameter] | None = None
    """Tensors that the optimizer updates instead of `params`: copies in host memory, or full tensors."""


@dataclass(frozen=True)
class SplitModel:
    """One rank's part of the model, with the techniques that are applied so far."""

    setup: RankSetup
    mesh: Mesh
    shard_plan: ShardPlan
    """The ranks that have each part of each tensor, and the reductions of each gradient."""
    global_sketch: Sketch
    """Sketch of the full model."""
    sketch: Sketch
    """Sketch of this rank's part of the model."""
    module: nn.Module
    params: Mapping[str, nn.Parameter]
    """This rank's part of every parameter, by the model's name; tied ones once."""
    batch_peers: BatchPeers
    """The ranks with different samples, during the passes of a step."""
    randomness: Randomness
    """Unused with `Techniques.replicas`, which have one per thread."""
    hooks: Hooks = field(default_factory=Hooks)
    techniques: Techniques = field(default_factory=Techniques)

    @property
    def job(self) -> Job:
        return self.setup.job

    @property
    def plan(self) -> Plan:
        return self.setup.plan

    @property
    def device(self) -> torch.device:
        return self.setup.device

    def with_techniques(self, **techniques: Any) -> Self:
        """Return a copy with these fields of `techniques` replaced."""
        return replace(self, techniques=replace(self.techniques, **techniques))

    def get_optimizer_params(self) -> dict[str, nn.Parameter]:
        """Return the optimizer's parameters by name. Parameters that this rank does not update are those of the module."""
        updated = self.techniques.masters or self.params
        return {n: updated.get(n, p) for n, p in self.module.named_parameters()}

    def get_parts(self) -> dict[str, Part]:
        """Return this rank's part of every parameter and buffer, by the model's names; tied ones once."""
        at, specs = self.mesh.coordinates, self.shard_plan.specs
        found = {n: Part(p.detach(), specs[n].shape, specs[n].ranges(at)) for n, p in self.params.items()}
        here = {n: b for n, b in self.module.named_buffers() if n not in specs or specs[n].is_here(at)}
        return found | {n: make_full_part(b.detach()) for n, b in here.items()}

    def list_expert_params(self) -> set[str]:
        """Return the names of expert parameters on this rank, which replicas and shards of the other parameters
        exclude."""
        return {name for name in self.params if self.shard_plan.specs[name].expert}

    def discard_gathered(self) -> None:
        """Free gathered parameters, because the shards that they were gathered from have changed."""
        if self.techniques.shards is not None:
            self.techniques.shards.reshard()

    def refresh(self) -> None:
        """Discard all values that depend on the parts, because the parts were written from outside (a checkpoint was
        loaded)."""
        self.discard_gathered()
        for loaded in self.hooks.state_loaded:
            loaded()


@dataclass(frozen=True)
class RankModel(SplitModel):
    """The complete state that one rank trains."""

    optimizer: torch.optim.Optimizer = field(kw_only=True)
    optimizer_names: Mapping[int, str] = field(kw_only=True)
    """The name of each parameter that the optimizer updates, by its id."""
    hyperparameters: list[dict[str, Any]] = field(kw_only=True)
    """Hyperparameters of the optimizer's groups, as the job sets them."""
    reducers: Mapping[str, GradientReducer] = field(kw_only=True)
    """Reduces gradients over all ranks, by name of the phase ("" in a job without phases)."""
