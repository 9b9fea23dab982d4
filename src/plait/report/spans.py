"""The events of a run, read and put on one clock: which steps there are, and which one to show."""

import re
from dataclasses import dataclass
from statistics import median_low
from typing import Any, NamedTuple

from plait.config.errors import PlaitError, Problem
from plait.config.plan import Plan
from plait.engine.run_directory import RunDirectory
from plait.report.rows import events
from plait.report.summary import check_run

WARM_UP, KEPT = 3, 200
"""The first steps are not typical, and the last ones tell enough."""
COMPUTE = ("F", "B", "I", "W")


class Span(NamedTuple):
    """An interval of a rank's time, from `start` to `end` in seconds. Its name is one of `plait.engine.passes.SPANS` or an action."""

    name: str
    start: float
    end: float

    @property
    def sort(self) -> str:
        """F, B, I or W for an action; else the name without what it is about: receive, send, data, reduce, …."""
        return self.name[0] if self.name[0] in COMPUTE else self.name.partition(" ")[0]

    @property
    def about(self) -> tuple[str, int, int] | None:
        """(kind, stage, micro-batch) of the action it is, or is for; None for a span of a whole step."""
        match = re.fullmatch(r"(?:\w+ )?([FBIW])(\d+)\.(\d+)", self.name)
        return (match[1], int(match[2]), int(match[3])) if match else None


@dataclass(frozen=True)
class Measured:
    """One step on all ranks: each rank's spans in order, on one clock."""

    step: int
    size: int
    ranks: tuple[tuple[Span, ...], ...]

    @property
    def seconds(self) -> float:
        """From the first span's start to the last one's end, waiting for data left out: how long the step took."""
        spans = [s for of_rank in self.ranks for s in of_rank if s.name != "data"]
        return max(s.end for s in spans) - min(s.start for s in spans) if spans else 0.0

    @property
    def microbatches(self) -> int:
        """Micro-batches that went through the pipeline; 0 without one."""
        return len({s.about[2] for spans in self.ranks for s in spans if s.about})


def read(run: RunDirectory, step: int | None) -> tuple[Plan, list[Measured], Measured]:
    """(the run's plan, typical steps, the one to show). R003 when there is no run, R004 when it has no such events."""
    check_run(run.path, "plait report {} --timeline")
    plan = Plan.load(run.path / "plan.toml").fill(None)
    rows = [events(run.events(rank), step, KEPT) for rank in range(plan.world)]
    common = sorted(set(rows[0]).intersection(*rows[1:]))
    if step is not None and step not in common:
        have = f"steps {common[0]} to {common[-1]} are there" if common else "no step was recorded by every rank"
        raise PlaitError(Problem("R004", f"{run.path} has no events of step {step}", why=have))
    if not common:
        why = f"no step was recorded by every one of the {plan.world} ranks in {run.path / 'events'}"
        raise PlaitError(Problem("R004", f"{run.path} has no events", why=why, fix=("train for a step or more",)))
    steps = {n: _measured(n, [row[n] for row in rows]) for n in common}
    warm = [steps[n] for n in common if n > WARM_UP] or list(steps.values())
    largest = max(m.size for m in warm)
    typical = [m for m in warm if m.size == largest][-KEPT:]
    middle = median_low(m.seconds for m in typical)
    shown = next(m for m in typical if m.seconds == middle) if step is None else steps[step]
    return plan, [m for m in typical if m.microbatches == shown.microbatches] or [shown], shown


def _measured(step: int, rows: list[dict[str, Any]]) -> Measured:
    """One step of all ranks. Hosts have clocks of their own: there all ranks end the step's last sum together."""
    ranks = [[Span(n, r["at"] + start, r["at"] + start + took) for n, start, took in r["spans"]] for r in rows]
    ends = [max((s.end for s in spans if s.name == "reduce"), default=None) for spans in ranks]
    longest = max(spans[-1].end - spans[0].start for spans in ranks if spans)
    known = [end for end in ends if end is not None]
    clocks_differ = len(known) == len(ranks) and max(known) - min(known) > longest
    shifts = known if clocks_differ else [0.0] * len(ranks)
    shifted = ([Span(s.name, s.start - by, s.end - by) for s in spans] for spans, by in zip(ranks, shifts))
    return Measured(step, rows[0]["size"], tuple(tuple(flat(spans)) for spans in shifted))


def flat(spans: list[Span]) -> list[Span]:
    """Spans that do not overlap: one that lies inside another is cut out of it."""
    apart: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        outer = apart[-1] if apart else None
        apart.append(span)
        if outer is not None and span.start < outer.end:
            apart[-2] = Span(outer.name, outer.start, span.start)
            if outer.end > span.end:
                apart.append(Span(outer.name, span.end, outer.end))
    return apart
