"""Corrections that `plait plan` learns from earlier runs on this machine: their measured steps correct the predictions of all plans."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import log
from pathlib import Path

from plait.cli.measured_runs import MeasuredRun, MeasuredRuns, UnusableRun
from plait.config.command_options import JobOptions
from plait.config.errors import PlaitError
from plait.config.job import load_job
from plait.config.machine import Machine
from plait.engine.run_directory import describe_environment
from plait.launch.detect import load_local_machine
from plait.planner.correction import LearnedCorrection, RunTraits
from plait.planner.estimate import Estimate
from plait.planner.plan_request import PlanRequest
from plait.planner.search import price_plan
from plait.planner.search_space import count_branch_samples

RUNS_FOLDER = "runs"
"""Default folder of run directories."""
MAX_VARIANTS = 3
"""Maximum number of other arguments of the same job file that are evaluated; each takes seconds."""


def learn_corrections(plan_request: PlanRequest, options: JobOptions, learn_option: str | None = None, before: Path | None = None) -> PlanRequest:
    """Add corrections from measured runs of the job on this machine.

    `learn_option` is the value of --learn. Only runs that started before the run `before` count.
    """
    folder, default = Path(learn_option or RUNS_FOLDER), learn_option is None
    if learn_option == "none":
        return plan_request
    local = _is_here(plan_request.machine)
    if default and not (folder.is_dir() and local):
        return plan_request
    found = MeasuredRuns.read(folder, describe_environment(), before)
    skipped = Counter(found.skipped)
    if not local:
        skipped["of another machine"] += len(found.runs)
        return replace(plan_request, learned=LearnedCorrection(folder=str(folder), skipped=dict(skipped)))
    job_of, model = _build_request_lookup(plan_request, options), _format_job_key(options.job, options.arguments)
    anchors = list[tuple[RunTraits, float]]()
    for run in found.runs:
        try:
            request = job_of(run)
            got = _predict_run(request, run)
        except UnusableRun as why:
            skipped[str(why)] += 1
            continue
        own = LearnedCorrection((), _format_job_key(run.job, run.arguments), bool(request.shardable.mixtures))
        anchors.append((own.make_traits(got), log(run.seconds / got.seconds)))
    known = LearnedCorrection(
        tuple(anchors),
        model,
        bool(plan_request.shardable.mixtures),
        str(folder),
        dict(skipped),
    )
    return replace(plan_request, learned=known)


def _is_here(machine: Machine) -> bool:
    """Return True if the machine has the name or the devices of this machine."""
    return machine.name == "here" or machine.device.name == load_local_machine().device.name


def _format_job_key(job: str, arguments: dict[str, str]) -> str:
    """Format a job and its arguments as a key that does not depend on how the path is written."""
    path, _, function = job.partition(":")
    return f"{Path(path).resolve()}:{function or 'job'} {sorted(arguments.items())}"


def _build_request_lookup(plan_request: PlanRequest, options: JobOptions) -> Callable[[MeasuredRun], PlanRequest]:
    """Return a function that finds the request of each run's job: this job, or the same file with other arguments.

    The function raises `UnusableRun` for other jobs.
    """
    own = _format_job_key(options.job, {})
    known: dict[str, PlanRequest | None] = {_format_job_key(options.job, options.arguments): plan_request}

    def find_request(run: MeasuredRun) -> PlanRequest:
        if not options.job.partition(":")[0].endswith(".py") or _format_job_key(run.job, {}) != own:
            raise UnusableRun("of another job")
        if run.on_cpu and plan_request.has_accelerator:
            raise UnusableRun("on another kind of device")
        name = _format_job_key(run.job, run.arguments)
        if name not in known and len(known) <= MAX_VARIANTS:
            try:
                known[name] = PlanRequest.from_job(
                    load_job(options.job, run.arguments),
                    options.job,
                    plan_request.machine,
                    split=plan_request.machine.devices > 1,
                )
            except PlaitError:
                known[name] = None
        if (found := known.get(name)) is None:
            raise UnusableRun("of the job with other arguments")
        return found

    return find_request


def _predict_run(request: PlanRequest, run: MeasuredRun) -> Estimate:
    """Predict a run's plan without corrections. Raises `UnusableRun` if it has no prediction."""
    plan = run.plan
    if (plan.tp > 1 and not request.can_slice) or (plan.ep > 1 and not request.shardable.mixtures):
        raise UnusableRun("of a plan without a prediction")
    machine = request.machine.resize(plan.devices)
    then = replace(request.with_machine(machine), job=replace(request.job, batch=run.batch))
    question = then.make_space({}, None, plan.devices)
    try:
        return price_plan(then.pace, plan, question, count_branch_samples(plan, question))
    except (PlaitError, ValueError, ArithmeticError, LookupError) as error:
        raise UnusableRun("of a plan without a prediction") from error
