# the backbone is frozen for the first steps, then trained; a counter switches in the forward pass
import torch
import torch.nn.functional as F
from torch import nn

import plait


class Net(nn.Module):
    def __init__(self, at):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 2)
        self.at = at
        self.n = 0
        self.backbone.requires_grad_(False)

    def forward(self, x):
        if self.training:
            self.n += 1
            if self.n > self.at:
                self.backbone.requires_grad_(True)
        return self.head(self.backbone(x))


class D:
    def __len__(self):
        return 100

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return x, int(x.sum() > 0)


class Unfreeze(plait.Callback):
    def on_step(self, engine, step):
        if step.step == 3:
            for p in engine.model.backbone.parameters():
                p.requires_grad_(True)


def callbacks():
    return [Unfreeze()]


def job(at: int = 2, clip: float = 0.5):
    return plait.Job(
        clip=clip or None,
        model=lambda: Net(at),
        loss=F.cross_entropy,
        data=D,
        optimizer=lambda p: torch.optim.AdamW(p, 1e-2),
        batch=16,
        steps=12,
    )
