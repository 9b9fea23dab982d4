"""Models with their own number formats, and with gradients that are only rounding errors."""

import torch
from jobs import Numbers, make
from torch import Tensor, nn
from torch.nn import functional as F

from plait import Job


class Halves(Numbers):
    """Samples in bf16."""

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(i)
        return x.bfloat16(), y.bfloat16()


class Sequences(Numbers):
    """x: [5, 6]."""

    def __init__(self) -> None:
        super().__init__(48, 30)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(i)
        return x.view(5, 6), y


class HalfSequences(Sequences):
    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(i)
        return x.bfloat16(), y.bfloat16()


class Keys(nn.Module):
    """Attention whose keys have a bias: its exact gradient is zero. x: [rows, length, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, 16)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return x + self.out((q @ k.transpose(-1, -2) / 4).softmax(-1).matmul(v).transpose(1, 2).flatten(2))


class Reader(nn.Module):
    """x: [rows, length, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(6, 64), nn.ModuleList(Keys() for _ in range(2)), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Concatenated(nn.Module):
    """Each block reads the outputs of all earlier blocks. x: [rows, 6]."""

    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6 + 8 * k, 8), nn.ReLU()) for k in range(blocks))
        self.head = nn.Linear(6 + 8 * blocks, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.cat([x, block(x)], -1)
        return self.head(x)


class Adapted(nn.Module):
    """A frozen layer in bf16, an adapter in fp32. x: [rows, columns]."""

    def __init__(self, columns: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(columns, out).bfloat16().requires_grad_(False)
        self.down, self.up = nn.Linear(columns, 4, bias=False), nn.Linear(4, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.bfloat16()).to(x.dtype) + self.up(self.down(x))


class Doubled(nn.Module):
    """A layer in float64 between two in fp32. x: [rows, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8).double(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.last(self.middle(h.to(self.middle.weight.dtype)).to(h.dtype))


class Scalars(nn.Module):
    """Two parameters of one element, one of them without dims. x: [rows, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain, self.heat = (
            nn.Linear(6, 6),
            nn.Parameter(torch.ones(1) / 3),
            nn.Parameter(torch.tensor(0.7)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).tanh() * self.gain).sum(-1, keepdim=True) * self.heat


def _sequential(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def in_bf16() -> Job:
    return make(
        lambda: _sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1)).bfloat16(),
        Halves,
    )


def keys() -> Job:
    return make(Reader, Sequences)


def keys_in_bf16() -> Job:
    return make(lambda: Reader().bfloat16(), HalfSequences)


def concatenated() -> Job:
    return make(Concatenated)


def adapters() -> Job:
    return make(
        lambda: _sequential(Adapted(6, 16), nn.SiLU(), Adapted(16, 16), nn.SiLU(), Adapted(16, 1)), loss=F.l1_loss
    )


def doubled() -> Job:
    return make(Doubled)


def scalars() -> Job:
    return make(Scalars, optimizer=lambda p: torch.optim.RMSprop(p, lr=1e-3))


def layered_in_bf16() -> Job:
    """Convolutions in bf16, with SGD."""

    def model() -> nn.Module:  # fmt: skip
        layers = (
            nn.Unflatten(-1, (1, 6)),
            nn.Conv1d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(8, 4, 3, padding=1),
            nn.Flatten(),
            nn.Linear(24, 1),
        )
        return _sequential(*layers).bfloat16()

    return make(model, Halves, optimizer=lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9))


ALL = {f.__name__: f for f in (in_bf16, keys, keys_in_bf16, concatenated, adapters, doubled, scalars, layered_in_bf16)}
