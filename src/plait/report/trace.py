"""A timeline as a Chrome trace: Perfetto and chrome://tracing open it. A process per rank, measured above predicted."""

import json
from typing import Any

from plait.report.spans import COMPUTE
from plait.report.timeline import StepBox, Timeline

CATEGORIES = {"F": "forward", "B": "backward", "I": "backward-input", "W": "backward-weight"}


def trace(found: Timeline) -> str:
    """The trace as JSON text. Times are microseconds from the earliest box."""
    blocks = [("measured", found.measured)] + ([("predicted", found.predicted)] if found.predicted else [])
    zero = min((b.start for _, block in blocks for row in block.rows for b in row.boxes), default=0.0)
    events: list[dict[str, Any]] = []
    for row in found.measured.rows:
        events.append({"ph": "M", "name": "process_name", "pid": row.rank, "args": {"name": row.label}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": row.rank, "args": {"sort_index": row.rank}})
    for thread, (name, block) in enumerate(blocks):
        for row in block.rows:
            args = {"name": name}
            events.append({"ph": "M", "name": "thread_name", "pid": row.rank, "tid": thread, "args": args})
    boxes = [event for thread, (_, block) in enumerate(blocks) for event in _boxes(block, thread, zero)]
    events += sorted(boxes, key=lambda event: event["ts"])
    about = {"run": str(found.run), "plan": str(found.plan), "step": found.step}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}) + "\n"


def _boxes(block: StepBox, thread: int, zero: float) -> list[dict[str, Any]]:
    found = []
    for row in block.rows:
        for box in row.boxes:
            event: dict[str, Any] = {
                "ph": "X", "name": box.name, "cat": CATEGORIES.get(box.sort, box.sort), "pid": row.rank, "tid": thread,
                "ts": round((box.start - zero) * 1e6, 3), "dur": round((box.end - box.start) * 1e6, 3),
            }  # fmt: skip
            if box.about and box.sort in COMPUTE:
                event["args"] = {"stage": box.about[1], "micro-batch": box.about[2]}
            found.append(event)
    return found
