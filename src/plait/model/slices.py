"""Slices: which parts of a model tensor parallelism cuts, as plain values. `parallel/tensor/find/finder.py` finds them.

A *group* is a set of linear maps (the columns) whose outputs reach anything else only through one more (the row):
q, k, v → o, or gate, up → down. The columns are cut by output features and the row by input features, so that each
rank computes a part of the features between them with the block's own code, and a partial sum after them.
"""

from dataclasses import dataclass

from plait.tensors.rows import Ranges


@dataclass(frozen=True)
class ParameterSlice:
    """How one parameter is cut: `ranges[r]` of its `dim` is what rank r holds. Ranks may hold the same."""

    parameter: str
    dim: int
    ranges: tuple[Ranges, ...]

    def shape(self, whole: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """The shape of a rank's slice of a tensor of shape `whole`."""
        return (*whole[: self.dim], sum(n for _, n in self.ranges[rank]), *whole[self.dim + 1 :])


@dataclass(frozen=True)
class DividedNumber:
    """A whole number that the code of `module` has fixed: on a rank it is value // divisor.

    `path` is an attribute, "num_heads", or one of an object that the module holds, "config.num_heads"; the module's
    instance then gets a shallow copy of that object.
    """

    module: str
    path: str
    divisor: int


@dataclass(frozen=True)
class RegionArgument:
    """A tensor argument of `module` that enters a region by another way than a column and may need gradients.

    `key`: its place or name in the call. `dim`: the dim it is cut along, None when every rank uses it whole, so that
    its gradient on a rank is a partial sum.
    """

    module: str
    key: int | str
    dim: int | None


@dataclass(frozen=True)
class ColumnRowPair:
    """Maps that are cut together, and all that has to be changed for it. Names are qualified by the whole model."""

    container: str
    """The lowest module in whose call all of it lies; "" is the model."""
    columns: tuple[str, ...]
    """Modules cut by output features."""
    row: str
    """The module cut by input features: what it returns on a rank is a partial sum. Its bias is added once, after it."""
    cuts: tuple[ParameterSlice, ...]
    """Every parameter that is cut: of columns, of the row and of what is per feature between them."""
    integers: tuple[DividedNumber, ...] = ()
    resize: bool = False
    """Sizes given to view, split and the like in the container's call are those of the whole: see `parallel/tensor/wiring.py`."""
    partial: tuple[str, ...] = ()
    """Whole parameters used between columns and row: their gradients on a rank are partial sums."""
    arguments: tuple[RegionArgument, ...] = ()


@dataclass(frozen=True)
class RegionBorder:
    """Where the region of one row begins and ends in a unit that runs on stretches of the sequence."""

    row: str
    given: tuple[RegionArgument, ...]
    """Arguments that are stretches, along `dim`, and become whole there."""
    dim: int
    """Of what the row returns: the dim of the sequence."""


@dataclass(frozen=True)
class PositionwiseUnit:
    """A unit that computes, outside its regions, every position of the sequence alone: it runs on a rank's stretch."""

    unit: str
    key: int | str
    """The argument that is a stretch."""
    dim: int
    returned: tuple[tuple[int, int], ...]
    """(leaf of the output, dim) of what it returns as stretches."""
    borders: tuple[RegionBorder, ...] = ()
    posing: bool = False
    """Its code sees the stretch under the shape of the whole."""
    crosses: bool = False
    """What it returns goes to another stage of a pipeline, and is gathered before."""
    partial: tuple[str, ...] = ()
    """Whole parameters used on stretches: their gradients on a rank are partial sums."""


@dataclass(frozen=True)
class Slices:
    """All that can be cut of a model."""

    groups: tuple[ColumnRowPair, ...] = ()
    vocabulary: tuple[str, ...] = ()
    """Embeddings and heads that are cut by rows of the vocabulary, unevenly if need be, as `torch.chunk` would."""
    whole: tuple[tuple[str, float, str], ...] = ()
    """(module, its share of all weights, why it stays whole), the largest first."""
    stretches: tuple[PositionwiseUnit, ...] = ()
    """Units that run on stretches between their regions."""
    unstretched: tuple[tuple[str, str], ...] = ()
    """(unit with regions, why it runs on the whole sequence)."""
    owed: tuple[str, ...] = ()
    """Embeddings among `vocabulary` whose sum over the ranks is made where it is asked for: of a stretch, if it can be."""
    drawn: frozenset[tuple[str, int]] = frozenset()
    """(random place, dim) of what units on stretches draw, along the sequence."""
    lengths: tuple[int, ...] = ()
    """Of the sequences of units on stretches, as they were sketched."""
