# a selective scan written as a loop, with a causal depthwise convolution; lengths vary between batches (padded by collate)
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import plait


class Mamba(nn.Module):
    def __init__(self, d, n=4):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.inp, self.conv, self.x, self.dt, self.out = (
            nn.Linear(d, 4 * d),
            nn.Conv1d(2 * d, 2 * d, 4, padding=3, groups=2 * d),
            nn.Linear(2 * d, 2 * n + 2),
            nn.Linear(2, 2 * d),
            nn.Linear(2 * d, d),
        )
        self.A, self.D, self.n = (
            nn.Parameter(torch.log(torch.arange(1, n + 1.0)).repeat(2 * d, 1)),
            nn.Parameter(torch.ones(2 * d)),
            n,
        )

    def forward(self, u):
        x, z = self.inp(self.norm(u)).chunk(2, -1)
        t = x.shape[1]
        x = F.silu(self.conv(x.transpose(1, 2))[..., :t].transpose(1, 2))
        dt, B, C = self.x(x).split([2, self.n, self.n], -1)
        dt = F.softplus(self.dt(dt))
        h = x.new_zeros(len(x), x.shape[2], self.n)
        ys = []
        for i in range(t):
            h = torch.exp(dt[:, i, :, None] * -self.A.exp()) * h + dt[:, i, :, None] * B[:, i, None] * x[:, i, :, None]
            ys.append((h * C[:, i, None]).sum(-1))
        return u + self.out((torch.stack(ys, 1) + x * self.D) * F.silu(z))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(30, 16, padding_idx=0)
        self.layers = nn.ModuleList(Mamba(16) for _ in range(2))
        self.head = nn.Linear(16, 30)

    def forward(self, ids):
        x = self.tok(ids)
        for l in self.layers:
            x = l(x)
        return self.head(x)


class T:
    def __len__(self):
        return 80

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.randint(1, 30, (int(torch.randint(4, 13, (), generator=g)),), generator=g)
        return x[:-1], x[1:]

    def collate(self, ss):
        a, b = zip(*ss)
        return pad_sequence(a, batch_first=True), pad_sequence(b, batch_first=True, padding_value=-100)


def job():
    return plait.Job(
        model=LM,
        loss=lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=-100),
        weight=lambda y: (y != -100).sum(),
        data=T,
        optimizer=lambda p: torch.optim.AdamW(p, 1e-3),
        batch=8,
        steps=12,
        clip=1.0,
    )
