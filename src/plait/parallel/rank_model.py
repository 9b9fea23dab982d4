"""One rank's model under a plan, and what trains it. Frozen: `engine/build.py` makes it, step by step, and nobody changes it.

SplitModel    what strategies are given, and return with what they make of it: the module, its parameters, their techniques
RankModel     a split model with its optimizer and its gradient reducers

The units that torch.compile compiles, and what became of them, are a `CompiledUnits` (see `parallel/compiled.py`).
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
from plait.parallel.compression.compressor import Compressor
from plait.parallel.fsdp.runtime import FsdpRuntime
from plait.parallel.gradient_reducer import GradientReducer, ReplicaSums
from plait.parallel.loss_scale import LossScale
from plait.parallel.mesh import Mesh
from plait.parallel.pipeline.runtime import PipelineRuntime
from plait.parallel.rank_setup import RankSetup
from plait.parallel.replica_groups.synchronise import RareSynchroniser
from plait.parallel.replicas import Replicas
from plait.parallel.shares.balance import Balance
from plait.parallel.spec import ShardPlan
from plait.randomness.keyed import Randomness
from plait.tensors.moving_average import MovingAverage
from plait.tensors.rows import Part, whole
from plait.tensors.torch_private import compiled_so_far


class CompiledUnits:
    """The compiled forward of each class, one for all units of the class; and what became of it."""

    def __init__(self, names: list[str], left: dict[str, str]):
        self.names, self.left = names, left
        self.made: dict[Callable[..., Any], Callable[..., Any]] = {}
        self.before = compiled_so_far()
        self.asked = False

    def of(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """(module, its arguments) -> what the forward gives."""
        if forward not in self.made:
            own = not forward.__module__.startswith("torch.")
            self.made[forward] = torch.compile(forward if own else _ours(forward))
        return self.made[forward]

    def notes(self) -> list[str]:
        """What stays uncompiled, or is left out, by this plan; in a line for units that are alike."""
        rows = dict.fromkeys((re.sub(r"\d+", "*", name), why) for name, why in self.left.items())
        return [f"compile: {name} {why}" for name, why in rows]

    def news(self) -> list[str]:
        """After a step: what torch.compile gave up, or that it compiled nothing at all; each once."""
        (graphs, given_up), before = compiled_so_far(), self.before
        lines = []
        if self.made and graphs == before[0] and not self.asked:
            lines.append(
                "compile: torch.compile made no graph, everything runs uncompiled (TORCH_LOGS=graph_breaks says why)"
            )
        if given_up > before[1]:
            lines.append(
                "compile: a part of a unit runs uncompiled from now on, it was compiled too often (TORCH_LOGS=recompiles)"
            )
        self.asked, self.before = True, (graphs, given_up)
        return lines


def _ours(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ours: torch.compile skips one of torch's own modules that it would begin with."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    return call


@dataclass(frozen=True)
class Hooks:
    """What is called later than a rank is built, each in the order in which it was added. Strategies add to it."""

    optimizer_created: list[Callable[[torch.optim.Optimizer], object]] = field(default_factory=list)
    """With the optimizer, once it is made."""
    gradients_summed: list[Callable[[GradientReducer], None]] = field(default_factory=list)
    """With what summed the gradients of a step, before they are measured and clipped. All ranks call it."""
    before_update: list[Callable[[], None]] = field(default_factory=list)
    """Before the optimizer's step: what it updates gets its gradients. Hooks that the job has on its optimizer run later."""
    after_update: list[Callable[[], None]] = field(default_factory=list)
    """After the optimizer's step, and the job's hooks on it: what it updated goes where it is used."""
    state_loaded: list[Callable[[], None]] = field(default_factory=list)
    """When the parts were written from outside (a checkpoint was loaded)."""
    masters_written: list[Callable[[], None]] = field(default_factory=list)
    """When `Techniques.masters` were written outside of a step: they are copied into `params`. All ranks call it."""
    close: list[Callable[[], None]] = field(default_factory=list)
    """When the engine is closed, the last first: settings of this process become what they were."""


