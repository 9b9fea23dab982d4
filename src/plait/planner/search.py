"""All plans of a job on a machine, the best first: every valid one is priced, or a lower bound shows that it would not be shown.

Plans are ordered by their *cost*: predicted seconds of a step, times the factors of `Preferences`. A branch (`branches`) fixes pp, tp, cp,
ep, the micro-batches and compile; the search goes through what is left of a plan. The time that a branch computes and sends messages inside
layers is a lower bound of every plan in it. A plan is skipped if its bound, times the factors that it is known to have, is above the cost of
the best plan of its mesh or of the last mesh that would be shown, or if even an even share of it does not fit. Branches are tried in a fixed
order: the same question has the same answer.

If the devices of a machine are unlike, every share of the batch is priced on its own devices, and a step ends with its slowest share. Each
rank's memory is compared with that of its own device.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from math import ceil, inf, prod
from typing import NamedTuple

from plait.config.keys import AXES, SAME_LOSS, SPLIT
from plait.config.plan import Plan
from plait.data.batch import sizes
from plait.parallel.shares.balance import by_speed, members
from plait.planner.estimate import Estimate, StageSchedule, alive, estimate, touched
from plait.planner.formulas import BlockSize, TimeModel, item, states
from plait.planner.from_sketch import Block
from plait.planner.search_space import RECOMPUTES, SearchSpace, branch_samples, branches, orders, shardings, ways


def price(pace: TimeModel, plan: Plan, question: SearchSpace, samples: float, within: float = inf) -> Estimate:
    """As `estimate`, whose micro-batches have so many `samples` with equal shares; here each has its own."""
    machine, batch = pace.machine, ceil(question.batch / plan.replica_groups)
    if not machine.unlike:
        return estimate(pace, plan, samples, question.memory, within)
    parts = plan.parts or (by_speed(pace.machine, plan) if plan.batch_split == "auto" else (1,) * plan.ranks)
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
    if plan.batch_split == "equal" or not pace.machine.unlike:
        return ""
    equal = price(pace, replace(plan, batch_split="equal"), question, samples)
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
    """tp, or the exchanges of ep or of cp_method=ulysses, cross nodes: every layer then waits for a network that other jobs share. Published
    layouts of Megatron-LM, Llama 3 (arXiv 2407.21783) and torchtitan keep tp inside a node."""
    offload: float = 1.15
    """State is kept on the host: its processors and memory, of which predictions know least, also read the data."""
    tight: float = 10.0
    """Less than `MARGIN` of a device is left: a step that runs out of memory ends the run. In effect only if nothing else fits."""


PREFERENCES = Preferences()


def crossings(plan: Plan, per_node: int) -> list[str]:
    """The axes of which every layer waits for messages between nodes of so many devices: tp, ep, and cp if it exchanges heads."""
    inner = plan.along(SAME_LOSS)
    sizes = {"tp": plan.tp, "ep": plan.ep * inner if plan.ep > 1 else 1, "cp": inner if plan.cp > 1 and plan.cp_method == "ulysses" else 1}
    return [axis for axis, size in sizes.items() if size > per_node]


def factors(plan: Plan, per_node: int) -> dict[str, float]:
    """A plan's factors by what they are for, but for that of its memory."""
    changed = plan.changed()
    axes = sum(changed.get(axis, 1) > 1 for axis in (*AXES, "ep"))
    keys = len(changed) - axes - ("zero_stage" in changed) + (plan.fsdp > 1)
    found = {"axes": PREFERENCES.axis ** max(0, axes - 1), "keys": PREFERENCES.key**keys}
    if crossing := crossings(plan, per_node):
        found[f"{', '.join(crossing)} between nodes"] = PREFERENCES.nodes
    return found | ({"offload": offloading(plan.offload)} if plan.offload != "none" else {})


def offloading(offload: str) -> float:
    """The factor of what is kept on the host."""
    return PREFERENCES.offload if offload != "none" else 1.0


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
    bounded = looking.bounded()
    for k, (floor, branch) in enumerate(bounded):
        say(f"comparing plans: {k} of {len(bounded)} branches")
        if floor > looking.limit():
            looking.counts["slower"] += 1
            continue
        for precision in question.of("precision"):
            looking.branch(replace(branch, precision=precision))
    order = sorted(looking.best.values(), key=_cost)[: question.shown]  # of a mesh after them, something better may not have been priced
    over = sorted((c for mesh, c in looking.large.items() if mesh not in looking.best), key=_bytes)
    timed = (replace(c, estimate=price(pace, c.plan, replace(question, memory=inf), c.samples)) for c in over)
    return Found(tuple(order), tuple(timed), dict(looking.counts), dict(looking.whys))


