"""Samples, batches and their order."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from trackers.samples import Chain, Images, Ragged, Rows, generator, made


@dataclass
class Graph:
    """Nodes of all samples in one row, and the sample of each."""

    nodes: Tensor
    owner: Tensor
    size: int


class _Graphs(Rows):
    def __getitem__(self, i: int) -> Any:
        nodes = torch.randn(2 + i % 4, 6, generator=generator(i))
        return nodes, nodes.mean(0)[:4].argmax()

    def collate(self, samples: list[Any]) -> Any:
        owner = torch.cat([torch.full((len(n),), k) for k, (n, _) in enumerate(samples)])
        graph = Graph(torch.cat([n for n, _ in samples]), owner, len(samples))
        return {"graph": graph}, torch.stack([y for _, y in samples])


class _OfGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = Chain(outputs=8), nn.Linear(8, 4)

    def forward(self, graph: Graph) -> Tensor:
        h = self.body(graph.nodes)
        return self.last(torch.zeros(graph.size, 8, dtype=h.dtype).index_add(0, graph.owner, h))


def dataclass_batches() -> plait.Job:
    """Inputs are a dataclass: one tensor has the nodes of all samples, and an int is their number."""
    return made(_OfGraph, data=_Graphs)


class _Stream:
    """An iterable that shuffles with Python's generator."""

    def __iter__(self) -> Iterator[Any]:
        rows, order = Rows(40), [*range(40)]
        random.shuffle(order)
        for i in order:
            yield rows[i]


def shuffled_stream() -> plait.Job:
    """An IterableDataset yields duplicate samples: every rank reads the stream, which `random.shuffle` shuffles."""
    return made(Chain, data=_Stream)


class _Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = nn.EmbeddingBag(16, 6, mode="sum", padding_idx=0), Chain()

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.tokens(ids))


class _Topics(Ragged):
    def __getitem__(self, i: int) -> Any:
        ids, _ = super().__getitem__(i)
        return ids, ids.sum() % 4

    def collate(self, samples: list[Any]) -> Any:
        rows = nn.utils.rnn.pad_sequence([ids for ids, _ in samples], batch_first=True)
        return rows, torch.stack([y for _, y in samples])


def token_buckets() -> plait.Job:
    """Batch sizes vary: a step has as many texts as fit in a token budget, bucketed by length, for an EmbeddingBag."""
    lengths = lambda: [3 + i % 6 for i in range(60)]  # noqa: E731
    return made(_Bag, data=_Topics, token_budget=plait.TokenBudget(32, lengths))


class _CutMix(Images):
    def __getitem__(self, i: int) -> Any:
        x, _ = super().__getitem__(i)
        other, _ = super().__getitem__(random.randrange(len(self)))
        a = random.randrange(1, 8)
        x[:, :, :a] = other[:, :, :a]
        return x, x.mean((1, 2)).abs().argmax()


class _Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x).mean((2, 3)))


def cut_and_mixed() -> plait.Job:
    """Loader processes draw equal random numbers: CutMix in `__getitem__`, with a partner that Python's generator draws."""
    return made(_Convolved, data=_CutMix)


class _Sizes(Images):
    """Images of unequal widths, padded with zeros to the widest. The model does not receive the widths."""

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return x[:, :, : 5 + i % 4], y

    def collate(self, samples: list[Any]) -> Any:
        widest = max(x.shape[2] for x, _ in samples)
        return torch.stack([F.pad(x, (0, widest - x.shape[2])) for x, _ in samples]), torch.stack([y for _, y in samples])


def padded_images() -> plait.Job:
    """Image sizes vary: the mean over an image includes padding, whose width depends on the widest image of the batch."""
    return made(_Convolved, data=_Sizes)
