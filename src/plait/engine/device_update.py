"""An optimizer step that the host queues without knowing whether it will be made.

Whether loss and norm are finite is a number on the device, and so are the factor of the clipping and the loss scale. torch's fused
optimizers take such a number (`found_inf`, as `torch.amp.GradScaler` gives it) and change nothing where it is 1: no moment, no count of
steps. With an optimizer that is not fused the host has to know first, and reads the row of the step before it queues the update.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.model.fused_optimizer import momentum_begins_at_zero
from plait.parallel.rank_model import RankModel
from plait.tensors.torch_private import scale_, takes_found_inf


def may_run_ahead(rank_model: RankModel, skips_nonfinite: bool) -> bool:
    """Whether updates may be queued before the host has read the numbers of their steps.

    `skips_nonfinite`: a step that is not finite changes nothing.
    """
    skips = not (skips_nonfinite or rank_model.techniques.loss_scale is not None)
    skips = skips or (takes_found_inf(rank_model.optimizer) and momentum_begins_at_zero(rank_model.optimizer))
    here = rank_model.techniques.masters is None and rank_model.plan.offload == "none" and rank_model.plan.compress == "none"
    return skips and here and told_late(rank_model)


def told_late(rank_model: RankModel) -> bool:
    """Whether nothing that the next step does goes by the numbers of this one."""
    parts = (rank_model.techniques.replica_groups, rank_model.techniques.replicas, rank_model.techniques.balance, rank_model.job.phases)
    return rank_model.device.type == "cuda" and all(part is None for part in parts)


def clip(gradients: Sequence[Tensor], norm: Tensor, most: float | None, scale: Tensor | None) -> None:
    """Divide gradients by the loss scale, and clip them to a global norm (as `torch.nn.utils.clip_grad_norm_`), on the device.

    `norm`: of the gradients as they are, with the scale; a float64 scalar, as the scale is.
    """
    if scale is None and most is None:
        return
    factor = norm.new_ones(()) if most is None else (most / (norm / (1.0 if scale is None else scale) + 1e-6)).clamp(max=1.0)
    if scale is not None:
        factor = factor / scale
    by_format: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_format.setdefault(gradient.dtype, []).append(gradient)
    for dtype, some in by_format.items():
        if dtype.itemsize > 2:
            scale_(some, factor.to(dtype))
        else:  # a factor rounded to 16 bits would be another
            for gradient in some:
                gradient.copy_(gradient.float().mul_(factor.float()))


def step(optimizer: torch.optim.Optimizer, finite: Tensor | None) -> None:
    """Queue the optimizer's step, which is made where `finite`, a boolean scalar on the device, is true. None: always."""
    if finite is None:
        optimizer.step()
        return
    given: dict[str, Tensor] = {"found_inf": (~finite).float()}
    vars(optimizer).update(given)
    try:
        optimizer.step()
    finally:
        for name in given:
            delattr(optimizer, name)
