"""The memory of one rank at its maximum in a step, by category, as printed by `plait sketch --plan`.

The figures come from a dry run (`planner/dryrun/dry_run.py`) of the rank with most memory. A dry run cannot compile and has one process per rank.
It ignores these keys, and the table lists their missing effects.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from plait.config.job import Job
from plait.config.plan import Plan
from plait.engine.build import check_plan
from plait.model.sketch_table import align_rows, format_size
from plait.planner.dryrun.dry_run import dry_run

CATEGORY_TEXTS = MappingProxyType({
    "parameters": "the shards on rank {rank}", "gradients": "of these parameters", "optimizer": "optimizer state",
    "average": "of the weights (Job.ema)",
    "outer": "global weights of replica groups, and their momentum",
    "residuals": "residuals of compressed gradients", "host copies": "master weights that the optimizer updates",
    "buffers": "of the model", "batch": "samples: {samples} at a time", "activations": "kept for backward",
    "gathered": "temporarily gathered parameters", "exchange": "communication buffers", "temporary": "inside forward and backward",
})  # fmt: skip
"""Categories, in the order of the table."""
HOST_UPDATE_TEXT = "gradients for the optimizer, and temporaries of its step"
"""Description of temporary memory on a host that runs the optimizer."""
MOMENT_TEXTS = MappingProxyType({
    "backward": "the loss", "end": "the end of backward", "forward": "start", "evaluation": "a forward pass of an evaluation",
})  # fmt: skip
"""Descriptions of moments without a unit's name."""


@dataclass(frozen=True)
class MemoryTable:
    """The memory of the fullest rank at its maximum in a step."""

    plan: str
    rank: int
    samples: int
    """Samples of its largest micro-batch."""
    moment: str
    """The last named moment before the maximum."""
    categories: dict[str, int]
    """Bytes on the device."""
    host_categories: dict[str, int]
    """Maximum bytes on a host for a rank, of the rank with most of them."""
    notes: tuple[str, ...] = ()
    """Effects of the plan on memory that the table does not include."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.categories.values())

    @property
    def hosted(self) -> int:
        """Bytes on the host."""
        return sum(self.host_categories.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total": self.total, "hosted": self.hosted}

    def __str__(self) -> str:
        beside = f", and {format_size(self.hosted)} of its host's memory" if self.hosted else ""
        lines = [
            f"memory  {format_size(self.total)} per rank under {self.plan}{beside}, at most; micro-batch size {self.samples}",
            f"        fullest after: {MOMENT_TEXTS.get(self.moment.strip(), self.moment)}",
        ]
        sides = (self.categories, self.host_categories) if self.host_categories else (self.categories,)
        rows: list[tuple[str, ...]] = [("", "device", "host", "")] if self.host_categories else []
        for category in (c for c in CATEGORY_TEXTS if any(c in side for side in sides)):
            why = CATEGORY_TEXTS[category] if category in self.categories or category != "temporary" else HOST_UPDATE_TEXT
            sizes = [format_size(side[category]) if category in side else "" for side in sides]
            rows.append((f"  {category}", *sizes, why.format(rank=self.rank, samples=self.samples)))
        lines += align_rows(rows, right=(1, 2) if self.host_categories else (1,))
        return "\n".join([*lines, *(f"not included: {note}" for note in self.notes)])


def make_memory_table(job: Job, plan: Plan) -> MemoryTable:
    """Predict the memory of a job under a plan before any run. Raises the plan's rejections, and D002 as a dry run."""
    check_plan(job, plan)
    found = dry_run(job, replace(plan.uncompiled, processes="per-device"))
    most = found.fullest
    device, host = (dict(sorted(held.items(), key=lambda item: [*CATEGORY_TEXTS].index(item[0]))) for held in (most.peak.categories, found.host))
    return MemoryTable(str(plan), most.rank, most.samples, most.peak.moment, device, host, tuple(_list_plan_notes(plan)))


def _list_plan_notes(plan: Plan) -> Iterable[str]:
    if plan.compile:
        yield "the memory that compile=true saves by fusing operators"
    if plan.processes == "one":
        yield f"the {plan.dp - 1} other replicas of the model in threads of this process"
