"""What rare, late or compressed synchronisation costs in exactness: in words, in progress for each sample, and when it pays.

Progress is what a sample is worth beside one of `dp`: 0.5 means that twice the samples are needed for the same loss. It was
measured with one small model (`MEASURED`) and fitted from there to other numbers of groups and steps: it says which plans are
worth a try, not what they will do for another model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, log
from statistics import mean

from plait.config.plan import Plan
from plait.planner import late
from plait.planner.estimate import estimate
from plait.planner.time import TimeModel

GROUPS = 4
"""Replica groups, or copies, of the measurement."""
LOSSES = {
    "dp": (2.467, 2.483),
    "one": (2.583, 2.594),
    "int8": (2.468, 2.483),
    "powersgd": (2.529,),
    "local 4": (2.547,),
    "local 16": (2.556, 2.578),
    "diloco 16": (2.499, 2.527),
    "post-local 16": (2.496, 2.520),
    "async": (2.520,),
}
"""Held-out loss by way to synchronise and H, a figure for each seed: a GPT of 120,576 parameters on the standard library's source,
4 groups × 8 sequences × 64 bytes, 160 steps of AdamW at 3e-3. `one` is one group alone, with a quarter of the samples. PowerSGD had
rank 4, DiLoCo an outer rate of 1.0 with momentum 0.5, post-local half of its steps before the first H, the slowest of `async` a third
of the others' speed."""


def part(way: str) -> float:
    """Progress that a measured loss stands for: a quarter of the samples lost `one` − `dp`, and as many logarithms are equal losses."""
    seeds = range(len(LOSSES[way]))
    gaps = [(LOSSES[way][i] - LOSSES["dp"][i]) / (LOSSES["one"][i] - LOSSES["dp"][i]) for i in seeds]
    return min(1.0, GROUPS ** -mean(gaps))


def progress(plan: Plan) -> float:
    """That of a plan. At least what one group alone makes: its part of the samples."""
    found = {"none": 1.0, "bf16": part("int8"), "int8": part("int8"), "powersgd": part("powersgd")}[plan.compress]
    k = plan.replica_groups
    if k == 1:
        return found
    if plan.start_local:
        return found * part("post-local 16")
    if plan.sync == "async":
        return found * part("async")
    if plan.sync == "diloco":
        together = _together({16: part("diloco 16")}, plan.every)
    else:
        together = _together({4: part("local 4"), 16: part("local 16")}, plan.every)
    return found * (1 / k + (1 - 1 / k) * together)


def _together(measured: dict[int, float], every: int) -> float:
    """How much of what groups can gain from each other they do: 1 when they synchronise all the time, 0 when never.

    Between H that were measured, and H = 1, a line in log H; beyond the last one as much less for each doubling.
    """
    points = [(0.0, 1.0)] + [(log(h), (p - 1 / GROUPS) / (1 - 1 / GROUPS)) for h, p in sorted(measured.items())]
    x = log(every)
    after = next((i for i, (h, _) in enumerate(points) if h >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(0, after - 1)], points[max(1, after)]
    return min(1.0, max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0)))


def told(plan: Plan) -> str:
    """What makes it another training than on one device, in plain words; nothing for an exact plan."""
    if late.is_exact(plan):
        return ""
    k, every = plan.replica_groups, f"every {plan.every} steps" if plan.every > 1 else "after every step"
    words: list[str] = []
    if k > 1 and plan.sync == "local":
        words.append(f"weights of {k} groups are averaged {every}")
    elif k > 1 and plan.sync == "diloco":
        words.append(f"{k} groups train by themselves, and an outer optimizer steps on how far they moved {every}")
    elif k > 1:
        words.append(f"gradients of {k} groups are used when they arrive, up to {plan.staleness} versions late")
    if plan.fragments > 1:
        words.append(f"a {plan.fragments}th of the model at a time")
    if plan.fragment_delay:
        words.append(f"applied {plan.fragment_delay} steps after it was sent")
    if plan.start_local:
        words.append(f"from step {plan.start_local + 1} on")
    what = "what groups send is" if k > 1 else "gradients are"
    how = {
        "bf16": f"{what} rounded to 16 bits", "int8": f"{what} rounded to 8 bits",
        "powersgd": f"{what} reduced to matrices of rank {plan.compress_rank}",
    }  # fmt: skip
    if plan.compress != "none":
        words.append(f"{how[plan.compress]}, and the rest added to the next")
    return f"not the same training as on one device: {', '.join(words)}"


@dataclass(frozen=True)
class BreakEven:
    """The link speed below which a plan takes less time for the same samples than its exact twin."""

    twin: Plan
    bits: float
    """Of the slowest link, a second: 0 where the plan is never faster, infinite where it always is."""

    def told(self, between: str) -> str:
        """In a line."""
        if self.bits == 0:
            return f"break-even: {self.twin} takes no longer, however slow the link between {between}"
        if self.bits == inf:
            return f"break-even: faster than {self.twin} at any speed of the link between {between}"
        return f"break-even: faster than {self.twin} where the link between {between} has less than {speed(self.bits)}"


def crossing(pace: TimeModel, plan: Plan, samples: float, twin_samples: float) -> BreakEven:
    """Where the times of a plan and of its exact twin cross."""
    twin = late.exact_twin(plan)

    def seconds(plan: Plan, samples: float) -> Callable[[float], float]:
        return lambda bits: estimate(late.at_speed(pace, bits), plan, samples).seconds

    return BreakEven(twin, late.break_even(seconds(twin, twin_samples), seconds(plan, samples)))


def speed(bits: float) -> str:
    """Bits a second as text: 2.5 Gbit/s."""
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"
