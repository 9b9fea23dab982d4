"""What `plait plan` learns from earlier runs on this machine: their measured steps correct the predictions of all plans."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import log
from pathlib import Path

from plait.cli.measured_runs import MeasuredRun, MeasuredRuns, Unusable
from plait.config.command_options import JobOptions
from plait.config.errors import PlaitError
from plait.config.job import load_job
from plait.config.machine import Machine
from plait.engine.run_directory import environment
from plait.launch.detect import here
from plait.planner.correction import Learned, Traits
from plait.planner.estimate import Estimate
from plait.planner.question import PlanRequest
from plait.planner.search import price
from plait.planner.search_space import branch_samples

RUNS = "runs"
"""Where `plait train` puts run directories."""
VARIANTS = 3
"""Jobs of the same file with other arguments that are looked at, at most: each takes seconds."""


def learned(asked: PlanRequest, options: JobOptions, given: str | None = None, before: Path | None = None) -> PlanRequest:
    """The request with what runs of its job on this machine say of predictions. `given`: the value of --learn.
    `before`: a run of the folder; only runs that were started before it count."""
    folder, default = Path(given or RUNS), given is None
    if given == "none":
        return asked
    local = _is_here(asked.machine)
    if default and not (folder.is_dir() and local):
        return asked
    found = MeasuredRuns.read(folder, environment(), before)
    skipped = Counter(found.skipped)
    if not local:
        skipped["of another machine"] += len(found.runs)
        return replace(asked, learned=Learned(folder=str(folder), skipped=dict(skipped)))
    job_of, model = _jobs(asked, options), _named(options.job, options.arguments)
    anchors = list[tuple[Traits, float]]()
    for run in found.runs:
        try:
            request = job_of(run)
            got = _predicted(request, run)
        except Unusable as why:
            skipped[str(why)] += 1
            continue
        own = Learned((), _named(run.job, run.arguments), bool(request.cuts.mixtures), asked.machine.on_cores)
        anchors.append((own.traits(got), log(run.seconds / got.seconds)))
    known = Learned(tuple(anchors), model, bool(asked.cuts.mixtures), asked.machine.on_cores, str(folder), dict(skipped))
    return replace(asked, learned=known)


def _is_here(machine: Machine) -> bool:
    """Whether it is this machine, by its devices."""
    return machine.name == "here" or machine.device.name == here().device.name


def _named(job: str, arguments: dict[str, str]) -> str:
    """A job and its arguments, the same however its path is written."""
    path, _, function = job.partition(":")
    return f"{Path(path).resolve()}:{function or 'job'} {sorted(arguments.items())}"


def _jobs(asked: PlanRequest, options: JobOptions) -> Callable[[MeasuredRun], PlanRequest]:
    """What each run's job needs of a machine: this job's, or that of the same file with other arguments. Unusable for others."""
    own = _named(options.job, {})
    known: dict[str, PlanRequest | None] = {_named(options.job, options.arguments): asked}

    def job_of(run: MeasuredRun) -> PlanRequest:
        if not options.job.partition(":")[0].endswith(".py") or _named(run.job, {}) != own:
            raise Unusable("of another job")
        if run.on_cpu and asked.accelerated:
            raise Unusable("on another kind of device")
        name = _named(run.job, run.arguments)
        if name not in known and len(known) <= VARIANTS:
            try:
                known[name] = PlanRequest.of(load_job(options.job, run.arguments), options.job, asked.machine, split=asked.machine.devices > 1)
            except PlaitError:
                known[name] = None
        if (found := known.get(name)) is None:
            raise Unusable("of the job with other arguments")
        return found

    return job_of


def _predicted(request: PlanRequest, run: MeasuredRun) -> Estimate:
    """The prediction of a run's plan, as if nothing had been learned. Unusable for what has no price."""
    plan = run.plan
    if (plan.tp > 1 and not request.sliceable) or (plan.ep > 1 and not request.cuts.mixtures):
        raise Unusable("of a plan without a prediction")
    machine = request.machine.sized(plan.devices)
    then = replace(request.on(machine), job=replace(request.job, batch=run.batch))
    question = then.question({}, None, plan.devices)
    try:
        return price(then.pace, plan, question, branch_samples(plan, question))
    except (PlaitError, ValueError, ArithmeticError, LookupError) as error:
        raise Unusable("of a plan without a prediction") from error
