"""Search all plans of a job on a machine, best first. Each valid plan is priced, or pruned by a lower bound.

Plans are ordered by cost: predicted seconds of a step times the factors of `Preferences`. A branch (`iter_branches`) fixes pp, tp, cp, ep, the
micro-batches and compile. The search varies the other keys. The compute time of a branch with its messages inside layers is a lower bound
of all its plans.

A plan is pruned in two cases. Its bound times its known factors exceeds the cost of the best plan of its mesh, or of the last mesh that is
shown. Or an even split of its memory does not fit. The order of branches is fixed, so equal inputs give equal results.

On a machine with unequal devices, the local batch of each data-parallel rank is priced on its own devices. A step ends with the slowest one. The
memory of each rank is compared with its own device.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from math import ceil, inf, prod
from typing import NamedTuple

from plait.config.keys import AXES, SAME_LOSS, SPLIT_SCHEDULES
from plait.config.plan import Plan
from plait.data.batch import split_by_weights
from plait.parallel.batch_split.batch_balancer import compute_speed_parts, list_share_ranks
from plait.planner.estimate import Estimate, StageSchedule, count_live, estimate_plan, time_optimizer
from plait.planner.formulas import BlockSize, TimeModel, get_itemsize, sum_state_bytes
from plait.planner.search_space import (
    RECOMPUTES,
    SearchSpace,
    count_branch_samples,
    iter_branches,
    list_batch_splits,
    list_schedules,
    list_shardings,
)
from plait.planner.workload import Block


def price_plan(pace: TimeModel, plan: Plan, space: SearchSpace, samples: float, max_seconds: float = inf) -> Estimate:
    """Predict a plan. In contrast to `estimate_plan`, data-parallel ranks may have unequal local batches and devices."""
    machine, batch = pace.machine, ceil(space.batch / plan.replica_groups)
    if not machine.is_heterogeneous:
        return estimate_plan(pace, plan, samples, space.memory, max_seconds)
    parts = plan.parts or (compute_speed_parts(pace.machine, plan) if plan.batch_split == "auto" else (1,) * plan.ranks)
    found = dict[tuple[float, float, float], Estimate]()
    for held, ranks in zip(split_by_weights(batch, parts, plan.microbatches), list_share_ranks(plan)):
        each = float(ceil(held / plan.microbatches))
        key = each, min(map(machine.speed, ranks)), min(space.get_usable_bytes(rank) for rank in ranks)
        if key not in found:
            got = estimate_plan(pace.with_speed(key[1]), plan, each)
            found[key] = replace(got, spare=key[2] - got.allocated)
    slowest = max(found.values(), key=lambda got: got.seconds)
    fullest = min(found.values(), key=lambda got: got.spare or 0.0)
    flops = 3 * pace.work.flops * space.batch / plan.devices
    return replace(slowest, memory=fullest.memory, reserved=fullest.reserved, spare=fullest.spare, flops=flops)


def describe_share_gain(pace: TimeModel, plan: Plan, space: SearchSpace, samples: float) -> str:
    """Describe the predicted speedup from unequal local batches by speed; empty for a plan without them."""
    if plan.batch_split == "equal" or not pace.machine.is_heterogeneous:
        return ""
    equal = price_plan(pace, replace(plan, batch_split="equal"), space, samples)
    times = equal.seconds / price_plan(pace, plan, space, samples).seconds
    fits = "" if space.can_hold(equal) else ", which does not fit"
    return f"local batches by speed: {times:.2f} × as fast as equal local batches{fits}"


TIE_FRACTION = 0.02
"""Predicted times that differ by a smaller fraction count as equal."""
MEMORY_MARGIN = 0.05
"""Fraction of device memory that a plan must leave free; otherwise it is marked as tight."""


@dataclass(frozen=True)
class Preferences:
    """Factors on the predicted seconds of a plan, for effects that predictions do not cover.

    A plan is chosen over another one only if its speedup exceeds the ratio of their factors. Each factor is the speedup that an experienced
    engineer would require before using such a plan.
    """

    key: float = 1.004
    """For every key with a value other than its default, as each adds complexity. Sharding counts once, for any ZeRO stage.
    Five keys equal `TIE_FRACTION`."""
    axis: float = 1.03
    """For every axis after the first. Each has its own process groups and conditions, and prediction errors exceed this factor."""
    nodes: float = 1.1
    """tp, or the exchanges of ep or of cp_method=ulysses, cross nodes. Then every layer waits for a network that other jobs share. Published
    layouts of Megatron-LM, Llama 3 (arXiv 2407.21783) and torchtitan keep tp inside a node."""
    offload: float = 1.15
    """State is kept on the host. Its CPU and memory, which are predicted least well, also load the data."""
    tight: float = 10.0
    """Less than `MEMORY_MARGIN` of a device is free. Running out of memory ends the run, so such a plan is chosen only if nothing else fits."""


PREFERENCES = Preferences()


def list_node_crossings(plan: Plan, per_node: int) -> list[str]:
    """List the axes whose messages in every layer cross nodes of `per_node` devices: tp, ep, and cp if it exchanges heads."""
    inner = plan.along(SAME_LOSS)
    sizes = {"tp": plan.tp, "ep": plan.ep * inner if plan.ep > 1 else 1, "cp": inner if plan.cp > 1 and plan.cp_method == "ulysses" else 1}
    return [axis for axis, size in sizes.items() if size > per_node]


def compute_factors(plan: Plan, per_node: int) -> dict[str, float]:
    """Return a plan's factors by cause, without the factor of tight memory."""
    changed = plan.changed()
    axes = sum(changed.get(axis, 1) > 1 for axis in (*AXES, "ep"))
    keys = len(changed) - axes - ("zero_stage" in changed) + (plan.fsdp > 1)
    found = {"axes": PREFERENCES.axis ** max(0, axes - 1), "keys": PREFERENCES.key**keys}
    if crossing := list_node_crossings(plan, per_node):
        found[f"{', '.join(crossing)} between nodes"] = PREFERENCES.nodes
    return found | ({"offload": get_offload_factor(plan.offload)} if plan.offload != "none" else {})


