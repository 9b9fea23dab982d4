"""Jobs with dynamic padding: `collate` pads to the longest sample in its input, the default in fine-tuning."""

from typing import Any

import torch
from jobs import make
from torch import Tensor, nn
from torch.nn import functional as F

import plait

WORDS, WIDTH = 17, 8


class Sentences:
    """Sequences of 3 to 14 tokens; 0 is padding, and the target of a padded position is −100."""

    def __init__(self, n: int = 48, side: str = "right", multiple: int = 1):
        g = torch.Generator().manual_seed(5)
        lengths = torch.randint(3, 15, (n,), generator=g).tolist()
        self.rows = [torch.randint(1, WORDS, (length,), generator=g) for length in lengths]
        self.side, self.multiple = side, multiple

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        return {"ids": self.rows[i].tolist(), "labels": self.rows[i].roll(-1).tolist()}

    def padded(self, rows: list[list[int]], value: int) -> Tensor:
        longest = -(-max(map(len, rows)) // self.multiple) * self.multiple
        add = [[value] * (longest - len(row)) for row in rows]
        return torch.tensor([a + r if self.side == "left" else r + a for r, a in zip(rows, add)])

    def collate(self, samples: list[dict[str, list[int]]]) -> tuple[Any, Tensor]:
        ids = self.padded([s["ids"] for s in samples], 0)
        return {"ids": ids, "mask": ids != 0}, self.padded([s["labels"] for s in samples], -100)


class Pairs(Sentences):
    """Two sequences, each padded to its own length: the longest sample of one is not the longest of the other."""

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        other = self.rows[(7 * i + 3) % len(self.rows)].tolist()
        return {"ids": self.rows[i].tolist(), "labels": other}


class Streamed:
    """The same data as an iterable."""

    def __init__(self) -> None:
        self.rows = Sentences()
        self.collate = self.rows.collate

    def __iter__(self) -> Any:
        return (self.rows[i] for i in range(len(self.rows)))


class Tagger(nn.Module):
    """Attention over the tokens that are not padding, and dropout. ids, mask: [batch, length]; out: [batch, length, words]."""

    def __init__(self, dropout: float = 0.2, blocks: int = 2, masked: bool = True):
        super().__init__()
        self.embed, self.masked = nn.Embedding(WORDS, WIDTH), masked
        self.blocks = nn.ModuleList(Attending(dropout) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask if self.masked else torch.ones_like(mask))
        return self.head(x)


class Attending(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(self.up(x).relu()))


class Pooled(nn.Module):
    """A mean over all positions, including padding: padding changes the result."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.embed(ids).mean(1))


def per_token(out: Tensor, labels: Tensor) -> Tensor:
    length = min(out.shape[1], labels.shape[1])
    return F.cross_entropy(out[:, :length].flatten(0, 1), labels[:, :length].flatten(), ignore_index=-100)


def counted(labels: Tensor) -> Tensor:
    return (labels != -100).sum()


def tagger(data: Any = Sentences, **settings: Any) -> plait.Job:
    model = settings.pop("model", lambda: Tagger(**settings))
    return make(model, data=data, loss=per_token, weight=counted, batch=12)


def pooled() -> plait.Job:
    loss = lambda out, labels: F.mse_loss(out, labels[:, :1].float())  # noqa: E731
    return make(Pooled, data=Sentences, loss=loss, batch=12)


def each(out: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The size of each sample's output, over all positions."""
    return {"size": out.double().square().flatten(1).mean(1)}
