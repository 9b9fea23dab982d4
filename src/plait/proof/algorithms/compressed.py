"""Compressed sums in one process: k shares of every batch, k residuals, one optimizer.

    for each step:  x_i = g_i + e_i ;  y = Σ C(x_i) ;  e_i = x_i − own C(x_i) ;  clip, and an optimizer step, on y

g_i is the gradient of share i of the batch, each loss with its weight over that of the whole batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.batch import sizes
from plait.proof import reference
from plait.randomness.distributions import key
from plait.randomness.philox import bits

Named = dict[str, Tensor]
Sent = tuple[Tensor, list[Tensor]]  # the sum, and each share's part of it


def train(
    job: Job, plan: Plan, steps: int, clip: float, dtype: torch.dtype, device: str = "cpu", *, moves: Callable[[], None]
) -> dict[str, Any]:
    """Train `steps` steps. Returns what `train` of `proof/reference.py` does."""
    data = job.data()
    one = reference.OneDevice.of(job, data, dtype, device)
    one.notes.close()
    named = {n: p for n, p in one.model.named_parameters() if p.requires_grad}
    out = dict[str, Any](initial=reference.copied(one.model.named_parameters()), rows=[], ids=[], clip=clip)
    residuals, thin = [dict[str, Tensor]() for _ in range(plan.dp)], dict[str, Tensor]()
    stream = reference.samples(job, data)
    for step in range(steps):
        read = next(stream)
        given, loss = reference.shares(one, data, read, _counts(plan, len(read[1])), plan.microbatches, moves)
        for name, p in named.items():
            p.grad = None
            if any(name in g for g in given):
                xs = [g.get(name, torch.zeros_like(p)) + e.get(name, 0.0) for g, e in zip(given, residuals)]
                p.grad, own = compressed(xs, plan, thin, name, job.seed)
                for e, x, mine in zip(residuals, xs, own):
                    e[name] = x - mine
        if step == 0:
            out["gradients"] = reference.gradients(one.model)
        out["rows"].append(one.update(read, loss, clip))
        out["ids"].append([read[0], read[1]])
    return out | reference.end(one) | {"metrics": reference.evaluate(one)}


def _counts(plan: Plan, size: int) -> list[int]:
    """Samples of each share: as equal as can be, the first larger, or as `batch_split` says."""
    return list(sizes(size, plan.parts or (1,) * plan.dp, plan.microbatches))


def compressed(xs: list[Tensor], plan: Plan, thin: dict[str, Tensor], name: str, seed: int) -> Sent:
    """Σ C(x_i), and each share's part of it. `thin`: the factors of powersgd, by parameter."""
    if plan.grad_compression == "powersgd":
        return powersgd(xs, plan.compression_rank, thin, name, seed)
    own = [x.bfloat16().to(x.dtype) if plan.grad_compression == "bf16" else int8(x) for x in xs]
    return torch.stack(own).sum(0), own


def means(plan: Plan, seed: int, base: Named, groups: list[Named], left: list[Named]) -> Named:
    """Of replica groups, for each parameter G − Σ C(G − θ_i + e_i) / k; e_i is what C left out. `left`: those, and factors."""
    mean, (*residuals, thin) = Named(), left
    for n, start in base.items():
        xs = [start - group[n].detach() + e.get(n, 0.0) for group, e in zip(groups, residuals)]
        total, own = compressed(xs, plan, thin, n, seed)
        for e, x, mine in zip(residuals, xs, own):
            e[n] = x - mine
        mean[n] = start - total / len(groups)
    return mean


def int8(x: Tensor) -> Tensor:
    """The nearest whole multiples of 1/127 of the largest number."""
    scale = float(x.abs().max()) / 127 if x.numel() else 0.0
    return (x / scale).round() * scale if scale else x * 0.0


def powersgd(xs: list[Tensor], rank: int, thin: dict[str, Tensor], name: str, seed: int) -> Sent:
    """P = Σ M Q, made orthonormal; Q = Σ Mᵀ P; P Qᵀ. A column with less than 1e-4 of what could be in it is left out, and begins anew."""
    rows, columns = (len(xs[0]), xs[0].shape[1:].numel()) if xs[0].dim() > 1 else (1, 1)
    if rank * (rows + columns) >= rows * columns:
        return torch.stack(xs).sum(0), xs
    ms, q = [x.flatten(1) for x in xs], thin.get(name)
    drawn = torch.from_numpy(bits(key(seed, "powersgd", name), 0, columns * rank).astype("float64"))
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
