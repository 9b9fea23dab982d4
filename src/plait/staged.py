"""The sums of a pipelined step: gradients of parameters that several stages hold, the global norm, the rider."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.sharded import Shards, padded


class Staged:
    """What the engine calls around a pipelined step. `inner` sums over the ranks that hold the same stages, if any.

    `names` are all trained parameters of the model, in its order; `shared` those that several stages hold, with the
    group of the ranks that do; `counted` those whose norm this rank counts.
    """

    def __init__(self, names: list[str], built: Any, copies: int):
        self.names, self.own, self.inner, self.peers, self.copies = names, built.own, built.reducer, built.peers, copies
        self.shared: dict[str, Any] = {}
        self.counted: set[str] = set(built.own)
        self.squares = 0.0
        self.rider = torch.empty(0)

    def before(self, last: bool) -> None:
        """Before the step's first forward pass (`last` false), and before its end."""
        if isinstance(self.inner, Shards):
            self.inner.hold(not last)

    def after(self) -> None:
        """Micro-batches end with the step."""

    def arm(self, rider: Tensor) -> None:
        """`rider` is a row of numbers to sum over all ranks."""
        self.rider = rider

    def finish(self) -> Tensor:
        """Sum gradients over copies, shards and stages; the summed rider."""
        if isinstance(self.inner, Shards):
            self.inner.settle(self.peers)
        elif self.inner is not None:
            self.inner.settle()
        self._share()
        gradients = [self.own[n].grad for n in self.names if self._counts(n) and self.own[n].grad is not None]
        squares = float(torch.nn.utils.get_total_norm(gradients)) ** 2 if gradients else 0.0
        used = [float(self._used(n)) for n in self.names]
        row = torch.cat([self.rider, torch.tensor([squares, *used], dtype=torch.float64, device=self.rider.device)])
        dist.all_reduce(row)
        rider, rest = row[: len(self.rider)], row[len(self.rider) :].tolist()
        self.squares = rest[0] / self.copies
        for name, times in zip(self.names, rest[1:]):
            if not times and name in self.own:
                self.own[name].grad = None
        if isinstance(self.inner, Shards):
            self.inner.used.clear()
        return rider

    def _counts(self, name: str) -> bool:
        """Whether this rank adds a parameter to the norm. One that is not cut is whole on every rank of a sharded stage."""
        alone = not isinstance(self.inner, Shards) or name in self.inner.sharded or self.inner.group.rank() == 0
        return alone and name in self.counted

    def _used(self, name: str) -> bool:
        if isinstance(self.inner, Shards) and name in self.inner.sharded:
            return name in self.inner.used
        return name in self.own and self.own[name].grad is not None

    def _share(self) -> None:
        """Add up the gradients of parameters that several stages hold. One that no stage used keeps none."""
        for name, group in self.shared.items():
            if name not in self.own or not self.own[name].requires_grad:
                continue
            parameter, size = self.own[name], self.own[name].numel()
            whole = self.inner.sharded.get(name) if isinstance(self.inner, Shards) else None
            most = size if whole is None else padded(whole.shape, self.inner.group.size())
            flat = torch.zeros(most + 1, dtype=parameter.dtype, device=parameter.device)
            if parameter.grad is not None:
                flat[:size], flat[-1] = parameter.grad.reshape(-1), 1.0
            dist.all_reduce(flat, group=group)
            parameter.grad = flat[:size].view_as(parameter) if float(flat[-1]) else None

    def norm(self, gradients: Iterable[Tensor]) -> float:
        """The gradient norm over all stages' parameters, as `finish` found it."""
        return self.squares**0.5
