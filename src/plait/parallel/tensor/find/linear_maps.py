"""Linear layers, the dims along which their weights can be sharded, and the integers to divide for it.

A linear map multiplies the features of its input by a matrix and adds a bias: `nn.Linear`, convolutions over all
channels, and custom modules that do the same. Custom modules are tested on random values, because a class name proves
nothing.

[Note: Trace inputs]
While slices are searched, a model runs with random weights, on short sequences if it supports them.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from plait.model.equal_layers import LARGE_MODEL
from plait.tensors.parameters import make_parameter_like
from plait.tensors.torch_private import FakeTensor, tree_leaves
from plait.tensors.trees import take_first_tokens

_CONVOLUTIONS: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
_TRANSPOSED: dict[type[nn.Module], int] = {nn.ConvTranspose1d: 1, nn.ConvTranspose2d: 2, nn.ConvTranspose3d: 3}


@dataclass(frozen=True)
class LinearMap:
    """A module that maps features linearly."""

    name: str
    module: nn.Module
    out_dim: int
    """Dim of its weight for output features."""
    in_dim: int
    """Dim of its weight for input features."""
    feature_dim: int = -1
    """Dim of its input and output for features, counted from the end."""
    is_torch_class: bool = True
    """It is torch's own class, whose forward does not read its numbers of features."""

    @property
    def weight(self) -> Tensor:
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """Bias of shape [output features], or None."""
        bias = getattr(self.module, "bias", None)
        return bias if isinstance(bias, Tensor) else None

    def find_integers(self, role: str, n: int) -> tuple[str, ...] | None:
        """Return the attributes to divide if it is split into n along its `role` dim, "out" or "into". None: it cannot
        run split."""
        dim = self.out_dim if role == "out" else self.in_dim
        size = self.weight.shape[dim]
        if self.is_torch_class:
            names = ("out_features", "out_channels") if role == "out" else ("in_features", "in_channels")
            return tuple(k for k in names if hasattr(self.module, k))
        equal = [k for k, v in vars(self.module).items() if type(v) is int and v == size]
        for count in range(len(equal) + 1):
            for names in itertools.combinations(equal, count):
                if self._can_run(role, names, n):
                    return names
        return None

    def _can_run(self, role: str, names: tuple[str, ...], n: int) -> bool:
        """Return whether the module's own forward is correct with the first n-th of its features."""
        weight = _random_like(self.weight)
        cut = weight.chunk(n, self.out_dim if role == "out" else self.in_dim)[0]
        bias = None if self.bias is None else _random_like(self.bias)
        bias = bias.chunk(n)[0] if bias is not None and role == "out" else bias
        before = {k: getattr(self.module, k) for k in names}
        try:
            for k in names:
                setattr(self.module, k, before[k] // n)
            return _is_matmul(self.module, cut, bias, self.in_dim)
        finally:
            for k, v in before.items():
                setattr(self.module, k, v)


def find_maps(model: nn.Module) -> dict[str, LinearMap]:
    """Return every linear map of a model, by name."""
    tried: dict[type, int | None] = {}
    maps = {}
    for name, module in model.named_modules():
        linear = _make_torch_map(name, module)
        if linear is None and _is_candidate(module):
            if type(module) not in tried:
                tried[type(module)] = _find_in_dim(module)
            into = tried[type(module)]
            linear = None if into is None else LinearMap(name, module, 1 - into, into, is_torch_class=False)
        if linear is not None:
            maps[name] = linear
    return maps


def _make_torch_map(name: str, module: nn.Module) -> LinearMap | None:
    """Return a map if the module is torch's own, with its original forward and weight."""
    kind: type[nn.Module] | None = next(
        (k for k in (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED) if isinstance(module, k)), None
    )
    if kind is None or type(module).forward is not kind.forward or "forward" in vars(module):
        return None
    if "weight" not in dict(module.named_parameters(recurse=False)) or getattr(module, "groups", 1) != 1:
        return None
    if kind is nn.Linear:
        return LinearMap(name, module, 0, 1)
    if kind in _TRANSPOSED:
        return LinearMap(name, module, 1, 0, -(_TRANSPOSED[kind] + 1))
    return LinearMap(name, module, 0, 1, -(_CONVOLUTIONS[kind] + 1))


def _is_candidate(module: nn.Module) -> bool:
    """Return whether the module has only a matrix, and perhaps a vector."""
    dims = {k: p.dim() for k, p in module.named_parameters(recurse=False)}
    more = [*module.children(), *module.buffers()] or isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return not more and dims in ({"weight": 2}, {"weight": 2, "bias": 1})


def _find_in_dim(module: nn.Module) -> int | None:
    """Return the dim of its weight for input features, or None if it is not a linear map."""
    own = dict(module.named_parameters(recurse=False))
    weight, bias = _random_like(own["weight"]), _random_like(own["bias"]) if "bias" in own else None
    return next((into for into in (1, 0) if _is_matmul(module, weight, bias, into)), None)


def _is_matmul(module: nn.Module, weight: Tensor, bias: Tensor | None, into: int) -> bool:
    x = torch.randn(2, 3, weight.shape[into], dtype=weight.dtype)
    want = x @ (weight if into == 0 else weight.t())
    parameters = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    try:
        with torch.no_grad():
            got = functional_call(module, parameters, (x,))
            return isinstance(got, Tensor) and torch.allclose(got, want if bias is None else want + bias)
    except Exception:  # it is not a linear map
        return False


def _random_like(like: Tensor) -> Tensor:
    return torch.randn(like.shape, dtype=torch.float64)


def find_attentions(model: nn.Module) -> dict[str, nn.MultiheadAttention]:
    """Return every `nn.MultiheadAttention` with torch's own forward, by name."""
    every = {name: m for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    return {name: m for name, m in every.items() if type(m).forward is nn.MultiheadAttention.forward}


SHORT_LENGTH = 7
"""Length of short sequences. It differs from the number of samples, so that the two dims are distinguishable."""
LONGER_LENGTHS = (17, 65, 257)
"""Longer sequences, for models whose path on short sequences differs from that on full ones."""
LARGE_TABLE = 1 << 22
"""Number of elements above which not every row of a table is drawn."""


@contextmanager
def use_random_weights(model: nn.Module) -> Iterator[None]:
    """Replace weights by random float64 values on the host, inside this context. Zeros from a constructor would prove
    nothing, and the device may have too little memory. Buffers are moved to the host too.

    All rows of a large table are equal. So are the rows of linear layers' matrices in a large model, because nothing
    reads them.
    """
    g = torch.Generator().manual_seed(0)
    maps = {id(p) for m in find_maps(model).values() for p in m.module.parameters()}
    large = sum(p.numel() for p in model.parameters()) > LARGE_MODEL
    before = [(m, n, p, p.data) for m in model.modules() for n, p in m.named_parameters(recurse=False)]
    new = {id(p): _draw_parameter(p, g, p.numel() > LARGE_TABLE or (large and id(p) in maps)) for _, _, p, _ in before}
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


def _draw_parameter(p: nn.Parameter, g: torch.Generator, alike: bool) -> nn.Parameter:
    if not p.is_floating_point():
        return make_parameter_like(p, p.detach().cpu())
    drawn = torch.randn(p.shape[-1:] if alike else p.shape, generator=g, dtype=torch.float64)
    drawn = drawn / max(1, p.numel() // max(1, len(p))) ** 0.5 if p.dim() > 1 else 1 + drawn / 10
    return make_parameter_like(p, drawn.expand(p.shape))


def list_trace_inputs(example: object) -> list[tuple[object, bool]]:
    """Return (inputs, whether linear layers compute real outputs) to try in turn (see [Note: Trace inputs])."""
    shorts = [(take_first_tokens(example, n), False) for n in (SHORT_LENGTH, *LONGER_LENGTHS)]
    size = lambda tree: sum(t.numel() for t in tree_leaves(tree) if isinstance(t, Tensor))  # noqa: E731
    different = [one for k, one in enumerate(shorts) if not k or size(one[0]) != size(shorts[k - 1][0])]
    whole = [] if size(different[-1][0]) == size(example) else [(example, False)]
    return [*different, *whole, (example, True)]
