"""What `plait plan` knows of a job without running it again: its sketch, and what tp can cut, from an earlier plan (`launch/kept.py`).

A request that was kept has plain values in place of the model, and a job whose functions load the user's file when something calls
them. So whatever needs more than was kept works, and takes the time of a first plan.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from msgspec import DecodeError, Struct, msgpack

from plait.config.command_options import PlanOptions
from plait.config.errors import PlaitError
from plait.config.hugging_face import PREFIX
from plait.config.job import EMA, Evaluate, Job, TokenBudget, load_job
from plait.config.library import uncollected
from plait.config.machine import Machine
from plait.data.loaders import with_batch
from plait.engine.build import check_schedule
from plait.launch import kept
from plait.launch.devices import cuda_names
from plait.model.sketch import Sketch
from plait.parallel.fsdp.optimizer_check import OptimizerKind, OptimizerMismatch
from plait.planner.formulas import Software
from plait.planner.from_sketch import Cuts
from plait.planner.question import JobLimits, PlanRequest, sped
from plait.tensors.torch_private import warm_up
from plait.tensors.trees import Template


class JobFields(Struct):
    """The fields of a job that are values, and which of the others it has. What `evaluate` and its token budget hold besides functions."""

    batch: int
    steps: int
    clip: float | None
    seed: int
    stages: tuple[str, ...] | None
    units: tuple[str, ...] | None
    tensor: dict[str, str] | None
    ema: EMA | None
    weights: str | None
    evaluate: int | None
    tokens: int | None
    """Of its token budget."""
    padded: bool
    """What counts there."""
    factor: float | None
    """What its schedule says of the first step."""
    functions: tuple[str, ...]

    @staticmethod
    def of(job: Job) -> "JobFields":
        """Those of a job without phases."""
        plain = {name: getattr(job, name) for name in ("batch", "steps", "clip", "seed", "stages", "units", "ema")}
        functions = tuple(field.name for field in fields(Job) if callable(getattr(job, field.name)))
        return JobFields(
            **plain,
            tensor=None if job.tensor is None else dict(job.tensor),
            weights=None if job.weights is None else str(job.weights),
            evaluate=None if job.evaluate is None else job.evaluate.every,
            tokens=None if job.token_budget is None else job.token_budget.tokens,
            padded=job.token_budget is not None and job.token_budget.padded,
            factor=None if job.schedule is None else float(job.schedule(0)),
            functions=functions,
        )

    def job(self, again: Callable[[], Job]) -> Job:
        """The job, whose functions are those of the one that `again` loads."""

        def later(path: str) -> Callable[..., Any]:
            return lambda *args, **kwargs: attrgetter(path)(again())(*args, **kwargs)

        plain = {name: getattr(self, name) for name in ("batch", "steps", "clip", "seed", "stages", "units", "tensor", "ema", "weights")}
        made: dict[str, Any] = plain | {name: later(name) for name in self.functions}
        if self.factor is not None:
            made["schedule"] = lambda samples: later("schedule")(samples) if samples else self.factor
        if self.evaluate is not None:
            made["evaluate"] = Evaluate(later("evaluate.data"), later("evaluate.metrics"), self.evaluate)
        if self.tokens is not None:
            made["token_budget"] = TokenBudget(self.tokens, later("token_budget.lengths"), self.padded)
        return Job(**made)


class Findings(Struct):
    """What running a job showed."""

    job: JobFields
    sketch: Sketch
    cuts: Cuts
    software: Software
    compiles: bool
    optimizer: OptimizerKind
    tried: dict[str, OptimizerMismatch | None]

    @staticmethod
    def of(asked: PlanRequest) -> "Findings | None":
        """Those of a request; None if some of them are no plain values, or depend on how much memory is free."""
        job, sketch, limits = asked.job, asked.sketch, asked.limits
        if job.phases is not None or sketch.attributes or asked.cuts.unfollowed:
            return None
        try:
            check_schedule(job)
            for axis in ("fsdp", "tp", "pp", *["ep"] * bool(asked.cuts.mixtures)):
                for ep in (False, *[True] * bool(asked.cuts.mixtures)):
                    limits.mismatch(axis, ep)
            optimizer = limits.optimizer
        except PlaitError:  # plans that need it are refused with the reason
            return None
        calls = tuple(replace(call, template=Template(None, (), call.template.varies)) for call in sketch.calls)
        plain = replace(sketch, calls=calls)
        return Findings(JobFields.of(job), plain, asked.cuts, asked.software, asked.compiles, optimizer, dict(limits.tried))

    def packed(self) -> bytes:
        """As bytes. TypeError for what has no such form."""
        return msgpack.encode(self, enc_hook=_written)

    @staticmethod
    def unpacked(content: bytes) -> "Findings":
        """From bytes. ValueError for others."""
        return msgpack.decode(content, type=Findings, dec_hook=_read)


def _written(value: object) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise TypeError(f"{type(value).__name__} is no plain value")


def _read(kind: type, value: object) -> object:
    found = getattr(torch, value, None) if kind is torch.dtype and isinstance(value, str) else value
    if not isinstance(found, kind):
        raise ValueError(f"{value} is no {kind.__name__}")
    return found


def request(options: PlanOptions, machine: Machine, *, split: bool, tp: bool, say: Callable[[str], None]) -> PlanRequest:
    """The request of a job on a machine: with the kept sketch, or a new one, which is kept."""
    loaded = cache(lambda: load_job(options.job, options.arguments))
    if options.tries or options.job.startswith(PREFIX):  # the job runs; loading it says what was taken of a config
        return PlanRequest.of(_made(loaded, options), options.job, machine, split=split, tp=tp, say=say)
    key = kept.key_of("sketch", options.job, sorted(options.arguments.items()), split, tp, torch.__version__, cuda_names())
    if not options.fresh and (found := kept.load(key)) is not None:
        with suppress(DecodeError, ValueError):  # of another version that has the same files
            return _restored(Findings.unpacked(found.content), found.age, loaded, options, machine)
    with kept.same_environment():
        warm_up()  # torch makes a folder, and names it in the environment, as it is imported
    with kept.FileWatch() as watch:
        asked = PlanRequest.of(_made(loaded, options), options.job, machine, split=split, tp=tp, say=say)
        findings = None if watch.reason else Findings.of(replace(asked, job=loaded()))
    states = {} if findings is None else watch.states()
    if findings is not None and not watch.reason:
        with suppress(TypeError):  # a number format that is no value, for example
            kept.save(key, findings.packed(), watch, states)
    return asked


def _made(loaded: Callable[[], Job], options: PlanOptions) -> Job:
    with uncollected():  # a job imports what its model needs
        return with_batch(loaded(), options.batch)


def _restored(found: Findings, age: float, loaded: Callable[[], Job], options: PlanOptions, machine: Machine) -> PlanRequest:
    job, (known, guessed) = with_batch(found.job.job(loaded), options.batch), sped(machine)
    limits = JobLimits(job, found.sketch, found.cuts, found.optimizer, found.tried)
    return PlanRequest(job, options.job, known, found.sketch, found.cuts, found.software, limits, guessed, found.compiles, age=age)
