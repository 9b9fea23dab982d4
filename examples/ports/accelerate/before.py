"""A loop with Accelerate, groups of parameters and a scheduler:  accelerate launch examples/ports/accelerate/before.py"""

import math
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

SAMPLES, BATCH, EPOCHS, CLIP = 80, 16, 3, 1.0


def waves(count: int) -> tuple[Tensor, Tensor]:
    """Points on a line, and the value of a wave at each."""
    x = torch.linspace(-3, 3, count).unsqueeze(1)
    return x, torch.sin(2 * x) + 0.3 * x


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, nn.Module, torch.optim.lr_scheduler.LRScheduler]:
    """Model, optimizer, data loader, loss and scheduler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    matrices, rest = ([p for p in model.parameters() if (p.ndim > 1) == many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    dataloader = DataLoader(TensorDataset(*waves(SAMPLES)), BATCH, shuffle=True)
    total = EPOCHS * len(dataloader)
    cosine = lambda step: 0.5 * (1 + math.cos(math.pi * step / total))  # noqa: E731
    return model, optimizer, dataloader, nn.MSELoss(), torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)


def main(order: Sequence[int] | None = None) -> list[float]:
    """Return the loss of each step. `order`: sample indices, instead of a random order."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, dataloader, criterion, scheduler = parts()
    if order is not None:
        dataloader = DataLoader(Subset(dataloader.dataset, list(order)), BATCH)
    model, optimizer, dataloader, scheduler = accelerator.prepare(model, optimizer, dataloader, scheduler)
    losses = []
    for _ in range(EPOCHS):
        for x, y in dataloader:
            loss = criterion(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(main())
