"""Jobs whose code queries torch.distributed for ranks, or communicates itself."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from jobs import make
from torch import Tensor, nn
from torch.distributed import get_world_size, is_initialized
from torch.nn import functional as F

import plait


class Net(nn.Module):
    """A small network with `between` between its two layers."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(6, 8), nn.Linear(8, 1), between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


def centred(h: Tensor) -> Tensor:
    """Subtract the mean over all ranks, if there are several."""
    if dist.is_available() and dist.is_initialized():
        mean = h.detach().mean(0)
        dist.all_reduce(mean)
        h = h - mean / dist.get_world_size()
    return h.tanh()


def scaled(h: Tensor) -> Tensor:
    """Use functions that were imported by name."""
    return h.tanh() * (get_world_size() if is_initialized() else 1)


def summed(h: Tensor) -> Tensor:
    """All-reduce without checking for a process group."""
    total = h.detach().sum()
    dist.all_reduce(total)
    return h.tanh() + 0 * total


def mean_of_ranks(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that compensates for DistributedDataParallel's mean over ranks."""
    return F.mse_loss(outputs, targets) * (dist.get_world_size() if dist.is_initialized() else 1)


class Summing(torch.optim.SGD):
    """All-reduces gradients itself if a process group exists."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if dist.is_initialized()):
            dist.all_reduce(p.grad)
        return super().step(closure)


class Scattering(torch.optim.SGD):
    """Reduce-scatters and waits, as optimizers with sharded states do. It does not support a single device."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            work = dist.reduce_scatter_tensor(torch.empty_like(p), p.grad, async_op=True)
            work.get_future().wait()
        return super().step(closure)


def chosen(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer for several ranks if a process group exists."""
    return (Scattering if dist.is_initialized() else torch.optim.SGD)(parameters, lr=0.1)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def zero(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's own sharded optimizer, whose import is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)


def wrapped() -> nn.Module:
    """Wrap the model in DistributedDataParallel if a process group exists, as scripts do."""
    return nn.parallel.DistributedDataParallel(Net()) if dist.is_initialized() else Net()


RIGHT: dict[str, Callable[[], plait.Job]] = {
    "model": lambda: make(lambda: Net(centred), optimizer=_sgd),
    "by_name": lambda: make(lambda: Net(scaled), optimizer=_sgd),
    "loss": lambda: make(Net, loss=mean_of_ranks, optimizer=_sgd),
    "optimizer": lambda: make(Net, optimizer=lambda p: Summing(p, lr=0.1)),
    "chosen": lambda: make(Net, optimizer=chosen),
    "wrapped": lambda: make(wrapped, optimizer=_sgd),
}
"""These jobs train as on one device."""
REFUSED: dict[str, Callable[[], plait.Job]] = {
    "all_reduce": lambda: make(lambda: Net(summed), optimizer=_sgd),
    "functional": lambda: make(lambda: Net(differentiable.all_reduce), optimizer=_sgd),
    "scattering": lambda: make(Net, optimizer=lambda p: Scattering(p, lr=0.1)),
    "zero": lambda: make(Net, optimizer=zero),
    "replicated": lambda: make(lambda: nn.parallel.DistributedDataParallel(Net()), optimizer=_sgd),
}
"""These jobs cannot train on one device."""
