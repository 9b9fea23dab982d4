"""What copies and replica groups send each other: bytes, memory and seconds of every way to synchronise and to compress.

Bytes are those that one rank sends in a step, in the mean. Of n ranks that add up, each passes 2 (n − 1) / n of its bytes on.
Rounded numbers do not add up inside a sum, so they are gathered: n − 1 times their bytes, more the more ranks there are. The two
factors of PowerSGD do add up. Compressed gradients are sent when backward has ended, and nothing hides them.

Replica groups that synchronise every H steps send at the end of H steps what `dp` would in each. A fragment that is streamed is
on its way while `fragment_delay` steps are computed; what is left of it then is waited for. Under `async` a group sends its
gradients to the servers and gets weights back for every piece of the batch, and all groups share the servers' links.

With `warmup_sync_steps` the first steps synchronise every time; what is priced here is the training after them.
"""

from dataclasses import replace
from math import ceil

import torch

from plait.config.plan import Plan
from plait.parallel.data.buckets import bucket_bytes
from plait.planner.formulas import TimeModel, item

TOGETHER = 32 << 20
"""Bytes of weights and gradients that are sent together, where they do not go in the buckets of `dp`."""
ROW = 128
"""Bytes of the row of numbers of a step."""
TOUCHED = {"none": 0.0, "bf16": 5.0, "int8": 10.0, "powersgd": 9.0}
"""Times that compressing with error feedback reads or writes a number: adding the residual, the format there and back, the new
residual; of PowerSGD three products with the matrix."""
CALLS = {"none": 0.0, "bf16": 13.0, "int8": 31.0, "powersgd": 28.0}
"""Small operators for each tensor: on a core that is what compressing takes. Fitted to four ranks of `bench/slow_link.py`."""
ROUND = {"local": 6.0, "diloco": 14.0}
"""The same of a synchronisation of replica groups."""
OUTER = 8.0
"""Times that a step of DiLoCo's outer optimizer does: what was global, what is there now, the difference, the momentum, and back."""


def format_of(plan: Plan, axis: str) -> str:
    """How what is sent along `dp` or `replica_groups` is compressed: along the slower of the two that there are."""
    return plan.grad_compression if (axis == "replica_groups") == (plan.replica_groups > 1) else "none"


GATHERED = ("bf16", "int8")
"""Formats whose numbers do not add up on their way."""


def each(pace: TimeModel, plan: Plan, how: str) -> float:
    """Bytes that are sent for each number."""
    plain = pace.software.sent
    if how == "powersgd":
        return pace.work.low_rank(plan.compression_rank) * plain
    return min(plain, {"none": plain, "bf16": 2.0, "int8": 1.0}[how])


def bytes_sent(pace: TimeModel, plan: Plan, numbers: float, axis: str) -> float:
    """Bytes that each rank of an axis sends while they add up `numbers` weights or gradients."""
    how, ranks = format_of(plan, axis), getattr(plan, axis)
    size = numbers * each(pace, plan, how)
    return (ranks - 1) * size if how in GATHERED else 2 * (ranks - 1) / ranks * size


def buckets(pace: TimeModel, plan: Plan, numbers: float) -> tuple[float, float]:
    """Seconds that the replicas of `dp` and `cp` take to sum so many gradients bucket by bucket, and of these what the last bucket takes.

    The first bucket is as `bucket_bytes` says, and the others are equal.
    """
    size, ranks, stride = numbers * pace.software.sent, plan.along(plan.replica_axes), apart(plan, "dp")
    first, other = bucket_bytes(torch.device("cpu" if pace.software.cores else "cuda"))
    later = ceil(max(0.0, size - first) / other)
    begun = pace.machine.all_reduce(min(size, first), ranks, stride)
    last = pace.machine.all_reduce((size - first) / later, ranks, stride) if later else begun
    return begun + later * last, last


def seconds_sent(pace: TimeModel, plan: Plan, numbers: float, axis: str) -> float:
    """Seconds that the messages of replica groups take, and those of compressed gradients."""
    how, ranks, stride = format_of(plan, axis), getattr(plan, axis), apart(plan, axis)
    size = numbers * each(pace, plan, how)
    pieces = max(1, ceil(numbers * pace.software.sent / TOGETHER))
    beside = row(pace, plan, axis)
    if how == "int8":
        beside += pace.machine.all_gather(ranks * 8 * pace.work.tensors, ranks, stride)  # the scales
    if how in GATHERED:
        return beside + pieces * pace.machine.all_gather(ranks * size / pieces, ranks, stride)
    rounds = 2 if how == "powersgd" else 1  # one factor after the other
    return rounds * pieces * pace.machine.all_reduce(size / pieces / rounds, ranks, stride) + beside


def row(pace: TimeModel, plan: Plan, axis: str) -> float:
    """Seconds of the few numbers that ranks tell each other beside a message that they cannot travel in."""
    return pace.machine.all_reduce(ROW, getattr(plan, axis), apart(plan, axis))


def apart(plan: Plan, axis: str) -> int:
    """How far the nearest replicas are apart, of `dp` (or `cp`), or of `replica_groups` alone."""
    inner = plan.cp * plan.tp * plan.fsdp
    if axis == "dp":
        return plan.tp if plan.cp > 1 and "cp" in plan.replica_axes else inner
    return inner * plan.dp * plan.pp


def compressing(pace: TimeModel, plan: Plan, numbers: float, axis: str) -> float:
    """Seconds of computing that compressing takes."""
    how, cores = format_of(plan, axis), pace.software.cores
    calls = CALLS[how] * pace.work.tensors * cores.operator if cores else 0.0
    return TOUCHED[how] * numbers * pace.software.sent / pace.stream + calls


