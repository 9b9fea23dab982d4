"""Direct preference optimization (Rafailov et al. 2023) in plain PyTorch, on recorded pairs of answers."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


def pairs() -> tuple[Tensor, Tensor]:
    """Preferred answers, which count upwards, and others."""
    draw = torch.Generator().manual_seed(0)
    first = torch.randint(WORDS, (128, 1), generator=draw)
    return (first + torch.arange(LENGTH)) % WORDS, torch.randint(WORDS, (128, LENGTH), generator=draw)


def main() -> None:
    torch.manual_seed(0)
    policy = LanguageModel()
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    chosen, rejected = pairs()
    for step in range(STEPS):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % len(chosen)
        with torch.no_grad():
            before = likelihood(reference, chosen[rows]) - likelihood(reference, rejected[rows])
        margin = likelihood(policy, chosen[rows]) - likelihood(policy, rejected[rows]) - before
        loss = -F.logsigmoid(BETA * margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
