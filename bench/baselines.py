"""Simpler planners to compare with: a constant rate plus the bubble's formula, and a 40-line model with seven constants.

Seconds of a step. Both see what `plait.planner` sees: a workload, a plan, a machine.
"""

from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.planner.from_sketch import Workload

SEVEN = {
    "peak": 0.603,
    "half": 2.33e10,
    "passes": 77.8,
    "network": 0.619,
    "hidden": 0.717,
    "fixed": 0.0283,
    "launch": 0.1,
}
"""Part of the peak, multiply-adds at which half of it is reached, bytes moved per token and width, part of a link's
bandwidth, part of gradients' messages hidden, seconds of a step, and of a micro-batch per hundred layers: fitted to the same
rows, with the same weights, as the planner's."""


def bubble(plan: Plan) -> float:
    """Step time over that without a bubble."""
    return 1 + (plan.pp - 1) / (plan.microbatches * plan.stages_per_rank)


def passes(plan: Plan) -> float:
    return 4.0 if plan.activation_checkpointing == "full" else 3.0


def constant(work: Workload, plan: Plan, samples: float, machine: Machine) -> float:
    """47 % of the peak, and the bubble."""
    device = plan.tp * plan.cp * plan.pp
    flops = passes(plan) * work.flops * samples * plan.microbatches / device
    return flops / (0.47 * _peak(plan, machine)) * bubble(plan)


def seven(work: Workload, plan: Plan, samples: float, machine: Machine) -> float:
    """Matmuls that saturate with their size, bytes of pointwise work, collectives by bandwidth, the bubble's formula."""
    c, deep = SEVEN, max(work.blocks, key=lambda b: b.count)
    layers = sum(b.count for b in work.blocks)
    wide = sum(b.out * b.count for b in work.blocks) * samples / plan.cp
    device = plan.tp * plan.cp * plan.pp
    flops = passes(plan) * work.flops * samples / device
    products = sum(len(b.products) * b.count for b in work.blocks)
    size = work.flops / 2 / products * samples / plan.tp / plan.cp
    rate = _peak(plan, machine) * c["peak"] * size / (size + c["half"] / 8)
    item = 4 if plan.precision in ("fp32", "tf32") else 2
    moved = c["passes"] * passes(plan) / 3 * wide / plan.pp / plan.tp
    micro = flops / rate + moved / (machine.device.memory_bandwidth or 1e12) + c["launch"] * layers / plan.pp / 100
    if plan.tp > 1:
        sums = 2 * deep.handovers * (1.5 if plan.activation_checkpointing == "full" else 1)
        sent = sums * 2 * (plan.tp - 1) / plan.tp * wide * item / plan.pp
        micro += sent / (machine.links[0].bandwidth * c["network"])
    seconds = micro * plan.microbatches * bubble(plan)
    if plan.shares > 1:
        crosses = plan.devices > machine.devices_per_node
        link = machine.links[-1] if crosses else machine.links[0]
        times = 3 * plan.microbatches if plan.fsdp > 1 and plan.zero_stage == 3 else 2
        seconds += (1 - c["hidden"]) * times * work.weights / plan.tp / plan.pp * item / (link.bandwidth * c["network"])
    return seconds + c["fixed"]


def _peak(plan: Plan, machine: Machine) -> float:
    peaks = machine.device.peak
    return peaks.of(plan.precision) or peaks.bf16 or peaks.fp16 or peaks.fp32 or 1e12
