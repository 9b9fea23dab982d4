"""The cost of infrequent, delayed or compressed synchronization: a description, the progress per sample, and the break-even link speed.

Progress is relative to `dp`: at 0.5, the same loss needs twice the samples. It was measured with one small model (`MEASURED_PROGRESS`) and
fitted to other numbers of groups and steps. It shows which plans are worth a try. It does not predict the loss of another model.
"""

from dataclasses import dataclass
from math import inf, log, sqrt

from plait.config.plan import Plan
from plait.model.sketch_table import format_speed
from plait.planner import sync_costs
from plait.planner.estimate import estimate_plan
from plait.planner.formulas import TimeModel

MEASURED_GROUPS = 4
"""Number of replica groups or replicas in the measurements."""
MEASURED_PROGRESS = {
    "one": 0.47, "bf16": 1.00, "int8": 0.96, "powersgd": 0.71, "local 4": 0.78, "diloco 4": 0.82, "post-local": 0.96,
    "streaming": 0.70, "local 16": 0.54, "diloco 16": 0.78, "async": 0.46,
}  # fmt: skip
"""Progress by synchronization method and period H, relative to `dp`.

Model: a GPT of 120,576 parameters on the source of the standard library, 4 groups × 8 sequences × 64 bytes, AdamW at 3e-3.
`one` is a single group. For H = 16: 160 steps with a cosine schedule. Progress is the gap to the loss of `dp`, as a fraction of the gap of `one`;
DiLoCo has an outer rate of 1.0 and momentum 0.5. All others: `bench/slow_link.py`, 400 steps at a constant rate. PowerSGD has rank 4, DiLoCo
0.7 and 0.2, post-local covers the second half, and `async` has a staleness of 2 after 310 and 340 clocks.
"""
ALONE_EXPONENT = -log(MEASURED_PROGRESS["one"]) / log(MEASURED_GROUPS)
"""Exponent of the group count by which a single group with its part of the samples falls behind."""
LINK_SPEED_RANGE = (1e4, 1e14)
"""Range of link speeds, in bit/s, in which a break-even is searched."""


def estimate_progress(plan: Plan) -> float:
    """Estimate the progress per sample of a plan, relative to `dp`. The minimum is the progress of one isolated group."""
    k = plan.replica_groups
    if k > 1 and plan.outer_sync == "async":
        return MEASURED_PROGRESS["async"]
    found = 1.0 if plan.grad_compression == "none" else MEASURED_PROGRESS[plan.grad_compression]
    if k == 1:
        return found
    if plan.warmup_sync_steps:
        return found * MEASURED_PROGRESS["post-local"]
    floor = k**-ALONE_EXPONENT
    found *= floor + (1 - floor) * _interpolate_gain(plan.outer_sync, plan.sync_every)
    return found * (MEASURED_PROGRESS["streaming"] / MEASURED_PROGRESS["diloco 4"] if plan.num_fragments > 1 else 1.0)


def _interpolate_gain(sync: str, every: int) -> float:
    """Interpolate the gain from synchronizing every `every` steps: 1 for every step, 0 for never.

    It is linear in log H between the measured periods and H = 1. Beyond the last period, it falls equally for each doubling.
    """
    least = MEASURED_PROGRESS["one"]
    points = [(0.0, 1.0)] + [(log(h), (MEASURED_PROGRESS[f"{sync} {h}"] - least) / (1 - least)) for h in (4, 16)]
    x = log(every)
    after = next((i for i, (h, _) in enumerate(points) if h >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(0, after - 1)], points[max(1, after)]
    return min(1.0, max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0)))


def describe_inexact(plan: Plan) -> str:
    """Describe why a plan changes the training result; empty for an exact plan."""
    if sync_costs.is_exact(plan):
        return ""
    k, every = plan.replica_groups, f"every {plan.sync_every} steps" if plan.sync_every > 1 else "after every step"
    words: list[str] = []
    if k > 1 and plan.outer_sync == "local":
        words.append(f"weights of {k} groups are averaged {every}")
    elif k > 1 and plan.outer_sync == "diloco":
        words.append(f"{k} groups train separately, and an outer optimizer updates the global weights {every}")
    elif k > 1:
        words.append(f"gradients of {k} groups are applied on arrival, up to {plan.staleness} versions late")
    if plan.num_fragments > 1:
        words.append(f"1/{plan.num_fragments} of the model at a time")
    if plan.fragment_delay:
        words.append(f"applied {plan.fragment_delay} steps after the send")
    if plan.warmup_sync_steps:
        words.append(f"starting at step {plan.warmup_sync_steps + 1}")
    what = "messages of groups are" if k > 1 else "gradients are"
    how = {
        "bf16": f"{what} rounded to 16 bits", "int8": f"{what} rounded to 8 bits",
        "powersgd": f"{what} reduced to matrices of rank {plan.compression_rank}",
    }  # fmt: skip
    if plan.grad_compression != "none":
        words.append(f"{how[plan.grad_compression]}, and the residual is added to the next one")
    return f"changes the training result: {', '.join(words)}"


@dataclass(frozen=True)
class BreakEven:
    """The link speed below which a plan is faster than its exact twin, for the same samples."""

    twin: Plan
    bits_per_s: float
    """Speed of the slowest link in bit/s: 0 if the plan is never faster, infinite if it always is."""

    def describe(self, between: str) -> str:
        if self.bits_per_s == 0:
            return f"break-even: {self.twin} is at least as fast at any speed of the link between {between}"
        if self.bits_per_s == inf:
            return f"break-even: faster than {self.twin} at any speed of the link between {between}"
        return f"break-even: faster than {self.twin} if the link between {between} is slower than {format_speed(self.bits_per_s)}"


def find_break_even(pace: TimeModel, plan: Plan, samples: float, twin_samples: float) -> BreakEven:
    """Find by bisection the link speed at which a plan and its exact twin take the same time."""
    twin, (low, high) = sync_costs.make_exact_twin(plan), LINK_SPEED_RANGE

    def is_faster(bits: float) -> bool:
        at = sync_costs.with_link_speed(pace, bits)
        return estimate_plan(at, plan, samples).seconds < estimate_plan(at, twin, twin_samples).seconds * (1 - 1e-9)

    if not is_faster(low):
        return BreakEven(twin, 0.0)
    if is_faster(high):
        return BreakEven(twin, inf)
    while high / low > 1.001:
        middle = sqrt(low * high)
        low, high = (middle, high) if is_faster(middle) else (low, middle)
    return BreakEven(twin, low)
