"""Which rank has which part of which tensor, and how each gradient is summed: one table, made from (job, plan, sketch) alone.

No process, device or weight is needed for it. `parallel/order.py` makes it (`shard_plan`): each technique is a pure function, `specs` in its
`strategy.py`, that is given the table and returns it with its own columns filled in. Whoever asks where a parameter is reads it here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal

import torch

from plait.config.keys import AXES
from plait.config.plan import Plan
from plait.parallel.mesh import EXPERT_AXES, REPLICA_AXES, Only, axis_sizes
from plait.tensors.rows import Ranges, chunk, everything, within

REPLICAS = "replicas: other samples (dp), other shards of the sequence (cp)"
"""Why gradients are summed over `Plan.replica_axes`."""

At = Mapping[str, int]
"""A coordinate on every axis (`Mesh.at`)."""


def is_divisible(shape: Iterable[int]) -> bool:
    """Whether a tensor is sharded at all: a scalar and one without elements stay as they are."""
    sizes = tuple(shape)
    return bool(sizes) and 0 not in sizes


def sizes(ranges: tuple[Ranges, ...]) -> tuple[int, ...]:
    """The shape of what lies at these ranges."""
    return tuple(sum(length for _, length in dim) for dim in ranges)


def shard_of(whole: tuple[Ranges, ...], dim: int, ranks: int, rank: int) -> tuple[Ranges, ...]:
    """The ranges of a rank's shard of what lies at these ranges, cut along a dim."""
    rows = within(whole[dim], *chunk(sizes(whole)[dim], ranks, rank))
    return (*whole[:dim], rows, *whole[dim + 1 :])


def dim_of_expert(shape: tuple[int, ...], ranks: int) -> int:
    """The dim along which an expert's tensor is sharded: the first that divides, else the first, with shards of unequal size.

    One rank's share of stacked experts [experts, …] may be fewer experts than there are ranks to share them.
    """
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


def index_along(at: At, sizes: Mapping[str, int]) -> int:
    """The index of a rank among those that differ along axes of these sizes alone, the last axis fastest."""
    found = 0
    for axis, size in sizes.items():
        found = found * size + at[axis]
    return found


@dataclass(frozen=True)
class Split:
    """One split of a tensor along axes of the mesh, of what the splits before it left."""

    axes: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    """Ranks along each axis."""
    dim: int | None
    """None: `dim_of_expert` of what is left, which may differ between ranks of another axis."""
    ranges: tuple[Ranges, ...] = ()
    """Of the dim, by `index`. Empty: as `torch.chunk` splits."""
    at_rest: bool = False
    """Kept so between uses only (fsdp): it is gathered to compute with, and a gradient is whole before it is summed."""

    @property
    def ranks(self) -> int:
        """Into how many parts it splits."""
        return prod(self.axis_sizes)

    def index(self, at: At) -> int:
        """Which part a rank has: the index of the rank along the axes, the last one fastest."""
        return index_along(at, dict(zip(self.axes, self.axis_sizes)))

    def dim_in(self, ranges: tuple[Ranges, ...]) -> int | None:
        """The dim that is split; None for what is not sharded."""
        left = sizes(ranges)
        if not self.ranges and not is_divisible(left):
            return None
        return dim_of_expert(left, self.ranks) if self.dim is None else self.dim

    def of(self, ranges: tuple[Ranges, ...], index: int) -> tuple[Ranges, ...]:
        """One part of what lies at these ranges."""
        dim = self.dim_in(ranges)
        if dim is None:
            return ranges
        if self.ranges:
            return (*ranges[:dim], self.ranges[index], *ranges[dim + 1 :])
        return shard_of(ranges, dim, self.ranks, index)

    def same(self) -> tuple[Only, ...]:
        """The indices of parts in sets that have the same ranges."""
        return tuple(tuple(i for i, r in enumerate(self.ranges) if r == one) for one in dict.fromkeys(self.ranges))


@dataclass(frozen=True)
class Reduce:
    """One sum of a gradient: over which ranks, how, and why."""

    axes: tuple[str, ...]
    op: Literal["sum", "mean", "scatter"]
    """`scatter`: summed into the shards that ranks keep. `mean`: the ranks have the same, and only rounding may differ."""
    why: str
    sets: tuple[Only, ...] = ()
    """Coordinates on the one axis that sum together, where not all of them do."""

    @property
    def late(self) -> bool:
        """Made after backward (`parallel/gradient_reducer.py`), and not in its course by what sums over replicas and shards."""
        return self.op != "scatter" and not {*self.axes} <= {*REPLICA_AXES}

    def only(self, at: At) -> Only:
        """The set of a rank; empty where there are no sets."""
        return next((one for one in self.sets if at[self.axes[0]] in one), (at[self.axes[0]],) if self.sets else ())


