"""A step as rows of boxes, one row per rank, measured above predicted; and as a trace for Perfetto.

Predicted is what `plait.parallel.pipeline.schedule_search` makes of the planned table with the measured median time of each stage's F, B, I and W,
of handing a message over, and of a message on its way over each boundary between stages. So a difference between the
two is neither a slow stage nor a slow link but what no table shows: times that vary, and cores or links that are shared.

A *bubble* is counted in both in one way: the share of time × ranks, from the first action's start to the last one's end,
in which no action computes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Any

from plait.config.errors import PlaitError, Problem
from plait.config.plan import Plan
from plait.parallel.pipeline.schedule_search import Played, hops, simulate, table
from plait.parallel.pipeline.schedules import Table
from plait.report.measured_step import COMPUTE, Measured, Span
from plait.report.run_files import RunFiles

SPANS = 100_000
"""About how many the medians are of, at most."""
Link = tuple[str, int, int]
"""Which message: the F or B (an I counts as one) it is for, with stage and micro-batch."""


@dataclass(frozen=True)
class RankRow:
    """What one rank did; its boxes do not overlap and are in order."""

    rank: int
    label: str
    boxes: tuple[Span, ...]


@dataclass(frozen=True)
class StepBox:
    """Rows of all ranks, with second 0 at the first action's start. `bubble` and `makespan` are of the pipeline, if any."""

    rows: tuple[RankRow, ...]
    bubble: float | None
    makespan: float

    def idle(self, row: RankRow) -> float:
        """The share of the makespan in which this rank computes nothing."""
        busy = sum(b.end - b.start for b in row.boxes if b.sort in COMPUTE)
        return 1.0 - busy / self.makespan if self.makespan else 0.0


@dataclass(frozen=True)
class Timeline:
    """A step of a run, measured and, under `pp`, predicted."""

    run: Path
    plan: Plan
    step: int
    steps: int
    """How many steps the medians are of."""
    measured: StepBox
    predicted: StepBox | None
    times: dict[tuple[int, str], float]
    """Median seconds of each (stage, kind)."""
    note: str = ""

    @property
    def blocks(self) -> dict[str, StepBox]:
        """What to draw: measured, and predicted if it is."""
        return {"measured": self.measured} | ({"predicted": self.predicted} if self.predicted else {})


def beside(plan: Plan) -> int:
    """Ranks of each stage: how many pipelines run beside each other."""
    return plan.devices // plan.pp


