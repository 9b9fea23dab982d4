"""The data and the model of before.py and of job.py: images of stripes, mixup of them, and a tiny vision transformer."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import ViTConfig, ViTForImageClassification

CLASSES, STEPS, BATCH = 4, 60, 32


class Stripes(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Images [1, 8, 8] of stripes in four directions under noise, and their class."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(count) % CLASSES
        angles, phase = self.labels * math.pi / CLASSES, torch.rand(count, generator=draw) * 2 * math.pi
        y, x = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
        across = torch.cos(angles)[:, None, None] * x + torch.sin(angles)[:, None, None] * y
        noise = 0.3 * torch.randn(count, 8, 8, generator=draw)
        self.images = (torch.sin(1.5 * across + phase[:, None, None]) + noise)[:, None]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"pixel_values": self.images[index]}, self.labels[index]


class Mixup(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Mix each sample with a random other one, with its class as probabilities (Zhang et al. 2018)."""

    def __init__(self, data: Stripes, alpha: float = 0.2) -> None:
        self.data, self.alpha = data, alpha

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        other = int(torch.randint(len(self.data), ()))
        part = torch.distributions.Beta(self.alpha, self.alpha).sample()
        (one, mine), (two, theirs) = self.data[index], self.data[other]
        image = part * one["pixel_values"] + (1 - part) * two["pixel_values"]
        classes = F.one_hot(torch.stack([mine, theirs]), CLASSES).float()
        return {"pixel_values": image}, part * classes[0] + (1 - part) * classes[1]


def vit() -> ViTForImageClassification:
    """A tiny vision transformer: patches of 2 × 2, two layers."""
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, num_labels=CLASSES,
    )  # fmt: skip
    return ViTForImageClassification(config)
