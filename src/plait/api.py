"""plait from Python: `plait.train(job, plan="dp=2")` in a script, a test or a notebook cell, and likewise verify, plan and sketch.

These functions do the same as the commands, in the calling process. Ranks are forked from it, so a job may be a value defined in the line
before, and none of it is pickled. The functions return the result that a command prints, and raise a `PlaitError` where a command exits
with an error. Afterwards the process has its former signal handlers, random generators and threads.

A process that has used CUDA, or in which torch has differentiated on a GPU, cannot be forked. Then a fresh process
(`launch/fresh_process.py`) starts the ranks.
"""

import contextlib
import dataclasses
import faulthandler
import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import torch
from msgspec import convert

from plait.cli import sketch as sketches
from plait.cli.console import Console
from plait.cli.learning import learn_corrections
from plait.cli.plan import search_plans
from plait.cli.plan_and_job import load_plan_and_job
from plait.cli.plan_options import resolve_machine
from plait.cli.train import launch_run
from plait.cli.train_options import build_train_request, combine_callbacks
from plait.cli.verify import check_step_count, verify_plan
from plait.config import former_names
from plait.config.command_options import (
    CommandOptions,
    Option,
    PlanOptions,
    SketchOptions,
    TrainOptions,
    VerifyOptions,
    list_options,
)
from plait.config.errors import DISK_FULL_ERRNOS, FAILED, PlaitError, Problem, did_you_mean, disk_full_problem
from plait.config.job import Job, load_job, make_job
from plait.config.plan import Plan
from plait.config.plan_question import check_plan_options, parse_pins
from plait.engine.callbacks import Callback
from plait.launch import fork, forkable, fresh_process, limits
from plait.launch.place import Place, is_launched_rank
from plait.launch.stopping import StopRequest
from plait.planner.answer import format_answer
from plait.planner.plan_request import PlanRequest
from plait.proof.verdict import Verdict
from plait.randomness.keyed import preserve_host_state
from plait.report.run import Run

JobLike = Job | Callable[..., Job] | str | Path
"""A job, a function that returns one, or `path/to/job.py:function`."""
OPTIONS: dict[str, type[CommandOptions]] = {
    "train": TrainOptions, "verify": VerifyOptions, "plan": PlanOptions, "sketch": SketchOptions,
}  # fmt: skip
"""The option class of each function."""
VALUE_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "True or False"), int: ((int,), "a whole number"), float: ((int, float), "a number"),
    Path: ((str, PathLike), "a path"), str: ((str, PathLike, Plan), "text"),
}  # fmt: skip
"""Accepted Python types and their description, by the type of an option."""
FRESH_NOTE = "CUDA is in use here, so ranks start from a fresh process"
PROGRAM = "from plait.api import serve; serve()"
SIGNALS_NOTE = "note  plait.train runs outside of the main thread, so Ctrl-C and SIGTERM do not stop the run"


def train(
    job: JobLike, plan: str | Path | Plan = "dp=*", nproc: int | None = None, *, arguments: Mapping[str, object] | None = None,
    name: str | None = None, quiet: bool = False, callbacks: Sequence[Callback] | str = (), **options: object,
) -> Run:  # fmt: skip
    """Train a job under a plan, as `plait train` does, and return the run.

    `job` is a `Job`, a function that returns one, or "path/to/job.py:function"; `arguments` are passed to the function. `name` names the
    run directory (default: the function's name). `quiet` prints nothing. `callbacks` is a list of callbacks, or "file.py:function", which
    returns one. Each rank has its own copy of a callback, so attributes that a callback sets are not visible here. `options` are those of
    `plait train`, with Python values: steps=200, save_every=50, keep=3, resume=True (or the path of a run), runs="runs",
    tracker="tensorboard", …

    Ctrl-C, or a notebook's interrupt, stops after the current step, saves, and returns a run whose `stopped` is true. A second one ends
    the ranks at once. Python delivers signals only to the main thread, so a run that another thread started cannot be interrupted. In a
    process that torchrun or another launcher started, `train` joins the run as one of its ranks.

    Raises a `PlaitError` if `plait train` would end with an error.
    """
    if isinstance(callbacks, str):
        options, callbacks = options | {"callbacks": callbacks}, ()
    values = {"plan": plan, "nproc": nproc, **options}
    asked = ApiRequest(job, "train", values, arguments or {}, name, tuple(callbacks))
    told, loaded = _run_request(asked, quiet)
    return Run(Path(told["run"]), told["stopped"], loaded)


