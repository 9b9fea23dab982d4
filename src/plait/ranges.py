"""Which rows of a dim each rank of a group holds: in order or not, in one stretch or several, equally many or not."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from plait.parts import Ranges


@dataclass(frozen=True)
class Rows:
    """The ranges of a dim that each rank of a group holds. Together they are the dim, each row once."""

    ranks: tuple[Ranges, ...]

    @classmethod
    def of(cls, sizes: Sequence[int]) -> "Rows":
        """Rank after rank, each its number of rows (which may be zero)."""
        firsts = [sum(sizes[:rank]) for rank in range(len(sizes))]
        return cls(tuple(((first, size),) for first, size in zip(firsts, sizes)))

    @classmethod
    def even(cls, length: int, ranks: int) -> "Rows":
        """As equal as can be: sizes differ by at most one, the first ranks have the larger ones."""
        return cls.of([length // ranks + (rank < length % ranks) for rank in range(ranks)])

    @classmethod
    def zigzag(cls, length: int, ranks: int) -> "Rows":
        """Of 2 · ranks stretches rank r has the r-th from the front and the r-th from the end: causal work is equal."""
        pieces = [ranges[0] for ranges in cls.even(length, 2 * ranks).ranks]
        return cls(tuple((pieces[rank], pieces[-1 - rank]) for rank in range(ranks)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each rank."""
        return tuple(sum(length for _, length in ranges) for ranges in self.ranks)

    @cached_property
    def length(self) -> int:
        """Rows of the whole."""
        return sum(self.sizes)

    def take(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        """The part of a rank, in one piece; a view where that is possible."""
        pieces = [whole.narrow(dim, first, length) for first, length in self.ranks[rank] if length]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [whole.narrow(dim, 0, 0)], dim)


Cut = Rows
"""The name it had first."""
