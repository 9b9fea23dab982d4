# recommender: two sparse tables with SparseAdam, the dense rest with Adam
import torch
from torch import nn

import plait


class Rec(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(50, 8, sparse=True), nn.EmbeddingBag(40, 8, sparse=True, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, u, items):
        return self.mlp(torch.cat([self.user(u), self.item(items)], 1)).squeeze(1)


class Clicks:
    def __len__(self):
        return 150

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return (torch.randint(0, 50, (), generator=g), torch.randint(0, 40, (5,), generator=g)), torch.rand(
            (), generator=g
        ).round()


def opt(ps):
    named = plait.named(ps)
    return plait.CombinedOptimizer(
        torch.optim.SparseAdam([p for n, p in named if n.startswith(("user", "item"))], lr=1e-2),
        torch.optim.Adam([p for n, p in named if n.startswith("mlp")], lr=1e-3),
    )


def job():
    return plait.Job(
        model=Rec, loss=nn.functional.binary_cross_entropy_with_logits, data=Clicks, optimizer=opt, batch=16, steps=12
    )
