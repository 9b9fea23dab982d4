"""Costs of messages between replicas and between replica groups: bytes, memory and seconds of each synchronization method and compression.

Bytes are the mean that one rank sends per step. In an all-reduce over n ranks, each rank sends 2 (n − 1) / n of its bytes. Rounded values
cannot be summed in transit, so they are all-gathered: n − 1 times their bytes. The two factors of PowerSGD can be summed. Compressed gradients
are sent after backward, so their messages are exposed.

Replica groups with period H send once per H steps what `dp` sends in each step. A streamed fragment is in transit during `fragment_delay`
steps; the rest of its time is exposed. Under `async`, a group sends gradients to the servers and receives weights for each piece of the batch,
and all groups share the links of the servers.

With `warmup_sync_steps`, the first steps synchronize every time. The costs here are those of later steps.
"""

from dataclasses import replace
from math import ceil

import torch

from plait.config.plan import Plan
from plait.parallel.data.buckets import get_bucket_bytes
from plait.planner.formulas import TimeModel, get_itemsize

MESSAGE_BYTES = 32 << 20
"""Bytes of weights and gradients per message outside the buckets of `dp`."""
STATS_ROW_BYTES = 128
"""Bytes of the row of step statistics."""
COMPRESS_PASSES = {"none": 0.0, "bf16": 5.0, "int8": 10.0, "powersgd": 9.0}
"""Reads and writes per element of compression with error feedback: adding the residual, encoding and decoding, and the new residual. For PowerSGD,
three matrix products."""
COMPRESS_CALLS = {"none": 0.0, "bf16": 13.0, "int8": 31.0, "powersgd": 28.0}
"""Small operators per tensor of compression, its cost on CPU cores. Fitted to four ranks of `bench/slow_link.py`."""
SYNC_CALLS = {"local": 6.0, "diloco": 14.0}
"""Small operators per tensor of a synchronization of replica groups."""
OUTER_PASSES = 8.0
"""Reads and writes per element of DiLoCo's outer step: old and new global weights, their difference, and the momentum."""


def get_compression(plan: Plan, axis: str) -> str:
    """Return the compression of messages along `dp` or `replica_groups`: only the slower axis of a plan is compressed."""
    return plan.grad_compression if (axis == "replica_groups") == (plan.replica_groups > 1) else "none"


GATHERED_FORMATS = ("bf16", "int8")
"""Formats whose values cannot be summed in transit."""


def get_element_bytes(pace: TimeModel, plan: Plan, how: str) -> float:
    """Return the bytes sent per element."""
    plain = pace.software.sent
    if how == "powersgd":
        return pace.work.compute_low_rank(plan.compression_rank) * plain
    return min(plain, {"none": plain, "bf16": 2.0, "int8": 1.0}[how])


def count_rank_bytes(pace: TimeModel, plan: Plan, elements: float, axis: str) -> float:
    """Count the bytes that each rank of an axis sends to all-reduce `elements` weights or gradients."""
    how, ranks = get_compression(plan, axis), getattr(plan, axis)
    size = elements * get_element_bytes(pace, plan, how)
    return (ranks - 1) * size if how in GATHERED_FORMATS else 2 * (ranks - 1) / ranks * size


def time_buckets(pace: TimeModel, plan: Plan, elements: float) -> tuple[float, float]:
    """Predict seconds of the gradient all-reduce over dp and cp ranks in buckets, and of its last bucket.

    The first bucket has the size of `get_bucket_bytes`; the others are equal.
    """
    size, ranks, stride = elements * pace.software.sent, plan.along(plan.replica_axes), get_stride(plan, "dp")
    first, other = get_bucket_bytes(torch.device("cpu" if pace.software.cores else "cuda"))
    later = ceil(max(0.0, size - first) / other)
    begun = pace.machine.all_reduce(min(size, first), ranks, stride)
    last = pace.machine.all_reduce((size - first) / later, ranks, stride) if later else begun
    return begun + later * last, last


def time_messages(pace: TimeModel, plan: Plan, elements: float, axis: str) -> float:
    """Predict seconds of messages of replica groups or of compressed gradients."""
    how, ranks, stride = get_compression(plan, axis), getattr(plan, axis), get_stride(plan, axis)
    size = elements * get_element_bytes(pace, plan, how)
    pieces = max(1, ceil(elements * pace.software.sent / MESSAGE_BYTES))
    beside = time_stats_row(pace, plan, axis)
    if how == "int8":
        beside += pace.machine.all_gather(ranks * 8 * pace.work.tensors, ranks, stride)  # the scales
    if how in GATHERED_FORMATS:
        return beside + pieces * pace.machine.all_gather(ranks * size / pieces, ranks, stride)
    rounds = 2 if how == "powersgd" else 1  # one factor after the other
    return rounds * pieces * pace.machine.all_reduce(size / pieces / rounds, ranks, stride) + beside


def time_stats_row(pace: TimeModel, plan: Plan, axis: str) -> float:
    """Predict seconds of the all-reduce of step statistics, which are a separate message."""
    return pace.machine.all_reduce(STATS_ROW_BYTES, getattr(plan, axis), get_stride(plan, axis))


def get_stride(plan: Plan, axis: str) -> int:
    """Return the rank distance of neighbors along `dp` (or `cp`), or along `replica_groups`."""
    inner = plan.cp * plan.tp * plan.fsdp
    if axis == "dp":
        return plan.tp if plan.cp > 1 and "cp" in plan.replica_axes else inner
    return inner * plan.dp * plan.pp


