"""A job whose values stop being finite: `at` names the place, `sample` the cause (-1: any sample)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait


class Numbers:
    """Each sample's input has the sample's number in the last feature, so that a model can identify its samples."""

    def __init__(self, at: str, sample: int, n: int = 24):
        self.at, self.sample, self.n = at, sample, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i), dtype=torch.float64).float()
        x[:, -1] = float(i)
        if self.at == "data" and i == self.sample:
            x[0, 0] = float("nan")
        return x, x[:, :1].tanh()


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, hit: Tensor) -> Tensor:
        ctx.save_for_backward(hit)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (hit,) = ctx.saved_tensors
        return gradients[0].masked_fill(hit, float("inf")), None


class Block(nn.Module):
    """Passes the sample's number on. If `at` is this block, its forward or backward is not finite for one sample."""

    def __init__(self, at: str, name: str, sample: int):
        super().__init__()
        self.norm, self.q, self.k, self.v = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8)
        self.out = nn.Linear(8, 6)
        self.at, self.name, self.sample = at, name, sample

    def forward(self, x: Tensor) -> Tensor:
        hit = ((x[..., -1:] == self.sample) | (self.sample < 0)) & self.training
        q, k, v = (f(self.norm(x)).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        out = x + 0.1 * self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        if self.at == f"forward {self.name}":
            out = out.masked_fill(hit, float("inf"))
        if self.at == f"backward {self.name}":
            out = _Back.apply(out, hit.expand_as(out))
        return torch.cat([out[..., :-1], x[..., -1:]], -1)


class Net(nn.Module):
    def __init__(self, at: str, sample: int, norm: bool):
        super().__init__()
        self.blocks = nn.ModuleList([Block(at, str(i), sample) for i in range(2)])
        self.norm = nn.BatchNorm1d(6) if norm else None
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        y = (
            x
            if self.norm is None
            else torch.cat([self.norm(x.transpose(1, 2)).transpose(1, 2)[..., :-1], x[..., -1:]], -1)
        )
        return self.head(y[..., :-1]), x[..., -1].detach()


class Poison(torch.optim.AdamW):
    """Its n-th update writes infinity to the last parameter."""

    def __init__(self, params: Any, lr: float, at: int):
        super().__init__(params, lr=lr)
        self.at, self.made = at, 0

    def step(self, closure: Any = None) -> None:
        super().step()
        self.made += 1
        if self.made == self.at:
            with torch.no_grad():
                last = self.param_groups[0]["params"][-1]
                last.fill_(float("inf")) if last.numel() else None


def job(
    at: str = "", sample: int = 17, batch: int = 8, steps: int = 12, poison: int = 0, norm: bool = False
) -> plait.Job:
    """Three steps make an epoch of 24 samples."""

    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        out, numbers = outputs
        if at == "loss":
            out = out.masked_fill((numbers == sample)[..., None], float("nan"))
        return F.mse_loss(out, targets)

    return plait.Job(
        model=lambda: Net(at, sample, norm), loss=loss, data=lambda: Numbers(at, sample), batch=batch, steps=steps, seed=3,
        optimizer=lambda p: Poison(p, 1e-2, poison) if poison else torch.optim.AdamW(p, lr=1e-2),
    )  # fmt: skip
