"""A step as rows of boxes, one row per rank, measured above predicted; also as a trace for Perfetto.

The prediction is the schedule table simulated by `plait.parallel.pipeline.schedule_search`. It uses the measured median times of each stage's F, B,
I and W, of the send of a message, and of its transfer over each boundary between stages. So a difference between both is not a slow stage or
a slow link. It comes from varying times, and from shared cores or links.

The *bubble* has one definition for both. It is the fraction of time × ranks, from the first action's start to the last one's end, without
an action.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Any

from plait.config.errors import PlaitError, Problem
from plait.config.plan import Plan
from plait.parallel.pipeline.schedule_search import SimulatedRun, build_table, list_link_times, simulate
from plait.parallel.pipeline.schedules import ScheduleTable
from plait.report.measured_step import COMPUTE_KINDS, RecordedStep, Span
from plait.report.run_files import RunFiles

MOST_SPANS = 100_000
"""Approximate maximum number of spans in a median."""
MessageKey = tuple[str, int, int]
"""The action a message belongs to, as (F or B, stage, micro-batch); an I counts as a B."""


@dataclass(frozen=True)
class RankRow:
    """The boxes of one rank, in order and without overlap."""

    rank: int
    label: str
    boxes: tuple[Span, ...]


@dataclass(frozen=True)
class StepRows:
    """Rows of all ranks, with second 0 at the first action's start. `bubble` and `makespan` are of the pipeline, if any."""

    rows: tuple[RankRow, ...]
    bubble: float | None
    makespan: float

    def compute_idle(self, row: RankRow) -> float:
        """Return the fraction of the makespan in which this rank computes nothing."""
        busy = sum(b.end - b.start for b in row.boxes if b.kind in COMPUTE_KINDS)
        return 1.0 - busy / self.makespan if self.makespan else 0.0


@dataclass(frozen=True)
class Timeline:
    """A step of a run, measured and, under `pp`, predicted."""

    run: Path
    plan: Plan
    step: int
    steps: int
    """Number of steps in the medians."""
    measured: StepRows
    predicted: StepRows | None
    times: dict[tuple[int, str], float]
    """Median seconds of each (stage, kind)."""
    note: str = ""

    @property
    def blocks(self) -> dict[str, StepRows]:
        """The blocks to draw: measured and, if available, predicted."""
        return {"measured": self.measured} | ({"predicted": self.predicted} if self.predicted else {})


def count_pipelines(plan: Plan) -> int:
    """Return the number of ranks per stage, which equals the number of parallel pipelines."""
    return plan.devices // plan.pp


