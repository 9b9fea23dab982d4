# a frozen bf16 backbone with fp32 adapters; a model fully in bf16, or half of it in float64
import torch
import torch.nn.functional as F
from torch import nn

import plait


class Lora(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.base = nn.Linear(a, b).to(torch.bfloat16).requires_grad_(False)
        self.A, self.B = nn.Parameter(torch.randn(4, a) / a), nn.Parameter(torch.zeros(b, 4))

    def forward(self, x):
        return self.base(x.to(self.base.weight.dtype)).to(x.dtype) + F.linear(F.linear(x, self.A), self.B)


class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(6, 16), nn.Linear(16, 16).double(), nn.Linear(16, 6)

    def forward(self, x):
        h = F.relu(self.l1(x))
        return self.l3(self.l2(h.to(self.l2.weight.dtype)).to(h.dtype))


class D:
    def __len__(self):
        return 100

    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return x, x.roll(1)


class DB(D):
    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x.bfloat16(), y.bfloat16()


def job(kind: str = "lora"):
    m = {
        "lora": lambda: nn.Sequential(Lora(6, 16), nn.ReLU(), Lora(16, 16), nn.ReLU(), Lora(16, 6)),
        "double": Double,
        "bf16": lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6)).bfloat16(),
    }[kind]
    return plait.Job(
        model=m,
        loss=F.mse_loss,
        data=DB if kind == "bf16" else D,
        optimizer=lambda p: torch.optim.AdamW(p, 1e-2),
        batch=16,
        steps=12,
        clip=1.0,
    )
