"""A small job for tests of resuming. The command line can change each of its parts."""

import random

import torch
from torch import nn
from torch.nn import functional as F

import plait


class Data:
    def __init__(self, length: int, shift: float, noise: bool):
        draw = torch.Generator().manual_seed(3)
        self.x = torch.randn(100, 4, generator=draw)
        self.y = self.x.sum(1, keepdim=True) + shift
        self.length, self.noise = length, noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int):
        return self.x[i] + (torch.randn(4) * random.random() if self.noise else 0.0), self.y[i]


class Both(torch.optim.Optimizer):
    """Combines two optimizers, and saves them in a `state_dict` with its own layout."""

    def __init__(self, params, lr: float):
        params = list(params)
        self.inner = {
            "matrices": torch.optim.SGD([p for p in params if p.dim() > 1], lr=lr, momentum=0.9),
            "rest": torch.optim.AdamW([p for p in params if p.dim() < 2], lr=lr),
        }
        super().__init__(params, {"lr": lr})
        self.param_groups = [group for o in self.inner.values() for group in o.param_groups]

    def step(self, closure=None):
        for o in self.inner.values():
            o.step()

    def state_dict(self):
        return {name: o.state_dict() for name, o in self.inner.items()}

    def load_state_dict(self, state_dict):
        for name, o in self.inner.items():
            o.load_state_dict(state_dict[name])


class Outside(torch.optim.SGD):
    """Keeps its momentum in a list, outside of `state`."""

    def __init__(self, params, lr: float):
        super().__init__(params, lr=lr)
        self.moving = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for p, m in zip((p for group in self.param_groups for p in group["params"]), self.moving):
            if p.grad is not None:
                m.mul_(0.9).add_(p.grad)
                p.sub_(m, alpha=self.param_groups[0]["lr"])


class Counting(torch.optim.SGD):
    """Has its own schedule, and counts its steps in an attribute."""

    def __init__(self, params, lr: float):
        super().__init__(params, lr=lr, momentum=0.9)
        self.made, self.first = 0, lr

    def step(self, closure=None):
        self.made += 1
        for group in self.param_groups:
            group["lr"] = self.first / self.made
        return super().step(closure)


class Objects(torch.optim.SGD):
    """Keeps a list of tensors in `state`."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("past", []).append(p.grad.clone())
                    p.sub_(self.state[p]["past"][0], alpha=group["lr"])


OPTIMIZERS = {
    "adamw": lambda params, lr, decay: torch.optim.AdamW(params, lr=lr, weight_decay=decay),
    "groups": lambda params, lr, decay: torch.optim.AdamW(
        [{"params": params[:1], "lr": lr * 2}, {"params": params[1:], "weight_decay": decay}], lr=lr
    ),
    "both": lambda params, lr, decay: Both(params, lr),
    "outside": lambda params, lr, decay: Outside(params, lr),
    "counting": lambda params, lr, decay: Counting(params, lr),
    "objects": lambda params, lr, decay: Objects(params, lr=lr),
}


def job(
    lr: float = 0.01, decay: float = 0.0, batch: int = 8, seed: int = 1, steps: int = 6, clip: float = 1.0, length: int = 40,
    shift: float = 0.0, noise: bool = False, power: float = 2.0, warmup: int = 100, dropout: float = 0.0, fail: str = "",
    optimizer: str = "adamw",
) -> plait.Job:  # fmt: skip
    def loss(out, y):
        return F.l1_loss(out, y) if power == 1.0 else (out - y).abs().pow(power).mean()

    def model():
        if fail == "model":
            raise RuntimeError("no model today")
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 1))

    return plait.Job(
        model=model, loss=loss, data=lambda: Data(length, shift, noise), batch=batch, steps=steps, seed=seed, clip=clip,
        optimizer=lambda params: OPTIMIZERS[optimizer](params, lr, decay),
        schedule=lambda samples: 1.0 / (1.0 + samples / warmup),
    )  # fmt: skip
