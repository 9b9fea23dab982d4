"""Models and losses that depend on memory layout: `view`, contiguous inputs, channels-last images, time-first batches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait

WIDTH, WORDS, LENGTH = 16, 19, 12


class Texts:
    """Rows of words; the targets are the next words."""

    def __init__(self, dtype: torch.dtype = torch.int64):
        self.rows = torch.randint(0, WORDS, (48, LENGTH + 1), generator=torch.Generator().manual_seed(3)).to(dtype)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Any, Tensor]:
        return self.rows[i, :-1], self.rows[i, 1:].long()


class WithTargets(Texts):
    """The model's input is a dict that includes the targets."""

    def __getitem__(self, i: int) -> tuple[Any, Tensor]:
        ids, targets = super().__getitem__(i)
        return {"ids": ids, "targets": targets}, targets


class TimeFirst(Texts):
    """Texts of different lengths, padded and collated as [length, samples]."""

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        length = 6 + i % 7
        return self.rows[i, :length], self.rows[i, 1 : length + 1]

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        length = max(len(ids) for ids, _ in samples)
        ids, targets = torch.zeros(length, len(samples), dtype=torch.long), torch.full((length, len(samples)), -100)
        for k, (one, other) in enumerate(samples):
            ids[: len(one), k], targets[: len(other), k] = one, other
        return ids, targets


class Pictures:
    """Images, collated in channels-last format."""

    def __init__(self) -> None:
        self.pictures = torch.randn(48, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.pictures[i], i % 3

    def collate(self, samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        pictures = torch.stack([picture for picture, _ in samples]).contiguous(memory_format=torch.channels_last)
        return pictures, torch.tensor([target for _, target in samples])


class Block(nn.Module):
    """Attention and a linear layer that reshape their input by `view`."""

    def __init__(self, causal: bool = True):
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), causal

    def forward(self, h: Tensor) -> Tensor:
        b, t, c = h.shape
        qkv = self.qkv(h.view(b * t, c)).view(b, t, 3 * c)
        q, k, v = (part.view(b, t, 2, c // 2).transpose(1, 2) for part in qkv.split(c, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return h + self.out(mixed.transpose(1, 2).flatten(2))


class Language(nn.Module):
    """The loss is computed in forward, as in many scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(h)
        return logits, F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))


class Flat(nn.Module):
    """Embeds all words of a batch as one row; requires contiguous 32-bit words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        assert ids.is_contiguous() and ids.dtype is torch.int32
        h = self.embed(ids.view(-1)).view(*ids.shape, WIDTH)
        h = h + torch.arange(ids.shape[1]).div(LENGTH)[None, :, None]
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Patches(nn.Module):
    """Patches of channels-last images and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, WIDTH, 2, 2).to(memory_format=torch.channels_last)
        self.token, self.head = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList([Block(causal=False), Block(causal=False)])

    def forward(self, pictures: Tensor) -> Tensor:
        assert pictures.is_contiguous(memory_format=torch.channels_last)
        h = self.cut(pictures).flatten(2).transpose(1, 2).contiguous()
        h = torch.cat([self.token.expand(len(h), -1, -1), h], 1)
        for block in self.blocks:
            h = block(h)
        return self.head(h[:, 0])


class Recurrent(nn.Module):
    """Reads time-first batches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rows, self.head = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rows(self.embed(ids.view(-1)).view(*ids.shape, WIDTH))[0])


class Filter(nn.Module):
    """A convolution that takes [samples, length, width] and returns it with the width outermost in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        b, t, c = h.shape
        flat = h.transpose(1, 2).view(b, c * t)
        return h + self.inner(flat.view(b, c, t)).relu().transpose(1, 2)


class Filters(nn.Module):
    """Units that return tensors transposed in memory and require this layout; so does the code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.filters = nn.ModuleList([Filter() for _ in range(4)])

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids).transpose(1, 2).contiguous().transpose(1, 2)
        for each in self.filters:
            h = each(h)
            h = h + h.transpose(1, 2).view(len(h), -1).mean(1)[:, None, None]
        return self.head(h)


class Stages(nn.Module):
    """Convolutions that return channels-last images and require them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList([Convolution() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 3)
        self.to(memory_format=torch.channels_last)

    def forward(self, pictures: Tensor) -> Tensor:
        h = self.first(pictures)
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean((2, 3)))


class Convolution(nn.Module):
    """A convolution that accepts channels-last images only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        assert h.is_contiguous(memory_format=torch.channels_last)
        return h + self.inner(h).relu()


def _words(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, WORDS), targets.view(-1), ignore_index=-100)


def _inner(outputs: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
    return outputs[1]


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[..., Tensor]]] = {
    "loss_in_forward": (Language, WithTargets, _inner),
    "flat_words": (Flat, lambda: Texts(torch.int32), _words),
    "patches": (Patches, Pictures, F.cross_entropy),
    "time_first": (Recurrent, TimeFirst, _words),
    "transposed": (Filters, Texts, _words),
    "channels_last": (Stages, Pictures, F.cross_entropy),
}


def job(kind: str = "loss_in_forward") -> plait.Job:
    """Return one of `KINDS`."""
    model, data, loss = KINDS[kind]
    weight = (lambda targets: (targets != -100).sum()) if kind == "time_first" else None
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731
    return plait.Job(model=model, loss=loss, data=data, weight=weight, batch=8, steps=4, optimizer=optimizer)
