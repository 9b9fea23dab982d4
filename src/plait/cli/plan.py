"""`plait plan`: choose a plan for a job on a machine; also `--plan auto` of `plait train`."""

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf, prod
from typing import Any

from plait.cli import cached_sketch
from plait.cli.learning import learn_corrections
from plait.cli.progress import ProgressLine
from plait.cli.result import print_result
from plait.config.command_options import PlanOptions, SplitOptions, TrainOptions
from plait.config.errors import PlaitError, Problem, escape_controls
from plait.config.files import write_output
from plait.config.job import Job, load_job
from plait.config.keys import AXES
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.config.plan_question import parse_counts, parse_hours, parse_pins, parse_size
from plait.data.loaders import override_batch
from plait.launch.detect import read_machine
from plait.model.sketch_table import format_duration
from plait.model.sketch_table import format_size as sized_up
from plait.planner import goals
from plait.planner.answer import Answer, find_answer, format_answer
from plait.planner.inexact import add_inexact
from plait.planner.plan_request import UNPRICED_CP, PlanRequest
from plait.planner.search import Candidate, price_plan
from plait.planner.search_space import count_branch_samples, list_divisors

ALL_PLANS = 10**6


def run(options: PlanOptions, machine: Machine) -> int:
    """Run the command for checked options and a machine (`plan_options.py`)."""
    if options.tries:
        from plait.launch import fork

        fork.stay_forkable()
    with ProgressLine("plan", options.json) as say:
        return print_plans(options, machine, say)


def print_plans(options: PlanOptions, machine: Machine, say: Callable[[str], None]) -> int:
    """Print the answer to the options. `say` receives the progress, and an empty text before the answer."""
    pins, memory, split = parse_pins(options), parse_size(options.memory), machine.devices > 1
    tp = pins.get("tp") != 1
    asked = cached_sketch.build_plan_request(options, machine, split=split or bool(options.scale), tp=tp, say=say)
    asked = learn_corrections(asked, options, options.learn)
    gc.freeze()  # the garbage collector skips the sketch while plans are compared

    def reload_request(arguments: dict[str, str]) -> PlanRequest:
        job = override_batch(load_job(options.job, arguments), options.batch)
        return replace(PlanRequest.from_job(job, options.job, machine, split=split, tp=tp), learned=asked.learned)

    if options.map:
        from plait.cli.plan_map import print_map

        return print_map(asked, pins, options)
    goal = select_goal(options, reload_request)
    if goal is not None:
        sizes = goal(asked, pins, memory)
        say("")
        print_result(options, sizes.to_dict(), escape_controls(sizes.to_text()))
        return 0
    found = search_plans(asked, options)
    if options.tries:
        found = try_plans(found, options)
    if options.output and found.best:
        write_output(options.output, answer_to_toml(found))
    say("")
    print_result(options, found.to_dict(), escape_controls(format_answer(found)))
    return 0 if found.best else 1


def select_goal(options: PlanOptions, reload_request: Callable[[dict[str, str]], PlanRequest]) -> goals.Goal | None:
    """Return the goal of the options, or None for the default. `reload_request` loads the job with other arguments."""
    if options.scale:
        return lambda asked, pins, memory: goals.compare_sizes(asked, pins, memory, parse_counts(options.scale))
    if options.objective == "min-devices":
        return lambda asked, pins, memory: goals.find_fewest(asked, pins, memory, parse_hours(options.deadline or ""))
    if options.objective == "max-batch" and options.maximize:
        return goals.make_largest_goal(options.maximize, options.arguments, reload_request)
    return {"min-cost": goals.find_cheapest, "max-batch": goals.find_largest_batch}.get(options.objective)


def search_plans(asked: PlanRequest, options: PlanOptions) -> Answer:
    """Search the best plans for a request. Raises P070 if no plan is valid."""
    pins, memory = parse_pins(options), parse_size(options.memory)
    found = find_answer(asked, pins, memory, ALL_PLANS if options.all else options.top)
    if not found.rows:
        raise PlaitError(explain_no_plan(found))
    found = goals.add_baseline(found, pins, memory, choose=not options.tries)
    return add_inexact(found) if options.allow_inexact else found


def explain_no_plan(found: Answer) -> Problem:
    """P070: no valid plan has the given keys."""
    question, devices = found.space, found.space.devices
    kept = " ".join(f"{key}={value}" for key, value in question.pins.items()) or "the given options"
    whys = sorted(found.result.refusal_counts, key=lambda why: -found.result.refusal_counts[why])[:2]
    axes = [key for key in AXES if devices % question.pins.get(key, 1)]
    if axes:
        whys = [f"{axes[0]}={question.pins[axes[0]]} does not divide {devices} devices"]
    elif not whys:
        whys = list(explain_empty_search(found))
    product = prod(question.pins.get(key, 1) for key in AXES if key != "ep")
    fix = [f"--gpus {product}"] if axes and product > 1 else []
    fix += [f"--set {axes[0]}={max(d for d in list_divisors(devices) if d <= question.pins[axes[0]])}"] if axes else []
    what = f"no plan for {devices} devices and a batch of {question.batch} works with {kept}"
    return Problem("P070", what, why="; ".join(whys), fix=tuple(fix))


def explain_empty_search(found: Answer) -> Iterator[str]:
    """Yield the reasons for an empty search: limits of the model, the devices and the batch."""
    question = found.space
    pp, tp, cp = (question.pins.get(key, 1) for key in ("pp", "tp", "cp"))
    if pp > question.most_stages:
        yield f"the model's forward pass has {question.most_stages} unit calls, too few for {pp} stages"
    if tp > 1 and not question.can_slice:
        yield "no layer of the model can be sharded"
    if cp > 1 and not question.can_shard_sequence:
        yield UNPRICED_CP
    if question.devices // (pp * tp * cp) > question.batch:
        yield f"{question.devices // (pp * tp * cp)} local batches need a sample each, and the batch has {question.batch}"


