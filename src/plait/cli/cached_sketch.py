"""Cache of `plait plan`: the sketch of a job and its possible tp shards, from an earlier plan (`launch/sketch_cache.py`).

A cached request has plain values in place of the model, and a job whose functions load the user's file at their first call. So code that
needs more than the cached values also works, and takes as long as a first plan.
"""

import sys
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from dataclasses import fields, replace
from functools import cache
from io import StringIO
from operator import attrgetter
from typing import Any

import torch
from msgspec import DecodeError, Struct, msgpack

from plait.config.command_options import PlanOptions
from plait.config.errors import PlaitError
from plait.config.hugging_face import PREFIX
from plait.config.job import EMA, Evaluate, Job, TokenBudget, load_job
from plait.config.library import pause_gc
from plait.config.machine import Machine
from plait.data.loaders import override_batch
from plait.engine.build import check_schedule
from plait.launch import sketch_cache
from plait.launch.devices import list_cuda_devices
from plait.model.sketch import Sketch
from plait.parallel.fsdp.optimizer_check import OptimizerKind, OptimizerMismatch
from plait.planner.formulas import RuntimeCosts
from plait.planner.plan_request import JobLimits, PlanRequest, fill_speeds
from plait.planner.workload import ShardableParts
from plait.tensors.torch_private import warm_up
from plait.tensors.trees import Template


class JobFields(Struct):
    """Fields of a job that are plain values, the names of its functions, and the plain values of `evaluate` and of its token budget."""

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
    """Tokens of the token budget."""
    padded: bool
    """The budget counts padded tokens."""
    factor: float | None
    """The factor of the schedule in the first step."""
    functions: tuple[str, ...]

    @staticmethod
    def from_job(job: Job) -> "JobFields":
        """Read the fields of a job without phases."""
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

    def build_job(self, load: Callable[[], Job]) -> Job:
        """Build a job whose functions are those of the job that `load` returns."""

        def defer(path: str) -> Callable[..., Any]:
            return lambda *args, **kwargs: attrgetter(path)(load())(*args, **kwargs)

        plain = {name: getattr(self, name) for name in ("batch", "steps", "clip", "seed", "stages", "units", "tensor", "ema", "weights")}
        made: dict[str, Any] = plain | {name: defer(name) for name in self.functions}
        if self.factor is not None:
            made["schedule"] = lambda samples: defer("schedule")(samples) if samples else self.factor
        if self.evaluate is not None:
            made["evaluate"] = Evaluate(defer("evaluate.data"), defer("evaluate.metrics"), self.evaluate)
        if self.tokens is not None:
            made["token_budget"] = TokenBudget(self.tokens, defer("token_budget.lengths"), self.padded)
        return Job(**made)


class JobFindings(Struct):
    """Results of running a job for `plait plan`."""

    job: JobFields
    sketch: Sketch
    cuts: ShardableParts
    software: RuntimeCosts
    compiles: bool
    optimizer: OptimizerKind
    tried: dict[str, OptimizerMismatch | None]
    printed: str
    """Text that loading the job printed: values that a Hugging Face config takes by default."""

    @staticmethod
    def from_request(asked: PlanRequest, printed: str = "") -> "JobFindings | None":
        """Collect the findings of a request. Returns None if a finding is not a plain value or depends on the free memory."""
        job, sketch, limits = asked.job, asked.sketch, asked.limits
        if job.phases is not None or sketch.attributes or asked.shardable.tp_failure:
            return None
        try:
            check_schedule(job)
            for axis in ("fsdp", "tp", "pp", *["ep"] * bool(asked.shardable.mixtures)):
                for ep in (False, *[True] * bool(asked.shardable.mixtures)):
                    limits.find_mismatch(axis, ep)
            optimizer = limits.optimizer
        except PlaitError:  # plans that need this report the reason
            return None
        calls = tuple(replace(call, template=Template(None, (), call.template.varies)) for call in sketch.calls)
        plain = replace(sketch, calls=calls)
        known = JobFields.from_job(job)
        return JobFindings(known, plain, asked.shardable, asked.software, asked.can_compile, optimizer, dict(limits.mismatches), printed)

    def to_bytes(self) -> bytes:
        """Encode the findings. Raises TypeError for values without an encoding."""
        return msgpack.encode(self, enc_hook=_encode_dtype)

    @staticmethod
    def from_bytes(content: bytes) -> "JobFindings":
        """Decode findings. Raises ValueError for other content."""
        return msgpack.decode(content, type=JobFindings, dec_hook=_decode_dtype)


def _encode_dtype(value: object) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise TypeError(f"{type(value).__name__} is not a plain value")


def _decode_dtype(kind: type, value: object) -> object:
    found = getattr(torch, value, None) if kind is torch.dtype and isinstance(value, str) else value
    if not isinstance(found, kind):
        raise ValueError(f"{value} is not a {kind.__name__}")
    return found


def build_plan_request(options: PlanOptions, machine: Machine, *, split: bool, tp: bool, say: Callable[[str], None]) -> PlanRequest:
    """Build the request for a job on a machine, from the cached sketch or from a new one, which is then cached."""
    printed = StringIO()
    loaded = cache(lambda: _load_job(options, printed))
    if options.tries:  # the job runs
        return PlanRequest.from_job(_load_with_batch(loaded, options), options.job, machine, split=split, tp=tp, say=say)
    key = sketch_cache.make_cache_key("sketch", options.job, sorted(options.arguments.items()), split, tp, torch.__version__, list_cuda_devices())
    if not options.fresh and (found := sketch_cache.load_record(key)) is not None:
        with suppress(DecodeError, ValueError):  # written by another version with the same files
            request = _restore_request(restored := JobFindings.from_bytes(found.content), found.age, loaded, options, machine)
            sys.stderr.write(restored.printed)
            return request
    with sketch_cache.restore_environment():
        warm_up()  # importing torch creates a folder and names it in the environment
    with sketch_cache.FileWatch() as watch:
        asked = PlanRequest.from_job(_load_with_batch(loaded, options), options.job, machine, split=split, tp=tp, say=say)
        findings = None if watch.reason else JobFindings.from_request(replace(asked, job=loaded()), printed.getvalue())
    states = {} if findings is None else watch.collect_states()
    if findings is not None and not watch.reason:
        with suppress(TypeError):  # for example, a dtype without a name
            sketch_cache.save_record(key, findings.to_bytes(), watch, states)
    return asked


def _load_job(options: PlanOptions, printed: StringIO) -> Job:
    """Load the job. A job from a config prints the values taken by default; `printed` receives that text, so that a later plan prints it too."""
    if not options.job.startswith(PREFIX):
        return load_job(options.job, options.arguments)
    try:
        with redirect_stderr(printed):
            return load_job(options.job, options.arguments)
    finally:
        sys.stderr.write(printed.getvalue())


def _load_with_batch(loaded: Callable[[], Job], options: PlanOptions) -> Job:
    with pause_gc():  # loading a job imports the libraries of its model
        return override_batch(loaded(), options.batch)


def _restore_request(found: JobFindings, age: float, loaded: Callable[[], Job], options: PlanOptions, machine: Machine) -> PlanRequest:
    job, (known, guessed) = override_batch(found.job.build_job(loaded), options.batch), fill_speeds(machine)
    limits = JobLimits(job, found.sketch, found.cuts, found.optimizer, found.tried)
    return PlanRequest(job, options.job, known, found.sketch, found.cuts, found.software, limits, guessed, found.compiles, sketch_age=age)
