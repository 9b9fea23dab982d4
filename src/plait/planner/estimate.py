"""Predict one plan on a machine: seconds of a step by cause, and bytes of the fullest rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from math import ceil, inf
from typing import NamedTuple

from plait.config.keys import INNER_AXES, SAME_LOSS, SPLIT_SCHEDULES
from plait.config.plan import Plan
from plait.parallel.pipeline.schedule_search import build_table, compute_makespan
from plait.parallel.pipeline.schedules import ScheduleTable, assign_stages
from plait.planner import sync_costs
from plait.planner.formulas import BlockSize, BlockTime, RuntimeCosts, TimeModel, get_itemsize, sum_state_bytes
from plait.planner.workload import Block


class StageBlock(NamedTuple):
    """Equal blocks of a stage: one block with its time and size on a rank, and their number."""

    block: Block
    time: BlockTime
    size: BlockSize
    number: float

    def repeat(self, number: float) -> "StageBlock":
        """Return the same block with another number."""
        return StageBlock(self.block, self.time, self.size, number)


Stage = list[StageBlock]
"""The blocks of a pipeline stage."""


@dataclass(frozen=True)
class Estimate:
    """Prediction of one step. `parts` sum to `seconds`; `memory` has bytes of the fullest rank by category."""

    plan: Plan
    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    reserved: float = 0.0
    """Bytes reserved by the allocator."""
    flops: float = 0.0
    """Operations of a step of the model on one device, without recomputation."""
    host_bytes: float = 0.0
    """Bytes that one rank keeps in host memory."""
    sent_bytes: dict[str, float] = field(default_factory=dict)
    """Bytes of gradients and weights that a rank sends per step, by axis."""
    updated_weights: float = 0.0
    """Elements of trained weights that a rank updates."""
    spare: float | None = None
    """On a machine with unequal devices: free bytes on the device with least free memory."""

    @property
    def allocated(self) -> float:
        """Bytes that the plan needs. The allocator returns reserved bytes beyond them before it runs out of memory."""
        return sum(self.memory.values())

    def get_fraction(self, part: str) -> float:
        """Return a part's fraction of the step."""
        return self.parts.get(part, 0.0) / self.seconds


def estimate_plan(pace: TimeModel, plan: Plan, samples: float, max_bytes: float = inf, max_seconds: float = inf) -> Estimate:
    """Predict a plan with micro-batches of `samples` samples per rank.

    `seconds` is infinite if the plan needs more than `max_bytes` bytes or takes longer than `max_seconds`.
    """
    placed = [
        StageBlock(b, pace.time_block(b, plan, samples), BlockSize.from_block(b, plan, samples, pace.software), b.count)
        for b in pace.work.blocks
    ]
    cut, kind = split_stages(placed, plan.pp * plan.stages_per_rank, pace.software.even), StageSchedule.from_plan(plan)
    held = list_rank_stages(kind) if plan.pp > 1 else ((0,),)
    weights = [count_weights(stage) for stage in cut]
    fullest = max(held, key=lambda stages: sum(weights[s] for s in stages))
    own = [part for s in fullest for part in cut[s]]
    memory = find_peak_memory([[cut[s] for s in stages] for stages in held], plan, count_live(plan), pace.trained_costs)
    found = estimate_memory(pace, plan, samples, memory, own)
    if found.allocated > max_bytes:
        return found
    times = StageTimes.from_stages(pace, plan, samples, cut, held)
    rounded = times.round_times() if plan.pp > 1 else times
    busiest, micro = max(held, key=times.sum_stages), plan.microbatches
    hidden = times.sum_stages(busiest)
    again, sent = (sum(getattr(p.time, name) * p.number for s in busiest for p in cut[s]) * micro for name in ("again", "sent"))
    parts = {"compute": hidden * micro - again - sent, "recompute": again, "tensor": sent}
    parts["bubble"] = rounded.bound_makespan(kind, micro) - hidden * micro if plan.pp > 1 else 0.0
    parts["gradients"] = time_gradients(pace, plan, own, hidden) + time_shared_heads(pace, plan, own)
    if sum(parts.values()) > max_seconds:
        return found
    if plan.pp > 1:
        parts["bubble"] = time_schedule(kind, micro, rounded) - hidden * micro
    parts["optimizer"] = time_optimizer(pace, plan, found.updated_weights)
    if plan.offload == "all":
        parts["host"] = time_offload(pace, plan, own, hidden)
    parts["fixed"] = pace.fitted.fixed
    if pace.loader_rate:
        parts["data"] = max(0.0, samples * micro / pace.loader_rate - sum(parts.values()))
    if pace.software.cores is not None:
        add_core_costs(pace, plan, samples, own, parts)
    if plan.replica_groups > 1:
        parts["sync"] = sync_costs.time_group_sync(pace, plan, found.updated_weights, sum(parts.values()))
    return replace(found, seconds=sum(parts.values()), parts=parts)


