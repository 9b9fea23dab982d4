"""A job that waits for a minute at a chosen place, and writes a file when it does."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import plait

WAITS = Path("waits").read_text() if Path("waits").exists() else ""
"""The place. It is read from a file of the working directory, so that the module's import can also be the place."""


def wait(place: str, seconds: float = 60.0) -> None:
    if place == WAITS:
        Path(f"waiting-{time.monotonic_ns()}").touch()
        time.sleep(seconds)


wait("import")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor) and Path("runs").exists():
            wait("forward")
        return self.body(x)


class Data(torch.utils.data.Dataset[Any]):
    def __init__(self, wanted: str, size: int = 40):
        wait("data")
        made = torch.Generator().manual_seed(1)
        self.x, self.wanted = torch.randn(size, 6, generator=made), wanted

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        done = len(list(Path("runs").glob("*/checkpoints/step-*")))
        if i == 7 and done and self.wanted == "sample":
            wait("sample")
        if done and self.wanted == "evaluation":
            wait("evaluation")
        if not done and Path("runs").exists():
            wait("first sample")
        return self.x[i], self.x[i].sum().reshape(1)


def model() -> nn.Module:
    if Path("runs").exists():
        wait("model")
    if Path("killed").exists():
        wait("model of the second round")
    return Model()


def job() -> plait.Job:
    return plait.Job(
        model=model,
        loss=lambda made, target: ((made - target) ** 2).mean(),
        data=lambda: Data("sample"),
        batch=8,
        steps=400,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        evaluate=plait.Evaluate(lambda: Data("evaluation"), lambda made, target: {"error": (made - target).abs()}, every=4),
    )
