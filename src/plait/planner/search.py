"""All plans of a job on a machine, the best first: every legal one is priced, or shown to be slower than one that is kept.

A branch is what fixes how long the computing takes: stages, slices, stretches, micro-batch and number format. The time of
its computing and of the messages inside layers, spread evenly over the stages, is a lower bound of every plan in it; what
is bounded above the last plan that would be shown cannot be better, and is left out, as is what even an even share of
which does not fit. Branches are gone through by their bound and ties in a fixed order: the same question has the same answer.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from plait.plan import Plan
from plait.planner import room
from plait.planner.estimate import Estimate, estimate
from plait.planner.pace import Pace

KEYS_ZERO = Plan().zero
ALIKE = 0.02
"""Predicted times that differ by less are the same to anyone who has to choose: the simplest of them comes first."""
KEPT = 8
"""Meshes of which the best plan is kept."""


@dataclass(frozen=True)
class Question:
    """What is searched: `devices` ranks, `batch` samples a step, keys that are given."""

    devices: int
    batch: int
    pins: dict[str, Any] = field(default_factory=dict)
    memory: float = inf
    """Bytes of a device that a plan may take."""
    precisions: tuple[str, ...] = ("fp32",)
    stages: int = 1
    """The most stages the model can be cut into."""
    sliceable: bool = False
    stretchable: bool = False
    experts: tuple[int, ...] = ()
    """Numbers of experts of the model's mixtures."""


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
        plan = self.plan
        return plan.pp, plan.dp, plan.fsdp, plan.cp, plan.tp, plan.ep

    @property
    def seconds(self) -> float:
        return self.estimate.seconds if self.estimate else inf


@dataclass(frozen=True)
class Found:
    """The best plan of every good mesh, fastest first; those that need too much memory, least first; how many of each."""

    best: tuple[Candidate, ...]
    large: tuple[Candidate, ...]
    counts: dict[str, int]


