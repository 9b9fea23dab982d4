"""Table of all tensors under a plan: the part of each rank, and the reductions of each gradient.

The table is a pure function of (job, plan, sketch); it needs no process, device or weight. `make_shard_plan` in
`parallel/apply_order.py` builds it. Each technique has a pure function in its `strategy.py` that adds its own columns.
All other code reads the placement of parameters from this table.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal

import torch

from plait.config.keys import AXES
from plait.config.plan import Plan
from plait.parallel.mesh import EXPERT_AXES, REPLICA_AXES, AxisCoordinates, get_axis_sizes
from plait.tensors.rows import Ranges, chunk_range, full_ranges, slice_ranges

REPLICA_REASON = "replicas have different samples (dp) or different sequence shards (cp)"
"""The reason why gradients are summed over `Plan.replica_axes`."""

Coordinates = Mapping[str, int]
"""Coordinates on every axis (`Mesh.at`)."""


def is_shardable(shape: Iterable[int]) -> bool:
    """Return whether a tensor can be sharded. Scalars and empty tensors cannot."""
    sizes = tuple(shape)
    return bool(sizes) and 0 not in sizes


def compute_shape(ranges: tuple[Ranges, ...]) -> tuple[int, ...]:
    """Return the shape of the elements at these ranges."""
    return tuple(sum(length for _, length in dim) for dim in ranges)


def compute_shard_ranges(whole: tuple[Ranges, ...], dim: int, ranks: int, rank: int) -> tuple[Ranges, ...]:
    """Return the ranges of a rank's shard, from given ranges that are split along a dim."""
    rows = slice_ranges(whole[dim], *chunk_range(compute_shape(whole)[dim], ranks, rank))
    return (*whole[:dim], rows, *whole[dim + 1 :])


def find_expert_dim(shape: tuple[int, ...], ranks: int) -> int:
    """Return the dim along which an expert's tensor is sharded: the first that divides, else dim 0 with unequal shards.

    A rank's stacked experts [experts, …] may be fewer than the ranks that shard them.
    """
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


def compute_index(at: Coordinates, sizes: Mapping[str, int]) -> int:
    """Return the index of a rank along axes of these sizes, the last axis fastest."""
    found = 0
    for axis, size in sizes.items():
        found = found * size + at[axis]
    return found


@dataclass(frozen=True)
class Split:
    """One split of a tensor along mesh axes. It splits the parts that previous splits left."""

    axes: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    """Ranks along each axis."""
    dim: int | None
    """None: chosen by `find_expert_dim`, which may differ between ranks of another axis."""
    ranges: tuple[Ranges, ...] = ()
    """Ranges on `dim`, by `index`. Empty: split like `torch.chunk`."""
    at_rest: bool = False
    """Sharded only between uses (fsdp): it is gathered for compute, and its gradient is full before it is reduced."""

    @property
    def ranks(self) -> int:
        """Number of parts."""
        return prod(self.axis_sizes)

    def index(self, at: Coordinates) -> int:
        """Return the index of a rank's part: its index along the axes, the last one fastest."""
        return compute_index(at, dict(zip(self.axes, self.axis_sizes)))

    def find_dim(self, ranges: tuple[Ranges, ...]) -> int | None:
        """Return the dim that is split, or None if the tensor cannot be sharded."""
        left = compute_shape(ranges)
        if not self.ranges and not is_shardable(left):
            return None
        return find_expert_dim(left, self.ranks) if self.dim is None else self.dim

    def split_ranges(self, ranges: tuple[Ranges, ...], index: int) -> tuple[Ranges, ...]:
        """Return the ranges of one part of the given ranges."""
        dim = self.find_dim(ranges)
        if dim is None:
            return ranges
        if self.ranges:
            return (*ranges[:dim], self.ranges[index], *ranges[dim + 1 :])
        return compute_shard_ranges(ranges, dim, self.ranks, index)

    def find_same_sets(self) -> tuple[AxisCoordinates, ...]:
        """Group the indices of parts that have the same ranges."""
        return tuple(tuple(i for i, r in enumerate(self.ranges) if r == one) for one in dict.fromkeys(self.ranges))


@dataclass(frozen=True)
class Reduce:
    """One reduction of a gradient: its ranks, its operation, and its reason."""

    axes: tuple[str, ...]
    op: Literal["sum", "mean", "scatter"]
    """`scatter` reduces into the shards of ranks. `mean` averages equal gradients that differ only by rounding."""
    why: str
    sets: tuple[AxisCoordinates, ...] = ()
    """Sets of coordinates on a single axis that are reduced separately. Empty: all coordinates together."""

    @property
    def is_late(self) -> bool:
        """True if it runs after backward (`parallel/gradient_reducer.py`), not inside the reduction over replicas and
        shards."""
        return self.op != "scatter" and not {*self.axes} <= {*REPLICA_AXES}

    def find_set(self, at: Coordinates) -> AxisCoordinates:
        """Return the set that contains a rank, or () if there are no sets."""
        return next((one for one in self.sets if at[self.axes[0]] in one), (at[self.axes[0]],) if self.sets else ())


