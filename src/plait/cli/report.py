"""`plait report [RUN...]`: write a page of one run or of several runs, and print its summary.

`--svg` prints one figure. `--follow` serves the page while a run trains. `--try` runs the advised commands. `--memory` prints the memory
use of a rank, measured and predicted.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from plait.cli.prediction import load_prediction
from plait.cli.progress import ProgressLine
from plait.cli.result import print_result
from plait.cli.try_advice import format_gains, try_advice
from plait.config.command_options import ReportOptions, check_range
from plait.config.errors import PlaitError, Problem, escape_controls
from plait.config.job import load_job
from plait.config.plan import Plan
from plait.engine.memory_use import find_fullest
from plait.engine.run_directory import RunDirectory
from plait.report.figures import Figures, Prediction, make_figures
from plait.report.page import format_head, format_percent, render_page
from plait.report.run_files import RunFiles
from plait.report.summary import find_run_folder, format_run_summary, summarize_run
from plait.report.timeline import Timeline, format_ms, make_chrome_trace, make_timeline


def run(options: ReportOptions) -> int:
    """Write the page and print its summary, or the output that an option selects. Returns the exit code."""
    check_range(options)
    command = "plait report {} --memory" if options.memory else "plait report {}"
    folders = [find_run_folder(Path(path), command) for path in options.paths]
    if options.memory:
        return print_memory(folders[0], options)
    if options.follow:
        return serve_report(folders, options.step)
    with ProgressLine("report", options.json) as say:
        runs = read_runs(folders, options.step, say)
        made = make_figures(
            runs,
            options.step,
            lambda run, batch: load_prediction(run, batch, lambda task: say(f"{run.name}, {task}" if task else "")),
        )
        if options.tries:
            try_advice(runs[0], made["advice"][: options.tries], say)
        if options.svg:
            return print_figure(made, options)
        say("writing the page")
        file = (folders[0] if len(folders) == 1 else folders[0].parent) / "report.html"
        write_report_file(file, render_page(made))
    facts = {"page": str(file)}
    found = make_timeline(runs[0], options.step) if options.timeline else None
    if found is not None:
        facts |= {"trace": str(folders[0] / "trace.json")}
        write_report_file(Path(facts["trace"]), make_chrome_trace(found))
    first = summarize_run(folders[0], runs[0].rows) if runs[0].step_rows else {}
    lines = [format_run_summary(first)] if first else [f"run         {folders[0]}"]
    lines += format_head(made) + ([] if found is None else [f"timeline    {format_timeline(found)}"])
    lines += [f"{'':<12}{row}" for row in format_gains(made["advice"][: options.tries])] if options.tries else []
    lines += [f"{name:<12}{path}" for name, path in facts.items()]
    print_result(options, first | made | facts, escape_controls("\n".join(lines)))
    if options.open:
        import webbrowser

        webbrowser.open(file.resolve().as_uri())
    return 0


def read_runs(folders: Sequence[Path], step: int | None, say: Callable[[str], None]) -> list[RunFiles]:
    runs = list[RunFiles]()
    for k, folder in enumerate(folders):
        say(f"reading runs: {k} of {len(folders)}")
        runs.append(RunFiles.read(folder, step))
    return runs


def write_report_file(path: Path, content: str) -> None:
    """Write a file of a report atomically. Raises R005."""
    part = path.with_name(path.name + ".tmp")
    try:
        part.write_text(content, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise PlaitError(Problem("R005", f"{path} cannot be written", why=str(error))) from None


def print_figure(made: Figures, options: ReportOptions) -> int:
    """Print one figure. Raises R004 for runs without its data."""
    from plait.report.picture import draw_picture

    content, name = draw_picture(made, options.svg or ""), options.svg
    if not content:
        why = "; ".join(made["notes"]) or "nothing was recorded"
        why = "scaling needs runs of one job on two different numbers of devices" if name == "scaling" else why
        raise PlaitError(Problem("R004", f"{made['runs'][0]['path']} has no figures for --svg {name}", why=why, fix=("plait report RUN RUN …",)))
    print_result(options, {"svg": content}, content.removesuffix("\n"))
    return 0


def serve_report(folders: list[Path], step: int | None) -> int:
    """Serve the page until all runs have ended."""
    from plait.report.followed_page import follow_run

    seen, known = set[str](), dict[str, Prediction]()

    def predict(found: RunFiles, batch: int) -> Prediction:
        """Predict once per run, because its files change and its plan does not. The first page does not wait for it."""
        if found.name not in seen:
            seen.add(found.name)
            return Prediction(note="The prediction is running.")
        if found.name not in known:
            known[found.name] = load_prediction(found, batch)
        return known[found.name]

    def is_running() -> bool:
        return any(RunFiles.read(folder).running for folder in folders)

    try:
        follow_run(lambda: make_figures([RunFiles.read(folder) for folder in folders], step, predict), is_running, lambda at: print(at, flush=True))
    except KeyboardInterrupt:
        return 0
    write_report_file(folders[0] / "report.html", render_page(make_figures([RunFiles.read(folder) for folder in folders], step, predict)))
    print(f"the run has ended · {folders[0] / 'report.html'}")
    return 0


def print_memory(folder: Path, options: ReportOptions) -> int:
    """Print the memory use of the fullest rank, with the predicted use if the job is in a file. Raises R004."""
    run = RunDirectory(folder)
    found = find_fullest(run.read_memories())
    if found is None:
        what, fix = f"{folder} has no memory records of its ranks", ("train until the last step",)
        raise PlaitError(Problem("R004", what, fix=fix))
    (rank, use), (bill, note) = found, _predict_memory(folder)
    text = "\n".join([f"memory of rank {rank}, the fullest, in {folder}", *use.format_table(bill), *note])
    print_result(options, {"run": str(folder), "rank": rank, "measured": use.to_dict(), "bill": bill}, escape_controls(text))
    return 0


def _predict_memory(folder: Path) -> tuple[dict[str, int] | None, list[str]]:
    """Predict the memory of the run's job and plan by category in a dry run. Otherwise, return the reason."""
    told = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    if Path(told["job"].partition(":")[0]).suffix != ".py":
        return None, ["no prediction: the job was given as a Python object"]
    from plait.planner.dryrun.memory_table import make_memory_table

    try:
        job, plan = load_job(told["job"], told["arguments"]), Plan.stored(folder / "plan.toml").fill(None)
        return make_memory_table(job, plan).categories, []
    except PlaitError as error:
        return None, [f"no prediction: {error.problems[0].what}"]


def format_timeline(found: Timeline) -> str:
    """Format a step: step 37 · bubble 27.3 % measured, 26.9 % predicted · 41.2 ms measured, 39.8 ms predicted."""
    measured, predicted = found.measured, found.predicted
    if measured.bubble is None:
        return f"step {found.step} · no pipeline, so no bubble"
    if predicted is None:
        return f"step {found.step} · bubble {format_percent(measured.bubble)} measured · {format_ms(measured.makespan)} measured"
    return (
        f"step {found.step} · bubble {format_percent(measured.bubble)} measured, {format_percent(predicted.bubble)} predicted"
        f" · {format_ms(measured.makespan)} measured, {format_ms(predicted.makespan)} predicted"
    )