def divisors(n: int) -> list[int]:
    """All of them, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def powers(limit: int) -> list[int]:
    """1, 2, 4, … up to `limit`."""
    return [1 << k for k in range(max(1, limit).bit_length()) if 1 << k <= limit]


def search(pace: Pace, question: Question, refused: Callable[[Plan], str]) -> Found:
    """Price what `refused` has no reason against."""
    looking = _Looking(pace, question, refused)
    least = str(question.pins.get("recompute", "none"))
    bounded = [
        (bound(pace, replace(b, recompute=least), branch_samples(b, question)), k, b)
        for k, b in enumerate(branches(question))
    ]
    for seconds, _, branch in sorted(bounded, key=lambda item: item[:2]):
        if seconds > looking.limit():
            looking.counts["slower"] += 1
        else:
            looking.branch(branch)
    order = sorted(looking.best.values(), key=lambda c: (c.seconds, str(c.plan)))
    alike = [c for c in order if c.seconds <= order[0].seconds * (1 + ALIKE)]
    simplest = min(alike, key=lambda c: (len(c.plan.changed()), c.seconds), default=None)
    order.sort(key=lambda c: c is not simplest)
    over = sorted((c for mesh, c in looking.large.items() if mesh not in looking.best), key=_bytes)
    return Found(tuple(order), tuple(over), dict(looking.counts))


@dataclass
class _Looking:
    """A search under way."""

    pace: Pace
    question: Question
    refused: Callable[[Plan], str]
    best: dict[tuple[int, ...], Candidate] = field(default_factory=dict)
    large: dict[tuple[int, ...], Candidate] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    kept: list[float] = field(default_factory=list)
    bounds: dict[tuple[object, ...], float] = field(default_factory=dict)

    def limit(self) -> float:
        """Seconds of the last plan that would be shown."""
        return self.kept[KEPT - 1] if len(self.kept) >= KEPT else inf

    def bound(self, plan: Plan, samples: float) -> float:
        """As the function, once for all plans that have it in common."""
        key = (plan.pp, plan.tp, plan.cp, plan.ep, plan.microbatches, samples, plan.precision, plan.recompute)
        if key not in self.bounds:
            self.bounds[key] = bound(self.pace, plan, samples)
        return self.bounds[key]

    def least(self, plan: Plan, samples: float) -> float:
        """Bytes that the fullest rank of a plan needs at least: an even share of all, and one micro-batch alive."""
        software, blocks, f = self.pace.software, self.pace.work.blocks, plan.fsdp
        own, kept = (
            (plan.tp, plan.ep),
            (plan.tp, plan.cp, samples, plan.precision, plan.recompute, plan.sequence_parallel),
        )
        if own not in self.bounds:
            self.bounds[own] = sum(room.weights(b, plan) * b.count for b in blocks)
        if kept not in self.bounds:
            self.bounds[kept] = sum(room.kept(b, plan, samples, software)[0] * b.count for b in blocks)
        zero, trained = plan.zero if f > 1 else 0, 1 - self.pace.work.frozen
        each = software.weights / (f if zero == 3 else 1) + trained * software.gradients / (f if zero >= 2 else 1)
        each += trained * software.state / (f if zero else 1) if plan.offload == "none" else 0.0
        return (self.bounds[own] * each + self.bounds[kept]) / plan.pp * self.pace.fitted.slack

    def branch(self, branch: Plan) -> None:
        """The plans of a branch: what is sharded, recomputed, and in which order stages work.

        Less sharding and less recomputation take no longer, so where one fits, more of it is not priced.
        """
        given, question = self.question.pins, self.question
        for fsdp in _shardings(branch, question, self.pace.machine.devices_per_node):
            zeros = _of("zero", [1, 2, 3], given) if fsdp > 1 else [KEYS_ZERO]
            for schedule, per_rank in orders(branch, question):
                most = len(zeros)
                for recompute in _of("recompute", ["none", "selective", "full"], given):
                    for at, zero in enumerate(zeros[:most]):
                        plan = replace(branch, dp=branch.shares // fsdp, fsdp=fsdp, zero=zero, recompute=recompute,
                                       schedule=schedule, stages_per_rank=per_rank)  # fmt: skip
                        if self.priced(plan):
                            most = at  # with more recomputation only less sharding could be better
                            break

    def priced(self, plan: Plan) -> bool:
        """Price a plan and keep it when it is the best of its mesh; whether it fits."""
        samples = branch_samples(plan, self.question)
        if self.least(plan, samples) > self.question.memory:
            self.counts["do not fit"] += 1
            return False
        if self.bound(plan, samples) > self.limit():
            self.counts["slower"] += 1
            return True
        if self.refused(plan):
            self.counts["impossible"] += 1
            return False
        found = Candidate(plan, estimate(self.pace, plan, samples), samples)
        fits = found.estimate is not None and found.estimate.reserved <= self.question.memory
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


def branch_samples(plan: Plan, question: Question) -> float:
    """Samples of the largest micro-batch."""
    return -(-question.batch // plan.shares // plan.microbatches)


def bound(pace: Pace, plan: Plan, samples: float) -> float:
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
    return total * plan.microbatches / plan.pp + way * (plan.pp - 1) / (2 * plan.pp * stages)


def branches(question: Question) -> Iterator[Plan]:
    """What fixes the time of computing."""
    given = question.pins
    same: dict[str, Any] = {key: value for key, value in given.items() if key not in FREE}
    for tp, pp, cp in _meshes(question):
        shares, rest = divmod(question.devices, tp * pp * cp)
        if rest or shares > question.batch:
            continue
        experts = [e for e in divisors(shares) if all(count % e == 0 for count in question.experts)]
        own = -(-question.batch // shares)
        for ep in _of("ep", experts if question.experts else [1], given):
            for micro in _of("microbatches", _splits(own), given):
                for precision in _of("precision", list(question.precisions), given):
                    mesh: dict[str, Any] = {"pp": pp, "tp": tp, "cp": cp, "ep": ep, "dp": shares}
                    yield Plan(**same, **mesh, microbatches=micro, precision=precision)


def _meshes(question: Question) -> Iterator[tuple[int, int, int]]:
    """Numbers of slices, stages and stretches."""
    given, n = question.pins, question.devices
    tps = [t for t in divisors(n) if t <= MOST["tp"] and (t == 1 or question.sliceable)]
    for tp in _of("tp", tps, given):
        for pp in _of("pp", [p for p in divisors(n // tp) if p <= question.stages], given):
            stretches = [c for c in divisors(n // tp // pp) if c == 1 or question.stretchable]
            for cp in _of("cp", [c for c in stretches if c <= MOST["cp"]], given):
                yield tp, pp, cp


MOST = {"tp": 64, "cp": 64, "stages": 4}
"""No group of slices or stretches is larger, since each of them waits for all others in every layer; nor do ranks have more
stages, unless it is given."""
FREE = (
    "pp",
    "dp",
    "fsdp",
    "tp",
    "cp",
    "ep",
    "microbatches",
    "precision",
    "zero",
    "recompute",
    "schedule",
    "stages_per_rank",
)
"""Keys that the search chooses; all others are as given."""


def _splits(own: int) -> list[int]:
    """Numbers of micro-batches of a share of `own` samples: those that leave no sample over, and powers of two."""
    return sorted({own // size for size in powers(own)} | {d for d in powers(own) if own % d == 0})


def _of(key: str, values: list[Any], given: dict[str, Any]) -> list[Any]:
    """The values to try of a key: the given one alone."""
    return [given[key]] if key in given else values


def _shardings(branch: Plan, question: Question, per_node: int) -> list[int]:
    """Between how many devices a copy is shared out: none, all, those of one node."""
    given, shares = question.pins, branch.shares
    node = max(1, per_node // (branch.tp * branch.cp))
    sizes = sorted({1, shares, node if 1 < node < shares and shares % node == 0 else 1})
    if "dp" in given:
        sizes = [shares // given["dp"]]
    return [
        f for f in _of("fsdp", sizes, given) if f and shares % f == 0 and shares // f == given.get("dp", shares // f)
    ]


def orders(branch: Plan, question: Question) -> list[tuple[str, int]]:
    """(schedule, stages per rank) of a pipeline that are worth pricing: gpipe and sequential only when they are given."""
    if branch.pp == 1:
        return [(Plan().schedule, 1)]
    given = question.pins
    found = [("1f1b", 1), ("zb", 1), ("zbv", 2), ("interleaved", 2), ("interleaved", 4)]
    if "schedule" in given:
        word = str(given["schedule"])
        found = [pair for pair in found if pair[0] == word] or [(word, 1)]
    if "stages_per_rank" in given:
        found = [(word, given["stages_per_rank"]) for word, _ in found]
    return [(word, v) for word, v in dict.fromkeys(found) if branch.pp * v <= question.stages]
