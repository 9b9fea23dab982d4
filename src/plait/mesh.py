"""The ranks of a plan as a mesh: who shares an axis with whom."""

import math
from itertools import product
from typing import Any

import torch.distributed as dist

from plait.plan import AXES, Plan


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
                ranks.append(_rank(plan, at | dict(zip(axes, moving))))
        group = dist.new_group(ranks)
        if rank in ranks:
            mine = group
    return mine


def _rank(plan: Plan, at: dict[str, int]) -> int:
    return sum(at[axis] * math.prod(getattr(plan, later) for later in AXES[i + 1 :]) for i, axis in enumerate(AXES))


def experts_of(plan: Plan, rank: int) -> tuple[Any, Any]:
    """(the ranks that share out the experts with `rank`, the ranks that hold the same experts), as process groups.

    Those that share them out are `ep` neighbours among the ranks with other samples. Every rank makes every group.
    """
    at = [(plan.at(r), plan.share(r), r) for r in range(plan.world)]
    sharing: dict[Any, list[int]] = {}
    holding: dict[Any, list[int]] = {}
    for where, share, r in at:
        sharing.setdefault((where["pp"], where["cp"], where["tp"], share // plan.ep), []).append(r)
        holding.setdefault((where["pp"], where["tp"], share % plan.ep), []).append(r)
    found = []
    for sets in (sharing, holding):
        made = [(ranks, dist.new_group(ranks)) for _, ranks in sorted(sets.items())]
        found.append(next(group for ranks, group in made if rank in ranks))
    return found[0], found[1]
