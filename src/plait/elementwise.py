"""Whether an optimizer does to a part of a tensor what it does to the whole: found by trying it, not by its name.

SGD, Adam and their kin update every element by its own gradient and state, so a rank can update its part alone.
Adafactor shares statistics between rows and columns, LAMB scales by a tensor's norm, Muon orthogonalises a matrix:
on a part they would silently do something else.
"""

from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import PlaitError, Problem
from plait.job import Job
from plait.plan import Plan
from plait.randomness import host_state, restore_host

DIM, MANY, FEW = 160, 2, 4
"""Of each number of dims, `MANY` tensors are tried with dims up to `DIM` (some optimizers act on large dims only), the
others with dims up to `FEW`: their place in the list may matter."""


def check(job: Job, model: nn.Module, plan: Plan) -> None:
    """P022 when the job's optimizer cannot update parts of the model's parameters, cut along dim 0."""
    found = differs(job, [tuple(p.shape) for p in model.parameters() if p.requires_grad])
    if found is not None:
        needs = f"ep={plan.ep}" if plan.ep > 1 and plan.fsdp == 1 else f"fsdp={plan.fsdp}"
        what = f"{found[0]} cannot update parts of parameters, which {needs} needs"
        why = f"tried on whole tensors and on parts: {found[1]}"
        raise PlaitError(Problem("P022", what, why=why, fix=(f'--plan "dp={plan.devices}"', "torch.optim.AdamW")))


def differs(job: Job, shapes: list[tuple[int, ...]], steps: int = 3) -> tuple[str, str] | None:
    """(class, why) of an optimizer that cannot update parts of tensors like these, cut along dim 0; None when it can."""
    state = host_state()
    generator = torch.Generator().manual_seed(0)
    small = _small(shapes)
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in small]
    gradients = [[torch.randn(s, generator=generator, dtype=torch.float64) for s in small] for _ in range(steps)]
    try:
        whole = _updated(job, values, gradients)
        parts = [
            _updated(job, [_half(v, i) for v in values], [[_half(g, i) for g in row] for row in gradients])
            for i in range(2)
        ]
    except Exception as error:  # an optimizer may raise anything; the real one would have to run on parts as well
        return _kind(job, values), f"it raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finally:
        restore_host(state)
    for k, (expected, before) in enumerate(zip(whole, values)):
        found = torch.cat([p[k] for p in parts]) if before.dim() else parts[0][k]
        moved = float((expected - before).abs().max()) if before.numel() else 0.0
        if moved and not float((found - expected).abs().max()) <= 1e-9 * moved:
            return _kind(
                job, values
            ), f"a tensor of shape {list(before.shape)} moves otherwise in two parts than as a whole"
    return None


def _kind(job: Job, values: list[Tensor]) -> str:
    try:
        return type(job.optimizer([nn.Parameter(v) for v in values])).__name__
    except Exception:  # what it needs it will say when it is made for the real parameters
        return "the job's optimizer"


def _small(shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    tried: dict[int, int] = {}
    found = []
    for shape in shapes:
        tried[len(shape)] = tried.get(len(shape), 0) + 1
        limit = DIM if tried[len(shape)] <= MANY else FEW
        found.append(tuple(min(d, limit if i < 2 else FEW) for i, d in enumerate(shape)))
    return found


def _half(tensor: Tensor, i: int) -> Tensor:
    if not tensor.dim():
        return tensor.clone()
    middle = (tensor.shape[0] + 1) // 2
    return (tensor[:middle] if i == 0 else tensor[middle:]).clone()


def _updated(job: Job, values: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
    parameters: list[Any] = [nn.Parameter(v.clone()) for v in values]
    optimizer = job.optimizer(parameters)
    for row in gradients:
        for parameter, gradient in zip(parameters, row):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [p.detach() for p in parameters]
