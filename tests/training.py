"""The job of the launching tests: float64, dropout, augmentation, and faults on request."""

import os
import signal
import time
import warnings
from pathlib import Path

import torch
from jobs import Numbers
from torch import nn
from torch.distributed import distributed_c10d as dist
from torch.nn import functional as F

import plait


class Faulty(nn.Module):
    """Does `fault` on rank 1 in the model's `at`-th training forward; `times` limits how often in one working directory."""

    def __init__(self, fault: str, at: int, pause: float, times: int):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1)).double()
        self.fault, self.at, self.pause, self.times, self.calls = fault, at, pause, times, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor) and self.training:
            self.calls += 1
            time.sleep(self.pause)
            if self.fault and self.calls == self.at and dist.is_initialized() and dist.get_rank() == 1:
                self.strike()
        return self.body(x)

    def strike(self) -> None:
        if self.times:
            with open("faults", "a+") as faults:
                if faults.tell() == self.times:
                    return
                faults.write("x")
        if self.fault == "raise":
            raise ValueError("the user's own mistake")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.fault == "memory":
            torch.empty(1 << 60, dtype=torch.uint8)
        if self.fault == "exit":
            os._exit(7)
        if self.fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.fault == "sleep":
            time.sleep(1000)


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
