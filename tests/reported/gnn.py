# graphs of unequal size in one disconnected graph, node-level loss, batch norm over nodes, readout of graphs
import torch
import torch.nn.functional as F
from torch import nn

import plait


class Conv(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.s, self.n = nn.Linear(a, b), nn.Linear(a, b, bias=False)

    def forward(self, x, e):
        m = torch.zeros_like(x).index_add_(0, e[1], x[e[0]])
        deg = torch.zeros(len(x), dtype=x.dtype).index_add_(0, e[1], torch.ones(e.shape[1], dtype=x.dtype))
        return self.s(x) + self.n(m / deg.clamp_min(1)[:, None])


class GNN(nn.Module):
    def __init__(self, bn):
        super().__init__()
        self.c1, self.c2 = Conv(5, 16), Conv(16, 16)
        self.bn = nn.BatchNorm1d(16) if bn else nn.LayerNorm(16)
        self.out = nn.Linear(32, 3)

    def forward(self, x, edge_index, batch):
        h = F.relu(self.bn(self.c1(x, edge_index)))
        h = F.relu(self.c2(h, edge_index))
        n = int(batch.max()) + 1
        g = torch.zeros(n, 16, dtype=h.dtype).index_add_(0, batch, h)
        return self.out(torch.cat([h, g[batch]], 1))


class Graphs:
    def __len__(self):
        return 60

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        n = int(torch.randint(2, 9, (), generator=g))
        m = int(torch.randint(0, 3 * n, (), generator=g))
        return {
            "x": torch.randn(n, 5, generator=g),
            "edge_index": torch.randint(0, n, (2, m), generator=g),
        }, torch.randint(0, 3, (n,), generator=g)

    def collate(self, ss):
        xs, es, bs, ys, off = [], [], [], [], 0
        for k, (d, y) in enumerate(ss):
            xs.append(d["x"])
            es.append(d["edge_index"] + off)
            bs.append(torch.full((len(d["x"]),), k))
            ys.append(y)
            off += len(d["x"])
        return {"x": torch.cat(xs), "edge_index": torch.cat(es, 1), "batch": torch.cat(bs)}, torch.cat(ys)


def job(bn: bool = True):
    return plait.Job(
        model=lambda: GNN(bn),
        loss=F.cross_entropy,
        weight=lambda y: len(y),
        data=Graphs,
        optimizer=lambda p: torch.optim.AdamW(p, 5e-3),
        batch=8,
        steps=12,
        evaluate=plait.Evaluate(Graphs, lambda o, y: {"acc": (o.argmax(-1) == y).double()}),
    )
