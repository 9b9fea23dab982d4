"""What one plan costs on a machine: seconds of a step, split by what they are spent on, and bytes of the fullest rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from math import ceil, inf
from typing import NamedTuple

from plait.config.keys import SAME_LOSS, SPLIT, WITHIN
from plait.config.plan import Plan
from plait.parallel.pipeline.schedule_search import makespan, table
from plait.parallel.pipeline.schedules import Table, owners
from plait.planner import late
from plait.planner.formulas import BlockSize, BlockTime, Software, TimeModel, item, states
from plait.planner.from_sketch import Block


class Placed(NamedTuple):
    """Alike blocks of a stage: one of them, what it takes and needs on a rank, and how many there are."""

    block: Block
    time: BlockTime
    size: BlockSize
    number: float

    def times(self, number: float) -> "Placed":
        """The same blocks, `number` of them."""
        return Placed(self.block, self.time, self.size, number)


Stage = list[Placed]
"""The blocks of a pipeline's stage."""


@dataclass(frozen=True)
class Estimate:
    """Of one step. The parts of `seconds` add up to it; those of `memory` are bytes of the fullest rank."""

    plan: Plan
    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    reserved: float = 0.0
    """Bytes that the allocator takes for them."""
    flops: float = 0.0
    """Of the model's step on one device, without what is computed again."""
    hosted: float = 0.0
    """Bytes that one rank keeps in its host's memory."""
    sent: dict[str, float] = field(default_factory=dict)
    """Bytes of gradients and weights that a rank sends in a step, by axis."""
    states: float = 0.0
    """Trained weights that a rank updates."""
    spare: float | None = None
    """Where devices are unlike: bytes that the plan leaves of the one that it leaves least of."""

    @property
    def allocated(self) -> float:
        """Bytes without which the plan runs out of memory: an allocator gives back what it has reserved beyond them before it fails."""
        return sum(self.memory.values())

    def share(self, part: str) -> float:
        """A part of the step, of all of it."""
        return self.parts.get(part, 0.0) / self.seconds


def estimate(pace: TimeModel, plan: Plan, samples: float, room: float = inf, within: float = inf) -> Estimate:
    """Price a plan with micro-batches of `samples` samples on each rank. `seconds` is infinite for a plan that needs more than `room` bytes or
    takes longer than `within` seconds."""
    placed = [Placed(b, pace.block(b, plan, samples), BlockSize.of(b, plan, samples, pace.software), b.count) for b in pace.work.blocks]
    cut, kind = stages(placed, plan.pp * plan.stages_per_rank, pace.software.even), StageSchedule.of(plan)
    held = owned(kind) if plan.pp > 1 else ((0,),)
    weights = [weights_of(stage) for stage in cut]
    fullest = max(held, key=lambda stages: sum(weights[s] for s in stages))
    own = [part for s in fullest for part in cut[s]]
    memory = memory_of([[cut[s] for s in stages] for stages in held], plan, alive(plan), pace.trained)
    found = sized(pace, plan, samples, memory, own)
    if found.allocated > room:
        return found
    times = StageTimes.of(pace, plan, samples, cut, held)
    rounded = times.rounded() if plan.pp > 1 else times
    busiest, micro = max(held, key=times.busy), plan.microbatches
    hidden = times.busy(busiest)
    again, sent = (sum(getattr(p.time, name) * p.number for s in busiest for p in cut[s]) * micro for name in ("again", "sent"))
    parts = {"compute": hidden * micro - again - sent, "recompute": again, "tensor": sent}
    parts["bubble"] = rounded.least(kind, micro) - hidden * micro if plan.pp > 1 else 0.0
    parts["gradients"] = gradients(pace, plan, own, hidden) + same_heads(pace, plan, own)
    if sum(parts.values()) > within:
        return found
    if plan.pp > 1:
        parts["bubble"] = played(kind, micro, rounded) - hidden * micro
    parts["optimizer"] = touched(pace, plan, found.states)
    if plan.offload == "all":
        parts["host"] = carried(pace, plan, own, hidden)
    parts["fixed"] = pace.fitted.fixed
    if pace.loading:
        parts["data"] = max(0.0, samples * micro / pace.loading - sum(parts.values()))
    if pace.software.cores is not None:
        on_cores(pace, plan, samples, own, parts)
    if plan.replica_groups > 1:
        parts["sync"] = late.rarely(pace, plan, found.states, sum(parts.values()))
    return replace(found, seconds=sum(parts.values()), parts=parts)


