"""The memory of one rank at the fullest moment of a step, by category: what `plait sketch --plan` prints.

The numbers are those of a dry run (`planner/dryrun/dry_run.py`), of the rank that needs most. A dry run cannot compile and
has one process for each rank: those keys are left out of it, and the table says what that leaves out.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from plait.config.job import Job
from plait.config.plan import Plan
from plait.engine.build import check_plan
from plait.model.table import aligned, size
from plait.planner.dryrun.dry_run import dry_run

WHY = MappingProxyType({
    "parameters": "the parts that rank {rank} has", "gradients": "of its parameters", "optimizer": "what it keeps from step to step",
    "average": "of the weights (Job.ema)",
    "outer": "global weights of replica groups, and their momentum",
    "residuals": "what copies have not sent yet", "host copies": "what the optimizer updates",
    "buffers": "of the model", "batch": "samples: {samples} at a time", "activations": "kept for backward",
    "gathered": "parameters that are whole at the moment", "exchange": "what is sent or received", "temporary": "inside forward and backward",
})  # fmt: skip
"""Categories, in the order of the table."""
UPDATING = "gradients that the optimizer reads, and what its step makes"
"""What is temporary on a host that updates."""
MOMENTS = MappingProxyType({
    "backward": "the loss", "end": "the end of backward", "forward": "start", "evaluation": "a forward pass of an evaluation",
})  # fmt: skip
"""The model as a whole has no name of its own."""


@dataclass(frozen=True)
class MemoryTable:
    """What the rank that needs most memory holds at the fullest moment of a step."""

    plan: str
    rank: int
    samples: int
    """Of its largest micro-batch."""
    moment: str
    """The named moment that came last."""
    categories: dict[str, int]
    """Bytes of the device."""
    host_categories: dict[str, int]
    """Bytes that a host holds for a rank at its own fullest moment, of the rank for which it holds most."""
    notes: tuple[str, ...] = ()
    """What the plan does to memory that is not in the table."""

    @property
    def total(self) -> int:
        """Bytes of the device."""
        return sum(self.categories.values())

    @property
    def hosted(self) -> int:
        """Bytes of the host."""
        return sum(self.host_categories.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total": self.total, "hosted": self.hosted}

    def __str__(self) -> str:
        beside = f", and {size(self.hosted)} of its host's memory" if self.hosted else ""
        lines = [
            f"memory  {size(self.total)} per rank under {self.plan}{beside}, at most; micro-batches of {self.samples}",
            f"        fullest after: {MOMENTS.get(self.moment.strip(), self.moment)}",
        ]
        sides = (self.categories, self.host_categories) if self.host_categories else (self.categories,)
        rows: list[tuple[str, ...]] = [("", "device", "host", "")] if self.host_categories else []
        for category in (c for c in WHY if any(c in side for side in sides)):
            why = WHY[category] if category in self.categories or category != "temporary" else UPDATING
            sizes = [size(side[category]) if category in side else "" for side in sides]
            rows.append((f"  {category}", *sizes, why.format(rank=self.rank, samples=self.samples)))
        lines += aligned(rows, right=(1, 2) if self.host_categories else (1,))
        return "\n".join([*lines, *(f"not in it: {note}" for note in self.notes)])


def memory_table(job: Job, plan: Plan) -> MemoryTable:
    """The memory of a job under a plan, before anything runs. Raises the plan's refusals, and D002 as a dry run does."""
    check_plan(job, plan)
    found = dry_run(job, replace(plan.uncompiled, processes="per-device"))
    most = found.fullest
    device, host = (dict(sorted(held.items(), key=lambda item: [*WHY].index(item[0]))) for held in (most.peak.categories, found.host))
    return MemoryTable(str(plan), most.rank, most.samples, most.peak.moment, device, host, tuple(_notes(plan)))


def _notes(plan: Plan) -> Iterable[str]:
    if plan.compile:
        yield "what compile=true saves by fusing operators"
    if plan.processes == "one":
        yield f"the {plan.dp - 1} other copies of the model that threads of this process compute with"