@dataclass(frozen=True)
class ParamSpec:
    """Placement of a parameter or buffer under a plan."""

    name: str
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    dtype: torch.dtype
    trainable: bool
    buffer: bool = False
    placement: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(axis, coordinates on it that have the tensor), for pp and for experts in a list."""
    splits: tuple[Split, ...] = ()
    grad_reductions: tuple[Reduce, ...] = ()
    """Reductions in the order in which they run."""
    expert: bool = False
    owners: tuple[tuple[int, int], ...] = ()
    """(stage, index along `Plan.part_axes` of the rank that updates the full tensor), for optimizers that need full
    tensors."""

    def is_here(self, at: Coordinates) -> bool:
        """Return whether a rank has any part of the tensor."""
        return all(at[axis] in places for axis, places in self.placement)

    def is_split(self, axis: str) -> bool:
        """Return whether ranks along an axis have different parts of the tensor."""
        return any(axis in split.axes for split in self.splits)

    def ranges(self, at: Coordinates, at_rest: bool = True) -> tuple[Ranges, ...]:
        """Return the part of a rank. Without `at_rest`: its part during compute, which its gradient has before it is
        reduced."""
        found = full_ranges(self.shape)
        for split in self.splits:
            found = split.split_ranges(found, split.index(at)) if at_rest or not split.at_rest else found
        return found

    def find_scatter(self, at: Coordinates) -> tuple[Split, int] | None:
        """Return the split into which a rank's gradient is scattered, and its dim; None if it is not scattered."""
        left = self.ranges(at, at_rest=False)
        found = ((split, split.find_dim(left)) for split in self.splits if split.at_rest)
        return next(((split, dim) for split, dim in found if dim is not None), None)

    def with_split(self, split: Split) -> "ParamSpec":
        """Return a copy with one more split."""
        return replace(self, splits=(*self.splits, split))

    def with_reductions(self, *sums: Reduce, first: bool = False) -> "ParamSpec":
        """Return a copy with more gradient reductions, if it is trainable. `first`: before the others."""
        return replace(self, grad_reductions=(*sums, *self.grad_reductions) if first else (*self.grad_reductions, *sums)) if self.trainable else self


Specs = dict[str, ParamSpec]
"""By the model's names and in its order; tied parameters once."""


@dataclass(frozen=True)
class ShardPlan:
    """Specs of all tensors of a job's model under a plan."""

    plan: Plan
    specs: Specs
    same_kernels: bool
    """All ranks compute bitwise equal results from equal inputs. True for CPU processes; GPUs may differ."""
    placements: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """For units, and experts in a list, that only some ranks have: the axis, and the coordinates on it."""

    def find_placement(self, name: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return the placement of a buffer, from the units and experts that contain it."""
        return tuple(home for module, home in self.placements.items() if name.startswith(f"{module}."))

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        """Number of ranks along each axis, for both views of the mesh."""
        return get_axis_sizes(self.plan)

    def make_shard_split(self, axes: tuple[str, ...], dim: int | None) -> Split:
        """Make a split that shards a tensor over these axes between uses."""
        return Split(axes, tuple(self.axis_sizes[axis] for axis in axes), dim, at_rest=True)

    def find_local_specs(self, at: Coordinates) -> Specs:
        """Return the specs of tensors of which a rank has a part."""
        return {name: spec for name, spec in self.specs.items() if spec.is_here(at)}

    def count_replicas(self, name: str, at: Coordinates) -> int:
        """Return the number of ranks in a replica group that keep the same part of a tensor as this rank."""
        spec = self.specs[name]
        homes, left, count = dict(spec.placement), spec.ranges(at, at_rest=False), 1
        splits = {axis: split for split in spec.splits if split.find_dim(left) is not None for axis in split.axes}
        for axis in (EXPERT_AXES if spec.expert else AXES)[1:]:
            if axis in homes:
                count *= len(homes[axis])
            elif axis not in splits:
                count *= self.axis_sizes[axis]
            else:
                count *= next((len(one) for one in splits[axis].find_same_sets() if splits[axis].index(at) in one), 1)
        return count

    def list_absent(self, at: Coordinates) -> list[str]:
        """List units and experts that a rank does not have, without those nested in them."""
        away = {name for name, (axis, places) in self.placements.items() if at[axis] not in places}
        return sorted(name for name in away if not any(name.startswith(f"{other}.") for other in away))

    def list_late_groups(self) -> list[tuple[tuple[str, ...], AxisCoordinates]]:
        """List the groups of ranks of late reductions, in the same order on all ranks."""
        sums = [one for spec in self.specs.values() for one in spec.grad_reductions if one.is_late]
        return sorted({(one.axes, only) for one in sums for only in one.sets or ((),)})

    def list_owned(self, at: Coordinates) -> set[str]:
        """Return the parameters that a rank updates in full and of which it has a part."""
        return {name for name, owner in self._map_owners(at).items() if owner == self._owner_index(at)}

    def list_owned_by_others(self, at: Coordinates) -> set[str]:
        """Return the parameters of which a rank has a part and which another rank updates in full."""
        return {name for name, owner in self._map_owners(at).items() if owner != self._owner_index(at)}

    def _map_owners(self, at: Coordinates) -> dict[str, int]:
        here = {name: dict(spec.owners) for name, spec in self.find_local_specs(at).items() if spec.owners}
        return {name: owners[at["pp"]] for name, owners in here.items() if at["pp"] in owners}

    def _owner_index(self, at: Coordinates) -> int:
        return compute_index(at, {axis: self.axis_sizes[axis] for axis in self.plan.part_axes})

    def count_bytes(self, at: Coordinates) -> int:
        """Return the bytes of a rank's parameters between steps."""
        here = (spec for spec in self.find_local_specs(at).values() if not spec.buffer)
        return sum(prod(compute_shape(spec.ranges(at))) * spec.dtype.itemsize for spec in here)

