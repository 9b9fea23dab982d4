"""What rare, late or compressed synchronisation costs in exactness: in words, in progress for each sample, and when it pays.

Progress is what a sample is worth beside one of `dp`: 0.5 means that twice the samples are needed for the same loss. It was
measured with one small model (`MEASURED`) and fitted from there to other numbers of groups and steps: it says which plans are
worth a try, not what they will do for another model.
"""

from dataclasses import dataclass
from math import inf, log, sqrt

from plait.config.plan import Plan
from plait.model.table import speed
from plait.planner import late
from plait.planner.estimate import estimate
from plait.planner.formulas import TimeModel

GROUPS = 4
"""Replica groups, or copies, of the measurements."""
MEASURED = {
    "one": 0.47, "bf16": 1.00, "int8": 0.96, "powersgd": 0.71, "local 4": 0.78, "diloco 4": 0.82, "post-local": 0.96,
    "streaming": 0.70, "local 16": 0.54, "diloco 16": 0.78, "async": 0.46,
}  # fmt: skip
"""Progress by way to synchronise and H. A GPT of 120,576 parameters on the standard library's source, 4 groups × 8 sequences × 64 bytes, AdamW
at 3e-3. `one` is one group alone. H = 16: 160 steps with a cosine, and their losses' distance from `dp` as a part of that of `one`;
DiLoCo with an outer rate of 1.0 and momentum 0.5. All others: `bench/slow_link.py`, 400 steps at a constant rate; PowerSGD of rank 4, DiLoCo
with 0.7 and 0.2, post-local for the second half, `async` with a staleness of 2 after 310 and 340 clocks."""
ALONE = -log(MEASURED["one"]) / log(GROUPS)
"""As a power of the number of groups: what one of them, with its part of the samples, falls behind."""
SPEEDS = (1e4, 1e14)
"""bit/s between which a break-even is looked for."""


def progress(plan: Plan) -> float:
    """That of a plan. At least what one group makes that never hears of the others."""
    k = plan.replica_groups
    if k > 1 and plan.outer_sync == "async":
        return MEASURED["async"]
    found = 1.0 if plan.grad_compression == "none" else MEASURED[plan.grad_compression]
    if k == 1:
        return found
    if plan.warmup_sync_steps:
        return found * MEASURED["post-local"]
    floor = k**-ALONE
    found *= floor + (1 - floor) * _together(plan.outer_sync, plan.sync_every)
    return found * (MEASURED["streaming"] / MEASURED["diloco 4"] if plan.num_fragments > 1 else 1.0)


def _together(sync: str, every: int) -> float:
    """How much of what groups can gain from each other they do: 1 when they synchronise in every step, 0 when never.

    Between H that were measured, and H = 1, a line in log H; beyond the last one as much less for each doubling.
    """
    least = MEASURED["one"]
    points = [(0.0, 1.0)] + [(log(h), (MEASURED[f"{sync} {h}"] - least) / (1 - least)) for h in (4, 16)]
    x = log(every)
    after = next((i for i, (h, _) in enumerate(points) if h >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(0, after - 1)], points[max(1, after)]
    return min(1.0, max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0)))


def told(plan: Plan) -> str:
    """What makes it another training than on one device, in plain words; nothing for an exact plan."""
    if late.is_exact(plan):
        return ""
    k, every = plan.replica_groups, f"every {plan.sync_every} steps" if plan.sync_every > 1 else "after every step"
    words: list[str] = []
    if k > 1 and plan.outer_sync == "local":
        words.append(f"weights of {k} groups are averaged {every}")
    elif k > 1 and plan.outer_sync == "diloco":
        words.append(f"{k} groups train by themselves, and an outer optimizer steps on how far they moved {every}")
    elif k > 1:
        words.append(f"gradients of {k} groups are used when they arrive, up to {plan.staleness} versions late")
    if plan.num_fragments > 1:
        words.append(f"a {plan.num_fragments}th of the model at a time")
    if plan.fragment_delay:
        words.append(f"applied {plan.fragment_delay} steps after it was sent")
    if plan.warmup_sync_steps:
        words.append(f"from step {plan.warmup_sync_steps + 1} on")
    what = "what groups send is" if k > 1 else "gradients are"
    how = {
        "bf16": f"{what} rounded to 16 bits", "int8": f"{what} rounded to 8 bits",
        "powersgd": f"{what} reduced to matrices of rank {plan.compression_rank}",
    }  # fmt: skip
    if plan.grad_compression != "none":
        words.append(f"{how[plan.grad_compression]}, and the rest added to the next")
    return f"not the same training as on one device: {', '.join(words)}"


@dataclass(frozen=True)
class BreakEven:
    """The link speed below which a plan takes less time for the same samples than its exact twin."""

    twin: Plan
    bits: float
    """Of the slowest link, a second: 0 where the plan is never faster, infinite where it always is."""

    def told(self, between: str) -> str:
        if self.bits == 0:
            return f"break-even: {self.twin} takes no longer, however slow the link between {between}"
        if self.bits == inf:
            return f"break-even: faster than {self.twin} at any speed of the link between {between}"
        return f"break-even: faster than {self.twin} where the link between {between} has less than {speed(self.bits)}"


def crossing(pace: TimeModel, plan: Plan, samples: float, twin_samples: float) -> BreakEven:
    """Where the times of a plan and of its exact twin cross, by bisection."""
    twin, (low, high) = late.exact_twin(plan), SPEEDS

    def faster(bits: float) -> bool:
        at = late.at_speed(pace, bits)
        return estimate(at, plan, samples).seconds < estimate(at, twin, twin_samples).seconds * (1 - 1e-9)

    if not faster(low):
        return BreakEven(twin, 0.0)
    if faster(high):
        return BreakEven(twin, inf)
    while high / low > 1.001:
        middle = sqrt(low * high)
        low, high = (middle, high) if faster(middle) else (low, middle)
    return BreakEven(twin, low)
