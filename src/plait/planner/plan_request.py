"""Turn a job and a machine into a search space: the workload of the model, its bytes per weight, and which parts can be sharded."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import gcd, inf, prod
from typing import Any

from plait.config.errors import PlaitError, Problem
from plait.config.hardware import Device, Link, Rates
from plait.config.job import Job
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.data import batch as data
from plait.data import sampling
from plait.engine.build import check_plan
from plait.model.fake_model import sketch_fake_model
from plait.model.sketch import Sketch
from plait.parallel import compiled, mutations
from plait.parallel.fsdp import optimizer_check
from plait.parallel.pipeline.partition import check_partition, partition_stages
from plait.parallel.pipeline.schedules import find_schedule_errors
from plait.planner.constants import FITTED, ON_CORES
from plait.planner.correction import NO_RUNS, LearnedCorrection
from plait.planner.dryrun.optimizer_step import measure_state_bytes
from plait.planner.formulas import CoreCosts, RuntimeCosts, TimeModel
from plait.planner.search import MEMORY_MARGIN, SearchResult, find_best_plans
from plait.planner.search_space import SearchSpace
from plait.planner.workload import ShardableParts, build_workload, find_shardable, make_axis_plan
from plait.tensors import opaque_code
from plait.tensors.moving_average import choose_average_dtype

CONTEXT_BYTES = 2 << 30
"""Bytes that a process on an accelerator uses without tensors: the device context and NCCL buffers."""
USABLE_MEMORY = 0.96
"""Usable fraction of a device's memory."""
CORE_RATES = (1e11, 2e10)
"""flop/s and bytes/s of a CPU core without measurements, as of a current server."""
UNPRICED_CP = "cp is priced only for models that call scaled_dot_product_attention; train --plan cp=… checks other models"
"""The reason why no plan with cp is proposed."""
DEFAULT_HOST_LINK = Link("memory", None, 2e9, 110e-6, "pcie")
"""Link between processes of one host without measurements."""


@dataclass(frozen=True)
class JobLimits:
    """The limits of a job, for any machine: reasons why it cannot be split in some ways. Each is computed once for all searches."""

    job: Job
    sketch: Sketch
    shardable: ShardableParts
    kind: optimizer_check.OptimizerKind | None = None
    mismatches: dict[str, optimizer_check.OptimizerMismatch | None] = field(default_factory=dict)
    """Results of optimizer trials, by axis."""

    def refuse_optimizer(self, plan: Plan) -> Problem | None:
        """Return the problem if the job's optimizer cannot update the parameter shards of a plan; None otherwise."""
        kind = self.optimizer
        if refused := optimizer_check.check_eval_mode(kind, plan) or optimizer_check.check_full_weights(kind, plan):
            return refused
        for axis in optimizer_check.list_sharded_axes(plan):
            found = self.find_mismatch(axis, plan.ep > 1)
            if found and not (found.full_helps and optimizer_check.can_update_full(plan, axis)):
                return optimizer_check.make_mismatch_problem(found, axis, plan)
        return None

    def find_mismatch(self, axis: str, ep: bool) -> optimizer_check.OptimizerMismatch | None:
        """Return a difference of the optimizer's result on shards along an axis. `ep`: experts are sharded too."""
        if (key := f"{axis} ep" if ep else axis) not in self.mismatches:
            lots = optimizer_check.list_splits(make_axis_plan(self.job, self.sketch, self.shardable, 2 if ep else 1), axis)
            self.mismatches[key] = optimizer_check.try_optimizer(self.job, self.sketch, lots, self.optimizer)
        return self.mismatches[key]

    @cached_property
    def optimizer(self) -> optimizer_check.OptimizerKind:
        return self.kind or optimizer_check.inspect_optimizer(self.job, self.sketch)

    @cached_property
    def slice_refusal(self) -> Callable[[int], str]:
        """Function from a number of ranks to the reason why equal tp shards are impossible; empty if they are possible."""
        fixed = [part for group in self.shardable.slices.groups for part in group.tp_shards if len(part.ranges[0]) == 1]

        def explain_refusal(ranks: int) -> str:
            features = ((part.parameter, part.ranges[0][0][1] * 2) for part in fixed)
            return next((f"{name} has {n} features, which tp={ranks} does not divide" for name, n in features if n % ranks), "")

        return cache(explain_refusal)

    @cached_property
    def stage_refusal(self) -> Callable[[int, int, str], str]:
        """Function from ranks, stages per rank and schedule to the reason why the model has no such stages; empty if it has."""
        partition = cache(lambda stages: partition_stages(self.sketch, stages, self.job.stages))

        def explain_refusal(pp: int, per_rank: int, schedule: str) -> str:
            try:
                parts = partition(pp * per_rank)
                if wrong := find_schedule_errors(schedule, pp, pp, per_rank):
                    return "; ".join(wrong)
                check_partition(self.sketch, parts, per_rank > 1)
            except (PlaitError, ValueError) as error:
                return error.problems[0].what if isinstance(error, PlaitError) else str(error)
            return ""

        return cache(explain_refusal)


