"""plait from Python: `plait.train(job, plan="dp=2")` in a script, a test or a cell of a notebook, and likewise verify, plan and sketch.

They do what the commands do, in the process that calls them: ranks are forked from it, so a job may be a value that was defined a line
before, and nothing of it is pickled. What a command prints as its result is what they return; what it would exit with is raised as a
`PlaitError`. Afterwards the process is as it was: its signal handlers, random generators and threads.

A process that has used CUDA cannot be forked, nor one in which torch has differentiated on a GPU. There a fresh process
(`launch/fresh.py`) starts the ranks.
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
from plait.cli.learning import learned
from plait.cli.plan import answered
from plait.cli.plan_and_job import both
from plait.cli.plan_options import machine_of
from plait.cli.train import launch
from plait.cli.train_options import requested, together
from plait.cli.verify import proved, too_few
from plait.config import former_names
from plait.config.command_options import (
    CommandOptions,
    Option,
    PlanOptions,
    SketchOptions,
    TrainOptions,
    VerifyOptions,
    options_of,
)
from plait.config.errors import FAILED, NO_ROOM, PlaitError, Problem, did_you_mean, disk_full
from plait.config.job import Job, load_job, made_by
from plait.config.plan import Plan
from plait.config.plan_question import check, pinned
from plait.engine.callbacks import Callback
from plait.launch import fork, forkable, fresh, limits
from plait.launch.place import Place, joining
from plait.launch.stopping import StopRequest
from plait.planner.answer import text
from plait.planner.question import PlanRequest
from plait.proof.verdict import Verdict
from plait.randomness.keyed import host_kept
from plait.report.run import Run

JobLike = Job | Callable[..., Job] | str | Path
"""A job, a function that returns one, or `path/to/job.py:function`."""
OPTIONS: dict[str, type[CommandOptions]] = {
    "train": TrainOptions, "verify": VerifyOptions, "plan": PlanOptions, "sketch": SketchOptions,
}  # fmt: skip
"""Of each function."""
VALUES: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "True or False"), int: ((int,), "a whole number"), float: ((int, float), "a number"),
    Path: ((str, PathLike), "a path"), str: ((str, PathLike, Plan), "text"),
}  # fmt: skip
"""By the kind of an option: what its value may be in Python."""
FRESH = "CUDA is in use here, so ranks start from a fresh process"
PROGRAM = "from plait.api import serve; serve()"
UNHEARD = "note  this is not the main thread, where Python hears signals: Ctrl-C and SIGTERM do not stop the run"


def train(
    job: JobLike, plan: str | Path | Plan = "dp=*", nproc: int | None = None, *, arguments: Mapping[str, object] | None = None,
    name: str | None = None, quiet: bool = False, callbacks: Sequence[Callback] | str = (), **options: object,
) -> Run:  # fmt: skip
    """Train a job under a plan, as `plait train` does, and return the run.

    `job` is a `Job`, a function that returns one, or "path/to/job.py:function"; `arguments` are those of the function. `name` is
    that of run directories, by default the function's. `quiet` prints nothing. `callbacks` are called at points of the run, or
    "file.py:function" names what makes them; each rank has copies, so what they keep in themselves is not seen here. `options`
    are those of `plait train` by their names there, with values of Python: steps=200, save_every=50, keep=3, resume=True (or a
    run's path), runs="runs", tracker="tensorboard", …

    Ctrl-C, or a notebook's interrupt, stops after the current step, saves, and returns a run whose `stopped` is true; a second
    one ends the ranks at once. In another thread than the main one Python hears no signals, so nothing stops the run before its
    end. In a process that torchrun or another launcher started, this joins the run as one of its ranks.

    Raises a `PlaitError` for whatever `plait train` would end with.
    """
    if isinstance(callbacks, str):
        options, callbacks = options | {"callbacks": callbacks}, ()
    values = {"plan": plan, "nproc": nproc, **options}
    asked = ApiRequest(job, "train", values, arguments or {}, name, tuple(callbacks))
    told, loaded = _done(asked, quiet)
    return Run(Path(told["run"]), told["stopped"], loaded)


def verify(
    job: JobLike, plan: str | Path | Plan = "dp=2", nproc: int | None = None, *,
    arguments: Mapping[str, object] | None = None, **options: object,
) -> Verdict:  # fmt: skip
    """Prove that the split job is the same training as on one device, as `plait verify` does: `.equal` says whether it is.

    `job` as in `train`; `options`: steps=4, full=False, device="auto".
    """
    asked = ApiRequest(job, "verify", {"plan": plan, "nproc": nproc, **options}, arguments or {})
    return convert(_done(asked)[0], Verdict)


def plan(
    job: JobLike, machine: str = "here", *, arguments: Mapping[str, object] | None = None, **options: object
) -> "PlanTable":
    """Choose a plan for a job on a machine, such as "h100x8", as `plait plan` does: `.best` is the choice, as one line.

    `job` as in `train`; `options`: gpus=8, batch=64, memory="80GiB", set="precision=bf16", top=5, allow_inexact=False, …
    """
    return PlanTable(**_looked(ApiRequest(job, "plan", {"machine": machine, **options}, arguments or {}), _planned))


def sketch(
    job: JobLike,
    batch: int = 1,
    plan: str | Path | Plan | None = None,
    *,
    arguments: Mapping[str, object] | None = None,
) -> "SketchTable":
    """What a model costs, unit by unit, without running it, as `plait sketch` shows it; with a plan, also the memory of ranks."""
    return SketchTable(**_looked(ApiRequest(job, "sketch", {"batch": batch, "plan": plan}, arguments or {}), _sketched))


@dataclass(frozen=True, repr=False)
class SketchTable:
    """The sketch of a job as a table; `facts` has its figures, as `plait sketch --json` does."""

    text: str
    facts: dict[str, Any]

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class PlanTable(SketchTable):
    """The plans that were found for a job; `facts` has what `plait plan --json` prints."""

    best: str | None = field(default=None, kw_only=True)
    """The choice; None when nothing fits."""


@dataclass(frozen=True)
class ApiRequest:
    """What a function was asked for: a job in one of its three forms, and a command's options as values of Python."""

    given: JobLike
    command: str
    values: Mapping[str, object]
    arguments: Mapping[str, object]
    """Of the job's function."""
    title: str | None = None
    callbacks: tuple[Callback, ...] = ()
    """Those that are given as values."""

    @property
    def file(self) -> str | None:
        """The job's name where it lies in a file."""
        return str(self.given) if isinstance(self.given, (str, Path)) else None

    @property
    def name(self) -> str:
        """What the run is named by."""
        if self.file is not None and self.title is None:
            return self.file
        named = self.title or getattr(self.given, "__name__", "")
        return re.sub(r"\W+", "-", named.replace("<lambda>", "")).strip("-") or "job"

    @property
    def texts(self) -> dict[str, str]:
        """The arguments of the job's function as the command line has them."""
        return {key: str(value) for key, value in self.arguments.items()}

    def load(self) -> Job:
        """The job. J001 to J005; U020 for what is none."""
        if self.file is not None:
            return load_job(self.file, self.texts)
        if isinstance(self.given, Job) and not self.arguments:
            return self.given
        if callable(self.given):
            make = self.given
            return made_by(lambda: make(**self.arguments), self.name)
        what = f"{type(self.given).__name__} is not a job"
        if isinstance(self.given, Job):
            what = f"a Job takes no arguments ({', '.join(self.arguments)}): a function that returns one does"
        raise PlaitError(Problem("U020", what, fix=("a plait.Job, a function that returns one, or path/to/job.py",)))

    def options(self) -> Any:
        """As the command line makes them. U020 for an option that does not exist, U002 for a value that one cannot have."""
        known = {name: option for name, option in options_of(OPTIONS[self.command]).items() if option.python}
        former = {each.former: name for name, each in known.items() if each.former}
        made, problems = dict[str, Any](), list[Problem]()
        for key, value in former_names.replaced("option", dict(self.values), former).items():
            try:
                made[key] = _converted(known[key], value) if key in known else self._unknown(key, list(known))
            except PlaitError as error:
                problems += error.problems
        if problems:
            raise PlaitError(problems)
        return OPTIONS[self.command](**made, arguments=self.texts, job=self.name)  # type: ignore[call-arg]

    def _unknown(self, key: str, known: list[str]) -> NoReturn:
        if key in {each.name for each in dataclasses.fields(Job)}:
            what = f"plait.{self.command} has no option {key}: it is a field of the job"
            raise PlaitError(Problem("U020", what, fix=(f"dataclasses.replace(job, {key}=…)",)))
        raise PlaitError(Problem("U020", f"plait.{self.command} has no option {key}        {did_you_mean(key, known)}"))


def _converted(option: Option, value: object) -> Any:
    """What the command line would have made of the same words. U002 for a value that the option cannot have."""
    several = isinstance(value, Sequence) and not isinstance(value, str)
    if option.many:
        return tuple(_checked(option, each) for each in (value if several else [value]))
    if option.listed and not isinstance(value, str):
        return ",".join(map(str, value if several else [value]))
    if option.bare is not None and isinstance(value, bool):  # resume=True
        return option.bare if value else None
    return None if value is None and option.default is None else option.kind(_checked(option, value))


def _checked(option: Option, value: object) -> object:
    """The value, if it is of the option's kind and choices."""
    value, (kinds, words) = option.present(value), VALUES[option.kind]
    right = isinstance(value, kinds) and (option.kind is bool or not isinstance(value, bool))
    if right and option.choices:
        right, words = value in option.choices, f"one of {', '.join(option.choices)}"
    if not right:
        raise PlaitError(Problem("U002", f"{option.name}={value!r} is not {words}"))
    return value


def serve() -> None:
    """The life of the fresh process: what it was asked for is an `ApiRequest`."""
    forkable.answer_by_forks()  # a job that is a value imports its libraries when it is read
    fresh.serve(lambda asked: WORK[asked.command](asked, asked.load(), _Relay()))


def _done(asked: ApiRequest, quiet: bool = False) -> tuple[dict[str, Any], Job]:
    """Do what was asked, here, or in a fresh process where ranks cannot be forked: what it came to, and the job."""
    out = io.StringIO() if quiet else None
    with _as_before(), _readable():
        asked.options()
        job = asked.load()
        if not torch.cuda.is_initialized() or joining():
            try:
                return WORK[asked.command](asked, job, Console(out=out)), job
            except PlaitError as error:
                if error.codes[0] != "H011" or joining():
                    raise
        console = Console(out=out)
        console.say(FRESH)

        def hear(message: dict[str, Any]) -> None:
            console.say(message["text"]) if message["kind"] == "say" else console.status(message["value"])

        try:
            return fresh.ask(PROGRAM, fresh.pickled(asked, by_value=asked.file is None), hear), job
        finally:
            console.close()


class _Relay(Console):
    """In the fresh process: what there is to show goes to the one that asked."""

    def say(self, text: str) -> None:
        fresh.say({"kind": "say", "text": text})

    def status(self, status: dict[str, Any]) -> None:
        self.printed = time.monotonic()  # it is never time for a line of its own
        if "evaluation" not in status:
            super().status(status)
        fresh.say({"kind": "status", "value": status})


def _train(asked: ApiRequest, job: Job, console: Console) -> dict[str, Any]:
    with StopRequest().heard():
        request = requested(dataclasses.replace(asked.options(), loaded=job))
        made = together(asked.callbacks, request.callbacks, request.plan)
        request = dataclasses.replace(request, python=True, callbacks=made)
        if threading.current_thread() is not threading.main_thread():
            request = dataclasses.replace(request, notes=(*request.notes, UNHEARD))
        told = launch(request, console=console)[1]
    if "run" not in told:
        raise PlaitError(Problem("U022", "the run ended on the other machines, without this one"), FAILED)
    return told


def _verify(asked: ApiRequest, job: Job, console: Console) -> dict[str, Any]:
    options = dataclasses.replace(asked.options(), loaded=job)
    verdict = proved(options, *both(options, too_few(options, "steps=")))
    return dataclasses.asdict(dataclasses.replace(verdict, job=asked.name))


WORK: dict[str, Callable[[ApiRequest, Job, Console], dict[str, Any]]] = {"train": _train, "verify": _verify}
"""What starts ranks."""


def _looked(asked: ApiRequest, work: Callable[[Any, Job], dict[str, Any]]) -> dict[str, Any]:
    """What a look at the job finds. A process of its own looks, where one can be forked: this one could fork no ranks after it."""
    with _as_before(), _readable():
        options, job = asked.options(), asked.load()

        def look(place: Place) -> dict[str, Any]:
            place.beat(-1, "build")
            return work(options, job)

        if torch.cuda.is_initialized() or joining():
            return json.loads(json.dumps(look(Place())))
        return fork.run(look, 1)[0]


def _planned(options: PlanOptions, job: Job) -> dict[str, Any]:
    _count("batch", options.batch)
    check(options)
    machine, tp = machine_of(options), pinned(options).get("tp") != 1
    job = dataclasses.replace(job, batch=job.batch if options.batch is None else options.batch)
    asked = PlanRequest.of(job, options.job, machine, split=machine.devices > 1, tp=tp)
    found = answered(learned(asked, options, options.learn), options)
    best = None if found.best is None else str(found.best.plan)
    return {"text": text(found), "facts": found.to_dict(), "best": best}


def _sketched(options: SketchOptions, job: Job) -> dict[str, Any]:
    _count("batch", options.batch)
    facts, told = sketches.shown(options, job, Plan.read(options.plan).fill(None) if options.plan else None)
    return {"text": told, "facts": facts}


def _count(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise PlaitError(Problem("U002", f"{name}={value} is not a whole number ≥ 1", fix=(f"{name}=1",)))


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Afterwards torch has as many threads as before, Python's fault handler is as it was, and so are random generators."""
    forkable.stay()
    threads, faults = torch.get_num_threads(), faulthandler.is_enabled()
    try:
        with host_kept(), forkable.answered_by_forks():
            yield
    finally:
        torch.set_num_threads(threads)
        if not faults:
            faulthandler.disable()


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """A full disk and limits of the operating system are errors like others."""
    try:
        yield
    except OSError as error:
        problem = disk_full(error) if error.errno in NO_ROOM else limits.refused(error)
        if problem is None:
            raise
        raise PlaitError(problem, FAILED) from error
