"""The job for tests of replay: residual blocks with dropout, augmented samples, and optionally one fault that spoils a step."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait

ODD = 42
"""The bad sample. The third step is the first that has it."""


class Signals:
    """48 samples of 6 values with noise. One is bad: its inputs are NaN, or its targets or inputs far too large. For a bad module it is
    only larger."""

    def __init__(self, double: bool, spoiled: str):
        g = torch.Generator().manual_seed(5)
        kind = torch.float64 if double else torch.float32
        self.x = torch.randn(48, 6, generator=g).to(kind)
        self.y = self.x.sum(1, keepdim=True).tanh()
        self.spoiled = spoiled

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = self.x[i] + 0.1 * torch.randn(6, dtype=self.x.dtype), self.y[i]
        if i == ODD and self.spoiled == "nan":
            x = x.clone().fill_(float("nan"))
        if i == ODD and self.spoiled in ("inputs", "module"):
            x = x + (1000 if self.spoiled == "inputs" else 7)
        return x, 300 * y if i == ODD and self.spoiled == "targets" else y


class Block(nn.Module):
    """A residual block. A bad one returns NaN, or a far too large value, for large inputs."""

    def __init__(self, bad: str = ""):
        super().__init__()
        self.up, self.down, self.drop, self.bad = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.2), bad

    def forward(self, x: Tensor) -> Tensor:
        out = self.down(self.drop(F.gelu(self.up(x))))
        if self.bad:
            out = out * torch.where(x.abs().mean(-1, keepdim=True) > 2.0, float(self.bad), 1.0)
        return x + out


def job(double: bool = True, spoiled: str = "", bad: str = "", steps: int = 24, lr: float = 1e-2, norm: bool = False) -> plait.Job:
    def model() -> nn.Module:
        blocks = [Block(bad if i == 1 else "") for i in range(4)]
        first = [nn.Linear(6, 8), *([nn.BatchNorm1d(8)] * norm)]
        made = nn.Sequential(*first, *blocks, nn.LayerNorm(8), nn.Linear(8, 1))
        return made.double() if double else made

    return plait.Job(
        model=model, loss=F.mse_loss, data=lambda: Signals(double, spoiled), batch=16, steps=steps, clip=1.0,
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr), schedule=lambda samples: 1.0 / (1.0 + samples / 200.0),
    )  # fmt: skip