def choose_plan(job: Job, options: SplitOptions) -> Plan:
    """Choose the plan of `--plan auto` for --nproc processes of this machine, and print the reason.

    A separate process searches. It runs parts of the model forward and backward, after which a process on a GPU machine cannot fork
    ranks.
    """
    from plait.launch import fork
    from plait.launch.place import Place, count_ranks, is_launched_rank

    machine = read_machine("here")
    ranks = count_ranks(options.nproc) or machine.devices
    job = override_batch(job, getattr(options, "batch", None))

    def search(place: Place) -> dict[str, Any]:
        place.beat(-1, "build")
        return _choose_best(learn_corrections(PlanRequest.from_job(job, options.job, machine.resize(ranks), split=ranks > 1), options), ranks)

    best = search(Place()) if is_launched_rank() else fork.run_ranks(search, 1)[0]
    print(f"plan      {best['plan']}, chosen of {best['of']}: {best['why']}", file=sys.stderr)
    return Plan.parse(best["plan"])


def _choose_best(asked: PlanRequest, ranks: int) -> dict[str, Any]:
    found = find_answer(asked, {"precision": "fp32"} if not asked.has_accelerator else {}, devices=ranks)
    if found.best is None or found.best.estimate is None:
        left = sized_up(max(0.0, found.space.memory))
        why = f"every plan on {ranks} devices needs more than {left} per device"
        raise PlaitError(Problem("M001", "no plan fits", why=why, fix=("use more processes: --nproc N", "use a smaller --batch")))
    best = found.best
    second = next((row for row in found.rows[1:] if row.fits), None)
    rest = f"; next best {second.plan}: {second.why}" if second else ""
    runs = len(asked.learned.anchors)
    by = f" and corrected by {runs} earlier run{'s' * (runs > 1)}" if runs else ""
    why = f"{1000 * best.seconds:.3g} ms a step predicted{by}{rest}"
    return {"plan": str(best.plan), "of": found.result.counts.get("priced", 0), "why": why}


def try_plans(found: Answer, options: PlanOptions) -> Answer:
    """Run the first plans for a few steps each, and sort the answer by the measured times.

    Failed plans are removed. Raises M014 if all plans fail.
    """
    from plait.cli.trial_run import measure_trial
    from plait.planner.trial import time_plans

    asked, fitting = found.request, [row for row in found.rows if row.fits]
    plans = [row.plan for row in fitting[: options.tries]]
    if asked.has_accelerator:
        runs = (
            TrainOptions(job=options.job, plan=str(plan), save_every=10**6, batch=options.batch, arguments=options.arguments) for plan in plans
        )
        took = [got.failed or got.seconds for got in map(measure_trial, runs)]
    else:
        computing = time_plans(asked.job, plans, found.space.devices)
        took = [each if isinstance(each, str) else each + _predict_waits(found, plan) for each, plan in zip(computing, plans)]
    failed = {str(plan): why for plan, why in zip(plans, took) if isinstance(why, str)}
    if plans and len(failed) == len(plans):
        why = "; ".join(f"{plan}: {why}" for plan, why in failed.items())
        fix = (f'plait train {options.job} --plan "{plans[0]}"',)
        raise PlaitError(Problem("M014", f"--try: all {len(plans)} plans failed", why=why, fix=fix))
    times = {str(plan): seconds for plan, seconds in zip(plans, took) if not isinstance(seconds, str)}
    worked = [row for row in fitting if str(row.plan) not in failed]
    order = sorted(worked, key=lambda row: times.get(str(row.plan), inf))

    def annotate_row(row: Candidate) -> Candidate:
        name, predicted = str(row.plan), row.estimate
        if name in failed:
            return replace(row, fits=False, why=f"failed: {failed[name]}")
        if name not in times or predicted is None:
            return row
        words = f"{100 * (times[name] / min(times.values()) - 1):.0f} % slower"
        words = "chosen" if row is order[0] else words
        why = f"{words}: {1000 * times[name]:.3g} ms measured, {1000 * predicted.seconds:.3g} predicted"
        return replace(row, why=why)

    return replace(found, rows=tuple(annotate_row(row) for row in (*order, *(row for row in found.rows if row not in worked))))


def _predict_waits(found: Answer, plan: Plan) -> float:
    """Predict the seconds in which messages inside layers wait for a core. A trial measures processor time, which does not include them."""
    pace = found.request.pace
    assert pace.software.cores is not None
    software = replace(pace.software, cores=replace(pace.software.cores, wake=0.0))
    awake = replace(pace, software=software)
    waiting, computing = (price_plan(each, plan, found.space, count_branch_samples(plan, found.space)).seconds for each in (pace, awake))
    return waiting - computing


def answer_to_toml(found: Answer) -> str:
    """Format the chosen plan as a file, with the prediction, the reason and the next best plan as comments."""
    best = found.best
    assert best is not None and best.estimate is not None
    got = best.estimate
    lines = [
        f"# {found.request.name} on {found.request.machine}, batch {found.space.batch}",
        f"# predicted: {format_duration(got.seconds)} a step, {sized_up(got.reserved)} on the fullest rank",
    ]
    if len(found.rows) > 1:
        lines.append(f"# next best: {found.rows[1].plan} ({found.rows[1].why})")
    return "\n".join(lines) + "\n" + best.plan.to_toml()
