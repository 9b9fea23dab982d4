"""A job for tests of misbehaving ranks: rank 1 misbehaves in its third training step, or the data is bad."""

import os
import sys

import torch
from jobs import Numbers
from torch import nn
from torch.distributed import distributed_c10d as dist
from torch.nn import functional as F

import plait


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this can be said")


def deeper(n: int) -> int:
    return deeper(n + 1) + 1


def chained(n: int) -> Exception:
    error: Exception = ValueError("the innermost")
    for i in range(n):
        outer = ValueError(f"link {i}")
        outer.__cause__ = error
        error = outer
    return error


def strike(fault: str) -> None:
    """Let rank 1 misbehave."""
    if fault == "long":
        raise ValueError("x" * 50_000_000)
    if fault == "lines":
        raise ValueError("the first line\n" + "more\n" * 1_000_000)
    if fault == "surrogate":
        raise ValueError("before \ud800 after")
    if fault == "control":
        raise ValueError("a\x1b[31mred\x00\x07")
    if fault == "unspeakable":
        raise Unspeakable
    if fault == "deep":
        deeper(0)
    if fault == "chained":
        raise chained(5_000)
    if fault == "exits":
        sys.exit(3)
    if fault == "interrupted":
        raise KeyboardInterrupt
    if fault == "closes":
        os.close(1)
        os.close(2)
        raise ValueError("after closing its output")
    if fault == "closes everything":
        os.closerange(0, 256)
        raise ValueError("after closing everything")


def speak(fault: str) -> None:
    """Print on rank 1, and continue."""
    if fault == "prints lines":
        sys.stdout.write("a line of some length, and its end\n" * 600_000)
    if fault == "prints a line":
        print("x" * 20_000_000)
    if fault == "prints bytes":
        os.write(1, b"bytes \xff\xfe of no encoding\n")
    if fault == "prints surrogates":
        print("before \ud800 after")
    if fault == "closes quietly":
        os.close(1)
        os.close(2)


class Rows(Numbers):
    def __init__(self, fault: str):
        super().__init__(41)
        self.fault = fault

    def __getitem__(self, i: int):
        if self.fault == "key" and i == 7:
            return {}["no such key"]
        if self.fault == "long key":
            raise KeyError("k" * 5_000_000)
        if self.fault == "worker exits":
            sys.exit(3)
        return super().__getitem__(i)


class Model(nn.Module):
    def __init__(self, fault: str):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        self.fault, self.calls = fault, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not isinstance(x, torch._subclasses.FakeTensor):
            self.calls += 1
            if self.calls == 3 and (not dist.is_initialized() or dist.get_rank() == 1):
                speak(self.fault)
                strike(self.fault)
        return self.body(x)


def wrong(fault: str) -> nn.Module:
    """Return a model that fails inside a library."""
    width = 7 if fault == "width" else 6
    return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 1))


def job(fault: str = "", steps: int = 6) -> plait.Job:
    return plait.Job(
        model=lambda: wrong(fault) if fault in ("width",) else Model(fault),
        loss=F.l1_loss if fault != "loss" else F.nll_loss,
        data=lambda: Rows(fault),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
        batch=8,
        steps=steps,
    )
