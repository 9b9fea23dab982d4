"""Simpler planners for comparison: a constant rate plus the bubble formula, and a 40-line model with seven constants.

Both predict the seconds of a step from the inputs of `plait.planner`: a workload, a plan, a machine.
"""

from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.planner.workload import Workload

SEVEN = {
    "peak": 0.603,
    "half": 2.33e10,
    "passes": 77.8,
    "network": 0.619,
    "hidden": 0.717,
    "fixed": 0.0283,
    "launch": 0.1,
}
"""Seven constants: the fraction of peak; the multiply-adds at which half of it is reached; bytes moved per token and width; the fraction
of link bandwidth; the hidden fraction of gradient messages; seconds per step; seconds per micro-batch and hundred layers. They are
fitted to the same rows, with the same weights, as the planner's constants."""


def bubble(plan: Plan) -> float:
    """Return the ratio of the step time to that without a bubble."""
    return 1 + (plan.pp - 1) / (plan.microbatches * plan.stages_per_rank)


def passes(plan: Plan) -> float:
    return 4.0 if plan.activation_checkpointing == "full" else 3.0


def constant(work: Workload, plan: Plan, samples: float, machine: Machine) -> float:
    """Predict 47 % of peak, plus the bubble."""
    device = plan.tp * plan.cp * plan.pp
    flops = passes(plan) * work.flops * samples * plan.microbatches / device
    return flops / (0.47 * _peak(plan, machine)) * bubble(plan)


def seven(work: Workload, plan: Plan, samples: float, machine: Machine) -> float:
    """Predict with matmuls that saturate with their size, bytes of pointwise work, collectives by bandwidth, and the bubble formula."""
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
        sums = 2 * deep.tp_sums * (1.5 if plan.activation_checkpointing == "full" else 1)
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
    return peaks.for_precision(plan.precision) or peaks.bf16 or peaks.fp16 or peaks.fp32 or 1e12
