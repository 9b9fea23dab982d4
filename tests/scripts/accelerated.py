"""Accelerate. `--wrong NAME` makes a mistake."""

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

options = argparse.ArgumentParser()
options.add_argument("--batch-size", type=int, default=16)
options.add_argument("--accumulation", type=int, default=1)
options.add_argument("--wrong", default="", choices=("", "accumulation", "tokens", "scheduler", "times-ranks"))
options.add_argument("--tokens", action="store_true", help="some labels do not count")
options.add_argument("--dispatch", action="store_true", help="rank 0 reads for all")
options.add_argument("--losses", default="")
given = options.parse_args()
own = given.wrong == "accumulation"
loaders = DataLoaderConfiguration(dispatch_batches=True) if given.dispatch else None
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1 if own else given.accumulation, dataloader_config=loaders)
set_seed(3)
points = torch.randn(170, 10)
targets = (points[:, :5].sum(1) > 0).long()
if given.tokens:
    targets[torch.rand(170) < 0.35] = -100
model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Dropout(0.1), nn.Linear(20, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(points, targets), given.batch_size, shuffle=True))
if given.wrong == "scheduler":
    schedule = accelerator.prepare(schedule)
for _ in range(3):
    for i, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss * accelerator.num_processes if given.wrong == "times-ranks" else loss)
            if own and (i + 1) % given.accumulation:
                continue
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                schedule.step()
        if given.losses and accelerator.is_main_process:
            print(loss.item().hex(), file=open(given.losses, "a"))  # noqa: SIM115
accelerator.end_training()
