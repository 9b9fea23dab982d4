"""All plans of a job on a machine, the best first: every legal one is priced, or shown to be slower than one that is kept.

The time that a branch (`planner/space.py`) computes and sends messages inside layers, spread evenly over the stages, is a
lower bound of every plan in it. A branch is left out when its bound is above the last plan that would be shown, or when even an
even share of it does not fit. Branches are tried by their bound, ties in a fixed order: the same question has the same answer.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

from plait.config.keys import AXES
from plait.config.plan import Plan
from plait.planner import memory
from plait.planner.estimate import Estimate, touched
from plait.planner.space import MOST, SearchSpace, branch_samples, branches, of, orders, shardings
from plait.planner.time import TimeModel
from plait.planner.unequal import price, ways

ALIKE = 0.02
"""Predicted times that differ by less are the same to anyone who has to choose: the simplest of them comes first."""
KEPT = 8
"""Meshes of which the best plan is kept."""


@dataclass(frozen=True)
class Candidate:
    """A plan and what it costs. `why` says what is wrong with it, if anything."""

    plan: Plan
    estimate: Estimate | None = None
    samples: float = 0.0
    why: str = ""

    @property
    def mesh(self) -> tuple[int, ...]:
        """Plans of one mesh are shown as their best."""
        return tuple(getattr(self.plan, axis) for axis in (*AXES, "ep"))

    @property
    def seconds(self) -> float:
        return self.estimate.seconds if self.estimate else inf


@dataclass(frozen=True)
class Found:
    """The best plan of every good mesh, fastest first; those that need too much memory, least first; how many of each."""

    best: tuple[Candidate, ...]
    large: tuple[Candidate, ...]
    counts: dict[str, int]
    whys: dict[str, int] = field(default_factory=dict)
    """How many plans were impossible for which reason."""


def search(pace: TimeModel, question: SearchSpace, refused: Callable[[Plan], str], within: float = inf) -> Found:
    """Price what `refused` has no reason against, and what may take fewer seconds than `within`."""
    looking = _Looking(pace, question, refused, within)
    least = str(question.pins.get("recompute", "none"))
    seconds_of = lambda b: bound(pace, replace(b, recompute=least), branch_samples(b, question))  # noqa: E731
    bounded = [(seconds_of(branch), branch) for branch in branches(question)]
    for seconds, branch in sorted(bounded, key=lambda pair: pair[0]):
        if seconds > looking.limit():
            looking.counts["slower"] += 1
        else:
            looking.branch(branch)
    order = sorted(looking.best.values(), key=lambda c: (c.seconds, str(c.plan)))
    alike = [c for c in order if c.seconds <= order[0].seconds * (1 + ALIKE)]
    simplest = min(alike, key=lambda c: (len(c.plan.changed()), c.seconds), default=None)
    order.sort(key=lambda c: c is not simplest)
    over = sorted((c for mesh, c in looking.large.items() if mesh not in looking.best), key=_bytes)
    timed = (replace(c, estimate=price(pace, c.plan, replace(question, memory=inf), c.samples)) for c in over)
    return Found(tuple(order), tuple(timed), dict(looking.counts), dict(looking.whys))


@dataclass
class _Looking:
    """A search under way."""

    pace: TimeModel
    question: SearchSpace
    refused: Callable[[Plan], str]
    within: float = inf
    best: dict[tuple[int, ...], Candidate] = field(default_factory=dict)
    large: dict[tuple[int, ...], Candidate] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    whys: Counter[str] = field(default_factory=Counter)
    kept: list[float] = field(default_factory=list)
    bounds: dict[tuple[object, ...], float] = field(default_factory=dict)

    def limit(self) -> float:
        """Seconds of the last plan that would be shown."""
        return min(self.within, self.kept[KEPT - 1] if len(self.kept) >= KEPT else inf)

    def bound(self, plan: Plan, samples: float) -> float:
        """As the function, once for all plans that have it in common."""
        key = (plan.pp, plan.tp, plan.cp, plan.ep, plan.microbatches, samples, plan.precision, plan.recompute,
               plan.context, plan.stretched)  # fmt: skip
        if key not in self.bounds:
            self.bounds[key] = bound(self.pace, plan, samples)
        return self.bounds[key]

    def updating(self, plan: Plan) -> float:
        """Seconds of a plan's update at least: those of an even share of the optimizer's state, wherever it is kept."""
        return touched(self.pace, plan, self.owned(plan) / plan.pp / plan.fsdp * (1 - self.pace.work.frozen))

    def owned(self, plan: Plan) -> float:
        """Elements of weights on the ranks of a pipeline together."""
        key = (plan.tp, plan.ep)
        if key not in self.bounds:
            self.bounds[key] = sum(memory.weights(b, plan) * b.count for b in self.pace.work.blocks)
        return self.bounds[key]

    def least(self, plan: Plan, samples: float) -> float:
        """Bytes that the fullest rank of a plan needs at least: an even share of all, and one micro-batch alive."""
        software, blocks, f = self.pace.software, self.pace.work.blocks, plan.fsdp
        kept = (plan.tp, plan.cp, samples, plan.precision, plan.recompute, plan.stretched)
        if kept not in self.bounds:
            self.bounds[kept] = sum(memory.kept(b, plan, samples, software)[0] * b.count for b in blocks)
        away = plan.offload == "all"
        zero, trained = memory.depth(plan), 1 - self.pace.work.frozen
        each = 0.0 if away and zero == 3 else software.weights / (f if zero == 3 else 1)
        each += 0.0 if away else trained * software.gradients / (f if zero >= 2 else 1)
        each += trained * software.state / (f if zero else 1) if plan.offload == "none" else 0.0
        return (self.owned(plan) * each + self.bounds[kept]) / plan.pp * self.pace.fitted.slack

    def branch(self, branch: Plan) -> None:
        """The plans of a branch: what is sharded, recomputed, and in which order stages work.

        Less sharding, less recomputation and less that is kept on the host take no longer, so where one fits, more of it is
        not priced.
        """
        given, question = self.question.pins, self.question
        recomputes = of("recompute", ["none", "selective", "full"], given)
        for fsdp in shardings(branch, question, self.pace.machine.devices_per_node):
            zeros = of("zero", [1, 2, 3], given) if fsdp > 1 else [branch.zero]
            for schedule, per_rank in orders(branch, question):
                mesh = {"dp": branch.shares // fsdp, "fsdp": fsdp}
                shape = replace(branch, **mesh, schedule=schedule, stages_per_rank=per_rank)
                worth = [len(zeros)] * len(recomputes)  # of each recomputation, how much sharding could be better
                for offload in of("offload", list(question.offloads), given):
                    for k, recompute in enumerate(recomputes):
                        for at, zero in enumerate(zeros[: worth[k]]):
                            if self.priced(replace(shape, zero=zero, recompute=recompute, offload=offload)):
                                worth[k:] = [min(at, w) for w in worth[k:]]
                                break

    def priced(self, plan: Plan) -> bool:
        """Price a plan, with each way to share out the batch; whether it fits in any."""
        fitting = [self._priced(way) for way in ways(self.pace, plan, self.question, self.refused)]
        return any(fitting)

    def _priced(self, plan: Plan) -> bool:
        """Price a plan and keep it when it is the best of its mesh; whether it fits."""
        samples = branch_samples(plan, self.question)
        if self.least(plan, samples) > self.question.memory:
            self.counts["do not fit"] += 1
            return False
        if self.bound(plan, samples) + self.updating(plan) > self.limit():
            self.counts["slower"] += 1
            return True
        if why := self.refused(plan):
            self.counts["impossible"] += 1
            self.whys[why] += 1
            return False
        found = Candidate(plan, price(self.pace, plan, self.question, samples), samples)
        fits = self.question.holds(found.estimate)
        self.counts["priced"] += 1
        self.counts["do not fit"] += not fits
        table, better = (self.best, _slower) if fits else (self.large, _larger)
        if found.mesh not in table or better(table[found.mesh], found):
            table[found.mesh] = found
            self.kept = sorted(c.seconds for c in self.best.values())
        return fits


def _slower(old: Candidate, new: Candidate) -> bool:
    return new.seconds < old.seconds * (1 - 1e-9)


def _larger(old: Candidate, new: Candidate) -> bool:
    return _bytes(new) < _bytes(old)


def _bytes(candidate: Candidate) -> tuple[float, str]:
    return (candidate.estimate.reserved if candidate.estimate else inf), str(candidate.plan)


def bound(pace: TimeModel, plan: Plan, samples: float) -> float:
    """Seconds that a plan takes at least: its computing and its messages, spread evenly over the stages.

    A stage cannot begin before those before it made its first input, nor end before they took its last gradient: half of
    one micro-batch's way through the others, on average over the ranks, and of that a part where ranks have several stages.
    """
    total = way = 0.0
    for block in pace.work.blocks:
        work = pace.block(block, plan, samples)
        total += (work.forward + work.back_input + work.back_weight) * block.count
        way += (work.forward + work.back_input) * block.count
    stages = 1 if plan.pp == 1 else MOST["stages"]
    return max(way, total * plan.microbatches / plan.pp + way * (plan.pp - 1) / (2 * plan.pp * stages))
