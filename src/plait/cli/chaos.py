"""`plait chaos`: the fault matrix on the user's own job."""

import time

from plait.chaos import matrix, ranks
from plait.chaos.scene import SHORT, Row, Setting
from plait.cli.main import main
from plait.cli.plan_and_job import both
from plait.cli.progress import ProgressLine
from plait.cli.result import print_result
from plait.config.command_options import ChaosOptions, TrainOptions
from plait.config.errors import DIFFERENT, PlaitError, Problem, did_you_mean, shown
from plait.config.job import Job
from plait.config.plan import Plan
from plait.launch.place import joining

EACH = 2
"""Samples of a share of the batch, where `--batch` does not say it: small steps, many faults."""


def run(options: ChaosOptions) -> int:
    """Inject the faults. Exit code 3 if an outcome is not as expected."""
    plan, job = both(options)
    chosen = _chosen(options.only, [fault.name for fault in matrix.FAULTS])
    faults = [fault for fault in matrix.FAULTS if fault.name in chosen]
    if options.list:
        rows = [{"name": fault.name, "done": fault.done, "promise": fault.promise} for fault in faults]
        text = "\n".join(f"{fault.name:<20} {fault.done}\n{'':<20}   {fault.promise}" for fault in faults)
        print_result(options, rows, f"{ranks.RECOVERY}\n\n{text}")
        return 0
    setting = Setting(main, _train(options, plan, job), job, plan, options.seed, False)
    began = time.monotonic()

    bar, tried = ProgressLine("chaos", options.json), 0

    def say(text: str) -> None:
        bar("")
        print(text, flush=True)

    def tell(row: Row) -> None:
        nonlocal tried
        tried += 1
        say(matrix.line(row))
        bar.show("faults", tried, len(faults))

    say(shown(f"{len(faults)} faults · {options.job} · {plan} · {options.steps} steps"))
    undisturbed = lambda seconds: say(f"{matrix.expected(len(faults), seconds)}\n{matrix.KEY}\n{matrix.HEAD}")  # noqa: E731
    with bar:
        bar("training without faults")
        rows = matrix.run(setting, faults, tell, undisturbed)
    took = time.monotonic() - began
    say(matrix.summary(rows, took))
    print_result(options, matrix.to_dict(setting, rows))
    if options.output:
        options.output.write_text(matrix.page(setting, options.job, rows, took), encoding="utf-8")
    return DIFFERENT if any(row.verdict == SHORT for row in rows) else 0


def _chosen(only: tuple[str, ...], known: list[str]) -> list[str]:
    """The faults of these names, or of names that begin so. U002."""
    if not only:
        return known
    for word in only:
        if not any(name.startswith(word) for name in known):
            what = f"--only {word[:60]} matches no fault        {did_you_mean(word, known)}"
            raise PlaitError(Problem("U002", what, fix=("plait chaos JOB --list",)))
    begun = tuple(word for word in only if word not in known)
    return [name for name in known if name in only or name.startswith(begun)]


def _train(options: ChaosOptions, plan: Plan, job: Job) -> TrainOptions:
    """What each run is asked for: three checkpoints, and few samples in a step."""
    if joining():
        what = "plait chaos starts its own processes and cannot run under a launcher"
        raise PlaitError(Problem("U002", what, fix=("run plait chaos without torchrun, srun or mpirun",)))
    return TrainOptions(
        job=options.job, arguments=options.arguments, plan=str(plan), device=options.device, steps=options.steps, check="none",
        batch=options.batch or min(job.batch, EACH * plan.shares * plan.microbatches), save_every=options.steps // 3,
    )  # fmt: skip
