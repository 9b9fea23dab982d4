"""What a plan makes of a job on one rank: its part of the model, its groups of ranks, what runs a step. Strategies fill it in."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.device_copies import DeviceCopies
from plait.launch.place import Place
from plait.losses.global_batch import BatchPeers
from plait.model.make import call
from plait.model.sketch import Sketch
from plait.parallel.compression.compressor import Compressor
from plait.parallel.fsdp.runtime import FsdpRuntime
from plait.parallel.gradient_reducer import GradientReducer, ReplicaSums
from plait.parallel.loss_scale import LossScale
from plait.parallel.mesh import Mesh
from plait.parallel.pipeline.runtime import PipelineRuntime
from plait.parallel.replicas import Replicas
from plait.parallel.shares.balance import Balance
from plait.parallel.spec import ShardPlan
from plait.randomness.keyed import Randomness
from plait.randomness.sub_block import Rule
from plait.tensors.moving_average import MovingAverage
from plait.tensors.parameters import ParameterAttributes, ParameterHooks
from plait.tensors.part import Part, whole


class RareSync(Protocol):
    """What brings replica groups together now and then (`parallel/replica_groups/synchronise.py`)."""

    def sums(self, step: int) -> bool:
        """Whether gradients of this step (counted from 1) are summed over all groups, as copies do."""
        ...

    def total(self, weight: Tensor) -> None:
        """Add up a number over the groups, in place."""
        ...

    def after(self, step: int, word: list[float]) -> list[tuple[int, list[float]]]:
        """After the update of a step: send and apply what is due. `word`: numbers to add up over the groups, which come back
        with the step that they were sent in."""
        ...

    def given(self, samples: bool) -> None:
        """Gradients of a step are there; `samples`: the group had any. If not, they are zeros for what it used before."""
        ...

    def end(self) -> None:
        """No step follows: wait for what is on its way."""
        ...

    def global_weights(self) -> AbstractContextManager[None]:
        """The weights of all groups together in the place of this group's own."""
        ...

    def global_parts(self) -> dict[str, Part]:
        """This rank's part of them, and of what else groups take the mean of. All ranks call it."""
        ...

    def base_parts(self) -> dict[str, Part]:
        """Those of them that are kept, and not computed when they are wanted."""
        ...

    def parts(self) -> dict[str, Part]:
        """What a checkpoint holds besides, by name."""
        ...

    def held(self) -> list[Tensor]:
        """What a rank has beside its weights and its optimizer's state: global weights, momentum, messages."""
        ...

    def values(self) -> dict[str, Any]:
        """The same of what is not a tensor, and alike on all ranks."""
        ...

    def own_values(self) -> dict[str, Any]:
        """What this rank knows of its group alone."""
        ...

    def expect(self, groups: dict[str, Any]) -> None:
        """Make room for what a checkpoint holds (`values`), so that `parts` are read in place."""
        ...

    def resume(self, own: dict[str, Any]) -> None:
        """Go on as the group that said this (`own_values`)."""
        ...


Call = Callable[[nn.Module, Any], Any]
"""(model, inputs) -> outputs."""


class CompileReport(Protocol):
    """What became of `compile=true` (`parallel/compiled.py`)."""

    def notes(self) -> list[str]:
        """Which units stay uncompiled by this plan."""
        ...

    def news(self) -> list[str]:
        """After a step: what torch.compile gave up; each once."""
        ...


@dataclass(frozen=True)
class Moments:
    """What is called later than a rank is built, each in the order in which it was added. Strategies add to it."""

    optimizer_created: list[Callable[[torch.optim.Optimizer], object]] = field(default_factory=list)
    """With the optimizer, once it is made."""
    gradients_summed: list[Callable[[GradientReducer], None]] = field(default_factory=list)
    """With what summed the gradients of a step, before they are measured and clipped. All ranks call it."""
    state_loaded: list[Callable[[], None]] = field(default_factory=list)
    """When the parts were written from outside (a checkpoint was loaded)."""
    masters_written: list[Callable[[], None]] = field(default_factory=list)
    """When `masters` were written outside of a step: they are copied into `own`. All ranks call it."""
    close: list[Callable[[], None]] = field(default_factory=list)
    """When the engine is closed, the last first: settings of this process become what they were."""


