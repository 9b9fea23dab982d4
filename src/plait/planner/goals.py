"""Other questions than "which plan is fastest here": what fewer or more devices do, the cheapest, the largest; a try."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

from plait.config.errors import PlaitError, Problem
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.model.table import aligned, short
from plait.planner.answer import WORDS, Answer, why_not
from plait.planner.question import PlanRequest
from plait.planner.search import ALIKE, Candidate, Found

KEPT = ("precision", "activation_checkpointing", "compile", "offload")
"""Given keys that mean the same on one device."""


@dataclass(frozen=True)
class Size:
    """One number of devices and the best plan on them; `why` there is none."""

    devices: int
    plan: str = ""
    seconds: float = 0.0
    efficiency: float = 0.0
    """Samples per second and device, over those of the first size that works."""
    bottleneck: str = ""
    hours: float = 0.0
    """Of the whole job."""
    price: float | None = None
    """Of the whole job, in the currency of the machine's price."""
    why: str = ""


@dataclass(frozen=True)
class Sizes:
    """What a question about several sizes found. `chosen` is the place of the answer."""

    question: str
    job: str
    machine: str
    batch: int
    sizes: tuple[Size, ...]
    chosen: int | None = None
    told: str = ""

    def text(self) -> str:
        lines = [f"job       {self.job} · batch {self.batch}", f"machine   {self.machine}"]
        lines += [f"question  {self.question}", ""]
        head = ("devices", "step", "samples/s", "efficiency", "whole job", "price", "slowed by", "plan")
        cells = [head, *(self._cells(size) for size in self.sizes)]
        for k, row in enumerate(aligned(cells, right=range(6))):
            lines.append(("▸ " if k and k - 1 == self.chosen else "  ") + row)
        return "\n".join([*lines, *([self.told] if self.told else [])])

    def _cells(self, size: Size) -> tuple[str, ...]:
        if size.why:
            return str(size.devices), "–", "–", "–", "–", "–", "", size.why
        price = "–" if size.price is None else f"{size.price:,.0f}"
        return (str(size.devices), f"{size.seconds:.3g} s", short(self.batch / size.seconds), f"{100 * size.efficiency:.0f} %",
                f"{size.hours:.3g} h", price, size.bottleneck, size.plan)  # fmt: skip


Goal = Callable[[PlanRequest, dict[str, Any], float | None], Sizes]


def at(asked: PlanRequest, pins: dict[str, Any], memory: float | None, devices: int) -> Size:
    """The best plan on so many devices."""
    if asked.machine.sized(devices).devices != devices:
        return Size(devices, why=f"does not fill nodes of {asked.machine.devices_per_node}")
    if devices > asked.job.batch * 64:
        return Size(devices, why=f"64 devices for each of {asked.job.batch} samples are fewer")
    best = next(iter(_searched(asked, pins, memory, devices).best), None)
    if best is None or best.estimate is None:
        return Size(devices, why="nothing fits")
    got = best.estimate
    lost = {name: s for name, s in got.parts.items() if name != "compute"}
    worst = max(lost, key=lambda name: lost[name])
    slow = f"{100 * lost[worst] / got.seconds:.0f} % {WORDS.get(worst) or 'what no plan changes'}"
    took = asked.job.steps * got.seconds / 3600 if asked.job.steps else 0.0
    each = asked.machine.price_per_hour
    price = each * devices * took if each is not None else None
    return Size(devices, str(best.plan), got.seconds, 0.0, slow, took, price)


def measured(asked: PlanRequest, sizes: list[Size], question: str) -> Sizes:
    """Sizes with their efficiency."""
    first = next((s for s in sizes if s.seconds), None)
    if first is not None:
        base = first.seconds * first.devices
        sizes = [replace(s, efficiency=base / s.seconds / s.devices) if s.seconds else s for s in sizes]
    return Sizes(question, asked.name, str(asked.machine), asked.job.batch, tuple(sizes))


def scale(asked: PlanRequest, pins: dict[str, Any], memory: float | None, devices: list[int]) -> Sizes:
    """The same batch on more and more devices: more is not linearly faster, and somewhere it stops paying."""
    sizes = [at(asked, pins, memory, n) for n in devices]
    found = measured(asked, sizes, f"the same batch of {asked.job.batch} on more devices")
    works = [k for k, s in enumerate(found.sizes) if s.seconds]
    told = "no size works"
    if works:
        last = max((k for k in works if found.sizes[k].efficiency >= HALF), default=works[0])
        best = min(works, key=lambda k: found.sizes[k].seconds)
        told = f"fastest at {found.sizes[best].devices} devices; up to {found.sizes[last].devices} each is more than half as useful as at first"
        if best != works[-1]:
            told += "; beyond the fastest, more devices make a step longer"
    return replace(found, told=told)


HALF = 0.5


def cheapest(asked: PlanRequest, pins: dict[str, Any], memory: float | None) -> Sizes:
    """The size at which a step costs least: devices times seconds, since a device costs the same anywhere."""
    found = measured(asked, [at(asked, pins, memory, n) for n in halves(asked.machine)], "cheapest")
    works = [k for k, s in enumerate(found.sizes) if s.seconds]
    best = min(works, key=lambda k: found.sizes[k].seconds * found.sizes[k].devices, default=None)
    unpriced = "the machine's file has no price_per_hour: device-hours decide"
    return replace(found, chosen=best, told=unpriced if asked.machine.price_per_hour is None else "")


