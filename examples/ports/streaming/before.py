"""A stream of samples, shuffled in a buffer, in plain PyTorch on one device.

python examples/ports/streaming/before.py
"""

import math
import random
from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset

LENGTH, BUFFER = 300, 32


class Stream(IterableDataset):
    """x [4] and y [1], read in sequence, as from files that are larger than memory; the first epoch is 0."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def records(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(LENGTH):
            x = torch.tensor([math.sin(i * k) for k in (1, 2, 3, 5)])
            yield x, x.sum(0, keepdim=True).tanh()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        draw, buffer = random.Random(self.epoch), []
        for record in self.records():
            buffer.append(record)
            if len(buffer) == BUFFER:
                yield buffer.pop(draw.randrange(BUFFER))
        draw.shuffle(buffer)
        yield from buffer


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def batches(stream: Stream) -> Iterator[tuple[Tensor, Tensor]]:
    """Epoch after epoch."""
    while True:
        yield from DataLoader(stream, batch_size=16)
        stream.set_epoch(stream.epoch + 1)


def main(steps: int = 30) -> list[float]:
    torch.manual_seed(0)
    model = make_model()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for x, y in islice(batches(Stream()), steps):
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for step, loss in enumerate(main(), 1):
        print(step, f"{loss:.5f}")
