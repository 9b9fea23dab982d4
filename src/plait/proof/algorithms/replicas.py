"""Replica groups in one process: k models and k optimizers, each on its part of every batch.

    each step      for i in 0 … k−1:  a step of optimizer i on model i, with part i of the batch, clipped by its own norm
    when p is due  m = mean of the θ_i;  τ steps later  local:  θ_i ← m
                   diloco:  Δ = G − m ;  b ← μ b + Δ ;  G ← G − η (Δ + μ b) ;  θ_i ← α θ_i + (1 − α) G

p is a fragment of the parameters; the last one also has all state that forward passes change. The states of the optimizers are never
changed. In the steps of `warmup_sync_steps`, all models use the sum of the gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.batch import Data
from plait.proof import reference
from plait.proof.algorithms import compressed_sums
from plait.tensors.float64 import Float64Mode

NamedTensors = dict[str, Tensor]


def train_reference(
    job: Job, plan: Plan, steps: int, clip: float, dtype: torch.dtype, device: str = "cpu", *, moves: Callable[[], None] = lambda: None
) -> dict[str, Any]:  # fmt: skip
    """Train `steps` steps. Returns the same values as `train` of `proof/reference.py`; a group's own tensors are named `group i: name`."""
    data, k = job.data(), plan.replica_groups
    ones = [reference.OneDevice.from_job(job, data, dtype, device) for _ in range(k)]
    states = [reference.get_float_tensors(one.model) for one in ones]
    table, met, at = _split_fragments(ones[0], plan.num_fragments), [set[str]() for _ in ones], 0
    base, bases, sent = {n: states[0][n].detach().clone() for p in table for n in p}, NamedTensors(), list[tuple[int, NamedTensors]]()
    left = [NamedTensors() for _ in range(k + 1)]
    out: dict[str, Any] = {"initial": reference.copy_tensors(ones[0].model.named_parameters()), "rows": [], "ids": []}
    for step, read in zip(range(1, steps + 1), reference.iterate_samples(job, data)):
        alike, losses = step <= plan.warmup_sync_steps, _run_group_passes(ones, data, read, step <= plan.warmup_sync_steps, moves)
        _set_group_gradients(ones, met, [loss is not None for loss in losses], alike)
        out.setdefault("gradients", _prefix_groups([reference.copy_gradients(one.model) for one in ones]))
        rows = [one.update(read, torch.zeros(()) if loss is None else loss, clip) for one, loss in zip(ones, losses)]
        out["rows"].append(rows[0] | {f"{w} of group {i}": rows[i][w] for i in range(1, k) for w in ("loss", "norm")})
        out["ids"].append([read[0], read[1]])
        for p, names in enumerate(table):
            at = step - plan.warmup_sync_steps
            if at > 0 and at % plan.sync_every == (p + 1) * plan.sync_every // len(table) % plan.sync_every:
                still = [n for n in states[0] if n not in base] if p + 1 == len(table) else []
                mean = _average_states(states, [*names, *still])
                if plan.grad_compression != "none":
                    mean |= compressed_sums.average_groups(plan, job.seed, {n: base[n] for n in names}, states, left)
                sent.append((step + plan.fragment_delay, mean))
        for _, mean in [message for message in sent if message[0] == step]:
            _apply_mean(plan, mean, base, bases, states)
        if at <= 0 or (plan.outer_sync == "local" and plan.grad_compression == "none"):
            base = _average_states(states, list(base))
    everything = _average_states(states, list(states[0])) | base
    out["weights"] = {n: everything.get(n, p.detach()) for n, p in ones[0].model.named_parameters()}
    out["weights"] |= _prefix_groups([reference.copy_tensors(one.model.named_parameters()) for one in ones])
    out["buffers"] = _prefix_groups([reference.copy_tensors(one.model.named_buffers()) for one in ones])
    for name, tensor in states[0].items():
        tensor.data.copy_(everything[name])
    return out | {"clip": clip, "metrics": reference.evaluate_metrics(ones[0])}


def _run_group_passes(
    ones: list[reference.OneDevice], data: Data, read: reference.ReadSamples, alike: bool, moves: Callable[[], None]
) -> list[Tensor | None]:
    """Loss of every group after its passes, k times its contribution to the batch loss; None if its samples have zero weight."""
    k, size, job = len(ones), len(read[1]), ones[0].job
    counts = [size // k + (i < size % k) for i in range(k)]
    firsts = [sum(counts[:i]) for i in range(k)]
    pairs = [reference.prepare_batch(o, data, read[2][f : f + n]) if n else None for o, f, n in zip(ones, firsts, counts)]
    weights = [0.0 if pair is None else reference.compute_loss_weight(job, pair[1], n) for pair, n in zip(pairs, counts)]
    losses: list[Tensor | None] = []
    for one, pair, first, n, weight in zip(ones, pairs, firsts, counts, weights):
        moves()
        loss, share = None, weight / sum(weights) if alike else n / size
        if pair is not None and weight:
            with Float64Mode(), one.keyed.forward_pass(one.steps, first, n):
                loss = job.loss(reference.call_model(one.model, pair[0]), pair[1]) * (share * (1 if alike else k))
            with one.keyed.replay():
                loss.backward()
        losses.append(None if loss is None else loss.detach() * (k if alike else 1))
    return losses


def _set_group_gradients(ones: list[reference.OneDevice], met: list[set[str]], any_of: list[bool], alike: bool) -> None:
    """In a synchronized step, set the gradients of all groups to the sum. Otherwise, a group without samples gets zeros for used parameters."""
    given = [reference.copy_gradients(one.model) for one in ones]
    for own, seen, there in zip(given, met, any_of):
        seen.update(n for g in (given if alike else [own]) for n in g)
        own.update({} if there or alike else {n: torch.zeros(()) for n in seen})
    for one, own in zip(ones, given):
        for n, p in one.model.named_parameters():
            parts = [g[n] for g in given if n in g] if alike else [own[n]] if n in own else []
            p.grad = torch.zeros_like(p) + sum(parts) if parts else None


def _apply_mean(plan: Plan, mean: NamedTensors, base: NamedTensors, momentum: NamedTensors, states: list[NamedTensors]) -> None:
    for n, value in mean.items():
        if plan.outer_sync == "diloco" and n in base:
            delta, mu = base[n] - value, plan.outer_momentum
            momentum[n] = mu * momentum[n] + delta if n in momentum else delta
            value = base[n] - plan.outer_lr * (delta + mu * momentum[n])
        base |= {n: value} if n in base else {}
        for state in states:
            state[n].data.copy_(plan.fragment_alpha * state[n].data + (1 - plan.fragment_alpha) * value)


def _average_states(states: list[NamedTensors], names: list[str]) -> NamedTensors:
    return {n: torch.stack([s[n].detach() for s in states]).mean(0) for n in names}


def _prefix_groups(groups: list[NamedTensors]) -> NamedTensors:
    return {f"group {i}: {n}": t for i, group in enumerate(groups) for n, t in group.items()}


def _split_fragments(one: reference.OneDevice, count: int) -> list[list[str]]:
    """Blocks (or units, if there are too few blocks) assigned round-robin; the last fragment has the remaining parameters."""
    trained = [n for n, p in one.model.named_parameters() if p.requires_grad]
    blocks = [u for u in one.units if u.repeated]
    blocks = blocks if len(blocks) >= count - 1 else [u for u in one.units if u.parameters]
    owner = {n: i % (count - 1) for i, u in reversed([*enumerate(blocks)]) for n in u.parameters} if count > 1 else {}
    return [[n for n in trained if owner.get(n, count - 1) == p] for p in range(count)]
