"""The ranks of a plan as a mesh: who shares an axis with whom."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch.distributed as dist

from plait.config.plan import AXES, Plan


def group_of(plan: Plan, rank: int, axes: tuple[str, ...], only: tuple[int, ...] | None = None) -> Any:
    """The process group of the ranks that differ from `rank` on `axes` alone (and stand at `only` on the first).

    Every rank makes every such group, in the same order, as torch demands.
    """
    others = [axis for axis in AXES if axis not in axes]
    mine = None
    for fixed in product(*(range(getattr(plan, axis)) for axis in others)):
        at = dict(zip(others, fixed))
        ranks = []
        for moving in product(*(range(getattr(plan, axis)) for axis in axes)):
            if only is None or moving[0] in only:
                ranks.append(plan.rank(at | dict(zip(axes, moving))))
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = group
    return mine


@dataclass(frozen=True)
class Holders:
    """The ranks that a rank's experts bring it together with, as process groups."""

    sharing: Any
    """Those that share them out: `ep` neighbours among the ranks with other samples."""
    holding: Any
    """Those that hold the same experts, whole or parts of them."""
    apart: Any = None
    """Those that keep parts of the same experts: neighbours among the holders. None: each of them keeps all."""
    copies: Any = None
    """Those that keep the same parts of the same experts."""


def experts_of(plan: Plan, rank: int) -> Holders:
    """Who has to do with the experts of `rank`. Every rank makes every group."""
    ranks = plan.expert_shards
    sets: list[dict[Any, list[int]]] = [{}, {}, {}, {}]
    for r in range(plan.world):
        at, (group, part) = plan.at(r), divmod(plan.share(r), plan.ep)
        copy, shard = divmod(group, ranks)
        keys = [(at["cp"], group), (part,), (at["cp"], part, copy), (part, shard)]
        for found, key in zip(sets, keys):
            found.setdefault((at["pp"], at["tp"], *key), []).append(r)
    mine = []
    for found in sets[: 4 if ranks > 1 else 2]:
        made = [(members, dist.new_group(members)) for _, members in sorted(found.items())]
        mine.append(next(group for members, group in made if rank in members))
    return Holders(*mine)
