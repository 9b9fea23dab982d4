"""Optimizers, learning rates and averages."""

from typing import Any

import torch
from torch import nn

import plait
from trackers.samples import Chain, made


class Lookahead(torch.optim.AdamW):
    """AdamW with slow weights (Lookahead): every third step the weights are reset to slow weights that follow them."""

    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    continue
                if "slow" not in state:
                    state["slow"] = p.detach().clone()
                elif int(state["step"]) % 3 == 0:
                    state["slow"].lerp_(p.detach(), 0.5)
                    with torch.no_grad():
                        p.copy_(state["slow"])
        return out


def lookahead() -> plait.Job:
    """Optimizer wrappers lose state: the optimizer's state contains slow weights, which overwrite the weights every third step."""
    return made(Chain, optimizer=lambda p: Lookahead(p, 1e-2))


def _by_width(parameters: list[Any]) -> torch.optim.Optimizer:
    groups = [{"params": [p], "lr": 0.05 / p.shape[-1] if p.ndim == 2 else 0.01} for p in parameters]
    return torch.optim.AdamW(groups, 1e-2)


def rates_by_width() -> plait.Job:
    """Learning rates depend on shapes (maximal update parametrization): 1 / width of a weight, of which a rank has a slice."""
    return made(Chain, optimizer=_by_width)


class UnitClipped(torch.optim.SGD):
    """SGD that limits the gradient's norm by the weight's norm, unit by unit (adaptive gradient clipping)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                rows = (lambda t: t.norm(dim=-1, keepdim=True)) if p.ndim > 1 else torch.Tensor.abs
                limit = rows(p).clamp(min=1e-3) * 0.02
                p.grad.mul_((limit / rows(p.grad).clamp(min=1e-6)).clamp(max=1))
        return super().step(closure)


def unit_clipping() -> plait.Job:
    """The optimizer clips by norms of rows, of which a rank may have a part."""
    return made(Chain, optimizer=lambda p: UnitClipped(p, 0.1, momentum=0.9))


def _two(parameters: list[Any]) -> torch.optim.Optimizer:
    matrices = [p for p in parameters if p.ndim > 1]
    rest = [p for p in parameters if p.ndim <= 1]
    return torch.optim.NAdam([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 5e-3, "betas": (0.8, 0.9)}], 1e-2)


class _PartFrozen(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))


def groups_by_rank_of_tensor() -> plait.Job:
    """Flattened parameters have one dim: groups depend on the number of dims. A block is frozen, and one parameter is unused."""
    return made(_PartFrozen, optimizer=_two)
