"""Direct preference optimization as a plait job: the policy and the frozen reference are one model. One loss, no phases."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import plait

WORDS, LENGTH, BETA, BATCH, STEPS = 16, 8, 0.1, 8, 20


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(32, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], dtype=self.head.weight.dtype)
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)


def likelihood(model: nn.Module, words: Tensor) -> Tensor:
    """Log probability of each row of tokens, given its first token."""
    told = model(words[:, :-1]).log_softmax(-1)
    return told.gather(-1, words[:, 1:, None]).squeeze(-1).sum(-1)


class Pairs(Dataset[tuple[tuple[Tensor, Tensor], int]]):
    """Preferred answers, which count upwards, and others."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        first = torch.randint(WORDS, (128, 1), generator=draw)
        self.chosen = (first + torch.arange(LENGTH)) % WORDS
        self.rejected = torch.randint(WORDS, (128, LENGTH), generator=draw)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, i: int) -> tuple[tuple[Tensor, Tensor], int]:
        return (self.chosen[i], self.rejected[i]), 0


class Preference(nn.Module):
    """The preference of the policy for the chosen over the rejected answer, minus that of the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = LanguageModel()
        self.reference = copy.deepcopy(self.policy).eval().requires_grad_(False)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        both = torch.cat([chosen[:, None], rejected[:, None]], 1).flatten(0, 1)  # rows of a sample stay adjacent
        with torch.no_grad():
            before = likelihood(self.reference, both).view(-1, 2)
        now = likelihood(self.policy, both).view(-1, 2)
        return (now - before)[:, 0] - (now - before)[:, 1]


def job() -> plait.Job:
    return plait.Job(
        model=Preference,
        loss=lambda margin, _: -F.logsigmoid(BETA * margin).mean(),
        data=Pairs,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch=BATCH,
        steps=STEPS,
    )
