"""`plait report [RUN...]`: a page of one run, or of several laid over each other, and its head as text; `--svg` prints one picture, `--follow`
serves the page while a run trains, `--try` runs what it advises, `--memory` prints what a rank's memory was used for, beside the bill of its plan."""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from plait.cli.prediction import predicted
from plait.cli.progress import ProgressLine
from plait.cli.result import print_result
from plait.cli.try_advice import table, try_advice
from plait.config.command_options import ReportOptions, check_range
from plait.config.errors import PlaitError, Problem, shown
from plait.config.job import load_job
from plait.config.plan import Plan
from plait.engine.memory_use import fullest
from plait.engine.run_directory import RunDirectory
from plait.report.figures import Figures, Prediction, figures
from plait.report.page import head, page, percent
from plait.report.run_files import RunFiles
from plait.report.summary import run_folder, summary, text
from plait.report.timeline import Timeline, ms, timeline, trace


def run(options: ReportOptions) -> int:
    """Write the page and print its head, or what an option asks for; the exit code."""
    check_range(options)
    command = "plait report {} --memory" if options.memory else "plait report {}"
    folders = [run_folder(Path(path), command) for path in options.paths]
    if options.memory:
        return memory(folders[0], options)
    if options.follow:
        return followed(folders, options.step)
    with ProgressLine("report", options.json) as say:
        runs = read(folders, options.step, say)
        made = figures(runs, options.step, lambda run, batch: predicted(run, batch, lambda task: say(f"{run.name}, {task}" if task else "")))
        if options.tries:
            try_advice(runs[0], made["advice"][: options.tries], say)
        if options.svg:
            return drawn(made, options)
        say("writing the page")
        file = (folders[0] if len(folders) == 1 else folders[0].parent) / "report.html"
        write(file, page(made))
    facts = {"page": str(file)}
    found = timeline(runs[0], options.step) if options.timeline else None
    if found is not None:
        facts |= {"trace": str(folders[0] / "trace.json")}
        write(Path(facts["trace"]), trace(found))
    first = summary(folders[0], runs[0].rows) if runs[0].trained else {}
    lines = [text(first)] if first else [f"run         {folders[0]}"]
    lines += head(made) + ([] if found is None else [f"timeline    {line(found)}"])
    lines += [f"{'':<12}{row}" for row in table(made["advice"][: options.tries])] if options.tries else []
    lines += [f"{name:<12}{path}" for name, path in facts.items()]
    print_result(options, first | made | facts, shown("\n".join(lines)))
    if options.open:
        import webbrowser

        webbrowser.open(file.resolve().as_uri())
    return 0


def read(folders: Sequence[Path], step: int | None, say: Callable[[str], None]) -> list[RunFiles]:
    """The files of each run."""
    runs = list[RunFiles]()
    for k, folder in enumerate(folders):
        say(f"reading runs: {k} of {len(folders)}")
        runs.append(RunFiles.read(folder, step))
    return runs


def write(path: Path, content: str) -> None:
    """A file of a report, complete or not at all. R005."""
    part = path.with_name(path.name + ".tmp")
    try:
        part.write_text(content, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise PlaitError(Problem("R005", f"{path} cannot be written", why=str(error))) from None


def drawn(made: Figures, options: ReportOptions) -> int:
    """Print one picture. R004 for runs that have nothing to draw."""
    from plait.report.picture import picture

    content, name = picture(made, options.svg or ""), options.svg
    if not content:
        why = "; ".join(made["notes"]) or "nothing was recorded"
        why = "scaling needs runs of one job on two different numbers of devices" if name == "scaling" else why
        raise PlaitError(Problem("R004", f"{made['runs'][0]['path']} has no figures for --svg {name}", why=why, fix=("plait report RUN RUN …",)))
    print_result(options, {"svg": content}, content.removesuffix("\n"))
    return 0


def followed(folders: list[Path], step: int | None) -> int:
    """Serve the page until no run trains any more."""
    from plait.report.follow import follow

    seen, known = set[str](), dict[str, Prediction]()

    def predict(found: RunFiles, batch: int) -> Prediction:
        """Once for each run, whose files change and whose plan does not. The first page does not wait for it."""
        if found.name not in seen:
            seen.add(found.name)
            return Prediction(note="The prediction is being made.")
        if found.name not in known:
            known[found.name] = predicted(found, batch)
        return known[found.name]

    def is_running() -> bool:
        return any(RunFiles.read(folder).running for folder in folders)

    try:
        follow(lambda: figures([RunFiles.read(folder) for folder in folders], step, predict), is_running, lambda at: print(at, flush=True))
    except KeyboardInterrupt:
        return 0
    write(folders[0] / "report.html", page(figures([RunFiles.read(folder) for folder in folders], step, predict)))
    print(f"the run has ended · {folders[0] / 'report.html'}")
    return 0


def memory(folder: Path, options: ReportOptions) -> int:
    """Print what the fullest rank used its memory for, beside the bill of the plan where the job lies in a file. R004."""
    run = RunDirectory(folder)
    found = fullest(run.memories())
    if found is None:
        what, fix = f"{folder} has no memory records of its ranks", ("train until the last step",)
        raise PlaitError(Problem("R004", what, fix=fix))
    (rank, use), (bill, note) = found, _bill(folder)
    text = "\n".join([f"memory of rank {rank}, the fullest, in {folder}", *use.table(bill), *note])
    print_result(options, {"run": str(folder), "rank": rank, "measured": use.to_dict(), "bill": bill}, shown(text))
    return 0


def _bill(folder: Path) -> tuple[dict[str, int] | None, list[str]]:
    """What a dry run of the run's job and plan says, by category, and why there is none."""
    told = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    if Path(told["job"].partition(":")[0]).suffix != ".py":
        return None, ["no bill: the job was given as a value, in Python"]
    from plait.planner.dryrun.memory_table import memory_table

    try:
        job, plan = load_job(told["job"], told["arguments"]), Plan.stored(folder / "plan.toml").fill(None)
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
