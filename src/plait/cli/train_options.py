"""`plait train`: check the options and convert them to a request.

Callbacks are the user's own, early stopping, the best checkpoint, and profiles of steps.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli.result import print_result
from plait.config import hugging_face
from plait.config.command_options import RunOptions, TrainOptions
from plait.config.errors import PlaitError, Problem, did_you_mean
from plait.config.plan import Plan

if TYPE_CHECKING:
    from plait.cli.train_request import TrainRequest
    from plait.engine.callbacks import Callback


def build_callback_factory(options: TrainOptions) -> "Callable[[], list[Callback]] | None":
    """Return a function that creates the callbacks on a rank, or None without callbacks. Raises U011, J003."""
    function = _load_callbacks(options.callbacks) if options.callbacks else None
    if function is None and not (options.best or options.profile or options.export_every):
        return None
    return partial(_make_callbacks, function, options)


def find_callback_problems(options: TrainOptions) -> list[Problem]:
    """U002 for invalid values of the callback options."""
    found, (mode, _, metric) = list[Problem](), (options.best or "").partition(":")
    if options.best and (mode not in ("min", "max") or not metric):
        found.append(Problem("U002", f"--best {options.best} is not MODE:METRIC", fix=("--best max:accuracy",)))
    if options.early_stop is not None and options.early_stop < 1:
        what = f"--early-stop {options.early_stop} is not a number of evaluations ≥ 1"
        found.append(Problem("U002", what, fix=("--early-stop 5",)))
    if options.early_stop is not None and not options.best:
        why, fix = "it counts evaluations in which the metric of --best does not improve", ("--best min:loss",)
        found.append(Problem("U002", f"--early-stop {options.early_stop} needs --best", why=why, fix=fix))
    if options.profile and not _parse_steps(options.profile):
        what = f"--profile {options.profile} is not a range FIRST:LAST of steps that start at 1"
        found.append(Problem("U002", what, fix=("--profile 10:13",)))
    return found


def combine_callbacks(
    given: "Sequence[Callback]", made: "Callable[[], list[Callback]] | None", plan: Plan
) -> "Callable[[], list[Callback]] | None":
    """Return a function that creates the callbacks on a rank: the given ones, then those of the options. Raises U011, U015."""
    from plait.engine.callbacks import check_callbacks

    if not given:
        return made
    if plan.outer_sync == "async":
        raise PlaitError(_async_problem(["callbacks=[…]"]))
    check_callbacks(given, "callbacks=")
    return lambda: [*given, *(made() if made is not None else [])]


def refuse_callbacks(options: TrainOptions, plan: Plan) -> None:
    """Raise U015 for callbacks if groups send their gradients to a server."""
    named = {
        "--callbacks": options.callbacks,
        "--best": options.best,
        "--profile": options.profile,
        "--group-norms": options.group_norms,
    }
    given = [name for name, value in named.items() if value]
    if given and plan.outer_sync == "async":
        raise PlaitError(_async_problem(given))


def _async_problem(given: list[str]) -> Problem:
    why = "a server makes the steps and each group computes portions of them, so no rank has all values of a step"
    fix = (f"leave out {' and '.join(given)}", "outer_sync=local or outer_sync=diloco")
    return Problem("U015", f"{given[0]} does not work with outer_sync=async", why=why, fix=fix)


def _parse_steps(text: str) -> tuple[int, ...]:
    """Parse the first and the last step of 10:13. Returns () for other texts."""
    first, _, last = text.partition(":")
    right = first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)
    return (int(first), int(last)) if right else ()


def _load_callbacks(text: str) -> Callable[[], Any]:
    """Load the function of `path/to/file.py:name`; the default name is `callbacks`. Raises U011, J003."""
    from plait.config.job import MODULE_PREFIX, import_job_file

    path, _, name = text.partition(":")
    name, file = name or "callbacks", Path(path).resolve()
    if not file.is_file() or file.suffix != ".py":
        what = f"--callbacks {text}: the Python file {path} does not exist"
        raise PlaitError(
            Problem("U011", what, why=f"looked in {Path.cwd()}", fix=("--callbacks path/to/job.py:callbacks",))
        )
    loaded = sys.modules.get(f"{MODULE_PREFIX}{file.stem}")
    module = loaded if loaded is not None and loaded.__file__ == str(file) else import_job_file(file)
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        hint = did_you_mean(name, known) if known else f"define  def {name}() -> list"
        raise PlaitError(Problem("U011", f"{path} has no function `{name}`        {hint}", where=path))
    return function


def _make_callbacks(function: Callable[[], Any] | None, options: TrainOptions) -> "list[Callback]":
    """Create the callbacks: the user's first, the best checkpoint last. Raises U011."""
    from plait.config.errors import summarize_error
    from plait.config.job import find_user_line
    from plait.engine.callbacks import BestCheckpoint, Callback, EarlyStopping, Profile, check_callbacks
    from plait.integrations.export_weights import ExportWeights

    made, name = list[Callback](), options.callbacks
    if function is not None:
        try:
            returned = function()
        except PlaitError:
            raise
        except Exception as error:
            what = f"--callbacks {name} raised {summarize_error(error)}"
            raise PlaitError(Problem("U011", what, where=find_user_line(error))) from error
        made += check_callbacks(returned, f"--callbacks {name}")
    mode, _, metric = (options.best or "").partition(":")
    if options.profile:
        made.append(Profile(*_parse_steps(options.profile)))
    if options.export_every is not None:
        made.append(ExportWeights(options.export_every, options.export_dir))
    if options.early_stop is not None:
        made.append(EarlyStopping(metric, options.early_stop, mode))
    return [*made, BestCheckpoint(metric, mode)] if metric else made


