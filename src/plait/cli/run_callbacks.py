"""The options of `plait train` for callbacks: the user's own, early stopping, the best checkpoint, traces of steps."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.config.command_options import TrainOptions
from plait.config.errors import PlaitError, Problem, did_you_mean
from plait.config.plan import Plan

if TYPE_CHECKING:
    from plait.engine.callbacks import Callback


def wanted(options: TrainOptions) -> "Callable[[], list[Callback]] | None":
    """What makes the callbacks on a rank; None without any. U011, J003."""
    function = _function(options.callbacks) if options.callbacks else None
    if function is None and not (options.best or options.profile or options.export_every):
        return None
    return partial(_made, function, options)


def problems(options: TrainOptions) -> list[Problem]:
    """U002 for values that these options cannot have."""
    found, (mode, _, metric) = list[Problem](), (options.best or "").partition(":")
    if options.best and (mode not in ("min", "max") or not metric):
        found.append(Problem("U002", f"--best {options.best} is not a mode and a metric", fix=("--best max:accuracy",)))
    if options.early_stop is not None and options.early_stop < 1:
        what = f"--early-stop {options.early_stop} is not a number of evaluations ≥ 1"
        found.append(Problem("U002", what, fix=("--early-stop 5",)))
    if options.early_stop is not None and not options.best:
        why, fix = "it counts evaluations in which the metric of --best is not better", ("--best min:loss",)
        found.append(Problem("U002", f"--early-stop {options.early_stop} needs --best", why=why, fix=fix))
    if options.profile and not _steps(options.profile):
        what = f"--profile {options.profile} is not a first and a last step, counted from 1"
        found.append(Problem("U002", what, fix=("--profile 10:13",)))
    return found


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


def refuse(options: TrainOptions, plan: Plan) -> None:
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


def _steps(text: str) -> tuple[int, ...]:
    """The first and the last step of 10:13; none of what is no such text."""
    first, _, last = text.partition(":")
    right = first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)
    return (int(first), int(last)) if right else ()


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


def _made(function: Callable[[], Any] | None, options: TrainOptions) -> "list[Callback]":
    """The callbacks: the user's first, the best checkpoint last. U011."""
    from plait.config.errors import in_a_line
    from plait.config.job import user_line
    from plait.engine.callbacks import BestCheckpoint, Callback, EarlyStopping, Profile, checked
    from plait.integrations.export_weights import ExportWeights

    made, name = list[Callback](), options.callbacks
    if function is not None:
        try:
            returned = function()
        except PlaitError:
            raise
        except Exception as error:
            what = f"--callbacks {name} raised {in_a_line(error)}"
            raise PlaitError(Problem("U011", what, where=user_line(error))) from error
        made += checked(returned, f"--callbacks {name}")
    mode, _, metric = (options.best or "").partition(":")
    if options.profile:
        made.append(Profile(*_steps(options.profile)))
    if options.export_every is not None:
        made.append(ExportWeights(options.export_every, options.export_to))
    if options.early_stop is not None:
        made.append(EarlyStopping(metric, options.early_stop, mode))
    return [*made, BestCheckpoint(metric, mode)] if metric else made