@dataclass(frozen=True)
class PlanRequest:
    """A job on a machine, ready for a search."""

    job: Job
    name: str
    machine: Machine
    sketch: Sketch
    shardable: ShardableParts
    software: RuntimeCosts
    limits: JobLimits
    is_guessed: bool
    """The machine's speed is unknown; default figures of a CPU are used."""
    can_compile: bool = True
    """The model has units that consist of modules, which torch.compile can compile one by one."""
    say: Callable[[str], None] = lambda text: None
    """Receives the description of each phase of the search."""
    learned: LearnedCorrection = NO_RUNS
    """Corrections from runs on the machine."""
    sketch_age: float | None = None
    """Age of a reused sketch in seconds; None for a new one."""

    @staticmethod
    def from_job(
        job: Job, name: str, machine: Machine, *, split: bool = True, tp: bool = True, say: Callable[[str], None] = lambda text: None
    ) -> "PlanRequest":
        """Sketch the job and find its shardable parts.

        `split`: find shards of ep and, with `tp`, of tp. `say` receives the description of each phase. Processes may be forked later, so torch is
        limited
        to one thread.
        """
        import torch

        torch.set_num_threads(1)
        say("running the model on fake tensors")
        model, sketch = sketch_fake_model(job)
        example = sampling.open_sketch_data(job, sampling.open_job_data(job))
        inputs = lambda n: data.make_sketch_batch(example, n)[0]  # noqa: E731
        if split:
            say("finding shards of tp and ep" if tp else "finding shards of ep")
        cuts = find_shardable(sketch, model, inputs, job, tp) if split else ShardableParts()
        known, guessed = fill_speeds(machine)
        limits, compiles = JobLimits(job, sketch, cuts), bool(compiled.list_module_units(sketch, model))
        return PlanRequest(job, name, known, sketch, cuts, make_runtime_costs(job, sketch), limits, guessed, compiles, say)

    def with_machine(self, machine: Machine) -> "PlanRequest":
        """Return the same job on another machine."""
        known, guessed = fill_speeds(machine)
        return replace(self, machine=known, is_guessed=guessed)

    @property
    def has_accelerator(self) -> bool:
        """Whether the devices are accelerators, not CPU cores."""
        return not self.machine.is_on_cores

    @property
    def can_slice(self) -> bool:
        """Whether tp can shard any layer."""
        return bool(self.shardable.slices.groups or self.shardable.slices.vocabulary)

    @property
    def has_attention(self) -> bool:
        """Whether the model calls torch's attention, for which cp has a price."""
        return any(c.work.keys for c in self.sketch.calls)

    @property
    def most_head_shards(self) -> int:
        """Maximum number of ranks over which the heads of all attention calls can be split."""
        return gcd(*(round(p.batch) for call in self.sketch.calls if call.work.keys for p in call.work.products if not p.weight))

    @cached_property
    def pace(self) -> TimeModel:
        """The time model of its blocks, shared by all searches of this job on this machine."""
        loading = next((x.samples_per_s for x in self.machine.loaders if x.job == self.name), 0.0)
        made = self.software if self.has_accelerator else replace(self.software, cores=CoreCosts.from_machine(self.machine))
        table = make_axis_plan(self.job, self.sketch, self.shardable)
        work, fitted = build_workload(self.sketch, table, self.name, self.shardable), FITTED if self.has_accelerator else ON_CORES
        return TimeModel(work, self.machine, made, fitted, loading)

    def make_space(self, pins: dict[str, Any], memory: float | None = None, devices: int = 0) -> SearchSpace:
        """Return the search space under pinned keys."""
        known, on_device = self.machine.device, self.has_accelerator
        values: dict[str, tuple[Any, ...]] = {"sequence_parallel": (True, False)}
        if on_device:
            formats = ("bf16", "fp32") if known.peak.bf16 else ("fp32",)
            values = {"precision": formats, "offload": ("none", "optimizer", "all"), "compile": (False, True)}
        host = USABLE_MEMORY * ((self.machine.host_memory or 0) / self.machine.devices_per_node or 2 * known.memory)  # if unknown, twice the device's
        sizes, unlike = {m.experts for m in self.shardable.mixtures}, self.machine.devices_per_node if self.machine.is_heterogeneous else 0
        each = tuple(get_usable_memory(self.machine, memory or self.machine.memory(i)) for i in range(unlike))
        return SearchSpace(
            devices or self.machine.devices, self.job.batch, pins, max(each or (get_usable_memory(self.machine, memory),)), host, values,
            max(1, len(self.sketch.calls)), self.can_slice, self.has_attention, tuple(sorted(sizes)), self.most_head_shards, each,
            MEMORY_MARGIN * (memory or known.memory),
        )  # fmt: skip

    def find_plans(self, space: SearchSpace, max_cost: float = inf) -> SearchResult:
        """Find the best plans, with corrected times. Plans that cost more than `max_cost` may be missing."""
        within = inf if self.learned.anchors else max_cost  # `max_cost` is a corrected time
        return self.learned.correct_result(find_best_plans(self.pace, space, self.make_refusal(), within, self.say))

    def make_refusal(self) -> Callable[[Plan], str]:
        """Return a function from a plan to the reason why it is invalid; empty for a valid plan."""
        limits = self.limits
        device = "cuda" if self.has_accelerator else "cpu"
        parted = any(self.sketch.has_module(g.container) for g in self.shardable.slices.groups) or bool(self.shardable.slices.vocabulary)

        def explain_refusal(plan: Plan) -> str:
            try:
                check_plan(self.job, plan, device)
            except PlaitError as error:
                return error.problems[0].what
            if problem := mutations.find_unmeasured(plan, self.sketch):
                return problem.what
            if plan.tp > 1 and not (parted if plan.pp * plan.cp > 1 else self.can_slice):
                return self.shardable.tp_failure or "tp can shard no layer of the model"
            if plan.cp > 1 and not self.has_attention:
                return UNPRICED_CP
            if plan.compile and plan.across and not self.can_compile:
                return "compile=true finds nothing to compile: the model's units are single layers of torch's"
            if problem := mutations.find_lost_write(plan, self.sketch, self.shardable.parameter_names if plan.tp > 1 else ()):
                return problem.what
            if problem := opaque_code.find_scripted_problem(plan, self.sketch.scripted, self.sketch.changed_buffers) or limits.refuse_optimizer(plan):
                return problem.what
            if plan.tp > 1 and (reason := limits.slice_refusal(plan.tp)):
                return reason
            return limits.stage_refusal(plan.pp, plan.stages_per_rank, plan.schedule) if plan.pp > 1 else ""

        return explain_refusal


