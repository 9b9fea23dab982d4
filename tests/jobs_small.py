"""Small, different jobs whose dry run is compared with a measured step: a transformer, an LSTM, convolutions."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait import Job

WIDTH, LENGTH, BATCH = 64, 32, 10


class Tokens:
    def __len__(self) -> int:
        return 4 * BATCH

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        row = torch.arange(LENGTH + 1) * (i + 3) % 97
        return row[:-1], row[1:]


class Images(Tokens):
    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.full((3, 16, 16), i / 10), torch.tensor(i % 10)


class Block(nn.Module):
    """A transformer block with dropout. x: [batch, length, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + F.dropout(self.mlp(x), 0.1, self.training)


class Transformer(nn.Module):
    """A transformer with a tied head and its own position table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(97, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, 97, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(97, WIDTH), nn.LSTM(WIDTH, WIDTH, 2), nn.Linear(WIDTH, 97)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0])


def convolutions() -> nn.Module:
    sizes = ((3, 16), (16, 32), (32, 64))
    blocks = (
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)) for a, b in sizes
    )
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(256, 10))


def language(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def job(name: str) -> Job:
    adam = lambda p: torch.optim.AdamW(p, lr=1e-3)  # noqa: E731
    momentum = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    if name == "cnn":
        return Job(model=convolutions, loss=F.cross_entropy, data=Images, optimizer=momentum, batch=BATCH, steps=9)
    model = {"transformer": Transformer, "lstm": Lstm}[name]
    return Job(model=model, loss=language, data=Tokens, optimizer=adam, batch=BATCH, steps=9, clip=1.0)
