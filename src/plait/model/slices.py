"""Tensor-parallel shards of a model, as plain values. `parallel/tensor/find/finder.py` finds them.

A *group* is a set of linear maps (the columns) whose outputs reach other code only through one more map (the row): q, k, v → o, or gate, up →
down. The columns are sharded by output features and the row by input features. Each rank computes a part of the features between them with
the block's own code, and a partial sum after them.
"""

from dataclasses import dataclass

from plait.tensors.rows import Ranges


@dataclass(frozen=True)
class ParameterSlice:
    """The shards of one parameter: rank r has `ranges[r]` of `dim`. Ranks may have equal ranges."""

    parameter: str
    dim: int
    ranges: tuple[Ranges, ...]

    def shape(self, full_shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard of a tensor of shape `full_shape`."""
        return (*full_shape[: self.dim], sum(n for _, n in self.ranges[rank]), *full_shape[self.dim + 1 :])


@dataclass(frozen=True)
class ScaledAttribute:
    """An integer that the code of `module` has fixed. On a rank, it is value // divisor.

    `path` is an attribute, "num_heads", or one of an object that the module holds, "config.num_heads". The module's instance then gets a shallow
    copy of that object.
    """

    module: str
    path: str
    divisor: int


@dataclass(frozen=True)
class RegionArgument:
    """A tensor argument of `module` that enters a region other than through a column and may need gradients.

    `key`: its position or name in the call. `dim`: its sharded dim; None if every rank uses all of it, so that its gradient on a rank is a
    partial sum.
    """

    module: str
    key: int | str
    dim: int | None


@dataclass(frozen=True)
class ColumnRowPair:
    """Linear maps that are sharded together, with all necessary changes. Names are qualified by the complete model."""

    container: str
    """The lowest module whose call contains the complete group; "" is the model."""
    columns: tuple[str, ...]
    """Modules sharded by output features."""
    row: str
    """The module sharded by input features. Its output on a rank is a partial sum. Its bias is added once, after the reduction."""
    tp_shards: tuple[ParameterSlice, ...]
    """All sharded parameters: of columns, of the row, and per-feature parameters between them."""
    scaled_attributes: tuple[ScaledAttribute, ...] = ()
    resize: bool = False
    """Arguments of view, split and similar calls in the container are full sizes: see `parallel/tensor/wiring.py`."""
    partial_gradients: tuple[str, ...] = ()
    """Unsharded parameters between columns and row: their gradients on a rank are partial sums."""
    arguments: tuple[RegionArgument, ...] = ()


@dataclass(frozen=True)
class RegionBorder:
    """The start and end of one row's region in a unit that runs on sequence shards."""

    row: str
    arguments: tuple[RegionArgument, ...]
    """Arguments that are sequence shards along `dim` and are gathered at the start."""
    dim: int
    """The sequence dim of the row's output."""


@dataclass(frozen=True)
class PositionwiseUnit:
    """A unit that computes every sequence position independently outside its regions: it runs on a rank's sequence shard."""

    unit: str
    key: int | str
    """The argument that is a sequence shard."""
    dim: int
    returned: tuple[tuple[int, int], ...]
    """(leaf of the output, dim) of outputs that are sequence shards."""
    borders: tuple[RegionBorder, ...] = ()
    sees_full_shape: bool = False
    """Its code sees the shard under the full shape."""
    crosses_stages: bool = False
    """Its output goes to another pipeline stage and is gathered before."""
    partial_gradients: tuple[str, ...] = ()
    """Unsharded parameters used on sequence shards: their gradients on a rank are partial sums."""


@dataclass(frozen=True)
class Slices:
    """All parts of a model that tensor parallelism can shard."""

    groups: tuple[ColumnRowPair, ...] = ()
    vocabulary: tuple[str, ...] = ()
    """Embeddings and heads sharded by vocabulary rows, unevenly if necessary, as by `torch.chunk`."""
    unsliced: tuple[tuple[str, float, str], ...] = ()
    """(module, its fraction of all weights, the reason why it is not sharded), the largest first."""
    sequence_units: tuple[PositionwiseUnit, ...] = ()
    """Units that run on sequence shards between their regions."""
    full_sequence_units: tuple[tuple[str, str], ...] = ()
    """(unit with regions, the reason why it runs on the full sequence)."""
    deferred_sums: tuple[str, ...] = ()
    """Embeddings in `vocabulary` that are reduced where their output is used: on a sequence shard, if possible."""
    sequence_draws: frozenset[tuple[str, int]] = frozenset()
    """(random place, dim) of random draws along the sequence in units on sequence shards."""
    sequence_lengths: tuple[int, ...] = ()
    """Sequence lengths of units on sequence shards, in the sketch."""
