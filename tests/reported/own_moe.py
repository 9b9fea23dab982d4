# a custom mixture of experts: jitter noise, top-2, capacity, balance loss and router z-loss in an attribute that the model reads
import torch
import torch.nn.functional as F
from torch import nn

import plait


class MoE(nn.Module):
    def __init__(self, d, n=4, cap=None, jit=0.01):
        super().__init__()
        self.gate = nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(n)
        )
        self.cap, self.jit = cap, JIT

    def forward(self, x):
        s = x.shape
        x = x.reshape(-1, s[-1])
        y = x * (1 + (torch.rand_like(x) * 2 - 1) * self.jit) if self.training and self.jit else x
        lg = self.gate(y)
        p = lg.softmax(-1)
        w, e = p.topk(2, -1)
        w = w / w.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for k, f in enumerate(self.experts):
            r, c = torch.where(e == k)
            if self.cap:
                r, c = r[: self.cap], c[: self.cap]
            if len(r):
                out.index_add_(0, r, f(x[r]) * w[r, c, None])
        m = plait.global_mean(p), plait.global_mean(F.one_hot(e[:, 0], len(self.experts)).to(p))
        z = lg.logsumexp(-1).pow(2).reshape(s[0], -1).mean(1)
        return out.view(s), (m[0] * m[1]).sum() * len(self.experts), z


class Net(nn.Module):
    def __init__(self, cap=None):
        super().__init__()
        self.tok = nn.Embedding(30, 16)
        self.layers = nn.ModuleList(MoE(16, cap=cap) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 30)

    def forward(self, ids):
        x, bal, zs = self.tok(ids), 0.0, 0.0
        for l in self.layers:
            y, b, z = l(x)
            x, bal, zs = x + y, bal + b, zs + z
        return self.head(self.norm(x)), bal, zs


class T:
    def __len__(self):
        return 100

    def __getitem__(self, i):
        x = torch.randint(0, 30, (9,), generator=torch.Generator().manual_seed(i))
        return x[:-1], x[1:]


JIT = 0.01


def job(cap: int = 0, jit: float = 0.01):
    global JIT
    JIT = jit
    return plait.Job(
        model=lambda: Net(cap or None),
        loss=lambda o, y: F.cross_entropy(o[0].flatten(0, 1), y.flatten()) + 0.01 * o[1] + 0.001 * o[2].mean(),
        data=T,
        optimizer=lambda p: torch.optim.AdamW(p, 1e-3),
        batch=12,
        steps=12,
    )
