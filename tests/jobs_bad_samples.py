"""Jobs with a sample that cannot be read, for different reasons."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import plait

BAD = 77


def row(i: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(6, generator=torch.Generator().manual_seed(i))
    return x, x.sum()[None]


class Rows:
    """Sample 77 fails by `kind`: `key` and `stop` raise, `once` raises the first time only, `none` returns None."""

    def __init__(self, kind: str):
        self.kind = kind

    def __len__(self) -> int:
        return 200

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor] | None:
        if i == BAD and self.kind == "key":
            raise KeyError("label")
        if i == BAD and self.kind == "stop":
            raise StopIteration
        if i == BAD and self.kind == "once" and not Path("read").exists():
            Path("read").touch()
            raise OSError("the share does not answer")
        return None if i == BAD and self.kind == "none" else row(i)


class Put(Rows):
    """Its `collate` rejects one sample."""

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        x, y = (torch.stack(each) for each in zip(*samples))
        if bool((x == row(BAD)[0]).all(1).any()):
            raise ZeroDivisionError("a text of no tokens")
        return x, y


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(200):
            if i == BAD:
                raise ValueError("a broken record")
            yield row(i)


def job(kind: str = "key", steps: int = 20) -> plait.Job:
    data = {"put": lambda: Put(kind), "stream": Stream}.get(kind, lambda: Rows(kind))
    held_out = plait.Evaluate(
        lambda: Rows("key"), lambda outputs, targets: {"error": (outputs - targets).abs()}, every=3
    )
    return plait.Job(
        model=lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)), loss=F.mse_loss, data=data,
        optimizer=lambda p: torch.optim.SGD(p, 0.05), batch=16, steps=steps, evaluate=held_out if kind == "evaluate" else None,
    )  # fmt: skip
