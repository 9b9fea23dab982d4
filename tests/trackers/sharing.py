"""Shared weights, and weights that are made from other weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import plait
from trackers.samples import Block, Chain, Rows, Texts, first, generator, made, next_token


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(16, 8), nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def tied_later() -> plait.Job:
    """The model is wrapped. Its head is tied to the embedding by assignment, after both were built and moved into another module."""

    def model() -> nn.Module:
        wrapper = nn.Module()
        wrapper.body = _Decoder()
        wrapper.forward = lambda ids: wrapper.body(ids)
        wrapper.body.head.weight = wrapper.body.tokens.weight
        return wrapper

    return made(model, next_token, Texts)


class _TwoHeads(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
        return {"logits": self.last(h), "extra": self.second(h)}


def unused_head() -> plait.Job:
    """The reducer waits for unused parameters: the model returns the output of a second head, but the loss ignores it."""
    return made(_TwoHeads, lambda o, y: F.cross_entropy(o["logits"], y))


class _Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(6, 8), Block(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(4):
            h = checkpoint(self.layer, h, use_reentrant=False)
        return self.last(h)


def recursive_checkpoint() -> plait.Job:
    """A gradient is reduced twice: the model uses one layer four times, each time in an activation checkpoint."""
    return made(_Recursive)


class _Pairs(Rows):
    def __getitem__(self, i: int) -> Any:
        a, b = torch.randn(2, 6, generator=generator(i))
        return {"chosen": a, "rejected": b}, torch.tensor(1.0 + i % 3)


class _Compared(Chain):
    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return super().forward(chosen) - super().forward(rejected)


def chosen_and_rejected() -> plait.Job:
    """A gradient is computed twice: the model runs twice in a step, and the loss compares both outputs with a margin."""
    return made(lambda: _Compared(outputs=1), lambda o, m: -F.logsigmoid(o[:, 0] - m).mean(), _Pairs)


class _Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Chain(outputs=5)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        both = self.encoder(torch.cat([chosen, rejected]))
        return F.cosine_similarity(*both.chunk(2), dim=-1)


def siamese() -> plait.Job:
    """Gradients differ from one device: pairs run as one batch of double size, and the loss compares their cosines with a score."""
    return made(_Siamese, lambda o, m: F.mse_loss(o, m / 3), _Pairs)


class _TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle = nn.Linear(6, 8), nn.ModuleList([Block(), Block()])
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        for layer in self.middle:
            h = layer(h)
        return (F.linear(h, self.encoder.weight.t(), self.bias) - x).square().mean(-1)


def transposed_decoder() -> plait.Job:
    """A weight is empty outside its module's forward: the decoder uses the encoder's weight, transposed."""
    return made(_TiedAutoencoder, first)


class _Hyper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(6, 4)
        self.target.requires_grad_(False)
        self.codes, self.make = nn.Parameter(torch.randn(3)), nn.Linear(3, 28)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.make(self.codes.tanh())
        weights = {"weight": flat[:24].view(4, 6) + self.target.weight, "bias": flat[24:]}
        return functional_call(self.target, weights, (x,))


def hypernetwork() -> plait.Job:
    """A module with frozen weights is called with weights that another network makes (`functional_call`)."""
    return made(_Hyper)


class _Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


def parametrized() -> plait.Job:
    """Weights are parametrized: one layer has a weight norm, another a symmetric weight."""

    def model() -> nn.Module:
        middle = nn.Linear(8, 8)
        parametrize.register_parametrization(middle, "weight", _Symmetric())
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), middle, nn.Tanh(), nn.Linear(8, 4))

    return made(model)


class _Tasks(Rows):
    def __getitem__(self, i: int) -> Any:
        x = torch.randn(6, generator=generator(i))
        return {"x": x, "task": torch.tensor(i % 5 if i % 5 < 3 else 0)}, x.sum()[None]


class _ByTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Chain(outputs=8)
        self.heads = nn.ParameterDict({f"task{k}": torch.randn(8) / 3 for k in range(4)})

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        h, out = self.body(x), torch.zeros(len(x), dtype=x.dtype)
        for k in task.unique().tolist():
            out = torch.where(task == k, h @ self.heads[f"task{k}"], out)
        return out[:, None]


def parameters_by_task() -> plait.Job:
    """Ranks use different parameters: the batch's task selects entries of a ParameterDict. No task selects one of them."""
    return made(_ByTask, F.mse_loss, _Tasks)
