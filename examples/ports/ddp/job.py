"""The script `before.py` as a job. The plan and plait replace ranks, sampler, accumulation and checkpoints.

plait train examples/ports/ddp/job.py --plan "dp=2 microbatches=2"
"""

import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import plait

EPOCHS, BATCH, LR, WARMUP, CLIP, SEED = 3, 32, 3e-3, 10, 1.0, 0
"""BATCH is the global batch: micro-batches of 8, two of them accumulated, on two ranks."""


class Letters:
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


def shuffled(seed: int, epoch: int, length: int) -> torch.Tensor:
    """The order of `DistributedSampler`: its ranks together use the next samples of this order in each step."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch))


def job() -> plait.Job:
    """Warm-up and cosine are functions of the samples seen, so they do not depend on the batch or the number of ranks."""
    steps = EPOCHS * (1024 // BATCH)

    def factor(samples: int) -> float:
        step = samples // BATCH
        if step < WARMUP:
            return (step + 1) / WARMUP
        return 0.5 * (1.0 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP)))

    return plait.Job(
        model=Classifier,
        loss=cross_entropy,
        data=Letters,
        order=shuffled,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LR),
        schedule=factor,
        clip=CLIP,
        batch=BATCH,
        steps=steps,
        seed=SEED,
    )
