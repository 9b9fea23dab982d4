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
from plait.spread import ELEMENTWISE, Spread
from plait.stretchrules import RULES, Elsewhere, joined
from plait.torchseam import Facade, leaves, plainly, tree_flatten, tree_map, tree_unflatten

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
    """`local`: this rank's rows of dim `along` (counted from the end) of a sequence.

    `inside`: in a unit, where random numbers are drawn for this rank's rows alone.
    """

    local: Tensor
    along: int
    held: Held

    @staticmethod
    def of(local: Tensor, dim: int, held: Held, inside: bool = False) -> "Stretch":
        """The sequence whose rows of dim `dim` on this rank are `local`."""
        along = dim - local.dim() if dim >= 0 else dim
        shape = list(local.shape)
        shape[along] = held.cut.length
        made = Facade.made(Stretch, local, shape)
        made.local, made.along, made.held, made.inside = local, along, held, inside
        return made

    def like(self, local: Tensor, dim: int | None = None, rows: Rows | None = None) -> "Stretch":
        """Another tensor whose rows are `local`: of the same dim counted from the front, unless said otherwise."""
        if rows is not None and rows.merged(1, 1) != self.rows.merged(1, 1):
            raise Elsewhere
        return Stretch.of(local, self.cut if dim is None else dim, self.held, self.inside)

    @property
    def cut(self) -> int:
        """The dim of the sequence."""
        return self.along + self.local.dim()

    @property
    def rows(self) -> Rows:
        """Who holds which rows."""
        return self.held.cut

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return self.held.rank

    def whole(self) -> Tensor:
        """All rows, as a plain tensor."""
        return self.held.gather(self.local, self.cut)

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
        try:
            return _alone(func, name, args, kwargs)
        except Elsewhere:
            if _inplace(name) and isinstance(args[0], Stretch):
                raise _writes(name) from None
        return func(*tree_map(_gathered, args), **tree_map(_gathered, kwargs))


def _alone(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The function on this rank's rows; Elsewhere when it needs others."""
    if (name if name.startswith("__") else name.rstrip("_")) in ELEMENTWISE or name == "dropout":
        other = "out" in kwargs or (name == "where" and len(args) < 3)
        if other or (_inplace(name) and not isinstance(args[0], Stretch)):
            raise Elsewhere
        x, given = _aligned(args, kwargs)
        result = func(*given[0], **given[1])
        return args[0] if result is getattr(args[0], "local", None) else x.like(result, x.along + result.dim())
    if name in ("cat", "concat", "stack"):
        return joined(func, args[0] if args else kwargs.pop("tensors"), args[1:], kwargs)
    if name not in RULES or not args or not isinstance(args[0], Stretch):
        raise Elsewhere
    result = RULES[name](func, args[0], args[1:], kwargs)
    if result is NotImplemented:
        raise Elsewhere
    return result


def _inplace(name: str) -> bool:
    return name in PLACE or (name.endswith("_") and name[-2:] != "__")


def _attribute(func: Any, args: Any, kwargs: Any) -> Any:
    x, name = args[0], getattr(getattr(func, "__self__", None), "__name__", "")
    if name in ("T", "mT", "H", "mH") and isinstance(x, Stretch):
        return RULES["transpose"](torch.transpose, x, (-2, -1), {})
    if name in ("real", "imag") and isinstance(x, Stretch):
        return x.like(getattr(x.local, name))
    with plainly():
        return func(*args, **kwargs)


def _gathered(leaf: Any) -> Any:
    return leaf.whole() if isinstance(leaf, Stretch) else leaf


def _aligned(args: Any, kwargs: Any) -> tuple[Stretch, Any]:
    """(one of the stretches, arguments as this rank's rows) of a function of single elements."""
    flat, spec = tree_flatten((args, kwargs))
    stretches = [leaf for leaf in flat if isinstance(leaf, Stretch)]
    x = max(stretches, key=lambda s: s.local.dim())
    if any(s.along != x.along or s.held != x.held for s in stretches):
        raise Elsewhere
    local = []
    for leaf in flat:
        if isinstance(leaf, Stretch):
            leaf = leaf.local
        elif isinstance(leaf, Tensor) and leaf.dim() >= -x.along and leaf.shape[x.along] != 1:
            if leaf.shape[x.along] != x.rows.length:
                raise Elsewhere
            leaf = x.held.take(leaf, x.along + leaf.dim())
        local.append(leaf)
    return x, tree_unflatten(local, spec)


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
