"""All plans of a job on a machine, the best first: every legal one is priced, or shown to be slower than one that is kept.

The time that a branch (`branches`) computes and sends messages inside layers, spread evenly over the stages, is a
lower bound of every plan in it. A branch is left out when its bound is above the last plan that would be shown, or when even an
even share of it does not fit. Branches are tried by their bound, ties in a fixed order: the same question has the same answer.

Plans on a machine whose devices are unlike: every share of the batch is priced on its own devices.

A step ends with its slowest share. Equal shares are as slow as the slowest device; shares by speed (`batch_shares`) as slow as all
devices are together. Each rank's memory is held against that of its own device.

The plans to search, in branches: plans that compute for the same time.

A branch fixes pp, tp, cp, ep, the micro-batches and the number format. What is left of a plan, its sharding, recomputation,
schedule and what is kept on the host, `ways` goes through.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Any

from plait.config.keys import AXES, SAME_LOSS
from plait.config.plan import Plan
from plait.data.shares import sizes
from plait.parallel.shares.balance import told
from plait.planner import formulas
from plait.planner.estimate import Estimate, estimate, touched
from plait.planner.formulas import TimeModel


@dataclass(frozen=True)
class SearchSpace:
    """What is searched: `devices` ranks, `batch` samples a step, keys that are given."""

    devices: int
    batch: int
    pins: dict[str, Any] = field(default_factory=dict)
    memory: float = inf
    """Bytes of a device that a plan may take."""
    host: float = inf
    """Bytes of its host's memory that a device's rank may take."""
    precisions: tuple[str, ...] = ("fp32",)
    stages: int = 1
    """The most stages the model can be cut into."""
    sliceable: bool = False
    stretchable: bool = False
    experts: tuple[int, ...] = ()
    """Numbers of experts of the model's mixtures."""
    heads: int = 0
    """The most ranks that its attention's heads can be shared out to; 0: it has none."""
    offloads: tuple[str, ...] = ("none",)
    """What may be kept on the host, least first."""
    stretches: tuple[bool, ...] = (True,)
    """Whether what lies between slices may run on stretches of the sequence."""
    rooms: tuple[float, ...] = ()
    """Bytes that a plan may take of each device of a node, where they are unlike; `memory` is then the largest."""

    def room(self, rank: int) -> float:
        """Bytes that a plan may take of a rank's device."""
        return self.rooms[rank % len(self.rooms)] if self.rooms else self.memory

    def spare(self, found: Estimate) -> float:
        """Bytes that a plan leaves of the device that it leaves least of."""
        return self.memory - found.reserved if found.spare is None else found.spare

    @property
    def groups(self) -> int:
        """Replica groups: as many as are given."""
        return self.pins.get("replica_groups", 1) or 1

    @property
    def inside(self) -> int:
        """Devices of one of them."""
        return self.devices // self.groups if self.devices % self.groups == 0 else 0

    def holds(self, found: Estimate | None) -> bool:
        """Whether devices and their hosts have the memory that a plan takes."""
        return found is not None and self.spare(found) >= 0 and found.hosted <= self.host


