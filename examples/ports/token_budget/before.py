"""Sentences of unequal length in plain PyTorch on one device, grouped by length in batches of at most 256 tokens.

python examples/ports/token_budget/before.py
"""

from collections.abc import Iterator
from itertools import count, islice

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

WORDS, TOKENS, MOST = 40, 256, 32


class Sentences(Dataset):
    """Rows of 4 to 40 tokens. Each token is the previous one times 3 plus 1, which a model can learn."""

    def __init__(self, n: int = 400):
        lengths = torch.randint(4, 41, (n,), generator=torch.Generator().manual_seed(1)).tolist()
        self.rows = [
            [(i * 3**k + (3**k - 1) // 2) % WORDS for k in range(length + 1)] for i, length in enumerate(lengths)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        row = torch.tensor(self.rows[i])
        return row[:-1], row[1:]

    def lengths(self) -> list[int]:
        return [len(row) - 1 for row in self.rows]


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Pad to the longest, with token 0 and target -100."""
    inputs, targets = zip(*samples)
    return pad_sequence(inputs, True, 0), pad_sequence(targets, True, -100)


def grouped(epoch: int, lengths: list[int]) -> list[int]:
    """A permutation, sorted by length in groups of 100."""
    shuffled = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(epoch)).tolist()
    stretches = [shuffled[i : i + 100] for i in range(0, len(shuffled), 100)]
    return [i for stretch in stretches for i in sorted(stretch, key=lambda i: -lengths[i])]


class TokenBatches:
    """A batch sampler: takes the next samples of the order while the padded batch has at most `TOKENS` tokens."""

    def __init__(self, lengths: list[int]):
        self.lengths = lengths

    def __iter__(self) -> Iterator[list[int]]:
        for epoch in count():
            batch: list[int] = []
            for i in grouped(epoch, self.lengths):
                longest = max(self.lengths[j] for j in [*batch, i])
                if batch and (longest * (len(batch) + 1) > TOKENS or len(batch) == MOST):
                    yield batch
                    batch = []
                batch.append(i)
            yield batch


class Model(nn.Module):
    """[batch, length] tokens -> [batch, length, words] logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(WORDS, 24), nn.Linear(24, 24), nn.Linear(24, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(tokens)).relu())


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens except padding."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def main(steps: int = 60) -> list[float]:
    torch.manual_seed(0)
    data, model = Sentences(), Model()
    loader = DataLoader(data, batch_sampler=TokenBatches(data.lengths()), collate_fn=padded)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for inputs, targets in islice(loader, steps):
        value = loss(model(inputs), targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


if __name__ == "__main__":
    for step, value in enumerate(main(), 1):
        print(step, f"{value:.5f}")
