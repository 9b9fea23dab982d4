"""Find the fastest synchronization method by the speed of the slowest link and by the spread of rank speeds.

One table is for equal samples, and one for equal loss, by the progress per sample (`planner/exactness.py`, fitted to one small model).

Compute time is the time of a step over free links. If ranks wait for each other, as in all methods but `async`, it is the time of the slowest
rank or, with local batches by speed, the time of all ranks together. Messages are added.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

from plait.config.plan import Plan
from plait.model.sketch_table import align_rows, format_speed
from plait.planner import sync_costs
from plait.planner.estimate import estimate_plan
from plait.planner.exactness import estimate_progress
from plait.planner.formulas import TimeModel

LINK_SPEEDS = (1e7, 1e8, 1e9, 1e10, 1e11, 4e11)
"""Link speeds of the map, in bit/s."""
SLOWDOWNS = (1.0, 1.5, 2.0, 3.0, 5.0)
"""Time of the slowest rank or group relative to the others."""
FREE_LINK = 1e18
"""Link speed in bit/s that makes messages free."""


class SyncWay(NamedTuple):
    """A synchronization method: its short name and its plan."""

    name: str
    plan: Plan


class StepParts(NamedTuple):
    """A step on a rank of the fastest group: compute seconds, seconds of messages inside groups, and elements of updated weights."""

    computing: float
    messages: float
    updated_weights: float


@dataclass(frozen=True)
class SyncJob:
    """A job to map. `steps` matter to a plan that changes its synchronization after a number of steps.

    `compute_seconds`: measured seconds of a step of one rank alone with its local batch, for groups of one rank; 0 if not measured.
    """

    pace: TimeModel
    batch: int
    steps: int = 0
    compute_seconds: float = 0.0

    @cached_property
    def free_model(self) -> TimeModel:
        """The time model with free links."""
        return sync_costs.with_link_speed(self.pace, FREE_LINK, 0.0)

    def get_warmup_fraction(self, plan: Plan) -> float:
        """Return the fraction of the steps, at the start, in which replica groups synchronize every time."""
        return min(1.0, plan.warmup_sync_steps / self.steps) if self.steps else 0.0

    def sum_sent(self, plan: Plan) -> float:
        """Return the bytes that a rank sends per step, as the mean over the job."""
        first, later = self.get_warmup_fraction(plan), sum(estimate_plan(self.pace, plan, 1.0).sent_bytes.values())
        return first * self.sum_sent(sync_costs.make_exact_twin(plan)) + (1 - first) * later if first else later

    def split_step(self, plan: Plan, link: TimeModel) -> StepParts:
        """Split a step under a plan into its parts, over the links of `link`."""
        samples = ceil(self.batch / (plan.shares * plan.replica_groups) / plan.microbatches)
        found, ideal = (estimate_plan(pace, plan, samples) for pace in (link, self.free_model))
        inside, free = (e.seconds - e.parts.get("sync", 0.0) for e in (found, ideal))
        known = self.compute_seconds - estimate_plan(self.free_model, Plan(), samples).seconds if self.compute_seconds else 0.0
        return StepParts(free + known, max(0.0, inside - free), found.updated_weights)

    def time_step(self, plan: Plan, link: TimeModel, slower: Sequence[float], parts: StepParts | None = None) -> float:
        """Predict seconds of a batch, as the mean over the job. `slower`: time of each group or replica relative to the fastest."""
        parts = parts or self.split_step(plan, link)
        if first := self.get_warmup_fraction(plan):
            before = self.time_step(sync_costs.make_exact_twin(plan), link, slower) + sync_costs.time_stats_row(link, plan, "replica_groups")
            return first * before + (1 - first) * self.time_step(replace(plan, warmup_sync_steps=0), link, slower, parts)
        if plan.server_count:
            return sync_costs.time_servers(link, plan, parts.updated_weights, tuple(parts.computing * s + parts.messages for s in slower))
        together = len(slower) / sum(1 / s for s in slower) if plan.batch_split != "equal" else max(slower)
        step = parts.computing * together + parts.messages
        return step + (sync_costs.time_group_sync(link, plan, parts.updated_weights, step) if plan.replica_groups > 1 else 0.0)


@dataclass(frozen=True)
class SyncCell:
    """One link speed and one spread of rank speeds."""

    bits_per_s: float
    slower: float
    seconds: dict[str, float]
    """Seconds of a batch, by method."""
    equal_loss: dict[str, float]
    """Seconds for the progress that `dp` makes with one batch, by method."""

    def find_fastest(self, loss: bool) -> str:
        """Return the fastest method; the first one among ties."""
        times = self.equal_loss if loss else self.seconds
        return min(times, key=lambda name: times[name])

    def compute_gain(self, loss: bool) -> float:
        """Return the speedup of the fastest method over `dp`."""
        times = self.equal_loss if loss else self.seconds
        return times["dp"] / times[self.find_fastest(loss)]


@dataclass(frozen=True)
class SyncMap:
    """A cell for every spread of speeds and every link speed, row by row."""

    job: str
    between: str
    """The ends of the link, such as nodes."""
    ways: tuple[SyncWay, ...]
    cells: tuple[tuple[SyncCell, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        cells = [
            {"bits_per_s": c.bits_per_s, "slower": c.slower, "fastest": c.find_fastest(False), "fastest_to_equal_loss": c.find_fastest(True),
             "seconds": c.seconds, "seconds_to_equal_loss": c.equal_loss}
            for row in self.cells for c in row
        ]  # fmt: skip
        plans = {way.name: {"plan": str(way.plan), "progress": estimate_progress(way.plan)} for way in self.ways}
        return {"job": self.job, "between": self.between, "ways": plans, "cells": cells}

    def to_text(self) -> str:
        """Format both tables, and the plans of the methods in them."""
        lines = [f"job  {self.job}", f"link between {self.between}; slowest: time of the slowest group relative to the others"]
        for loss, title in ((False, "same samples"), (True, "same loss*")):
            lines += ["", f"fastest way for the {title}, and its speedup over dp"]
            rows = [("slowest", *(format_speed(c.bits_per_s) for c in self.cells[0]))]
            rows += [(f"{row[0].slower:g} ×", *(_format_cell(c, loss) for c in row)) for row in self.cells]
            lines += align_rows(rows, right=(0,))
        there = {cell.find_fastest(loss) for row in self.cells for cell in row for loss in (False, True)}
        lines += ["", *align_rows([(w.name, str(w.plan)) for w in self.ways if w.name in there | {"dp"}], ())]
        return "\n".join([*lines, "* progress per sample is fitted to measurements of one small model; measure your own"])


def _format_cell(cell: SyncCell, loss: bool) -> str:
    name, gain = cell.find_fastest(loss), cell.compute_gain(loss)
    return name if name == "dp" or gain < 1.005 else f"{name} {gain:.3g}×"


def list_sync_ways(inner: Plan, groups: int, steps: int = 0) -> Iterable[SyncWay]:
    """Yield methods for `groups` groups of the plan `inner`: dp first, exact methods before inexact ones."""
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


def compute_sync_map(
    job: SyncJob, ways: Sequence[SyncWay], speeds: Sequence[float] = LINK_SPEEDS, slower: Sequence[float] = SLOWDOWNS,
    latency: float | None = None,
) -> tuple[tuple[SyncCell, ...], ...]:  # fmt: skip
    """Compute the cells of a map: the seconds of every method at every link speed, with one slower group.

    `async` gets the smallest staleness without waits.
    """
    rows: list[list[SyncCell]] = [[] for _ in slower]
    for bits in speeds:
        link = sync_costs.with_link_speed(job.pace, bits, latency)
        known = {way.name: job.split_step(way.plan, link) for way in ways}
        for row, slow in zip(rows, slower):
            times = {}
            for name, plan in ways:
                groups = plan.replica_groups if plan.replica_groups > 1 else plan.dp
                spread = (1.0,) * (groups - 1) + (slow,)
                if plan.outer_sync == "async":
                    least = sync_costs.find_staleness(plan, tuple(slow / s for s in spread))
                    plan = replace(plan, staleness=max(plan.staleness, least))
                times[name] = job.time_step(plan, link, spread, known[name])
            equal = {name: times[name] / estimate_progress(plan) for name, plan in ways}
            row.append(SyncCell(bits, slow, times, equal))
    return tuple(tuple(row) for row in rows)
