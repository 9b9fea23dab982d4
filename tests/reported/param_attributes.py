# as in state space models: parameters carry an attribute that selects their optimizer group
import torch
import torch.nn.functional as F
from torch import nn

import plait


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 16), nn.Linear(16, 4)
        self.s = nn.Parameter(torch.ones(32, 1))
        self.s._no_weight_decay = True
        self.b.weight._optim = {"lr": 1e-3}
        for m in (self.a, self.b):
            m.bias._no_weight_decay = True

    def forward(self, x):
        return self.c(F.relu(self.b(F.relu(self.a(x)) * self.s.squeeze(1))))


class D:
    def __len__(self):
        return 100

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return x, int(x[:4].argmax())


def opt(ps):
    plain = [p for p in ps if not getattr(p, "_no_weight_decay", False) and not hasattr(p, "_optim")]
    no = [p for p in ps if getattr(p, "_no_weight_decay", False)]
    own = [p for p in ps if hasattr(p, "_optim")]
    g = (
        [{"params": plain, "weight_decay": 0.3}]
        + ([{"params": no, "weight_decay": 0.0}] if no else [])
        + [{"params": [p], **p._optim, "weight_decay": 0.3} for p in own]
    )
    return torch.optim.AdamW(g, lr=1e-2)


def job():
    return plait.Job(model=Net, loss=F.cross_entropy, data=D, optimizer=opt, batch=16, steps=12)
