"""`plait report [RUN]`: a summary of a run; with `--timeline` the picture of a step of it, and the same as a trace; with
`--memory` what a rank's memory was used for, beside the bill of its plan."""

import json
import os
from pathlib import Path
from typing import Any

from plait.config.command_options import ReportOptions
from plait.config.errors import PlaitError, Problem, shown
from plait.config.job import load_job
from plait.config.plan import Plan
from plait.engine.memory_use import fullest
from plait.engine.run_directory import RunDirectory
from plait.report.drawing import drawn, ms, page, percent
from plait.report.summary import check_run, summary, text
from plait.report.timeline import Timeline, timeline, trace


def run(options: ReportOptions) -> int:
    """Print the summary, or write the timeline's files and say where they are; the exit code."""
    folder = Path(options.path)
    if folder.is_symlink():  # runs/latest
        folder = folder.parent / folder.readlink()
    if options.memory:
        return memory(folder, options.json)
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
        print(shown(f"{picture} · {traced} · {line(found)}"))
    if options.open:
        import webbrowser

        webbrowser.open(picture.resolve().as_uri())
    return 0


def memory(folder: Path, as_json: bool) -> int:
    """Print what the fullest rank used its memory for, beside the bill of the plan where the job lies in a file. R004."""
    check_run(folder, "plait report {} --memory")
    run = RunDirectory(folder)
    found = fullest(run.memories())
    if found is None:
        what, fix = f"{folder} says nothing of its ranks' memory", ("train to the end of the steps",)
        raise PlaitError(Problem("R004", what, fix=fix))
    (rank, use), (bill, note) = found, _bill(folder)
    if as_json:
        print(json.dumps({"run": str(folder), "rank": rank, "measured": use.to_dict(), "bill": bill}))
        return 0
    print(shown("\n".join([f"memory of rank {rank}, the fullest, in {folder}", *use.table(bill), *note])))
    return 0


def _bill(folder: Path) -> tuple[dict[str, int] | None, list[str]]:
    """What a dry run of the run's job and plan says, by category, and why there is none."""
    told = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    if Path(told["job"].partition(":")[0]).suffix != ".py":
        return None, ["no bill: the job was given as a value, in Python"]
    from plait.planner.dryrun.memory_table import memory_table

    try:
        job, plan = load_job(told["job"], told["arguments"]), Plan.load(folder / "plan.toml").fill(None)
        return memory_table(job, plan).categories, []
    except PlaitError as error:
        return None, [f"no bill: {error.problems[0].what}"]


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
