"""The job: what to train. It knows nothing of devices, and it alone decides the result.

A job is named ``path/to/job.py`` or ``path/to/job.py:name``: a function (default `job`) whose annotated arguments
become ``--job.depth 8`` and that returns a `Job`. Loading it runs the file: a job is Python, and Python is code.
"""

import difflib
import importlib.util
import inspect
import os
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from math import inf
from pathlib import Path
from traceback import walk_tb
from types import NoneType, UnionType
from typing import Any, NoReturn, Union, cast, get_args, get_origin

from plait.config import hugging_face
from plait.config.errors import PlaitError, Problem, did_you_mean, in_a_line
from plait.config.library import hush_imports, is_library, is_user_module
from plait.config.phases import JointLoss, JointOptimizer, Phase, joint

SLICES = ("column", "row", "vocabulary", "whole")
"""What `Job.tensor` can say of a module."""


def is_user_class(kind: type) -> bool:
    """Whether a class is the user's own code, and of no library."""
    return is_user_module(kind.__module__)


MAKERS = {"model": "forward", "data": "__getitem__", "optimizer": "param_groups"}
"""Fields of `Job` that make something, and what the thing itself has: an object in place of what makes it."""
_OF_PHASES = cast(Any, None)  # a job with phases has no loss and no optimizer besides theirs
RESULTS = {"loss": "a loss", "metrics": "metrics", "weight": "a weight", "schedule": "a factor"}
BUILTINS = {kind.__name__: kind for kind in (bool, int, float, str)}


@dataclass(frozen=True)
class Evaluate:
    """What to measure on held-out data, exactly: every sample once, whatever the number of ranks.

    `metrics(outputs, targets)` returns a dict of tensors with one value per sample (or per token); what is reported
    is the mean over all values of the whole data set. `every` is in steps; the end of a run always evaluates.
    """

    data: Callable[[], Any]
    metrics: Callable[[Any, Any], dict[str, Any]]
    every: int = 0

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class EMA:
    """The exponential moving average of the weights (Polyak averaging), kept beside them and used to evaluate.

    After every `every`-th optimizer step that changed the weights, average = decay × average + (1 − decay) × weights; the
    first time it is a copy of the weights. With `warmup`, the k-th time (from 1) the decay is at most k / (9 + k). It is of
    parameters; buffers are the model's own, as in `torch.optim.swa_utils.AveragedModel`.
    """

    decay: float
    every: int = 1
    warmup: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.every < 1:
            raise PlaitError(Problem("J004", f"EMA(every={self.every}) is not a whole number ≥ 1", fix=("every=1",)))