def verify(
    job: JobLike, plan: str | Path | Plan = "dp=2", nproc: int | None = None, *,
    arguments: Mapping[str, object] | None = None, **options: object,
) -> Verdict:  # fmt: skip
    """Prove that the split job trains the same as on one device, as `plait verify` does. `.equal` of the verdict is the result.

    `job` as in `train`; `options`: steps=4, full=False, device="auto".
    """
    asked = ApiRequest(job, "verify", {"plan": plan, "nproc": nproc, **options}, arguments or {})
    return convert(_run_request(asked)[0], Verdict)


def plan(
    job: JobLike, machine: str = "here", *, arguments: Mapping[str, object] | None = None, **options: object
) -> "PlanTable":
    """Choose a plan for a job on a machine, such as "h100x8", as `plait plan` does. `.best` is the chosen plan as one line.

    `job` as in `train`; `options`: gpus=8, batch=64, memory="80GiB", set="precision=bf16", top=5, allow_inexact=False, …
    """
    return PlanTable(**_inspect_job(ApiRequest(job, "plan", {"machine": machine, **options}, arguments or {}), _plan_job))


def sketch(
    job: JobLike,
    batch: int = 1,
    plan: str | Path | Plan | None = None,
    *,
    arguments: Mapping[str, object] | None = None,
) -> "SketchTable":
    """Return the costs of a model, unit by unit, without running it, as `plait sketch` does; with a plan, also the memory of its ranks."""
    return SketchTable(**_inspect_job(ApiRequest(job, "sketch", {"batch": batch, "plan": plan}, arguments or {}), _sketch_job))


@dataclass(frozen=True, repr=False)
class SketchTable:
    """The sketch of a job as a table; `facts` has the values that `plait sketch --json` prints."""

    text: str
    facts: dict[str, Any]

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class PlanTable(SketchTable):
    """The plans that the search found for a job; `facts` has the values that `plait plan --json` prints."""

    best: str | None = field(default=None, kw_only=True)
    """The chosen plan; None if no plan fits."""


@dataclass(frozen=True)
class ApiRequest:
    """The arguments of one API call: the job in one of its three forms, and a command's options as Python values."""

    source: JobLike
    command: str
    values: Mapping[str, object]
    arguments: Mapping[str, object]
    """Arguments of the job's function."""
    title: str | None = None
    callbacks: tuple[Callback, ...] = ()
    """Callbacks given as objects."""

    @property
    def file(self) -> str | None:
        """The job's name if it is in a file."""
        return str(self.source) if isinstance(self.source, (str, Path)) else None

    @property
    def name(self) -> str:
        """The name of the run."""
        if self.file is not None and self.title is None:
            return self.file
        named = self.title or getattr(self.source, "__name__", "")
        return re.sub(r"\W+", "-", named.replace("<lambda>", "")).strip("-") or "job"

    @property
    def argument_texts(self) -> dict[str, str]:
        """The arguments of the job's function, as strings of the command line."""
        return {key: str(value) for key, value in self.arguments.items()}

    def load(self) -> Job:
        """Load the job. Raises J001 to J005, or U020 if the object is not a job."""
        if self.file is not None:
            return load_job(self.file, self.argument_texts)
        if isinstance(self.source, Job) and not self.arguments:
            return self.source
        if callable(self.source):
            make = self.source
            return make_job(lambda: make(**self.arguments), self.name)
        what = f"{type(self.source).__name__} is not a job"
        if isinstance(self.source, Job):
            what = f"a Job takes no arguments ({', '.join(self.arguments)}): a function that returns one does"
        raise PlaitError(Problem("U020", what, fix=("a plait.Job, a function that returns one, or path/to/job.py",)))

    def parse_options(self) -> Any:
        """Convert the options as the command line does. Raises U020 for an unknown option, U002 for an invalid value."""
        known = {name: option for name, option in list_options(OPTIONS[self.command]).items() if option.python}
        former = {each.former: name for name, each in known.items() if each.former}
        made, problems = dict[str, Any](), list[Problem]()
        for key, value in former_names.replace_former_names("option", dict(self.values), former).items():
            try:
                made[key] = _convert_value(known[key], value) if key in known else self._raise_unknown(key, list(known))
            except PlaitError as error:
                problems += error.problems
        if problems:
            raise PlaitError(problems)
        return OPTIONS[self.command](**made, arguments=self.argument_texts, job=self.name)  # type: ignore[call-arg]

    def _raise_unknown(self, key: str, known: list[str]) -> NoReturn:
        if key in {each.name for each in dataclasses.fields(Job)}:
            what = f"plait.{self.command} has no option {key}: it is a field of the job"
            raise PlaitError(Problem("U020", what, fix=(f"dataclasses.replace(job, {key}=…)",)))
        raise PlaitError(Problem("U020", f"plait.{self.command} has no option {key}        {did_you_mean(key, known)}"))


