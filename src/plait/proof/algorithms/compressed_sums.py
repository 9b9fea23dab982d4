"""Compressed sums in one process: k local batches of every batch, k residuals, one optimizer.

    for each step:  x_i = g_i + e_i ;  y = Σ C(x_i) ;  e_i = x_i − own C(x_i) ;  clip, and an optimizer step, on y

g_i is the gradient of local batch i, each loss weighted by its weight over that of the full batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.batch import split_by_weights
from plait.proof import reference
from plait.randomness.distributions import make_philox_key
from plait.randomness.philox import draw_bits

NamedTensors = dict[str, Tensor]
SumAndParts = tuple[Tensor, list[Tensor]]  # the sum, and each local batch's part of it


def train_reference(
    job: Job, plan: Plan, steps: int, clip: float, dtype: torch.dtype, device: str = "cpu", *, moves: Callable[[], None]
) -> dict[str, Any]:
    """Train `steps` steps. Returns the same values as `train` of `proof/reference.py`."""
    data = job.data()
    one = reference.OneDevice.from_job(job, data, dtype, device)
    one.recorder.close()
    named = {n: p for n, p in one.model.named_parameters() if p.requires_grad}
    out = dict[str, Any](initial=reference.copy_tensors(one.model.named_parameters()), rows=[], ids=[], clip=clip)
    residuals, thin = [dict[str, Tensor]() for _ in range(plan.dp)], dict[str, Tensor]()
    stream = reference.iterate_samples(job, data)
    for step in range(steps):
        read = next(stream)
        given, loss = reference.compute_share_gradients(one, data, read, _count_samples(plan, len(read[1])), plan.microbatches, moves)
        for name, p in named.items():
            p.grad = None
            if any(name in g for g in given):
                xs = [g.get(name, torch.zeros_like(p)) + e.get(name, 0.0) for g, e in zip(given, residuals)]
                p.grad, own = compress_sum(xs, plan, thin, name, job.seed)
                for e, x, mine in zip(residuals, xs, own):
                    e[name] = x - mine
        if step == 0:
            out["gradients"] = reference.copy_gradients(one.model)
        out["rows"].append(one.update(read, loss, clip))
        out["ids"].append([read[0], read[1]])
    return out | reference.copy_final_state(one) | {"metrics": reference.evaluate_metrics(one)}


def _count_samples(plan: Plan, size: int) -> list[int]:
    """Samples of each local batch: as equal as possible, the first ones larger; or as given by `batch_split`."""
    return list(split_by_weights(size, plan.parts or (1,) * plan.dp, plan.microbatches))


def compress_sum(xs: list[Tensor], plan: Plan, thin: dict[str, Tensor], name: str, seed: int) -> SumAndParts:
    """Σ C(x_i), and each local batch's part of it. `thin`: the factors of powersgd, by parameter."""
    if plan.grad_compression == "powersgd":
        return compress_powersgd(xs, plan.compression_rank, thin, name, seed)
    own = [x.bfloat16().to(x.dtype) if plan.grad_compression == "bf16" else round_to_int8(x) for x in xs]
    return torch.stack(own).sum(0), own


def average_groups(plan: Plan, seed: int, base: NamedTensors, groups: list[NamedTensors], left: list[NamedTensors]) -> NamedTensors:
    """For replica groups, G − Σ C(G − θ_i + e_i) / k of each parameter; e_i is the compression error. `left`: the errors, then the factors."""
    mean, (*residuals, thin) = NamedTensors(), left
    for n, start in base.items():
        xs = [start - group[n].detach() + e.get(n, 0.0) for group, e in zip(groups, residuals)]
        total, own = compress_sum(xs, plan, thin, n, seed)
        for e, x, mine in zip(residuals, xs, own):
            e[n] = x - mine
        mean[n] = start - total / len(groups)
    return mean


def round_to_int8(x: Tensor) -> Tensor:
    """Round to whole multiples of 1/127 of the largest absolute value."""
    scale = float(x.abs().max()) / 127 if x.numel() else 0.0
    return (x / scale).round() * scale if scale else x * 0.0


def compress_powersgd(xs: list[Tensor], rank: int, thin: dict[str, Tensor], name: str, seed: int) -> SumAndParts:
    """P = Σ M Q, made orthonormal; Q = Σ Mᵀ P; P Qᵀ. A column with less than 1e-4 of its possible size is set to zero and restarted."""
    rows, columns = (len(xs[0]), xs[0].shape[1:].numel()) if xs[0].dim() > 1 else (1, 1)
    if rank * (rows + columns) >= rows * columns:
        return torch.stack(xs).sum(0), xs
    ms, q = [x.flatten(1) for x in xs], thin.get(name)
    drawn = torch.from_numpy(draw_bits(make_philox_key(seed, "powersgd", name), 0, columns * rank).astype("float64"))
    fresh = ((drawn + 0.5) / 2**32 - 0.5).reshape(columns, rank).to(xs[0])
    q = fresh if q is None else q
    p, size = torch.stack([m @ q for m in ms]).sum(0), sum(float(m.norm()) for m in ms)
    for j in range(rank):
        for i in (*range(j), *range(j)):
            p[:, j] -= p[:, i] * (p[:, i] @ p[:, j])
        length = float(p[:, j].norm())
        p[:, j] *= 1 / length if length > 1e-4 * size * float(q[:, j].norm()) else 0.0
    thin[name] = torch.where(p.any(0), torch.stack([m.T @ p for m in ms]).sum(0), fresh)
    own = [(p @ (m.T @ p).T).reshape(xs[0].shape) for m in ms]
    return torch.stack(own).sum(0), own
