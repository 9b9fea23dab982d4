"""The job of the launching tests: float64, dropout, augmentation, and optional faults."""

import time
import warnings
from pathlib import Path

import torch
from jobs import Numbers
from torch import nn
from torch.distributed import distributed_c10d as dist
from torch.nn import functional as F

import plait
from plait.chaos.strike import ACTS, Strike, Striker


class Faulty(nn.Module):
    """Strikes rank 1 (`plait.chaos.strike`) in the model's `at`-th training forward; `times` limits the number of strikes per directory."""

    def __init__(self, fault: str, at: int, pause: float, times: int):
        super().__init__()
        strike = Strike(fault, step=at, times=times or 10**6, text="the user's own mistake" if fault == "raise" else "")
        self.striker = Striker({0: strike} if fault in ACTS else {}, Path("faults"))
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1)).double()
        self.pause, self.calls = pause, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor) and self.training:
            self.calls += 1
            time.sleep(self.pause)
            if dist.is_initialized() and dist.get_rank() == 1:
                self.striker.begin_phase(self.calls, "forward")
        return self.body(x)


class Data(Numbers):
    def __init__(self, loud: bool, bad: bool = False):
        super().__init__(41, augment=True)
        self.x, self.y, self.loud, self.bad = self.x.double(), self.y.double(), loud, bad

    def __getitem__(self, i: int):
        if self.loud:
            warnings.warn("a sample was read", stacklevel=1)
        if self.bad and i == 30:
            raise ValueError("sample 30 cannot be read")
        return super().__getitem__(i)


def job(
    fault: str = "", at: int = 5, pause: float = 0.0, steps: int = 30, loud: bool = False, batch: int = 8, ema: float = 0.0,
    times: int = 0,
) -> plait.Job:  # fmt: skip
    return plait.Job(
        model=lambda: Faulty(fault, at, pause, times),
        loss=F.mse_loss,
        data=lambda: Data(loud, fault == "sample"),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        batch=batch,
        steps=steps,
        schedule=lambda samples: 1.0 / (1.0 + samples / 100.0),
        clip=0.5,
        seed=5,
        ema=plait.EMA(ema, every=3) if ema else None,
        evaluate=plait.Evaluate(lambda: Data(False), lambda out, y: {"error": (out - y).abs()}, every=10),
    )


HERE = Path(__file__)
