"""Kinds of ranks: those of a plan that hold parts of the same sizes, and send messages of the same sizes, are one kind."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from plait.config.keys import AXES, OTHER_SAMPLES
from plait.config.plan import Plan
from plait.data.batch import BatchShare
from plait.model.sketch import Sketch
from plait.parallel.context import strategy as context
from plait.parallel.spec import dim_of_expert, is_divisible
from plait.tensors.rows import Rows, chunk


@dataclass(frozen=True)
class RankKinds:
    """For each place on a set of axes, the first place that is like it. Stages are all unlike."""

    plan: Plan
    shares: tuple[int, ...]
    """Of samples, and with them of shards and experts."""
    stretches: tuple[int, ...]
    slices: tuple[int, ...]

    @staticmethod
    def of(plan: Plan, sketch: Sketch, batch: int) -> "RankKinds":
        """The kinds of a plan's ranks, with the sketch of the whole model."""
        keys = (_share(plan, sketch, batch), _stretch(plan, sketch), _slice(plan, sketch))
        return RankKinds(plan, *map(_firsts, keys))

    def like(self, rank: int) -> int:
        """The first rank that is like this one."""
        at, plan = self.plan.at(rank), self.plan
        return self._rank(at, self.shares[plan.share(rank)], self.stretches[at["cp"]], self.slices[at["tp"]])

    def _rank(self, at: Mapping[str, int], share: int, cp: int, tp: int) -> int:
        dp, fsdp = divmod(share, self.plan.fsdp)
        return self.plan.rank({**at, "dp": dp, "fsdp": fsdp, "cp": cp, "tp": tp})

    def counts(self) -> dict[int, int]:
        """The first rank of each kind, and how many there are."""
        plan, found = self.plan, {}
        shares, stretches, slices = (Counter(firsts) for firsts in (self.shares, self.stretches, self.slices))
        others = [axis for axis in AXES if axis not in (*OTHER_SAMPLES, "cp", "tp")]
        for *places, share, cp, tp in product(*(range(getattr(plan, a)) for a in others), shares, stretches, slices):
            found[self._rank(dict(zip(others, places)), share, cp, tp)] = shares[share] * stretches[cp] * slices[tp]
        return found


def _firsts(keys: Iterable[Any]) -> tuple[int, ...]:
    first: dict[Any, int] = {}
    return tuple(first.setdefault(key, i) for i, key in enumerate(keys))


def _share(plan: Plan, sketch: Sketch, batch: int) -> Iterable[Any]:
    """Samples of each micro-batch, sizes of the parts of what is cut, and experts."""
    lengths = sorted({c.shape(s, r)[0] if c else s[0] for c, s, r in _shapes(plan, sketch)})
    parts = [tuple(chunk(n, plan.fsdp, i)[1] for n in lengths) for i in range(plan.fsdp)]
    experts = [tuple(len(m.mine(plan.ep, i)) for m in sketch.mixtures) for i in range(plan.ep)]
    shards, places = plan.expert_shards, range(plan.shares)
    pieces = [_pieces(sketch, plan, i % plan.ep, i // plan.ep % shards) if plan.ep > 1 else () for i in places]
    for share in range(plan.shares):
        samples = tuple(n for _, n in BatchShare.of(plan, share).parts(batch))
        yield samples, parts[share % plan.fsdp], experts[share % plan.ep], pieces[share]


def _pieces(sketch: Sketch, plan: Plan, part: int, shard: int) -> tuple[int, ...]:
    """Lengths of this shard's parts of a rank's experts, where those are kept as parts."""
    ranks = plan.expert_shards
    shapes = [s for m in sketch.mixtures for _, s, _ in m.held(m.mine(plan.ep, part)) if is_divisible(s)]
    return tuple(chunk(s[dim_of_expert(s, ranks)], ranks, shard)[1] for s in shapes if ranks > 1)


def _shapes(plan: Plan, sketch: Sketch) -> Iterable[tuple[Any, tuple[int, ...], int]]:
    cuts = {c.parameter: c for c in sketch.cuts}
    for name, shape, _ in (*sketch.parameters, *sketch.frozen):
        if shape:
            yield from ((cuts.get(name), shape, rank) for rank in range(plan.tp if name in cuts else 1))


def _stretch(plan: Plan, sketch: Sketch) -> Iterable[Any]:
    """Rows of each sequence, and of the neighbours' (in a ring a rank hands on all rows but the next one's); in a ring the
    first and the last rank see one half of the others' rows only."""
    cuts = [context.layout(plan)(n, plan.cp).sizes for n in (sketch.sequence_plan.lengths if plan.cp > 1 else ())]
    for i in range(plan.cp):
        near = [tuple(sizes[k % plan.cp] for k in (i, i + 1, i - 1)) for sizes in cuts]
        yield tuple(near), plan.context == "ring" and (i > 0) + (i == plan.cp - 1)


def _slice(plan: Plan, sketch: Sketch) -> Iterable[Any]:
    """Sizes of slices, how many ranks have the same, and rows of the sequence between slices."""
    for i in range(plan.tp):
        held = tuple((sum(n for _, n in c.ranges[i]), c.ranges.count(c.ranges[i])) for c in sketch.cuts)
        yield held, tuple(Rows.even(n, plan.tp).sizes[i] for n in sketch.slices.lengths)
