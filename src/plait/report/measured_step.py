"""One step as recorded by all ranks, on a common clock."""

import re
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

WARMUP_STEPS, KEPT_STEPS = 3, 200
"""Number of first steps, which are not typical, and maximum number of last steps to use."""
COMPUTE_KINDS = ("F", "B", "I", "W")
PYTHON_SPANS = ("step", "record", "callbacks")
"""Spans of Python code around the passes."""
OUTSIDE_SPANS = ("checkpoint", "evaluate", "data", *PYTHON_SPANS)
"""Spans outside of a step's own time; most of them precede its first pass."""


class Span(NamedTuple):
    """An interval of a rank's time, from `start` to `end` in seconds. Its name is one of `plait.engine.step.SPAN_NAMES` or an action."""

    name: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        """F, B, I or W for an action; otherwise the first word of the name: receive, send, data, reduce, …."""
        return self.name[0] if self.name[0] in COMPUTE_KINDS else self.name.partition(" ")[0]

    @property
    def action(self) -> tuple[str, int, int] | None:
        """(kind, stage, micro-batch) of its action, or of the action it serves; None for a span of a complete step."""
        match = re.fullmatch(r"(?:\w+ )?([FBIW])(\d+)\.(\d+)", self.name)
        return (match[1], int(match[2]), int(match[3])) if match else None


@dataclass(frozen=True)
class RecordedStep:
    """One step on all ranks: each rank's spans in order, on a common clock."""

    step: int
    size: int
    ranks: tuple[tuple[Span, ...], ...]

    @property
    def seconds(self) -> float:
        """Seconds of the step, from the first span's start to the last one's end, without waits for data."""
        spans = [s for of_rank in self.ranks for s in of_rank if s.name not in OUTSIDE_SPANS]
        return max(s.end for s in spans) - min(s.start for s in spans) if spans else 0.0

    @property
    def microbatches(self) -> int:
        """Number of micro-batches in the pipeline; 0 without one."""
        return len({s.action[2] for spans in self.ranks for s in spans if s.action})


def align_step(step: int, rows: list[dict[str, Any]]) -> RecordedStep:
    """Align the spans of one step. If host clocks differ, the end of the step's last reduction is the same time on all ranks."""
    ranks = [[Span(n, r["at"] + start, r["at"] + start + took) for n, start, took in r["spans"]] for r in rows]
    ends = [max((s.end for s in spans if s.name == "reduce"), default=None) for spans in ranks]
    longest = max(max(s.end for s in spans) - spans[0].start for spans in ranks if spans)
    known = [end for end in ends if end is not None]
    clocks_differ = len(known) == len(ranks) and max(known) - min(known) > longest
    shifts = known if clocks_differ else [0.0] * len(ranks)
    shifted = ([Span(s.name, s.start - by, s.end - by) for s in spans] for spans, by in zip(ranks, shifts))
    return RecordedStep(step, rows[0]["size"], tuple(tuple(flatten_spans(spans)) for spans in shifted))


def flatten_spans(spans: list[Span]) -> list[Span]:
    """Return ordered spans without overlap. Nested spans are removed from their outer one. A wait inside `receive` or `send` is a part of it."""
    moved = [(s.start, s.end) for s in spans if s.kind in ("receive", "send")]
    if moved:
        spans = [s for s in spans if s.kind != "wait" or not any(a <= s.start < b for a, b in moved)]
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
