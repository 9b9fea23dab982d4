"""Small, different models for compressed all-reduces, with either optimizer, and losses whose samples have equal or different weights."""

from collections.abc import Iterable
from typing import Any

import torch
from jobs import Numbers, make
from torch import Tensor, nn

import plait


class Words(nn.Module):
    """An embedding that is also the head; a vector and a scalar are among the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 7), nn.Linear(7, 7)
        self.gain, self.shift = nn.Parameter(torch.ones(7)), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed((x.abs() * 4).long() % 11)
        h = (self.mix(h).tanh() * self.gain + self.shift).mean(1)
        return (h @ self.embed.weight.T)[:, :1]


class Pictures(nn.Module):
    """A convolution with dropout. As a matrix, its weight has three dims in its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop, self.last = nn.Conv2d(1, 5, 2), nn.Dropout(0.2), nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.conv(x.reshape(-1, 1, 2, 3)).relu().flatten(1)))


class Courses(nn.Module):
    """A layer that only some samples use, so that some ranks have no gradient of it, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.never = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h, some = self.first(x).relu(), x[:, :1] > 0.7
        if some.any():
            h = h + self.rare(h) * some
        return self.last(h)


MODELS = {"words": Words, "pictures": Pictures, "courses": Courses}


def counts(y: Tensor) -> Tensor:
    """The weight of a sample: 1 or 2."""
    return 1 + (y > 0).long()


def ragged_loss(out: Tensor, y: Tensor) -> Tensor:
    return (counts(y) * (out - y).square()).sum() / counts(y).sum()


def optimizer(name: str) -> Any:
    def made(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if name == "adamw":
            return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)

    return made


def job(model: str, optimized: str = "adamw", ragged: bool = False, **fields: Any) -> plait.Job:
    weighed: dict[str, Any] = {"loss": ragged_loss, "weight": counts} if ragged else {}
    return make(MODELS[model], Numbers, **{**weighed, "optimizer": optimizer(optimized), **fields})
