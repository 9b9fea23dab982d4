"""The reference of a job with phases, in plain PyTorch, like a hand-written GAN loop. In each phase only its own parameters require gradients,
and it has its own loss and optimizer. In the hardened job, phases are frequent and always clipped.

It shares with the engine only the choice of the phase in the model's forward pass (`config/phases.py`) and the keyed random numbers.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from plait.config.job import Job
from plait.config.phases import Phase
from plait.data.batch_rows import Pair
from plait.model.optimizers import set_train_mode
from plait.model.parameter_groups import provide_names
from plait.proof import reference
from plait.proof.reference import OneDevice
from plait.tensors.float64 import Float64Mode

MAX_PHASE_INTERVAL = 2
"""Largest interval of a phase in a proof: all phases must run within the few steps."""


def train_reference(
    job: Job, steps: int, clip: float, dtype: torch.dtype, device: str = "cpu", *,
    moves: Callable[[], None] = lambda: None, then: Callable[[OneDevice], dict[str, Any]] = lambda one: {},
) -> dict[str, Any]:  # fmt: skip
    """Like `reference.train`, for a job with phases. `gradients` are those of the phases in step 1; `clips`: the clipping norm of each phase,
    a fraction of its first gradient norm."""
    data = job.data()
    one = OneDevice.from_job(job, data, dtype, device)
    phases, own = job.phases or (), _PhaseTrainer(job, one)
    out: dict[str, Any] = {"initial": reference.copy_tensors(one.model.named_parameters()), "rows": [], "ids": []}
    out |= {"gradients": {}, "clips": {}, "mean": None}
    stream = reference.iterate_samples(job, data)
    for step in range(1, steps + 1):
        moves()
        read, row = next(stream), dict[str, float]()
        pair = reference.prepare_batch(one, data, read[2])
        one.recorder.begin_batch(one.steps, [(0, len(read[1]), pair)])
        for phase in phases:
            if step % phase.every:
                continue
            loss = own.run_passes(phase, pair, len(read[1]), moves)
            norm = own.compute_norm(phase)
            if not (torch.isfinite(loss) and torch.isfinite(norm)):
                raise reference.make_nonfinite_error(step, float(loss), float(norm), read[1])
            if step == 1:
                out["gradients"] |= reference.copy_gradients(one.model)
            limit = out["clips"].setdefault(phase.name, clip * float(norm) or clip)
            lr = own.update(phase, limit)
            told = {"loss": float(loss), "norm": float(norm), "lr": lr, "samples": one.sample_count + len(read[1])}
            row = merge_phase_row(job, phase, told, row)
        one.steps, one.sample_count = one.steps + 1, one.sample_count + len(read[1])
        own.unfreeze_all()
        one.move_average()
        out["rows"].append(row)
        out["ids"].append([read[0], read[1]])
    out["clip"] = out["clips"][_find_main_phase(job).name]
    return out | reference.copy_final_state(one) | then(one)


class _PhaseTrainer:
    """Parameters and optimizers of the phases on one device."""

    def __init__(self, job: Job, one: OneDevice):
        self.job, self.one, phases = job, one, job.phases or ()
        named = [(n, p) for n, p in one.model.named_parameters() if p.requires_grad]
        self.trained = {phase.name: [p for n, p in named if phase.has(n)] for phase in phases}
        with provide_names(dict(named)):
            self.optimizers = {phase.name: phase.optimizer(self.trained[phase.name]) for phase in phases}
        for optimizer in self.optimizers.values():
            set_train_mode(optimizer)
        self.rates = {name: [g["lr"] for g in optimizer.param_groups] for name, optimizer in self.optimizers.items()}

    def run_passes(
        self, phase: Phase, pair: Pair, samples: int, moves: Callable[[], None]
    ) -> torch.Tensor:
        """Loss of the phase for (inputs, targets), after its backward pass."""
        one = self.one
        for parameters in self.trained.values():
            for p in parameters:
                p.requires_grad_(parameters is self.trained[phase.name])
        one.model.turn = phase.name  # type: ignore[assignment]
        with Float64Mode(), one.keyed.forward_pass(one.steps, 0, samples, turn=phase.name):
            outputs = reference.call_model(one.model, pair[0])[phase.name]
            loss = phase.loss(outputs, pair[1])
        moves()
        with one.keyed.replay():
            loss.backward()
        one.recorder.record_gradients()
        return loss.detach()

    def unfreeze_all(self) -> None:
        """Let the parameters of all phases require gradients, as between steps."""
        for p in (p for parameters in self.trained.values() for p in parameters):
            p.requires_grad_(True)

    def compute_norm(self, phase: Phase) -> torch.Tensor:
        """Gradient norm of the phase."""
        return torch.nn.utils.get_total_norm([p.grad for p in self.trained[phase.name] if p.grad is not None])

    def update(self, phase: Phase, limit: float) -> float:
        """Clip the gradients and run the phase's optimizer step. Returns its learning rate."""
        optimizer, job = self.optimizers[phase.name], self.job
        torch.nn.utils.clip_grad_norm_(self.trained[phase.name], limit)
        for group, rate in zip(optimizer.param_groups, self.rates[phase.name]):
            group["lr"] = rate * job.schedule(self.one.sample_count) if job.schedule else rate
        optimizer.step()
        self.one.recorder.record_update(optimizer)
        self.one.model.zero_grad(set_to_none=True)
        return float(optimizer.param_groups[0]["lr"])


def _find_main_phase(job: Job) -> Phase:
    return next(phase for phase in job.phases or () if phase.every == 1)


def merge_phase_row(job: Job, phase: Phase, phase_row: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Merge the values of a phase into the row of its step. Every row has values of all phases; phases that did not run have zeros."""
    kinds = ("loss", "norm", "lr")
    row = before or dict.fromkeys(kinds, 0.0) | {f"{kind} of {p.name}": 0.0 for p in job.phases or () for kind in kinds}
    row |= {"samples": phase_row["samples"]} | {f"{kind} of {phase.name}": phase_row[kind] for kind in kinds}
    return row | ({kind: phase_row[kind] for kind in kinds} if phase is _find_main_phase(job) else {})


def harden_phases(job: Job) -> Job:
    """Make phases frequent; a job without phases is returned unchanged."""
    if job.phases is None:
        return job
    return replace(job, phases=tuple(replace(phase, every=min(phase.every, MAX_PHASE_INTERVAL)) for phase in job.phases))


def apply_clips(job: Job, facts: dict[str, Any]) -> Job:
    """Clip the job's gradients at the norms of the reference (`clip`, `clips`)."""
    job = replace(job, clip=facts["clip"])
    if job.phases is None:
        return job
    return replace(job, phases=tuple(replace(phase, clip=facts["clips"].get(phase.name)) for phase in job.phases))
