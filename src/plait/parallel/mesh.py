"""The ranks of a plan as a mesh: who shares an axis with whom."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from plait.config.keys import AXES, OTHER_SAMPLES, SAME_SLICES
from plait.config.plan import Plan
from plait.launch import groups


def group_of(plan: Plan, axes: tuple[str, ...]) -> ProcessGroup:
    """The process group of the ranks that differ from this one on `axes` alone. Every rank makes every such group."""
    group = group_at(plan, axes, range(getattr(plan, axes[0])))
    assert group is not None
    return group


def group_at(plan: Plan, axes: tuple[str, ...], places: Collection[int]) -> ProcessGroup | None:
    """The same of ranks that stand at some places on the first axis; None for a rank that stands elsewhere.

    Every rank makes every such group, in the same order, as torch demands.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plan.devices):
        at = plan.at(rank)
        if at[axes[0]] in places:
            members.setdefault(_except(at, axes), []).append(rank)
    return _group(members.values())


def _except(at: dict[str, int], axes: tuple[str, ...]) -> tuple[int, ...]:
    """A rank's place on the other axes."""
    return tuple(at[axis] for axis in AXES if axis not in axes)


def _group(members: Iterable[list[int]]) -> ProcessGroup | None:
    """Make a group of each of these lists of ranks; the one that this rank is in."""
    made = [groups.new_group(ranks) for ranks in members]
    return next((group for group in made if isinstance(group, ProcessGroup)), None)


@dataclass(frozen=True)
class Holders:
    """The ranks that a rank's experts bring it together with, as process groups."""

    sharing: ProcessGroup
    """Those that share them out: `ep` neighbours among the ranks with other samples."""
    holding: ProcessGroup
    """Those that hold the same experts, whole or parts of them."""
    apart: ProcessGroup | None = None
    """Those that keep parts of the same experts: neighbours among the holders. None: each of them keeps all."""
    copies: ProcessGroup | None = None
    """Those that keep the same parts of the same experts."""


def experts_of(plan: Plan) -> Holders:
    """Who has to do with the experts of this rank. Every rank makes every group."""
    shards = plan.expert_shards
    sets: list[dict[tuple[int, ...], list[int]]] = [{}, {}, {}, {}]
    for rank in range(plan.world):
        at, (group, part) = plan.at(rank), divmod(plan.share(rank), plan.ep)
        copy, shard = divmod(group, shards)
        here, slices = _except(at, OTHER_SAMPLES), _except(at, SAME_SLICES)
        keys = (*here, group), (*slices, part), (*here, part, copy), (*slices, part, shard)
        for members, key in zip(sets, keys):
            members.setdefault(key, []).append(rank)
    sharing, holding, *parts = (_group(members.values()) for members in sets[: 4 if shards > 1 else 2])
    assert sharing is not None and holding is not None
    return Holders(sharing, holding, *parts)
