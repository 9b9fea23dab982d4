"""Kinds of ranks: those of a plan that hold parts of the same sizes, and send messages of the same sizes, are one kind.

Parts are those of the table (`parallel/spec.py`). What the table does not have is computed here: samples, and rows of sequences.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from plait.data.batch import BatchShare
from plait.model.sketch import Sketch
from plait.parallel.context import strategy as context
from plait.parallel.mesh import Mesh
from plait.parallel.spec import At, ShardPlan, sizes
from plait.tensors.rows import Rows


@dataclass(frozen=True)
class RankKinds:
    """The first rank that is like it, of each rank. Replica groups are all unlike, and so are stages."""

    firsts: tuple[int, ...]

    @staticmethod
    def of(table: ShardPlan, sketch: Sketch, batch: int) -> "RankKinds":
        """The kinds of a plan's ranks. `sketch`: of the whole model."""
        plan, parts, first = table.plan, _parts(table), dict[Hashable, int]()
        samples = [tuple(n for _, n in BatchShare.of(plan, share).parts(batch)) for share in range(plan.shares)]
        sequences = [_sequence(table, sketch, i) for i in range(plan.cp)]
        between = [tuple(Rows.even(n, plan.tp).sizes[i] for n in sketch.slices.lengths) for i in range(plan.tp)]
        keys = (
            (at["replica_groups"], at["pp"], samples[plan.share(rank)], sequences[at["cp"]], between[at["tp"]], parts(at))
            for rank, at in enumerate(Mesh(plan, 0).places)
        )
        return RankKinds(tuple(first.setdefault(key, rank) for rank, key in enumerate(keys)))

    def like(self, rank: int) -> int:
        """The first rank that is like this one. Servers come after all others, and are counted from the first again."""
        return self.firsts[rank % len(self.firsts)]

    def counts(self) -> dict[int, int]:
        """The first rank of each kind, and how many there are."""
        return Counter(self.firsts)


def _parts(table: ShardPlan) -> Callable[[At], Hashable]:
    """What of a rank's parts makes it another kind: of parameters that are alike, how many it has and updates alone, their shape at rest and
    gathered (a shard is sent as large as the largest), and among how many ranks their gradients are summed."""
    specs = {name: replace(spec, name="", owners=()) for name, spec in table.specs.items() if not spec.buffer}
    alike = list(dict.fromkeys(replace(spec, homes=()) for spec in specs.values()))
    number = {name: alike.index(replace(spec, homes=())) for name, spec in specs.items()}
    rows = Counter((number[name], spec) for name, spec in specs.items())
    whole = any(spec.owners for spec in table.specs.values())

    def parts(at: At) -> Hashable:
        held = Counter[Hashable]()
        for (form, spec), count in rows.items():
            if spec.is_here(at):
                shapes = sizes(spec.ranges(at)), sizes(spec.ranges(at, at_rest=False))
                held[form, *shapes, tuple(len(one.only(at)) for one in spec.grad)] += count
        owned = Counter(number[name] for name in table.owned(at)) if whole else {}
        return frozenset(held.items()), frozenset(owned.items())

    return parts


def _sequence(table: ShardPlan, sketch: Sketch, i: int) -> Hashable:
    """Rows of each sequence that rank i of `cp` has, and of the neighbours' (in a ring a rank hands on all rows but the next one's); in a
    ring the first and the last rank see one half of the others' rows only."""
    plan = table.plan
    cuts = [context.layout(plan)(n, plan.cp).sizes for n in (sketch.sequence_plan.lengths if plan.cp > 1 else ())]
    near = [tuple(sizes[k % plan.cp] for k in (i, i + 1, i - 1)) for sizes in cuts]
    return tuple(near), plan.context == "ring" and (i > 0) + (i == plan.cp - 1)
