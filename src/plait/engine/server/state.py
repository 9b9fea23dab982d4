"""A server's state: its part of the weights, their optimizer, the buffers; received gradients; updates and saves.

A server executes the lead's orders in sequence, so all servers are at the same version whenever one sends weights. Several servers
sum two values at each update: the square of the norm, so that clipping uses the global norm, and the progress of a save.

Delayed Nesterov: an optimizer that steps at every gradient of a group, and updates its momentum once in N (Liu et al. 2024).

    each push           Δ ← Δ + a g ;  θ ← θ − ε (c β m + a g)
    every N-th instead  Δ ← Δ + a g ;  m ← β m + Δ ;  θ ← θ − ε ((1 − c N + c) β m + a g) ;  Δ ← 0

a is the gradient's fraction of its clock's samples, 1 / N if portions are equal. Here c = 0: momentum is applied when it is updated,
and N pushes at the same weights equal one step of SGD with Nesterov momentum on their mean. Momentum at every push would count each
direction N times. Weight decay is added to each gradient, as in torch's SGD.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import convert
from torch import Tensor
from torch.optim import SGD, Optimizer

from plait.checkpoint import optimizer_state
from plait.checkpoint.checkpoints import Checkpoints
from plait.checkpoint.manifest import MANIFEST_NAME, read_manifest
from plait.checkpoint.safetensors_file import Count
from plait.config.errors import FAILED, PlaitError, Problem
from plait.data.batch import Position
from plait.engine import train_step
from plait.engine.engine import Engine
from plait.engine.server import group as say
from plait.engine.server.dealer import Portion
from plait.engine.server.group import Layout, ServerSetting, ServerSockets, assign_to_servers, sum_weighted
from plait.launch.channel import Hub, Peer
from plait.launch.place import Place, make_local_place
from plait.parallel.mesh import Mesh
from plait.tensors.norm import total_norm


class DelayedNesterov(Optimizer):
    """Delayed Nesterov with the parameter groups of an SGD: its learning rates, momenta and weight decays. `pushes_per_move`: N, pushes
    per momentum update."""

    def __init__(self, groups: Iterable[dict[str, Any]], pushes_per_move: int):
        self.pushes_per_move, self.share = pushes_per_move, 1.0
        super().__init__(list(groups), {"lr": 0.0, "momentum": 0.0, "weight_decay": 0.0})

    @staticmethod
    def from_optimizer(given: Optimizer, each: int) -> "DelayedNesterov":
        """Make one with the groups of the job's optimizer. P061 if that is not SGD."""
        if type(given) is not SGD or any(g["dampening"] or g["maximize"] for g in given.param_groups):
            what = "server_update=nesterov needs SGD, but the job's optimizer is different"
            why = f"it is {type(given).__name__}; delayed Nesterov uses the learning rate, momentum and weight decay of torch.optim.SGD"
            fix = (
                "server_update=clock    steps any optimizer",
                "optimizer=lambda p: torch.optim.SGD(p, lr=…, momentum=0.9)",
            )
            raise PlaitError(Problem("P061", what, why=why, fix=fix))
        kept = ("params", "lr", "momentum", "weight_decay", "initial_lr")
        return DelayedNesterov([{k: g[k] for k in kept if k in g} for g in given.param_groups], each)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyrefly: ignore[bad-override]
        """Apply one push: gradients are scaled by `share`."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._apply_push(parameter, group)

    def _apply_push(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, beta, rate = self.state[parameter], group["momentum"], group["lr"]
        if not state:
            state["momentum_buffer"], state["delta"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["pushes"] = 0
        assert parameter.grad is not None
        gradient = parameter.grad + group["weight_decay"] * parameter if group["weight_decay"] else parameter.grad
        gradient = gradient * self.share
        state["delta"] += gradient
        state["pushes"] += 1
        if state["pushes"] % self.pushes_per_move == 0:
            state["momentum_buffer"].mul_(beta).add_(state["delta"])
            state["delta"].zero_()
            gradient = gradient + beta * state["momentum_buffer"]
        parameter.sub_(rate * gradient)


CPU = torch.device("cpu")


@dataclass(frozen=True)
class UpdateResult:
    """New weights after an update, and its statistics."""

    norm: float
    """Norm of the gradient over all servers, before clipping."""
    lr: float
    skipped: bool
    """Whether the update was skipped, since the loss or the norm was not finite."""


class Server:
    """Server `number` of `plan.servers`."""

    def __init__(self, setting: ServerSetting, place: Place, sockets: ServerSockets):
        self.setting, self.number = setting, place.rank - setting.plan.replica_groups
        plan, servers = setting.plan, setting.plan.servers
        place = replace(place, local_rank=0)
        self.place = make_local_place(place, self.number, servers, sockets.store)
        alone = replace(self.place, rank=0, world=1, store=None)
        engine = Engine(
            setting.job, plan.inner, device="cpu", place=alone, cast=setting.cast, on_nan="ignore", read_weights=False
        )
        whole = engine.rank_model
        most = 2 * sum(t.nbytes for t in (*whole.params.values(), *engine.model.buffers())) + (1 << 24)
        params, group = self._select_own(whole.params), self.place.connect(CPU)
        optimizer = whole.optimizer
        if plan.server_update == "nesterov":
            optimizer = DelayedNesterov.from_optimizer(optimizer, plan.replica_groups)
        engine.rank_model = replace(
            whole, params=params, mesh=Mesh(plan.inner, 0, group if servers > 1 else None),
            optimizer=optimizer, hyperparameters=optimizer_state.list_hyperparameters(optimizer),
        )  # fmt: skip
        engine.place, engine.plan = self.place, plan.uncompiled if plan.compile else plan
        self.engine, self.layout, self.buffers = engine, Layout(params), dict(engine.model.named_buffers())
        folder = setting.folder
        engine.checkpoints = Checkpoints(folder / "checkpoints" if folder is not None else Path())
        engine.arguments = setting.arguments
        self.gradients: dict[int, dict[str, Tensor]] = {}
        """Received gradients, by ticket."""
        self.snapshots: dict[int, list[bytes]] = {}
        """Weights for pending evaluations, by task."""
        self.applied: list[int] = []
        """Tickets, in order of use."""
        self.version = 0
        listening = sockets.listeners[self.number]
        self.hub = Hub(sockets.key, listening, most)
        self.report_alive("reduce")

    def _select_own(self, params: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
        """Select this server's parameters; free the memory of the others."""
        names = assign_to_servers({n: p.nbytes for n, p in params.items()}, self.setting.plan.servers)[self.number]
        for name in params.keys() - names:
            params[name].data = params[name].data.new_empty(0)
        return {n: p for n, p in params.items() if n in names}

    def report_alive(self, phase: str) -> None:
        """Report to the launcher that this process is waiting, not hanging."""
        self.place.set_phase(phase)

    def pack_weights(self) -> list[bytes]:
        """Pack the weights of this server, and on the first server the buffers."""
        data = self.layout.pack(dict(self.engine.rank_model.params))
        return data + (Layout(self.buffers).pack(self.buffers) if self.number == 0 else [])

    def send_weights(self, peer: Peer, ticket: int) -> None:
        """Send the weights of a ticket or a task to a group."""
        data = self.pack_weights() if ticket >= 0 else self.snapshots[-1 - ticket]
        peer.send(say.WEIGHTS, (ticket, self.version), data)

    def apply(self, step: say.ServerUpdate, samples: int) -> UpdateResult:
        """Make an update. `samples`: of all clocks before it, for the schedule."""
        rank_model, each, loss = self.engine.rank_model, self.setting.rules.update_per_gradient, step.loss
        taken = [(1.0 if each else used.weight, self.gradients.pop(used.ticket)) for used in step.used]
        self.applied += [used.ticket for used in step.used]
        gradients = sum_weighted(taken)
        for name, parameter in rank_model.params.items():
            parameter.grad = gradients.get(name)
        norm = self._compute_norm(list(gradients.values()))
        if isinstance(rank_model.optimizer, DelayedNesterov):
            rank_model.optimizer.share = step.used[0].weight
        lr = self._set_learning_rate(samples)
        skipped = self.setting.on_nan != "ignore" and not (math.isfinite(norm) and math.isfinite(loss))
        if skipped and self.setting.on_nan == "stop":
            raise PlaitError(self._make_nonfinite_problem(loss, norm), FAILED)
        if not skipped:
            factor = 1.0 if self.setting.job.clip is None else min(self.setting.job.clip / (norm + 1e-6), 1.0)
            for gradient in gradients.values() if factor != 1.0 else ():
                gradient.mul_(factor)
            train_step.step_optimizer(rank_model.optimizer, rank_model.hooks)
        for parameter in rank_model.params.values():
            parameter.grad = None
        self.version += 1
        return UpdateResult(norm, lr, skipped)

    def _compute_norm(self, gradients: list[Tensor]) -> float:
        """Compute the norm over all servers. The progress of a save is summed with it."""
        checkpoints, servers = self.engine.checkpoints, self.setting.plan.servers
        mine = float(total_norm(gradients))
        row = torch.tensor([mine**2, checkpoints.progress_value(servers)], dtype=torch.float64)
        if servers > 1:
            dist.all_reduce(row, group=self.engine.rank_model.mesh.world_group)
        checkpoints.advance_save(self.engine, float(row[1]))
        return mine if servers == 1 else math.sqrt(float(row[0]))

    def _set_learning_rate(self, samples: int) -> float:
        groups, schedule = self.engine.optimizer.param_groups, self.setting.job.schedule
        if schedule is not None:
            rate = float(schedule(samples))
            for group in groups:
                group["lr"] = group["initial_lr"] * rate
        return float(groups[0]["lr"])

    def _make_nonfinite_problem(self, loss: float, norm: float) -> Problem:
        what = f"update {self.version + 1} of the server is not finite: loss {loss}, gradient norm {norm}"
        why = "a group's gradient is not finite, so the update was not made; its row would be the next in the ledger"
        return Problem(
            "N001",
            what,
            why=why,
            fix=("--on-nan skip    skips such updates", "a lower learning rate, or  clip=1.0  in the job"),
        )

    def update_buffers(self, weights: Sequence[float], changes: Sequence[dict[str, Tensor]]) -> None:
        """Update buffers with the groups' changes: by their weighted mean, integers by the largest."""
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                found = [(weight, moved[name]) for weight, moved in zip(weights, changes) if name in moved]
                for weight, moved in found if buffer.is_floating_point() else ():
                    buffer.add_(moved, alpha=weight)
                if found and not buffer.is_floating_point():
                    buffer.add_(torch.stack([moved for _, moved in found]).amax(0))

    def save(self, position: Position, facts: dict[str, Any], wait: bool) -> Path:
        """Save a checkpoint at this position; all servers call it."""
        self.engine.position = position
        self.engine.fingerprint["server"] = facts
        return self.engine.save(self.setting.keep, wait)

    def resume(self) -> Path | None:
        """Load the newest checkpoint, if there is one; all servers call it."""
        setting = self.setting
        optimizer_state.check_resumable(self.engine)
        if setting.resume is None:
            if setting.job.weights is not None:
                self.engine.load_weights(setting.job.weights)
            return None
        return self.engine.resume(missing_ok=setting.resume in ("", "auto"), allow_changes=setting.allow_changes)


@dataclass(frozen=True)
class LedgerState:
    """The state of the ledger in a checkpoint."""

    version: Count
    rows: Count
    fence: Count
    digest: str
    pending: tuple[Portion, ...]
    """Portions of started clocks that were neither used nor dropped."""

    @staticmethod
    def from_checkpoint(path: Path | None, step: int) -> "LedgerState":
        """Read the state from a checkpoint; without server state, that of a run that begins at this step. K002."""
        said = read_manifest(path).job.get("server") if path is not None else None
        if said is None:
            return LedgerState(step, 0, 0, "", ())
        try:
            return convert(said, LedgerState)
        except ValueError as error:
            what = f"{path}/{MANIFEST_NAME} is damaged"
            raise PlaitError(Problem("K002", what, why=f"its server state is invalid: {error}")) from None


def describe_unused_samples(path: Path) -> str:
    """Describe the samples that a run without servers misses when it resumes from this checkpoint; "" if there are none."""
    count = sum(portion.count for portion in LedgerState.from_checkpoint(path, 0).pending)
    return (
        f"note  {count} samples that were assigned but unused when {path.name} was saved are skipped" if count else ""
    )
