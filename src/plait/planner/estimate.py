"""What one plan costs on a machine: seconds of a step, split by what they are spent on, and bytes of the fullest rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple

from plait.config.keys import SAME_LOSS, WITHIN
from plait.config.plan import Plan
from plait.parallel.pipeline.schedule_search import makespan, table
from plait.parallel.pipeline.schedules import Table, owners
from plait.planner import formulas, late
from plait.planner.formulas import BlockTime, TimeModel, item
from plait.planner.from_sketch import Block

Times = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
"""Seconds of a forward and of both halves of a backward, of each stage."""
Timed = list[tuple[Block, BlockTime, float]]
"""The blocks of a stage with their times, and how many of each."""


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


def estimate(pace: TimeModel, plan: Plan, samples: float, within: float = inf) -> Estimate:
    """Price a plan whose micro-batches have so many samples on each rank; of one that takes more bytes, only those."""
    timed = [(b, pace.block(b, plan, samples)) for b in pace.work.blocks]
    cut = stages(timed, plan.pp * plan.stages_per_rank, pace.software.even)
    held = owned(StageSchedule.of(plan)) if plan.pp > 1 else ((0,),)
    parted = [[[(b, n) for b, _, n in cut[s]] for s in stages] for stages in held]
    memory = formulas.memory(parted, plan, samples, alive(plan), pace.software, pace.work.frozen)
    weights = [sum(formulas.weights(b, plan) * n for b, _, n in stage) for stage in cut]
    fullest = max(held, key=lambda stages: sum(weights[s] for s in stages))
    trained = sum(weights[s] for s in fullest) * (1 - pace.work.frozen)
    states = sum(formulas.sharded(b, plan) * n for s in fullest for b, _, n in cut[s]) * (1 - pace.work.frozen)
    memory |= late.held(pace, plan, trained, states)
    reserved = sum(memory.values()) * pace.fitted.slack
    software = pace.software
    away = 0.0 if plan.offload == "none" else software.weights + software.gradients + software.state
    flops = 3 * pace.work.flops * samples * plan.microbatches / (plan.along(WITHIN) // plan.shares)
    found = Estimate(plan, inf, {}, memory, reserved, flops, states * away,
                     late.bill(pace, plan, sum(weights[s] for s in fullest)), states)  # fmt: skip
    if found.allocated > within:
        return found
    own = [part for s in fullest for part in cut[s]]
    parts = pipeline(pace, plan, samples, cut, held)
    hidden = sum(parts[name] for name in ("compute", "recompute", "tensor")) / plan.microbatches
    parts |= gradients(pace, plan, own, hidden)
    parts["gradients"] += same_heads(pace, plan, own)
    parts["optimizer"] = touched(pace, plan, states)
    if plan.offload == "all":
        parts["host"] = carried(pace, plan, own, hidden)
    parts["fixed"] = pace.fitted.fixed
    if pace.loading:
        parts["data"] = max(0.0, samples * plan.microbatches / pace.loading - sum(parts.values()))
    if software.cores is not None:
        on_cores(pace, plan, samples, own, parts)
    if plan.replica_groups > 1:
        parts["sync"] = late.rarely(pace, plan, states, sum(parts.values()))
    return replace(found, seconds=sum(parts.values()), parts=parts)


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


def carried(pace: TimeModel, plan: Plan, own: Timed, hidden: float) -> float:
    """Seconds to load weights from the host, forward and backward, and to bring gradients there, that nothing hides."""
    size = sum(formulas.sharded(b, plan) * n for b, _, n in own) * (2 * pace.software.weights + pace.software.gradients)
    return plan.microbatches * pace.exposed(size / pace.beside, hidden)


def on_cores(pace: TimeModel, plan: Plan, samples: float, own: Timed, parts: dict[str, float]) -> None:
    """What processes on cores take beside: launching, plait's own work, the loader; more of them than cores take turns."""
    software, cores = pace.software, pace.software.cores
    assert cores is not None
    kernels, units = sum(b.kernels * n for b, _, n in own), sum(n for b, _, n in own if b.weights + b.experts)
    parts["fixed"] = cores.step * cores.operator
    parts["optimizer"] += cores.update * kernels * cores.operator
    size = sum(formulas.weights(b, plan) * n for b, _, n in own) * software.weights
    parts["gradients"] += cores.reduced(units, kernels, size, pace.stream, plan)
    if pace.loading:
        parts["data"] = samples * plan.microbatches / pace.loading
    waited = parts.pop("bubble")
    taken = sum(parts.values())
    for name in parts:
        parts[name] *= cores.crowd
    parts["bubble"] = max(0.0, waited - (cores.crowd - 1) * taken)