def get_offload_factor(offload: str) -> float:
    return PREFERENCES.offload if offload != "none" else 1.0


@dataclass(frozen=True)
class Candidate:
    """A plan with its prediction. `why`: why it is invalid or, in an answer, why it is not the first."""

    plan: Plan
    estimate: Estimate | None = None
    samples: float = 0.0
    why: str = ""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Factors by cause (`Preferences`)."""
    fits: bool = True
    """The plan is valid and its memory fits."""

    @property
    def mesh(self) -> tuple[int, ...]:
        """The sizes of all axes. Only the best plan of a mesh is shown."""
        return tuple(getattr(self.plan, axis) for axis in (*AXES, "ep"))

    @property
    def seconds(self) -> float:
        return self.estimate.seconds if self.estimate else inf

    @property
    def reserved(self) -> float:
        """Reserved bytes of the fullest rank."""
        return self.estimate.reserved if self.estimate else inf

    @property
    def cost(self) -> float:
        """The sort key of plans: seconds times factors."""
        return self.seconds * prod(self.factors.values())

    @property
    def warnings(self) -> list[str]:
        """Factors to show to a user before a run."""
        return [name for name in self.factors if name not in ("axes", "keys")]


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: the best plan of each mesh by increasing cost, plans that need too much memory by increasing memory, and plan
    counts."""

    best: tuple[Candidate, ...]
    oversized: tuple[Candidate, ...]
    counts: dict[str, int]
    refusal_counts: dict[str, int] = field(default_factory=dict)
    """Number of invalid plans by reason."""


def find_best_plans(
    pace: TimeModel, space: SearchSpace, refused: Callable[[Plan], str], max_cost: float = inf, say: Callable[[str], None] = lambda text: None
) -> SearchResult:  # fmt: skip
    """Price all plans without a reason in `refused` that may cost less than `max_cost`. `say` receives the progress."""
    looking = _Search(pace, space, refused, max_cost)
    bounded = looking.bound_branches()
    for k, (floor, branch) in enumerate(bounded):
        say(f"comparing plans: {k} of {len(bounded)} branches")
        if floor > looking.get_limit():
            looking.counts["slower"] += 1
            continue
        for precision in space.get_values("precision"):
            looking.search_branch(replace(branch, precision=precision))
    order = sorted(looking.best.values(), key=_get_cost_key)[: space.shown_meshes]  # for later meshes, a better plan may have been pruned
    over = sorted((c for mesh, c in looking.oversized.items() if mesh not in looking.best), key=_get_bytes_key)
    timed = (replace(c, estimate=price_plan(pace, c.plan, replace(space, memory=inf), c.samples)) for c in over)
    return SearchResult(tuple(order), tuple(timed), dict(looking.counts), dict(looking.refusal_counts))