@dataclass(frozen=True)
class Techniques:
    """What the plan's techniques run in a step; None of those that it leaves out."""

    sums: Mapping[str, ReplicaSums] = field(default_factory=dict)
    """What sums gradients over replicas, by the name of the phase; "" in a job without phases."""
    shards: FsdpRuntime | None = None
    """What runs the parts of a sharded model."""
    pipeline: PipelineRuntime | None = None
    """This rank's part of the pipeline."""
    replicas: Replicas | None = None
    """Copies of the model in threads."""
    replica_groups: RareSynchroniser | None = None
    """What this rank synchronises with its like in other replica groups."""
    compressor: Compressor | None = None
    """What makes the sums of `grad_compression`, and holds the residuals."""
    loss_scale: LossScale | None = None
    balance: Balance | None = None
    """What follows the speeds of shares, under `batch_split=auto`."""
    average: MovingAverage | None = None
    """The average of the weights, where the job wants one."""
    compiled: CompiledUnits | None = None
    """What is compiled, and what is not."""
    masters: Mapping[str, nn.Parameter] | None = None
    """What the optimizer updates when it is not `params`: copies in host memory, or whole tensors."""


@dataclass(frozen=True)
class SplitModel:
    """One rank's part of the model, with the techniques that are applied so far."""

    setup: RankSetup
    mesh: Mesh
    table: ShardPlan
    """Which rank has which part of which tensor, and how each gradient is summed."""
    whole_sketch: Sketch
    """Of the whole model."""
    sketch: Sketch
    """Of what this rank has of it."""
    module: nn.Module
    params: Mapping[str, nn.Parameter]
    """This rank's part of every parameter, by the model's name; tied ones once."""
    batch_peers: BatchPeers
    """The ranks with other samples, while a step's passes run."""
    randomness: Randomness
    """Not with `Techniques.replicas`, which bring their own, one for each thread."""
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

    def using(self, **techniques: Any) -> Self:
        """The same with these fields of `techniques`."""
        return replace(self, techniques=replace(self.techniques, **techniques))

    def to_update(self) -> dict[str, nn.Parameter]:
        """What the optimizer is given, by name; in the place of what this rank does not update, what the module has there."""
        updated = self.techniques.masters or self.params
        return {n: updated.get(n, p) for n, p in self.module.named_parameters()}

    def parts(self) -> dict[str, Part]:
        """This rank's part of every parameter and buffer, tied ones once, by the model's names."""
        at, specs = self.mesh.at, self.table.specs
        found = {n: Part(p.detach(), specs[n].shape, specs[n].ranges(at)) for n, p in self.params.items()}
        here = {n: b for n, b in self.module.named_buffers() if n not in specs or specs[n].is_here(at)}
        return found | {n: whole(b.detach()) for n, b in here.items()}

    def experts(self) -> set[str]:
        """Parameters of experts that this rank has: replicas and shards of the rest of the model leave them."""
        return {name for name in self.params if self.table.specs[name].expert}

    def forget_gathered(self) -> None:
        """Parameters that are gathered were gathered of other numbers: the parts have changed."""
        if self.techniques.shards is not None:
            self.techniques.shards.reshard()

    def refresh(self) -> None:
        """The parts were written from outside (a checkpoint was loaded): forget what was computed from them."""
        self.forget_gathered()
        for loaded in self.hooks.state_loaded:
            loaded()


@dataclass(frozen=True)
class RankModel(SplitModel):
    """What a rank trains."""

    optimizer: torch.optim.Optimizer = field(kw_only=True)
    optimizer_names: Mapping[int, str] = field(kw_only=True)
    """The name of each parameter that the optimizer updates, by its id."""
    hyperparameters: list[dict[str, Any]] = field(kw_only=True)
    """Those of the optimizer's groups as the job sets them."""
    reducers: Mapping[str, GradientReducer] = field(kw_only=True)
    """What sums gradients over all ranks, by the name of the phase; "" in a job without phases."""