class Kept(NamedTuple):
    """What a plan keeps: in parts (`zero`), for backward, on the device. Keys of `Plan`."""

    zero: int
    recompute: str
    offload: str


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

    def bounded(self) -> list[tuple[float, Plan]]:
        """The branches of which something may fit, each with a lower bound of the cost of its plans. Those come first that compute least if
        they keep everything for backward: their plans have few stages, and are priced quickly."""
        least = self.question.of("activation_checkpointing", RECOMPUTES)[0]
        found = [(self.floor(branch), branch) for branch in branches(self.question)]
        self.counts["do not fit"] += sum(floor == inf for floor, _ in found)
        return sorted((pair for pair in found if pair[0] < inf), key=lambda pair: self.computed(pair[1], least))

    def computed(self, branch: Plan, recompute: str) -> float:
        """A lower bound of the cost of its plans by what they compute."""
        kind = StageSchedule(SPLIT[0], branch.pp, self.question.pins.get("stages_per_rank", 4))
        return bound(self.times(branch, recompute), kind, branch.microbatches) * prod(self.factors(branch).values())

    def floor(self, branch: Plan) -> float:
        """A lower bound of the cost of a branch's plans: of those that recompute least of what may fit. Infinite if nothing does."""
        question, found = self.question, inf
        over = question.of("shard_over_cp", (branch.cp > 1,))[0]
        spread = replace(branch, dp=1, fsdp=branch.shares, schedule="sequential", shard_over_cp=over)
        offloads = question.of("offload")
        for recompute in question.of("activation_checkpointing", RECOMPUTES):
            cost = self.computed(branch, recompute)
            for offload in dict.fromkeys((offloads[0], offloads[-1])):
                held = [Kept(zero, recompute, offload) for zero in question.of("zero_stage", (2, 3))]
                spare = question.memory - min(self.least(spread, kept) for kept in held)
                tight = PREFERENCES.tight if spare < question.margin else 1.0
                found = min(found, cost * tight * offloading(offload) if spare >= 0 else inf)
                if spare >= question.margin:
                    return found
        return found

    def factors(self, plan: Plan) -> dict[str, float]:
        return factors(plan, self.pace.machine.devices_per_node)

    def times(self, branch: Plan, recompute: str) -> tuple[float, ...]:
        """Seconds of all blocks for a micro-batch: forward, and both halves of backward; of a layer; and how many layers there are."""
        samples = branch_samples(branch, self.question)
        key = (branch.tp, branch.cp, branch.ep, branch.shares, samples, branch.precision, recompute, branch.cp_method, branch.stretched,
               branch.compile)  # fmt: skip
        if key not in self.known:
            plan = replace(branch, activation_checkpointing=recompute)
            found = [(self.pace.block(block, plan, samples), block.count) for block in self.pace.work.blocks]
            parts = [[one.forward * n, one.back_input * n, one.back_weight * n] for one, n in found]
            layer = max(sum(part) / n for part, (_, n) in zip(parts, found) if n == self.layer.count)
            self.known[key] = (*[sum(part) for part in zip(*parts)], layer, float(self.layer.count))
        return self.known[key]

    @cached_property
    def layer(self) -> Block:
        """The block that there are most of."""
        return max(self.pace.work.blocks, key=lambda block: block.count)

    def sizes(self, branch: Plan, recompute: str) -> tuple[float, ...]:
        """Elements of weights on the ranks of a pipeline together, of a layer, and of a layer without experts; bytes that all blocks keep of
        a micro-batch, that a layer keeps, and that its recomputation needs for a moment."""
        samples = branch_samples(branch, self.question)
        key = (branch.tp, branch.cp, branch.ep, samples, branch.precision, recompute, branch.stretched)
        if key not in self.known:
            plan = replace(branch, activation_checkpointing=recompute)
            found = [(BlockSize.of(block, plan, samples, self.pace.software), block) for block in self.pace.work.blocks]
            layer = next(size for size, block in found if block is self.layer)
            every, kept = sum(size.weights * b.count for size, b in found), sum(size.kept * b.count for size, b in found)
            self.known[key] = every, layer.weights, layer.weights - self.layer.experts / plan.ep, kept, layer.kept, layer.moment
        return self.known[key]

    def least(self, shape: Plan, kept: Kept, live: Sequence[float] = (1.0,)) -> float:
        """Bytes that the fullest rank of a plan needs at least: an even share of all with one micro-batch alive, or of the layers with as many
        as every rank holds; or, of the rank that holds most at once, the layers that every rank has. `live`: of how many stages each rank
        holds activations at once."""
        software, p, per = self.pace.trained, shape.pp, shape.stages_per_rank
        zero = kept.zero if shape.shards > 1 or kept.offload == "all" else 0
        each = sum(states(zero, kept.offload, software, 1.0, 1 / shape.shards).values())
        every, layer, dense, held, own, moment = self.sizes(shape, kept.recompute)
        moment += dense * (2 * item(shape) + software.gradients) if zero == 3 else 0.0
        sure = self.layer.count // (p * per) * per
        even = (every * each + held) / p + (moment if p == 1 else 0.0)
        ranks = self.layer.count / p * (layer * each + own * min(live) / per), sure * (layer * each + own * max(live) / per)
        return max(even, max(ranks) + moment)

    def branch(self, branch: Plan) -> None:
        """The plans of a branch: what is sharded, recomputed, kept on the host, and in which order stages work."""
        sharded = shardings(branch, self.question, self.pace.machine.devices_per_node)
        over = self.question.of("shard_over_cp", (False, True) if branch.cp > 1 else (False,))
        weights, trained = self.sizes(branch, RECOMPUTES[0])[0] / branch.pp, 1 - self.pace.work.frozen
        for fsdp, over_cp in product(sharded, over):
            shards = replace(branch, dp=branch.shares // fsdp, fsdp=fsdp, shard_over_cp=over_cp)
            own = weights / shards.shards * trained
            updates = {offload: touched(self.pace, Plan(offload=offload), own) for offload in self.question.of("offload")}
            plain = prod(self.factors(shards).values())
            for kind in orders(branch, self.question):
                self.shape(replace(shards, schedule=kind.schedule, stages_per_rank=kind.per_rank), kind, updates, plain)

    def shape(self, shape: Plan, kind: StageSchedule, updates: Mapping[str, float], plain: float) -> None:
        """The plans of a mesh and a schedule. `updates`: seconds of the optimizer by what is kept on the host; `plain`: the factor that
        all of these plans have.

        Less sharding, less recomputation and less that is kept on the host take no longer, so where one fits with room to spare,
        more of it is not priced.
        """
        recomputes = self.question.of("activation_checkpointing", RECOMPUTES)
        zeros = self.question.of("zero_stage", (1, 2, 3)) if shape.shards > 1 else [shape.zero_stage]
        mesh, worth = Candidate(shape).mesh, [len(zeros)] * len(recomputes)  # how much sharding could be better
        live = cache(lambda: (shape.stages_per_rank,) if shape.schedule in UNSURE else alive(shape))
        for offload, update in updates.items():
            for k, recompute in enumerate(recomputes):
                seconds = bound(self.times(shape, recompute), kind, shape.microbatches) + update
                cost = seconds * plain * offloading(offload)
                if cost > self.limit(mesh):
                    self.counts["slower"] += 1
                    break
                for at, zero in enumerate(zeros[: worth[k]]):
                    spare = self.question.memory - self.least(shape, Kept(zero, recompute, offload), live())
                    tight = PREFERENCES.tight if spare < self.question.margin else 1.0
                    if spare < 0 or cost * tight > self.limit(mesh):
                        self.counts["do not fit" if spare < 0 else "slower"] += 1
                    elif self.priced(replace(shape, zero_stage=zero, activation_checkpointing=recompute, offload=offload)):
                        worth[k:] = [min(at, w) for w in worth[k:]]
                        break

    def priced(self, plan: Plan) -> bool:
        """Price a plan with each way to divide the batch over ranks; whether it fits, with room to spare, in any."""
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


UNSURE = ("sequential", "auto")
"""Schedules of which every rank is taken to hold one micro-batch: tables of these are not made for a bound."""
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