def _convert_value(option: Option, value: object) -> Any:
    """Convert a Python value to the value that the command line would produce. Raises U002 if it is invalid."""
    several = isinstance(value, Sequence) and not isinstance(value, str)
    if option.many:
        return tuple(_check_value(option, each) for each in (value if several else [value]))
    if option.listed and not isinstance(value, str):
        return ",".join(map(str, value if several else [value]))
    if option.bare is not None and isinstance(value, bool):  # resume=True
        return option.bare if value else None
    return None if value is None and option.default is None else option.kind(_check_value(option, value))


def _check_value(option: Option, value: object) -> object:
    """Return the value if it has the option's type and is among its choices. Raises U002 otherwise."""
    value, (kinds, words) = option.replace_former(value), VALUE_KINDS[option.kind]
    right = isinstance(value, kinds) and (option.kind is bool or not isinstance(value, bool))
    if right and option.choices:
        right, words = value in option.choices, f"one of {', '.join(option.choices)}"
    if not right:
        raise PlaitError(Problem("U002", f"{option.name}={value!r} is not {words}"))
    return value


def serve() -> None:
    """Serve one `ApiRequest` in the fresh process."""
    forkable.answer_by_forks()  # a job that is a value imports its libraries when it is unpickled
    fresh_process.serve(lambda asked: RANK_COMMANDS[asked.command](asked, asked.load(), _RelayConsole()))


def _run_request(request: ApiRequest, quiet: bool = False) -> tuple[dict[str, Any], Job]:
    """Run the request here, or in a fresh process if ranks cannot be forked. Returns its result and the job."""
    out = io.StringIO() if quiet else None
    with _preserve_state(), _convert_os_errors():
        request.parse_options()
        job = request.load()
        if not torch.cuda.is_initialized() or is_launched_rank():
            try:
                return RANK_COMMANDS[request.command](request, job, Console(out=out)), job
            except PlaitError as error:
                if error.codes[0] != "H011" or is_launched_rank():
                    raise
        console = Console(out=out)
        console.print_lines(FRESH_NOTE)

        def show_message(message: dict[str, Any]) -> None:
            console.print_lines(message["text"]) if message["kind"] == "say" else console.show_status(message["value"])

        try:
            return fresh_process.run_in_fresh_process(
                PROGRAM, fresh_process.pickle_request(request, by_value=request.file is None), show_message
            ), job
        finally:
            console.close()


