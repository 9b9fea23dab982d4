"""A sequence of which each rank holds a stretch, as the model's code between units sees it: one tensor, whole.

Units run on stretches; the code around them was written for sequences. A `SequenceShard` has the shape of the whole sequence
and the rows of this rank. What is done to every element alone is done to those rows; what only looks at its shape gets
that of the whole; anything else (the first token for a classifier, a mean over the sequence) first gathers the whole,
which is right, and is communication.

Gradients on a rank are shares of a sum over the ranks, everywhere: of parameters, and of what was whole before. So the
rows of a whole are taken without a word to the others, and gathering one sums what the ranks found.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.config.errors import PlaitError, Problem
from plait.parallel.context.sequence_rules import PRODUCTS, RULES, Elsewhere, joined
from plait.randomness.sub_block import Axis
from plait.tensors import collectives
from plait.tensors.rows import Rows
from plait.tensors.sharded_tensor import ELEMENTWISE, ShardedTensor
from plait.tensors.torch_private import (
    WrapperTensor,
    checkpoint_frame,
    leaves,
    plainly,
    tree_flatten,
    tree_map,
    tree_unflatten,
    version,
)

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
class SequenceLayout:
    """Which rows of the sequence the ranks of a group hold."""

    cut: Rows
    group: Any
    rank: int

    @property
    def size(self) -> int:
        """Rows of this rank."""
        return self.cut.sizes[self.rank]

    def axis(self, local: int) -> Axis | None:
        """What this rank holds of a dim of `local` rows, of one sequence or of several, for what is drawn for its rows."""
        times, rest = divmod(local, self.size)
        return None if rest else (times * self.cut.length, self.cut.merged(times, 1).ranks[self.rank])

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's rows."""
        return self.cut.take(whole, dim, self.rank)

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """The whole; gradients of the ranks are summed."""
        return collectives.gather_partial(local, dim, self.cut, self.group)

    def fetch(self, local: Tensor, dim: int) -> Tensor:
        """The whole of something without gradients."""
        return collectives.gathered(local, dim % local.dim(), self.cut, self.group)

    def finish(self, local: Tensor, dim: int) -> Tensor:
        """What stands for the whole in a loss; where nothing is learned, the whole."""
        if not torch.is_grad_enabled():
            return collectives.gathered(local, dim, self.cut, self.group)
        return ShardedTensor(local, dim, self.cut, self.group)


class SequenceShard(WrapperTensor):
    """`local`: this rank's rows of dim `along` (counted from the end) of a sequence.

    `inside`: in a unit, where random numbers are drawn for this rank's rows alone.
    """

    local: Tensor
    along: int
    held: SequenceLayout
    times: int
    """Inside a unit: how often the dim has the sequence, one after the other, where the batch's dim is in it too."""
    known: tuple[Any, Tensor] | None
    """Inside a unit: the whole, once it was gathered, and what must not have changed since."""

    @staticmethod
    def of(local: Tensor, dim: int, held: SequenceLayout, inside: bool = False, times: int = 1) -> "SequenceShard":
        """The sequence whose rows of dim `dim` on this rank are `local`."""
        along = dim - local.dim() if dim >= 0 else dim
        shape = list(local.shape)
        shape[along] = times * held.cut.length
        made = WrapperTensor.made(SequenceShard, local, shape)
        if inside and local.requires_grad:
            with plainly():
                made.register_hook(_lost)
        made.local, made.along, made.held, made.inside, made.times, made.known = local, along, held, inside, times, None
        return made

    def like(self, local: Tensor, dim: int | None = None, rows: Rows | None = None) -> "SequenceShard":
        """Another tensor whose rows are `local`: of the same dim counted from the front, unless said otherwise."""
        times = self.times if rows is None else rows.length // self.held.cut.length
        if rows is not None and (
            rows.merged(1, 1) != self.held.cut.merged(times, 1) or (times > 1 and not self.inside)
        ):
            raise Elsewhere
        return SequenceShard.of(local, self.cut if dim is None else dim, self.held, self.inside, times)

    @property
    def cut(self) -> int:
        """The dim of the sequence."""
        return self.along + self.local.dim()

    @property
    def rows(self) -> Rows:
        """Who holds which rows."""
        return self.held.cut if self.times == 1 else self.held.cut.merged(self.times, 1)

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return self.held.rank

    def whole(self) -> Tensor:
        """All rows, as a plain tensor."""
        if not self.inside:
            return self.held.gather(self.local, self.cut)
        state = version(self.local), torch.is_grad_enabled(), checkpoint_frame()
        if self.known is None or self.known[0] != state:
            self.known = state, self._each(self.local, self.cut, self.held.gather)
        return self.known[1]

    def mine(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's rows of something as long as this one."""
        return self._each(whole, dim, self.held.take)

    def _each(self, t: Tensor, dim: int, what: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Something done to every sequence of a dim that has several."""
        if self.times == 1:
            return what(t, dim)
        return what(t.unflatten(dim, (self.times, -1)), dim % t.dim() + 1).flatten(dim % t.dim(), dim % t.dim() + 1)

    def alike(self, other: Any) -> bool:
        """Whether another stretch is cut in the same dim, counted from the end, and in the same way."""
        return (other.along, other.held, other.times) == (self.along, self.held, self.times)

    def rows_of(self, other: Tensor) -> Tensor:
        """This rank's rows of something that is broadcast against this sequence. `Elsewhere` when it does not fit."""
        if isinstance(other, SequenceShard):
            if not self.alike(other):
                raise Elsewhere
            return other.local
        if other.dim() < -self.along or other.shape[self.along] == 1:
            return other
        if other.shape[self.along] != self.rows.length:
            raise Elsewhere
        return self.mine(other, self.along + other.dim())

    def held_again(self, leaf: Any) -> Any:
        """This rank's rows of a whole that has as many dims as this one, and as many rows in the dim of the sequence."""
        alike = isinstance(leaf, Tensor) and not isinstance(leaf, SequenceShard) and leaf.dim() == self.dim()
        if not alike or leaf.shape[self.cut] != self.rows.length:
            return leaf
        return self.like(self.mine(leaf, self.cut))

    def __repr__(self, **_: Any) -> str:  # pyrefly: ignore[bad-override]
        return f"Stretch(shape={tuple(self.shape)}, along={self.along}, rows={self.local.shape[self.along]})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
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
        found = func(*tree_map(_gathered, args), **tree_map(_gathered, kwargs))
        return _cut_again(found, args, kwargs)


def _cut_again(found: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        return PRODUCTS[name](func, SequenceShard, args, kwargs)
    if name in ("cat", "concat", "stack"):
        return joined(func, args[0] if args else kwargs.pop("tensors"), args[1:], kwargs)
    if name not in RULES or not args or not isinstance(args[0], SequenceShard):
        raise Elsewhere
    result = RULES[name](func, args[0], args[1:], kwargs)
    if result is NotImplemented:
        raise Elsewhere
    return result


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


def _gathered(leaf: Any) -> Any:
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


def _lost(gradient: Tensor) -> None:
    """A gradient came by a way that no function of torch's saw: through a torch.autograd.Function of the model's own."""
    raise TypeError(
        "a torch.autograd.Function was given a sequence that ranks hold in stretches, and its gradient is lost"
    )


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
        if isinstance(leaf, SequenceShard):
            return leaf.held.finish(leaf.local, leaf.along + leaf.local.dim())
        needs = isinstance(leaf, Tensor) and leaf.requires_grad
        return shared(leaf, ranks) if needs else leaf

    leaves(outputs)  # makes trees of dataclasses
    return tree_map(one, outputs)
