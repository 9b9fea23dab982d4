"""The jobs of docs/matrix.md: one per model feature, by the name in that document."""

from collections.abc import Callable
from typing import Any

import jobs_context
import jobs_moe
import jobs_pipeline
import jobs_real
import jobs_uncut
import jobs_unlike
from jobs import make
from jobs_unlike import Block, Chain
from torch import Tensor, nn
from torch.nn import functional as F

import plait


class Sometimes(Chain):
    """A block with an extra term for large inputs: batches without any do not use its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = Block()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        large = x[:, :1] > 1.0
        if large.any():
            h = h + self.rare(h) * large
        for block in self.blocks:
            h = block(h)
        return self.last(h)


class Auxiliary(Chain):
    """Returns its output and a loss of its hidden features, one value for each sample."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, auxiliary = self.first(x), 0.0
        for block in self.blocks:
            x = block(x)
            auxiliary = auxiliary + x.square().mean(-1)
        return self.last(x), auxiliary


def auxiliary() -> plait.Job:
    return make(Auxiliary, loss=lambda out, y: F.mse_loss(out[0], y) + 0.1 * out[1].mean())


class Noted(jobs_uncut.Attribute):
    """The same loss; each block stores it in an attribute, and the loss inside the model reads it."""


def mlp() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)]
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 1))


FEATURES: dict[str, Callable[[], Any]] = {
    "plain MLP": lambda: make(mlp),
    "convolutions with batch norm": jobs_real.digits,
    "U-Net skips": jobs_unlike.ALL["unet"],
    "GPT with dropout": lambda: jobs_real.example(
        "stdlib_gpt", depth=2, width=16, heads=2, length=8, dropout=0.1, batch=12
    ),
    "tied head (gpt2)": jobs_real.gpt2,
    "grouped-query attention (llama)": jobs_real.llama,
    "encoder-decoder (t5)": jobs_pipeline.t5,
    "packed nn.MultiheadAttention": jobs_unlike.ALL["multihead"],
    "LSTM": jobs_pipeline.LISTED["recurrent"],
    "frozen parameters": jobs_unlike.ALL["frozen_middle"],
    "parameters used only sometimes": lambda: make(Sometimes),
    "ragged lengths, weighted mean loss": jobs_context.OWN["plain"],
    "auxiliary loss, returned": auxiliary,
    "auxiliary loss, left in attributes": lambda: make(Noted),
    "mixture of experts (mixtral)": jobs_pipeline.mixtral,
    "mixture of experts, balance loss": jobs_moe.gpt,
    "layers dropped by Python's random": jobs_unlike.ALL["layer_drop"],
    "buffers: power iteration, counter": jobs_unlike.ALL["spectral"],
    "scalar parameters": jobs_unlike.ALL["scalars"],
    "the model's own checkpointing": jobs_context.OWN["checkpoint"],
}
