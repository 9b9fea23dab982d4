"""A step as rows of boxes, one row per rank, measured above predicted; and as a trace for Perfetto.

Predicted is what `plait.parallel.pipeline.schedule_search` makes of the planned table with the measured median time of each stage's F, B, I and W,
of handing a message over, and of a message on its way over each boundary between stages. So a difference between the
two is neither a slow stage nor a slow link but what no table shows: times that vary, and cores or links that are shared.

A *bubble* is counted in both in one way: the share of time × ranks, from the first action's start to the last one's end,
in which no action computes.

The events of a run, read and put on one clock: which steps there are, and which one to show.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Any, NamedTuple

from plait.config.errors import PlaitError, Problem
from plait.config.plan import Plan
from plait.engine.run_directory import RunDirectory
from plait.parallel.pipeline.schedule_search import Played, hops, simulate, table
from plait.parallel.pipeline.schedules import Table
from plait.report.summary import check_run, events

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


def timeline(path: Path, step: int | None = None) -> Timeline:
    """The timeline of a run's typical step, or of `step`. R003 and R004 as `read` says."""
    plan, typical, shown = read(RunDirectory(path), step)
    labels = [f"rank {r}" for r in range(len(shown.ranks))]
    if not shown.microbatches:
        start = min(s.start for spans in shown.ranks for s in spans)
        block = _block(labels, shown.ranks, start)
        return Timeline(path, plan, shown.step, len(typical), block, None, {})
    planned = table(plan.schedule, plan.pp, shown.microbatches, plan.stages_per_rank) if plan.pp > 1 else None
    if planned is None or not _ran(planned, plan, shown):
        note = "This step was run under another plan than the run's last, so nothing is predicted for it."
        return Timeline(path, plan, shown.step, 1, _block(labels, shown.ranks), None, {}, note)
    typical = typical[-max(5, SPANS // max(1, sum(map(len, shown.ranks)))) :]
    times, link, send = medians(planned, plan, typical)
    labels = [label(r, planned, beside(plan)) for r in range(plan.world)]
    waits = _arrivals(planned, plan, shown)
    measured = _block(labels, [_received(spans, waits) for spans in shown.ranks])
    predicted = predict(planned, times, link, send)
    note = "" if beside(plan) == 1 else f"The {beside(plan)} pipelines beside each other are predicted as one."
    return Timeline(path, plan, shown.step, len(typical), measured, predicted, times, note)


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
        arrivals = _arrivals(planned, plan, measured)
        for spans in measured.ranks:
            for s in spans:
                if s.about is None:
                    continue
                kind, stage, _ = s.about
                if s.sort in COMPUTE:
                    took.setdefault((stage, kind), []).append(s.end - s.start)
                elif s.sort == "send":
                    sends.append(s.end - s.start)
                elif s in arrivals:
                    links[stage - 1 if kind == "F" else stage].append(s.end - arrivals[s])
    return (
        {key: median(seconds) for key, seconds in sorted(took.items())},
        [median(seconds) if seconds else 0.0 for seconds in links],
        median(sends) if sends else 0.0,
    )


def _ran(planned: Table, plan: Plan, measured: Measured) -> bool:
    """Whether these are the actions of the table."""
    if len(measured.ranks) != plan.world:
        return False
    rows = [[s.name for s in spans if s.sort in COMPUTE] for spans in measured.ranks]
    return all(row == [str(a) for a in planned.rows[r // beside(plan)]] for r, row in enumerate(rows))


def _arrivals(planned: Table, plan: Plan, measured: Measured) -> dict[Span, float]:
    """For each receive span, when its message had been sent and the rank was there to take it."""
    sent: dict[tuple[int, Link], Span] = {}
    for rank, spans in enumerate(measured.ranks):
        for s in spans:
            if s.sort == "send" and s.about:
                kind, stage, micro = s.about
                to = stage + 1 if kind == "F" else stage - 1
                sent[rank % beside(plan), ("F" if kind == "F" else "B", to, micro)] = s
    arrivals: dict[Span, float] = {}
    for rank, spans in enumerate(measured.ranks):
        for s in spans:
            if s.sort == "receive" and s.about:
                kind, stage, micro = s.about
                message = sent.get((rank % beside(plan), ("F" if kind == "F" else "B", stage, micro)))
                if message is not None:
                    arrivals[s] = min(s.end, max(s.start, message.end))
    return arrivals


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
    start = min(s.start for s in computing) if zero is None else zero
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
