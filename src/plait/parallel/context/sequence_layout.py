"""Which rows of a sequence a rank holds, and a tensor that stands for the sequence of which it holds them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.randomness.sub_block import Axis
from plait.tensors import collectives
from plait.tensors.collectives import Absent
from plait.tensors.rows import Rows
from plait.tensors.sharded_tensor import ShardedTensor
from plait.tensors.sharded_views import Elsewhere
from plait.tensors.torch_private import WrapperTensor, checkpoint_frame, plainly, version


@dataclass(frozen=True)
class SequenceLayout:
    """Which rows of a sequence a rank holds that cannot ask the others for theirs."""

    cut: Rows
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
        raise RuntimeError("its code needs all rows of the sequence")

    def fetch(self, local: Tensor, dim: int) -> Tensor:
        """The whole of something without gradients."""
        return self.gather(local, dim)

    def finish(self, local: Tensor, dim: int) -> Tensor:
        """What stands for the whole in a loss; where nothing is learned, the whole."""
        return self.fetch(local, dim)


@dataclass(frozen=True)
class GroupLayout(SequenceLayout):
    """Which rows of a sequence this rank of a group holds."""

    group: ProcessGroup | Absent

    def gather(self, local: Tensor, dim: int) -> Tensor:
        return collectives.gather_partial(local, dim, self.cut, self.group)

    def fetch(self, local: Tensor, dim: int) -> Tensor:
        return collectives.gathered(local, dim % local.dim(), self.cut, self.group)

    def finish(self, local: Tensor, dim: int) -> Tensor:
        if not torch.is_grad_enabled():
            return self.fetch(local, dim)
        return ShardedTensor(local, dim, self.cut, self.group)


class SequenceRows(WrapperTensor):
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

    @classmethod
    def of(cls, local: Tensor, dim: int, held: SequenceLayout, inside: bool = False, times: int = 1) -> Self:
        """The sequence whose rows of dim `dim` on this rank are `local`."""
        along = dim - local.dim() if dim >= 0 else dim
        shape = list(local.shape)
        shape[along] = times * held.cut.length
        made = WrapperTensor.made(cls, local, shape)
        if inside and local.requires_grad:
            with plainly():
                made.register_hook(_lost)
        made.local, made.along, made.held, made.inside, made.times, made.known = local, along, held, inside, times, None
        return made

    def like(self, local: Tensor, dim: int | None = None, rows: Rows | None = None) -> Self:
        """Another tensor whose rows are `local`: of the same dim counted from the front, unless said otherwise."""
        times = self.times
        if rows is not None:
            times = rows.length // self.held.cut.length
            if rows.merged(1, 1) != self.held.cut.merged(times, 1) or (times > 1 and not self.inside):
                raise Elsewhere
        return self.of(local, self.cut if dim is None else dim, self.held, self.inside, times)

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

    def alike(self, other: "SequenceRows") -> bool:
        """Whether another stretch is cut in the same dim, counted from the end, and in the same way."""
        return (other.along, other.held, other.times) == (self.along, self.held, self.times)

    def rows_of(self, other: Tensor) -> Tensor:
        """This rank's rows of something that is broadcast against this sequence. `Elsewhere` when it does not fit."""
        if isinstance(other, SequenceRows):
            if not self.alike(other):
                raise Elsewhere
            return other.local
        if other.dim() < -self.along or other.shape[self.along] == 1:
            return other
        if other.shape[self.along] != self.rows.length:
            raise Elsewhere
        return self.mine(other, self.along + other.dim())

    def held_again(self, leaf: object) -> object:
        """This rank's rows of a whole that has as many dims as this one, and as many rows in the dim of the sequence."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, SequenceRows) or leaf.dim() != self.dim():
            return leaf
        return self.like(self.mine(leaf, self.cut)) if leaf.shape[self.cut] == self.rows.length else leaf


def _lost(gradient: Tensor) -> None:
    """A gradient came by a way that no function of torch's saw: through a torch.autograd.Function of the model's own."""
    raise TypeError(
        "a torch.autograd.Function was given a sequence that ranks hold in stretches, and its gradient is lost"
    )
