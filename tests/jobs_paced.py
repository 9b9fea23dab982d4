"""A job whose samples are three times slower on rank 1 than on other ranks: float64, dropout, augmentation."""

import time

import torch
from jobs import Numbers
from torch import nn
from torch.distributed import distributed_c10d as dist
from torch.nn import functional as F

import plait


class Paced(nn.Module):
    """Sleeps for each sample. Rank 1 is slow from its first forward pass on, or from a later one."""

    def __init__(self, pause: float, slow: float, since: int):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1)).double()
        self.pause, self.slow, self.since, self.calls = pause, slow, since, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor) and self.training:
            self.calls += 1
            slow = self.calls > self.since and dist.is_initialized() and dist.get_rank() == 1
            time.sleep(self.pause * len(x) * (self.slow if slow else 1.0))
        return self.body(x)


class Data(Numbers):
    def __init__(self) -> None:
        super().__init__(152, augment=True)
        self.x, self.y = self.x.double(), self.y.double()


def job(pause: float = 0.003, slow: float = 3.0, since: int = 0, steps: int = 30, batch: int = 16) -> plait.Job:
    return plait.Job(
        model=lambda: Paced(pause, slow, since),
        loss=F.mse_loss,
        data=Data,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        batch=batch,
        steps=steps,
        clip=0.5,
        seed=5,
        evaluate=plait.Evaluate(Data, lambda out, y: {"error": (out - y).abs()}, every=15),
    )
