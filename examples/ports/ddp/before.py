"""A typical DistributedDataParallel script: sampler, accumulation, clipping, warm-up and cosine, checkpoints.

torchrun --nproc-per-node 2 examples/ports/ddp/before.py
"""

import math
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS, BATCH, ACCUMULATE, LR, WARMUP, CLIP, SEED = 3, 8, 2, 3e-3, 10, 1.0, 0
"""BATCH is the size of one rank's micro-batch; a step has BATCH × ACCUMULATE × ranks samples."""


class Letters(Dataset):
    """Sequences of 16 letters; the class is the most frequent letter."""

    def __init__(self, count: int = 1024):
        generator = torch.Generator().manual_seed(1)
        self.letters = torch.randint(0, 8, (count, 16), generator=generator)

    def __len__(self) -> int:
        return len(self.letters)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.letters[i], self.letters[i].bincount(minlength=8).argmax()


class Classifier(nn.Module):
    """An embedding, an encoder layer and a linear layer on the mean."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.embed = nn.Embedding(8, width)
        self.encoder = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 8)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(letters)).mean(1))


def factor(step: int, steps: int) -> float:
    """Factor of the learning rate: WARMUP steps of linear warm-up, then cosine decay to zero."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1.0 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP)))


def main(folder: str) -> None:
    """Train as one rank."""
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(SEED)
    model = DistributedDataParallel(Classifier().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    data = Letters()
    sampler = DistributedSampler(data, shuffle=True, seed=SEED)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, drop_last=True)
    steps = EPOCHS * (len(loader) // ACCUMULATE)
    scheduler = LambdaLR(optimizer, lambda step: factor(step, steps))
    step, total = 0, torch.zeros((), device=device)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for i, (letters, targets) in enumerate(loader):
            last = (i + 1) % ACCUMULATE == 0
            with nullcontext() if last else model.no_sync():
                loss = cross_entropy(model(letters.to(device)), targets.to(device)) / ACCUMULATE
                loss.backward()
            total += loss.detach()
            if not last:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step} loss {total.item() / world:.9f}", flush=True)
            total.zero_()
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, os.path.join(folder, "checkpoint.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
