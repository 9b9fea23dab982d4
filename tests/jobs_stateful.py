"""Jobs whose model or loss keeps a state between steps, outside of parameters and persistent buffers."""

import collections
import random
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait


@dataclass
class Meter:
    """A running mean, in an object of its own class."""

    total: float = 0.0
    count: int = 0


class Scaled(nn.Module):
    """Two layers; a value of `carried` scales the output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x))) * (1 + self.carried(x.detach()))

    def carried(self, x: Tensor) -> Any:
        return 0.0


class Recurrent(nn.Module):
    """A hidden state that continues from batch to batch, and an activation that each step recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 6)
        self.hidden: Any = None
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        before = None if self.hidden is None else tuple(h.detach() for h in self.hidden)
        self.last, self.hidden = self.cell(x[:, None], before)
        return self.out(self.last[:, 0])


class Running(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def carried(self, x: Tensor) -> Any:
        self.meter.total += float(x.abs().mean())
        self.meter.count += 1
        return 0.1 * self.meter.total / self.meter.count


class Collecting(Scaled):
    """Its first forward registers a hook that collects a layer's outputs. It records the registration, and the first run."""

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "collects", False):
            self.seen: list[Tensor] = []
            self.inner.register_forward_hook(lambda module, args, output: self.seen.append(output))
            self.collects = True
        out = super().forward(x)
        self.has_run = True
        found = sum((t.mean() for t in self.seen), torch.zeros(()))
        self.seen.clear()
        return out + found

    def carried(self, x: Tensor) -> Any:
        return 0.5 if getattr(self, "has_run", False) else 0.0


class Lazily(Scaled):
    """Its first forward creates a function and records that it did; it also counts its calls."""

    calls, ready = 0, False

    def carried(self, x: Tensor) -> Any:
        if not self.ready:
            self.shrink = partial(torch.mul, 0.1)
            self.ready = True
        self.calls += 1
        return self.shrink(torch.tensor(float(self.calls)))


class Queued(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.rows: collections.deque[Tensor] = collections.deque(maxlen=3)

    def carried(self, x: Tensor) -> Any:
        mean = sum(self.rows) / len(self.rows) if self.rows else 0.0
        self.rows.append(x.abs().mean(0))
        return 0.1 * mean


class Drawing(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.of_torch = torch.Generator().manual_seed(3)
        self.of_numpy, self.of_python = np.random.default_rng(4), random.Random(5)

    def carried(self, x: Tensor) -> Any:
        drawn = torch.rand(6, generator=self.of_torch).to(x.dtype)
        return 0.1 * drawn + 0.1 * self.of_numpy.random() + 0.1 * self.of_python.random()


class Extra(Scaled):
    """Its count is in a closure; only `get_extra_state` returns it."""

    def __init__(self) -> None:
        super().__init__()
        count = 0

        def step(set_to: int | None = None, add: int = 0) -> int:
            nonlocal count
            count = (count if set_to is None else set_to) + add
            return count

        self.count = step

    def get_extra_state(self) -> Any:
        return {"count": self.count(), "row": torch.full((2,), float(self.count()))}

    def set_extra_state(self, state: Any) -> None:
        self.count(set_to=state["count"])

    def carried(self, x: Tensor) -> Any:
        return 0.1 * self.count(add=1)


class NotPersistent(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def carried(self, x: Tensor) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.mean


class NoneAtFirst(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor | None
        self.register_buffer("mean", None)

    def carried(self, x: Tensor) -> Any:
        self.mean = x.mean(0) if self.mean is None else 0.9 * self.mean + 0.1 * x.mean(0)
        return self.mean


class Growing(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.bank: Tensor
        self.register_buffer("bank", torch.zeros(0, 6))

    def carried(self, x: Tensor) -> Any:
        self.bank = torch.cat([self.bank, x])[-100:]
        return self.bank.mean(0)


class OfSamples(Scaled):
    """A persistent buffer that each rank computes from its own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(6))

    def carried(self, x: Tensor) -> Any:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.mean


class Array(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.table = np.zeros(6)

    def carried(self, x: Tensor) -> Any:
        self.table[:] = 0.9 * self.table + 0.1 * x.mean(0).numpy()
        return torch.from_numpy(self.table.copy()).to(x.dtype)


class Cached(Scaled):
    """A table that is created if it is missing, and equal on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def carried(self, x: Tensor) -> Any:
        if self.table is None:
            self.table = torch.arange(6, dtype=x.dtype) / 100
        return self.table


class Scratch(Scaled):
    """Values of this batch, which each step recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.similar: Tensor | None = None
        self.size: Any = 0.0

    def carried(self, x: Tensor) -> Any:
        self.similar = x @ x.t()
        self.size = self.similar.abs().mean()
        return 0.0 * self.size


class Handle:
    """An object that cannot be restored from a file."""

    __slots__ = ("steps",)

    def __init__(self, steps: int):
        self.steps = steps


class Unsavable(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.handle: Handle | None = None

    def carried(self, x: Tensor) -> Any:
        self.handle = Handle(1 if self.handle is None else self.handle.steps + 1)
        return 0.1 * self.handle.steps


class OpaqueExtra(Scaled):
    def get_extra_state(self) -> Any:
        return Handle(0)

    def set_extra_state(self, state: Any) -> None: ...


class RunningLoss:
    """A loss relative to its own moving average."""

    def __init__(self) -> None:
        self.mean: float | None = None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(outputs, targets)
        self.mean = float(loss.detach()) if self.mean is None else 0.9 * self.mean + 0.1 * float(loss.detach())
        return loss / self.mean


class CenteredLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.center: Tensor
        self.register_buffer("center", torch.zeros(6))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.center = 0.9 * self.center + 0.1 * outputs.detach().mean(0)
        return F.mse_loss(outputs - self.center, targets)


class Rows:
    def __init__(self, pause: float = 0.0):
        self.pause = pause

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.pause / 16)
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return x, x.roll(1)


MODELS = (
    Recurrent,
    Running,
    Collecting,
    Lazily,
    Queued,
    Drawing,
    Extra,
    NotPersistent,
    NoneAtFirst,
    Growing,
    OfSamples,
    Array,
    Cached,
    Scratch,
)
KINDS = {kind.__name__.lower(): kind for kind in (*MODELS, Unsavable, OpaqueExtra)}
LOSSES = {"runningloss": RunningLoss, "centeredloss": CenteredLoss}


def job(kind: str = "recurrent", steps: int = 10, every: int = 0, pause: float = 0.0) -> plait.Job:
    """`every`: steps between evaluations, which change the kept state as steps do. `pause`: seconds to read a batch."""
    metrics = plait.Evaluate(
        Rows, lambda outputs, targets: {"error": (outputs - targets).pow(2).mean(1)}, every=every or steps
    )
    return plait.Job(
        model=KINDS.get(kind, Scaled), loss=LOSSES[kind]() if kind in LOSSES else F.mse_loss, data=lambda: Rows(pause),
        optimizer=lambda p: torch.optim.AdamW(p, 0.01), batch=16, steps=steps, evaluate=metrics if every else None,
    )  # fmt: skip
