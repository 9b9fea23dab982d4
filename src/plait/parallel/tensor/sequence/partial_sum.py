"""A sum over the ranks that is not made yet: what an embedding returns whose words are cut over them.

Every rank has looked up the words that it holds, and zeros for the others: the sum of these shares is the embedding. If
the next unit runs on stretches of the sequence, a rank needs the sum of its rows only, which is half of what the sum of
all rows sends. So to the code between units the embedding is `PartialSum`: a tensor with the shape of the whole, and this
rank's share in it. What is linear is done to the shares (positions are added to the first rank's alone, a mask drawn
for the whole is multiplied with each), a unit on stretches gets its rows of the sum, and whatever else is done with it
is done with the sum, which is made then.

Gradients: what is whole has its whole gradient on every rank, and so have a share and what is added to it.
"""

from typing import Any

import torch
from torch import Tensor

from plait.parallel.tensor.sequence.lazy import Lazy, LazyGather, lost, plain
from plait.tensors.rows import Rows
from plait.tensors.torch_private import WrapperTensor, plainly

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

    def waits(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What is linear, on the shares."""
        name = func.__name__
        if name == "dropout" and args[0] is self:
            training = args[2] if len(args) > 2 else kwargs.get("training", True)
            p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return NotImplemented if training and p else self
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
