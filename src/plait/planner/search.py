"""All plans of a job on a machine, the best first: every valid one is priced, or a lower bound shows that it would not be shown.

Plans are ordered by their *cost*: predicted seconds of a step, times the factors of `Preferences`. A branch (`branches`) fixes pp, tp, cp,
ep, the micro-batches and compile; the search goes through what is left of a plan. The time that a branch computes and sends messages inside
layers is a lower bound of every plan in it. A plan is skipped if its bound, times the factors that it is known to have, is above the cost of
the best plan of its mesh or of the last mesh that would be shown, or if even an even share of it does not fit. Branches are tried by their
bound, ties in a fixed order: the same question has the same answer.

If the devices of a machine are unlike, every share of the batch is priced on its own devices, and a step ends with its slowest share. Each
rank's memory is compared with that of its own device.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import ceil, inf, prod
from typing import Any

from plait.config.keys import AXES, SAME_LOSS, SPLIT
from plait.config.plan import Plan
from plait.data.batch import sizes
from plait.parallel.shares.balance import by_speed, members, told
from plait.planner import formulas
from plait.planner.estimate import Estimate, StageSchedule, estimate, touched
from plait.planner.formulas import TimeModel
from plait.planner.from_sketch import Block


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
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Of keys, what is tried; of a key that is missing, its default. Less recomputation and less on the host come first."""
    stages: int = 1
    """The most stages the model can be cut into."""
    sliceable: bool = False
    stretchable: bool = False
    experts: tuple[int, ...] = ()
    """Numbers of experts of the model's mixtures."""
    heads: int = 0
    """The most ranks that its attention's heads can be shared out to; 0: it has none."""
    rooms: tuple[float, ...] = ()
    """Bytes that a plan may take of each device of a node, where they are unlike; `memory` is then the largest."""
    margin: float = 0.0
    """A plan that leaves fewer bytes of a device is tight."""
    shown: int = 8
    """Meshes of which the best plan is found."""

    def of(self, key: str, values: Sequence[Any] = ()) -> Sequence[Any]:
        """The values to try of a key: the given one alone."""
        return (self.pins[key],) if key in self.pins else values or self.values.get(key) or (getattr(Plan, key),)

    def room(self, rank: int) -> float:
        """Bytes that a plan may take of a rank's device."""
        return self.rooms[rank % len(self.rooms)] if self.rooms else self.memory

    def spare(self, found: Estimate) -> float:
        """Bytes that a plan leaves of the device that it leaves least of."""
        return self.memory - found.allocated if found.spare is None else found.spare

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
    return [d for d in range(1, n + 1) if n % d == 0]


