# LazyLinear; a position cache and a projection that are created in the first forward
import torch
import torch.nn.functional as F
from torch import nn

import plait


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.l1, self.l2 = nn.Embedding(20, 8), nn.Linear(8, 16), nn.Linear(16, 20)
        self.cache = None

    def forward(self, ids):
        t = ids.shape[1]
        if self.cache is None or len(self.cache) < t:
            self.register_buffer(
                "cache", torch.sin(torch.arange(t)[:, None] * torch.arange(1, 9)), persistent=False
            ) if "cache" in self._buffers or not hasattr(self, "cache") else setattr(
                self, "cache", torch.sin(torch.arange(t)[:, None] * torch.arange(1, 9))
            )
        return self.l2(F.relu(self.l1(self.emb(ids) + self.cache[:t])))


class InForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(6, 16)
        self.proj = None

    def forward(self, x):
        h = F.relu(self.l1(x))
        if self.proj is None:
            self.proj = nn.Linear(h.shape[1], 2)
        return self.proj(h)


class D:
    def __len__(self):
        return 100

    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return x, int(x.sum() > 0)


class T:
    def __len__(self):
        return 100

    def __getitem__(self, i):
        x = torch.randint(0, 20, (9,), generator=torch.Generator().manual_seed(i))
        return x[:-1], x[1:]


def job(kind: str = "lazy"):
    o = lambda p: torch.optim.Adam(p, 1e-3)
    if kind == "lazy":
        return plait.Job(
            model=lambda: nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2)),
            loss=F.cross_entropy,
            data=D,
            optimizer=o,
            batch=16,
            steps=12,
        )
    if kind == "cache":
        return plait.Job(
            model=Cached,
            loss=lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten()),
            data=T,
            optimizer=o,
            batch=16,
            steps=12,
        )
    return plait.Job(model=InForward, loss=F.cross_entropy, data=D, optimizer=o, batch=16, steps=12)
