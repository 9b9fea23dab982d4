# a temperature that decreases with the number of forward passes, stored in a plain attribute (Gumbel softmax)
import torch
import torch.nn.functional as F
from torch import nn

import plait


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 8)
        self.calls = 0

    def forward(self, x):
        if self.training:
            self.calls += 1
        tau = max(0.5, 0.97**self.calls)
        return self.b(F.gumbel_softmax(self.a(x), tau=tau))


class D:
    def __len__(self):
        return 100

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return x, x.roll(1)


def job(fixed: bool = False):
    if fixed:
        Net.forward = lambda self, x: self.b(F.gumbel_softmax(self.a(x), tau=0.7))
    return plait.Job(
        model=Net, loss=F.mse_loss, data=D, optimizer=lambda p: torch.optim.Adam(p, 1e-2), batch=16, steps=20
    )