def get_usable_memory(machine: Machine, memory: float | None = None) -> float:
    """Return the usable bytes of a machine's device. `memory`: bytes of the device, if set by the user."""
    size = memory or machine.device.memory
    return size * USABLE_MEMORY if machine.is_on_cores else size * USABLE_MEMORY - CONTEXT_BYTES


def make_runtime_costs(job: Job, sketch: Sketch) -> RuntimeCosts:
    """Compute a job's bytes per weight: weights, gradients and optimizer state."""
    rows = [(prod(shape), dtype.itemsize) for _, shape, dtype in (*sketch.parameters, *sketch.frozen)]
    count = max(1, sum(n for n, _ in rows))
    trained = max(1, sum(prod(shape) for _, shape, _ in sketch.parameters))
    weights = sum(n * size for n, size in rows) / count
    kept = measure_state_bytes(job, sketch)
    if job.ema is not None:  # the average of the weights is kept like the optimizer state
        kept += sum(prod(shape) * choose_average_dtype(dtype).itemsize for _, shape, dtype in sketch.parameters)
    return RuntimeCosts(weights, weights, kept / trained, weights)


def fill_speeds(machine: Machine) -> tuple[Machine, bool]:
    """Fill in default speeds if the machine's are unknown, and return whether that was necessary."""
    device, peaks = machine.device, machine.device.peak
    known = any(peaks.for_precision(name) for name in ("fp32", "tf32", "fp16", "bf16", "fp8"))
    links = machine.links or ((DEFAULT_HOST_LINK,) if machine.devices > 1 else ())
    if known and device.memory_bandwidth and links == machine.links:
        return machine, False
    speed = Device(device.name, device.memory, device.memory_bandwidth or CORE_RATES[1] * machine.thread_speed,
                   peaks if known else Rates(fp32=CORE_RATES[0] * machine.thread_speed), device.achievable)  # fmt: skip
    return replace(machine, device=speed, links=links), not known
