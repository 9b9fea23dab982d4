"""Jobs that are hard for sharding and recomputation: uses of units, parameters and outputs in real models."""

import dataclasses
import random
from typing import Any

import torch
from jobs import Out, Tokens, language_loss, make
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import plait


class Block(nn.Module):
    """A residual block of width `w`; its forward calls dropout directly."""

    def __init__(self, w: int = 8, p: float = 0.2):
        super().__init__()
        self.norm, self.up, self.down, self.p = nn.LayerNorm(w), nn.Linear(w, 2 * w), nn.Linear(2 * w, w), p

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.p, self.training)


def blocks(n: int = 3, w: int = 8, p: float = 0.2) -> nn.ModuleList:
    return nn.ModuleList(Block(w, p) for _ in range(n))


class Chain(nn.Module):
    """first -> blocks -> last; the subclasses change one thing each."""

    def __init__(self, w: int = 8, features: int = 6):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(features, w), blocks(3, w), nn.Linear(w, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class FrozenMiddle(Chain):
    """A unit in the middle is frozen, and one bias elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.first.bias.requires_grad_(False)
        self.blocks[2].up.weight.requires_grad_(False)


class FrozenFirst(nn.Module):
    """A frozen embedding, then a frozen block: backward reaches neither."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(17, 8), blocks(), nn.Linear(8, 17)
        self.embed.requires_grad_(False)
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Uneven(nn.Module):
    """Dims that no number of ranks divides; some are smaller than the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((6, 7), (7, 13), (13, 2), (2, 1)))
        self.scale, self.empty = nn.Parameter(torch.ones(1, 5, 1)), nn.Parameter(torch.ones(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.scale.mean() + self.empty.sum()


class Scalars(Chain):
    """Parameters without dims: one in the root, and one in each block, of which one is frozen; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.idle = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(1.0))
        for block in self.blocks:
            block.gain = nn.Parameter(torch.tensor(1.1))
            block.forward = lambda x, block=block: Block.forward(block, x) * block.gain
        self.blocks[1].gain.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Unused(Chain):
    """The loss does not use a parameter of a block, an entire block, and an output head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].extra = nn.Linear(8, 8)
        self.never, self.aside = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.aside(x.expand(-1, 8))
        return x


class LayerDrop(Chain):
    """Each block is skipped at random, by Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if random.random() < 0.6:
                x = block(x)
        return self.last(x)


class DropInside(Chain):
    """A block that decides in its forward whether its second half runs."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = lambda x, b=block: Block.forward(b, x) if random.random() < 0.5 else x * b.norm.weight


class TiedAcross(Chain):
    """One matrix in two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class Twice(Chain):
    """A block that is called three times, and one module that is registered in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.blocks[1])

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.last(self.blocks[0](self.blocks[0](x.expand(-1, 8))))


class RootUses(nn.Module):
    """The root multiplies by the embedding's own matrix, and reads a block's bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(17, 8), blocks()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.blocks[1].up.bias[:8]
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight)


class Split(nn.Module):
    """Returns views of its output."""

    def __init__(self, w: int = 8):
        super().__init__()
        self.wide, self.size = nn.Linear(w, 2 * w), w

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = self.wide(x)
        return wide[:, : self.size], wide[:, self.size :]


class InPlace(nn.Module):
    """Units return views and their inputs; the model changes them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.splits, self.last = nn.Linear(6, 8), nn.ModuleList([Split(), Split()]), nn.Linear(8, 1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.first(x))
        for split in self.splits:
            a, b = split(h)
            a += 1.0
            a.mul_(b.sigmoid())
            h = h + a
            h[:, 0] = h[:, 1] * 2
            h += F.relu_(b.clone())
        h.tanh_()
        return self.last(h)


class InPlaceOnOutput(Chain):
    """A block's output and a unit's input are changed in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x.mul_(0.5)
        for block in self.blocks:
            x = block(x)
            x += 0.1
            x.clamp_(-3, 3)
        return self.last(x).squeeze(-1).unsqueeze_(-1)


