"""A sequence of which each rank holds a stretch, as the model's code between units sees it: one tensor, whole.

Units run on stretches; the code around them was written for sequences. A `SequenceShard` has the shape of the whole sequence
and the rows of this rank. What is done to every element alone is done to those rows; what only looks at its shape gets
that of the whole; anything else (the first token for a classifier, a mean over the sequence) first gathers the whole,
which is right, and is communication.

Gradients on a rank are shares of a sum over the ranks, everywhere: of parameters, and of what was whole before. So the
rows of a whole are taken without a word to the others, and gathering one sums what the ranks found.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.config.errors import PlaitError, Problem
from plait.parallel.context.sequence_layout import SequenceRows
from plait.parallel.context.sequence_rules import PRODUCTS, RULES, joined
from plait.tensors.sharded_tensor import ELEMENTWISE
from plait.tensors.sharded_views import Elsewhere
from plait.tensors.torch_private import leaves, plainly, tree_flatten, tree_map, tree_unflatten

PLACE = frozenset(
    ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__ifloordiv__", "__imod__")
)
"""Functions that write, besides those whose names end so."""
SHAPE = frozenset((
    "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size", "ndimension", "__len__", "get_device",
    "is_contiguous", "requires_grad_", "__hash__",
))  # fmt: skip
"""Functions of shape and format."""


class SequenceShard(SequenceRows):
    """The rows of a sequence, with what torch's functions make of them."""

    def __repr__(self, **_: object) -> str:  # pyrefly: ignore[bad-override]
        return f"Stretch(shape={tuple(self.shape)}, along={self.along}, rows={self.local.shape[self.along]})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in SHAPE or name == "__get__":
            return _attribute(func, args, kwargs)
        if name.startswith("new_") and isinstance(args[0], SequenceShard):  # of any shape, and without its numbers
            return func(args[0].local, *args[1:], **kwargs)
        try:
            return _alone(func, name, args, kwargs)
        except Elsewhere:
            if _inplace(name) and isinstance(args[0], SequenceShard):
                raise _writes(name) from None
        found = func(*tree_map(gathered, args), **tree_map(gathered, kwargs))
        return _cut_again(found, args, kwargs)


def _cut_again(found: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Inside a unit, what was made of wholes is held in rows again: what follows is computed for these alone."""
    inside = [t for t in leaves((args, kwargs)) if isinstance(t, SequenceShard) and t.inside]
    if not inside:
        return found
    x, given = max(inside, key=lambda t: t.dim()), {id(leaf) for leaf in leaves((args, kwargs))}
    return tree_map(lambda leaf: leaf if id(leaf) in given else x.held_again(leaf), found)


def _alone(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function on this rank's rows; Elsewhere when it needs others."""
    if (name if name.startswith("__") else name.rstrip("_")) in ELEMENTWISE or name == "dropout":
        other = "out" in kwargs or (name == "where" and len(args) < 3)
        if other or (_inplace(name) and not isinstance(args[0], SequenceShard)):
            raise Elsewhere
        x, given = _aligned(args, kwargs)
        result = func(*given[0], **given[1])
        return args[0] if result is getattr(args[0], "local", None) else x.like(result, x.along + result.dim())
    if name in PRODUCTS:
        return PRODUCTS[name](func, args, kwargs)
    if name in ("cat", "concat", "stack"):
        return joined(func, args[0] if args else kwargs.pop("tensors"), args[1:], kwargs)
    if name not in RULES or not args or not isinstance(args[0], SequenceShard):
        raise Elsewhere
    return RULES[name](func, args[0], args[1:], kwargs)


def _inplace(name: str) -> bool:
    return name in PLACE or (name.endswith("_") and name[-2:] != "__")


def _attribute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, name = args[0], getattr(getattr(func, "__self__", None), "__name__", "")
    if name in ("T", "mT", "H", "mH") and isinstance(x, SequenceShard):
        return RULES["transpose"](torch.transpose, x, (-2, -1), {})
    if name in ("real", "imag") and isinstance(x, SequenceShard):
        return x.like(getattr(x.local, name))
    with plainly():
        return func(*args, **kwargs)


def gathered(leaf: object) -> object:
    """What is a sequence, whole."""
    return leaf.whole() if isinstance(leaf, SequenceShard) else leaf


def _aligned(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[SequenceShard, Any]:
    """(one of the stretches, arguments as this rank's rows) of a function of single elements."""
    flat, spec = tree_flatten((args, kwargs))
    stretches = [leaf for leaf in flat if isinstance(leaf, SequenceShard)]
    x = max(stretches, key=lambda s: s.local.dim())
    return x, tree_unflatten([x.rows_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in flat], spec)


def _writes(name: str) -> PlaitError:
    what = f"code between units writes into a sequence that ranks hold in stretches: {name}"
    return PlaitError(Problem("P040", what, why="a rank has a part of it only", fix=("cp=1",)))


class _Shared(torch.autograd.Function):
    """A tensor of whose gradient every rank finds the whole: each keeps its share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        return grads[0] / ctx.ranks, None


def for_loss(outputs: object, ranks: int) -> object:
    """A model's outputs for a loss that each of so many ranks computes whole."""

    def one(leaf: object) -> object:
        if isinstance(leaf, SequenceShard):
            return leaf.held.finish(leaf.local, leaf.along + leaf.local.dim())
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            return _Shared.apply(leaf, ranks)
        return leaf

    leaves(outputs)  # makes trees of dataclasses
    return tree_map(one, outputs)
