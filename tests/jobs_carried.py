"""Jobs whose models keep values between calls, draw random numbers in unusual ways, or fail in one place only: `job(kind)`."""

from collections import deque
from typing import Any

import numpy as np
import torch
from jobs_treacherous import CLASSES, WIDTH, Points, made, mlp
from torch import Tensor, nn
from torch.nn import functional as F

import plait


class Two(nn.Module):
    """Two layers with a module between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.passes, self.rate, self.queue, self.seen = 0, 0.0, deque[Tensor](maxlen=3), None
        self.noise = np.random.RandomState(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))

    def between(self, h: Tensor) -> Tensor:
        return h.tanh()


class Anneals(Two):
    """A temperature that falls with each call, independent of random numbers."""

    def between(self, h: Tensor) -> Tensor:
        self.passes += 1
        return F.gumbel_softmax(h, tau=max(0.3, 1 - 0.02 * self.passes))


class WarmsUp(Two):
    """Takes a different branch from call 40 on."""

    def between(self, h: Tensor) -> Tensor:
        self.rate += 0.025
        return h.tanh() if self.rate < 1 else h.relu()


class Ramp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"calls": torch.zeros(())}

    def forward(self, h: Tensor) -> Tensor:
        self.state["calls"] = self.state["calls"] + 1
        return h * (self.state["calls"] / 50).clamp(max=1).to(h)


class Nested(Two):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Tanh(), nn.ModuleDict({"ramp": Ramp()})["ramp"])

    def between(self, h: Tensor) -> Tensor:
        return self.inner(h)


class Observes(Two):
    """Counts and stores its inputs; no output depends on them."""

    def between(self, h: Tensor) -> Tensor:
        self.passes, self.seen = self.passes + 1, h.detach()
        return h.tanh()


class Remembers(Two):
    def between(self, h: Tensor) -> Tensor:
        past = sum(self.queue) / len(self.queue) if self.queue else torch.zeros_like(h[0])
        self.queue.append(h.detach().mean(0))
        return h + past


class OwnNoise(Two):
    def between(self, h: Tensor) -> Tensor:
        return h + 0.1 * torch.from_numpy(self.noise.normal(size=h.shape)).to(h)


class HostMask(Two):
    """Dropout in one place, and a mask by numpy in another."""

    def between(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.1) * torch.from_numpy(np.random.rand(*h.shape) > 0.2).to(h)


class Packed(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.GRU):
        super().__init__()
        self.rnn, self.last = kind(3, 6, 2, dropout=0.3, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([1 + i % 2 for i in range(len(x))])
        rows = nn.utils.rnn.pack_padded_sequence(x.view(len(x), 2, 3), lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(rows)[0], batch_first=True)
        return self.last(out.sum(1))


class Asserts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32, x.dtype
        return super().forward(x)


class MakesLayer(Two):
    def between(self, h: Tensor) -> Tensor:
        if not hasattr(self, "middle"):
            self.middle = nn.ModuleList([nn.Linear(8, 8)])
        return self.middle[0](h)


class Raises(Two):
    def between(self, h: Tensor) -> Tensor:
        raise ValueError("no such layer")


MODELS: dict[str, Any] = {
    "anneals": Anneals, "warms_up": WarmsUp, "nested": Nested, "observes": Observes, "remembers": Remembers, "own_noise": OwnNoise,
    "host_mask": HostMask, "packed": Packed, "packed_lstm": lambda: Packed(nn.LSTM), "makes_layer": MakesLayer, "raises": Raises,
    "asserts": lambda: Asserts(WIDTH, CLASSES), "plain": mlp,
}  # fmt: skip


def job(kind: str = "plain") -> plait.Job:
    return made(model=MODELS[kind], data=lambda: Points(64), steps=80)


class Found(Points):
    """Each sample has one object, and a few have six."""

    def __init__(self) -> None:
        super().__init__(4000)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], (torch.arange(8) < (6 if i % 500 == 0 else 1)).float()


def by_objects() -> plait.Job:
    """A detector's loss: the sum divided by the number of objects in the batch."""

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(out, y, reduction="sum") / y.sum().clamp(min=1)

    return made(loss, lambda: mlp(8), Found)


def by_masked_tokens() -> plait.Job:
    """A mean over the labels that are present. Each sample has seven, and a few have two."""

    class Labels(Found):
        def __getitem__(self, i: int) -> Any:
            y = (torch.arange(8) * (i + 1)) % 11
            y[2 if i % 500 == 0 else 7 :] = -100
            return (torch.arange(8) + i) % 11, y

    loss = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    return made(loss, lambda: nn.Sequential(nn.Embedding(11, 12), nn.Linear(12, 11)), Labels)


def in_the_model() -> plait.Job:
    """The model divides by the number of its rare inputs."""

    class Rare(Two):
        def between(self, h: Tensor) -> Tensor:
            return h / (h.detach() > 40).sum().clamp(min=1)

    class Inputs(Found):
        def __getitem__(self, i: int) -> Any:
            return self.x[i] * (500 if i % 500 == 0 else 1), self.y[i]

    return made(model=Rare, data=Inputs)


def limited(kind: str = "norm", limit: float = 100.0) -> plait.Job:
    """A hook limits a gradient inside of the model, by the norm over all samples or by element."""

    def short(g: Tensor) -> Tensor:
        return g * (limit / g.norm().clamp(min=limit)) if kind == "norm" else g.clamp(-limit, limit)

    class Limits(Two):
        def __init__(self) -> None:
            super().__init__()
            if kind == "module":
                self.last.register_full_backward_hook(lambda m, given, got: tuple(g * (limit / g.norm().clamp(min=limit)) for g in given))

        def between(self, h: Tensor) -> Tensor:
            h = h.tanh()
            if h.requires_grad and kind != "module":
                h.register_hook(short)
            return h

    return made(model=Limits)
