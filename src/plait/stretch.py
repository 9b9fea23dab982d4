"""A sequence of which each rank holds a stretch, as the model's code between units sees it: one tensor, whole.

Units run on stretches; the code around them was written for sequences. A `Stretch` has the shape of the whole sequence
and the rows of this rank. What is done to every element alone is done to those rows; what only looks at its shape gets
that of the whole; anything else (the first token for a classifier, a mean over the sequence) first gathers the whole,
which is right, and is communication.

Gradients on a rank are shares of a sum over the ranks, everywhere: of parameters, and of what was whole before. So the
rows of a whole are taken without a word to the others, and gathering one sums what the ranks found.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait import regions
from plait.errors import FAILED, PlaitError, Problem
from plait.ranges import Rows
from plait.spread import Spread
from plait.torchseam import Facade, leaves, plainly, tree_flatten, tree_map, tree_unflatten

ALONE = frozenset((
    "add", "sub", "mul", "div", "true_divide", "rsub", "neg", "abs", "exp", "sigmoid", "tanh", "relu", "silu", "gelu", "clamp",
    "clone", "detach", "contiguous", "to", "float", "double", "half", "bfloat16", "type_as", "pow", "square", "sqrt", "rsqrt",
    "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__neg__", "__pow__",
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "add_", "sub_", "mul_", "div_",
    "dropout",
))  # fmt: skip
"""Functions of single elements. A dropout that comes here keeps all: one that draws is keyed, and a product."""
PLACE = frozenset(
    ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__ifloordiv__", "__imod__")
)
"""Functions that write, besides those whose names end so."""
SHAPE = frozenset((
    "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size", "ndimension", "__len__", "get_device",
    "is_contiguous", "requires_grad_", "__hash__",
))  # fmt: skip
"""Functions of shape and format."""


@dataclass(frozen=True)
class Held:
    """Which rows of the sequence the ranks of a group hold."""

    cut: Rows
    group: Any
    rank: int

    @property
    def size(self) -> int:
        """Rows of this rank."""
        return self.cut.sizes[self.rank]

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's rows."""
        return self.cut.take(whole, dim, self.rank)

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """The whole; gradients of the ranks are summed."""
        return regions.gather_partial(local, dim, self.cut, self.group)

    def fetch(self, local: Tensor, dim: int) -> Tensor:
        """The whole of something without gradients."""
        return regions.gathered(local, dim % local.dim(), self.cut, self.group)

    def finish(self, local: Tensor, dim: int) -> Tensor:
        """What stands for the whole in a loss; where nothing is learned, the whole."""
        if not torch.is_grad_enabled():
            return regions.gathered(local, dim, self.cut, self.group)
        return Spread(local, dim, self.cut, self.group)


class Stretch(Facade):
    """`local`: this rank's rows of dim `along` (counted from the end) of a sequence."""

    local: Tensor
    along: int
    held: Held

    @staticmethod
    def of(local: Tensor, dim: int, held: Held) -> "Stretch":
        """The sequence whose rows of dim `dim` on this rank are `local`."""
        along = dim - local.dim() if dim >= 0 else dim
        shape = list(local.shape)
        shape[along] = held.cut.length
        made = Facade.made(Stretch, local, shape)
        made.local, made.along, made.held = local, along, held
        return made

    def whole(self) -> Tensor:
        """All rows, as a plain tensor."""
        return self.held.gather(self.local, self.along + self.local.dim())

    def __repr__(self, **_: Any) -> str:  # pyrefly: ignore[bad-override]
        return f"Stretch(shape={tuple(self.shape)}, along={self.along}, rows={self.local.shape[self.along]})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in SHAPE or name == "__get__":
            return _attribute(func, args, kwargs)
        if name.startswith("new_") and isinstance(args[0], Stretch):  # of any shape, and without its numbers
            return func(args[0].local, *args[1:], **kwargs)
        if name == "__getitem__":
            found = _indexed(*args)
            if found is not None:
                return found
        if name in ("view", "reshape") and _as_it_is(*args):
            return Stretch.of(args[0].local, args[0].along, args[0].held)
        inplace = name in PLACE or (name.endswith("_") and name[-2:] != "__")
        fits = name in ALONE and (not inplace or isinstance(args[0], Stretch))
        alone = _aligned(args, kwargs) if fits else None
        if alone is None:
            if inplace and isinstance(args[0], Stretch):
                raise _writes(name)
            return func(*tree_map(_gathered, args), **tree_map(_gathered, kwargs))
        along, held, given = alone
        result = func(*given[0], **given[1])
        if result is getattr(args[0], "local", None):  # in place
            return args[0]
        return Stretch.of(result, along, held)


