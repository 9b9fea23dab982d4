"""Blocks whose code reads values of tensors and branches on them. In the data, one sample of sixteen has a large value."""

from typing import Any

import torch
from jobs import make
from torch import Tensor, nn
from torch.nn import functional as F

LARGE = 3.0


class Rows:
    """Sequences of twelve positions."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(i)).clamp(-1, 1)
        if i % 16 == 5:
            x[2, 3] = 4.0
        return x, x.sum(-1)


class Block(nn.Module):
    """Attention and a pair of layers. The kinds of blocks define `before` and `between`, which may read values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down, self.rare = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 16)

    def before(self, x: Tensor) -> Tensor:
        return x

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(self.between(x, self.up(x).relu()))


class Between(Block):
    """Subtracts a mean over features if a value is large."""

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        return h - h.mean(-1, keepdim=True) if x.abs().max() > LARGE else h


class Early(Between):
    """The same; the decision is made before the layer."""

    def before(self, x: Tensor) -> Tensor:
        self.large = x.abs().max().item() > LARGE
        return x

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        return h - h.mean(-1, keepdim=True) if self.large else h


class Positions(Block):
    """Subtracts a mean over positions if a value is large."""

    def before(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True) if (x.abs() > LARGE).any() else x


class Scaled(Block):
    """A Python float from a tensor, which has an effect if it is large."""

    def before(self, x: Tensor) -> Tensor:
        return x / max(1.0, x.abs().max().item() / LARGE)


class Rare(Block):
    """A layer that only some samples use."""

    def between(self, x: Tensor, h: Tensor) -> Tensor:
        return h + self.rare(h) if bool(x.max() > LARGE) else h


class Listed(Block):
    """Reads positions as a Python list; the same layer is applied to each."""

    def before(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        large = [i for i, size in enumerate(rows.abs().amax(-1).tolist()) if size > LARGE]
        return rows.index_add(0, torch.tensor(large, dtype=torch.long), -rows[large] / 2).view_as(x)


class Checked(Block):
    """The value is only checked."""

    def before(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        return x


class Model(nn.Module):
    def __init__(self, block: type[Block]):
        super().__init__()
        self.blocks, self.head = nn.Sequential(block(), block()), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).squeeze(-1)


KINDS = {kind.__name__.lower(): kind for kind in (Between, Early, Positions, Scaled, Rare, Listed, Checked)}


def job(kind: str, **given: Any) -> Any:
    return make(lambda: Model(KINDS[kind]), Rows, F.mse_loss, batch=8, **given)