class Doubling(nn.Module):
    """Changes its own input in place before it uses it."""

    def __init__(self, w: int = 8):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(w, 2 * w), nn.GELU(), nn.Linear(2 * w, w))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(1.5)
        return self.layer(x).tanh()


class WritesInput(nn.Module):
    """Units that change their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.units = nn.ModuleList(Doubling() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for unit in self.units:
            h = h + unit(h)
        return self.last(h)


class Counted(Chain):
    """Blocks compute with a count and a table of their own, outside of any buffer."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.calls, block.table = 0, None
            block.forward = lambda x, block=block: Counted._run(block, x)

    @staticmethod
    def _run(block: Any, x: Tensor) -> Tensor:
        block.calls += 1
        if block.table is None:
            block.table = torch.linspace(0.5, 1.5, 8, dtype=x.dtype)
        return Block.forward(block, x * block.table) / (1 + 0.1 * block.calls)


class State:
    """An output class that no library supports."""

    def __init__(self, h: Tensor):
        self.h = h


class Carrier(nn.Module):
    """Takes and returns a `State`."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, state: State) -> State:
        return State(self.block(state.h))


class Objects(nn.Module):
    """Units whose outputs are opaque objects."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.units = nn.ModuleList(Carrier() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        state = State(self.first(x))
        for unit in self.units:
            state = unit(state)
        return self.last(state.h)


class Aside(nn.Module):
    """Returns an output of a small unit that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.chain, self.aside = Chain(64), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.chain(x), self.aside(x)


def aside() -> plait.Job:
    return make(Aside, loss=lambda out, y: F.mse_loss(out[0], y))


class Through(nn.Module):
    """Takes and returns the structure that `kind` names; passes part of its input on unchanged."""

    def __init__(self, kind: str):
        super().__init__()
        self.block, self.kind = Block(), kind

    def forward(self, state: Any, *, gain: float = 1.0, mask: Tensor | None = None) -> Any:
        if self.kind == "dict":
            return {"h": self.block(state["h"]) * gain, "kept": state["kept"], "note": "text"}
        if self.kind == "data":
            return dataclasses.replace(state, logits=self.block(state.logits) * gain)
        h, *rest = state
        return (self.block(h) * gain, [*rest, None, 3])


class Structures(nn.Module):
    """Dicts, dataclasses, tuples with None and Python numbers between units; keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.units = nn.ModuleList(Through(k) for k in ("dict", "data", "tuple"))

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.first(x)
        a, b, c = self.units
        state = a({"h": x, "kept": x * 2}, gain=0.9, mask=None)
        out = b(Out(state["h"], state["kept"]), gain=1.1)
        h, rest = c((out.logits + out.aux, out.aux))
        return {"out": Out(self.last(h)), "rest": rest, "list": [h.sum(-1), None]}


class NonContiguous(Chain):
    """Parameters with unusual strides."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.first, self.blocks[0].up, self.blocks[1].down):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
        self.grid = nn.Parameter(torch.randn(4, 3, 2).permute(2, 0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.grid.mean()


class NormInside(nn.Module):
    """Blocks with batch norm and dropout inside, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class OwnCheckpoint(Chain):
    """The model itself recomputes a segment of several units."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*self.blocks)
        del self.blocks

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.body, self.first(x), use_reentrant=False))


class KeptInEval(Chain):
    """The job keeps a block in eval mode, but trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].eval()


class Spectral(nn.Module):
    """Buffers that each forward changes (power iteration, a running mean, a counter), reassigned and in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(2))
        self.last = nn.Linear(8, 1)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes = self.passes + 1
        x = self.first(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.last(x)


class Teacher(Chain):
    """A unit that runs without gradients, then with them; another only ever runs without."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Block()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        with torch.no_grad():
            goal = self.teacher(self.blocks[0](h))
        for block in self.blocks:
            h = block(h)
        return self.last(h - goal.detach())