@dataclass(frozen=True)
class ParamSpec:
    """A parameter, or a buffer, under a plan."""

    name: str
    shape: tuple[int, ...]
    """Of the whole."""
    dtype: torch.dtype
    trainable: bool
    buffer: bool = False
    homes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(axis, the coordinates on it that have the tensor), for pp and for experts in a list."""
    splits: tuple[Split, ...] = ()
    grad: tuple[Reduce, ...] = ()
    """In the order in which they are made."""
    expert: bool = False
    owners: tuple[tuple[int, int], ...] = ()
    """(stage, which of the ranks along `Plan.part_axes` updates the whole tensor), for optimizers that look at whole tensors."""

    def is_here(self, at: At) -> bool:
        """Whether a rank has any of it."""
        return all(at[axis] in places for axis, places in self.homes)

    def is_split(self, axis: str) -> bool:
        """Whether ranks along an axis have parts of it."""
        return any(axis in split.axes for split in self.splits)

    def ranges(self, at: At, at_rest: bool = True) -> tuple[Ranges, ...]:
        """The part of a rank. Without `at_rest`: as it is computed with, and as its gradient is before it is summed."""
        found = everything(self.shape)
        for split in self.splits:
            found = split.of(found, split.index(at)) if at_rest or not split.at_rest else found
        return found

    def shard(self, at: At) -> tuple[Split, int] | None:
        """How a rank's gradient is scattered: the split, and its dim. None where it is not."""
        left = self.ranges(at, at_rest=False)
        found = ((split, split.dim_in(left)) for split in self.splits if split.at_rest)
        return next(((split, dim) for split, dim in found if dim is not None), None)

    def split(self, split: Split) -> "ParamSpec":
        """The same with one more split."""
        return replace(self, splits=(*self.splits, split))

    def reduced(self, *sums: Reduce, first: bool = False) -> "ParamSpec":
        """The same with more sums of its gradient, if it has one; `first`: before the others."""
        return replace(self, grad=(*sums, *self.grad) if first else (*self.grad, *sums)) if self.trainable else self


Specs = dict[str, ParamSpec]
"""By the model's names, tied ones once, in the model's order."""


@dataclass(frozen=True)
class ShardPlan:
    """The table of a job's model under a plan."""

    plan: Plan
    specs: Specs
    same_kernels: bool
    """Every rank gets the same bits for the same product: processes on CPUs do, GPUs may not."""
    homes: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Units, and experts in a list, that some ranks have: the axis, and the coordinates on it."""

    def homes_of(self, name: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Where a buffer is, by the units and experts that it belongs to."""
        return tuple(home for module, home in self.homes.items() if name.startswith(f"{module}."))

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        """Ranks along each axis, of both views of the mesh."""
        return axis_sizes(self.plan)

    def shard_split(self, axes: tuple[str, ...], dim: int | None) -> Split:
        """The split of a tensor of which ranks along these axes keep a shard each between uses."""
        return Split(axes, tuple(self.axis_sizes[axis] for axis in axes), dim, at_rest=True)

    def here(self, at: At) -> Specs:
        """Those of which a rank has something."""
        return {name: spec for name, spec in self.specs.items() if spec.is_here(at)}

    def replicas(self, name: str, at: At) -> int:
        """How many ranks of a replica group keep the same part of a tensor as this one."""
        spec = self.specs[name]
        homes, left, count = dict(spec.homes), spec.ranges(at, at_rest=False), 1
        splits = {axis: split for split in spec.splits if split.dim_in(left) is not None for axis in split.axes}
        for axis in (EXPERT_AXES if spec.expert else AXES)[1:]:
            if axis in homes:
                count *= len(homes[axis])
            elif axis not in splits:
                count *= self.axis_sizes[axis]
            else:
                count *= next((len(one) for one in splits[axis].same() if splits[axis].index(at) in one), 1)
        return count

    def absent(self, at: At) -> list[str]:
        """Units and experts that a rank does not have, outermost alone."""
        away = {name for name, (axis, places) in self.homes.items() if at[axis] not in places}
        return sorted(name for name in away if not any(name.startswith(f"{other}.") for other in away))

    def late_views(self) -> list[tuple[tuple[str, ...], Only]]:
        """The groups of ranks for the sums that follow those of replicas and shards, in an order that is the same on all ranks."""
        sums = [one for spec in self.specs.values() for one in spec.grad if one.late]
        return sorted({(one.axes, only) for one in sums for only in one.sets or ((),)})

    def owned(self, at: At) -> set[str]:
        """Parameters of which a rank has a part and updates the whole."""
        return {name for name, owner in self._owners(at).items() if owner == self._place(at)}

    def owned_by_others(self, at: At) -> set[str]:
        """Parameters of which a rank has a part and another updates the whole."""
        return {name for name, owner in self._owners(at).items() if owner != self._place(at)}

    def _owners(self, at: At) -> dict[str, int]:
        here = {name: dict(spec.owners) for name, spec in self.here(at).items() if spec.owners}
        return {name: owners[at["pp"]] for name, owners in here.items() if at["pp"] in owners}

    def _place(self, at: At) -> int:
        return index_along(at, {axis: self.axis_sizes[axis] for axis in self.plan.part_axes})

    def bytes(self, at: At) -> int:
        """Of a rank's parameters, between steps."""
        here = (spec for spec in self.here(at).values() if not spec.buffer)
        return sum(prod(sizes(spec.ranges(at))) * spec.dtype.itemsize for spec in here)

