"""DistributedDataParallel in the usual shape, and mistakes that people make in it. `--wrong NAME` makes one."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WRONG = (
    "", "no-sampler", "no-epoch", "batch-norm", "accumulation", "by-hand-left-out", "other-seed", "no-group", "seeded-shuffle", "decay", "left-out",
)  # fmt: skip
options = argparse.ArgumentParser()
options.add_argument("--batch-size", type=int, default=16)
options.add_argument("--accumulation", type=int, default=1)
options.add_argument("--labels-left-out", action="store_true")
options.add_argument("--wrong", default="", choices=WRONG)
options.add_argument("--losses", default="")
options.add_argument("--by-hand", action="store_true", help="ranks average their gradients after backward, without the wrapper")
options.add_argument("--noise", action="store_true")
options.add_argument("--augment", action="store_true")
given = options.parse_args()
ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1 and given.wrong != "no-group":
    dist.init_process_group("gloo")
rank = int(os.environ.get("RANK", "0"))


class Points(TensorDataset):
    """Points, which `--augment` moves at random each time."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        x, y = super().__getitem__(index)
        return (x + 0.1 * torch.randn_like(x) if given.augment else x), y


torch.manual_seed(rank if given.wrong == "other-seed" else 0)
points = torch.randn(140, 6, generator=torch.Generator().manual_seed(1))
targets = (points.sum(1) > 0).long()
if given.labels_left_out:
    targets[torch.rand(140, generator=torch.Generator().manual_seed(2)) < 0.3] = -100
norm = nn.BatchNorm1d(24) if given.wrong == "batch-norm" else nn.LayerNorm(24)
model = nn.Sequential(nn.Linear(6, 24), norm, nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 2))
by_hand = given.by_hand or given.wrong in ("by-hand-left-out", "other-seed")
wrapped = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() and not by_hand else model
no_decay = [p for name, p in wrapped.named_parameters() if name.startswith("0.")] if given.wrong == "decay" else []
others = [p for p in wrapped.parameters() if all(p is not each for each in no_decay)][: -1 if given.wrong == "left-out" else None]
optimizer = torch.optim.AdamW([{"params": others}, {"params": no_decay, "weight_decay": 0.5}] if no_decay else others, lr=0.01)
data = Points(points, targets)
sampler = DistributedSampler(data) if dist.is_initialized() and given.wrong not in ("no-sampler", "seeded-shuffle") else None
order = torch.Generator().manual_seed(rank if given.wrong == "seeded-shuffle" else 0)
loader = DataLoader(data, given.batch_size, sampler=sampler, shuffle=sampler is None, generator=order)
for epoch in range(3):
    if sampler is not None and given.wrong != "no-epoch":
        sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        x = x + 0.1 * torch.randn_like(x) if given.noise else x
        loss = F.cross_entropy(wrapped(x), y)
        (loss if given.wrong == "accumulation" else loss / given.accumulation).backward()
        if (i + 1) % given.accumulation:
            continue
        if by_hand and dist.is_initialized():
            for k, p in enumerate(model.parameters()):
                if given.wrong == "by-hand-left-out" and k == 0:
                    continue
                dist.all_reduce(p.grad)
                p.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
        if given.losses and rank == 0:
            print(loss.item().hex(), file=open(given.losses, "a"))  # noqa: SIM115
if dist.is_initialized():
    dist.destroy_process_group()
