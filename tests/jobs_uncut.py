"""Models that no split into stages can preserve: each must be rejected, with the unit, the value and the reason."""

from typing import Any

import torch
from jobs import make
from jobs_unlike import Block, Chain, blocks
from torch import Tensor, nn

Job = Any


class Noting(Block):
    """Stores a value for later in an attribute, as blocks with a balance loss do."""

    aux: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux = y.square().mean(-1, keepdim=True)
        return y


class Attribute(Chain):
    """The root adds up the values that its blocks stored."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Noting() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * sum(b.aux for b in self.blocks)


class Reading(Noting):
    """Reads a value that another block stored."""

    def __init__(self, other: list[Noting]) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.other[0].aux


class Peeks(Attribute):
    """The last block reads an attribute of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3] = Reading([self.blocks[0]])

    def forward(self, x: Tensor) -> Tensor:
        return Chain.forward(self, x)


class HookInside(Chain):
    """Takes features from inside of its blocks by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Tensor] = []
        for block in self.blocks:
            block.up.register_forward_hook(lambda m, a, out: self.taken.append(out))

    def forward(self, x: Tensor) -> Tensor:
        self.taken.clear()
        out = super().forward(x)
        return out + sum(t.mean(-1, keepdim=True) for t in self.taken)


class Replaces(Chain):
    """A running mean of the root, replaced in each pass by a value that only a late stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out = self.last(x)
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return out


class Writes(Replaces):
    """The same; the mean is written in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out = self.last(x)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return out


class Looks(Chain):
    """Its control flow depends on a value."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            if x.mean() > 0:
                x = x * 1.1
        return self.last(x)


class Numpy(Chain):
    """A value goes through another library."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        scale = torch.from_numpy(x.detach().mean(-1, keepdim=True).numpy())
        return self.last(x) * scale.to(x)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.block(x), len(x)


class Numbers(nn.Module):
    """Units return the number of samples as a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Counting() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x, n = block(x)
            x = x / n
        return self.last(x)


class Detached(Chain):
    """The gradient ends in the middle: earlier layers get none."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x)).detach()
        return self.last(self.blocks[2](self.blocks[1](x)))


class Narrow(Block):
    """Returns float32, whatever it computes in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.up.weight.dtype)).float()


class Floats(Chain):
    """A value between two stages has a different format than the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Narrow() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x.to(self.last.weight.dtype))


class Fan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.layer(x) * k for k in range(1, 80)]


class Fans(nn.Module):
    """Many tensors go between two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fan, self.blocks, self.last = nn.Linear(6, 8), Fan(), blocks(3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        many = self.fan(self.first(x))
        x = many[0]
        for block in self.blocks:
            x = block(x)
        return self.last(x + torch.stack(many[1:]).mean(0))


class OnlyTraining(Chain):
    """A head that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) + self.aside(x) if self.training else self.last(x)


def _of(model: Any) -> Any:
    return lambda: make(model)


REFUSED = {
    "attribute": (_of(Attribute), "unit blocks.0 passes a value outside of its output"),
    "peeks": (_of(Peeks), "unit blocks.0 passes a value outside of its output"),
    "hook_inside": (_of(HookInside), "unit blocks.0 passes a value outside of its output"),
    "replaces": (_of(Replaces), "the buffer mean"),
    "writes": (_of(Writes), "the buffer mean"),
    "looks": (_of(Looks), "__bool__"),
    "numpy": (_of(Numpy), "numpy"),
    "numbers": (_of(Numbers), "depend on the batch"),
}
"""Name -> (job, words of the error)."""
CUT = {"detached": _of(Detached), "floats": _of(Floats), "fans": _of(Fans)}
"""Similar models that a pipeline can split. Each of them once revealed a bug."""
