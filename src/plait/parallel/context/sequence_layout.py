"""Which rows of a sequence a rank holds, and a tensor that stands for the sequence of which it holds them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.randomness.sub_block import Axis
from plait.tensors import collectives
from plait.tensors.rows import Rows, dense
from plait.tensors.shaped import lengthened
from plait.tensors.sharded_tensor import ShardedTensor
from plait.tensors.sharded_views import Elsewhere
from plait.tensors.torch_private import checkpoint_frame, version


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
        """This rank's rows, laid out as a sequence of their number."""
        return dense(self.cut.take(whole, dim, self.rank))

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

    group: ProcessGroup

    def gather(self, local: Tensor, dim: int) -> Tensor:
        return collectives.gather_partial(local, dim, self.cut, self.group)

    def fetch(self, local: Tensor, dim: int) -> Tensor:
        return collectives.gathered(local, dim % local.dim(), self.cut, self.group)

    def finish(self, local: Tensor, dim: int) -> Tensor:
        if not torch.is_grad_enabled():
            return self.fetch(local, dim)
        return ShardedTensor(local, dim, self.cut, self.group)


class SequenceRows(ShardedTensor):
    """A sequence of which this rank has rows. `inside`: in a unit, where random numbers are drawn for this rank's rows alone."""

    held: SequenceLayout
    times: int
    """Inside a unit: how often the dim has the sequence, one after the other, where the batch's dim is in it too."""
    known: tuple[Any, Tensor] | None = None
    """Inside a unit: the whole, once it was gathered, and what must not have changed since."""
    described = "a sequence that ranks hold in stretches, and its gradient is lost"

    @classmethod
    def of(cls, local: Tensor, dim: int, held: SequenceLayout, inside: bool = False, times: int = 1) -> Self:
        """The sequence whose rows of dim `dim` on this rank are `local`."""
        rows = held.cut if times == 1 else held.cut.merged(times, 1)
        shape = lengthened(local, dim % local.dim(), rows.length)
        return cls.around(local, shape, cut=dim % local.dim(), rows=rows, held=held, inside=inside, times=times)

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return self.held.rank

    def like(self, local: Tensor, dim: int | None = None, rows: Rows | None = None) -> Self:
        """Another tensor whose rows are `local`: of whole sequences, one, or several inside a unit. Elsewhere if they are not."""
        times = self.times
        if rows is not None:
            times = rows.length // self.held.cut.length
            if rows.merged(1, 1) != self.held.cut.merged(times, 1) or (times > 1 and not self.inside):
                raise Elsewhere
        return self.of(local, self.cut if dim is None else dim, self.held, self.inside, times)

    def whole(self) -> Tensor:
        """All rows, as a plain tensor. Backward: this rank's rows of the sum of all ranks' gradients."""
        if not self.inside:
            return self.held.gather(self.local, self.cut)
        state = version(self.local), torch.is_grad_enabled(), checkpoint_frame()
        if self.known is None or self.known[0] != state:
            self.known = state, self._each(self.local, self.cut, self.held.gather)
        return self.known[1]

    def mine(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's rows of something as long as this one, without a word to the others."""
        return self._each(whole, dim % whole.dim(), self.held.take)

    def entered(self, whole: Tensor) -> Tensor:
        """An operand that all ranks have: each finds a share of its gradient."""
        return whole

    def alike(self, other: ShardedTensor) -> bool:
        """Whether another stretch is cut in the same dim, counted from the end, and in the same way."""
        same = isinstance(other, SequenceRows) and (other.held, other.times) == (self.held, self.times)
        return same and other.along == self.along

    def _each(self, t: Tensor, dim: int, what: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Something done to every sequence of a dim that has several."""
        if self.times == 1:
            return what(t, dim)
        return what(t.unflatten(dim, (self.times, -1)), dim + 1).flatten(dim, dim + 1)

    def held_again(self, leaf: object) -> object:
        """This rank's rows of a whole that has as many dims as this one, and as many rows in the dim of the sequence."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, SequenceRows) or leaf.dim() != self.dim():
            return leaf
        return self.like(self.mine(leaf, self.cut)) if leaf.shape[self.cut] == self.rows.length else leaf
