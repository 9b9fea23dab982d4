"""Which way to synchronise is fastest, by the speed of the slowest link and by how unequal the ranks are.

One table is for the same number of samples, and one for the same loss, by what a sample is worth (`planner/exactness.py`: fitted
to one small model).

Computing is what a step takes over links that cost nothing. Where ranks wait for each other, as everywhere but under `async`, it
takes as long as on the slowest of them, or, with shares by speed, as long as all take together. Messages come on top.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

from plait.config.plan import Plan
from plait.model.table import aligned, speed
from plait.planner import late
from plait.planner.estimate import estimate
from plait.planner.exactness import progress
from plait.planner.formulas import TimeModel

SPEEDS = (1e7, 1e8, 1e9, 1e10, 1e11, 4e11)
"""bit/s of the links that are looked at."""
SLOWER = (1.0, 1.5, 2.0, 3.0, 5.0)
"""How many times as long the slowest rank or group takes as each of the others."""
FREE = 1e18
"""bit/s of a link that costs nothing."""


class SyncWay(NamedTuple):
    """A way to synchronise: its short name, and its plan."""

    name: str
    plan: Plan


class StepParts(NamedTuple):
    """Of a step of a rank of the fastest group over some link: seconds computing, seconds of messages inside groups, weights."""

    computing: float
    messages: float
    states: float


@dataclass(frozen=True)
class LateJob:
    """What is trained, and on what. `steps` matter to a plan that changes in the middle of them.

    `computing`: seconds of a step of one rank alone with its share of the batch, where they were measured, of groups of one.
    """

    pace: TimeModel
    batch: int
    steps: int = 0
    computing: float = 0.0

    @cached_property
    def free(self) -> TimeModel:
        """Over links that cost nothing."""
        return late.at_speed(self.pace, FREE, 0.0)

    def synchronized(self, plan: Plan) -> float:
        """Part of the steps, the first ones, in which replica groups synchronize every time."""
        return min(1.0, plan.warmup_sync_steps / self.steps) if self.steps else 0.0

    def sent(self, plan: Plan) -> float:
        """Bytes that a rank sends in a step, in the mean of the job."""
        first, later = self.synchronized(plan), sum(estimate(self.pace, plan, 1.0).sent.values())
        return first * self.sent(late.exact_twin(plan)) + (1 - first) * later if first else later

    def parts(self, plan: Plan, link: TimeModel) -> StepParts:
        """Of a step under a plan, over the links of `link`."""
        samples = ceil(self.batch / (plan.shares * plan.replica_groups) / plan.microbatches)
        found, ideal = (estimate(pace, plan, samples) for pace in (link, self.free))
        inside, free = (e.seconds - e.parts.get("sync", 0.0) for e in (found, ideal))
        known = self.computing - estimate(self.free, Plan(), samples).seconds if self.computing else 0.0
        return StepParts(free + known, max(0.0, inside - free), found.states)

    def seconds(self, plan: Plan, link: TimeModel, slower: Sequence[float], parts: StepParts | None = None) -> float:
        """Seconds for a batch, in the mean of the job. `slower`: how many times as long each group, or copy, takes as the fastest."""
        parts = parts or self.parts(plan, link)
        if first := self.synchronized(plan):
            before = self.seconds(late.exact_twin(plan), link, slower) + late.row(link, plan, "replica_groups")
            return first * before + (1 - first) * self.seconds(replace(plan, warmup_sync_steps=0), link, slower, parts)
        if plan.server_count:
            return late.served(link, plan, parts.states, tuple(parts.computing * s + parts.messages for s in slower))
        together = len(slower) / sum(1 / s for s in slower) if plan.batch_split != "equal" else max(slower)
        step = parts.computing * together + parts.messages
        return step + (late.rarely(link, plan, parts.states, step) if plan.replica_groups > 1 else 0.0)


@dataclass(frozen=True)
class LateCell:
    """One link and one spread of speeds."""

    bits: float
    slower: float
    seconds: dict[str, float]
    """For a batch, by way."""
    equal_loss: dict[str, float]
    """For as much progress as `dp` makes with a batch."""

    def best(self, loss: bool) -> str:
        """The fastest way; the first of those that are as fast."""
        times = self.equal_loss if loss else self.seconds
        return min(times, key=lambda name: times[name])

    def gain(self, loss: bool) -> float:
        """How many times as fast it is as `dp`."""
        times = self.equal_loss if loss else self.seconds
        return times["dp"] / times[self.best(loss)]


@dataclass(frozen=True)
class LateMap:
    """A cell for every spread and link, row by row."""

    job: str
    between: str
    """What the link joins."""
    ways: tuple[SyncWay, ...]
    cells: tuple[tuple[LateCell, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        cells = [
            {"bits_per_s": c.bits, "slower": c.slower, "fastest": c.best(False), "fastest_to_equal_loss": c.best(True),
             "seconds": c.seconds, "seconds_to_equal_loss": c.equal_loss}
            for row in self.cells for c in row
        ]  # fmt: skip
        plans = {way.name: {"plan": str(way.plan), "progress": progress(way.plan)} for way in self.ways}
        return {"job": self.job, "between": self.between, "ways": plans, "cells": cells}

    def text(self) -> str:
        """Both tables, and the plans of the ways that are in them."""
        lines = [f"job  {self.job}", f"link between {self.between}; slowest: times as long for the same work as the others"]
        for loss, title in ((False, "same samples"), (True, "same loss*")):
            lines += ["", f"fastest way for the {title}, and how many times as fast as dp"]
            rows = [("slowest", *(speed(c.bits) for c in self.cells[0]))]
            rows += [(f"{row[0].slower:g} ×", *(_shown(c, loss) for c in row)) for row in self.cells]
            lines += aligned(rows, right=(0,))
        there = {cell.best(loss) for row in self.cells for cell in row for loss in (False, True)}
        lines += ["", *aligned([(w.name, str(w.plan)) for w in self.ways if w.name in there | {"dp"}], ())]
        return "\n".join([*lines, "* what a sample is worth is fitted to measured rows of one small model; measure yours"])


def _shown(cell: LateCell, loss: bool) -> str:
    name, gain = cell.best(loss), cell.gain(loss)
    return name if name == "dp" or gain < 1.005 else f"{name} {gain:.3g}×"


def ways(inner: Plan, groups: int, steps: int = 0) -> Iterable[SyncWay]:
    """Ways for so many groups with the plan `inner`, dp first. Those that are not exact come after those that are."""
    dp = replace(inner, dp=inner.dp * groups)
    yield SyncWay("dp", dp)
    yield SyncWay("shares", replace(dp, batch_split="auto"))
    for name in ("bf16", "int8", "powersgd"):
        yield SyncWay(name, replace(dp, grad_compression=name))
        yield SyncWay(f"{name} + shares", replace(dp, grad_compression=name, batch_split="auto"))
    rare = replace(inner, replica_groups=groups)
    if steps > 1:
        yield SyncWay("post-local 16", replace(rare, sync_every=16, warmup_sync_steps=steps // 2))
    for every in (4, 16, 64):
        yield SyncWay(f"local {every}", replace(rare, sync_every=every))
    for every in (16, 64):
        yield SyncWay(f"diloco {every}", replace(rare, outer_sync="diloco", sync_every=every))
    yield SyncWay("streaming 16", replace(rare, outer_sync="diloco", sync_every=16, num_fragments=2, fragment_delay=4))
    yield SyncWay("async", replace(rare, outer_sync="async", staleness=1))


def late_map(
    job: LateJob, ways: Sequence[SyncWay], speeds: Sequence[float] = SPEEDS, slower: Sequence[float] = SLOWER,
    latency: float | None = None,
) -> tuple[tuple[LateCell, ...], ...]:  # fmt: skip
    """The cells of a map: the time of every way at every speed of the link, where one group is so many times slower.

    `async` allows the staleness with which nobody waits.
    """
    rows: list[list[LateCell]] = [[] for _ in slower]
    for bits in speeds:
        link = late.at_speed(job.pace, bits, latency)
        known = {way.name: job.parts(way.plan, link) for way in ways}
        for row, slow in zip(rows, slower):
            times = {}
            for name, plan in ways:
                groups = plan.replica_groups if plan.replica_groups > 1 else plan.dp
                spread = (1.0,) * (groups - 1) + (slow,)
                if plan.outer_sync == "async":
                    least = late.needed(plan, tuple(slow / s for s in spread))
                    plan = replace(plan, staleness=max(plan.staleness, least))
                times[name] = job.seconds(plan, link, spread, known[name])
            equal = {name: times[name] / progress(plan) for name, plan in ways}
            row.append(LateCell(bits, slow, times, equal))
    return tuple(tuple(row) for row in rows)