class _RelayConsole(Console):
    """The console of the fresh process: sends all output to the calling process."""

    def print_lines(self, text: str) -> None:
        fresh_process.send_message({"kind": "say", "text": text})

    def show_status(self, status: dict[str, Any]) -> None:
        self.printed = time.monotonic()  # the calling process decides when to print a line
        if "evaluation" not in status:
            super().show_status(status)
        fresh_process.send_message({"kind": "status", "value": status})


def _train(api_request: ApiRequest, job: Job, console: Console) -> dict[str, Any]:
    with StopRequest().handle_signals():
        request = build_train_request(dataclasses.replace(api_request.parse_options(), loaded=job))
        made = combine_callbacks(api_request.callbacks, request.callbacks, request.plan)
        request = dataclasses.replace(request, is_from_python=True, callbacks=made)
        if threading.current_thread() is not threading.main_thread():
            request = dataclasses.replace(request, notes=(*request.notes, SIGNALS_NOTE))
        told = launch_run(request, console=console)[1]
    if "run" not in told:
        raise PlaitError(Problem("U022", "the run finished on the other nodes, without this one"), FAILED)
    return told


def _verify(request: ApiRequest, job: Job, console: Console) -> dict[str, Any]:
    options = dataclasses.replace(request.parse_options(), loaded=job)
    verdict = verify_plan(options, *load_plan_and_job(options, check_step_count(options, "steps=")))
    return dataclasses.asdict(dataclasses.replace(verdict, job=request.name))


RANK_COMMANDS: dict[str, Callable[[ApiRequest, Job, Console], dict[str, Any]]] = {"train": _train, "verify": _verify}
"""The commands that start ranks."""


def _inspect_job(request: ApiRequest, work: Callable[[Any, Job], dict[str, Any]]) -> dict[str, Any]:
    """Run `work` on the job in a separate process, if one can be forked. Otherwise this process could not fork ranks afterwards."""
    with _preserve_state(), _convert_os_errors():
        options, job = request.parse_options(), request.load()

        def run_work(place: Place) -> dict[str, Any]:
            place.beat(-1, "build")
            return work(options, job)

        if torch.cuda.is_initialized() or is_launched_rank():
            return json.loads(json.dumps(run_work(Place())))
        return fork.run_ranks(run_work, 1)[0]


def _plan_job(options: PlanOptions, job: Job) -> dict[str, Any]:
    _check_count("batch", options.batch)
    check_plan_options(options)
    machine, tp = resolve_machine(options), parse_pins(options).get("tp") != 1
    job = dataclasses.replace(job, batch=job.batch if options.batch is None else options.batch)
    asked = PlanRequest.from_job(job, options.job, machine, split=machine.devices > 1, tp=tp)
    found = search_plans(learn_corrections(asked, options, options.learn), options)
    best = None if found.best is None else str(found.best.plan)
    return {"text": format_answer(found), "facts": found.to_dict(), "best": best}


def _sketch_job(options: SketchOptions, job: Job) -> dict[str, Any]:
    _check_count("batch", options.batch)
    facts, told = sketches.build_sketch(options, job, Plan.read(options.plan).fill(None) if options.plan else None)
    return {"text": told, "facts": facts}


def _check_count(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise PlaitError(Problem("U002", f"{name}={value} is not a whole number ≥ 1", fix=(f"{name}=1",)))


@contextlib.contextmanager
def _preserve_state() -> Iterator[None]:
    """Restore torch's thread count, Python's fault handler and the random generators at exit."""
    forkable.keep_forkable()
    threads, faults = torch.get_num_threads(), faulthandler.is_enabled()
    try:
        with preserve_host_state(), forkable.use_fork_answers():
            yield
    finally:
        torch.set_num_threads(threads)
        if not faults:
            faulthandler.disable()


@contextlib.contextmanager
def _convert_os_errors() -> Iterator[None]:
    """Raise a `PlaitError` if the disk is full or a limit of the operating system is reached."""
    try:
        yield
    except OSError as error:
        problem = disk_full_problem(error) if error.errno in DISK_FULL_ERRNOS else limits.explain_os_limit(error)
        if problem is None:
            raise
        raise PlaitError(problem, FAILED) from error
