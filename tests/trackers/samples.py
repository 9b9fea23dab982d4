"""Data sets that the jobs of this folder share: every sample is made of its index alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait


def generator(i: int) -> torch.Generator:
    """Random numbers of one sample."""
    return torch.Generator().manual_seed(1000 + i)


class Rows:
    """Vectors of 6 values, with one of 4 classes."""

    def __init__(self, length: int = 60):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        x = torch.randn(6, generator=generator(i))
        return x, (x[:4] + x[2:6]).argmax()


class Numbers(Rows):
    """The same with one value to predict."""

    def __getitem__(self, i: int) -> Any:
        x = torch.randn(6, generator=generator(i))
        return x, x.sin().sum()[None]


class Images(Rows):
    """Images of 3 x 8 x 8, with one of 4 classes."""

    def __getitem__(self, i: int) -> Any:
        x = torch.randn(3, 8, 8, generator=generator(i))
        return x, x.mean((1, 2)).abs().argmax()


class Texts(Rows):
    """Eight tokens out of 16, and the next ones."""

    def __getitem__(self, i: int) -> Any:
        row = torch.randint(0, 16, (9,), generator=generator(i))
        return row[:-1], row[1:]


class Ragged(Rows):
    """Texts of 3 to 8 tokens, padded with zeros to the longest of the batch. Padding has the label -100."""

    def __getitem__(self, i: int) -> Any:
        row = torch.randint(1, 16, (4 + i % 6,), generator=generator(i))
        return row[:-1], row[1:]

    def collate(self, samples: list[Any]) -> Any:
        pad = nn.utils.rnn.pad_sequence
        rows, labels = zip(*samples)
        return pad(list(rows), batch_first=True), pad(list(labels), batch_first=True, padding_value=-100)


def adamw(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


def sgd(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def next_token(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def first(outputs: Tensor, targets: Any) -> Tensor:
    """The loss of a model that computes it for each sample."""
    return outputs.mean()


def made(model: Callable[[], nn.Module], loss: Any = F.cross_entropy, data: Callable[[], Any] = Rows, **fields: Any) -> plait.Job:
    """A job of 8 samples per step, with the settings that most jobs have."""
    return plait.Job(**{"model": model, "loss": loss, "data": data, "optimizer": adamw, "batch": 8, "steps": 12} | fields)


class Block(nn.Module):
    """A residual layer. Models are split at these."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    """A linear layer, blocks, and a linear layer. Subclasses add the code of their report."""

    def __init__(self, inputs: int = 6, outputs: int = 4, depth: int = 3, width: int = 8):
        super().__init__()
        self.first, self.last = nn.Linear(inputs, width), nn.Linear(width, outputs)
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
        return self.last(h)