def stages(blocks: Sequence[tuple[Block, BlockTime]], count: int, even: bool) -> list[Timed]:
    """The blocks of each stage: of equal cost, or equal in number where that is what the software does."""
    if count == 1:
        return [[(b, w, float(b.count)) for b, w in blocks]]
    most = max(blocks, key=lambda pair: pair[0].count)[0]
    found: list[Timed] = [[] for _ in range(count)]
    if even:
        at, (base, more) = 0, divmod(most.count, count)
        for block, work in blocks:
            if block is most:
                for i in range(count):
                    found[i] += [(block, work, float(base + (i < more)))] * (base + (i < more) > 0)
                at = count - 1
            else:
                found[at].append((block, work, float(block.count)))
        return found
    costs = [work.forward + work.back_input + work.back_weight for _, work in blocks]
    total = sum(cost * block.count for cost, (block, _) in zip(costs, blocks))
    at, done = 0, 0.0
    for cost, (block, work) in zip(costs, blocks):
        left = block.count
        while left:
            wanted = round((total * (at + 1) / count - done) / cost) if cost else left
            now = left if at == count - 1 else max(0, min(left, wanted))
            found[at] += [(block, work, float(now))] * (now > 0)
            done, left = done + cost * now, left - now
            at += left > 0
    return found


def pipeline(
    pace: TimeModel, plan: Plan, samples: float, cut: list[Timed], held: tuple[tuple[int, ...], ...]
) -> dict[str, float]:
    """Seconds of all forwards and backwards by what they are. `held`: the stages of each rank."""
    cores = pace.software.cores
    own = (pace.software.action, pace.software.action) if plan.pp > 1 else (0.0, 0.0)
    if cores is not None and plan.pp > 1:
        whole = sum(b.kernels * b.count for b in pace.work.blocks)
        own = (cores.ahead + cores.passed * whole) * cores.operator, cores.behind * cores.operator
    forward = [own[0] + sum(w.forward * n for _, w, n in stage) for stage in cut]
    inputs = [own[1] + sum(w.back_input * n for _, w, n in stage) for stage in cut]
    weight = [sum(w.back_weight * n for _, w, n in stage) for stage in cut]
    m = plan.microbatches
    per_rank = [sum(forward[s] + inputs[s] + weight[s] for s in stages) for stages in held]
    busiest = max(range(plan.pp), key=lambda k: per_rank[k])
    part = [one for s in held[busiest] for one in cut[s]]
    again, sent = sum(w.again * n for _, w, n in part) * m, sum(w.sent * n for _, w, n in part) * m
    total = ideal = per_rank[busiest] * m
    if plan.pp > 1:
        size = max(b.out for b, _, _ in part) * samples / plan.cp * item(plan)
        inner = plan.along(SAME_LOSS)
        link = pace.machine.send(size / plan.tp, inner * plan.shares) + pace.machine.all_gather(size, plan.tp)
        times = (tuple(round(t, 7) for t in forward), tuple(round(t, 7) for t in inputs), tuple(round(t, 7) for t in weight))
        total = played(StageSchedule.of(plan), m, times, round(link, 7))
    return {"compute": ideal - again - sent, "recompute": again, "tensor": sent, "bubble": total - ideal}


