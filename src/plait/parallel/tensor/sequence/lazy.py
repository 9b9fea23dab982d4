"""A rank's rows of a sequence under the shape of the whole, inside a unit and between units.

A block that is one module reads `batch, length, width = x.shape` and shapes queries and keys by it: in a region these are
whole, outside of it x is a stretch. So x is `GlobalShape` as the whole: it has its shape, and whatever is done to it is done
to this rank's rows. That this is right for what the unit does is not known here: `parallel/tensor/sequence/check.py` has tried it.

Between units nothing was tried. What a unit returned is `LazyGather` there: the next unit takes its rows, and whatever else
is done with it is done with the whole, which is gathered then. What an embedding returned whose words are cut is `Owed`
(`parallel/tensor/sequence/lazy.py`): a sum that is not made yet.

A sum over the ranks that is not made yet: what an embedding returns whose words are cut over them.

Every rank has looked up the words that it holds, and zeros for the others: the sum of these shares is the embedding. If
the next unit runs on stretches of the sequence, a rank needs the sum of its rows only, which is half of what the sum of
all rows sends. So to the code between units the embedding is `PartialSum`: a tensor with the shape of the whole, and this
rank's share in it. What is linear is done to the shares (positions are added to the first rank's alone, a mask drawn
for the whole is multiplied with each), a unit on stretches gets its rows of the sum, and whatever else is done with it
is done with the sum, which is made then.

Gradients: what is whole has its whole gradient on every rank, and so have a share and what is added to it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plait.randomness.distributions import dropout_call
from plait.tensors.rows import Rows
from plait.tensors.torch_private import WrapperTensor, plainly, tree_leaves, tree_map, version

LOOKS = frozenset(("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_cpu"))
"""Attributes that need no numbers."""
ASKS = frozenset((
    "size", "dim", "ndimension", "numel", "nelement", "__len__", "is_floating_point", "is_complex", "get_device", "element_size",
    "__hash__",
))  # fmt: skip
"""Methods that need none."""


def looks(func: Any) -> bool:
    """Whether a function asks for shape and format alone."""
    name = getattr(func, "__name__", "")
    return name in ASKS or (name == "__get__" and func.__self__.__name__ in LOOKS)


def lost(gradient: Tensor) -> None:
    """A gradient came by a way that no function of torch's saw: through a torch.autograd.Function of the model's own."""
    raise TypeError(
        "a torch.autograd.Function was given hidden states that ranks hold in stretches: use sequence_parallel=false"
    )


class Shaped(WrapperTensor):
    """Something with the shape of the whole: what asks for shape and format alone is answered by it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if looks(func):
            with plainly():
                return func(*args, **kwargs)
        return cls.computed(func, args, kwargs)

    @classmethod
    def computed(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What any other function gives."""
        raise NotImplementedError


class GlobalShape(Shaped):
    """The whole, of which `local` are this rank's rows of dim `along` (counted from the end)."""

    local: Tensor
    along: int
    inside = True

    @staticmethod
    def of(local: Tensor, dim: int, length: int) -> "GlobalShape":
        """Rows of a sequence of that length, along a dim."""
        posing = WrapperTensor.made(GlobalShape, local, [length if d == dim else n for d, n in enumerate(local.shape)])
        if local.requires_grad:
            with plainly():
                posing.register_hook(lost)
        posing.local, posing.along = local, dim - local.dim()
        return posing

    def like(self, local: Any) -> Any:
        """What was made of its rows, posing too where it has them."""
        fits = isinstance(local, Tensor) and not isinstance(local, GlobalShape) and local.dim() == self.dim()
        if not fits or local.shape[self.along] != self.local.shape[self.along]:
            return local
        return GlobalShape.of(local, self.along + local.dim(), self.shape[self.along])

    @classmethod
    def computed(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        posing = max((t for t in tree_leaves((args, kwargs)) if isinstance(t, GlobalShape)), key=lambda t: t.dim())
        result = func(*tree_map(rows_of, args), **tree_map(rows_of, kwargs))
        first = args[0] if args else None
        if isinstance(first, GlobalShape) and result is first.local:  # in place
            return first
        return tree_map(posing.like, result)

    def __repr__(self, **_: Any) -> str:  # pyrefly: ignore[bad-override]
        return f"Posing(shape={tuple(self.shape)}, here {tuple(self.local.shape)})"


def rows_of(leaf: Any) -> Any:
    """This rank's rows, of what poses as the whole."""
    return leaf.local if isinstance(leaf, GlobalShape) else leaf


class Lazy(Shaped):
    """A whole that is not there yet, to code between units: it is made when something asks for more than its shape."""

    def whole(self) -> Tensor:
        """The plain tensor."""
        raise NotImplementedError

    def waits(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a function gives that does not ask for the whole; NotImplemented of one that does."""
        same = args[0] is self and _same(func.__name__, self.shape, args[1:], kwargs)
        return self if same else NotImplemented

    @classmethod
    def computed(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = next((a for a in args if isinstance(a, Lazy)), None)
        result = NotImplemented if first is None else first.waits(func, args, kwargs)
        return func(*tree_map(plain, args), **tree_map(plain, kwargs)) if result is NotImplemented else result


def _same(name: str, shape: Sequence[int], how: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function of a tensor gives all of it back as it is: `x[:, 0:]`, `x.view(x.shape)`."""
    if kwargs:
        return False
    if name == "__getitem__":
        index = list(how[0]) if isinstance(how[0], tuple) else [how[0]]
        at = next((i for i, each in enumerate(index) if each is Ellipsis), len(index))
        index[at : at + 1] = [slice(None)] * (len(shape) - len(index) + (at < len(index)))
        plain_slices = all(isinstance(i, slice) and _numbers((i.start, i.stop, i.step)) for i in index)
        return plain_slices and [i.indices(n) for i, n in zip(index, shape)] == [(0, n, 1) for n in shape]
    if name in ("view", "reshape"):
        sizes = list(how[0]) if len(how) == 1 and isinstance(how[0], (tuple, list)) else list(how)
        if not _numbers(sizes) or len(sizes) != len(shape):
            return False
        free = [d for d, n in enumerate(sizes) if n == -1]
        return len(free) < 2 and all(n == m or d in free for d, (n, m) in enumerate(zip(sizes, shape)))
    return name == "contiguous" and not how


def _numbers(values: Any) -> bool:
    return all(type(v) in (int, type(None)) for v in values)


class LazyGather(Lazy):
    """The whole of which this rank has `local`, its `rows` of `dim`: gathered when something asks for more than the shape."""

    local: Tensor
    cut: int
    rows: Rows
    by: Any
    unit: str
    gathered: Tensor | None
    noted: int

    @staticmethod
    def of(local: Tensor, dim: int, rows: Rows, by: Any, unit: str) -> "LazyGather":
        """The whole of which this rank computed `local`, in a unit."""
        shape = [rows.length if d == dim else n for d, n in enumerate(local.shape)]
        late = WrapperTensor.made(LazyGather, local, shape)
        if local.requires_grad:
            with plainly():
                late.register_hook(lost)
        late.local, late.cut, late.rows, late.by, late.unit, late.gathered, late.noted = (
            local,
            dim,
            rows,
            by,
            unit,
            None,
            0,
        )
        return late

    def whole(self) -> Tensor:
        """The plain tensor, gathered once."""
        if self.gathered is None:
            self.gathered = self.by.gathered(self.local, self.cut, self.rows, self.unit)
            self.noted = version(self.gathered)
        return self.gathered

    def mine(self) -> Tensor:
        """This rank's rows, as they are now: the model's code may have written to the whole."""
        if self.gathered is None or version(self.gathered) == self.noted:
            return self.local
        return self.by.taken(self.gathered, self.cut, self.rows, self.unit)

    def __repr__(self, **_: Any) -> str:  # pyrefly: ignore[bad-override]
        return f"Late(shape={tuple(self.shape)}, dim {self.cut}, here {tuple(self.local.shape)})"


def plain(leaf: Any) -> Any:
    """The whole, where it waits."""
    return leaf.whole() if isinstance(leaf, Lazy) else leaf


ADDS = frozenset(("add", "__add__", "__radd__"))
SCALES = frozenset(("mul", "multiply", "__mul__", "__rmul__"))
DIVIDES = frozenset(("div", "divide", "true_divide", "__truediv__"))


class PartialSum(Lazy):
    """The sum of the `local` of all ranks, which `by` (`SequenceParallelUnits`) makes. `unit`: the embedding it is of."""

    local: Tensor
    by: Any
    unit: str
    made: Any
    """What it has become: None, the whole, or the `LazyGather` of a stretch."""

    @staticmethod
    def of(local: Tensor, by: Any, unit: str) -> "PartialSum":
        """The sum of which this rank has the share `local`."""
        owed = WrapperTensor.made(PartialSum, local, list(local.shape))
        if local.requires_grad:
            with plainly():
                owed.register_hook(lost)
        owed.local, owed.by, owed.unit, owed.made = local, by, unit, None
        return owed

    @property
    def inside(self) -> bool:  # type: ignore[override]
        """Numbers are drawn for the share, which has the shape of the whole."""
        return self.made is None

    def like(self, local: Tensor) -> "PartialSum":
        """Another sum, of this one's shares after something linear."""
        return PartialSum.of(local, self.by, self.unit)

    def whole(self) -> Tensor:
        """The plain tensor, made once."""
        if self.made is None:
            self.made = self.by.summed(self.local, self.unit)
        return plain(self.made)

    def stretch(self, dim: int, rows: Rows) -> Any:
        """For a unit on stretches: `LazyGather`, this rank's rows of the sum, unless the whole is there already."""
        if self.made is None:
            self.made = LazyGather.of(self.by.left(self.local, dim, rows, self.unit), dim, rows, self.by, self.unit)
        return self.made

    def waits(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is linear, on the shares."""
        name = func.__name__
        if name == "dropout" and args[0] is self:
            return NotImplemented if dropout_call(func, *args, **kwargs).drops else self
        if self.made is None and len(args) == 2 and not kwargs:
            other = args[1] if args[0] is self else args[0]
            if name in ADDS and isinstance(other, Tensor):
                return self._plus(other)
            if (name in SCALES or (name in DIVIDES and args[0] is self)) and _number(other):
                return self.like(func(*(self.local if a is self else a for a in args)))
        return super().waits(func, args, kwargs)

    def _plus(self, other: Tensor) -> Any:
        """With a tensor that every rank has, or another sum."""
        if other.dtype != self.dtype or other.device != self.device:
            return NotImplemented
        if isinstance(other, PartialSum):
            return self.like(self.local + other.local) if other.made is None else NotImplemented
        if isinstance(other, WrapperTensor):
            return NotImplemented
        return self.like(_Once.apply(self.local, other, self.by.group.rank() == 0))

    def __repr__(self, **_: Any) -> str:  # pyrefly: ignore[bad-override]
        return f"Owed(shape={tuple(self.shape)})"


def _number(x: Any) -> bool:
    """A number, or a tensor that is one and is not learned."""
    return isinstance(x, (int, float)) or (isinstance(x, Tensor) and not x.dim() and not x.requires_grad)


class _Once(torch.autograd.Function):
    """A share with something added that all ranks have: by the `first` of them only."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, other: Tensor, first: bool) -> Tensor:
        ctx.shapes = share.shape, other.shape
        shape = torch.broadcast_shapes(*ctx.shapes)
        return share + other if first else share.expand(shape).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        found = (grads[0].sum_to_size(s) if needed else None for s, needed in zip(ctx.shapes, ctx.needs_input_grad))
        return (*found, None)