@dataclass(frozen=True)
class TokenBudget:
    """How many tokens a step has: it takes samples in their order as long as they fit, and at most `Job.batch` of them.

    `lengths()` returns the tokens of each sample of the data, by its index. A sample longer than the budget is a step of its
    own. `padded`: what counts is the longest sample × the number of samples, as where all are padded to the longest; else
    the sum of the lengths.
    """

    tokens: int
    lengths: Callable[[], Any]
    padded: bool = True

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, written for one device.

    The four promises a job can count on under every plan: the loss is a weighted mean over the *global* batch, the
    sample order is a pure function of (seed, step), randomness is keyed by (seed, step, place in the model, global
    element index), and the clock is samples seen.
    """

    model: Callable[[], Any]
    """-> any `nn.Module`, with the initial weights its constructor draws."""
    loss: Callable[[Any, Any], Any] = _OF_PHASES
    """(outputs, targets) -> scalar: the mean over `weight(targets)` of the samples it is given. Not with `phases`."""
    data: Callable[[], Any]
    """-> len() and [i] -> (inputs, targets); or an iterable of such pairs, best with state_dict/load_state_dict."""
    optimizer: Callable[[list[Any]], Any] = _OF_PHASES
    """list of parameters -> a torch optimizer. Not with `phases`."""
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
    stages: tuple[str, ...] | None = None
    """Names of the first unit of each pipeline stage but the first, instead of the cuts that are found."""
    units: tuple[str, ...] | None = None
    """Names of the modules to split by, such as "layers.*", when the automatic choice is not wanted."""
    tensor: Mapping[str, str] | None = None
    """Pattern of module names -> "column", "row", "vocabulary" or "whole": slices instead of those that are found."""
    order: Callable[[int, int, int], Any] | None = None
    """(seed, epoch, length of the data) -> the indices of an epoch's samples, in order; `plait.orders` has some. Default: a
    permutation. An index may come up often or never, so an epoch may be longer or shorter than the data."""
    token_budget: TokenBudget | None = None
    """How many tokens a step has; `batch` is then the largest number of samples of a step."""
    ema: EMA | None = None
    """The moving average of the weights, which evaluation uses."""
    weights: str | None = None
    """What training starts from instead of the weights that `model` draws: a safetensors file, a Hugging Face folder or a
    checkpoint. Each rank reads its own parts."""
    phases: tuple[Phase, ...] | None = None
    """Several losses and optimizers: the parts of a step, in their order (`config/phases.py`). What stands for them as one loss and
    one optimizer is put into these fields."""

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.phases is not None:
            for name, value in joint(self.model, self.phases).items():
                object.__setattr__(self, name, value)


def _check_fields(record: "Job | Evaluate | EMA | TokenBudget") -> None:
    """J004 of all fields that are wrong."""
    problems = [*_wrong_fields(record)]
    if isinstance(record, Job):
        problems += _phases_or_one_loss(record)
    if problems:
        raise PlaitError(problems)


def _phases_or_one_loss(job: Job) -> Iterator[Problem]:
    if job.phases is None:
        for name in ("loss", "optimizer"):
            if getattr(job, name) is None:
                fix = (
                    f"{name}=lambda {'outputs, targets' if name == 'loss' else 'parameters'}: …",
                    "phases=(plait.Phase(…), …)    for several losses and optimizers",
                )
                yield Problem("J004", f"Job({name}=None): a job without phases needs {'a loss' if name == 'loss' else 'an optimizer'}", fix=fix)
    elif not isinstance(job.loss, NoneType | JointLoss) or not isinstance(job.optimizer, NoneType | JointOptimizer):
        what, why = "Job(phases=…) excludes Job(loss=…, optimizer=…)", "each phase has its own loss and optimizer"
        yield Problem("J004", what, why=why, fix=("leave out Job(loss=…, optimizer=…)",))


def _phases(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(phase, Phase) for phase in value)


def _whole(value: object, least: int, most: float = inf) -> bool:
    return type(value) is int and least <= value <= most


def _names(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(name, str) and name for name in value)


def _slices(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(k, str) and v in SLICES for k, v in value.items())


VALUES: dict[str, tuple[Callable[[object], bool], str]] = {
    "batch": (lambda v: _whole(v, 1), "a whole number ≥ 1"),
    "steps": (lambda v: _whole(v, 1), "a whole number ≥ 1"),
    "every": (lambda v: _whole(v, 0), "a whole number ≥ 0"),
    "seed": (lambda v: _whole(v, 0, 2**63 - 1), "a whole number from 0 to 2⁶³ − 1"),
    "clip": (lambda v: isinstance(v, (int, float)) and v > 0, "a number > 0, or None"),
    "units": (_names, 'a tuple of names of modules, such as ("layers.*",), or None'),
    "stages": (_names, 'a tuple of names of modules, such as ("layers.*",), or None'),
    "tensor": (
        _slices,
        f'a dict of names of modules and one of {", ".join(SLICES)}, such as {{"*.q": "column"}}, or None',
    ),
    "evaluate": (lambda v: isinstance(v, Evaluate), "a plait.Evaluate, or None"),
    "tokens": (lambda v: _whole(v, 1), "a whole number ≥ 1"),
    "token_budget": (lambda v: isinstance(v, TokenBudget), "a plait.TokenBudget, or None"),
    "ema": (lambda v: isinstance(v, EMA), "a plait.EMA, or None"),
    "decay": (lambda v: isinstance(v, (int, float)) and 0 <= v <= 1, "a number from 0 to 1"),
    "warmup": (lambda v: isinstance(v, bool), "True or False"),
    "padded": (lambda v: isinstance(v, bool), "True or False"),
    "weights": (lambda v: isinstance(v, (str, os.PathLike)), "a path, or None"),
    "phases": (_phases, "a tuple of plait.Phase, or None"),
}
"""Fields that are no functions: which values are right, and what to say of others."""


def _wrong_fields(record: "Job | Evaluate | EMA | TokenBudget") -> Iterator[Problem]:
    for field in fields(record):
        name, value, expected = field.name, getattr(record, field.name), None
        if value is None and field.default is None:
            continue
        if name in VALUES:
            right, expected = VALUES[name]
            expected = None if right(value) else expected
        elif name in MAKERS and hasattr(value, MAKERS[name]) and not isinstance(value, type):
            expected = f"a function that makes one: lambda{' parameters' * (name == 'optimizer')}: …"
        elif not callable(value):
            expected = "a function, for example a lambda"
        elif name in RESULTS and isinstance(value, type) and (hasattr(value, "forward") or hasattr(value, "step")):
            expected = f"a function; it is a class, and calling it makes an object instead of {RESULTS[name]}"
        if expected:
            plain = value is None or isinstance(value, (bool, int, float, str, tuple, list, dict))
            shown = reprlib.repr(value) if plain else getattr(value, "__name__", f"{type(value).__name__}(…)")
            what = f"{type(record).__name__}({name}={shown}) is not {expected}"
            yield Problem("J004", what, fix=(f"{name}={expected}",))


Make = Callable[[list[Any]], Any]
"""Makes an optimizer of parameters."""


def optimized(job: Job, changed: Callable[[Make], Make]) -> Job:
    """The job with each of its optimizers made otherwise. `changed` is given what makes one, and returns what does."""
    if job.phases is None:
        return replace(job, optimizer=changed(job.optimizer))
    phases = tuple(replace(phase, optimizer=changed(phase.optimizer)) for phase in job.phases)
    return replace(job, phases=phases)


def load_job(name: str, arguments: dict[str, str] | None = None) -> Job:
    """The `Job` that a name like ``path/job.py:name`` stands for, its function called with the given arguments.

    ``hf:FOLDER`` is a job made of a Hugging Face config. Raises `PlaitError` J001 to J005, with the user's own file and line when
    their code raised, and those of `hugging_face.build_job_fields`.
    """
    if name.startswith(hugging_face.PREFIX):
        return _of_config(name, arguments or {})
    path, _, function = name.partition(":")
    function = function or "job"
    module = execute(job_file(name).resolve())
    make = getattr(module, function, None)
    signature = _signature(make) if callable(make) else None
    if make is None or signature is None:
        known = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        hint = did_you_mean(function, known) if known else "define  def job() -> plait.Job"
        raise PlaitError(Problem("J002", f"{path} has no function `{function}`        {hint}", where=path))
    bound = _arguments(signature, arguments or {}, path)
    return made_by(lambda: make(*bound.args, **bound.kwargs), function, path)


def job_file(name: str) -> Path:
    """The file of a name like ``path/to/job.py:name``. J001 when there is none."""
    path = name.partition(":")[0]
    file = Path(path)
    if not os.path.isfile(file):
        there = sorted(str(p) for p in (file.parent if os.path.isdir(file.parent) else Path()).glob("*.py"))
        near = difflib.get_close_matches(str(file), there, n=3, cutoff=0.5)
        fixes = tuple(near or there[:3]) or ("path/to/job.py",)
        if os.path.isfile(file / hugging_face.CONFIG):
            fixes = (f"{hugging_face.PREFIX}{path}    a job made of its {hugging_face.CONFIG}",)
        raise PlaitError(Problem("J001", f"the job file {path} does not exist", why=f"looked in {Path.cwd()}", fix=fixes))
    return file


def _of_config(name: str, arguments: dict[str, str]) -> Job:
    """The `Job` of ``hf:FOLDER``, whose arguments are those of `build_job_fields`."""
    make = partial(hugging_face.build_job_fields, name.removeprefix(hugging_face.PREFIX))
    bound = _arguments(inspect.signature(make), arguments, name)
    return Job(**make(*bound.args, **bound.kwargs))


def made_by(make: Callable[[], object], function: str, where: str = "") -> Job:
    """The `Job` that a function of the user's makes. J003, with their own file and line when it raised."""
    try:
        job = make()
    except PlaitError:
        raise
    except (Exception, SystemExit) as error:
        raise PlaitError(Problem("J003", f"the job raised {in_a_line(error)}", where=user_line(error))) from error
    if not isinstance(job, Job):
        what = f"`{function}` returned {type(job).__name__}, not a plait.Job"
        raise PlaitError(Problem("J003", what, where=where, fix=("return plait.Job(…)",)))
    return job