def fewest(asked: PlanRequest, pins: dict[str, Any], memory: float | None, deadline: float) -> Sizes:
    """The fewest devices that finish the job's steps before a deadline."""
    if not asked.job.steps:
        raise PlaitError(Problem("U002", "--deadline needs a job with steps", fix=("Job(steps=…)",)))
    sizes: list[Size] = []
    for n in halves(asked.machine):
        sizes.append(at(asked, pins, memory, n))
        if sizes[-1].seconds and sizes[-1].hours <= deadline:
            break
    found = measured(asked, sizes, f"fewest devices that take at most {deadline:.3g} h for {asked.job.steps} steps")
    last = found.sizes[-1]
    if last.seconds and last.hours <= deadline:
        return replace(found, chosen=len(sizes) - 1)
    return replace(found, told="not even the whole machine is fast enough")


def largest(asked: PlanRequest, pins: dict[str, Any], memory: float | None) -> Sizes:
    """The largest batch that fits as one micro-batch of each share, on the whole machine."""
    n = asked.machine.devices

    def size(batch: int) -> Size:
        return at(replace(asked, job=replace(asked.job, batch=batch)), {"microbatches": 1} | pins, memory, n)

    low, best = most(size, 1, Size(n, why="nothing fits"))
    got = measured(asked, [best], "largest batch in one micro-batch")
    told = f"batch {low}: about {ceil(low / n)} samples per device" if low else ""
    return replace(got, batch=max(low, 1), chosen=0 if low else None, told=told)


def longest(name: str, arguments: dict[str, str], again: Callable[[dict[str, str]], PlanRequest]) -> Goal:
    """The largest value of an argument of the job, such as the length of its sequences, with which a plan fits."""

    def found(asked: PlanRequest, pins: dict[str, Any], memory: float | None) -> Sizes:
        n = asked.machine.devices

        def size(value: int) -> Size:
            try:
                return at(again(arguments | {name: str(value)}), pins, memory, n)
            except PlaitError as error:
                if error.codes != ["J057"]:
                    raise
                return Size(n, why=error.problems[0].what)

        first = int(arguments.get(name, "0")) or 64
        low, best = most(size, first, Size(n, why=f"nothing fits with {name}={first}"))
        got = measured(asked, [best], f"largest --job.{name}")
        return replace(got, chosen=0, told=f"--job.{name} {low} is the largest that fits") if low else got

    return found


def most(size: Callable[[int], Size], first: int, none: Size) -> tuple[int, Size]:
    """The largest number from `first` on, to a thirtieth, that fits, and what it is like; 0 when `first` does not."""
    low, high, best = 0, first, none
    while high <= LARGEST and (found := size(high)).seconds:
        low, high, best = high, high * 2, found
    while low and high - low > max(1, low // 32):
        middle = (low + high) // 2
        found = size(middle)
        low, high, best = (middle, high, found) if found.seconds else (low, middle, best)
    return low, best


LARGEST = 1 << 22


def halves(machine: Machine) -> list[int]:
    """Numbers of devices to try: 1, 2, 4 … of a node, then 1, 2, 4 … nodes, up to the machine."""
    node = [n for n in (1 << k for k in range(20)) if n < machine.devices_per_node]
    nodes = [n for n in (1 << k for k in range(20)) if n < machine.nodes]
    return [*node, *(machine.devices_per_node * n for n in nodes), machine.devices]


def compared(found: Answer, pins: dict[str, Any], memory: float | None, choose: bool = True) -> Answer:
    """The answer with what one device alone would do.

    With `choose`, the choice becomes the plan on the fewest devices that is predicted within `ALIKE` of the fastest.
    """
    asked, best = found.asked, found.best
    if found.question.devices == 1:
        return found
    own = {key: value for key, value in pins.items() if key in KEPT}
    alone = _searched(asked, own, memory, 1)
    large = min(alone.large, key=lambda c: c.estimate.hosted if c.estimate else 0.0, default=None)
    why = why_not(large, None, asked.on(asked.machine.sized(1)).question(own, memory, 1)) if large else ""
    found = replace(found, one=next(iter(alone.best), Candidate(Plan(), why=why)))
    if best is None or not choose:
        return found
    most, first = best.cost * (1 + ALIKE), None
    for devices in reversed([n for n in halves(asked.machine) if n < found.question.devices]):
        good = [c for c in _searched(asked, pins, memory, devices, most).best if c.cost <= most]
        if not good:
            break
        first = good[0]
    if first is None:
        return found
    rows = [replace(row, why=why_not(row, first) if row.fits else row.why) for row in found.rows]
    return replace(found, rows=(replace(first, why="chosen"), *rows), fewest=ALIKE)


def _searched(asked: PlanRequest, pins: dict[str, Any], memory: float | None, devices: int, within: float = inf) -> Found:
    fewer = asked.on(asked.machine.sized(devices))
    return fewer.searched(fewer.question(pins, memory, devices), within)