def rarely(pace: TimeModel, plan: Plan, numbers: float, step: float) -> float:
    """Seconds of a step, in the mean of a period, that synchronising replica groups takes and nothing hides.

    `numbers`: weights that a rank holds, `step`: seconds of a step inside a group.
    """
    if plan.outer_sync == "async":
        return served(pace, plan, numbers, (step,) * plan.replica_groups) - step
    parts = plan.num_fragments if plan.outer_sync == "diloco" else 1
    message = seconds_sent(pace, plan, numbers / parts, "replica_groups")
    hidden = min(plan.fragment_delay, plan.sync_every / parts) * step if plan.outer_sync == "diloco" else 0.0
    own = compressing(pace, plan, numbers, "replica_groups")
    own += OUTER * numbers * pace.software.weights / pace.stream if plan.outer_sync == "diloco" else 0.0
    cores = pace.software.cores
    own += ROUND[plan.outer_sync] * pace.work.tensors * cores.operator if cores else 0.0
    return (parts * max(0.0, message - hidden) + own) / plan.sync_every


def served(pace: TimeModel, plan: Plan, numbers: float, steps: tuple[float, ...]) -> float:
    """Seconds until the servers of `async` have as many gradients as there are groups. `steps`: seconds of each group's.

    A group that sends and receives does not compute. Pieces are dealt from one queue, so the fast take more of them; where the
    staleness that is allowed is less than their spread needs, they wait for the slowest.
    """
    push, pull, groups = numbers * pace.software.sent, numbers * pace.software.weights, len(steps)
    stride = apart(plan, "replica_groups") * (groups - 1)  # the servers are as far away as any group
    there = sum(pace.machine.send(size / plan.servers, stride) * plan.servers for size in (push, pull))
    busy = max(pace.machine.send(size * groups / plan.servers, stride) for size in (push, pull))
    turns = [step + there for step in steps]
    ahead = (plan.staleness + 1) * (groups if plan.server_update == "clock" else 1)
    stalled = max(turns) * groups / ahead
    if plan.staleness == 0 and plan.server_update == "clock":  # all send at once, and get the new weights at once
        return max(steps) + 2 * busy
    return max(groups / sum(1 / turn for turn in turns), stalled, busy)


def needed(plan: Plan, slower: tuple[float, ...]) -> int:
    """The staleness with which no group waits for another. `slower`: how many times as long the slowest takes as each."""
    dealt = sum(ceil(n - 1e-9) for n in slower)
    return ceil(dealt / len(slower)) - 1 if plan.server_update == "clock" else dealt - 1


def held(pace: TimeModel, plan: Plan, numbers: float, weights: float) -> dict[str, float]:
    """Bytes that a rank keeps for this: of `numbers` gradients that it compresses, of `weights` that its group synchronises."""
    found: dict[str, float] = {}
    if plan.replica_groups > 1:
        size = weights * pace.software.weights
        if plan.outer_sync == "diloco":
            found["outer"] = size * (2 if plan.outer_momentum else 1)
        found["messages"] = size if plan.outer_sync == "async" else size / plan.num_fragments
        found |= {"optimizer": 0.0} if plan.outer_sync == "async" else {}  # it is the servers', on their hosts
    if plan.grad_compression != "none" and plan.replica_groups * plan.dp > 1:
        found["residuals"] = (weights if plan.replica_groups > 1 else numbers) * pace.software.gradients
    return found


def bill(pace: TimeModel, plan: Plan, numbers: float) -> dict[str, float]:
    """Bytes that a rank sends in a step, by axis: gradients and weights, not what stages and slices hand on.

    `numbers`: weights that a rank of `tp` and `pp` computes with. Those of them that are frozen have no gradient, and are gathered.
    """
    software, f, found = pace.software, plan.shards, dict[str, float]()
    part = numbers * (1 - pace.work.frozen) / f
    if plan.server_count:
        found["replica_groups"] = part * (software.sent + software.weights)
    elif plan.replica_groups > 1:
        found["replica_groups"] = bytes_sent(pace, plan, part, "replica_groups") / plan.sync_every
    if plan.dp > 1:
        found["dp"] = bytes_sent(pace, plan, part, "dp")
    if f > 1:
        times, gathered = (plan.microbatches, 2 * item(plan)) if plan.zero_stage == 3 else (1, software.weights)
        axes = "×".join(axis for axis in plan.shard_axes if getattr(plan, axis) > 1)
        found[axes] = (f - 1) * times * (part * software.sent + numbers / f * gathered)
    return found


def exact_twin(plan: Plan) -> Plan:
    """The same ranks without what is late, rare or compressed: replica groups become copies."""
    inner = replace(plan.inner, grad_compression="none", compression_rank=Plan().compression_rank, batch_split="equal")
    return replace(inner, dp=plan.dp * plan.replica_groups)


def is_exact(plan: Plan) -> bool:
    """Whether it is the same training as on one device, as far as synchronising goes."""
    return plan.grad_compression == "none" and plan.replica_groups == 1


def at_speed(pace: TimeModel, bits: float, latency: float | None = None) -> TimeModel:
    """The same times on a machine whose slowest link has so many bit/s. Processes on both of its ends have a core each."""
    software = pace.software
    if software.cores is not None:
        software = replace(software, cores=replace(software.cores, crowd=1.0))
    return replace(pace, machine=pace.machine.with_slowest_link(bits, latency), software=software, known={}, slower={})
