"""A server's state: its share of the weights, their optimizer, the buffers; gradients that have come; updates and saves.

What a server does it does in the order that the lead says, so that all are at the same version whenever one of them sends weights.
Among several, two numbers are summed at each update: the square of the norm, so that clipping is by the whole, and how far
a save is.

Delayed Nesterov: an optimizer that steps at every gradient of a group, and moves its momentum once in N (Liu et al. 2024).

    each push           Δ ← Δ + a g ;  θ ← θ − ε (c β m + a g)
    every N-th instead  Δ ← Δ + a g ;  m ← β m + Δ ;  θ ← θ − ε ((1 − c N + c) β m + a g) ;  Δ ← 0

a is the gradient's share of its clock's samples, 1 / N where portions are equal. Here c = 0: momentum is used when it moves, and N
pushes at the same weights are one step of SGD with Nesterov momentum on their mean. Momentum at every push would count each
direction N times over. Weight decay is added to each gradient, as torch's SGD does.
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
from plait.checkpoint.manifest import MANIFEST, read_manifest
from plait.checkpoint.safetensors_file import Count
from plait.config.errors import FAILED, PlaitError, Problem
from plait.data.batch import Position
from plait.engine import train_step
from plait.engine.engine import Engine
from plait.engine.server import group as say
from plait.engine.server.dealing import Portion
from plait.engine.server.group import Doors, Layout, ServerSetting, shared_out, weighted
from plait.launch.channel import Hub, Peer
from plait.launch.place import Place, among
from plait.parallel.mesh import Mesh
from plait.tensors.norm import total_norm


class DelayedNesterov(Optimizer):
    """With the groups of an SGD: its learning rates, momenta and weight decays. `each`: N, pushes for one move of momentum."""

    def __init__(self, groups: Iterable[dict[str, Any]], each: int):
        self.each, self.share = each, 1.0
        super().__init__(list(groups), {"lr": 0.0, "momentum": 0.0, "weight_decay": 0.0})

    @staticmethod
    def of(given: Optimizer, each: int) -> "DelayedNesterov":
        """The same with the groups of the job's optimizer. P061 when that is no SGD."""
        if type(given) is not SGD or any(g["dampening"] or g["maximize"] for g in given.param_groups):
            what = "server_update=nesterov is SGD, and the job's optimizer is another"
            why = f"it is {type(given).__name__}; delayed Nesterov takes learning rate, momentum and weight decay of torch.optim.SGD"
            fix = (
                "server_update=clock    steps any optimizer",
                "optimizer=lambda p: torch.optim.SGD(p, lr=…, momentum=0.9)",
            )
            raise PlaitError(Problem("P061", what, why=why, fix=fix))
        kept = ("params", "lr", "momentum", "weight_decay", "initial_lr")
        return DelayedNesterov([{k: g[k] for k in kept if k in g} for g in given.param_groups], each)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyrefly: ignore[bad-override]
        """One push: gradients count by `share`."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._push(parameter, group)

    def _push(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, beta, rate = self.state[parameter], group["momentum"], group["lr"]
        if not state:
            state["momentum_buffer"], state["delta"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["pushes"] = 0
        assert parameter.grad is not None
        gradient = parameter.grad + group["weight_decay"] * parameter if group["weight_decay"] else parameter.grad
        gradient = gradient * self.share
        state["delta"] += gradient
        state["pushes"] += 1
        if state["pushes"] % self.each == 0:
            state["momentum_buffer"].mul_(beta).add_(state["delta"])
            state["delta"].zero_()
            gradient = gradient + beta * state["momentum_buffer"]
        parameter.sub_(rate * gradient)


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Made:
    """What an update did."""

    norm: float
    """Of the gradient over all servers, before clipping."""
    lr: float
    skipped: bool
    """The loss or the norm was not finite: nothing was changed."""


class Server:
    """Server `number` of `plan.servers`."""

    def __init__(self, setting: ServerSetting, place: Place, doors: Doors):
        self.setting, self.number = setting, place.rank - setting.plan.replica_groups
        plan, servers = setting.plan, setting.plan.servers
        place = replace(place, local_rank=0)
        self.place = among(place, self.number, servers, doors.store)
        alone = replace(self.place, rank=0, world=1, store=None)
        engine = Engine(
            setting.job, plan.inner, device="cpu", place=alone, cast=setting.cast, on_nan="ignore", read_weights=False
        )
        whole = engine.rank_model
        most = 2 * sum(t.nbytes for t in (*whole.params.values(), *engine.model.buffers())) + (1 << 24)
        params, group = self._share_of(whole.params), self.place.connect(CPU)
        optimizer = whole.optimizer
        if plan.server_update == "nesterov":
            optimizer = DelayedNesterov.of(optimizer, plan.replica_groups)
        engine.rank_model = replace(
            whole, params=params, mesh=Mesh(plan.inner, 0, group if servers > 1 else None),
            optimizer=optimizer, hyperparameters=optimizer_state.hyperparameters(optimizer),
        )  # fmt: skip
        engine.place, engine.plan = self.place, plan.uncompiled if plan.compile else plan
        self.engine, self.layout, self.buffers = engine, Layout(params), dict(engine.model.named_buffers())
        folder = setting.folder
        engine.checkpoints = Checkpoints(folder / "checkpoints" if folder is not None else Path())
        engine.arguments = setting.arguments
        self.parts: dict[int, dict[str, Tensor]] = {}
        """Gradients that have come, by ticket."""
        self.snaps: dict[int, list[bytes]] = {}
        """Weights that an evaluation is of, by errand."""
        self.applied: list[int] = []
        """Tickets, in the order in which they were used."""
        self.version = 0
        listening = doors.listening[self.number]
        self.hub = Hub(doors.key, listening, most)
        self.alive("reduce")

    def _share_of(self, params: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
        """This server's share of the parameters; of the others the memory is given back."""
        names = shared_out({n: p.nbytes for n, p in params.items()}, self.setting.plan.servers)[self.number]
        for name in params.keys() - names:
            params[name].data = params[name].data.new_empty(0)
        return {n: p for n, p in params.items() if n in names}

    def alive(self, phase: str) -> None:
        """Tell the launcher that this process waits, and does not hang."""
        self.place.within(phase)

    def packed(self) -> list[bytes]:
        """The weights of this server, and on the first the buffers."""
        data = self.layout.pack(dict(self.engine.rank_model.params))
        return data + (Layout(self.buffers).pack(self.buffers) if self.number == 0 else [])

    def send(self, peer: Peer, ticket: int) -> None:
        """Have the weights that go with a ticket, or with an errand, sent to a group."""
        data = self.packed() if ticket >= 0 else self.snaps[-1 - ticket]
        peer.send(say.WEIGHTS, (ticket, self.version), data)

    def apply(self, step: say.ServerUpdate, samples: int) -> Made:
        """Make an update. `samples`: of all clocks before it, for the schedule."""
        rank_model, each, loss = self.engine.rank_model, self.setting.rules.each, step.loss
        taken = [(1.0 if each else used.weight, self.parts.pop(used.ticket)) for used in step.used]
        self.applied += [used.ticket for used in step.used]
        gradients = weighted(taken)
        for name, parameter in rank_model.params.items():
            parameter.grad = gradients.get(name)
        norm = self._norm(list(gradients.values()))
        if isinstance(rank_model.optimizer, DelayedNesterov):
            rank_model.optimizer.share = step.used[0].weight
        lr = self._rate(samples)
        skipped = self.setting.on_nan != "ignore" and not (math.isfinite(norm) and math.isfinite(loss))
        if skipped and self.setting.on_nan == "stop":
            raise PlaitError(self._not_finite(loss, norm), FAILED)
        if not skipped:
            factor = 1.0 if self.setting.job.clip is None else min(self.setting.job.clip / (norm + 1e-6), 1.0)
            for gradient in gradients.values() if factor != 1.0 else ():
                gradient.mul_(factor)
            train_step.step(rank_model.optimizer, rank_model.hooks)
        for parameter in rank_model.params.values():
            parameter.grad = None
        self.version += 1
        return Made(norm, lr, skipped)

    def _norm(self, gradients: list[Tensor]) -> float:
        """Over all servers. How far a save is travels with it."""
        checkpoints, servers = self.engine.checkpoints, self.setting.plan.servers
        mine = float(total_norm(gradients))
        row = torch.tensor([mine**2, checkpoints.word(servers)], dtype=torch.float64)
        if servers > 1:
            dist.all_reduce(row, group=self.engine.rank_model.mesh.everyone)
        checkpoints.heard(self.engine, float(row[1]))
        return mine if servers == 1 else math.sqrt(float(row[0]))

    def _rate(self, samples: int) -> float:
        groups, schedule = self.engine.optimizer.param_groups, self.setting.job.schedule
        if schedule is not None:
            rate = float(schedule(samples))
            for group in groups:
                group["lr"] = group["initial_lr"] * rate
        return float(groups[0]["lr"])

    def _not_finite(self, loss: float, norm: float) -> Problem:
        what = f"update {self.version + 1} of the server is not finite: loss {loss}, gradient norm {norm}"
        why = "a gradient that a group computed is not finite, and nothing was updated with it; its row would be the ledger's next"
        return Problem(
            "N001",
            what,
            why=why,
            fix=("--on-nan skip    leaves it out", "a lower learning rate, or  clip=1.0  in the job"),
        )

    def change(self, weights: Sequence[float], changes: Sequence[dict[str, Tensor]]) -> None:
        """Buffers as groups' forward passes changed them: by the weighted mean of the changes, whole numbers by the largest."""
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                found = [(weight, moved[name]) for weight, moved in zip(weights, changes) if name in moved]
                for weight, moved in found if buffer.is_floating_point() else ():
                    buffer.add_(moved, alpha=weight)
                if found and not buffer.is_floating_point():
                    buffer.add_(torch.stack([moved for _, moved in found]).amax(0))

    def save(self, position: Position, facts: dict[str, Any], wait: bool) -> Path:
        """A checkpoint at this position; all servers call it."""
        self.engine.position = position
        self.engine.fingerprint["server"] = facts
        return self.engine.save(self.setting.keep, wait)

    def resume(self) -> Path | None:
        """Go on from the newest checkpoint, if there is one; all servers call it."""
        setting = self.setting
        optimizer_state.check(self.engine)
        if setting.resume is None:
            if setting.job.weights is not None:
                self.engine.load_weights(setting.job.weights)
            return None
        return self.engine.resume(missing_ok=setting.resume in ("", "auto"), allow_changes=setting.allow_changes)


@dataclass(frozen=True)
class ServerFacts:
    """Where the ledger was."""

    version: Count
    rows: Count
    fence: Count
    digest: str
    pending: tuple[Portion, ...]
    """Portions of clocks that are begun, which were neither used nor dropped."""

    @staticmethod
    def of(path: Path | None, step: int) -> "ServerFacts":
        """Those of a checkpoint; of one that no server made, and without one: a run that begins at this step. K002."""
        said = read_manifest(path).job.get("server") if path is not None else None
        if said is None:
            return ServerFacts(step, 0, 0, "", ())
        try:
            return convert(said, ServerFacts)
        except ValueError as error:
            what = f"{path}/{MANIFEST} is damaged"
            raise PlaitError(Problem("K002", what, why=f"what it says of the server: {error}")) from None


def left_out(path: Path) -> str:
    """A line on samples that a run without servers does not see when it goes on from this checkpoint; else an empty one."""
    count = sum(portion.count for portion in ServerFacts.of(path, 0).pending)
    return (
        f"note  {count} samples that were dealt and not used when {path.name} was saved are left out" if count else ""
    )