JOB = "plait_job_"
"""What the module names of imported job files begin with."""


def execute(file: Path) -> Any:
    """Import the file under its own name, with its directory importable, as `python file.py` would."""
    module_name = f"{JOB}{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        what = f"{file} is not a Python file: its name does not end in .py"
        raise PlaitError(Problem("J001", what, fix=("path/to/job.py",)))
    module = importlib.util.module_from_spec(spec)
    vars(module)["folder_is_ours"] = _enter(str(file.parent))
    sys.modules[module_name] = module
    hush_imports()
    try:
        with _no_silent_exit():
            spec.loader.exec_module(module)
    except PlaitError:
        raise
    except (Exception, SystemExit) as error:
        what = f"importing the job raised {in_a_line(error)}"
        raise PlaitError(Problem("J003", what, where=user_line(error) or str(file))) from error
    return module


@contextmanager
def _no_silent_exit() -> Iterator[None]:
    """Meanwhile `os._exit`, which would end the command with whatever exit code the job says, raises in this process."""
    leave, here = os._exit, os.getpid()

    def raising(status: int) -> NoReturn:
        if os.getpid() != here or os._exit is not raising:
            leave(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = raising
    try:
        yield
    finally:
        os._exit = leave


def _enter(folder: str) -> bool:
    """Make a job's directory importable instead of another job's, whose modules may have the same names. False where it was
    before any job was imported: then it stays when another job comes."""
    ours = {os.path.dirname(m.__file__ or "") for name, m in sys.modules.items() if name.startswith(JOB) and m.folder_is_ours}
    for other in ours - {folder}:
        sys.path[:] = [path for path in sys.path if path != other]
        for name, module in [*sys.modules.items()]:
            path = getattr(module, "__file__", None)
            if path and os.path.dirname(path) == other and not name.startswith(JOB):
                del sys.modules[name]
    if folder in sys.path and folder not in ours:
        return False
    sys.path[:] = [folder, *(path for path in sys.path if path != folder)]
    return True


def _signature(make: Callable[..., Any]) -> inspect.Signature | None:
    """With annotations written as text evaluated, unless one names what exists for type checkers only."""
    for evaluated in (True, False):
        try:
            return inspect.signature(make, eval_str=evaluated)
        except Exception:  # evaluating an annotation can raise anything
            continue
    return None


def _arguments(signature: inspect.Signature, texts: dict[str, str], path: str) -> inspect.BoundArguments:
    parameters = {n: p for n, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    rest = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), None)
    values, others = dict[str, Any](), dict[str, str]()
    problems: list[Problem] = []
    for name, text in texts.items():
        key = name.replace("-", "_")
        if key in parameters:
            kind, optional = _kind(parameters[key])
            try:
                values[key] = None if optional and text.lower() == "none" else _convert(text, kind)
            except Exception:  # a type may raise anything of a str
                values[key] = None
                problems.append(Problem("J005", f"--job.{name} {text}        expected {kind.__name__}", where=path))
        elif rest is not None:
            others[key] = text
        else:
            known = [f"--job.{p}" for p in parameters]
            hint = did_you_mean(f"--job.{name}", known) if known else "the job takes no arguments"
            problems.append(Problem("J005", f"unknown argument  --job.{name}        {hint}", where=path))
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in values:
            what = f"--job.{name} is missing: the job's argument `{name}` has no default"
            problems.append(Problem("J005", what, where=path, fix=(f"--job.{name} …",)))
    if problems:
        raise PlaitError(problems)
    bound = signature.bind_partial()
    bound.arguments.update(values | ({rest: others} if rest is not None else {}))
    bound.apply_defaults()
    return bound


def _kind(parameter: inspect.Parameter) -> tuple[type, bool]:
    """The type an argument's text becomes, and whether `none` stands for None."""
    kind, default = parameter.annotation, parameter.default
    kind = BUILTINS.get(kind, kind) if isinstance(kind, str) else kind
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else ()
    optional = NoneType in members
    if optional and len(members) == 2:
        kind = next(member for member in members if member is not NoneType)
    if not isinstance(kind, type) or kind is parameter.empty or kind is Any:
        kind = str if default is None or default is parameter.empty else type(default)
    return kind, optional


def _convert(text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise ValueError(text)
        return text.lower() in ("true", "1", "yes")
    return kind(text)


def user_line(error: BaseException) -> str:
    """`file:line in function` of the innermost frame that is the user's own code, or an empty string."""
    if isinstance(error, SyntaxError) and error.filename and os.path.isfile(error.filename):
        return f"{error.filename}:{error.lineno}"
    place = ""
    for frame, line in walk_tb(error.__traceback__):
        code = frame.f_code
        if not code.co_filename.startswith("<") and not is_library(code.co_filename):
            place = f"{code.co_filename}:{line} in {code.co_name}"
    return place