def branch_samples(plan: Plan, question: SearchSpace) -> float:
    """Samples of the largest micro-batch."""
    return -(-question.batch // (plan.shares * plan.replica_groups) // plan.microbatches)


def branches(question: SearchSpace) -> Iterator[Plan]:
    """What fixes the time of computing, in the first number format."""
    same: dict[str, Any] = {key: value for key, value in question.pins.items() if key not in FREE}
    for tp, pp, cp in _meshes(question):
        shares, rest = divmod(question.inside, tp * pp * cp)
        if rest or not shares or shares * question.groups > question.batch:
            continue
        experts = [e for e in divisors(shares) if question.experts and all(count % e == 0 for count in question.experts)]
        mesh: dict[str, Any] = {"replica_groups": question.groups, "pp": pp, "tp": tp, "cp": cp, "dp": shares}
        contexts = ["ring"] + ["ulysses"] * (cp > 1 and question.heads % (tp * cp) == 0)
        # under cp a unit that counts positions cannot be compiled, and a sketch without cp does not know which do
        splits = _splits(-(-question.batch // (shares * question.groups)))
        free = {"ep": question.of("ep", experts), "microbatches": question.of("microbatches", splits),
                "context": question.of("context", contexts), "sequence_parallel": question.of("sequence_parallel", () if tp > 1 else (True,)),
                "compile": question.of("compile", () if cp == 1 else (False,))}  # fmt: skip
        for values in product(*free.values()):
            yield Plan(**same, **mesh, **dict(zip(free, values)), precision=question.of("precision")[0])


def _meshes(question: SearchSpace) -> Iterator[tuple[int, int, int]]:
    """Numbers of slices, stages and sequence shards."""
    n = question.inside
    for tp in question.of("tp", [t for t in divisors(n) if t <= MOST["tp"] and (t == 1 or question.sliceable)]):
        for pp in question.of("pp", [p for p in divisors(n // tp) if p <= question.stages]):
            for cp in question.of("cp", [c for c in divisors(n // tp // pp) if c == 1 or (question.stretchable and c <= MOST["cp"])]):
                yield tp, pp, cp


MOST = {"tp": 64, "cp": 64}
"""No group of tp or cp is larger, since each of its ranks waits for all others in every layer."""
FREE = (
    *AXES, "ep", "microbatches", "precision", "zero", "recompute", "schedule", "stages_per_rank", "offload", "context",
    "sequence_parallel", "compile", "shard_over_cp",
)  # fmt: skip
"""Keys that the search chooses; all others are as given."""


def _splits(own: int) -> list[int]:
    """Numbers of micro-batches of a share of `own` samples: those of which each has a power of two, and powers of two."""
    powers = [1 << k for k in range(own.bit_length())]
    return sorted({own // size for size in powers} | {d for d in powers if own % d == 0})


def shardings(branch: Plan, question: SearchSpace, per_node: int) -> list[int]:
    """Between how many devices a copy is shared out: none, all, those of one node."""
    given, shares = question.pins, branch.shares
    node = max(1, per_node // branch.along(SAME_LOSS))
    sizes = sorted({1, shares, node if 1 < node < shares and shares % node == 0 else 1})
    if "dp" in given:
        sizes = [shares // given["dp"]]
    found = (f for f in question.of("fsdp", sizes) if f and shares % f == 0)
    return [f for f in found if shares // f == given.get("dp", shares // f)]


def orders(branch: Plan, question: SearchSpace) -> list[StageSchedule]:
    """Schedules of a pipeline that are worth pricing: gpipe and sequential only when they are given."""
    if branch.pp == 1:
        return [StageSchedule(Plan().schedule, 1, 1)]
    given = question.pins
    found = [("1f1b", 1), ("zb", 1), ("zbv", 2), ("interleaved", 2), ("interleaved", 4)]
    if word := given.get("schedule"):
        found = [pair for pair in found if pair[0] == word] or [(word, 1)]
    if "stages_per_rank" in given:
        found = [(word, given["stages_per_rank"]) for word, _ in found]
    return [StageSchedule(word, branch.pp, v) for word, v in dict.fromkeys(found) if branch.pp * v <= question.stages]


LONGEST = 64
"""Shares of which parts are written into a plan."""


def ways(pace: TimeModel, plan: Plan, question: SearchSpace, refused: Callable[[Plan], str]) -> list[Plan]:
    """The plan with equal shares, and with shares by speed where devices differ: measured ones, or parts where speeds cannot be
    measured under the plan."""
    if not pace.machine.unlike or plan.ranks == 1 or "batch_shares" in question.pins:
        return [plan]
    speeds = by_speed(pace.machine, plan)
    if len(set(speeds)) == 1:
        return [plan]
    auto = replace(plan, batch_shares="auto")
    if refused(auto) and not refused(plan) and plan.ranks <= LONGEST:
        auto = replace(plan, batch_shares=told([max(1, round(speed / 100)) for speed in speeds]))
    return [plan, auto]


def price(pace: TimeModel, plan: Plan, question: SearchSpace, samples: float, within: float = inf) -> Estimate:
    """As `estimate`, whose micro-batches have so many `samples` with equal shares; here each has its own."""
    machine, batch = pace.machine, ceil(question.batch / plan.replica_groups)
    if not machine.unlike:
        return estimate(pace, plan, samples, question.memory, within)
    parts = plan.parts or (by_speed(pace.machine, plan) if plan.batch_shares == "auto" else (1,) * plan.ranks)
    found = dict[tuple[float, float, float], Estimate]()
    for held, ranks in zip(sizes(batch, parts, plan.microbatches), members(plan)):
        each = float(ceil(held / plan.microbatches))
        key = each, min(map(machine.speed, ranks)), min(question.room(rank) for rank in ranks)
        if key not in found:
            got = estimate(pace.on(key[1]), plan, each)
            found[key] = replace(got, spare=key[2] - got.allocated)
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
"""Predicted times that differ by less are the same to anyone who has to choose."""
MARGIN = 0.05
"""Part of a device's memory that a plan leaves, or it is tight."""


@dataclass(frozen=True)
class Preferences:
    """What decides between plans besides their predicted time: factors on the seconds of a step.

    A plan is chosen over another only if it is faster by more than its factors are larger. Each factor is what an experienced person would
    want to gain before running such a plan, because of what the prediction leaves out.
    """

    key: float = 1.004
    """For every key of the plan that is not its default: each is a word more to understand. Sharding is one, whatever `zero` is. Five of them are
    as much as `ALIKE`."""
    axis: float = 1.03
    """For every axis after the first: each has groups of processes and conditions of its own, and predictions err by more than that."""
    nodes: float = 1.1
    """tp, or the exchanges of ep or of context=ulysses, cross nodes: every layer then waits for a network that other jobs share. Published
    layouts of Megatron-LM, Llama 3 (arXiv 2407.21783) and torchtitan keep tp inside a node."""
    offload: float = 1.15
    """State is kept on the host: its processors and memory, of which predictions know least, also read the data."""
    tight: float = 10.0
    """Less than `MARGIN` of a device is left: a step that runs out of memory ends the run. In effect only if nothing else fits."""


PREFERENCES = Preferences()


def crossings(plan: Plan, per_node: int) -> list[str]:
    """The axes of which every layer waits for messages between nodes of so many devices: tp, ep, and cp if it exchanges heads."""
    inner = plan.along(SAME_LOSS)
    sizes = {"tp": plan.tp, "ep": plan.ep * inner if plan.ep > 1 else 1, "cp": inner if plan.cp > 1 and plan.context == "ulysses" else 1}
    return [axis for axis, size in sizes.items() if size > per_node]


def factors(plan: Plan, per_node: int) -> dict[str, float]:
    """A plan's factors by what they are for, but for that of its memory."""
    changed = plan.changed()
    axes = sum(changed.get(axis, 1) > 1 for axis in (*AXES, "ep"))
    keys = len(changed) - axes - ("zero" in changed) + (plan.fsdp > 1)
    found = {"axes": PREFERENCES.axis ** max(0, axes - 1), "keys": PREFERENCES.key**keys}
    if crossing := crossings(plan, per_node):
        found[f"{', '.join(crossing)} between nodes"] = PREFERENCES.nodes
    return found | ({"offload": PREFERENCES.offload} if plan.offload != "none" else {})


@dataclass(frozen=True)
class Candidate:
    """A plan and what it costs. `why`: what is wrong with it; in an answer, why it is not the first."""

    plan: Plan
    estimate: Estimate | None = None
    samples: float = 0.0
    why: str = ""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By what they are for (`Preferences`)."""
    fits: bool = True
    """Devices have the memory, and nothing refuses it."""

    @property
    def mesh(self) -> tuple[int, ...]:
        """Plans of one mesh are shown as their best."""
        return tuple(getattr(self.plan, axis) for axis in (*AXES, "ep"))

    @property
    def seconds(self) -> float:
        return self.estimate.seconds if self.estimate else inf

    @property
    def reserved(self) -> float:
        """Bytes of the fullest rank."""
        return self.estimate.reserved if self.estimate else inf

    @property
    def cost(self) -> float:
        """What plans are ordered by: seconds times factors."""
        return self.seconds * prod(self.factors.values())

    @property
    def warnings(self) -> list[str]:
        """What a person should know before running it."""
        return [name for name in self.factors if name not in ("axes", "keys")]


@dataclass(frozen=True)
class Found:
    """The best plan of every good mesh, that of least cost first; those that need too much memory, least first; how many of each."""

    best: tuple[Candidate, ...]
    large: tuple[Candidate, ...]
    counts: dict[str, int]
    whys: dict[str, int] = field(default_factory=dict)
    """How many plans were invalid for which reason."""


def search(
    pace: TimeModel, question: SearchSpace, refused: Callable[[Plan], str], within: float = inf, say: Callable[[str], None] = lambda text: None
) -> Found:  # fmt: skip
    """Price what `refused` has no reason against, and what may cost less than `within`. `say` gets how far the search is."""
    looking = _Looking(pace, question, refused, within)
    bounded = sorted(looking.bounded(), key=lambda pair: pair[0])
    for k, (floor, branch) in enumerate(bounded):
        if floor > looking.limit():
            looking.counts["slower"] += len(bounded) - k
            break
        say(f"comparing plans: {k} of {len(bounded)} branches")
        for precision in question.of("precision"):
            looking.branch(replace(branch, precision=precision))
    order = sorted(looking.best.values(), key=_cost)[: question.shown]  # of a mesh after them, something better may not have been priced
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
    known: dict[tuple[object, ...], tuple[float, ...]] = field(default_factory=dict)
    """Sums over the blocks that many plans share."""

    def limit(self, mesh: tuple[int, ...] | None = None) -> float:
        """The cost of the last plan that would be shown, or of a better one of the same mesh."""
        last = min(self.within, self.kept[self.question.shown - 1] if len(self.kept) >= self.question.shown else inf)
        return min(last, self.best[mesh].cost) if mesh in self.best else last

    def bounded(self) -> Iterator[tuple[float, Plan]]:
        """The branches of which something may fit, each with a lower bound of the cost of its plans."""
        recomputes, offload = self.question.of("recompute", RECOMPUTES), self.question.of("offload")[-1]
        for branch in branches(self.question):
            spread = replace(branch, dp=1, fsdp=branch.shares, zero=3, offload=offload, recompute=recomputes[-1], schedule="sequential",
                             shard_over_cp=self.question.of("shard_over_cp", (branch.cp > 1,))[0])  # fmt: skip
            if self.least(spread) > self.question.memory:
                self.counts["do not fit"] += 1
                continue
            kind = StageSchedule(SPLIT[0], branch.pp, self.question.pins.get("stages_per_rank", 4))
            yield bound(self.times(branch, recomputes[0]), kind, branch.microbatches) * prod(self.factors(branch).values()), branch

    def factors(self, plan: Plan) -> dict[str, float]:
        return factors(plan, self.pace.machine.devices_per_node)

    def times(self, branch: Plan, recompute: str) -> tuple[float, ...]:
        """Seconds of all blocks for a micro-batch: forward, and both halves of backward; of a layer; and how many layers there are."""
        samples = branch_samples(branch, self.question)
        key = (branch.tp, branch.cp, branch.ep, branch.shares, samples, branch.precision, recompute, branch.context, branch.stretched,
               branch.compile)  # fmt: skip
        if key not in self.known:
            plan = replace(branch, recompute=recompute)
            found = [(self.pace.block(block, plan, samples), block.count) for block in self.pace.work.blocks]
            parts = [[one.forward * n, one.back_input * n, one.back_weight * n] for one, n in found]
            layer = max(sum(part) / n for part, (_, n) in zip(parts, found) if n == self.layer.count)
            self.known[key] = (*[sum(part) for part in zip(*parts)], layer, float(self.layer.count))
        return self.known[key]

    @cached_property
    def layer(self) -> Block:
        """The block that there are most of."""
        return max(self.pace.work.blocks, key=lambda block: block.count)

    def sizes(self, plan: Plan) -> tuple[float, ...]:
        """Elements of weights on the ranks of a pipeline together, of a layer, and of a layer without experts; bytes that all blocks keep of
        a micro-batch, that a layer keeps, and that its recomputation needs for a moment."""
        samples, software, blocks = branch_samples(plan, self.question), self.pace.software, self.pace.work.blocks
        key = (plan.tp, plan.cp, plan.ep, samples, plan.precision, plan.recompute, plan.stretched)
        if key not in self.known:
            layer = formulas.weights(self.layer, plan)
            own = sum(formulas.weights(b, plan) * b.count for b in blocks), layer, layer - self.layer.experts / plan.ep
            kept = sum(formulas.kept(b, plan, samples, software)[0] * b.count for b in blocks)
            self.known[key] = *own, kept, *formulas.kept(self.layer, plan, samples, software)
        return self.known[key]

    def least(self, plan: Plan) -> float:
        """Bytes that the fullest rank of a plan needs at least: an even share of all, or of the layers, with one micro-batch alive; or, of
        a rank that holds as many micro-batches as there are stages, the layers that every rank has."""
        software, f, p, away = self.pace.software, plan.shards, plan.pp, plan.offload == "all"
        zero, trained = formulas.depth(plan), 1 - self.pace.work.frozen
        each = 0.0 if away and zero == 3 else software.weights / (f if zero == 3 else 1)
        each += 0.0 if away else trained * software.gradients / (f if zero >= 2 else 1)
        each += trained * software.state / (f if zero else 1) if plan.offload == "none" else 0.0
        every, layer, dense, kept, own, moment = self.sizes(plan)
        moment += dense * (2 * formulas.item(plan) + software.gradients) if zero == 3 else 0.0
        sure = self.layer.count // (p * plan.stages_per_rank) * plan.stages_per_rank
        alive = 1 if plan.schedule in UNSURE else min(p, plan.microbatches)
        even = (every * each + kept) / p + (moment if p == 1 else 0.0)
        ranks = self.layer.count / p * (layer * each + own), sure * (layer * each + own * alive)
        return max(even, max(ranks) + moment)

    def branch(self, branch: Plan) -> None:
        """The plans of a branch: what is sharded, recomputed, kept on the host, and in which order stages work.

        Less sharding, less recomputation and less that is kept on the host take no longer, so where one fits with room to spare,
        more of it is not priced.
        """
        recomputes, plain = self.question.of("recompute", RECOMPUTES), prod(self.factors(branch).values())
        sharded = shardings(branch, self.question, self.pace.machine.devices_per_node)
        over = self.question.of("shard_over_cp", (False, True) if branch.cp > 1 else (False,))
        for fsdp, over_cp in product(sharded, over):
            shards = replace(branch, fsdp=fsdp, shard_over_cp=over_cp).shards
            zeros = self.question.of("zero", (1, 2, 3)) if shards > 1 else [branch.zero]
            states = self.sizes(branch)[0] / branch.pp / shards * (1 - self.pace.work.frozen)
            for kind in orders(branch, self.question):
                kept = {"dp": branch.shares // fsdp, "fsdp": fsdp, "shard_over_cp": over_cp}
                shape = replace(branch, **kept, schedule=kind.schedule, stages_per_rank=kind.per_rank)
                mesh, worth = Candidate(shape).mesh, [len(zeros)] * len(recomputes)  # how much sharding could be better
                for offload in self.question.of("offload"):
                    update = touched(self.pace, Plan(offload=offload), states)
                    factor = plain * (PREFERENCES.offload if offload != "none" else 1.0)
                    for k, recompute in enumerate(recomputes):
                        floor = (bound(self.times(branch, recompute), kind, branch.microbatches) + update) * factor
                        if floor > self.limit(mesh):
                            self.counts["slower"] += 1
                            break
                        for at, zero in enumerate(zeros[: worth[k]]):
                            if self.priced(replace(shape, zero=zero, recompute=recompute, offload=offload), floor):
                                worth[k:] = [min(at, w) for w in worth[k:]]
                                break

    def priced(self, plan: Plan, floor: float) -> bool:
        """Price a plan that costs at least `floor`, with each way to share out the batch; whether it fits, with room to spare, in any."""
        spare = self.question.memory - self.least(plan)
        if spare < 0 or (spare < self.question.margin and floor * PREFERENCES.tight > self.limit(Candidate(plan).mesh)):
            self.counts["do not fit" if spare < 0 else "slower"] += 1
            return False
        return any(list(map(self._priced, ways(self.pace, plan, self.question, self.refused))))

    def _priced(self, plan: Plan) -> bool:
        """Price a plan and keep it when it is the best of its mesh; whether it fits with room to spare."""
        if why := self.refused(plan):
            self.counts["impossible"] += 1
            self.whys[why] += 1
            return False
        samples, known = branch_samples(plan, self.question), self.factors(plan)
        found = price(self.pace, plan, self.question, samples, self.limit(Candidate(plan).mesh) / prod(known.values()))
        fits, tight = self.question.holds(found), self.question.spare(found) < self.question.margin
        if fits and found.seconds == inf:
            self.counts["slower"] += 1
            return not tight
        candidate = Candidate(plan, found, samples, factors=known | ({"tight": PREFERENCES.tight} if tight else {}))
        self.counts["priced"] += 1
        self.counts["do not fit"] += not fits
        table, key = (self.best, _cost) if fits else (self.large, _bytes)
        if candidate.mesh not in table or key(candidate) < key(table[candidate.mesh]):
            table[candidate.mesh] = candidate
            self.kept = sorted(c.cost for c in self.best.values())
        return fits and not tight


RECOMPUTES = ("none", "selective", "full")
"""Least first."""
UNSURE = ("sequential", "auto")
"""Schedules of which no rank surely holds as many micro-batches as there are stages."""
EVEN = 0.9
"""Part of the wait for other stages that is counted in a lower bound: stages are not exactly even."""


def _cost(candidate: Candidate) -> tuple[float, str]:
    return float(f"{candidate.cost:.9g}"), str(candidate.plan)


def _bytes(candidate: Candidate) -> tuple[float, str]:
    return candidate.reserved, str(candidate.plan)


def bound(times: tuple[float, ...], kind: StageSchedule, microbatches: int) -> float:
    """Seconds that a plan takes at least: its computing and its messages, spread evenly over the stages, or as many layers as some rank
    must have. `times`: as of `_Looking.times`.

    The last stage cannot begin before the others made its first input. Nor can the step end, if backward is not split, before they took
    its last gradient: one micro-batch's way through the others, and of that a part if ranks have several stages.
    """
    forward, inputs, weight, layer, layers = times
    total, way = forward + inputs + weight, forward + (0.0 if kind.schedule in SPLIT else inputs + weight)
    waits = EVEN * way * (kind.ranks - 1) / (kind.ranks * kind.per_rank)
    return max(forward + inputs, total * microbatches / kind.ranks + waits, ceil(layers / kind.ranks) * layer * microbatches)
