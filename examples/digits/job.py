"""Handwritten digits: a small convolutional network with batch normalization, trained on real images.

    plait train examples/digits/job.py --nproc 2
    plait verify examples/digits/job.py --plan "dp=2"

A complete job in one file: data set, augmentation, model, learning-rate schedule and evaluation. It has no code
for devices or processes. It contains two common sources of silent errors in data-parallel runs on purpose:

* `BatchNorm2d` computes its statistics from the batch, so on two devices they must include both halves;
* the augmentation draws from torch's global generator, so each image must get the same shift in every
  process (plait seeds the generator for every seed, epoch and sample).

The 1797 images have 8 by 8 pixels and are next to this file (`DATA.md` names their source); every fifth
is a test image. Any argument of `job` can be set from the command line, as in `--job.width 8`.
"""

from math import cos, pi
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import Dataset

import plait

BATCH = 64  # samples per optimizer step, over all devices


class Digits(Dataset[tuple[Tensor, int]]):
    """Images [1, 8, 8] with values from 0 to 1, and their labels 0 to 9."""

    def __init__(self, split: str, augment: bool) -> None:
        rows = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), delimiter=",", dtype=np.int64)
        held_out = np.arange(len(rows)) % 5 == 0
        rows = rows[{"train": ~held_out, "test": held_out}[split]]
        self.images = torch.from_numpy(rows[:, :64]).reshape(-1, 1, 8, 8).float() / 16
        self.labels: list[int] = rows[:, 64].tolist()
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.augment:  # shift by up to one pixel each way
            top, left = torch.randint(3, (2,)).tolist()
            image = pad(image, (1, 1, 1, 1))[:, top : top + 8, left : left + 8]
        return image, self.labels[index]


def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class CNN(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            block(1, width, stride=1),  # 8 by 8 pixels
            block(width, 2 * width, stride=2),  # 4 by 4
            block(2 * width, 4 * width, stride=2),  # 2 by 2
        )
        self.head = nn.Linear(4 * width * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(images).flatten(1))
        return scores


def metrics(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """One value per sample; plait reports their exact mean over the evaluation set."""
    return {
        "accuracy": (outputs.argmax(-1) == targets).double(),
        "loss": cross_entropy(outputs, targets, reduction="none"),
    }


def job(width: int = 16, lr: float = 3e-3, augment: bool = True, steps: int = 300) -> plait.Job:
    def half_cosine(samples: int) -> float:
        """From 1 at the start down to 0 at the last step."""
        return (1 + cos(pi * min(1.0, samples / (steps * BATCH)))) / 2

    return plait.Job(
        model=lambda: CNN(width),
        loss=cross_entropy,
        data=lambda: Digits("train", augment),
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr, fused=True),
        batch=BATCH,
        steps=steps,
        schedule=half_cosine,
        clip=1.0,
        seed=0,
        evaluate=plait.Evaluate(data=lambda: Digits("test", augment=False), metrics=metrics, every=100),
    )
