"""Models with higher-order operators, scripted modules, functions of torch.func, and custom operators."""

from collections.abc import Callable
from typing import Any

import torch
from jobs import make
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

WIDTH = 8


class Block(nn.Module):
    """The block around each kind: maps before and after, dropout, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.inner(self.up(x))))

    def inner(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Cond(Block):
    """One branch captures a parameter."""

    def inner(self, x: Tensor) -> Tensor:
        weight = self.up.weight
        return torch.cond(weight.sum() > 0, lambda x: torch.sin(x @ weight), lambda x: torch.cos(x), (x,))


class Loop(Block):
    """A loop without gradients chooses a scale."""

    def inner(self, x: Tensor) -> Tensor:
        start = (torch.zeros((), dtype=torch.int64), torch.ones((), dtype=x.dtype))
        return x * while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s * 1.1), start)[1]


class Scan(Block):
    def inner(self, x: Tensor) -> Tensor:
        carry, found = scan(lambda c, a: (c + a, c * a), torch.zeros_like(x[:, 0]), x, dim=1)
        return found + carry[:, None]


class Parallel(Block):
    """A cumulative sum."""

    def inner(self, x: Tensor) -> Tensor:
        return associative_scan(torch.add, x, dim=1, combine_mode="generic")


class Mapped(Block):
    """torch.func: a function of one row, and its derivative."""

    def inner(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.sin)(x) + torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * (x > 0)


class Function(Block):
    def inner(self, x: Tensor) -> Tensor:
        return Own.apply(x)


@torch.library.custom_op("plait_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: gradient * 2)


class Custom(Block):
    def inner(self, x: Tensor) -> Tensor:
        return twice(x)


@torch.library.custom_op("plait_tests::thrice", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    """An operator without a rule for its shapes."""
    return x * 3


thrice.register_autograd(lambda ctx, gradient: gradient * 3)


class Unknown(Block):
    def inner(self, x: Tensor) -> Tensor:
        return thrice(x)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 1e9:
            x = x * 2
        return torch.tanh(self.map(x))


class Scripted(Block):
    def __init__(self) -> None:
        super().__init__()
        self.part = torch.jit.script(Part())

    def inner(self, x: Tensor) -> Tensor:
        return self.part(x)


class Traced(Block):
    def __init__(self) -> None:
        super().__init__()
        self.part = torch.jit.trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), torch.zeros(2, WIDTH))

    def inner(self, x: Tensor) -> Tensor:
        return self.part(x)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "cond": Cond, "while_loop": Loop, "scan": Scan, "associative_scan": Parallel, "vmap": Mapped, "function": Function,
    "custom_op": Custom, "custom_op_unknown": Unknown, "script": Scripted, "trace": Traced,
}  # fmt: skip


def model(kind: str) -> nn.Module:
    return nn.Sequential(nn.Linear(6, WIDTH), *(KINDS[kind]() for _ in range(3)), nn.Linear(WIDTH, 1))


def job(kind: str = "cond") -> Any:
    return make(lambda: model(kind))
