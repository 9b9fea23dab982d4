"""Jobs with parameters of unusual sizes and formats: without dims, of one element, without elements, of ints and bools."""

from dataclasses import replace

import jobs_moe
import torch
from jobs import Tokens, language_loss, make
from jobs_context import WIDTH, Attention, Model
from torch import Tensor, nn

import plait


class Gain(nn.Module):
    """A gain without dims, one of one element, and parameters without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.tensor(1.1)), nn.Parameter(torch.tensor([0.1]))
        self.cold = nn.Parameter(torch.tensor(0.9), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.steps = nn.Parameter(torch.tensor([3, 1]), requires_grad=False)
        self.level = nn.Parameter(torch.tensor(2), requires_grad=False)
        self.on = nn.Parameter(torch.tensor([True, False]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rest = self.nothing.sum() + self.steps[self.on].sum() / self.level
        return x * self.gain * self.cold + self.shift + 0.01 * rest


def gpt() -> plait.Job:
    """Blocks with attention, and a gain after each block's MLP."""
    inner = lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH), Gain())  # noqa: E731
    return make(lambda: Model(lambda: Attention(inner())), Tokens, language_loss, weight=lambda t: (t != -100).sum())


def mixture() -> plait.Job:
    """A GPT of mixtures of experts, with a gain after each expert."""
    job = jobs_moe.gpt()

    def model() -> nn.Module:
        made = job.model()
        for block in made.blocks:
            block.moe.experts = nn.ModuleList(nn.Sequential(e, Gain()) for e in block.moe.experts)
        return made

    return replace(job, model=model)
