"""Batch norms other than torch's plain ones: SyncBatchNorm as scripts leave it, and subclasses with their own forward."""

from collections.abc import Callable
from typing import Any

import torch
from jobs import make
from torch import Tensor, nn
from torch.nn import functional as F

import plait


class Images:
    """Small images, labeled bright or not."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        x = torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(i))
        return x, int(x.mean() > 0)


class Activated(nn.BatchNorm2d):
    """A batch norm with a fused activation, which calls the norm of its base class."""

    def forward(self, input: Tensor) -> Tensor:
        return F.silu(super().forward(input))


class Written(nn.BatchNorm2d):
    """The same with the norm written out, as libraries of vision models do."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training:  # in eval mode, a count would be over the rank's local batches
            self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        x = F.batch_norm(input, *statistics, self.weight, self.bias, self.training, 0.2, self.eps)
        return F.silu(x)


class Renormed(nn.SyncBatchNorm):
    """A subclass of the norm that communicates itself."""

    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * input + super().forward(input)


class Mixed(nn.Module):
    """Norms over two spatial dims, over one, and over none."""

    def __init__(self, kind: Callable[..., nn.Module], **given: Any):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), kind(6, **given)
        self.line, self.last = kind(6, **given), kind(6, **given)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        if isinstance(self.line, nn.SyncBatchNorm):
            x = self.last(F.relu(self.line(x.flatten(2))).mean(-1))
        else:
            x = self.last(F.relu(self.line(x))).mean((2, 3))
        return self.head(x)


def accuracy(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"correct": (outputs.argmax(-1) == targets).double(), "loss": F.cross_entropy(outputs, targets, reduction="none")}


def job(model: Callable[[], nn.Module], **given: Any) -> plait.Job:
    held_out = plait.Evaluate(Images, accuracy)
    return make(model, Images, F.cross_entropy, evaluate=held_out, batch=12, **given)


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2),
    )  # fmt: skip


ALL: dict[str, Callable[[], plait.Job]] = {
    "plain": lambda: job(net),
    "converted": lambda: job(lambda: nn.SyncBatchNorm.convert_sync_batchnorm(net())),
    "made": lambda: job(lambda: Mixed(nn.SyncBatchNorm)),
    "cumulative": lambda: job(lambda: Mixed(nn.SyncBatchNorm, momentum=None)),
    "not_affine": lambda: job(lambda: Mixed(nn.SyncBatchNorm, affine=False)),
    "own_sync": lambda: job(lambda: Mixed(Renormed)),
    "activated": lambda: job(lambda: Mixed(Activated)),
    "written": lambda: job(lambda: Mixed(Written)),
}