def divisors(n: int) -> list[int]:
    """All of them, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def powers(limit: int) -> list[int]:
    """1, 2, 4, … up to `limit`."""
    return [1 << k for k in range(max(1, limit).bit_length()) if 1 << k <= limit]


def branch_samples(plan: Plan, question: SearchSpace) -> float:
    """Samples of the largest micro-batch."""
    return -(-question.batch // (plan.shares * plan.replica_groups) // plan.microbatches)


def branches(question: SearchSpace) -> Iterator[Plan]:
    """What fixes the time of computing."""
    given = question.pins
    same: dict[str, Any] = {key: value for key, value in given.items() if key not in FREE}
    for tp, pp, cp in _meshes(question):
        shares, rest = divmod(question.inside, tp * pp * cp)
        if rest or not shares or shares * question.groups > question.batch:
            continue
        experts = [e for e in divisors(shares) if all(count % e == 0 for count in question.experts)]
        own = -(-question.batch // (shares * question.groups))
        for ep in of("ep", experts if question.experts else [1], given):
            for micro in of("microbatches", _splits(own), given):
                for precision in of("precision", list(question.precisions), given):
                    mesh: dict[str, Any] = {"replica_groups": question.groups, "pp": pp, "tp": tp, "cp": cp, "ep": ep, "dp": shares}
                    for way in _ways(question, tp, cp):
                        yield Plan(**same, **mesh, **way, microbatches=micro, precision=precision)


def _ways(question: SearchSpace, tp: int, cp: int) -> Iterator[dict[str, Any]]:
    """How attention sees the other stretches, and whether what lies between slices is cut too."""
    given = question.pins
    contexts = ["ring"] + ["ulysses"] * (question.heads % (tp * cp) == 0)
    for context in of("context", contexts if cp > 1 else ["ring"], given):
        for stretched in of("sequence_parallel", list(question.stretches) if tp > 1 else [True], given):
            yield {"context": context, "sequence_parallel": stretched}


def _meshes(question: SearchSpace) -> Iterator[tuple[int, int, int]]:
    """Numbers of slices, stages and stretches."""
    given, n = question.pins, question.inside
    tps = [t for t in divisors(n) if t <= MOST["tp"] and (t == 1 or question.sliceable)]
    for tp in of("tp", tps, given):
        for pp in of("pp", [p for p in divisors(n // tp) if p <= question.stages], given):
            stretches = [c for c in divisors(n // tp // pp) if c == 1 or question.stretchable]
            for cp in of("cp", [c for c in stretches if c <= MOST["cp"]], given):
                yield tp, pp, cp


MOST = {"tp": 64, "cp": 64, "stages": 4}
"""No group of slices or stretches is larger, since each of them waits for all others in every layer; nor do ranks have more
stages, unless it is given."""
FREE = (
    *AXES, "ep", "microbatches", "precision", "zero", "recompute", "schedule", "stages_per_rank", "offload", "context",
    "sequence_parallel",
)  # fmt: skip
"""Keys that the search chooses; all others are as given."""


def _splits(own: int) -> list[int]:
    """Numbers of micro-batches of a share of `own` samples: those that leave no sample over, and powers of two."""
    return sorted({own // size for size in powers(own)} | {d for d in powers(own) if own % d == 0})


def of(key: str, values: list[Any], given: dict[str, Any]) -> list[Any]:
    """The values to try of a key: the given one alone."""
    return [given[key]] if key in given else values


def shardings(branch: Plan, question: SearchSpace, per_node: int) -> list[int]:
    """Between how many devices a copy is shared out: none, all, those of one node."""
    given, shares = question.pins, branch.shares
    node = max(1, per_node // branch.along(SAME_LOSS))
    sizes = sorted({1, shares, node if 1 < node < shares and shares % node == 0 else 1})
    if "dp" in given:
        sizes = [shares // given["dp"]]
    found = (f for f in of("fsdp", sizes, given) if f and shares % f == 0)
    return [f for f in found if shares // f == given.get("dp", shares // f)]


def orders(branch: Plan, question: SearchSpace) -> list[tuple[str, int]]:
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


LONGEST = 64
"""Shares of which parts are written into a plan."""


def ways(pace: TimeModel, plan: Plan, question: SearchSpace, refused: Callable[[Plan], str]) -> list[Plan]:
    """The plan with equal shares, and with shares by speed where devices differ: measured ones, or parts where speeds cannot be
    measured under the plan."""
    if not pace.machine.unlike or plan.ranks == 1 or "batch_shares" in question.pins:
        return [plan]
    speeds = by_speed(pace, plan)
    if len(set(speeds)) == 1:
        return [plan]
    auto = replace(plan, batch_shares="auto")
    if refused(auto) and not refused(plan) and plan.ranks <= LONGEST:
        auto = replace(plan, batch_shares=told([max(1, round(speed / 100)) for speed in speeds]))
    return [plan, auto]


def by_speed(pace: TimeModel, plan: Plan) -> tuple[int, ...]:
    """Of each share the speed of its slowest device, in whole numbers."""
    found = [min(pace.machine.speed(rank) for rank in ranks) for ranks in members(plan)]
    return tuple(max(1, round(10_000 * speed)) for speed in found)


def members(plan: Plan) -> list[list[int]]:
    """The ranks of each share."""
    found: list[list[int]] = [[] for _ in range(plan.ranks)]
    for rank in range(plan.world):
        found[plan.share(rank)].append(rank)
    return found


def price(pace: TimeModel, plan: Plan, question: SearchSpace, samples: float) -> Estimate:
    """As `estimate`, whose micro-batches have so many `samples` with equal shares; here each has its own."""
    machine, batch = pace.machine, ceil(question.batch / plan.replica_groups)
    if not machine.unlike:
        return estimate(pace, plan, samples, question.memory)
    parts = plan.parts or (by_speed(pace, plan) if plan.batch_shares == "auto" else (1,) * plan.ranks)
    found = dict[tuple[float, float, float], Estimate]()
    for held, ranks in zip(sizes(batch, parts, plan.microbatches), members(plan)):
        each = float(ceil(held / plan.microbatches))
        key = each, min(map(machine.speed, ranks)), min(question.room(rank) for rank in ranks)
        if key not in found:
            got = estimate(pace.on(key[1]), plan, each)
            found[key] = replace(got, spare=key[2] - got.reserved)
    slowest = max(found.values(), key=lambda got: got.seconds)
    fullest = min(found.values(), key=lambda got: got.spare or 0.0)
    flops = 3 * pace.work.flops * question.batch / plan.devices
    return replace(slowest, memory=fullest.memory, reserved=fullest.reserved, spare=fullest.spare, flops=flops)


def gain(pace: TimeModel, plan: Plan, question: SearchSpace, samples: float) -> str:
    """What shares by speed of a plan are predicted to gain over equal ones; nothing of a plan without them."""
    if plan.batch_shares == "equal" or not pace.machine.unlike:
        return ""
    equal = price(pace, replace(plan, batch_shares="equal"), question, samples)
    times = equal.seconds / price(pace, plan, question, samples).seconds
    fits = "" if question.holds(equal) else ", which would not fit"
    return f"shares by speed: {times:.2f} × as fast as the same plan with equal shares{fits}"


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
    """The best plan of every good mesh, fastest first; those that need too much time, least first; how many of each."""

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
        return touched(self.pace, plan, self.owned(plan) / plan.pp / plan.shards * (1 - self.pace.work.frozen))

    def owned(self, plan: Plan) -> float:
        """Elements of weights on the ranks of a pipeline together."""
        key = (plan.tp, plan.ep)
        if key not in self.bounds:
            self.bounds[key] = sum(formulas.weights(b, plan) * b.count for b in self.pace.work.blocks)
        return self.bounds[key]

    def least(self, plan: Plan, samples: float) -> float:
        """Bytes that the fullest rank of a plan needs at least: an even share of all, and one micro-batch alive."""
        software, blocks, f = self.pace.software, self.pace.work.blocks, plan.shards
        kept = (plan.tp, plan.cp, samples, plan.precision, plan.recompute, plan.stretched)
        if kept not in self.bounds:
            self.bounds[kept] = sum(formulas.kept(b, plan, samples, software)[0] * b.count for b in blocks)
        away = plan.offload == "all"
        zero, trained = formulas.depth(plan), 1 - self.pace.work.frozen
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
            zeros = of("zero", [1, 2, 3], given) if replace(branch, fsdp=fsdp).shards > 1 else [branch.zero]
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