@dataclass
class Built:
    """One rank's model and optimizer under a plan. Strategies fill in what they bring."""

    job: Job
    plan: Plan
    place: Place
    device: torch.device
    mesh: Mesh
    model: nn.Module
    data: Any
    sketch: Sketch
    whole: Sketch = field(init=False)
    """The sketch of the whole model; `sketch` becomes that of what this rank has of it."""
    table: ShardPlan = field(init=False)
    """Which rank has which part of which tensor, and how each gradient is summed."""
    cast: torch.dtype | None = None
    trial_call: Call = call
    """Runs the model in training's format, for those who look at it before it is split."""
    pairs: Callable[[int], Any] = lambda n: None
    """n -> inputs and targets of n samples."""
    on_host: bool = False
    """Its model is in the host's memory still: the device has no room for it before it is cut."""
    inputs: DeviceCopies = field(init=False)
    """Samples on their way to the device."""
    randomness: Randomness = field(init=False)
    """Not with `replicas`, which bring their own, one for each thread."""
    optimizer: torch.optim.Optimizer = field(init=False)
    names: dict[int, str] | None = None
    own: dict[str, nn.Parameter] = field(default_factory=dict)
    """This rank's part of every parameter, by the model's name; tied ones once."""
    attributes: dict[str, ParameterAttributes] = field(default_factory=dict)
    """What code has put on the job's parameters, by the model's names."""
    parameter_hooks: dict[str, ParameterHooks] = field(default_factory=dict)
    """The job's hooks on gradients of parameters, taken off them."""
    shares: dict[str, Tensor] = field(default_factory=dict)
    """This rank's parts of parameters that are on the meta device, until they are put in place."""
    sums: dict[str, ReplicaSums] = field(default_factory=dict)
    """What sums gradients over replicas, by the name of the phase; "" in a job without phases."""
    reducers: dict[str, GradientReducer] = field(default_factory=dict)
    """What sums gradients over all ranks, by the name of the phase; "" in a job without phases."""
    compressor: Compressor | None = None
    """What makes the sums of copies under `compress`, and holds the residuals."""
    shards: FsdpRuntime | None = None
    """What runs the parts of a sharded model, if it is one."""
    pipe: PipelineRuntime | None = None
    """This rank's part of the pipeline, if there is one."""
    in_fp8: tuple[str, ...] = ()
    """Linear layers that compute in fp8 under `precision=fp8`."""
    rare: "RareSync | None" = None
    """What this rank synchronises with its replica group's like in other groups."""
    sharers: BatchPeers = field(default_factory=BatchPeers)
    """The ranks with other samples, while a step's passes run."""
    masters: dict[str, nn.Parameter] | None = None
    """What the optimizer updates when it is not `own`: copies in host memory, or whole tensors."""
    moments: Moments = field(default_factory=Moments)
    rules: list[Rule] = field(default_factory=list)
    """What this rank holds of tensors that are drawn at random: the first that says something is right."""
    replicas: Replicas | None = None
    run: Call = call
    """(model, inputs) -> outputs."""
    scaler: LossScale | None = None
    compiled: CompileReport | None = None
    """Under `compile`, what is compiled and what is not."""
    balance: Balance | None = None
    """What follows the speeds of shares, under `batch_shares=auto`."""
    average: MovingAverage | None = None
    """The average of the weights, where the job wants one (`parallel/average.py`)."""
    structure: dict[str, list[str]] = field(default_factory=dict)
    """What the model's modules were made with (`checkpoint/fingerprint.py`)."""
    initial: list[dict[str, Any]] = field(default_factory=list)
    """The hyperparameters of the optimizer's groups as the job sets them."""
    coupled_in_eval: str = ""
    """What of the model uses the batch in eval mode (`engine/batch_dependence.py`)."""
    unlike: tuple[str, ...] = ()
    """What differs from rank to rank in what an iterable gives."""

    @property
    def group(self) -> ProcessGroup | None:
        """The group of all ranks; None where there is one process."""
        return self.mesh.everyone

    @property
    def model_device(self) -> torch.device:
        """Where its model is now."""
        return torch.device("cpu") if self.on_host else self.device

    def parts(self) -> dict[str, Part]:
        """This rank's part of every parameter and buffer, tied ones once, by the model's names."""
        at, specs = self.mesh.at, self.table.specs
        found = {n: Part(p.detach(), specs[n].shape, specs[n].ranges(at)) for n, p in self.own.items()}
        here = {n: b for n, b in self.model.named_buffers() if n not in specs or specs[n].is_here(at)}
        return found | {n: whole(b.detach()) for n, b in here.items()}

    def experts(self) -> set[str]:
        """Parameters of experts that this rank has: replicas and shards of the rest of the model leave them."""
        return {name for name in self.own if self.table.specs[name].expert}

    def refresh(self) -> None:
        """The parts were written from outside (a checkpoint was loaded): forget what was computed from them."""
        if self.shards is not None:
            self.shards.reshard()
        for loaded in self.moments.state_loaded:
            loaded()
