"""`plait plan`: choose a plan for a job on a machine; and `--plan auto` of `plait train`."""

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from math import inf, prod
from typing import Any

from plait.cli import kept_sketch
from plait.cli.learning import learned
from plait.cli.progress import ProgressLine
from plait.cli.result import print_result
from plait.config.command_options import PlanOptions, SplitOptions, TrainOptions
from plait.config.errors import PlaitError, Problem, shown
from plait.config.files import write
from plait.config.job import Job, load_job
from plait.config.keys import AXES
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.config.plan_question import counts, hours, pinned, size
from plait.data.loaders import with_batch
from plait.launch.detect import read_machine
from plait.model.table import duration
from plait.model.table import size as sized_up
from plait.planner import goals
from plait.planner.answer import Answer, ask, text
from plait.planner.inexact import with_inexact
from plait.planner.question import UNPRICED_CP, PlanRequest
from plait.planner.search import Candidate
from plait.planner.search_space import divisors

EVERY = 10**6


def run(options: PlanOptions, machine: Machine) -> int:
    """The command, for a machine and options that are right by themselves (`plan_options.py`)."""
    if options.tries:
        from plait.launch import fork

        fork.stay_forkable()
    with ProgressLine("plan", options.json) as say:
        return explained(options, machine, say)


def explained(options: PlanOptions, machine: Machine, say: Callable[[str], None]) -> int:
    """Print the answer to what the options ask of their job. `say` gets what is done, and no text before the answer."""
    pins, memory, split = pinned(options), size(options.memory), machine.devices > 1
    tp = pins.get("tp") != 1
    asked = kept_sketch.request(options, machine, split=split or bool(options.scale), tp=tp, say=say)
    asked = learned(asked, options, options.learn)
    gc.freeze()  # no collection walks through the sketch while plans are compared

    def again(arguments: dict[str, str]) -> PlanRequest:
        job = with_batch(load_job(options.job, arguments), options.batch)
        return replace(PlanRequest.of(job, options.job, machine, split=split, tp=tp), learned=asked.learned)

    if options.map:
        from plait.cli.plan_map import mapped

        return mapped(asked, pins, options)
    goal = goal_of(options, again)
    if goal is not None:
        sizes = goal(asked, pins, memory)
        say("")
        print_result(options, asdict(sizes), shown(sizes.text()))
        return 0
    found = answered(asked, options)
    if options.tries:
        found = tried(found, options)
    if options.output and found.best:
        write(options.output, toml(found))
    say("")
    print_result(options, found.to_dict(), shown(text(found)))
    return 0 if found.best else 1


def goal_of(options: PlanOptions, again: Callable[[dict[str, str]], PlanRequest]) -> goals.Goal | None:
    """The question that the options ask; None for the usual one. `again` makes the job with other arguments."""
    if options.scale:
        return lambda asked, pins, memory: goals.scale(asked, pins, memory, counts(options.scale))
    if options.objective == "min-devices":
        return lambda asked, pins, memory: goals.fewest(asked, pins, memory, hours(options.deadline or ""))
    if options.objective == "max-batch" and options.maximize:
        return goals.longest(options.maximize, options.arguments, again)
    return {"min-cost": goals.cheapest, "max-batch": goals.largest}.get(options.objective)


def answered(asked: PlanRequest, options: PlanOptions) -> Answer:
    """The best plans for a job that was looked at. P070 when there is none."""
    pins, memory = pinned(options), size(options.memory)
    found = ask(asked, pins, memory, EVERY if options.all else options.top)
    if not found.rows:
        raise PlaitError(impossible(found))
    found = goals.compared(found, pins, memory, choose=not options.tries)
    return with_inexact(found) if options.allow_inexact else found


def impossible(found: Answer) -> Problem:
    """P070: no plan has the keys that are given."""
    question, devices = found.question, found.question.devices
    kept = " ".join(f"{key}={value}" for key, value in question.pins.items()) or "the given options"
    whys = sorted(found.found.whys, key=lambda why: -found.found.whys[why])[:2]
    axes = [key for key in AXES if devices % question.pins.get(key, 1)]
    if axes:
        whys = [f"{axes[0]}={question.pins[axes[0]]} does not divide {devices} devices"]
    elif not whys:
        whys = list(unsearched(found))
    product = prod(question.pins.get(key, 1) for key in AXES if key != "ep")
    fix = [f"--gpus {product}"] if axes and product > 1 else []
    fix += [f"--set {axes[0]}={max(d for d in divisors(devices) if d <= question.pins[axes[0]])}"] if axes else []
    what = f"no plan for {devices} devices and a batch of {question.batch} works with {kept}"
    return Problem("P070", what, why="; ".join(whys), fix=tuple(fix))