class Forces(nn.Module):
    """Derivatives of its own output inside its forward, as in molecular models."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(6, 8), blocks(2, p=0.0), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            h = self.first(x)
            for block in self.blocks:
                h = block(h)
            energy = self.last(h)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy + force.sum(-1, keepdim=True)


class Hooked(Chain):
    """The model takes features out of its blocks by forward hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda m, a, out: self.taken.append(out))

    def forward(self, x: Tensor) -> Tensor:
        self.taken.clear()
        out = super().forward(x)
        return out + torch.stack(self.taken).mean((0, 2)).unsqueeze(-1)


class Doubled(Chain):
    """A hook changes a block's output."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda m, a, out: out * 2)


class Multihead(nn.Module):
    """Parameters that a module reads from its submodule without calling it (nn.MultiheadAttention)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(17, 8), nn.Linear(8, 17)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


class UNet(nn.Module):
    """Down, up, and skips between; convolutions, group norm, feature dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self._step(1, 4), self._step(4, 8, stride=2)
        self.middle = self._step(8, 8, stride=2)
        self.up2, self.up1 = self._step(16, 4), self._step(8, 4)
        self.out = nn.Conv1d(4, 1, 1)

    @staticmethod
    def _step(a: int, b: int, stride: int = 1) -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(a, b, 3, stride, 1), nn.GroupNorm(2, b), nn.SiLU(), nn.Dropout1d(0.1), nn.Conv1d(b, b, 3, 1, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x.unsqueeze(1))
        b = self.down2(a)
        c = F.interpolate(self.middle(b), size=b.shape[-1])
        c = F.interpolate(self.up2(torch.cat([b, c], 1)), size=a.shape[-1])
        return self.out(self.up1(torch.cat([a, c], 1))).squeeze(1).mean(-1, keepdim=True)


def sliced_groups() -> plait.Job:
    """Groups by position in the list of parameters, each with its own learning rate."""

    def optimizer(params: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [
                {"params": params[:-2], "weight_decay": 0.1},
                {"params": params[-2:-1], "lr": 3e-3, "betas": (0.8, 0.95)},
                {"params": params[-1:], "lr": 1e-1},
            ],
            lr=1e-2,
        )

    return make(Chain, optimizer=optimizer, schedule=lambda s: 1.0 / (1 + s / 50))


def structures() -> plait.Job:
    def loss(out: dict[str, Any], y: Tensor) -> Tensor:
        return F.mse_loss(out["out"].logits, y) + 0.1 * out["list"][0].square().mean()

    return make(Structures, loss=loss)


def _tokens(model: Any) -> Any:
    return lambda: make(model, Tokens, language_loss, weight=lambda t: (t != -100).sum())


def _named(model: Any, **fields: Any) -> Any:
    return lambda: make(model, **fields)


ALL = {
    "frozen_middle": _named(FrozenMiddle), "frozen_first": _tokens(FrozenFirst), "uneven": _named(Uneven),
    "scalars": _named(Scalars), "unused": _named(Unused, optimizer=lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.3)),
    "layer_drop": _named(LayerDrop), "drop_inside": _named(DropInside), "tied_across": _named(TiedAcross), "twice": _named(Twice),
    "root_uses": _tokens(RootUses), "in_place": _named(InPlace), "in_place_on_output": _named(InPlaceOnOutput),
    "structures": structures, "non_contiguous": _named(NonContiguous), "norm_inside": _named(NormInside),
    "own_checkpoint": _named(OwnCheckpoint), "kept_in_eval": _named(KeptInEval), "spectral": _named(Spectral),
    "teacher": _named(Teacher), "forces": _named(Forces), "hooked": _named(Hooked), "doubled": _named(Doubled),
    "writes_input": _named(WritesInput), "counted": _named(Counted), "objects": _named(Objects), "aside": aside,

    "multihead": _tokens(Multihead), "unet": _named(UNet), "sliced_groups": sliced_groups,
}  # fmt: skip
