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
