"""Searches for goals other than the fastest plan: scaling over device counts, the cheapest, the smallest and the largest setting."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import ceil, inf
from typing import Any

from plait.config.errors import PlaitError, Problem
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.model.sketch_table import align_rows, format_count
from plait.planner.answer import SLOWDOWN_TEXTS, Answer, explain_choice
from plait.planner.plan_request import PlanRequest
from plait.planner.search import TIE_FRACTION, Candidate, SearchResult

SINGLE_DEVICE_KEYS = ("precision", "activation_checkpointing", "compile", "offload")
"""Pinned keys that also apply to a plan on one device."""


@dataclass(frozen=True)
class SizeResult:
    """A device count and the best plan on it; `why` gives the reason if no plan fits."""

    devices: int
    plan: str = ""
    seconds: float = 0.0
    efficiency: float = 0.0
    """Samples per second and device, relative to the first device count that works."""
    bottleneck: str = ""
    hours: float = 0.0
    """Hours of the complete job."""
    price: float | None = None
    """Price of the complete job, in the currency of the machine's price."""
    why: str = ""


@dataclass(frozen=True)
class GoalResult:
    """The results of a search over several sizes. `chosen` is the index of the answer."""

    question: str
    job: str
    machine: str
    batch: int
    sizes: tuple[SizeResult, ...]
    chosen: int | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For `plait plan --json`, in which the note is `told`."""
        values = asdict(self)
        note = values.pop("note")
        return {**values, "told": note}

    def to_text(self) -> str:
        lines = [f"job       {self.job} · batch {self.batch}", f"machine   {self.machine}"]
        lines += [f"question  {self.question}", ""]
        head = ("devices", "step", "samples/s", "efficiency", "whole job", "price", "slowed by", "plan")
        cells = [head, *(self._format_cells(size) for size in self.sizes)]
        for k, row in enumerate(align_rows(cells, right=range(6))):
            lines.append(("▸ " if k and k - 1 == self.chosen else "  ") + row)
        return "\n".join([*lines, *([self.note] if self.note else [])])

    def _format_cells(self, size: SizeResult) -> tuple[str, ...]:
        if size.why:
            return str(size.devices), "–", "–", "–", "–", "–", "", size.why
        price = "–" if size.price is None else f"{size.price:,.0f}"
        return (str(size.devices), f"{size.seconds:.3g} s", format_count(self.batch / size.seconds), f"{100 * size.efficiency:.0f} %",
                f"{size.hours:.3g} h", price, size.bottleneck, size.plan)  # fmt: skip


Goal = Callable[[PlanRequest, dict[str, Any], float | None], GoalResult]


def plan_devices(request: PlanRequest, pins: dict[str, Any], memory: float | None, devices: int) -> SizeResult:
    """Find the best plan on `devices` devices."""
    if request.machine.resize(devices).devices != devices:
        return SizeResult(devices, why=f"is no multiple of the devices per node, {request.machine.devices_per_node}")
    if devices > request.job.batch * 64:
        return SizeResult(devices, why=f"more than 64 devices per sample of a batch of {request.job.batch}")
    best = next(iter(_search_devices(request, pins, memory, devices).best), None)
    if best is None or best.estimate is None:
        return SizeResult(devices, why="nothing fits")
    got = best.estimate
    lost = {name: s for name, s in got.parts.items() if name != "compute"}
    worst = max(lost, key=lambda name: lost[name])
    slow = f"{100 * lost[worst] / got.seconds:.0f} % {SLOWDOWN_TEXTS.get(worst) or 'fixed costs'}"
    took = request.job.steps * got.seconds / 3600 if request.job.steps else 0.0
    each = request.machine.price_per_hour
    price = each * devices * took if each is not None else None
    return SizeResult(devices, str(best.plan), got.seconds, 0.0, slow, took, price)


def add_efficiency(request: PlanRequest, sizes: list[SizeResult], question: str) -> GoalResult:
    """Return sizes with their efficiency."""
    first = next((s for s in sizes if s.seconds), None)
    if first is not None:
        base = first.seconds * first.devices
        sizes = [replace(s, efficiency=base / s.seconds / s.devices) if s.seconds else s for s in sizes]
    return GoalResult(question, request.name, str(request.machine), request.job.batch, tuple(sizes))


def compare_sizes(request: PlanRequest, pins: dict[str, Any], memory: float | None, devices: list[int]) -> GoalResult:
    """Compare the same batch on increasing device counts, with the efficiency of each."""
    sizes = [plan_devices(request, pins, memory, n) for n in devices]
    found = add_efficiency(request, sizes, f"the same batch of {request.job.batch} on more devices")
    works = [k for k, s in enumerate(found.sizes) if s.seconds]
    told = "no device count has a plan that fits"
    if works:
        last = max((k for k in works if found.sizes[k].efficiency >= HALF_EFFICIENCY), default=works[0])
        best = min(works, key=lambda k: found.sizes[k].seconds)
        told = f"fastest at {found.sizes[best].devices} devices; up to {found.sizes[last].devices} devices, the efficiency is above 50 %"
        if best != works[-1]:
            told += "; with more devices, a step takes longer"
    return replace(found, note=told)


HALF_EFFICIENCY = 0.5


def find_cheapest(request: PlanRequest, pins: dict[str, Any], memory: float | None) -> GoalResult:
    """Find the device count with the lowest cost of a step. Cost is devices times seconds, because each device has the same price."""
    found = add_efficiency(request, [plan_devices(request, pins, memory, n) for n in list_device_counts(request.machine)], "cheapest")
    works = [k for k, s in enumerate(found.sizes) if s.seconds]
    best = min(works, key=lambda k: found.sizes[k].seconds * found.sizes[k].devices, default=None)
    unpriced = "the machine file has no price_per_hour, so plans are compared by device-hours"
    return replace(found, chosen=best, note=unpriced if request.machine.price_per_hour is None else "")


def find_fewest(request: PlanRequest, pins: dict[str, Any], memory: float | None, deadline: float) -> GoalResult:
    """Find the fewest devices that finish the job's steps before a deadline."""
    if not request.job.steps:
        raise PlaitError(Problem("U002", "--deadline needs a job with steps", fix=("Job(steps=…)",)))
    sizes: list[SizeResult] = []
    for n in list_device_counts(request.machine):
        sizes.append(plan_devices(request, pins, memory, n))
        if sizes[-1].seconds and sizes[-1].hours <= deadline:
            break
    found = add_efficiency(request, sizes, f"fewest devices that take at most {deadline:.3g} h for {request.job.steps} steps")
    last = found.sizes[-1]
    if last.seconds and last.hours <= deadline:
        return replace(found, chosen=len(sizes) - 1)
    return replace(found, note="no plan meets the deadline, even on all devices")