def _attribute(func: Any, args: Any, kwargs: Any) -> Any:
    with plainly():
        return func(*args, **kwargs)


def _gathered(leaf: Any) -> Any:
    return leaf.whole() if isinstance(leaf, Stretch) else leaf


def _aligned(args: Any, kwargs: Any) -> tuple[int, Held, Any] | None:
    """(dim, rows, arguments as this rank's rows) of a function of single elements; None when stretches do not match."""
    flat, spec = tree_flatten((args, kwargs))
    stretches = [leaf for leaf in flat if isinstance(leaf, Stretch)]
    along, held = stretches[0].along, stretches[0].held
    if any(s.along != along or s.held is not held for s in stretches):
        return None
    local = []
    for leaf in flat:
        if isinstance(leaf, Stretch):
            leaf = leaf.local
        elif isinstance(leaf, Tensor) and leaf.dim() >= -along and leaf.shape[along] != 1:
            if leaf.shape[along] != held.cut.length:
                return None
            leaf = held.take(leaf, along + leaf.dim())
        local.append(leaf)
    if any(isinstance(leaf, Tensor) and leaf.dim() > stretches[0].local.dim() for leaf in local[:1]):
        return None
    return along, held, tree_unflatten(local, spec)


def _indexed(x: Stretch, index: Any) -> Tensor | None:
    """Slices of other dims, all rows of the sequence's."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(not (isinstance(p, (int, slice)) or p is None or p is Ellipsis) or isinstance(p, bool) for p in parts):
        return None
    taken = sum(p is not None and p is not Ellipsis for p in parts)
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    at = parts.index(Ellipsis)
    parts[at : at + 1] = [slice(None)] * (x.dim() - taken)
    dim, along = -1, x.along + x.dim()
    for number, part in enumerate(parts):
        dim += part is not None
        if part is not None and dim == along:
            if not (isinstance(part, slice) and part.indices(x.shape[along]) == (0, x.shape[along], 1)):
                return None
            parts[number] = slice(None)
            after = sum(not isinstance(p, int) for p in parts[number:])
            return Stretch.of(x.local[tuple(parts)], -after, x.held)
    return None


def _as_it_is(x: Any, *sizes: Any) -> bool:
    """Whether a sequence is given the shape that it has."""
    shape = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    ints = isinstance(x, Stretch) and len(shape) == x.dim() and all(isinstance(n, int) for n in shape)
    return ints and list(shape).count(-1) < 2 and all(n in (-1, m) for n, m in zip(shape, x.shape))


def _writes(name: str) -> PlaitError:
    what = f"code between units writes into a sequence that ranks hold in stretches: {name}"
    return PlaitError(Problem("P040", what, why="a rank has a part of it only", fix=("cp=1",)), FAILED)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        return grads[0] / ctx.ranks, None


def shared(x: Tensor, ranks: int) -> Tensor:
    """`x`, of whose gradient every rank finds the whole: each keeps its share."""
    return _Shared.apply(x, ranks)


def for_loss(outputs: Any, ranks: int) -> Any:
    """A model's outputs for a loss that each of so many ranks computes whole."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Stretch):
            return leaf.held.finish(leaf.local, leaf.along + leaf.local.dim())
        needs = isinstance(leaf, Tensor) and leaf.requires_grad
        return shared(leaf, ranks) if needs else leaf

    leaves(outputs)  # makes trees of dataclasses
    return tree_map(one, outputs)
