"""Delayed Nesterov: an optimizer that steps at every gradient of a group, and moves its momentum once in N (Liu et al. 2024).

    each push           Δ ← Δ + a g ;  θ ← θ − ε (c β m + a g)
    every N-th instead  Δ ← Δ + a g ;  m ← β m + Δ ;  θ ← θ − ε ((1 − c N + c) β m + a g) ;  Δ ← 0

a is the gradient's share of its clock's samples, 1 / N where portions are equal. Here c = 0: momentum is used when it moves, and N
pushes at the same weights are one step of SGD with Nesterov momentum on their mean. Momentum at every push would count each
direction N times over. Weight decay is added to each gradient, as torch's SGD does.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from plait.config.errors import PlaitError, Problem


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