def find_largest_batch(request: PlanRequest, pins: dict[str, Any], memory: float | None) -> GoalResult:
    """Find the largest batch that fits as one micro-batch per data-parallel rank, on all devices."""
    n = request.machine.devices

    def plan_batch(batch: int) -> SizeResult:
        return plan_devices(replace(request, job=replace(request.job, batch=batch)), {"microbatches": 1} | pins, memory, n)

    low, best = search_largest(plan_batch, 1, SizeResult(n, why="nothing fits"))
    got = add_efficiency(request, [best], "largest batch in one micro-batch")
    told = f"batch {low}: about {ceil(low / n)} samples per device" if low else ""
    return replace(got, batch=max(low, 1), chosen=0 if low else None, note=told)


def make_largest_goal(name: str, arguments: dict[str, str], make_request: Callable[[dict[str, str]], PlanRequest]) -> Goal:
    """Return a goal that finds the largest value of a job argument, such as the sequence length, with a plan that fits."""

    def find_largest(request: PlanRequest, pins: dict[str, Any], memory: float | None) -> GoalResult:
        n = request.machine.devices

        def plan_value(value: int) -> SizeResult:
            try:
                return plan_devices(make_request(arguments | {name: str(value)}), pins, memory, n)
            except PlaitError as error:
                if error.codes != ["J057"]:
                    raise
                return SizeResult(n, why=error.problems[0].what)

        first = int(arguments.get(name, "0")) or 64
        low, best = search_largest(plan_value, first, SizeResult(n, why=f"nothing fits with {name}={first}"))
        got = add_efficiency(request, [best], f"largest --job.{name}")
        return replace(got, chosen=0, note=f"--job.{name} {low} is the largest that fits") if low else got

    return find_largest


def search_largest(plan_value: Callable[[int], SizeResult], first: int, fallback: SizeResult) -> tuple[int, SizeResult]:
    """Find the largest number from `first` on that fits, to within 1/32, and its result; 0 if `first` does not fit."""
    low, high, best = 0, first, fallback
    while high <= LARGEST_VALUE and (found := plan_value(high)).seconds:
        low, high, best = high, high * 2, found
    while low and high - low > max(1, low // 32):
        middle = (low + high) // 2
        found = plan_value(middle)
        low, high, best = (middle, high, found) if found.seconds else (low, middle, best)
    return low, best


LARGEST_VALUE = 1 << 22


def list_device_counts(machine: Machine) -> list[int]:
    """List device counts to try: 1, 2, 4 … of a node, then 1, 2, 4 … nodes, up to the machine."""
    node = [n for n in (1 << k for k in range(20)) if n < machine.devices_per_node]
    nodes = [n for n in (1 << k for k in range(20)) if n < machine.nodes]
    return [*node, *(machine.devices_per_node * n for n in nodes), machine.devices]


def add_baseline(answer: Answer, pins: dict[str, Any], memory: float | None, choose: bool = True) -> Answer:
    """Add the best plan on one device to an answer.

    With `choose`, the chosen plan becomes the one on the fewest devices within `TIE_FRACTION` of the fastest.
    """
    asked, best = answer.request, answer.best
    if answer.space.devices == 1:
        return answer
    own = {key: value for key, value in pins.items() if key in SINGLE_DEVICE_KEYS}
    alone = _search_devices(asked, own, memory, 1)
    large = min(alone.oversized, key=lambda c: c.estimate.host_bytes if c.estimate else 0.0, default=None)
    why = explain_choice(large, None, asked.with_machine(asked.machine.resize(1)).make_space(own, memory, 1)) if large else ""
    found = replace(answer, baseline=next(iter(alone.best), Candidate(Plan(), why=why)))
    if best is None or not choose:
        return found
    most, first = best.cost * (1 + TIE_FRACTION), None
    for devices in reversed([n for n in list_device_counts(asked.machine) if n < found.space.devices]):
        good = [c for c in _search_devices(asked, pins, memory, devices, most).best if c.cost <= most]
        if not good:
            break
        first = good[0]
    if first is None:
        return found
    rows = [replace(row, why=explain_choice(row, first) if row.fits else row.why) for row in found.rows]
    return replace(found, rows=(replace(first, why="chosen"), *rows), max_slowdown=TIE_FRACTION)


def _search_devices(request: PlanRequest, pins: dict[str, Any], memory: float | None, devices: int, max_cost: float = inf) -> SearchResult:
    fewer = request.with_machine(request.machine.resize(devices))
    return fewer.find_plans(fewer.make_space(pins, memory, devices), max_cost)
