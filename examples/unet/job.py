"""A small U-Net that removes noise from handwritten digits, with skip connections from the encoder to the decoder.

    plait train  examples/unet/job.py --nproc 2
    plait sketch examples/unet/job.py

The images are those of examples/digits. The job has no code for devices or processes.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, max_pool2d, mse_loss
from torch.utils.data import Dataset

import plait


class NoisyDigits(Dataset[tuple[Tensor, Tensor]]):
    """Images [1, 8, 8] with noise, drawn anew each time, and the same images without."""

    def __init__(self, noise: float) -> None:
        rows = np.loadtxt(Path(__file__).parents[1] / "digits" / "digits.csv.gz", delimiter=",", dtype=np.int64)
        self.images = torch.from_numpy(rows[:, :64]).reshape(-1, 1, 8, 8).float() / 16
        self.noise = noise

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        return image + self.noise * torch.randn_like(image), image


def double(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions, each with a norm over groups of channels."""
    parts: list[nn.Module] = []
    for channels in (inputs, outputs):
        parts += [nn.Conv2d(channels, outputs, kernel_size=3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()]
    return nn.Sequential(*parts)


class UNet(nn.Module):
    """x: [batch, 1, 8, 8]. Every level down halves the image and doubles the channels; every level up does the reverse."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(double(a, b) for a, b in zip([1, *sizes], sizes[:-1]))
        self.middle = double(sizes[-2], sizes[-1])
        self.up = nn.ModuleList(double(a + b, a) for a, b in zip(sizes[-2::-1], sizes[:0:-1]))
        self.out = nn.Conv2d(width, 1, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for down in self.down:
            skips.append(down(x))
            x = max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for up in self.up:
            x = up(torch.cat([skips.pop(), interpolate(x, scale_factor=2.0)], dim=1))
        return self.out(x)


def job(
    width: int = 16, levels: int = 2, noise: float = 0.3, lr: float = 2e-3, batch: int = 32, steps: int = 300
) -> plait.Job:
    """The arguments become ``--job.width 32``."""
    return plait.Job(
        model=lambda: UNet(width, levels),
        loss=mse_loss,
        data=lambda: NoisyDigits(noise),
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr, fused=True),
        batch=batch,
        steps=steps,
    )