def time_compression(pace: TimeModel, plan: Plan, elements: float, axis: str) -> float:
    """Predict seconds of computing for compression."""
    how, cores = get_compression(plan, axis), pace.software.cores
    calls = COMPRESS_CALLS[how] * pace.work.tensors * cores.operator if cores else 0.0
    return COMPRESS_PASSES[how] * elements * pace.software.sent / pace.memory_bandwidth + calls


def time_group_sync(pace: TimeModel, plan: Plan, elements: float, step: float) -> float:
    """Predict exposed seconds per step of synchronizing replica groups, as the mean over a period.

    `elements`: weights on a rank; `step`: seconds of a step inside a group.
    """
    if plan.outer_sync == "async":
        return time_servers(pace, plan, elements, (step,) * plan.replica_groups) - step
    parts = plan.num_fragments if plan.outer_sync == "diloco" else 1
    message = time_messages(pace, plan, elements / parts, "replica_groups")
    hidden = min(plan.fragment_delay, plan.sync_every / parts) * step if plan.outer_sync == "diloco" else 0.0
    own = time_compression(pace, plan, elements, "replica_groups")
    own += OUTER_PASSES * elements * pace.software.weights / pace.memory_bandwidth if plan.outer_sync == "diloco" else 0.0
    cores = pace.software.cores
    own += SYNC_CALLS[plan.outer_sync] * pace.work.tensors * cores.operator if cores else 0.0
    return (parts * max(0.0, message - hidden) + own) / plan.sync_every


def time_servers(pace: TimeModel, plan: Plan, elements: float, steps: tuple[float, ...]) -> float:
    """Predict seconds until the servers of `async` have one gradient per group. `steps`: seconds of a step of each group.

    A group does not compute while it sends and receives. Pieces come from one queue, so fast groups take more of them. If the staleness limit is too
    small for their spread of speeds, they wait for the slowest group.
    """
    push, pull, groups = elements * pace.software.sent, elements * pace.software.weights, len(steps)
    stride = get_stride(plan, "replica_groups") * (groups - 1)  # the servers are as far away as any group
    there = sum(pace.machine.send(size / plan.servers, stride) * plan.servers for size in (push, pull))
    busy = max(pace.machine.send(size * groups / plan.servers, stride) for size in (push, pull))
    turns = [step + there for step in steps]
    ahead = (plan.staleness + 1) * (groups if plan.server_update == "clock" else 1)
    stalled = max(turns) * groups / ahead
    if plan.staleness == 0 and plan.server_update == "clock":  # all groups send and receive at the same time
        return max(steps) + 2 * busy
    return max(groups / sum(1 / turn for turn in turns), stalled, busy)


def find_staleness(plan: Plan, slower: tuple[float, ...]) -> int:
    """Return the smallest staleness without waits between groups. `slower`: time of the slowest group over the time of each."""
    dealt = sum(ceil(n - 1e-9) for n in slower)
    return ceil(dealt / len(slower)) - 1 if plan.server_update == "clock" else dealt - 1


def sum_sync_memory(pace: TimeModel, plan: Plan, elements: float, weights: float) -> dict[str, float]:
    """Sum the bytes of synchronization state on a rank, for `elements` compressed gradients and `weights` synchronized weights."""
    found: dict[str, float] = {}
    if plan.replica_groups > 1:
        size = weights * pace.software.weights
        if plan.outer_sync == "diloco":
            found["outer"] = size * (2 if plan.outer_momentum else 1)
        found["messages"] = size if plan.outer_sync == "async" else size / plan.num_fragments
        found |= {"optimizer": 0.0} if plan.outer_sync == "async" else {}  # it is on the hosts of the servers
    if plan.grad_compression != "none" and plan.replica_groups * plan.dp > 1:
        found["residuals"] = (weights if plan.replica_groups > 1 else elements) * pace.software.gradients
    return found


def sum_sent_bytes(pace: TimeModel, plan: Plan, elements: float) -> dict[str, float]:
    """Sum the bytes that a rank sends per step, by axis: gradients and weights, without messages of pp and tp.

    `elements`: weights of a rank of tp and pp. Frozen weights have no gradient but are gathered.
    """
    software, f, found = pace.software, plan.shards, dict[str, float]()
    part = elements * (1 - pace.work.frozen) / f
    if plan.server_count:
        found["replica_groups"] = part * (software.sent + software.weights)
    elif plan.replica_groups > 1:
        found["replica_groups"] = count_rank_bytes(pace, plan, part, "replica_groups") / plan.sync_every
    if plan.dp > 1:
        found["dp"] = count_rank_bytes(pace, plan, part, "dp")
    if f > 1:
        times, gathered = (plan.microbatches, 2 * get_itemsize(plan)) if plan.zero_stage == 3 else (1, software.weights)
        axes = "×".join(axis for axis in plan.shard_axes if getattr(plan, axis) > 1)
        found[axes] = (f - 1) * times * (part * software.sent + elements / f * gathered)
    return found


def make_exact_twin(plan: Plan) -> Plan:
    """Return the plan on the same ranks without delayed, infrequent or compressed synchronization: replica groups become replicas."""
    inner = replace(plan.inner, grad_compression="none", compression_rank=Plan().compression_rank, batch_split="equal")
    return replace(inner, dp=plan.dp * plan.replica_groups)


def is_exact(plan: Plan) -> bool:
    """Whether the plan's synchronization keeps the training result of one device."""
    return plan.grad_compression == "none" and plan.replica_groups == 1


def with_link_speed(pace: TimeModel, bits: float, latency: float | None = None) -> TimeModel:
    """Return the model with a slowest link of `bits` bit/s. Processes at both ends have one core each."""
    software = pace.software
    if software.cores is not None:
        software = replace(software, cores=replace(software.cores, crowd=1.0))
    return replace(pace, machine=pace.machine.with_slowest_link(bits, latency), software=software)
