"""Optimizers as users write them that need full tensors or stack them; some of them couple all parameters."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import plait


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration of one matrix or several, in 16 bits as on a GPU."""
    y = x.bfloat16()
    turned = y.size(-2) > y.size(-1)
    y = y.mT if turned else y
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = y @ y.mT
        y = 3.4445 * y + (-4.7750 * a + 2.0315 * a @ a) @ y
    return (y.mT if turned else y).to(x.dtype)


class Base(torch.optim.Optimizer):
    """Calls `update` for each tensor with a gradient."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(self.update(p, self.state[p]), alpha=group["lr"])

    def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class StackedMuon(torch.optim.Optimizer):
    """A group for each shape. Matrices of one shape share momentum and orthogonalization, stored with the first."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.02, momentum: float = 0.9):
        params = list(params)
        groups = [{"params": [p for p in params if p.shape == s]} for s in sorted({p.shape for p in params})]
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = group["params"]
            state = self.state[params[0]]
            gradients = torch.stack([p.grad for p in params])
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradients)
            buffer = state["momentum_buffer"].lerp_(gradients, 1 - group["momentum"])
            direction = gradients.lerp(buffer, group["momentum"])
            if direction.dim() == 3:
                direction = orthogonal(direction)
            for p, one in zip(params, direction.unbind(0)):
                p.sub_(one, alpha=group["lr"])


class Foreach(torch.optim.Optimizer):
    """One list of all tensors, by torch's functions for lists; norms of tensors scale the rates."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = group["params"]
            gradients = [p.grad for p in params]
            ratios = [w / (g + 1e-9) for w, g in zip(torch._foreach_norm(params), torch._foreach_norm(gradients))]
            torch._foreach_add_(params, [g * r for g, r in zip(gradients, ratios)], alpha=-group["lr"])


class Factored(Base):
    """Keeps second moments per row and per column of each matrix."""

    def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        g = p.grad
        if g.dim() < 2:
            return g.sign()
        if not state:
            state["row"], state["column"] = g.new_zeros(g.shape[:-1]), g.new_zeros(*g.shape[:-2], g.shape[-1])
        state["row"].lerp_(g.square().mean(-1), 0.1)
        state["column"].lerp_(g.square().mean(-2), 0.1)
        scale = state["row"].unsqueeze(-1) * state["column"].unsqueeze(-2) / state["row"].mean(-1)[..., None, None]
        return g / (scale.sqrt() + 1e-8)


class Preconditioned(Base):
    """As Shampoo: the inverse roots of both sides' second moments."""

    def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        g = p.grad
        if g.dim() != 2:
            return g
        if not state:
            state["left"], state["right"] = torch.eye(g.shape[0]).to(g) * 1e-2, torch.eye(g.shape[1]).to(g) * 1e-2
        state["left"] += g @ g.T
        state["right"] += g.T @ g
        return self.root(state["left"]) @ g @ self.root(state["right"])

    def root(self, a: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(a)
        return vectors @ torch.diag(values.clamp_min(1e-9) ** -0.25) @ vectors.T


class Centralized(Base):
    """Subtracts the mean of each matrix's gradient, and clips it by the tensor's own norm."""

    def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        g = p.grad - p.grad.mean() if p.dim() > 1 else p.grad
        return g * min(1.0, float(p.norm() / (g.norm() + 1e-9)))


class LayerAdam(Base):
    """One second moment for each tensor, as in NovoGrad and Adam-mini."""

    def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        state["v"] = 0.9 * state.get("v", 0.0) + 0.1 * p.grad.square().mean()
        state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + p.grad / (state["v"].sqrt() + 1e-8)
        return state["m"]


class Drawing(Base):
    """Projects a matrix's gradient on directions that it draws in each step. No trial can show that each update uses only its own tensor."""

    whole_tensors = True

    def update(self, p: Tensor, state: dict[str, Any]) -> Tensor:
        if p.dim() != 2:
            return p.grad
        state["draws"] = state.get("draws", 0) + 1
        draw = torch.Generator().manual_seed(1000 * state["draws"] + p.numel())
        base = torch.linalg.qr(torch.randn(p.shape[1], min(p.shape[1], 3), generator=draw, dtype=torch.float64))[0].to(p)
        return p.grad @ base @ base.T


class Coupled(torch.optim.Optimizer):
    """As D-Adaptation and Prodigy: a rate estimated from all parameters together."""

    def __init__(self, params: Any, lr: float = 1.0):
        super().__init__(params, {"lr": lr, "d": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        mine = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        along = sum((float((p.grad * self.state[p].setdefault("first", p.clone()).sub(p)).sum()) for p in mine), 0.0)
        size = sum(float(p.grad.abs().sum()) for p in mine)
        for group in self.param_groups:
            group["d"] = max(group["d"], along / (size + 1e-9))
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["d"] * group["lr"])


def stacked_and_adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The stacked Muon for hidden matrices, AdamW for the rest."""
    named = plait.named(parameters)
    hidden = [p for n, p in named if p.dim() == 2 and "head" not in n]
    rest = [p for n, p in named if all(p is not q for q in hidden)]
    return plait.CombinedOptimizer(StackedMuon(hidden), torch.optim.AdamW(rest, lr=1e-2))


OWNED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "stacked": StackedMuon,
    "stacked_and_adam": stacked_and_adam,
    "foreach": Foreach,
    "factored": Factored,
    "preconditioned": Preconditioned,
    "centralized": Centralized,
    "layer_adam": LayerAdam,
    "drawing": Drawing,
}
"""Optimizers that update each tensor separately, and need it unsharded."""
