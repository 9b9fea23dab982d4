# only new rows of an embedding are trained: a hook on the parameter masks its gradient; and pruning by torch.nn.utils.prune
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import plait


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.emb = nn.Embedding(30, 16)
        self.l1, self.l2, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 30)
        if kind == "rows":
            mask = torch.zeros(30, 1)
            mask[24:] = 1
            self.emb.weight.register_hook(lambda g: g * mask.to(g))
        if kind == "scale":
            self.l1.weight.register_hook(lambda g: g * 0.1)
            self.l2.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        if kind == "prune":
            prune.random_unstructured(self.l1, "weight", 0.5)
            prune.l1_unstructured(self.l2, "weight", 0.3)

    def forward(self, ids):
        return self.head(F.relu(self.l2(F.relu(self.l1(self.emb(ids))))))


class T:
    def __len__(self):
        return 100

    def __getitem__(self, i):
        x = torch.randint(0, 30, (9,), generator=torch.Generator().manual_seed(i))
        return x[:-1], x[1:]


def job(kind: str = "rows"):
    return plait.Job(
        model=lambda: Net(kind),
        loss=lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten()),
        data=T,
        optimizer=lambda p: torch.optim.SGD(p, 0.5),
        batch=16,
        steps=12,
    )
