"""One step as all ranks recorded it, on one clock: who did what, from when to when."""

import re
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

WARM_UP, KEPT = 3, 200
"""The first steps are not typical, and the last ones tell enough."""
COMPUTE = ("F", "B", "I", "W")
PYTHON = ("step", "record", "callbacks")
"""Spans of Python around the passes."""
BEFORE = ("checkpoint", "evaluate", "data", *PYTHON)
"""Spans that are no part of a step's own time: most of them come before its first pass."""


class Span(NamedTuple):
    """An interval of a rank's time, from `start` to `end` in seconds. Its name is one of `plait.engine.step.SPANS` or an action."""

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
        spans = [s for of_rank in self.ranks for s in of_rank if s.name not in BEFORE]
        return max(s.end for s in spans) - min(s.start for s in spans) if spans else 0.0

    @property
    def microbatches(self) -> int:
        """Micro-batches that went through the pipeline; 0 without one."""
        return len({s.about[2] for spans in self.ranks for s in spans if s.about})


def measured_step(step: int, rows: list[dict[str, Any]]) -> Measured:
    """One step of all ranks. Hosts have clocks of their own: there all ranks end the step's last sum together."""
    ranks = [[Span(n, r["at"] + start, r["at"] + start + took) for n, start, took in r["spans"]] for r in rows]
    ends = [max((s.end for s in spans if s.name == "reduce"), default=None) for spans in ranks]
    longest = max(max(s.end for s in spans) - spans[0].start for spans in ranks if spans)
    known = [end for end in ends if end is not None]
    clocks_differ = len(known) == len(ranks) and max(known) - min(known) > longest
    shifts = known if clocks_differ else [0.0] * len(ranks)
    shifted = ([Span(s.name, s.start - by, s.end - by) for s in spans] for spans, by in zip(ranks, shifts))
    return Measured(step, rows[0]["size"], tuple(tuple(flat(spans)) for spans in shifted))


def flat(spans: list[Span]) -> list[Span]:
    """Spans that do not overlap, in order: one that lies inside another is removed from it. A wait inside `receive` or `send` is a part of it."""
    moved = [(s.start, s.end) for s in spans if s.sort in ("receive", "send")]
    if moved:
        spans = [s for s in spans if s.sort != "wait" or not any(a <= s.start < b for a, b in moved)]
    found, open_, at = list[Span](), list[Span](), -inf
    for s in [*sorted(spans, key=lambda s: (s.start, -s.end)), None]:
        now = inf if s is None else s.start
        while open_ and open_[-1].end <= now:
            inner = open_.pop()
            if inner.end > at or inner.end == inner.start:
                found.append(Span(inner.name, max(at, inner.start), inner.end))
                at = inner.end
        if s is not None:
            if open_ and now > (begun := max(at, open_[-1].start)):
                found.append(Span(open_[-1].name, begun, now))
            at = max(at, now)
            open_.append(s)
    return found
