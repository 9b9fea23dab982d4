"""Options that commands have in common, and the plan and the job that they name."""

import argparse
from collections.abc import Callable
from typing import Any

from plait.config.device import KINDS, NOT_YET
from plait.config.errors import PlaitError, Problem
from plait.config.plan import Plan


def output_options(parser: argparse.ArgumentParser) -> None:
    """How results are printed."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks")


def job_options(parser: argparse.ArgumentParser) -> None:
    """The job, and how results are printed."""
    parser.add_argument(
        "job", metavar="JOB", help="path/to/job.py or path/to/job.py:function; its arguments are --job.name value"
    )
    output_options(parser)


def common_options(parser: argparse.ArgumentParser) -> None:
    """The job, the plan, and where it runs."""
    add = parser.add_argument
    job_options(parser)
    add("--plan", help='one line such as "dp=2 microbatches=4", a TOML file, or auto: the best here')
    add("--nproc", type=int, help="processes to start on this machine; fills dp=*")
    add(
        "--device",
        choices=(*KINDS, *NOT_YET),
        metavar=f"{{{','.join(KINDS)}}}",
        default="auto",
        help="cuda: also ROCm's (auto)",
    )


def both(
    options: argparse.Namespace, problems: list[Problem], load: Callable[[], Any] | None = None
) -> tuple[Plan, Any]:
    """The plan and the job, with everything that is wrong with either, and with the options, raised at once.

    `load` gives the job where it does not lie in a file.
    """
    from plait.config.job import load_job
    from plait.launch.forkable import answer_by_forks
    from plait.launch.place import world

    answer_by_forks()
    plan = job = None
    asked = options.nproc if options.nproc is None or options.nproc > 0 else None  # else it is among the problems
    auto, count = options.plan == "auto", None
    try:
        count = world(asked)
        plan = None if auto else _filled(Plan.read(options.plan or "dp=*"), count)
    except PlaitError as error:
        problems += error.problems
    try:
        job = load() if load is not None else load_job(options.job, options.arguments)
    except PlaitError as error:
        problems += error.problems
    if auto and job is not None:
        from plait.cli.plan import chosen

        plan = chosen(job, options)
    if problems or plan is None:
        raise PlaitError(problems)
    return plan, job


def _filled(plan: Plan, count: int | None) -> Plan:
    """The plan for `count` processes. L005 if a launcher started another number of them than the plan needs, else P001."""
    from plait.launch.launchers.find import mismatch
    from plait.launch.place import joined

    try:
        return plan.fill(count)
    except PlaitError as error:
        member = joined()
        if member is None:
            raise
        fix = (line for line in error.problems[0].fix if line.startswith("--plan"))
        raise PlaitError(mismatch(member, f'--plan "{plan}" (processes: {plan.world})', fix)) from error