def estimate_memory(pace: TimeModel, plan: Plan, samples: float, memory: dict[str, float], own: Stage) -> Estimate:
    """Predict the memory and traffic of a plan, without its time. `own`: blocks of the rank with most weights."""
    software, part, weights = pace.software, 1 - pace.work.frozen, count_weights(own)
    trained = sum(p.size.sharded * p.number for p in own) * part
    memory = memory | sync_costs.sum_sync_memory(pace, plan, weights * part, trained)
    away = 0.0 if plan.offload == "none" else software.weights + software.gradients + software.state
    flops = 3 * pace.work.flops * samples * plan.microbatches / (plan.along(INNER_AXES) // plan.shares)
    reserved = sum(memory.values()) * pace.fitted.slack
    return Estimate(plan, inf, {}, memory, reserved, flops, trained * away, sync_costs.sum_sent_bytes(pace, plan, weights), trained)


def find_peak_memory(ranks: Sequence[Sequence[Stage]], plan: Plan, live: Sequence[int], software: RuntimeCosts) -> dict[str, float]:
    """Return bytes by category of the fullest rank.

    `ranks`: the stages of each rank; `live`: number of stage activations that each rank keeps at once.
    """
    unlike: dict[object, tuple[Sequence[Stage], int]] = {}
    for k, stages in enumerate(ranks):  # most ranks have equal blocks and equally many live activations
        alive = live[k % len(live)]
        unlike.setdefault((alive, *(tuple((id(p.block), p.number) for p in stage) for stage in stages)), (stages, alive))
    return max((_sum_rank_memory(stages, plan, alive, software) for stages, alive in unlike.values()), key=lambda found: sum(found.values()))


def _sum_rank_memory(stages: Sequence[Stage], plan: Plan, live: float, software: RuntimeCosts) -> dict[str, float]:
    own = parts = each = largest = moment = 0.0
    for _, _, size, number in chain.from_iterable(stages):
        own += size.weights * number
        parts += size.sharded * number
        each += size.kept * number
        largest, moment = max(largest, size.gathered), max(moment, size.recompute_bytes)
    zero = plan.zero_stage if plan.is_sharded else 0
    found = sum_state_bytes(zero, plan.offload, software, own, parts) | {"activations": each / len(stages) * live + moment}
    if zero == 3 and software.once and plan.pp > 1:
        found["gathered"] = 2 * own * get_itemsize(plan)  # and their gradients, until the last micro-batch
    elif zero == 3:
        found["gathered"] = largest * (2 * get_itemsize(plan) + software.gradients)
    return found


def count_weights(blocks: Stage) -> float:
    """Count weight elements of blocks on a rank, before fsdp."""
    return sum(p.size.weights * p.number for p in blocks)


HOST_UPDATE_RATE = 1e11
"""Bytes/s that the optimizer step on a node's host reads and writes, for all devices of the node.
ZeRO-Offload's Adam takes about 0.24 s for 10^9 parameters (Ren et al. 2021, table 4)."""


def time_optimizer(pace: TimeModel, plan: Plan, states: float) -> float:
    """Predict seconds of the optimizer step, by the bytes of state it reads and writes."""
    software = pace.software
    size = states * (2 * software.weights + software.gradients + 2 * software.state)
    if plan.offload == "none":
        return size / pace.memory_bandwidth
    moved = states * (software.weights + software.gradients) / pace.host_bandwidth if plan.offload == "optimizer" else 0.0
    return moved + size * pace.machine.devices_per_node / HOST_UPDATE_RATE


def time_offload(pace: TimeModel, plan: Plan, own: Stage, hidden: float) -> float:
    """Predict the exposed seconds of loading weights from the host in forward and backward, and of moving gradients there."""
    size = sum(p.size.sharded * p.number for p in own) * (2 * pace.software.weights + pace.software.gradients)
    return plan.microbatches * pace.time_exposed(size / pace.host_bandwidth, hidden)


def add_core_costs(pace: TimeModel, plan: Plan, samples: float, own: Stage, parts: dict[str, float]) -> None:
    """Add the costs of ranks on CPU cores in place: operator launches, plait's own code, the loader, and oversubscribed cores."""
    software, cores = pace.software, pace.software.cores
    assert cores is not None
    kernels, units = sum(p.block.kernels * p.number for p in own), sum(p.number for p in own if p.block.weights + p.block.experts)
    parts["fixed"] = cores.step * cores.operator
    parts["optimizer"] += cores.update * kernels * cores.operator
    size = count_weights(own) * software.weights
    parts["gradients"] += cores.time_reduction(units, kernels, size, pace.memory_bandwidth, plan)
    if pace.loader_rate:
        parts["data"] = samples * plan.microbatches / pace.loader_rate
    waited = parts.pop("bubble")
    taken = sum(parts.values())
    for name in parts:
        parts[name] *= cores.crowd
    parts["bubble"] = max(0.0, waited - (cores.crowd - 1) * taken)


def split_stages(blocks: Stage, count: int, even: bool) -> list[Stage]:
    """Split blocks into pipeline stages of equal cost, or of equal block counts if the software does so."""
    if count == 1:
        return [blocks]
    if even:
        most = max(range(len(blocks)), key=lambda i: blocks[i].number)
        base, more = divmod(blocks[most].block.count, count)
        found = [[blocks[most].repeat(base + (s < more))] * (base + (s < more) > 0) for s in range(count)]
        return [blocks[:most] + found[0], *found[1:-1], found[-1] + blocks[most + 1 :]]
    found = [[] for _ in range(count)]
    costs = [placed.time.forward + placed.time.back_input + placed.time.back_weight for placed in blocks]
    total = sum(cost * placed.number for cost, placed in zip(costs, blocks))
    at, done = 0, 0.0
    for cost, placed in zip(costs, blocks):
        left = placed.block.count
        while left:
            wanted = round((total * (at + 1) / count - done) / cost) if cost else left
            now = left if at == count - 1 else max(0, min(left, wanted))
            found[at] += [placed.repeat(now)] * (now > 0)
            done, left = done + cost * now, left - now
            at += left > 0
    return found


class StageSchedule(NamedTuple):
    """A pipeline schedule, its number of ranks, and its stages per rank."""

    schedule: str
    ranks: int
    per_rank: int

    @classmethod
    def from_plan(cls, plan: Plan) -> "StageSchedule":
        return cls(plan.schedule, plan.pp, plan.stages_per_rank)


class StageTimes(NamedTuple):
    """Seconds of forward and of both halves of backward for each stage, and of a message between two stages."""

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    link: float

    @classmethod
    def from_stages(cls, pace: TimeModel, plan: Plan, samples: float, stages: list[Stage], rank_stages: Sequence[Sequence[int]]) -> "StageTimes":
        """Compute the times of each stage. `rank_stages`: the stages of each rank."""
        before = behind = pace.software.action if plan.pp > 1 else 0.0
        if (cores := pace.software.cores) is not None and plan.pp > 1:
            whole = sum(b.kernels * b.count for b in pace.work.blocks)
            before, behind = (cores.ahead + cores.passed * whole) * cores.operator, cores.behind * cores.operator
        forward = tuple(before + sum(p.time.forward * p.number for p in stage) for stage in stages)
        inputs = tuple(behind + sum(p.time.back_input * p.number for p in stage) for stage in stages)
        weights = tuple(sum(p.time.back_weight * p.number for p in stage) for stage in stages)
        found = cls(forward, inputs, weights, 0.0)
        if plan.pp == 1:
            return found
        size = max(p.block.out for s in max(rank_stages, key=found.sum_stages) for p in stages[s]) * samples / plan.cp * get_itemsize(plan)
        link = pace.machine.send(size / plan.tp, plan.along(SAME_LOSS) * plan.shares) + pace.machine.all_gather(size, plan.tp)
        return cls(forward, inputs, weights, link)

    def round_times(self) -> "StageTimes":
        """Round to 1e-7 s, so that plans share cached schedules."""
        forward, inputs, weights = (tuple(round(t, 7) for t in times) for times in self[:3])
        return StageTimes(forward, inputs, weights, round(self.link, 7))

    def sum_stages(self, stages: Sequence[int]) -> float:
        """Sum the seconds of one micro-batch on a rank with these stages."""
        return sum(self.forward[s] + self.inputs[s] + self.weights[s] for s in stages)

    def bound_makespan(self, kind: StageSchedule, micro: int) -> float:
        """Return a lower bound of the pipeline's makespan.

        A rank starts after earlier stages made its first input. Unless the schedule splits backward, these stages take its last gradient after it
        ends.
        """
        found = 0.0
        for stages in list_rank_stages(kind):
            first = min(stages)
            behind = 0.0 if kind.schedule in SPLIT_SCHEDULES else sum(self.inputs[:first]) + sum(self.weights[:first])
            found = max(found, sum(self.forward[:first]) + self.sum_stages(stages) * micro + behind)
        return found


@lru_cache(maxsize=65536)
def time_schedule(kind: StageSchedule, micro: int, times: StageTimes) -> float:
    """Return the makespan of a schedule. The middle of a long schedule repeats, so it is extrapolated from two short ones."""
    ranks, took = kind.ranks, times[:3]
    if micro <= 3 * ranks:
        return compute_makespan(make_table(kind, micro), took, times.link)
    short, long = make_table(kind, pick_table_length(micro, ranks) - ranks), make_table(kind, pick_table_length(micro, ranks))
    before, after = compute_makespan(short, took, times.link), compute_makespan(long, took, times.link)
    return after + max((after - before) / ranks, max(map(times.sum_stages, list_rank_stages(kind)))) * (micro - long.microbatches)


def pick_table_length(micro: int, ranks: int) -> int:
    """Return the number of micro-batches of a short schedule that represents a longer one."""
    return micro if micro <= 3 * ranks else 3 * ranks + micro % ranks


def count_live(plan: Plan) -> tuple[int, ...]:
    """Return the number of stage activations that each rank keeps at once."""
    if plan.pp == 1:
        return (1,)
    return make_table(StageSchedule.from_plan(plan), pick_table_length(plan.microbatches, plan.pp)).peak_live


@lru_cache(maxsize=512)
def make_table(kind: StageSchedule, micro: int) -> ScheduleTable:
    """Return the schedule table of `micro` micro-batches."""
    return build_table(kind.schedule, kind.ranks, micro, kind.per_rank)


@lru_cache(maxsize=512)
def list_rank_stages(kind: StageSchedule) -> tuple[tuple[int, ...], ...]:
    """Return the stage numbers of each pipeline rank."""
    owner = make_table(kind, kind.ranks).owner if kind.schedule == "auto" else assign_stages(*kind)
    return tuple(tuple(s for s, rank in enumerate(owner) if rank == k) for k in range(kind.ranks))


def time_shared_heads(pace: TimeModel, plan: Plan, own: Stage) -> float:
    """Predict the seconds to sum gradients of key-value heads that tp ranks share, if tp exceeds the number of such heads."""
    shared = [(p, placed.number) for placed in own for p in placed.block.products if p.head * plan.tp > p.columns]
    elements = sum(p.inner * p.head * number for p, number in shared) * (1 - pace.work.frozen)
    if not elements:
        return 0.0
    return pace.machine.all_reduce(elements * pace.software.sent, ceil(max(p.head * plan.tp / p.columns for p, _ in shared)))


def time_gradients(pace: TimeModel, plan: Plan, own: Stage, hidden: float) -> float:
    """Predict the exposed seconds of gradient and weight messages of dp, fsdp and cp. `hidden`: compute seconds of one micro-batch."""
    replicas = plan.along(plan.replica_axes)
    if replicas * plan.shards == 1 or (pace.work.frozen == 1 and (plan.shards == 1 or plan.zero_stage < 3)):
        return 0.0
    machine, software, f = pace.machine, pace.software, plan.shards
    everything, part = count_weights(own), 1 - pace.work.frozen
    elements = everything * part  # frozen weights are gathered and have no gradient
    forward, backward = hidden / 3, hidden * 2 / 3
    if f == 1 and sync_costs.get_compression(plan, "dp") != "none":
        return sync_costs.time_messages(pace, plan, elements, "dp") + sync_costs.time_compression(pace, plan, elements, "dp")
    if f == 1:
        whole, last = sync_costs.time_buckets(pace, plan, elements)
        return max(last, pace.time_exposed(whole, backward))
    inner = plan.tp if plan.shard_over_cp else plan.along(SAME_LOSS)
    unit = sync_costs.MESSAGE_BYTES
    apart = machine.all_reduce(unit, replicas, sync_costs.get_stride(plan, "dp")) * elements * software.sent / f / unit
    if plan.zero_stage < 3:
        pieces = max(1, ceil(elements * software.sent / unit))
        scatter = pieces * machine.reduce_scatter(elements * software.sent / pieces, f, inner)
        gather = pieces * machine.all_gather(everything * software.weights / pieces, f, inner)
        return pace.time_exposed(scatter + apart, backward) + pace.time_exposed(gather, forward)
    sizes = [(p.size.weights, p.number) for p in own]
    gather = sum(machine.all_gather(w / (k := ceil(w / software.piece) or 1) * get_itemsize(plan), f, inner) * k * n for w, n in sizes)
    scatter = sum(machine.reduce_scatter(w * part * software.sent, f, inner) * n for w, n in sizes)
    if software.once and plan.pp > 1:
        return pace.time_exposed(gather, plan.microbatches * forward) + pace.time_exposed(scatter + apart, plan.microbatches * backward)
    each = pace.time_exposed(gather, forward) + pace.time_exposed(gather + scatter, backward)
    return plan.microbatches * each + pace.time_exposed(apart, backward)
