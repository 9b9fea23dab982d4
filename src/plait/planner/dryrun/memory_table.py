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
from plait.planner.dryrun.dry_run import DryRun, dry_run

CATEGORIES = (
    "parameters", "gradients", "optimizer", "average", "outer", "residuals", "host copies", "buffers", "batch", "activations", "gathered", "exchange",
    "temporary",
)  # fmt: skip
WHY = MappingProxyType({
    "gradients": "of its parameters", "optimizer": "what it keeps from step to step", "host copies": "what the optimizer updates",
    "average": "of the weights (Job.ema)",
    "outer": "global weights of replica groups, and their momentum",
    "residuals": "what copies have not sent yet",
    "buffers": "of the model", "activations": "kept for backward", "gathered": "parameters that are whole at the moment",
    "exchange": "what is sent or received", "temporary": "inside forward and backward",
})  # fmt: skip
MOMENTS = MappingProxyType({
    "backward": "the loss", "end": "the end of backward", "forward": "start", "evaluation": "a forward pass of an evaluation",
})  # fmt: skip
"""The model as a whole has no name of its own."""


@dataclass(frozen=True)
class MemoryItem:
    """So many bytes of a category at the fullest moment, and why."""

    category: str
    bytes: int
    reason: str
    host: bool = False
    """In the host's memory, at its own fullest moment."""


@dataclass(frozen=True)
class MemoryTable:
    """What the rank that needs most memory holds at the fullest moment of a step."""

    plan: str
    samples: int
    """Of its largest micro-batch."""
    total: int
    """Bytes of the device."""
    moment: str
    """The named moment that came last."""
    items: tuple[MemoryItem, ...]
    notes: tuple[str, ...] = ()
    """What the plan does to memory that is not in the table."""
    hosted: int = 0
    """Bytes that the host holds for the rank at its own fullest moment."""

    @property
    def together(self) -> int:
        """Both, where device and host are one memory: that of processes."""
        return self.total + self.hosted

    @property
    def categories(self) -> dict[str, int]:
        """Bytes of the device by category, in a fixed order; what is not there is left out."""
        return self.held(False)

    def held(self, host: bool) -> dict[str, int]:
        """Bytes of the device or of its host by category."""
        found = {item.category: item.bytes for item in self.items if item.host is host}
        return {category: found[category] for category in CATEGORIES if category in found}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"categories": self.categories, "host_categories": self.held(True)}

    def __str__(self) -> str:
        beside = f", and {size(self.hosted)} of its host's memory" if self.hosted else ""
        lines = [
            f"memory  {size(self.total)} per rank under {self.plan}{beside}, at most; micro-batches of {self.samples}",
            f"        fullest after: {MOMENTS.get(self.moment.strip(), self.moment)}",
        ]
        device, host = self.held(False), self.held(True)
        why = {item.category: item.reason for item in reversed(self.items)}
        rows: list[tuple[str, ...]] = [("", "device", "host", "")] if host else []
        sides = (device, host) if host else (device,)
        for category in (c for c in CATEGORIES if c in why):
            sizes = [size(side[category]) if category in side else "" for side in sides]
            rows.append((f"  {category}", *sizes, why[category]))
        lines += aligned(rows, right=(1, 2) if host else (1,))
        return "\n".join([*lines, *(f"not in it: {note}" for note in self.notes)])


def memory_table(job: Job, plan: Plan) -> MemoryTable:
    """The memory of a job under a plan, before anything runs. Raises the plan's refusals, and D002 as a dry run does."""
    check_plan(job, plan)
    found = dry_run(job, replace(plan.uncompiled, processes="per-device"))
    return replace(_of(found), plan=str(plan), notes=tuple(_notes(plan)))


def _of(found: DryRun) -> MemoryTable:
    most = found.fullest
    why = WHY | {"parameters": f"the parts that rank {most.rank} has", "batch": f"samples: {most.samples} at a time"}
    there = why | {"temporary": "gradients that the optimizer reads, and what its step makes"}
    host = max((kind.peak.host for kind in found.kinds), key=lambda held: sum(held.values()))
    items = [MemoryItem(category, n, why[category]) for category, n in most.peak.categories.items()]
    items += [MemoryItem(category, n, there[category], True) for category, n in host.items()]
    return MemoryTable(
        found.plan, most.samples, most.peak.total, most.peak.moment, tuple(sorted(items, key=lambda i: -i.bytes)),
        hosted=sum(host.values()),
    )  # fmt: skip


def _notes(plan: Plan) -> Iterable[str]:
    if plan.compile:
        yield "what compile=true saves by fusing operators"
    if plan.processes == "one":
        yield f"the {plan.dp - 1} other copies of the model that threads of this process compute with"
