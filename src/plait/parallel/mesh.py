"""The ranks of a plan as a mesh with named axes, and the process groups of a rank.

The axes are those of the plan (`AXES`). Experts are distributed over the same ranks in another way, which is a second view of the
mesh: dp × fsdp is edp × efsdp × ep there. `ep` ranks have different experts, `efsdp` ranks shard the same experts, and `edp`
ranks have replicas of these shards.
"""

from collections.abc import Iterable
from functools import cached_property
from math import gcd

from torch.distributed import ProcessGroup

from plait.config.keys import AXES, DATA_AXES, INNER_AXES, SAME_SLICES
from plait.config.plan import Plan
from plait.launch import groups

EXPERT_AXES = tuple(axis for one in AXES for axis in {"dp": ("edp",), "fsdp": ("efsdp", "ep")}.get(one, (one,)))


def to_expert_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """Map axes to the corresponding axes for experts.

        >>> to_expert_axes(Plan.parse("fsdp=4 ep=2").replica_axes)
        ('edp', 'cp')
    """
    return tuple({"dp": "edp", "fsdp": "efsdp"}.get(axis, axis) for axis in axes)


REPLICA_AXES = ("dp", "edp", "cp")
"""Axes along which a plan may have replicas of the same part of a tensor (`Plan.replica_axes`, and the same for experts)."""
SAME_EXPERTS = to_expert_axes(SAME_SLICES)
"""Axes along which ranks have the same experts, or shards of them."""

AxisCoordinates = tuple[int, ...]
"""The coordinates on one axis that form a group, if not all of them do: stages with a tied parameter, or equal slices."""


def get_axis_sizes(plan: Plan) -> dict[str, int]:
    """Return the number of ranks along each axis, of both views.

        >>> [get_axis_sizes(Plan.parse("dp=2 fsdp=4 ep=2"))[axis] for axis in ("edp", "efsdp", "ep")]
        [2, 2, 2]
    """
    shards = plan.fsdp // gcd(plan.fsdp, plan.ep)
    return {axis: getattr(plan, axis) for axis in AXES} | {"edp": plan.shares // plan.ep // shards, "efsdp": shards, "ep": plan.ep}


class Mesh:
    """The place of a rank among the ranks of a plan. `connect` makes the groups; all ranks call it in the same order."""

    def __init__(self, plan: Plan, rank: int, world_group: ProcessGroup | None = None):
        """`world_group`: the group of all ranks; None in a single process."""
        self.plan, self.rank, self.world_group = plan, rank, world_group
        self._groups: dict[tuple[tuple[str, ...], AxisCoordinates], ProcessGroup | None] = {}

    @cached_property
    def all_coordinates(self) -> list[dict[str, int]]:
        """The coordinates of every rank."""
        return [self.locate_rank(rank) for rank in range(self.plan.devices)]

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate on every axis, of both views.

        >>> Mesh(Plan.parse("dp=4 ep=2"), 3).coordinates["edp"], Mesh(Plan.parse("dp=4 ep=2"), 3).coordinates["ep"]
        (1, 1)
        """
        return self.locate_rank(self.rank)

    def ranks(self, *axes: str, only: AxisCoordinates = ()) -> tuple[int, ...]:
        """Return the ranks that differ from this one only on `axes`, including itself. With `only`: those at these coordinates of the axis.

            >>> Mesh(Plan.parse("dp=2 tp=2"), 1).ranks("dp")
            (1, 3)
        """
        return next((ranks for ranks in self._list_groups(axes, only) if self.rank in ranks), (self.rank,))

    def connect(self, *axes: str, only: AxisCoordinates = ()) -> None:
        """Make the groups of ranks that differ only on `axes`. All ranks call it in the same order, as torch requires."""
        if self.world_group is None or (axes, only) in self._groups:
            return
        self._groups[axes, only] = self.world_group if self._is_everyone(axes) and not only else None
        for ranks in self._list_groups(axes, only) if self._groups[axes, only] is None else ():
            made = groups.new_group([*ranks])
            if isinstance(made, ProcessGroup):
                self._groups[axes, only] = made

    def connect_all(self, more: Iterable[tuple[tuple[str, ...], AxisCoordinates]] = ()) -> None:
        """Make the groups that the plan needs for every model, and `more`. All ranks call it."""
        plan = self.plan
        views = [INNER_AXES, DATA_AXES, plan.replica_axes, *((axis,) for axis in AXES)]
        views += [SAME_SLICES] if plan.cp > 1 and plan.shards > 1 else []
        views += [("ep",), to_expert_axes(plan.shard_axes), to_expert_axes(plan.replica_axes), SAME_EXPERTS] if plan.ep > 1 else []
        for axes in views if plan.processes != "one" else ():
            many, of_samples = len(self.ranks(*axes)) > 1, axes in (INNER_AXES, DATA_AXES)
            if of_samples or (many and (plan.across or axes == plan.replica_axes)):
                self.connect(*axes)
        for axes, only in more:
            self.connect(*axes, only=only)

    def group_or_none(self, *axes: str, only: AxisCoordinates = ()) -> ProcessGroup | None:
        """Return the group of the ranks that differ from this one only on `axes`; None if there are no others.

        For the axes within a replica group, and those of other samples, the result is never None but a group of this rank alone.
        For torch, None is the group of all ranks.
        """
        if self.world_group is None or (self.plan.ep == 1 and not {*axes} <= {*AXES}):
            return None
        if (axes, only) not in self._groups:
            assert len(self.ranks(*axes, only=only)) == 1, f"no group was made for the ranks along {axes}"
            self._groups[axes, only] = None
        return self._groups[axes, only]

    def group(self, *axes: str, only: AxisCoordinates = ()) -> ProcessGroup:
        """Return the group of the ranks that differ from this one only on `axes`. There must be other ranks."""
        found = self.group_or_none(*axes, only=only)
        assert found is not None, f"rank {self.rank} of {self.plan} has no other ranks along {axes}"
        return found

    def _is_everyone(self, axes: tuple[str, ...]) -> bool:
        """Whether the group of all ranks can be used: for axes along which only samples differ."""
        plan = self.plan
        return plan.world == plan.along(axes) if axes == INNER_AXES or not plan.across else False

    def locate_rank(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate on every axis, of both views."""
        plan, share = self.plan, self.plan.dp_rank(rank)
        group, part = divmod(share, plan.ep)
        copy, shard = divmod(group, get_axis_sizes(plan)["efsdp"])
        return plan.at(rank) | {"edp": copy, "efsdp": shard, "ep": part}

    def _list_groups(self, axes: tuple[str, ...], only: AxisCoordinates) -> list[tuple[int, ...]]:
        """List all ranks of the plan in groups that differ only on `axes`."""
        fixed = [axis for axis in (AXES if {*axes} <= {*AXES} else EXPERT_AXES) if axis not in axes]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(self.all_coordinates):
            if not only or at[axes[0]] in only:
                found.setdefault(tuple(at[axis] for axis in fixed), []).append(rank)
        return [tuple(ranks) for ranks in found.values()]
