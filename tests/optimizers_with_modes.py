"""Optimizers with a train and an eval mode, as users write them, and some that wrap them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class PolyakSGD(torch.optim.Optimizer):
    """SGD with momentum. In eval mode the parameters are the mean of all weights so far: tensors are swapped, not copied."""

    def __init__(self, params: Any, lr: float = 0.05):
        super().__init__(params, {"lr": lr, "momentum": 0.9})
        self.training = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert self.training, "call train() before step()"
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(k=0, buffer=torch.zeros_like(p), mean=torch.zeros_like(p))
                state["buffer"].mul_(group["momentum"]).add_(p.grad)
                p.sub_(state["buffer"], alpha=group["lr"])
                state["k"] += 1
                state["mean"].lerp_(p, 1 / state["k"])

    def eval(self) -> None:
        self._exchange(False)

    def train(self) -> None:
        self._exchange(True)

    def _exchange(self, training: bool) -> None:
        if self.training == training:
            return
        self.training = training
        for p in (p for group in self.param_groups for p in group["params"] if self.state.get(p)):
            p.data, self.state[p]["mean"] = self.state[p]["mean"], p.data


class Interpolated(torch.optim.Optimizer):
    """Wraps SGD, and never calls the constructor of Optimizer. Gradients are computed at y = beta x + (1 - beta) z; the wrapped optimizer
    moves z, and x is the mean of z."""

    def __init__(self, base: torch.optim.Optimizer, beta: float = 0.8):
        self.base, self.beta = base, beta
        for group in self.param_groups:
            group.update(count=0, mode="eval")

    @property
    def param_groups(self) -> Any:
        return self.base.param_groups

    @property
    def state(self) -> Any:
        return self.base.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert self.param_groups[0]["mode"] == "train"
        for group in self.param_groups:
            group["count"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                self.base.state[p].setdefault("z", p.clone())
                x = p.lerp(self.base.state[p]["z"], 1 - 1 / self.beta)
                self.base.state[p]["x"] = x
                p.copy_(self.base.state[p]["z"])
        self.base.step()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.base.state[p]
                state["z"].copy_(p)
                state["x"].lerp_(p, 1 / group["count"])
                p.lerp_(state.pop("x"), self.beta)

    @torch.no_grad()
    def _to(self, mode: str, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["mode"] != mode else ():
                if "z" in self.base.state.get(p, {}):
                    p.lerp_(self.base.state[p]["z"], weight)
            group["mode"] = mode

    def eval(self) -> None:
        self._to("eval", 1 - 1 / self.beta)

    def train(self) -> None:
        self._to("train", 1 - self.beta)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)


class Warmed(torch.optim.Optimizer):
    """Has no modes, and wraps an optimizer with modes. Its first steps are smaller."""

    def __init__(self, inner: torch.optim.Optimizer):
        self.chain = {"inner": [inner]}
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        inner = self.chain["inner"][0]
        for group in inner.param_groups:
            group["warm"] = min(4, group.get("warm", 0) + 1)
            group["lr"] = 0.05 * group["warm"] / 4
        inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.chain["inner"][0].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.chain["inner"][0].load_state_dict(state_dict)


class Normalized(PolyakSGD):
    """In eval mode each tensor is the mean, rescaled to the norm of the weights. A shard of a tensor has a different norm."""

    def _exchange(self, training: bool) -> None:
        changes = self.training != training
        super()._exchange(training)
        if changes and not training:
            for p in (p for group in self.param_groups for p in group["params"] if self.state.get(p)):
                p.data = p.data * (self.state[p]["mean"].norm() / (p.data.norm() + 1e-12))
        elif changes:  # the mean was scaled: restart it from the weights
            for p in (p for group in self.param_groups for p in group["params"] if self.state.get(p)):
                self.state[p]["mean"] = p.data.clone()


class Scaled(PolyakSGD):
    """As `Normalized`, with the mean stored unscaled."""

    def eval(self) -> None:
        if self.training:
            self.training = False
            for p in (p for group in self.param_groups for p in group["params"] if self.state.get(p)):
                mean = self.state[p]["mean"]
                self.state[p]["weight"], p.data = p.data, mean * (p.data.norm() / (mean.norm() + 1e-12))

    def train(self) -> None:
        if not self.training:
            self.training = True
            for p in (p for group in self.param_groups for p in group["params"] if self.state.get(p)):
                p.data = self.state[p].pop("weight")


KINDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "polyak": PolyakSGD,
    "interpolated": lambda p: Interpolated(torch.optim.SGD(p, lr=0.05, momentum=0.5)),
    "warmed": lambda p: Warmed(PolyakSGD(p)),
    "scaled": Scaled,
}
