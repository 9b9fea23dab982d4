"""The ranks of a plan as a mesh with named axes, and the process groups that a rank is in.

The axes are those of the plan (`AXES`). Experts are distributed over the same ranks in another way, which is a second view of the mesh:
dp × fsdp is edp × efsdp × ep there. `ep` ranks share the experts out, `efsdp` ranks keep shards of the same experts, `edp` ranks have
replicas of what those keep.
"""

from collections.abc import Iterable
from functools import cached_property
from math import gcd

from torch.distributed import ProcessGroup

from plait.config.keys import AXES, OTHER_SAMPLES, SAME_SLICES, WITHIN
from plait.config.plan import Plan
from plait.launch import groups

EXPERT_AXES = tuple(axis for one in AXES for axis in {"dp": ("edp",), "fsdp": ("efsdp", "ep")}.get(one, (one,)))


def of_experts(axes: Iterable[str]) -> tuple[str, ...]:
    """The axes on which ranks have of experts what they have of the rest of the model on these.

    >>> of_experts(Plan.parse("fsdp=4 ep=2").replica_axes)
    ('edp', 'cp')
    """
    return tuple({"dp": "edp", "fsdp": "efsdp"}.get(axis, axis) for axis in axes)


REPLICA_AXES = ("dp", "edp", "cp")
"""Axes along which a plan may have replicas of the same part of a tensor (`Plan.replica_axes`, and the same of experts)."""
SAME_EXPERTS = of_experts(SAME_SLICES)
"""Axes along which ranks have the same experts, whole or shards of them."""

Only = tuple[int, ...]
"""The coordinates on one axis that form a group, where not all of them do: stages with a tied parameter, slices that are alike."""


def axis_sizes(plan: Plan) -> dict[str, int]:
    """Ranks along each axis, of both views.

    >>> [axis_sizes(Plan.parse("dp=2 fsdp=4 ep=2"))[axis] for axis in ("edp", "efsdp", "ep")]
    [2, 2, 2]
    """
    shards = plan.fsdp // gcd(plan.fsdp, plan.ep)
    return {axis: getattr(plan, axis) for axis in AXES} | {"edp": plan.shares // plan.ep // shards, "efsdp": shards, "ep": plan.ep}


class Mesh:
    """Where a rank is among the ranks of a plan. Groups are made by `connect`, which all ranks call in the same order."""

    def __init__(self, plan: Plan, rank: int, everyone: ProcessGroup | None = None):
        """`everyone`: the group of all ranks; None where there is one process."""
        self.plan, self.rank, self.everyone = plan, rank, everyone
        self._groups: dict[tuple[tuple[str, ...], Only], ProcessGroup | None] = {}

    @cached_property
    def places(self) -> list[dict[str, int]]:
        """The coordinates of every rank."""
        return [self.place(rank) for rank in range(self.plan.devices)]

    @cached_property
    def at(self) -> dict[str, int]:
        """This rank's coordinate on every axis, of both views.

        >>> Mesh(Plan.parse("dp=4 ep=2"), 3).at["edp"], Mesh(Plan.parse("dp=4 ep=2"), 3).at["ep"]
        (1, 1)
        """
        return self.place(self.rank)

    def ranks(self, *axes: str, only: Only = ()) -> tuple[int, ...]:
        """The ranks that differ from this one on `axes` alone, itself among them. Of an axis with `only`: those at these coordinates.

        >>> Mesh(Plan.parse("dp=2 tp=2"), 1).ranks("dp")
        (1, 3)
        """
        return next((ranks for ranks in self._lots(axes, only) if self.rank in ranks), (self.rank,))

    def connect(self, *axes: str, only: Only = ()) -> None:
        """Make the groups of the ranks that differ on `axes` alone. All ranks call it, in the same order, as torch demands."""
        if self.everyone is None or (axes, only) in self._groups:
            return
        self._groups[axes, only] = self.everyone if self._is_everyone(axes) and not only else None
        for ranks in self._lots(axes, only) if self._groups[axes, only] is None else ():
            made = groups.new_group([*ranks])
            if isinstance(made, ProcessGroup):
                self._groups[axes, only] = made

    def connect_all(self, more: Iterable[tuple[tuple[str, ...], Only]] = ()) -> None:
        """Make the groups that the plan needs whatever the model, and `more`. All ranks call it."""
        plan = self.plan
        views = [WITHIN, OTHER_SAMPLES, plan.replica_axes, *((axis,) for axis in AXES)]
        views += [SAME_SLICES] if plan.cp > 1 and plan.shards > 1 else []
        views += [("ep",), of_experts(plan.shard_axes), of_experts(plan.replica_axes), SAME_EXPERTS] if plan.ep > 1 else []
        for axes in views if plan.processes != "one" else ():
            many, of_samples = len(self.ranks(*axes)) > 1, axes in (WITHIN, OTHER_SAMPLES)
            if of_samples or (many and (plan.across or axes == plan.replica_axes)):
                self.connect(*axes)
        for axes, only in more:
            self.connect(*axes, only=only)

    def group_or_none(self, *axes: str, only: Only = ()) -> ProcessGroup | None:
        """The group of the ranks that differ from this one on `axes` alone. None where there are no others; but of the ranks of a replica
        group, and of those with other samples, there is one of this rank alone, because for torch None is the group of all ranks."""
        if self.everyone is None or (self.plan.ep == 1 and not {*axes} <= {*AXES}):
            return None
        if (axes, only) not in self._groups:
            assert len(self.ranks(*axes, only=only)) == 1, f"nobody has connected the ranks along {axes}"
            self._groups[axes, only] = None
        return self._groups[axes, only]

    def group(self, *axes: str, only: Only = ()) -> ProcessGroup:
        """The same where there are others."""
        found = self.group_or_none(*axes, only=only)
        assert found is not None, f"rank {self.rank} of {self.plan} is alone along {axes}"
        return found

    def _is_everyone(self, axes: tuple[str, ...]) -> bool:
        """Whether the group of all ranks serves: of axes that nothing but samples goes along."""
        plan = self.plan
        return plan.world == plan.along(axes) if axes == WITHIN or not plan.across else False

    def place(self, rank: int) -> dict[str, int]:
        """A rank's coordinate on every axis, of both views."""
        plan, share = self.plan, self.plan.share(rank)
        group, part = divmod(share, plan.ep)
        copy, shard = divmod(group, axis_sizes(plan)["efsdp"])
        return plan.at(rank) | {"edp": copy, "efsdp": shard, "ep": part}

    def _lots(self, axes: tuple[str, ...], only: Only) -> list[tuple[int, ...]]:
        """All ranks of the plan in groups of those that differ on `axes` alone."""
        fixed = [axis for axis in (AXES if {*axes} <= {*AXES} else EXPERT_AXES) if axis not in axes]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(self.places):
            if not only or at[axes[0]] in only:
                found.setdefault(tuple(at[axis] for axis in fixed), []).append(rank)
        return [tuple(ranks) for ranks in found.values()]
