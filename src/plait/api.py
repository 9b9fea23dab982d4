"""plait from Python: `plait.train(job, plan="dp=2")` in a script, a test or a cell of a notebook, and likewise verify, plan and sketch.

They do what the commands do, in the process that calls them: ranks are forked from it, so a job may be a value that was defined a line
before, and nothing of it is pickled. What a command prints as its result is what they return; what it would exit with is raised as a
`PlaitError`. Afterwards the process is as it was: its signal handlers, random generators and threads.

A process that has used CUDA cannot be forked, nor one in which torch has differentiated on a GPU. There a fresh process
(`launch/fresh.py`) starts the ranks.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import io
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from plait.cli.asked import Asked, JobLike
from plait.cli.console import Console
from plait.cli.options import both
from plait.cli.plan import answered, machine_of, pinned
from plait.cli.run_callbacks import together
from plait.cli.train import launch
from plait.cli.train_options import requested
from plait.config.errors import FAILED, NO_ROOM, PlaitError, Problem, disk_full
from plait.config.job import Job
from plait.config.plan import Plan
from plait.engine.callbacks import Callback
from plait.launch import fork, forkable, fresh, limits
from plait.launch.devices import kind_of
from plait.launch.place import Place, joining
from plait.launch.stopping import StopRequest
from plait.model.fake_model import sketched
from plait.model.table import outline, table
from plait.planner.answer import text
from plait.planner.dryrun.memory_table import memory_table
from plait.planner.question import PlanRequest
from plait.planner.refusals import foresee
from plait.proof.verdict import Verdict
from plait.proof.verify import verify as prove
from plait.randomness.keyed import host_kept
from plait.report.run import Run

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
    run's path), runs="runs", to="tensorboard", …

    Ctrl-C, or a notebook's interrupt, stops after the current step, saves, and returns a run whose `stopped` is true; a second
    one ends the ranks at once. In another thread than the main one Python hears no signals, so nothing stops the run before its
    end. In a process that torchrun or another launcher started, this joins the run as one of its ranks.

    Raises a `PlaitError` for whatever `plait train` would end with.
    """
    if isinstance(callbacks, str):
        options, callbacks = options | {"callbacks": callbacks}, ()
    values = {"plan": plan, "nproc": nproc, **options}
    asked = Asked(job, "train", values, arguments or {}, name, tuple(callbacks))
    told, loaded = _done(asked, quiet)
    return Run(Path(told["run"]), told["stopped"], loaded)


def verify(
    job: JobLike, plan: str | Path | Plan = "dp=2", nproc: int | None = None, *,
    arguments: Mapping[str, object] | None = None, **options: object,
) -> Verdict:  # fmt: skip
    """Prove that the split job is the same training as on one device, as `plait verify` does: `.equal` says whether it is.

    `job` as in `train`; `options`: steps=4, full=False, device="auto".
    """
    asked = Asked(job, "verify", {"plan": plan, "nproc": nproc, **options}, arguments or {})
    return Verdict.of(_done(asked)[0])


def plan(
    job: JobLike, machine: str = "here", *, arguments: Mapping[str, object] | None = None, **options: object
) -> "PlanTable":
    """Choose a plan for a job on a machine, such as "h100x8", as `plait plan` does: `.best` is the choice, as one line.

    `job` as in `train`; `options`: gpus=8, batch=64, memory="80GiB", pin="precision=bf16", top=5, allow_inexact=False, …
    """
    return PlanTable(**_looked(Asked(job, "plan", {"machine": machine, **options}, arguments or {}), _planned))


def sketch(
    job: JobLike,
    batch: int = 1,
    plan: str | Path | Plan | None = None,
    *,
    arguments: Mapping[str, object] | None = None,
) -> "SketchTable":
    """What a model costs, unit by unit, without running it, as `plait sketch` shows it; with a plan, also the memory of ranks."""
    return SketchTable(**_looked(Asked(job, "sketch", {"batch": batch, "plan": plan}, arguments or {}), _sketched))


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


def serve() -> None:
    """The life of the fresh process: what it was asked for is an `Asked`."""
    forkable.answer_by_forks()  # a job that is a value imports its libraries when it is read
    fresh.serve(lambda asked: WORK[asked.command](asked, asked.load(), _Relay()))


def _done(asked: Asked, quiet: bool = False) -> tuple[dict[str, Any], Job]:
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


def _train(asked: Asked, job: Job, console: Console) -> dict[str, Any]:
    with StopRequest().heard():
        request = requested(asked.options(), lambda: job)
        made = together(asked.callbacks, request.callbacks, request.plan)
        request = dataclasses.replace(request, python=True, callbacks=made)
        if threading.current_thread() is not threading.main_thread():
            request = dataclasses.replace(request, notes=(*request.notes, UNHEARD))
        told = launch(request, console=console)[1]
    if "run" not in told:
        raise PlaitError(Problem("U022", "the run ended on the other machines, without this one"), FAILED)
    return told


def _verify(asked: Asked, job: Job, console: Console) -> dict[str, Any]:
    options = asked.options()
    few = Problem("U002", f"steps={options.steps}: at least 3 are compared", fix=("steps=4",))
    split = both(options, [few] if options.steps < 3 else [], lambda: job)[0]
    foresee(job, split, kind_of(options.device))
    verdict = prove(job, split, options.steps, options.device, seconds=math.inf if options.full else None)
    return dataclasses.asdict(dataclasses.replace(verdict, job=asked.name))


WORK: dict[str, Callable[[Asked, Job, Console], dict[str, Any]]] = {"train": _train, "verify": _verify}
"""What starts ranks."""


def _looked(asked: Asked, work: Callable[[str, argparse.Namespace, Job], dict[str, Any]]) -> dict[str, Any]:
    """What a look at the job finds. A process of its own looks, where one can be forked: this one could fork no ranks after it."""
    with _as_before(), _readable():
        options, job = asked.options(), asked.load()

        def look(place: Place) -> dict[str, Any]:
            place.beat(-1, "build")
            return work(asked.name, options, job)

        if torch.cuda.is_initialized() or joining():
            return json.loads(json.dumps(look(Place())))
        return fork.run(look, 1)[0]


def _planned(name: str, options: argparse.Namespace, job: Job) -> dict[str, Any]:
    machine = machine_of(options)
    _count("batch", options.batch)
    job = dataclasses.replace(job, batch=job.batch if options.batch is None else options.batch)
    found = answered(PlanRequest.of(job, name, machine, split=machine.devices > 1, tp=pinned(options).get("tp") != 1), options)
    best = None if found.best is None else str(found.best.candidate.plan)
    return {"text": text(found), "facts": found.to_dict(), "best": best}


def _sketched(name: str, options: argparse.Namespace, job: Job) -> dict[str, Any]:
    _count("batch", options.batch)
    outlined = outline(sketched(job)[1], options.batch)
    facts, told = outlined.to_dict(), table(outlined, name)
    if options.plan:
        memory = memory_table(job, Plan.read(options.plan).fill(None))
        facts, told = facts | {"memory": memory.to_dict()}, f"{told}\n\n{memory}"
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
