"""Which part of a tensor a rank holds: what checkpoints, digests and `verify` need to know of a layout, and no more.

A part is a rectangle. Every layout plait makes (copies, shards, slices, stages) is a set of parts per rank; two ranks
that hold the same rectangle hold copies. Nothing here knows which strategy made them.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Part:
    """This rank's rectangle of a tensor of `shape`, beginning at `start`; `tensor` is the storage itself, not a copy."""

    tensor: Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether this rank holds all of it."""
        return tuple(self.tensor.shape) == self.shape

    def inside(self, tensor: Tensor) -> Tensor:
        """The stretch of a whole tensor (or anything of `shape`) that this part covers, as a view."""
        for dim, (first, length) in enumerate(zip(self.start, self.tensor.shape)):
            tensor = tensor.narrow(dim, first, length)
        return tensor


def whole(tensor: Tensor) -> Part:
    """The part of a rank that holds everything."""
    return Part(tensor, tuple(tensor.shape), (0,) * tensor.dim())