def timeline(run: RunFiles, step: int | None = None) -> Timeline:
    """The timeline of a run's typical step, or of `step`. R004 if it has no such events."""
    path, plan, shown = run.path, run.plan, _shown(run, step)
    typical = [m for m in run.typical_steps if m.microbatches == shown.microbatches] or [shown]
    labels = [f"rank {r}" for r in range(len(shown.ranks))]
    if not shown.microbatches:
        start = min(s.start for spans in shown.ranks for s in spans)
        block = _block(labels, shown.ranks, start)
        return Timeline(path, plan, shown.step, len(typical), block, None, {})
    planned = table(plan.schedule, plan.pp, shown.microbatches, plan.stages_per_rank) if plan.pp > 1 else None
    if planned is None or not ran(planned, plan, shown):
        note = "This step was run under another plan than the run's last, so nothing is predicted for it."
        return Timeline(path, plan, shown.step, 1, _block(labels, shown.ranks), None, {}, note)
    typical = typical[-max(5, SPANS // max(1, sum(map(len, shown.ranks)))) :]
    times, link, send = medians(planned, plan, typical)
    labels = [label(r, planned, beside(plan)) for r in range(plan.world)]
    waits = arrivals(planned, plan, shown)
    measured = _block(labels, [_received(spans, waits) for spans in shown.ranks])
    predicted = predict(planned, times, link, send)
    note = "" if beside(plan) == 1 else f"The {beside(plan)} pipelines beside each other are predicted as one."
    return Timeline(path, plan, shown.step, len(typical), measured, predicted, times, note)


def _shown(run: RunFiles, step: int | None) -> Measured:
    """The step that took the median time, or `step`."""
    have = [m.step for m in run.steps]
    if not have:
        why = f"no step was recorded by every one of the {run.plan.world} ranks in {run.path / 'events'}"
        raise PlaitError(Problem("R004", f"{run.path} has no events", why=why, fix=("train for a step or more",)))
    if step is not None and step not in have:
        why = f"steps {have[0]} to {have[-1]} are there"
        raise PlaitError(Problem("R004", f"{run.path} has no events of step {step}", why=why))
    if step is not None:
        return run.steps[have.index(step)]
    typical = run.typical_steps
    middle = median_low(m.seconds for m in typical)
    return next(m for m in typical if m.seconds == middle)


def label(rank: int, planned: Table, shares: int = 1) -> str:
    """The name of a rank's row: rank 0 · stage 0; with several stages, rank 0 · stages 0, 3."""
    mine = [str(s) for s, owner in enumerate(planned.owner) if owner == rank // shares]
    return f"rank {rank} · stage{'s' if len(mine) > 1 else ''} {', '.join(mine)}"


def predict(planned: Table, times: dict[tuple[int, str], float], link: list[float], send: float) -> StepBox:
    """The table played with these times of (stage, kind), of each boundary's messages, and of handing one over."""
    at = lambda s, kind: times.get((s, kind), 0.0)  # noqa: E731
    stages = range(planned.stages)
    inputs = [at(s, "I" if (s, "I") in times else "B") for s in stages]
    played = simulate(planned, [at(s, "F") for s in stages], inputs, [at(s, "W") for s in stages], link, send)
    rows = _drawn(played, hops(planned.owner, link), send)
    return _block([label(r, planned) for r in range(planned.ranks)], rows)


def medians(
    planned: Table, plan: Plan, steps: list[Measured]
) -> tuple[dict[tuple[int, str], float], list[float], float]:
    """Median seconds of each (stage, kind), of a message over each boundary, and of handing one over."""
    took: dict[tuple[int, str], list[float]] = {}
    links: list[list[float]] = [[] for _ in range(planned.stages - 1)]
    sends: list[float] = []
    for measured in steps:
        sent = arrivals(planned, plan, measured)
        for spans in measured.ranks:
            computed = dict[str, float]()
            for s in spans:
                if s.about is None:
                    continue
                kind, stage, _ = s.about
                if s.sort in COMPUTE:
                    computed[s.name] = computed.get(s.name, 0.0) + s.end - s.start
                elif s.sort == "send":
                    sends.append(s.end - s.start)
                elif s in sent:
                    links[stage - 1 if kind == "F" else stage].append(s.end - sent[s])
            for name, seconds in computed.items():
                took.setdefault((int(name[1:].partition(".")[0]), name[0]), []).append(seconds)
    return (
        {key: median(seconds) for key, seconds in sorted(took.items())},
        [median(seconds) if seconds else 0.0 for seconds in links],
        median(sends) if sends else 0.0,
    )


def ran(planned: Table, plan: Plan, measured: Measured) -> bool:
    """Whether these are the actions of the table."""
    if len(measured.ranks) != plan.world:
        return False
    rows = [dict.fromkeys(s.name for s in spans if s.sort in COMPUTE) for spans in measured.ranks]  # a wait inside an action divides it
    return all([*row] == [str(a) for a in planned.rows[r // beside(plan)]] for r, row in enumerate(rows))


def arrivals(planned: Table, plan: Plan, measured: Measured) -> dict[Span, float]:
    """For each receive span, when its message had been sent and the rank was there to take it."""
    sent: dict[tuple[int, Link], Span] = {}
    for rank, spans in enumerate(measured.ranks):
        for s in spans:
            if s.sort == "send" and s.about:
                kind, stage, micro = s.about
                to = stage + 1 if kind == "F" else stage - 1
                sent[rank % beside(plan), ("F" if kind == "F" else "B", to, micro)] = s
    found: dict[Span, float] = {}
    for rank, spans in enumerate(measured.ranks):
        for s in spans:
            if s.sort == "receive" and s.about:
                kind, stage, micro = s.about
                message = sent.get((rank % beside(plan), ("F" if kind == "F" else "B", stage, micro)))
                if message is not None:
                    found[s] = min(s.end, max(s.start, message.end))
    return found


def _received(spans: tuple[Span, ...], arrivals: dict[Span, float]) -> list[Span]:
    """Receive spans without the wait before the message was sent: that is idle."""
    return [Span(s.name, arrivals.get(s, s.start), s.end) for s in spans]


def _drawn(played: Played, links: list[float], send: float) -> list[list[Span]]:
    """A played table's rows as spans: receive, compute and send of each action."""
    planned = played.table
    ends = {("F" if e.action.kind == "F" else "B", e.action.stage, e.action.micro): e.end
            for e in played.events if e.action.kind != "W"}  # fmt: skip
    rows: list[list[Span]] = [[] for _ in range(planned.ranks)]
    for rank, action, start, end in played.events:
        row, name, forward = rows[rank], str(action), action.kind == "F"
        before, after = (action.stage - 1, action.stage + 1) if forward else (action.stage + 1, action.stage - 1)
        other = lambda s, r=rank: 0 <= s < planned.stages and planned.owner[s] != r  # noqa: E731
        if action.kind != "W" and other(before):
            sent = ends["F" if forward else "B", before, action.micro]
            free = max(sent, row[-1].end if row else 0.0)
            arrived = sent + links[min(before, action.stage)]
            if arrived > free:
                row.append(Span(f"receive {name}", free, arrived))
        sends = action.kind != "W" and other(after)
        row.append(Span(name, start, end - send * sends))
        if sends and send:
            row.append(Span(f"send {name}", end - send, end))
    return rows


def _block(labels: list[str], rows: Sequence[Sequence[Span]], zero: float | None = None) -> StepBox:
    computing = [s for spans in rows for s in spans if s.sort in COMPUTE]
    start = min((s.start for s in computing), default=0.0) if zero is None else zero
    makespan = max(s.end for s in computing) - start if computing else 0.0
    shifted = [tuple(Span(s.name, s.start - start, s.end - start) for s in spans) for spans in rows]
    busy = sum(s.end - s.start for s in computing)
    bubble = 1.0 - busy / (makespan * len(rows)) if makespan else None
    ranks = (RankRow(r, name, spans) for r, (name, spans) in enumerate(zip(labels, shifted)))
    return StepBox(tuple(ranks), bubble, makespan)


CATEGORIES = {"F": "forward", "B": "backward", "I": "backward-input", "W": "backward-weight"}


def trace(shown: Timeline) -> str:
    """A timeline as a Chrome trace in JSON, which Perfetto opens: a process per rank. Microseconds from the earliest box."""
    blocks = shown.blocks
    zero = min((b.start for block in blocks.values() for row in block.rows for b in row.boxes), default=0.0)
    events: list[dict[str, Any]] = []
    for row in shown.measured.rows:
        events.append({"ph": "M", "name": "process_name", "pid": row.rank, "args": {"name": row.label}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": row.rank, "args": {"sort_index": row.rank}})
    for thread, (name, block) in enumerate(blocks.items()):
        for row in block.rows:
            args = {"name": name}
            events.append({"ph": "M", "name": "thread_name", "pid": row.rank, "tid": thread, "args": args})
    boxes = [event for thread, block in enumerate(blocks.values()) for event in _boxes(block, thread, zero)]
    events += sorted(boxes, key=lambda event: event["ts"])
    about = {"run": str(shown.run), "plan": str(shown.plan), "step": shown.step}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}) + "\n"


def _boxes(block: StepBox, thread: int, zero: float) -> list[dict[str, Any]]:
    events = []
    for row in block.rows:
        for box in row.boxes:
            event: dict[str, Any] = {
                "ph": "X", "name": box.name, "cat": CATEGORIES.get(box.sort, box.sort), "pid": row.rank, "tid": thread,
                "ts": round((box.start - zero) * 1e6, 3), "dur": round((box.end - box.start) * 1e6, 3),
            }  # fmt: skip
            if box.about and box.sort in COMPUTE:
                event["args"] = {"stage": box.about[1], "micro-batch": box.about[2]}
            events.append(event)
    return events


def ms(seconds: float) -> str:
    """A time as text, in milliseconds or, from 10 on, seconds."""
    if abs(seconds) >= 10:
        return f"{seconds:.3g} s"
    value = seconds * 1e3
    return f"{value:.0f} ms" if abs(value) >= 100 or value == round(value) else f"{value:.3g} ms"