class StageSchedule(NamedTuple):
    """A pipeline's schedule, and how its stages lie on its ranks."""

    schedule: str
    ranks: int
    per_rank: int

    @classmethod
    def of(cls, plan: Plan) -> "StageSchedule":
        return cls(plan.schedule, plan.pp, plan.stages_per_rank)


@lru_cache(maxsize=65536)
def played(kind: StageSchedule, micro: int, times: Times, link: float) -> float:
    """The makespan of a table. The middle of a long one repeats, so two short ones tell."""
    ranks = kind.ranks
    if micro <= 3 * ranks:
        return makespan(ordered(kind, micro), times, link)
    short, long = ordered(kind, shown(micro, ranks) - ranks), ordered(kind, shown(micro, ranks))
    before, after = makespan(short, times, link), makespan(long, times, link)
    busiest = max(sum(sum(stage[s] for stage in times) for s in held) for held in owned(kind))
    return after + max((after - before) / ranks, busiest) * (micro - long.microbatches)


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


def same_heads(pace: TimeModel, plan: Plan, own: Timed) -> float:
    """Seconds in which ranks of `tp`, where they are more than a model has heads of keys, sum the gradients of the heads that they share."""
    sharing = [(p.inner * p.head * n, p.head * plan.tp / p.columns) for b, _, n in own for p in b.products if p.head * plan.tp > p.columns]
    elements = sum(size for size, _ in sharing) * (1 - pace.work.frozen)
    return pace.machine.all_reduce(elements * pace.software.sent, ceil(max(ranks for _, ranks in sharing))) if elements else 0.0


def gradients(pace: TimeModel, plan: Plan, own: Timed, hidden: float) -> dict[str, float]:
    """Seconds of the messages of dp, fsdp and cp about gradients and weights that computing does not hide. `hidden`: seconds of one micro-batch."""
    replicas = plan.along(plan.replica_axes)
    if replicas * plan.shards == 1 or (pace.work.frozen == 1 and (plan.shards == 1 or plan.zero < 3)):
        return {"gradients": 0.0}
    machine, software, f = pace.machine, pace.software, plan.shards
    inner = plan.tp if plan.shard_over_cp else plan.along(SAME_LOSS)
    everything, part = sum(formulas.weights(b, plan) * n for b, _, n in own), 1 - pace.work.frozen
    elements = everything * part  # what is frozen is gathered, and has no gradient
    forward, backward = hidden / 3, hidden * 2 / 3
    unit = late.TOGETHER
    apart = machine.all_reduce(unit, replicas, late.apart(plan, "dp")) * elements * software.sent / f / unit if f > 1 else 0.0
    if f > 1 and plan.zero == 3:
        sizes = [(formulas.weights(b, plan), n) for b, _, n in own]
        gather = sum(machine.all_gather(w / (k := ceil(w / software.piece) or 1) * item(plan), f, inner) * k * n for w, n in sizes)
        scatter = sum(machine.reduce_scatter(w * part * software.sent, f, inner) * n for w, n in sizes)
        if software.once and plan.pp > 1:
            return {"gradients": pace.exposed(gather, plan.microbatches * forward) + pace.exposed(scatter + apart, plan.microbatches * backward)}
        each = pace.exposed(gather, forward) + pace.exposed(gather + scatter, backward)
        return {"gradients": plan.microbatches * each + pace.exposed(apart, backward)}
    if f > 1:
        pieces = max(1, ceil(elements * software.sent / unit))
        scatter = pieces * machine.reduce_scatter(elements * software.sent / pieces, f, inner)
        gather = pieces * machine.all_gather(everything * software.weights / pieces, f, inner)
        return {"gradients": pace.exposed(scatter + apart, backward) + pace.exposed(gather, forward)}
    if late.format_of(plan, "dp") != "none":
        return {"gradients": late.seconds_sent(pace, plan, elements, "dp") + late.compressing(pace, plan, elements, "dp")}
    whole, last = late.buckets(pace, plan, elements)
    return {"gradients": max(last, pace.exposed(whole, backward))}
