"""`plait report [RUN]`: a summary of a run; with `--timeline` the picture of a step of it, and the same as a trace."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from plait.config.errors import PlaitError, Problem
from plait.report.drawing import drawn, ms, page, percent
from plait.report.summary import summary, text
from plait.report.timeline import Timeline, timeline, trace


def run(options: argparse.Namespace) -> int:
    """Print the summary, or write the timeline's files and say where they are; the exit code."""
    folder = Path(options.path)
    if folder.is_symlink():  # runs/latest
        folder = folder.parent / folder.readlink()
    if not options.timeline:
        told = summary(folder)
        print(json.dumps(told) if options.json else text(told))
        return 0
    found = timeline(folder, options.step)
    picture, traced = folder / "timeline.html", folder / "trace.json"
    for path, content in ((picture, page(found)), (traced, trace(found))):
        try:
            beside = path.with_name(path.name + ".tmp")
            beside.write_text(content, encoding="utf-8")
            os.replace(beside, path)
        except OSError as error:
            raise PlaitError(Problem("R005", f"{path} cannot be written", why=str(error))) from None
    if options.json:
        print(json.dumps(facts(found) | {"timeline": str(picture), "trace": str(traced)}))
    else:
        print(f"{picture} · {traced} · {line(found)}")
    if options.open:
        import webbrowser

        webbrowser.open(picture.resolve().as_uri())
    return 0


def line(found: Timeline) -> str:
    """step 37 · bubble 27.3 % measured, 26.9 % predicted · 41.2 ms measured, 39.8 ms predicted."""
    measured, predicted = found.measured, found.predicted
    if measured.bubble is None:
        return f"step {found.step} · no pipeline, so no bubble"
    if predicted is None:
        return f"step {found.step} · bubble {percent(measured.bubble)} measured · {ms(measured.makespan)} measured"
    return (
        f"step {found.step} · bubble {percent(measured.bubble)} measured, {percent(predicted.bubble)} predicted"
        f" · {ms(measured.makespan)} measured, {ms(predicted.makespan)} predicted"
    )


def facts(found: Timeline) -> dict[str, Any]:
    """What `--json` prints."""
    blocks = {"measured": found.measured, "predicted": found.predicted}
    return {
        "run": str(found.run), "step": found.step, "steps": found.steps, "drawn": drawn(found),
        "bubble": {name: block and block.bubble for name, block in blocks.items()},
        "seconds": {name: block and block.makespan for name, block in blocks.items()},
        "times": {f"{kind}{stage}": seconds for (stage, kind), seconds in found.times.items()},
    }  # fmt: skip