def unsearched(found: Answer) -> Iterator[str]:
    """Why there was nothing to search: what the model, the devices and the batch have."""
    question = found.question
    pp, tp, cp = (question.pins.get(key, 1) for key in ("pp", "tp", "cp"))
    if pp > question.stages:
        yield f"the model's forward pass has {question.stages} unit calls, too few for {pp} stages"
    if tp > 1 and not question.sliceable:
        yield "no layer of the model can be sharded"
    if cp > 1 and not question.stretchable:
        yield UNPRICED_CP
    if question.devices // (pp * tp * cp) > question.batch:
        yield f"{question.devices // (pp * tp * cp)} local batches need a sample each, and the batch has {question.batch}"


def chosen(job: Job, options: SplitOptions) -> Plan:
    """The plan of `--plan auto`: the best of this machine for --nproc processes, with the reason said.

    A process of its own searches: it runs parts of the model there and back, after which this one could not fork ranks
    where torch sees a GPU.
    """
    from plait.launch import fork
    from plait.launch.place import Place, joining, world

    machine = read_machine("here")
    ranks = world(options.nproc) or machine.devices
    job = with_batch(job, getattr(options, "batch", None))

    def search(place: Place) -> dict[str, Any]:
        place.beat(-1, "build")
        return _best(learned(PlanRequest.of(job, options.job, machine.sized(ranks), split=ranks > 1), options), ranks)

    best = search(Place()) if joining() else fork.run(search, 1)[0]
    print(f"plan      {best['plan']}, chosen of {best['of']}: {best['why']}", file=sys.stderr)
    return Plan.parse(best["plan"])


def _best(asked: PlanRequest, ranks: int) -> dict[str, Any]:
    found = ask(asked, {"precision": "fp32"} if not asked.accelerated else {}, devices=ranks)
    if found.best is None or found.best.estimate is None:
        left = sized_up(max(0.0, found.question.memory))
        why = f"every plan on {ranks} devices needs more than {left} per device"
        raise PlaitError(Problem("M001", "no plan fits", why=why, fix=("use more processes: --nproc N", "use a smaller --batch")))
    best = found.best
    second = next((row for row in found.rows[1:] if row.fits), None)
    rest = f"; next best {second.plan}: {second.why}" if second else ""
    runs = len(asked.learned.anchors)
    by = f" and corrected by {runs} earlier run{'s' * (runs > 1)}" if runs else ""
    why = f"{1000 * best.seconds:.3g} ms a step predicted{by}{rest}"
    return {"plan": str(best.plan), "of": found.found.counts.get("priced", 0), "why": why}


def tried(found: Answer, options: PlanOptions) -> Answer:
    """The first plans run for a few steps each, and the answer in the order of what was measured.

    A plan that fails is no answer; M014 when all do.
    """
    from plait.cli.trial_run import measure
    from plait.planner.trial import in_turn

    asked, fitting = found.asked, [row for row in found.rows if row.fits]
    plans = [row.plan for row in fitting[: options.tries]]
    if asked.accelerated:
        runs = (
            TrainOptions(job=options.job, plan=str(plan), save_every=10**6, batch=options.batch, arguments=options.arguments) for plan in plans
        )
        took = [got.failed or got.seconds for got in map(measure, runs)]
    else:
        took = in_turn(asked.job, plans, found.question.devices)
    failed = {str(plan): why for plan, why in zip(plans, took) if isinstance(why, str)}
    if plans and len(failed) == len(plans):
        why = "; ".join(f"{plan}: {why}" for plan, why in failed.items())
        fix = (f'plait train {options.job} --plan "{plans[0]}"',)
        raise PlaitError(Problem("M014", f"--try: all {len(plans)} plans failed", why=why, fix=fix))
    times = {str(plan): seconds for plan, seconds in zip(plans, took) if not isinstance(seconds, str)}
    worked = [row for row in fitting if str(row.plan) not in failed]
    order = sorted(worked, key=lambda row: times.get(str(row.plan), inf))

    def told(row: Candidate) -> Candidate:
        name, predicted = str(row.plan), row.estimate
        if name in failed:
            return replace(row, fits=False, why=f"failed: {failed[name]}")
        if name not in times or predicted is None:
            return row
        words = f"{100 * (times[name] / min(times.values()) - 1):.0f} % slower"
        words = "chosen" if row is order[0] else words
        why = f"{words}: {1000 * times[name]:.3g} ms measured, {1000 * predicted.seconds:.3g} predicted"
        return replace(row, why=why)

    return replace(found, rows=tuple(told(row) for row in (*order, *(row for row in found.rows if row not in worked))))


def toml(found: Answer) -> str:
    """The choice as a plan file, with the prediction, the reason and the next best as comments."""
    best = found.best
    assert best is not None and best.estimate is not None
    got = best.estimate
    lines = [
        f"# {found.asked.name} on {found.asked.machine}, batch {found.question.batch}",
        f"# predicted: {duration(got.seconds)} a step, {sized_up(got.reserved)} on the fullest rank",
    ]
    if len(found.rows) > 1:
        lines.append(f"# next best: {found.rows[1].plan} ({found.rows[1].why})")
    return "\n".join(lines) + "\n" + best.plan.to_toml()