class StateLayout(NamedTuple):
    """Sharded, recomputed and offloaded state of a plan, as keys of `Plan`."""

    zero: int
    recompute: str
    offload: str


@dataclass
class _Search:
    """The state of a running search."""

    pace: TimeModel
    space: SearchSpace
    refused: Callable[[Plan], str]
    max_cost: float = inf
    best: dict[tuple[int, ...], Candidate] = field(default_factory=dict)
    oversized: dict[tuple[int, ...], Candidate] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    refusal_counts: Counter[str] = field(default_factory=Counter)
    costs: list[float] = field(default_factory=list)
    sums: dict[tuple[object, ...], tuple[float, ...]] = field(default_factory=dict)
    """Cached sums over blocks, which many plans share."""

    def get_limit(self, mesh: tuple[int, ...] | None = None) -> float:
        """Return the cost above which a plan is not shown: of the last shown plan, or of a better plan of the same mesh."""
        last = min(self.max_cost, self.costs[self.space.shown_meshes - 1] if len(self.costs) >= self.space.shown_meshes else inf)
        return min(last, self.best[mesh].cost) if mesh in self.best else last

    def bound_branches(self) -> list[tuple[float, Plan]]:
        """Return the branches that may fit, each with a lower bound of its cost.

        They are sorted by their compute time without recomputation. Plans of the first branches have few stages and are priced quickly.
        """
        least = self.space.get_values("activation_checkpointing", RECOMPUTES)[0]
        found = [(self.bound_branch(branch), branch) for branch in iter_branches(self.space)]
        self.counts["do not fit"] += sum(floor == inf for floor, _ in found)
        return sorted((pair for pair in found if pair[0] < inf), key=lambda pair: self.bound_compute(pair[1], least))

    def bound_compute(self, branch: Plan, recompute: str) -> float:
        """Return a lower bound of the cost of a branch's plans by their compute time."""
        kind = StageSchedule(SPLIT_SCHEDULES[0], branch.pp, self.space.pins.get("stages_per_rank", 4))
        return bound_seconds(self.sum_times(branch, recompute), kind, branch.microbatches) * prod(self.compute_factors(branch).values())

    def bound_branch(self, branch: Plan) -> float:
        """Return a lower bound of the cost of a branch's plans with the least recomputation that may fit; infinite if none fits."""
        question, found = self.space, inf
        over = question.get_values("shard_over_cp", (branch.cp > 1,))[0]
        spread = replace(branch, dp=1, fsdp=branch.shares, schedule="sequential", shard_over_cp=over)
        offloads = question.get_values("offload")
        for recompute in question.get_values("activation_checkpointing", RECOMPUTES):
            cost = self.bound_compute(branch, recompute)
            for offload in dict.fromkeys((offloads[0], offloads[-1])):
                held = [StateLayout(zero, recompute, offload) for zero in question.get_values("zero_stage", (2, 3))]
                spare = question.memory - min(self.bound_memory(spread, kept) for kept in held)
                tight = PREFERENCES.tight if spare < question.margin else 1.0
                found = min(found, cost * tight * get_offload_factor(offload) if spare >= 0 else inf)
                if spare >= question.margin:
                    return found
        return found

    def compute_factors(self, plan: Plan) -> dict[str, float]:
        return compute_factors(plan, self.pace.machine.devices_per_node)

    def sum_times(self, branch: Plan, recompute: str) -> tuple[float, ...]:
        """Sum seconds of a micro-batch over all blocks: forward, and both halves of backward. Append the seconds of a layer and the number of
        layers."""
        samples = count_branch_samples(branch, self.space)
        shares = branch.shares if self.has_statistics else 1
        key = (branch.tp, branch.cp, branch.ep, shares, branch.microbatches > 1, samples, branch.precision, recompute, branch.cp_method,
               branch.uses_sequence_shards, branch.compile)  # fmt: skip
        if key not in self.sums:
            plan = replace(branch, activation_checkpointing=recompute)
            found = [(self.pace.time_block(block, plan, samples), block.count) for block in self.pace.work.blocks]
            parts = [[one.forward * n, one.back_input * n, one.back_weight * n] for one, n in found]
            layer = max(sum(part) / n for part, (_, n) in zip(parts, found) if n == self.layer.count)
            self.sums[key] = (*[sum(part) for part in zip(*parts)], layer, float(self.layer.count))
        return self.sums[key]

    @cached_property
    def has_statistics(self) -> bool:
        """Some block has batch statistics, whose all-reduce depends on the number of ranks with different samples."""
        return any(block.statistics for block in self.pace.work.blocks)

    @cached_property
    def layer(self) -> Block:
        """The block with the largest count."""
        return max(self.pace.work.blocks, key=lambda block: block.count)

    def sum_sizes(self, branch: Plan, recompute: str) -> tuple[float, ...]:
        """Return the sizes of a branch's pipeline.

        Elements: weights of all ranks of the pipeline, of a layer, and of a layer without experts. Bytes: activations of a micro-batch kept by all
        blocks
        and by a layer, and the temporary memory of a layer's recomputation.
        """
        samples = count_branch_samples(branch, self.space)
        key = (branch.tp, branch.cp, branch.ep, samples, branch.precision, recompute, branch.uses_sequence_shards)
        if key not in self.sums:
            plan = replace(branch, activation_checkpointing=recompute)
            found = [(BlockSize.from_block(block, plan, samples, self.pace.software), block) for block in self.pace.work.blocks]
            layer = next(size for size, block in found if block is self.layer)
            every, kept = sum(size.weights * b.count for size, b in found), sum(size.kept * b.count for size, b in found)
            self.sums[key] = every, layer.weights, layer.weights - self.layer.experts / plan.ep, kept, layer.kept, layer.recompute_bytes
        return self.sums[key]

    def bound_memory(self, shape: Plan, kept: StateLayout, live: Sequence[float] = (1.0,)) -> float:
        """Return a lower bound of the bytes of the fullest rank.

        It is the maximum of three bounds: an even split with one live micro-batch; an even split of the layers with the live activations that every
        rank has; the layers that every rank has, on the rank with most live activations. `live`: live stage activations of each rank.
        """
        software, p, per = self.pace.trained_costs, shape.pp, shape.stages_per_rank
        zero = kept.zero if shape.shards > 1 or kept.offload == "all" else 0
        each = sum(sum_state_bytes(zero, kept.offload, software, 1.0, 1 / shape.shards).values())
        every, layer, dense, held, own, moment = self.sum_sizes(shape, kept.recompute)
        moment += dense * (2 * get_itemsize(shape) + software.gradients) if zero == 3 else 0.0
        sure = self.layer.count // (p * per) * per
        even = (every * each + held) / p + (moment if p == 1 else 0.0)
        ranks = self.layer.count / p * (layer * each + own * min(live) / per), sure * (layer * each + own * max(live) / per)
        return max(even, max(ranks) + moment)

    def search_branch(self, branch: Plan) -> None:
        """Search the plans of a branch: sharding, recomputation, offloading and pipeline schedules."""
        sharded = list_shardings(branch, self.space, self.pace.machine.devices_per_node)
        over = self.space.get_values("shard_over_cp", (False, True) if branch.cp > 1 else (False,))
        weights, trained = self.sum_sizes(branch, RECOMPUTES[0])[0] / branch.pp, 1 - self.pace.work.frozen
        for fsdp, over_cp in product(sharded, over):
            shards = replace(branch, dp=branch.shares // fsdp, fsdp=fsdp, shard_over_cp=over_cp)
            own = weights / shards.shards * trained
            updates = {offload: time_optimizer(self.pace, Plan(offload=offload), own) for offload in self.space.get_values("offload")}
            plain = prod(self.compute_factors(shards).values())
            for kind in list_schedules(branch, self.space):
                self.search_shape(replace(shards, schedule=kind.schedule, stages_per_rank=kind.per_rank), kind, updates, plain)

    def search_shape(self, shape: Plan, kind: StageSchedule, updates: Mapping[str, float], plain: float) -> None:
        """Search the plans of a mesh and schedule. `updates`: seconds of the optimizer by offload; `plain`: the factor that all these plans share.

        Less sharding, recomputation or offloading takes no longer. If a plan fits with a margin, plans with more of them are skipped.
        """
        recomputes = self.space.get_values("activation_checkpointing", RECOMPUTES)
        zeros = self.space.get_values("zero_stage", (1, 2, 3)) if shape.shards > 1 else [shape.zero_stage]
        mesh, worth = Candidate(shape).mesh, [len(zeros)] * len(recomputes)  # number of ZeRO stages that could still be better
        live = cache(lambda: (shape.stages_per_rank,) if shape.schedule in UNBOUNDED_SCHEDULES else count_live(shape))
        for offload, update in updates.items():
            for k, recompute in enumerate(recomputes):
                seconds = bound_seconds(self.sum_times(shape, recompute), kind, shape.microbatches) + update
                cost = seconds * plain * get_offload_factor(offload)
                if cost > self.get_limit(mesh):
                    self.counts["slower"] += 1
                    break
                for at, zero in enumerate(zeros[: worth[k]]):
                    spare = self.space.memory - self.bound_memory(shape, StateLayout(zero, recompute, offload), live())
                    tight = PREFERENCES.tight if spare < self.space.margin else 1.0
                    if spare < 0 or cost * tight > self.get_limit(mesh):
                        self.counts["do not fit" if spare < 0 else "slower"] += 1
                    elif self.price_splits(replace(shape, zero_stage=zero, activation_checkpointing=recompute, offload=offload)):
                        worth[k:] = [min(at, w) for w in worth[k:]]
                        break

    def price_splits(self, plan: Plan) -> bool:
        """Price a plan with each batch split, and return whether any fits with a margin."""
        return any(list(map(self._price_plan, list_batch_splits(self.pace, plan, self.space, self.refused))))

    def _price_plan(self, plan: Plan) -> bool:
        """Price a plan, keep it if it is the best of its mesh, and return whether it fits with a margin."""
        if why := self.refused(plan):
            self.counts["impossible"] += 1
            self.refusal_counts[why] += 1
            return False
        samples, known = count_branch_samples(plan, self.space), self.compute_factors(plan)
        found = price_plan(self.pace, plan, self.space, samples, self.get_limit(Candidate(plan).mesh) / prod(known.values()))
        fits, tight = self.space.can_hold(found), self.space.count_spare(found) < self.space.margin
        if fits and found.seconds == inf:
            self.counts["slower"] += 1
            return not tight
        candidate = Candidate(plan, found, samples, factors=known | ({"tight": PREFERENCES.tight} if tight else {}))
        self.counts["priced"] += 1
        self.counts["do not fit"] += not fits
        table, key = (self.best, _get_cost_key) if fits else (self.oversized, _get_bytes_key)
        if candidate.mesh not in table or key(candidate) < key(table[candidate.mesh]):
            table[candidate.mesh] = candidate
            self.costs = sorted(c.cost for c in self.best.values())
        return fits and not tight


UNBOUNDED_SCHEDULES = ("sequential", "auto")
"""Schedules without a table for the bound: each of their ranks counts as holding one micro-batch."""
BUBBLE_FRACTION = 0.9
"""Fraction of the pipeline bubble that a lower bound counts, because stages are not exactly even."""


def _get_cost_key(candidate: Candidate) -> tuple[float, str]:
    return float(f"{candidate.cost:.9g}"), str(candidate.plan)


def _get_bytes_key(candidate: Candidate) -> tuple[float, str]:
    return candidate.reserved, str(candidate.plan)


def bound_seconds(times: tuple[float, ...], kind: StageSchedule, microbatches: int) -> float:
    """Return a lower bound of a plan's seconds. `times`: as in `_Search.sum_times`.

    It spreads computing and messages evenly over the stages, or takes the number of layers that some rank must have. The last stage starts after
    the others made its first input. Unless backward is split, the step ends after the others took its last gradient. Both waits are one micro-batch's
    way through the other stages, or a part of it if ranks have several stages.
    """
    forward, inputs, weight, layer, layers = times
    total, way = forward + inputs + weight, forward + (0.0 if kind.schedule in SPLIT_SCHEDULES else inputs + weight)
    waits = BUBBLE_FRACTION * way * (kind.ranks - 1) / (kind.ranks * kind.per_rank)
    return max(forward + inputs, total * microbatches / kind.ranks + waits, ceil(layers / kind.ranks) * layer * microbatches)
