"""The job: what to train. It knows nothing of devices, and it alone decides the result.

A job is named ``path/to/job.py`` or ``path/to/job.py:name``: a function (default `job`) whose annotated arguments
become ``--job.depth 8`` and that returns a `Job`. Loading it runs the file: a job is Python, and Python is code.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from plait.errors import PlaitError, Problem, did_you_mean


@dataclass(frozen=True)
class Evaluate:
    """What to measure on held-out data, exactly: every sample once, whatever the number of ranks.

    `metrics(outputs, targets)` returns a dict of tensors with one value per sample (or per token); what is reported
    is the mean over all values of the whole data set. `every` is in steps; the end of a run always evaluates.
    """

    data: Callable[[], Any]
    metrics: Callable[[Any, Any], dict[str, Any]]
    every: int = 0


@dataclass(frozen=True)
class Job:
    """What to train, written for one device.

    The four promises a job can count on under every plan: the loss is a weighted mean over the *global* batch, the
    sample order is a pure function of (seed, step), randomness is keyed by (seed, step, place in the model, global
    element index), and the clock is samples seen.
    """

    model: Callable[[], Any]
    """-> any `nn.Module`, with the initial weights its constructor draws."""
    loss: Callable[[Any, Any], Any]
    """(outputs, targets) -> scalar: the mean over `weight(targets)` of the samples it is given."""
    data: Callable[[], Any]
    """-> len() and [i] -> (inputs, targets); or an iterable of such pairs, best with state_dict/load_state_dict."""
    optimizer: Callable[[list[Any]], Any]
    """list of parameters -> a torch optimizer."""
    batch: int
    """Samples per optimizer step over ALL devices, under every plan."""
    steps: int
    """Optimizer steps of the whole job."""
    weight: Callable[[Any], Any] | None = None
    """targets -> what the mean in `loss` is over, e.g. tokens that count. Default: the number of samples."""
    schedule: Callable[[int], float] | None = None
    """Samples seen before the step -> factor on the learning rate of every parameter group."""
    clip: float | None = None
    """Largest global gradient norm."""
    seed: int = 0
    """Of initial weights, sample order, augmentation and dropout."""
    evaluate: Evaluate | None = None
    """What to measure on held-out data."""

    def __post_init__(self) -> None:
        problems = [*_wrong_fields(self)]
        if problems:
            raise PlaitError(problems)


def _wrong_fields(job: Job):
    for field in fields(job):
        value = getattr(job, field.name)
        optional = field.default is None
        expected = None
        if field.name in ("model", "loss", "data", "optimizer", "weight", "schedule"):
            if not callable(value) and not (optional and value is None):
                expected = "a function, for example a lambda"
        elif field.name in ("batch", "steps"):
            if type(value) is not int or value < 1:
                expected = "a whole number ≥ 1"
        elif field.name == "seed":
            if type(value) is not int or not 0 <= value < 2**63:
                expected = "a whole number from 0 to 2⁶³ − 1"
        elif field.name == "clip":
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                expected = "a number > 0, or None"
        elif value is not None and not isinstance(value, Evaluate):
            expected = "a plait.Evaluate, or None"
        if expected:
            yield Problem("J004", f"Job({field.name}={value!r}) is not {expected}", fix=(f"{field.name}={expected}",))


def load_job(name: str, arguments: dict[str, str] | None = None) -> Job:
    """The `Job` that a name like ``path/job.py:name`` stands for, its function called with the given arguments.

    Raises `PlaitError` J001 to J005, with the user's own file and line when their code raised.
    """
    path, _, function = name.partition(":")
    function = function or "job"
    file = Path(path)
    if not file.is_file():
        near = sorted(str(p) for p in (file.parent if file.parent.is_dir() else Path()).glob("*.py"))[:3]
        fixes = tuple(near) or ("path/to/job.py",)
        raise PlaitError(Problem("J001", f"there is no job file {path}", why=f"looked in {Path.cwd()}", fix=fixes))
    module = _execute(file.resolve())
    make = getattr(module, function, None)
    if not callable(make):
        known = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        hint = did_you_mean(function, known) if known else "define  def job() -> plait.Job"
        raise PlaitError(Problem("J002", f"{path} has no function `{function}`        {hint}", where=path))
    given = _arguments(make, arguments or {}, path)
    try:
        job = make(**given)
    except PlaitError:
        raise
    except Exception as error:
        raise PlaitError(Problem("J003", f"the job raised {_named(error)}", where=user_line(error))) from error
    if not isinstance(job, Job):
        raise PlaitError(
            Problem(
                "J003",
                f"`{function}` returned {type(job).__name__}, not a plait.Job",
                where=path,
                fix=("return plait.Job(…)",),
            )
        )
    return job


def _execute(file: Path) -> Any:
    """Import the file under its own name, with its directory importable, as `python file.py` would."""
    module_name = f"plait_job_{file.stem}"
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except PlaitError:
        raise
    except (Exception, SystemExit) as error:
        raise PlaitError(
            Problem("J003", f"importing the job raised {_named(error)}", where=user_line(error) or str(file))
        ) from error
    return module


def _arguments(make: Callable[..., Any], given: dict[str, str], path: str) -> dict[str, Any]:
    parameters = inspect.signature(make).parameters
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, text in given.items():
        key = name.replace("-", "_")
        if key not in parameters:
            known = [f"--job.{p}" for p in parameters]
            hint = did_you_mean(f"--job.{name}", known) if known else "the job takes no arguments"
            problems.append(Problem("J005", f"unknown argument  --job.{name}        {hint}", where=path))
            continue
        parameter = parameters[key]
        kind = parameter.annotation
        if not isinstance(kind, type) or kind is inspect.Parameter.empty:
            kind = type(parameter.default) if parameter.default not in (None, inspect.Parameter.empty) else str
        try:
            values[key] = _convert(text, kind)
        except ValueError:
            problems.append(Problem("J005", f"--job.{name} {text}        expected {kind.__name__}", where=path))
    missing = [
        n for n, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    problems += [
        Problem(
            "J005", f"--job.{n} is needed: the job's argument `{n}` has no default", where=path, fix=(f"--job.{n} …",)
        )
        for n in missing
        if n not in values and n not in given
    ]
    if problems:
        raise PlaitError(problems)
    return values


def _convert(text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise ValueError(text)
        return text.lower() in ("true", "1", "yes")
    return kind(text)


def user_line(
    error: BaseException, skip: Sequence[str] = ("/site-packages/", "/plait/", "/lib/python", "<frozen")
) -> str:
    """`file:line in function` of the innermost frame that is the user's own code, or an empty string."""
    found = ""
    trace = error.__traceback__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    while trace is not None:
        frame = trace.tb_frame
        if not any(part in frame.f_code.co_filename for part in skip):
            found = f"{frame.f_code.co_filename}:{trace.tb_lineno} in {frame.f_code.co_name}"
        trace = trace.tb_next
    return found


def _named(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
