"""The options of `plait train` for callbacks: the user's own, early stopping, the best checkpoint, traces of steps."""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.config.errors import PlaitError, Problem, did_you_mean
from plait.config.plan import Plan

if TYPE_CHECKING:
    from plait.engine.callbacks import Callback


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    add = parser.add_argument
    mine = "what is called after steps, evaluations and saves: a function that returns a list of plait.Callback"
    add("--callbacks", metavar="FILE:FUNCTION", help=mine)
    kept = "keep the best checkpoint by a metric of the evaluation in RUN/best, such as max:accuracy or min:loss"
    add("--best", metavar="MODE:METRIC", help=kept)
    add("--early-stop", type=int, metavar="N", help="end the run after N evaluations without a better --best metric")
    add("--profile", metavar="FIRST:LAST", help="trace these steps on every rank, into RUN/profile, such as 10:13")
    add("--group-norms", action="store_true", help="record the gradient norm of each parameter group")


def wanted(options: argparse.Namespace, problems: list[Problem]) -> "Callable[[], list[Callback]] | None":
    """What makes the callbacks on a rank; None without any. What is wrong with the options is added to `problems`: U002, U011."""
    mode, _, metric = (options.best or "").partition(":")
    if options.best and (mode not in ("min", "max") or not metric):
        problems.append(
            Problem("U002", f"--best {options.best} is not a mode and a metric", fix=("--best max:accuracy",))
        )
    if options.early_stop is not None and options.early_stop < 1:
        what = f"--early-stop {options.early_stop} is not a number of evaluations ≥ 1"
        problems.append(Problem("U002", what, fix=("--early-stop 5",)))
    if options.early_stop is not None and not options.best:
        why = "it counts evaluations in which the metric of --best is not better"
        problems.append(
            Problem("U002", f"--early-stop {options.early_stop} needs --best", why=why, fix=("--best min:loss",))
        )
    steps = _steps(options.profile or "")
    if options.profile and steps is None:
        what = f"--profile {options.profile} is not a first and a last step, counted from 1"
        problems.append(Problem("U002", what, fix=("--profile 10:13",)))
    function = None
    if options.callbacks:
        try:
            function = _function(options.callbacks)
        except PlaitError as error:
            problems += error.problems
    if function is None and not options.best and steps is None and options.export_every is None:
        return None
    own = (mode, metric, options.early_stop)
    return partial(_made, function, options.callbacks, own, steps, (options.export_every, options.export_to))


def together(
    given: "Sequence[Callback]", made: "Callable[[], list[Callback]] | None", plan: Plan
) -> "Callable[[], list[Callback]] | None":
    """What makes the callbacks on a rank: those that were given as values, and then those of the options. U011, U015."""
    from plait.engine.callbacks import checked

    if not given:
        return made
    if plan.sync == "async":
        raise PlaitError(_by_a_server(["callbacks=[…]"]))
    checked(given, "callbacks=")
    return lambda: [*given, *(made() if made is not None else [])]


def refuse(options: argparse.Namespace, plan: Plan) -> None:
    """U015 for callbacks where groups send their gradients to a server."""
    named = {
        "--callbacks": options.callbacks,
        "--best": options.best,
        "--profile": options.profile,
        "--group-norms": options.group_norms,
    }
    given = [name for name, value in named.items() if value]
    if given and plan.sync == "async":
        raise PlaitError(_by_a_server(given))


def _by_a_server(given: list[str]) -> Problem:
    why = "there the server makes the steps and each group computes portions of them, so no rank sees a step as a whole"
    fix = (f"leave out {' and '.join(given)}", "sync=local or sync=diloco")
    return Problem("U015", f"{given[0]} does not work with sync=async", why=why, fix=fix)


def _steps(text: str) -> tuple[int, int] | None:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        return None
    return int(first), int(last)


def _function(text: str) -> Callable[[], Any]:
    """The function that `path/to/file.py:name` stands for; its name is `callbacks` if none is given. U011, J003."""
    from plait.config.job import JOB, execute

    path, _, name = text.partition(":")
    name, file = name or "callbacks", Path(path).resolve()
    if not file.is_file() or file.suffix != ".py":
        what = f"--callbacks {text}: there is no Python file {path}"
        raise PlaitError(
            Problem("U011", what, why=f"looked in {Path.cwd()}", fix=("--callbacks path/to/job.py:callbacks",))
        )
    loaded = sys.modules.get(f"{JOB}{file.stem}")
    module = loaded if loaded is not None and loaded.__file__ == str(file) else execute(file)
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        hint = did_you_mean(name, known) if known else f"define  def {name}() -> list"
        raise PlaitError(Problem("U011", f"{path} has no function `{name}`        {hint}", where=path))
    return function


def _made(
    function: Callable[[], Any] | None, name: str, best: tuple[str, str, int | None], steps: tuple[int, int] | None,
    export: tuple[int | None, Path | None],
) -> "list[Callback]":  # fmt: skip
    """The callbacks: the user's first, the best checkpoint last. U011."""
    from plait.config.errors import in_a_line
    from plait.config.job import user_line
    from plait.engine.callbacks import checked
    from plait.engine.standard_callbacks import BestCheckpoint, EarlyStopping, Profile
    from plait.integrations.export_weights import ExportWeights

    made: list[Callback] = []
    if function is not None:
        try:
            returned = function()
        except PlaitError:
            raise
        except Exception as error:
            what = f"--callbacks {name} raised {in_a_line(error)}"
            raise PlaitError(Problem("U011", what, where=user_line(error))) from error
        made += checked(returned, f"--callbacks {name}")
    mode, metric, patience = best
    if steps is not None:
        made.append(Profile(*steps))
    if export[0] is not None:
        made.append(ExportWeights(export[0], export[1]))
    if patience is not None:
        made.append(EarlyStopping(metric, patience, mode))
    return [*made, BestCheckpoint(metric, mode)] if metric else made