def run(options: TrainOptions) -> int:
    """Train, and return the exit code."""
    from plait.launch.stopping import run_stoppable

    return run_stoppable(lambda: _train(options))


def _train(options: TrainOptions) -> int:
    from plait.launch.find_launcher import export_node_options

    export_node_options(options.nnodes, options.node_rank, options.master)
    asked = build_train_request(options)
    from plait.cli.train import launch_run

    code, summary = launch_run(asked)
    print_result(options, summary)
    return code


def build_train_request(options: TrainOptions) -> "TrainRequest":
    """Convert the options to a request."""
    from plait.cli.plan_and_job import load_plan_and_job
    from plait.cli.train_request import TrainRequest, scale_batch
    from plait.integrations.trackers.tracker_processes import make_trackers

    wrong, callbacks = find_option_problems(options), None
    try:
        callbacks = build_callback_factory(options)
    except PlaitError as error:
        wrong += error.problems
    plan, job = load_plan_and_job(options, wrong)
    refuse_callbacks(options, plan)
    _refuse_trackers(options, plan)
    shown = _parse_log_ranks(options)
    beyond = [rank for rank in shown if not 0 <= rank < plan.world]
    if beyond:
        why = "it has " + ("only rank 0" if plan.world == 1 else f"ranks 0 to {plan.world - 1}")
        raise PlaitError(Problem("U002", f"--log-ranks {options.log_ranks}: the plan has no rank {beyond[0]}", why=why))
    instead = {name: value for name in ("steps", "weights") if (value := getattr(options, name))}
    job, notes = scale_batch(replace(job, **instead) if instead else job, options.batch, options.scale_lr)
    return TrainRequest(
        options.job, job, plan, device=options.device, verbose=options.verbose, shown_ranks=shown, notes=notes,
        trackers=make_trackers(list(options.tracker)), callbacks=callbacks, group_norms=options.group_norms,
        **{each.name: getattr(options, each.name) for each in fields(RunOptions)},
    )  # fmt: skip


def find_option_problems(options: TrainOptions) -> list[Problem]:
    """U002 for invalid values and combinations, except values below a minimum (see `find_out_of_range`); J058."""
    found = [*hugging_face.find_untrainable(options.job)]
    if options.hang_timeout is not None and not 0 < options.hang_timeout < math.inf:
        what = f"--hang-timeout {options.hang_timeout} is not a number of seconds > 0"
        found.append(Problem("U002", what, fix=("--hang-timeout 600",)))
    if options.tracker:
        from plait.integrations.trackers.packages import find_unknown_trackers

        found += find_unknown_trackers(list(options.tracker))
    every = options.export_every or 0
    if every > 0 and options.save_every >= 1 and every % options.save_every:
        why = f"an export is made from a checkpoint, and the run saves one every {options.save_every} steps"
        fix = (f"--export-every {every} --save-every {every}",)
        found.append(Problem("U002", f"--export-every {every} is not a multiple of --save-every", why=why, fix=fix))
    if options.export_dir is not None and options.export_every is None:
        fix = (f"--export-every {options.save_every} --export-dir {options.export_dir}",)
        found.append(Problem("U002", "--export-dir has no effect without --export-every", fix=fix))
    if options.scale_lr and not options.batch:
        why = "the rule compares --batch with the job's own batch"
        found.append(Problem("U002", f"--scale-lr {options.scale_lr} needs --batch", why=why))
    try:
        _parse_log_ranks(options)
    except ValueError:
        found.append(Problem("U002", f"--log-ranks {options.log_ranks} is not a list of ranks", fix=("--log-ranks 0,3",)))
    return [*found, *find_callback_problems(options)]


def _parse_log_ranks(options: TrainOptions) -> tuple[int, ...]:
    """Parse the ranks whose output is printed."""
    return tuple(int(rank) for rank in options.log_ranks.split(","))


def _refuse_trackers(options: TrainOptions, plan: Plan) -> None:
    """Raise H020 for trackers and exports if a server makes the steps."""
    given = ["--tracker"] * bool(options.tracker) + ["--export-every"] * bool(options.export_every)
    if given and plan.outer_sync == "async":
        why = "rank 0 starts trackers and exports, and under outer_sync=async a server makes the steps"
        fix = (f"leave out {given[0]}    metrics.jsonl and checkpoints are still written", "outer_sync=diloco")
        raise PlaitError(Problem("H020", f"{given[0]} does not work with outer_sync=async", why=why, fix=fix))
