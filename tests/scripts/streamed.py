"""Rows without indices: an IterableDataset whose rows the ranks take in turn, or no DataLoader (`--bare`). `--spawn 2` starts ranks itself."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

options = argparse.ArgumentParser()
options.add_argument("--batch-size", type=int, default=16)
options.add_argument("--bare", action="store_true")
options.add_argument("--keywords", action="store_true", help="the model is called by keywords alone")
options.add_argument("--spawn", type=int, default=0)
options.add_argument("--port", default="29517")
options.add_argument("--gan", action="store_true", help="a second model, with an optimizer of its own")
options.add_argument("--wrong", default="", choices=("", "all"))
points = torch.randn(160, 6, generator=torch.Generator().manual_seed(0))
targets = (points.sum(1) > 0).float()[:, None]


class Stream(IterableDataset):
    """Every n-th row."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rows = range(rank, 160, ranks)

    def __iter__(self):
        return iter((points[i], targets[i]) for i in self.rows)


def train(rank: int, ranks: int, given: argparse.Namespace) -> None:
    """Train on one rank."""
    if ranks > 1:
        if given.spawn:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=given.port)
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, size)) for size in (1, 6)]
    models = [nn.parallel.DistributedDataParallel(model) for model in models[: 1 + given.gan]] if ranks > 1 else models[: 1 + given.gan]
    optimizers = [torch.optim.Adam(model.parameters(), 0.01) for model in models]
    part = (0, 1) if given.wrong else (rank, ranks)
    size = given.batch_size * part[1]
    bare = ((points[k : k + size][part[0] :: part[1]], targets[k : k + size][part[0] :: part[1]]) for k in range(0, 160, size))
    for x, y in bare if given.bare else DataLoader(Stream(*part), given.batch_size):
        for k, optimizer in enumerate(optimizers):
            made = models[1](x) if given.gan else x
            rows = made if k else made.detach()
            logits = models[0](input=rows) if given.keywords else models[0](rows)
            loss = logits.square().mean() if k else F.binary_cross_entropy_with_logits(logits, y)
            for each in optimizers:
                each.zero_grad()
            loss.backward()
            optimizer.step()
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    given = options.parse_args()
    if given.spawn:
        mp.spawn(train, (given.spawn, given), given.spawn)
    else:
        train(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), given)