def sized(pace: TimeModel, plan: Plan, samples: float, memory: dict[str, float], own: Stage) -> Estimate:
    """What is known of a plan without its times; `own`: the blocks of the rank with most weights."""
    software, part, weights = pace.software, 1 - pace.work.frozen, weights_of(own)
    trained = sum(p.size.sharded * p.number for p in own) * part
    memory = memory | late.held(pace, plan, weights * part, trained)
    away = 0.0 if plan.offload == "none" else software.weights + software.gradients + software.state
    flops = 3 * pace.work.flops * samples * plan.microbatches / (plan.along(WITHIN) // plan.shares)
    reserved = sum(memory.values()) * pace.fitted.slack
    return Estimate(plan, inf, {}, memory, reserved, flops, trained * away, late.bill(pace, plan, weights), trained)


def memory_of(ranks: Sequence[Sequence[Stage]], plan: Plan, live: Sequence[int], software: Software) -> dict[str, float]:
    """Bytes of the fullest rank by category. `ranks`: the stages of each; `live`: activations of stages that each holds at once."""
    unlike: dict[object, tuple[Sequence[Stage], int]] = {}
    for k, stages in enumerate(ranks):  # most of them have as many blocks of each kind, and hold as much at once
        alive = live[k % len(live)]
        unlike.setdefault((alive, *(tuple((id(p.block), p.number) for p in stage) for stage in stages)), (stages, alive))
    return max((_rank(stages, plan, alive, software) for stages, alive in unlike.values()), key=lambda found: sum(found.values()))


def _rank(stages: Sequence[Stage], plan: Plan, live: float, software: Software) -> dict[str, float]:
    own = parts = each = largest = moment = 0.0
    for _, _, size, number in chain.from_iterable(stages):
        own += size.weights * number
        parts += size.sharded * number
        each += size.kept * number
        largest, moment = max(largest, size.gathered), max(moment, size.moment)
    zero = plan.zero_stage if plan.is_sharded else 0
    found = states(zero, plan.offload, software, own, parts) | {"activations": each / len(stages) * live + moment}
    if zero == 3 and software.once and plan.pp > 1:
        found["gathered"] = 2 * own * item(plan)  # and their gradients, until the last micro-batch
    elif zero == 3:
        found["gathered"] = largest * (2 * item(plan) + software.gradients)
    return found


def weights_of(blocks: Stage) -> float:
    """Elements of their weights on a rank, before fsdp."""
    return sum(p.size.weights * p.number for p in blocks)


HOST_UPDATE = 1e11
"""Bytes/s that the optimizer's step on a node's host reads and writes, for all of the node's devices: ZeRO-Offload's Adam takes about 0.24 s
for 10^9 parameters (Ren et al. 2021, table 4)."""


def touched(pace: TimeModel, plan: Plan, states: float) -> float:
    """Seconds in which the optimizer reads and writes what it keeps of so many weights."""
    software = pace.software
    size = states * (2 * software.weights + software.gradients + 2 * software.state)
    if plan.offload == "none":
        return size / pace.stream
    moved = states * (software.weights + software.gradients) / pace.beside if plan.offload == "optimizer" else 0.0
    return moved + size * pace.machine.devices_per_node / HOST_UPDATE


def carried(pace: TimeModel, plan: Plan, own: Stage, hidden: float) -> float:
    """Seconds to load weights from the host, forward and backward, and to bring gradients there, that nothing hides."""
    size = sum(p.size.sharded * p.number for p in own) * (2 * pace.software.weights + pace.software.gradients)
    return plan.microbatches * pace.exposed(size / pace.beside, hidden)


def on_cores(pace: TimeModel, plan: Plan, samples: float, own: Stage, parts: dict[str, float]) -> None:
    """What processes on cores take beside: launching, plait's own work, the loader; more of them than cores take turns."""
    software, cores = pace.software, pace.software.cores
    assert cores is not None
    kernels, units = sum(p.block.kernels * p.number for p in own), sum(p.number for p in own if p.block.weights + p.block.experts)
    parts["fixed"] = cores.step * cores.operator
    parts["optimizer"] += cores.update * kernels * cores.operator
    size = weights_of(own) * software.weights
    parts["gradients"] += cores.reduced(units, kernels, size, pace.stream, plan)
    if pace.loading:
        parts["data"] = samples * plan.microbatches / pace.loading
    waited = parts.pop("bubble")
    taken = sum(parts.values())
    for name in parts:
        parts[name] *= cores.crowd
    parts["bubble"] = max(0.0, waited - (cores.crowd - 1) * taken)


def stages(blocks: Stage, count: int, even: bool) -> list[Stage]:
    """The blocks of each stage: of equal cost, or equal in number where that is what the software does."""
    if count == 1:
        return [blocks]
    if even:
        most = max(range(len(blocks)), key=lambda i: blocks[i].number)
        base, more = divmod(blocks[most].block.count, count)
        found = [[blocks[most].times(base + (s < more))] * (base + (s < more) > 0) for s in range(count)]
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
            found[at] += [placed.times(now)] * (now > 0)
            done, left = done + cost * now, left - now
            at += left > 0
    return found


class StageSchedule(NamedTuple):
    """A pipeline's schedule, and how its stages lie on its ranks."""

    schedule: str
    ranks: int
    per_rank: int

    @classmethod
    def of(cls, plan: Plan) -> "StageSchedule":
        return cls(plan.schedule, plan.pp, plan.stages_per_rank)


class StageTimes(NamedTuple):
    """Seconds of a forward and of both halves of a backward, of each stage; and of a message between two stages."""

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    link: float

    @classmethod
    def of(cls, pace: TimeModel, plan: Plan, samples: float, cut: list[Stage], held: Sequence[Sequence[int]]) -> "StageTimes":
        """`held`: the stages of each rank."""
        before = behind = pace.software.action if plan.pp > 1 else 0.0
        if (cores := pace.software.cores) is not None and plan.pp > 1:
            whole = sum(b.kernels * b.count for b in pace.work.blocks)
            before, behind = (cores.ahead + cores.passed * whole) * cores.operator, cores.behind * cores.operator
        forward = tuple(before + sum(p.time.forward * p.number for p in stage) for stage in cut)
        inputs = tuple(behind + sum(p.time.back_input * p.number for p in stage) for stage in cut)
        weights = tuple(sum(p.time.back_weight * p.number for p in stage) for stage in cut)
        found = cls(forward, inputs, weights, 0.0)
        if plan.pp == 1:
            return found
        size = max(p.block.out for s in max(held, key=found.busy) for p in cut[s]) * samples / plan.cp * item(plan)
        link = pace.machine.send(size / plan.tp, plan.along(SAME_LOSS) * plan.shares) + pace.machine.all_gather(size, plan.tp)
        return cls(forward, inputs, weights, link)

    def rounded(self) -> "StageTimes":
        """With seven digits after the point, so that plans share tables that were played."""
        forward, inputs, weights = (tuple(round(t, 7) for t in times) for times in self[:3])
        return StageTimes(forward, inputs, weights, round(self.link, 7))

    def busy(self, stages: Sequence[int]) -> float:
        """Of a rank with these stages, for one micro-batch."""
        return sum(self.forward[s] + self.inputs[s] + self.weights[s] for s in stages)

    def least(self, kind: StageSchedule, micro: int) -> float:
        """Of a whole pass, at least: a rank begins when the stages before its first one have made its first input. Unless the schedule
        splits backward, those have its last gradient still to take when it ends."""
        found = 0.0
        for stages in owned(kind):
            first = min(stages)
            behind = 0.0 if kind.schedule in SPLIT else sum(self.inputs[:first]) + sum(self.weights[:first])
            found = max(found, sum(self.forward[:first]) + self.busy(stages) * micro + behind)
        return found


@lru_cache(maxsize=65536)
def played(kind: StageSchedule, micro: int, times: StageTimes) -> float:
    """The makespan of a table. The middle of a long one repeats, so two short ones tell."""
    ranks, took = kind.ranks, times[:3]
    if micro <= 3 * ranks:
        return makespan(ordered(kind, micro), took, times.link)
    short, long = ordered(kind, shown(micro, ranks) - ranks), ordered(kind, shown(micro, ranks))
    before, after = makespan(short, took, times.link), makespan(long, took, times.link)
    return after + max((after - before) / ranks, max(map(times.busy, owned(kind)))) * (micro - long.microbatches)


def shown(micro: int, ranks: int) -> int:
    """Micro-batches of a table that shows what a longer one does."""
    return micro if micro <= 3 * ranks else 3 * ranks + micro % ranks


def alive(plan: Plan) -> tuple[int, ...]:
    """How many stages' activations each rank holds at once."""
    if plan.pp == 1:
        return (1,)
    return ordered(StageSchedule.of(plan), shown(plan.microbatches, plan.pp)).live


@lru_cache(maxsize=512)
def ordered(kind: StageSchedule, micro: int) -> Table:
    """The table of so many micro-batches."""
    return table(kind.schedule, kind.ranks, micro, kind.per_rank)


@lru_cache(maxsize=512)
def owned(kind: StageSchedule) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank."""
    owner = ordered(kind, kind.ranks).owner if kind.schedule == "auto" else owners(*kind)
    return tuple(tuple(s for s, rank in enumerate(owner) if rank == k) for k in range(kind.ranks))


def same_heads(pace: TimeModel, plan: Plan, own: Stage) -> float:
    """Seconds in which ranks of `tp`, where they are more than a model has heads of keys, sum the gradients of the heads that they share."""
    shared = [(p, placed.number) for placed in own for p in placed.block.products if p.head * plan.tp > p.columns]
    elements = sum(p.inner * p.head * number for p, number in shared) * (1 - pace.work.frozen)
    if not elements:
        return 0.0
    return pace.machine.all_reduce(elements * pace.software.sent, ceil(max(p.head * plan.tp / p.columns for p, _ in shared)))


def gradients(pace: TimeModel, plan: Plan, own: Stage, hidden: float) -> float:
    """Seconds of the messages of dp, fsdp and cp about gradients and weights that computing does not hide. `hidden`: seconds of one micro-batch."""
    replicas = plan.along(plan.replica_axes)
    if replicas * plan.shards == 1 or (pace.work.frozen == 1 and (plan.shards == 1 or plan.zero_stage < 3)):
        return 0.0
    machine, software, f = pace.machine, pace.software, plan.shards
    everything, part = weights_of(own), 1 - pace.work.frozen
    elements = everything * part  # what is frozen is gathered, and has no gradient
    forward, backward = hidden / 3, hidden * 2 / 3
    if f == 1 and late.format_of(plan, "dp") != "none":
        return late.seconds_sent(pace, plan, elements, "dp") + late.compressing(pace, plan, elements, "dp")
    if f == 1:
        whole, last = late.buckets(pace, plan, elements)
        return max(last, pace.exposed(whole, backward))
    inner = plan.tp if plan.shard_over_cp else plan.along(SAME_LOSS)
    unit = late.TOGETHER
    apart = machine.all_reduce(unit, replicas, late.apart(plan, "dp")) * elements * software.sent / f / unit
    if plan.zero_stage < 3:
        pieces = max(1, ceil(elements * software.sent / unit))
        scatter = pieces * machine.reduce_scatter(elements * software.sent / pieces, f, inner)
        gather = pieces * machine.all_gather(everything * software.weights / pieces, f, inner)
        return pace.exposed(scatter + apart, backward) + pace.exposed(gather, forward)
    sizes = [(p.size.weights, p.number) for p in own]
    gather = sum(machine.all_gather(w / (k := ceil(w / software.piece) or 1) * item(plan), f, inner) * k * n for w, n in sizes)
    scatter = sum(machine.reduce_scatter(w * part * software.sent, f, inner) * n for w, n in sizes)
    if software.once and plan.pp > 1:
        return pace.exposed(gather, plan.microbatches * forward) + pace.exposed(scatter + apart, plan.microbatches * backward)
    each = pace.exposed(gather, forward) + pace.exposed(gather + scatter, backward)
    return plan.microbatches * each + pace.exposed(apart, backward)
