"""The job: what to train. It is independent of devices, and it alone determines the training result.

A job is named ``path/to/job.py`` or ``path/to/job.py:name``: a function (default `job`) that returns a `Job`, and whose annotated
arguments become ``--job.depth 8``. Loading a job runs the file as Python code.
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
from plait.config.errors import PlaitError, Problem, did_you_mean, summarize_error
from plait.config.library import is_library, is_user_module, silence_imports
from plait.config.phases import JointLoss, JointOptimizer, Phase, build_joint_fields

SLICE_KINDS = ("column", "row", "vocabulary", "whole")
"""Values of `Job.tensor`."""


def is_user_class(kind: type) -> bool:
    """Return True if the class is defined in the user's code."""
    return is_user_module(kind.__module__)


MAKERS = {"model": "forward", "data": "__getitem__", "optimizer": "param_groups"}
"""Fields of `Job` that are functions, with an attribute that identifies an object given instead of a function."""
_OF_PHASES = cast(Any, None)  # a job with phases has only the losses and optimizers of the phases
RESULT_NAMES = {"loss": "a loss", "metrics": "metrics", "weight": "a weight", "schedule": "a factor"}
BUILTINS = {kind.__name__: kind for kind in (bool, int, float, str)}


@dataclass(frozen=True)
class Evaluate:
    """Evaluation on held-out data. It is exact: every sample counts once, for any number of ranks.

    `metrics(outputs, targets)` returns a dict of tensors with one value per sample (or per token). The reported metric is the mean over
    all values of the data set. `every` is in steps; the end of a run always evaluates.
    """

    data: Callable[[], Any]
    metrics: Callable[[Any, Any], dict[str, Any]]
    every: int = 0

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class EMA:
    """The exponential moving average of the weights (Polyak averaging), which is used for evaluation.

    After every `every`-th optimizer step that changed the weights, average = decay × average + (1 − decay) × weights. The first time, it
    is a copy of the weights. With `warmup`, the decay of the k-th update (from 1) is at most k / (9 + k). The average covers parameters;
    buffers are those of the model, as in `torch.optim.swa_utils.AveragedModel`.
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
    """Maximum number of tokens per step. A step takes samples in order while they fit, and at most `Job.batch` of them.

    `lengths()` returns the number of tokens of each sample, by index. A sample longer than the budget is a step by itself. With `padded`,
    the tokens of a step are the longest sample × the number of samples, as if all are padded to the longest; else the sum of the lengths.
    """

    tokens: int
    lengths: Callable[[], Any]
    padded: bool = True

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Job:
    """The training job, written for one device.

    Every plan guarantees these properties. The loss is a weighted mean over the *global* batch. The sample order is a pure function of
    (seed, step). Random numbers are keyed by (seed, step, place in the model, global element index). Schedules count samples.
    """

    model: Callable[[], Any]
    """() -> an `nn.Module`, with the initial weights that its constructor draws."""
    loss: Callable[[Any, Any], Any] = _OF_PHASES
    """(outputs, targets) -> scalar: the mean over `weight(targets)` of the given samples. Not with `phases`."""
    data: Callable[[], Any]
    """() -> an object with len() and [i] -> (inputs, targets); or an iterable of such pairs, best with state_dict/load_state_dict."""
    optimizer: Callable[[list[Any]], Any] = _OF_PHASES
    """(parameters) -> a torch optimizer. Not with `phases`."""
    batch: int
    """Samples per optimizer step over ALL devices, under every plan."""
    steps: int
    """Number of optimizer steps."""
    weight: Callable[[Any], Any] | None = None
    """(targets) -> the weight that `loss` averages over, such as the number of tokens that count. Default: the number of samples."""
    schedule: Callable[[int], float] | None = None
    """(samples seen before the step) -> factor on the learning rate of every parameter group."""
    clip: float | None = None
    """Maximum norm of the global gradient."""
    seed: int = 0
    """Seed of initial weights, sample order, augmentation and dropout."""
    evaluate: Evaluate | None = None
    """Evaluation on held-out data."""
    stages: tuple[str, ...] | None = None
    """Names of the first unit of each pipeline stage except the first. Default: chosen automatically."""
    units: tuple[str, ...] | None = None
    """Names of the modules that are units, such as "layers.*". Default: chosen automatically."""
    tensor: Mapping[str, str] | None = None
    """Pattern of module names -> "column", "row", "vocabulary" or "whole": how tp shards them. Default: chosen automatically."""
    order: Callable[[int, int, int], Any] | None = None
    """(seed, epoch, length of the data) -> the indices of an epoch's samples, in order; see `plait.orders`.

    Default: a permutation. An index may occur several times or never, so an epoch may be longer or shorter than the data.
    """
    token_budget: TokenBudget | None = None
    """Maximum tokens per step; `batch` is then the maximum number of samples per step."""
    ema: EMA | None = None
    """The moving average of the weights, which evaluation uses."""
    weights: str | None = None
    """Initial weights instead of those that `model` draws: a safetensors file, a Hugging Face folder or a checkpoint.

    Each rank reads only its parts.
    """
    phases: tuple[Phase, ...] | None = None
    """Several losses and optimizers: the parts of a step, in order (`config/phases.py`).

    `loss` and `optimizer` are then set to a joint loss and a joint optimizer.
    """

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.phases is not None:
            for name, value in build_joint_fields(self.model, self.phases).items():
                object.__setattr__(self, name, value)


def _check_fields(record: "Job | Evaluate | EMA | TokenBudget") -> None:
    """Raise J004 for all invalid fields."""
    problems = [*_find_wrong_fields(record)]
    if isinstance(record, Job):
        problems += _find_phase_problems(record)
    if problems:
        raise PlaitError(problems)


def _find_phase_problems(job: Job) -> Iterator[Problem]:
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


def _is_phases(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(phase, Phase) for phase in value)


def _is_integer(value: object, least: int, most: float = inf) -> bool:
    return type(value) is int and least <= value <= most


def _is_names(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(name, str) and name for name in value)


def _is_slices(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(k, str) and v in SLICE_KINDS for k, v in value.items())


FIELD_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "batch": (lambda v: _is_integer(v, 1), "a whole number ≥ 1"),
    "steps": (lambda v: _is_integer(v, 1), "a whole number ≥ 1"),
    "every": (lambda v: _is_integer(v, 0), "a whole number ≥ 0"),
    "seed": (lambda v: _is_integer(v, 0, 2**63 - 1), "a whole number from 0 to 2⁶³ − 1"),
    "clip": (lambda v: isinstance(v, (int, float)) and v > 0, "a number > 0, or None"),
    "units": (_is_names, 'a tuple of names of modules, such as ("layers.*",), or None'),
    "stages": (_is_names, 'a tuple of names of modules, such as ("layers.*",), or None'),
    "tensor": (
        _is_slices,
        f'a dict of names of modules and one of {", ".join(SLICE_KINDS)}, such as {{"*.q": "column"}}, or None',
    ),
    "evaluate": (lambda v: isinstance(v, Evaluate), "a plait.Evaluate, or None"),
    "tokens": (lambda v: _is_integer(v, 1), "a whole number ≥ 1"),
    "token_budget": (lambda v: isinstance(v, TokenBudget), "a plait.TokenBudget, or None"),
    "ema": (lambda v: isinstance(v, EMA), "a plait.EMA, or None"),
    "decay": (lambda v: isinstance(v, (int, float)) and 0 <= v <= 1, "a number from 0 to 1"),
    "warmup": (lambda v: isinstance(v, bool), "True or False"),
    "padded": (lambda v: isinstance(v, bool), "True or False"),
    "weights": (lambda v: isinstance(v, (str, os.PathLike)), "a path, or None"),
    "phases": (_is_phases, "a tuple of plait.Phase, or None"),
}
"""Fields that are not functions: a test of the value, and the description of valid values."""


def _find_wrong_fields(record: "Job | Evaluate | EMA | TokenBudget") -> Iterator[Problem]:
    for field in fields(record):
        name, value, expected = field.name, getattr(record, field.name), None
        if value is None and field.default is None:
            continue
        if name in FIELD_CHECKS:
            right, expected = FIELD_CHECKS[name]
            expected = None if right(value) else expected
        elif name in MAKERS and hasattr(value, MAKERS[name]) and not isinstance(value, type):
            expected = f"a function that makes one: lambda{' parameters' * (name == 'optimizer')}: …"
        elif not callable(value):
            expected = "a function, for example a lambda"
        elif name in RESULT_NAMES and isinstance(value, type) and (hasattr(value, "forward") or hasattr(value, "step")):
            expected = f"a function; it is a class, and calling it makes an object instead of {RESULT_NAMES[name]}"
        if expected:
            plain = value is None or isinstance(value, (bool, int, float, str, tuple, list, dict))
            shown = reprlib.repr(value) if plain else getattr(value, "__name__", f"{type(value).__name__}(…)")
            what = f"{type(record).__name__}({name}={shown}) is not {expected}"
            yield Problem("J004", what, fix=(f"{name}={expected}",))


MakeOptimizer = Callable[[list[Any]], Any]
"""Makes an optimizer from parameters."""


def replace_optimizer(job: Job, changed: Callable[[MakeOptimizer], MakeOptimizer]) -> Job:
    """Replace every function of the job that makes an optimizer by `changed` of it."""
    if job.phases is None:
        return replace(job, optimizer=changed(job.optimizer))
    phases = tuple(replace(phase, optimizer=changed(phase.optimizer)) for phase in job.phases)
    return replace(job, phases=phases)


def load_job(name: str, arguments: dict[str, str] | None = None) -> Job:
    """Load the `Job` of a name like ``path/job.py:name``, and call its function with the given arguments.

    ``hf:FOLDER`` is a job made from a Hugging Face config. Raises J001 to J005, with the user's file and line if their code raised, and
    the errors of `hugging_face.build_job_fields`.
    """
    if name.startswith(hugging_face.PREFIX):
        return _load_config_job(name, arguments or {})
    path, _, function = name.partition(":")
    function = function or "job"
    module = import_job_file(find_job_file(name).resolve())
    make = getattr(module, function, None)
    signature = _read_signature(make) if callable(make) else None
    if make is None or signature is None:
        known = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        hint = did_you_mean(function, known) if known else "define  def job() -> plait.Job"
        raise PlaitError(Problem("J002", f"{path} has no function `{function}`        {hint}", where=path))
    bound = _bind_arguments(signature, arguments or {}, path)
    return make_job(lambda: make(*bound.args, **bound.kwargs), function, path)


def find_job_file(name: str) -> Path:
    """Find the file of a name like ``path/to/job.py:name``. Raises J001 if it does not exist."""
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


def _load_config_job(name: str, arguments: dict[str, str]) -> Job:
    """Load the `Job` of ``hf:FOLDER``, whose arguments are those of `build_job_fields`."""
    make = partial(hugging_face.build_job_fields, name.removeprefix(hugging_face.PREFIX))
    bound = _bind_arguments(inspect.signature(make), arguments, name)
    return Job(**make(*bound.args, **bound.kwargs))


def make_job(make: Callable[[], object], function: str, where: str = "") -> Job:
    """Call the user's function, and return its `Job`. Raises J003, with the user's file and line if it raised."""
    try:
        job = make()
    except PlaitError:
        raise
    except (Exception, SystemExit) as error:
        raise PlaitError(Problem("J003", f"the job raised {summarize_error(error)}", where=find_user_line(error))) from error
    if not isinstance(job, Job):
        what = f"`{function}` returned {type(job).__name__}, not a plait.Job"
        raise PlaitError(Problem("J003", what, where=where, fix=("return plait.Job(…)",)))
    return job


MODULE_PREFIX = "plait_job_"
"""Prefix of the module names of imported job files."""


def import_job_file(file: Path) -> Any:
    """Import the file under its own name, with its directory importable, as `python file.py` does."""
    module_name = f"{MODULE_PREFIX}{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        what = f"{file} is not a Python file: its name does not end in .py"
        raise PlaitError(Problem("J001", what, fix=("path/to/job.py",)))
    module = importlib.util.module_from_spec(spec)
    vars(module)["folder_is_ours"] = _enter_folder(str(file.parent))
    sys.modules[module_name] = module
    silence_imports()
    try:
        with _catch_os_exit():
            spec.loader.exec_module(module)
    except PlaitError:
        raise
    except (Exception, SystemExit) as error:
        what = f"importing the job raised {summarize_error(error)}"
        raise PlaitError(Problem("J003", what, where=find_user_line(error) or str(file))) from error
    return module


@contextmanager
def _catch_os_exit() -> Iterator[None]:
    """Replace `os._exit` in this process by a function that raises. A job could otherwise end the command with any exit code."""
    leave, here = os._exit, os.getpid()

    def raise_exit(status: int) -> NoReturn:
        if os.getpid() != here or os._exit is not raise_exit:
            leave(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = raise_exit
    try:
        yield
    finally:
        os._exit = leave


def _enter_folder(folder: str) -> bool:
    """Make a job's directory importable, and remove the directory of a previous job, whose modules may have the same names.

    Returns False if the directory was importable before any job was imported. Then it stays importable for the next job.
    """
    ours = {os.path.dirname(m.__file__ or "") for name, m in sys.modules.items() if name.startswith(MODULE_PREFIX) and m.folder_is_ours}
    for other in ours - {folder}:
        sys.path[:] = [path for path in sys.path if path != other]
        for name, module in [*sys.modules.items()]:
            path = getattr(module, "__file__", None)
            if path and os.path.dirname(path) == other and not name.startswith(MODULE_PREFIX):
                del sys.modules[name]
    if folder in sys.path and folder not in ours:
        return False
    sys.path[:] = [folder, *(path for path in sys.path if path != folder)]
    return True


def _read_signature(make: Callable[..., Any]) -> inspect.Signature | None:
    """Read the signature and evaluate string annotations, unless one needs a name that exists only for type checkers."""
    for evaluated in (True, False):
        try:
            return inspect.signature(make, eval_str=evaluated)
        except Exception:  # evaluating an annotation can raise any exception
            continue
    return None


def _bind_arguments(signature: inspect.Signature, texts: dict[str, str], path: str) -> inspect.BoundArguments:
    parameters = {n: p for n, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    rest = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), None)
    values, others = dict[str, Any](), dict[str, str]()
    problems: list[Problem] = []
    for name, text in texts.items():
        key = name.replace("-", "_")
        if key in parameters:
            kind, optional = _resolve_kind(parameters[key])
            try:
                values[key] = None if optional and text.lower() == "none" else _convert_text(text, kind)
            except Exception:  # a type can raise any exception for a str
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


def _resolve_kind(parameter: inspect.Parameter) -> tuple[type, bool]:
    """Return the type of an argument, and True if `none` stands for None."""
    kind, default = parameter.annotation, parameter.default
    kind = BUILTINS.get(kind, kind) if isinstance(kind, str) else kind
    members = get_args(kind) if get_origin(kind) in (Union, UnionType) else ()
    optional = NoneType in members
    if optional and len(members) == 2:
        kind = next(member for member in members if member is not NoneType)
    if not isinstance(kind, type) or kind is parameter.empty or kind is Any:
        kind = str if default is None or default is parameter.empty else type(default)
    return kind, optional


def _convert_text(text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise ValueError(text)
        return text.lower() in ("true", "1", "yes")
    return kind(text)


def find_user_line(error: BaseException) -> str:
    """Return `file:line in function` of the innermost frame in the user's code, or an empty string."""
    if isinstance(error, SyntaxError) and error.filename and os.path.isfile(error.filename):
        return f"{error.filename}:{error.lineno}"
    place = ""
    for frame, line in walk_tb(error.__traceback__):
        code = frame.f_code
        if not code.co_filename.startswith("<") and not is_library(code.co_filename):
            place = f"{code.co_filename}:{line} in {code.co_name}"
    return place
