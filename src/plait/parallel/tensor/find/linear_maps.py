"""Which modules are linear maps, along which dims of their weight they can be cut, and what of them must fit.

A map multiplies the features of its input by a matrix and adds a bias: `nn.Linear`, convolutions over all channels,
and any module of someone's own that is seen to do it. Those are tried on numbers: a class name is no proof.

Numbers to run a model on while its slices are looked for: random weights, short rows of words.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from plait.model.alike import LARGE_MODEL
from plait.tensors.parameters import like
from plait.tensors.torch_private import FakeTensor, tree_leaves
from plait.tensors.trees import first_words

_CONVOLUTIONS: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
_TRANSPOSED: dict[type[nn.Module], int] = {nn.ConvTranspose1d: 1, nn.ConvTranspose2d: 2, nn.ConvTranspose3d: 3}


@dataclass(frozen=True)
class Map:
    """A module that maps features linearly."""

    name: str
    module: nn.Module
    out: int
    """Dim of its weight that output features lie along."""
    into: int
    """The same of input features."""
    feature: int = -1
    """Dim of its input and output that features lie along, from the end."""
    known: bool = True
    """torch's own class: its forward does not look at its numbers of features."""

    @property
    def weight(self) -> Tensor:
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """Its bias [output features]."""
        bias = getattr(self.module, "bias", None)
        return bias if isinstance(bias, Tensor) else None

    def integers(self, role: str, n: int) -> tuple[str, ...] | None:
        """Attributes to divide when it is cut into n by its `role` dim, "out" or "into". None: it cannot run cut."""
        dim = self.out if role == "out" else self.into
        size = self.weight.shape[dim]
        if self.known:
            names = ("out_features", "out_channels") if role == "out" else ("in_features", "in_channels")
            return tuple(k for k in names if hasattr(self.module, k))
        equal = [k for k, v in vars(self.module).items() if type(v) is int and v == size]
        for count in range(len(equal) + 1):
            for names in itertools.combinations(equal, count):
                if self._runs(role, names, n):
                    return names
        return None

    def _runs(self, role: str, names: tuple[str, ...], n: int) -> bool:
        """Whether the module's own forward maps as it should with the first n-th of its features."""
        weight = _random(self.weight)
        cut = weight.chunk(n, self.out if role == "out" else self.into)[0]
        bias = None if self.bias is None else _random(self.bias)
        bias = bias.chunk(n)[0] if bias is not None and role == "out" else bias
        before = {k: getattr(self.module, k) for k in names}
        try:
            for k in names:
                setattr(self.module, k, before[k] // n)
            return _multiplies(self.module, cut, bias, self.into)
        finally:
            for k, v in before.items():
                setattr(self.module, k, v)


def find_maps(model: nn.Module) -> dict[str, Map]:
    """Every linear map of a model, by name."""
    tried: dict[type, int | None] = {}
    maps = {}
    for name, module in model.named_modules():
        linear = _known(name, module)
        if linear is None and _foreign(module):
            if type(module) not in tried:
                tried[type(module)] = _orientation(module)
            into = tried[type(module)]
            linear = None if into is None else Map(name, module, 1 - into, into, known=False)
        if linear is not None:
            maps[name] = linear
    return maps


def _known(name: str, module: nn.Module) -> Map | None:
    """torch's own, with nothing put in the place of its forward or its weight."""
    kind: type[nn.Module] | None = next(
        (k for k in (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED) if isinstance(module, k)), None
    )
    if kind is None or type(module).forward is not kind.forward or "forward" in vars(module):
        return None
    if "weight" not in dict(module.named_parameters(recurse=False)) or getattr(module, "groups", 1) != 1:
        return None
    if kind is nn.Linear:
        return Map(name, module, 0, 1)
    if kind in _TRANSPOSED:
        return Map(name, module, 1, 0, -(_TRANSPOSED[kind] + 1))
    return Map(name, module, 0, 1, -(_CONVOLUTIONS[kind] + 1))


def _foreign(module: nn.Module) -> bool:
    """It has nothing but a matrix, and perhaps a vector beside it."""
    dims = {k: p.dim() for k, p in module.named_parameters(recurse=False)}
    more = [*module.children(), *module.buffers()] or isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return not more and dims in ({"weight": 2}, {"weight": 2, "bias": 1})


def _orientation(module: nn.Module) -> int | None:
    """The dim of its weight that input features lie along, if it is a linear map."""
    own = dict(module.named_parameters(recurse=False))
    weight, bias = _random(own["weight"]), _random(own["bias"]) if "bias" in own else None
    return next((into for into in (1, 0) if _multiplies(module, weight, bias, into)), None)


def _multiplies(module: nn.Module, weight: Tensor, bias: Tensor | None, into: int) -> bool:
    x = torch.randn(2, 3, weight.shape[into], dtype=weight.dtype)
    want = x @ (weight if into == 0 else weight.t())
    parameters = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    try:
        with torch.no_grad():
            got = functional_call(module, parameters, (x,))
            return isinstance(got, Tensor) and torch.allclose(got, want if bias is None else want + bias)
    except Exception:  # it is something else
        return False


def _random(like: Tensor) -> Tensor:
    return torch.randn(like.shape, dtype=torch.float64)


def packed_attentions(model: nn.Module) -> dict[str, nn.MultiheadAttention]:
    """Every `nn.MultiheadAttention` whose forward is torch's own, by name."""
    every = {name: m for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    return {name: m for name, m in every.items() if type(m).forward is nn.MultiheadAttention.forward}


LENGTH = 7
"""Of rows of words: another number than that of the samples, so that the two dims are told apart."""
LONGER = (17, 65, 257)
"""Words of a row, where it takes so many for the model to take the course that it takes on whole rows."""
LARGE = 1 << 22
"""Numbers in a table of which not every row is drawn."""


@contextmanager
def random_weights(model: nn.Module) -> Iterator[None]:
    """Random numbers in float64, on the host, in the place of weights: zeros that a constructor chose would prove nothing,
    and a device may have no room for them. Buffers are on the host too.

    Of a large table all rows are alike, and so they are of matrices of maps in a large model: nothing looks at them.
    """
    g = torch.Generator().manual_seed(0)
    maps = {id(p) for m in find_maps(model).values() for p in m.module.parameters()}
    large = sum(p.numel() for p in model.parameters()) > LARGE_MODEL
    before = [(m, n, p, p.data) for m in model.modules() for n, p in m.named_parameters(recurse=False)]
    new = {id(p): _drawn(p, g, p.numel() > LARGE or (large and id(p) in maps)) for _, _, p, _ in before}
    hollow = {id(p) for _, _, p, _ in before if p.is_meta or isinstance(p, FakeTensor)}
    try:
        for module, name, p, _ in before:
            if id(p) in hollow:
                setattr(module, name, new[id(p)])
            else:
                p.data = new[id(p)].data
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta or isinstance(buffer, FakeTensor):
                    setattr(module, name, torch.rand(buffer.shape, generator=g).to(buffer.dtype))
                wide = torch.float64 if buffer.is_floating_point() else buffer.dtype
                setattr(module, name, getattr(module, name).to("cpu", wide))
        yield
    finally:
        for module, name, p, data in before:
            if id(p) in hollow:
                setattr(module, name, p)
            else:
                p.data = data


def _drawn(p: nn.Parameter, g: torch.Generator, alike: bool) -> nn.Parameter:
    if not p.is_floating_point():
        return like(p, p.detach().cpu())
    drawn = torch.randn(p.shape[-1:] if alike else p.shape, generator=g, dtype=torch.float64)
    drawn = drawn / max(1, p.numel() // max(1, len(p))) ** 0.5 if p.dim() > 1 else 1 + drawn / 10
    return like(p, drawn.expand(p.shape))


def tries(example: object) -> list[tuple[object, bool]]:
    """(inputs, whether maps have numbers) to follow the model on. Long rows only when it cannot run on short ones."""
    shorts = [(first_words(example, n), False) for n in (LENGTH, *LONGER)]
    size = lambda tree: sum(t.numel() for t in tree_leaves(tree) if isinstance(t, Tensor))  # noqa: E731
    different = [one for k, one in enumerate(shorts) if not k or size(one[0]) != size(shorts[k - 1][0])]
    whole = [] if size(different[-1][0]) == size(example) else [(example, False)]
    return [*different, *whole, (example, True)]
