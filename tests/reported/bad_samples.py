# a NaN sample; an exception in a loader worker; None for a broken file; a list of broken samples that are retried at random
import os
import random

import torch
import torch.nn.functional as F
from torch import nn

import plait


class D:
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 200

    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        if i == 77:
            if self.kind == "nan":
                x[2] = float("nan")
            if self.kind == "raise":
                raise OSError(f"image file is truncated: {i}.jpg")
            if self.kind == "none":
                return None
            if self.kind == "retry":
                return self[random.randint(0, 199)]
            if self.kind == "exit":
                os._exit(9)
            if self.kind == "stop":
                raise StopIteration
            if self.kind == "index":
                raise IndexError("list index out of range")
        return x, x.sum()[None]


def job(kind: str = "nan"):
    return plait.Job(
        model=lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)),
        loss=F.mse_loss,
        data=lambda: D(kind),
        optimizer=lambda p: torch.optim.SGD(p, 0.05),
        batch=16,
        steps=30,
    )