def make_timeline(run: RunFiles, step: int | None = None) -> Timeline:
    """Return the timeline of a run's typical step, or of `step`. Raises R004 if its events are missing."""
    path, plan, shown = run.path, run.plan, _choose_step(run, step)
    typical = [m for m in run.typical_steps if m.microbatches == shown.microbatches] or [shown]
    labels = [f"rank {r}" for r in range(len(shown.ranks))]
    if not shown.microbatches:
        start = min(s.start for spans in shown.ranks for s in spans)
        block = _make_rows(labels, shown.ranks, start)
        return Timeline(path, plan, shown.step, len(typical), block, None, {})
    planned = build_table(plan.schedule, plan.pp, shown.microbatches, plan.stages_per_rank) if plan.pp > 1 else None
    if planned is None or not has_table_actions(planned, plan, shown):
        note = "This step ran under another plan than the last one of the run, so it has no prediction."
        return Timeline(path, plan, shown.step, 1, _make_rows(labels, shown.ranks), None, {}, note)
    typical = typical[-max(5, MOST_SPANS // max(1, sum(map(len, shown.ranks)))) :]
    times, link, send = find_medians(planned, plan, typical)
    labels = [label_rank(r, planned, count_pipelines(plan)) for r in range(plan.world)]
    waits = find_arrivals(planned, plan, shown)
    measured = _make_rows(labels, [_trim_receives(spans, waits) for spans in shown.ranks])
    predicted = predict_rows(planned, times, link, send)
    note = "" if count_pipelines(plan) == 1 else f"The {count_pipelines(plan)} parallel pipelines are predicted as one."
    return Timeline(path, plan, shown.step, len(typical), measured, predicted, times, note)


def _choose_step(run: RunFiles, step: int | None) -> RecordedStep:
    """Return the step with the median time, or `step`."""
    have = [m.step for m in run.steps]
    if not have:
        why = f"no step was recorded by all {run.plan.world} ranks in {run.path / 'events'}"
        raise PlaitError(Problem("R004", f"{run.path} has no events", why=why, fix=("train for a step or more",)))
    if step is not None and step not in have:
        why = f"the run has events of steps {have[0]} to {have[-1]}"
        raise PlaitError(Problem("R004", f"{run.path} has no events of step {step}", why=why))
    if step is not None:
        return run.steps[have.index(step)]
    typical = run.typical_steps
    middle = median_low(m.seconds for m in typical)
    return next(m for m in typical if m.seconds == middle)


def label_rank(rank: int, planned: ScheduleTable, shares: int = 1) -> str:
    """Return the label of a rank's row: rank 0 · stage 0; with several stages, rank 0 · stages 0, 3."""
    mine = [str(s) for s, owner in enumerate(planned.owner) if owner == rank // shares]
    return f"rank {rank} · stage{'s' if len(mine) > 1 else ''} {', '.join(mine)}"


def predict_rows(planned: ScheduleTable, times: dict[tuple[int, str], float], link: list[float], send: float) -> StepRows:
    """Simulate a table with these times of (stage, kind), transfer times of each boundary, and send time."""
    at = lambda s, kind: times.get((s, kind), 0.0)  # noqa: E731
    stages = range(planned.stages)
    inputs = [at(s, "I" if (s, "I") in times else "B") for s in stages]
    played = simulate(planned, [at(s, "F") for s in stages], inputs, [at(s, "W") for s in stages], link, send)
    rows = _make_spans(played, list_link_times(planned.owner, link), send)
    return _make_rows([label_rank(r, planned) for r in range(planned.ranks)], rows)


def find_medians(
    planned: ScheduleTable, plan: Plan, steps: list[RecordedStep]
) -> tuple[dict[tuple[int, str], float], list[float], float]:
    """Return median seconds of each (stage, kind), of transfers over each boundary, and of sends."""
    took: dict[tuple[int, str], list[float]] = {}
    links: list[list[float]] = [[] for _ in range(planned.stages - 1)]
    sends: list[float] = []
    for measured in steps:
        sent = find_arrivals(planned, plan, measured)
        for spans in measured.ranks:
            computed = dict[str, float]()
            for s in spans:
                if s.action is None:
                    continue
                kind, stage, _ = s.action
                if s.kind in COMPUTE_KINDS:
                    computed[s.name] = computed.get(s.name, 0.0) + s.end - s.start
                elif s.kind == "send":
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


def has_table_actions(planned: ScheduleTable, plan: Plan, measured: RecordedStep) -> bool:
    """Whether the measured actions are those of the table."""
    if len(measured.ranks) != plan.world:
        return False
    rows = [dict.fromkeys(s.name for s in spans if s.kind in COMPUTE_KINDS) for spans in measured.ranks]  # a wait inside an action divides it
    return all([*row] == [str(a) for a in planned.rows[r // count_pipelines(plan)]] for r, row in enumerate(rows))


def find_arrivals(planned: ScheduleTable, plan: Plan, measured: RecordedStep) -> dict[Span, float]:
    """Return for each receive span the time at which its message was sent and the receiver was ready."""
    sent: dict[tuple[int, MessageKey], Span] = {}
    for rank, spans in enumerate(measured.ranks):
        for s in spans:
            if s.kind == "send" and s.action:
                kind, stage, micro = s.action
                to = stage + 1 if kind == "F" else stage - 1
                sent[rank % count_pipelines(plan), ("F" if kind == "F" else "B", to, micro)] = s
    found: dict[Span, float] = {}
    for rank, spans in enumerate(measured.ranks):
        for s in spans:
            if s.kind == "receive" and s.action:
                kind, stage, micro = s.action
                message = sent.get((rank % count_pipelines(plan), ("F" if kind == "F" else "B", stage, micro)))
                if message is not None:
                    found[s] = min(s.end, max(s.start, message.end))
    return found


def _trim_receives(spans: tuple[Span, ...], arrivals: dict[Span, float]) -> list[Span]:
    """Shorten receive spans by the wait before the message was sent, which is idle time."""
    return [Span(s.name, arrivals.get(s, s.start), s.end) for s in spans]


def _make_spans(played: SimulatedRun, links: list[float], send: float) -> list[list[Span]]:
    """Convert a simulated table's rows to spans: receive, compute and send of each action."""
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


def _make_rows(labels: list[str], rows: Sequence[Sequence[Span]], zero: float | None = None) -> StepRows:
    computing = [s for spans in rows for s in spans if s.kind in COMPUTE_KINDS]
    start = min((s.start for s in computing), default=0.0) if zero is None else zero
    makespan = max(s.end for s in computing) - start if computing else 0.0
    shifted = [tuple(Span(s.name, s.start - start, s.end - start) for s in spans) for spans in rows]
    busy = sum(s.end - s.start for s in computing)
    bubble = 1.0 - busy / (makespan * len(rows)) if makespan else None
    ranks = (RankRow(r, name, spans) for r, (name, spans) in enumerate(zip(labels, shifted)))
    return StepRows(tuple(ranks), bubble, makespan)


TRACE_CATEGORIES = {"F": "forward", "B": "backward", "I": "backward-input", "W": "backward-weight"}


def make_chrome_trace(shown: Timeline) -> str:
    """Return a timeline as a Chrome trace in JSON for Perfetto: a process per rank, in microseconds from the earliest box."""
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
    boxes = [event for thread, block in enumerate(blocks.values()) for event in _make_events(block, thread, zero)]
    events += sorted(boxes, key=lambda event: event["ts"])
    about = {"run": str(shown.run), "plan": str(shown.plan), "step": shown.step}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}) + "\n"


def _make_events(block: StepRows, thread: int, zero: float) -> list[dict[str, Any]]:
    events = []
    for row in block.rows:
        for box in row.boxes:
            event: dict[str, Any] = {
                "ph": "X", "name": box.name, "cat": TRACE_CATEGORIES.get(box.kind, box.kind), "pid": row.rank, "tid": thread,
                "ts": round((box.start - zero) * 1e6, 3), "dur": round((box.end - box.start) * 1e6, 3),
            }  # fmt: skip
            if box.action and box.kind in COMPUTE_KINDS:
                event["args"] = {"stage": box.action[1], "micro-batch": box.action[2]}
            events.append(event)
    return events


def format_ms(seconds: float) -> str:
    """Format a time in milliseconds or, from 10 s on, in seconds."""
    if abs(seconds) >= 10:
        return f"{seconds:.3g} s"
    value = seconds * 1e3
    return f"{value:.0f} ms" if abs(value) >= 100 or value == round(value) else f"{value:.3g} ms"
