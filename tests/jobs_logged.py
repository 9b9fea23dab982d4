"""A job that calls `plait.log` in its model's units, between them and in its loss. Sample weights differ."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import jobs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.outer(torch.tanh(self.inner(x)))
        plait.log("block", y.mean())
        return y


class Net(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.first = nn.Linear(6, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for layer in self.layers:
            y = layer(y)
        out = self.last(y)
        plait.log("output", out.square().mean())
        return out


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    if (targets > 0).all() and len(targets) < 0:
        plait.log("never", 1.0)
    error = (outputs - targets).abs().mean()
    plait.log("error", error)
    return F.mse_loss(outputs, targets)


def metrics(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"error": (outputs - targets).abs()}


def job(steps: int = 6, every: int = 0) -> plait.Job:
    held_out = plait.Evaluate(jobs.Numbers, metrics, every)
    return jobs.make(Net, loss=loss, steps=steps, evaluate=held_out)


def weighted_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    weights = counted(targets)
    error = ((outputs - targets).abs() * weights).sum() / weights.sum()
    plait.log("error", error)
    return ((outputs - targets).square() * weights).sum() / weights.sum()


def counted(targets: Tensor) -> Tensor:
    return 1.0 + (targets > 0).to(targets.dtype)


class Plain(Net):
    """Logs in its loss only, where the weights are known."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for layer in self.layers:
            y = y + layer.outer(torch.tanh(layer.inner(y)))
        return self.last(y)


def weighted() -> plait.Job:
    return jobs.make(Plain, loss=weighted_loss, weight=counted)
