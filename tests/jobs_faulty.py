"""Jobs for fault injection: small and deterministic, with names that identify a place."""

import jobs_moe
import torch
from jobs import Numbers, Tokens, make
from torch import Tensor, nn
from torch.nn import functional as F

import plait

WIDTH = 8


class Net(nn.Module):
    """Three linear maps. Sizes differ, so that each parameter is identified by its shape."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(6, 9), nn.Linear(9, 7), nn.Linear(7, 1)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.mid(self.first(x).tanh()).tanh()))


def net() -> plait.Job:
    return make(Net)


def momentum() -> plait.Job:
    return make(Net, optimizer=lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9))


def dropping() -> plait.Job:
    return make(lambda: Net(0.3))


def augmented() -> plait.Job:
    return make(Net, lambda: Numbers(augment=True))


class Normal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 9), nn.BatchNorm1d(9, momentum=0.2), nn.Linear(9, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


def normal() -> plait.Job:
    return make(Normal)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (m(h).unflatten(-1, (2, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Text(nn.Module):
    """An embedding, three blocks, a norm, and a head that is tied to the embedding or not."""

    def __init__(self, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 17, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class Whole(Tokens):
    """Each token has a weight."""

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.x[i].roll(-1)


def next_word(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text() -> plait.Job:
    return make(lambda: Text(), Whole, next_word)


def untied() -> plait.Job:
    return make(lambda: Text(False), Whole, next_word)


def text_dropping() -> plait.Job:
    return make(lambda: Text(dropout=0.2), Whole, next_word)


def mixture() -> plait.Job:
    return jobs_moe.gpt(loss=jobs_moe.plain_loss, dropout=0.0)


def weighted() -> plait.Job:
    """The number of tokens with a weight differs between samples."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)

    return make(lambda: Text(), Tokens, loss, weight=lambda t: (t != -100).sum())
