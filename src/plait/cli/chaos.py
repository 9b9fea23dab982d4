"""`plait chaos`: run the fault matrix on the user's job."""

import time

from plait.chaos import matrix, ranks
from plait.chaos.scene import NOT_AS_EXPECTED, Row, Setting
from plait.cli.main import main
from plait.cli.plan_and_job import load_plan_and_job
from plait.cli.progress import ProgressLine
from plait.cli.result import print_result
from plait.config.command_options import ChaosOptions, TrainOptions
from plait.config.errors import DIFFERENT, PlaitError, Problem, did_you_mean, escape_controls
from plait.config.job import Job
from plait.config.plan import Plan
from plait.launch.place import is_launched_rank

SAMPLES_PER_RANK = 2
"""Default samples per local batch: small steps allow many faults."""


def run(options: ChaosOptions) -> int:
    """Inject the faults. Returns exit code 3 if an outcome differs from the expected one."""
    plan, job = load_plan_and_job(options)
    if plan.server_count:
        why = "the server restarts a replica group that dies, and no rank resumes: the expected outcomes of the faults are of other plans"
        fix = ("--plan with outer_sync=local or outer_sync=diloco", "kill -9 a group of a run of  plait train  yourself")
        raise PlaitError(Problem("U002", f"--plan {plan}: plait chaos does not support outer_sync=async", why=why, fix=fix))
    chosen = _select_faults(options.only, [fault.name for fault in matrix.FAULTS])
    faults = [fault for fault in matrix.FAULTS if fault.name in chosen]
    if options.list:
        rows = [{"name": fault.name, "done": fault.injection, "promise": fault.promise} for fault in faults]
        text = "\n".join(f"{fault.name:<20} {fault.injection}\n{'':<20}   {fault.promise}" for fault in faults)
        print_result(options, rows, f"{ranks.RECOVERY}\n\n{text}")
        return 0
    setting = Setting(main, _train_options(options, plan, job), job, plan, options.seed, False)
    began = time.monotonic()

    bar, tried = ProgressLine("chaos", options.json), 0

    def print_above_bar(text: str) -> None:
        bar("")
        print(text, flush=True)

    def show_row(row: Row) -> None:
        nonlocal tried
        tried += 1
        print_above_bar(matrix.format_row(row))
        bar.show("faults", tried, len(faults))

    print_above_bar(escape_controls(f"{len(faults)} faults · {options.job} · {plan} · {options.steps} steps"))
    undisturbed = lambda seconds: print_above_bar(f"{matrix.estimate_duration(len(faults), seconds)}\n{matrix.LEGEND}\n{matrix.HEAD}")  # noqa: E731
    with bar:
        bar("training without faults")
        rows = matrix.run_matrix(setting, faults, show_row, undisturbed)
    took = time.monotonic() - began
    print_above_bar(matrix.format_summary(rows, took))
    print_result(options, matrix.build_report(setting, rows))
    if options.output:
        options.output.write_text(matrix.format_page(setting, options.job, rows, took), encoding="utf-8")
    return DIFFERENT if any(row.verdict == NOT_AS_EXPECTED for row in rows) else 0


def _select_faults(only: tuple[str, ...], known: list[str]) -> list[str]:
    """Return the faults with these names or name prefixes. Raises U002 for a name without a match."""
    if not only:
        return known
    for word in only:
        if not any(name.startswith(word) for name in known):
            what = f"--only {word[:60]} matches no fault        {did_you_mean(word, known)}"
            raise PlaitError(Problem("U002", what, fix=("plait chaos JOB --list",)))
    begun = tuple(word for word in only if word not in known)
    return [name for name in known if name in only or name.startswith(begun)]


def _train_options(options: ChaosOptions, plan: Plan, job: Job) -> TrainOptions:
    """Build the options of each run: three checkpoints and few samples per step."""
    if is_launched_rank():
        what = "plait chaos starts its own processes and cannot run under a launcher"
        raise PlaitError(Problem("U002", what, fix=("run plait chaos without torchrun, srun or mpirun",)))
    return TrainOptions(
        job=options.job, arguments=options.arguments, plan=str(plan), device=options.device, steps=options.steps, check="none",
        batch=options.batch or min(job.batch, SAMPLES_PER_RANK * plan.shares * plan.microbatches), save_every=options.steps // 3,
    )  # fmt: skip
