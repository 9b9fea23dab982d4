"""The reference of a job with phases, in plain PyTorch: each phase's parameters made to require gradients and the others not, its loss,
its optimizer, as anyone writes the loop of a GAN. And what makes such a job hard: phases come often, and are all clipped.

It shares with the engine which phase the model's forward pass runs (`config/phases.py`) and the keyed random numbers.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from plait.config.job import Job
from plait.config.phases import Phase
from plait.data.batch_rows import Pair
from plait.model.optimizers import train_mode
from plait.model.parameter_groups import naming
from plait.proof import reference
from plait.proof.reference import OneDevice
from plait.tensors.float64 import Wide

OFTEN = 2
"""In a proof no phase is rarer than every second step, so that the few steps have some of each."""


def train(
    job: Job, steps: int, clip: float, dtype: torch.dtype, device: str = "cpu", *,
    moves: Callable[[], None] = lambda: None, then: Callable[[OneDevice], dict[str, Any]] = lambda one: {},
) -> dict[str, Any]:  # fmt: skip
    """As `reference.train`, of a job with phases. `gradients` are those of the phases in step 1; `clips`: the norm used for each phase,
    a share of its first."""
    data = job.data()
    one = OneDevice.of(job, data, dtype, device)
    phases, own = job.phases or (), _Phases(job, one)
    out: dict[str, Any] = {"initial": reference.copied(one.model.named_parameters()), "rows": [], "ids": []}
    out |= {"gradients": {}, "clips": {}, "mean": None}
    stream = reference.samples(job, data)
    for step in range(1, steps + 1):
        moves()
        read, row = next(stream), dict[str, float]()
        pair = reference.ready(one, data, read[2])
        one.notes.batch(one.steps, [(0, len(read[1]), pair)])
        for phase in phases:
            if step % phase.every:
                continue
            loss = own.passes(phase, pair, len(read[1]), moves)
            norm = own.norm(phase)
            if not (torch.isfinite(loss) and torch.isfinite(norm)):
                raise reference.nonfinite(step, float(loss), float(norm), read[1])
            if step == 1:
                out["gradients"] |= reference.gradients(one.model)
            limit = out["clips"].setdefault(phase.name, clip * float(norm) or clip)
            lr = own.update(phase, limit)
            told = {"loss": float(loss), "norm": float(norm), "lr": lr, "samples": one.seen + len(read[1])}
            row = of_phases(job, phase, told, row)
        one.steps, one.seen = one.steps + 1, one.seen + len(read[1])
        own.train_all()
        one.move_average()
        out["rows"].append(row)
        out["ids"].append([read[0], read[1]])
    out["clip"] = out["clips"][_main(job).name]
    return out | reference.end(one) | then(one)


class _Phases:
    """The phases' parameters and optimizers, on one device."""

    def __init__(self, job: Job, one: OneDevice):
        self.job, self.one, phases = job, one, job.phases or ()
        named = [(n, p) for n, p in one.model.named_parameters() if p.requires_grad]
        self.trained = {phase.name: [p for n, p in named if phase.has(n)] for phase in phases}
        with naming(dict(named)):
            self.optimizers = {phase.name: phase.optimizer(self.trained[phase.name]) for phase in phases}
        for optimizer in self.optimizers.values():
            train_mode(optimizer)
        self.rates = {name: [g["lr"] for g in optimizer.param_groups] for name, optimizer in self.optimizers.items()}

    def passes(
        self, phase: Phase, pair: Pair, samples: int, moves: Callable[[], None]
    ) -> torch.Tensor:
        """The phase's loss of (inputs, targets), after its backward pass."""
        one = self.one
        for parameters in self.trained.values():
            for p in parameters:
                p.requires_grad_(parameters is self.trained[phase.name])
        one.model.turn = phase.name  # type: ignore[assignment]
        with Wide(), one.keyed.at(one.steps, 0, samples, turn=phase.name):
            outputs = reference.call(one.model, pair[0])[phase.name]
            loss = phase.loss(outputs, pair[1])
        moves()
        with one.keyed.replay():
            loss.backward()
        one.notes.gradients()
        return loss.detach()

    def train_all(self) -> None:
        """Between steps every phase's parameters require gradients."""
        for p in (p for parameters in self.trained.values() for p in parameters):
            p.requires_grad_(True)

    def norm(self, phase: Phase) -> torch.Tensor:
        """Of the phase's gradients."""
        return torch.nn.utils.get_total_norm([p.grad for p in self.trained[phase.name] if p.grad is not None])

    def update(self, phase: Phase, limit: float) -> float:
        """Clip, and take the step of the phase's optimizer; its learning rate."""
        optimizer, job = self.optimizers[phase.name], self.job
        torch.nn.utils.clip_grad_norm_(self.trained[phase.name], limit)
        for group, rate in zip(optimizer.param_groups, self.rates[phase.name]):
            group["lr"] = rate * job.schedule(self.one.seen) if job.schedule else rate
        optimizer.step()
        self.one.notes.updated(optimizer)
        self.one.model.zero_grad(set_to_none=True)
        return float(optimizer.param_groups[0]["lr"])


def _main(job: Job) -> Phase:
    return next(phase for phase in job.phases or () if phase.every == 1)


def of_phases(job: Job, phase: Phase, told: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """A step's row with what a phase of it did. Every row has numbers of every phase: zeros of those that were not due."""
    kinds = ("loss", "norm", "lr")
    row = before or dict.fromkeys(kinds, 0.0) | {f"{kind} of {p.name}": 0.0 for p in job.phases or () for kind in kinds}
    row |= {"samples": told["samples"]} | {f"{kind} of {phase.name}": told[kind] for kind in kinds}
    return row | ({kind: told[kind] for kind in kinds} if phase is _main(job) else {})


def hard(job: Job) -> Job:
    """The job with phases that come often; without any it stays as it is."""
    if job.phases is None:
        return job
    return replace(job, phases=tuple(replace(phase, every=min(phase.every, OFTEN)) for phase in job.phases))


def clipped(job: Job, facts: dict[str, Any]) -> Job:
    """The job with its gradients clipped as the reference's were, by what it told (`clip`, `clips`)."""
    job = replace(job, clip=facts["clip"])
    if job.phases is None:
        return job
    return replace(job, phases=tuple(replace(phase, clip=facts["clips"].get(phase.name)) for phase in job.phases))
