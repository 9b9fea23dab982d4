"""From a job and a machine to what the search needs: the workload of the model, its numbers, and what may be split."""

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
from plait.model.fake_model import sketched
from plait.model.sketch import Sketch
from plait.parallel import compiled, mutations
from plait.parallel.fsdp import optimizer_check
from plait.parallel.pipeline.partition import check, cut
from plait.parallel.pipeline.schedules import problems
from plait.planner.constants import FITTED, ON_CORES
from plait.planner.correction import NOTHING, Learned
from plait.planner.dryrun.optimizer_step import optimizer_state
from plait.planner.formulas import Cores, Software, TimeModel
from plait.planner.from_sketch import Cuts, cuts_of, sharding, workload_of
from plait.planner.search import MARGIN, Found, search
from plait.planner.search_space import SearchSpace
from plait.tensors import opaque_code
from plait.tensors.moving_average import averaged_in

CONTEXT = 2 << 30
"""Bytes that a process on an accelerator takes before it has a tensor: the device's context, and buffers of NCCL."""
ROOM = 0.96
"""Part of a device's memory that is really there."""
CORE = (1e11, 2e10)
"""flop/s and bytes/s of a processor's core of which nothing was measured: of a present server's."""
UNPRICED_CP = "cp has a price only for models that call scaled_dot_product_attention; train --plan cp=… tells whether others can"
"""Why no plan with cp is offered."""
BETWEEN = Link("memory", None, 2e9, 110e-6, "pcie")
"""Between processes of one host of which nothing was measured."""


@dataclass(frozen=True)
class JobLimits:
    """Why a job cannot be split in some ways, whatever the machine. Each is found out once, for all searches of the job."""

    job: Job
    sketch: Sketch
    cuts: Cuts
    kind: optimizer_check.OptimizerKind | None = None
    tried: dict[str, optimizer_check.OptimizerMismatch | None] = field(default_factory=dict)
    """By axis, what trials of the optimizer showed."""

    def unlike(self, plan: Plan) -> Problem | None:
        """Why the job's optimizer cannot update what a rank of the plan has of the parameters."""
        kind = self.optimizer
        if refused := optimizer_check.without_eval_mode(kind, plan) or optimizer_check.without_whole_weights(kind, plan):
            return refused
        for axis in optimizer_check.axes_of(plan):
            found = self.mismatch(axis, plan.ep > 1)
            if found and not (found.whole_helps and optimizer_check.can_be_whole(plan, axis)):
                return optimizer_check.problem(found, axis, plan)
        return None

    def mismatch(self, axis: str, ep: bool) -> optimizer_check.OptimizerMismatch | None:
        """What the optimizer does otherwise with what ranks have along an axis; `ep`: experts are shared out too."""
        if (key := f"{axis} ep" if ep else axis) not in self.tried:
            lots = optimizer_check.lots_of(sharding(self.job, self.sketch, self.cuts, 2 if ep else 1), axis)
            self.tried[key] = optimizer_check.tried(self.job, self.sketch, lots, self.optimizer)
        return self.tried[key]

    @cached_property
    def optimizer(self) -> optimizer_check.OptimizerKind:
        return self.kind or optimizer_check.kind_of(self.job, self.sketch)

    @cached_property
    def uneven(self) -> Callable[[int], str]:
        """Why so many ranks cannot have equal slices: a number that the model's code has fixed does not divide."""
        fixed = [part for group in self.cuts.slices.groups for part in group.cuts if len(part.ranges[0]) == 1]

        def why(ranks: int) -> str:
            features = ((part.parameter, part.ranges[0][0][1] * 2) for part in fixed)
            return next((f"{name} has {n} features, which tp={ranks} does not divide" for name, n in features if n % ranks), "")

        return cache(why)

    @cached_property
    def staged(self) -> Callable[[int, int, str], str]:
        """Why the model cannot be cut into stages: of ranks, of how many for each, and of the schedule."""
        partition = cache(lambda stages: cut(self.sketch, stages, self.job.stages))

        def why(pp: int, per_rank: int, schedule: str) -> str:
            try:
                parts = partition(pp * per_rank)
                if wrong := problems(schedule, pp, pp, per_rank):
                    return "; ".join(wrong)
                check(self.sketch, parts, per_rank > 1)
            except (PlaitError, ValueError) as error:
                return error.problems[0].what if isinstance(error, PlaitError) else str(error)
            return ""

        return cache(why)


@dataclass(frozen=True)
class PlanRequest:
    """A job on a machine, ready to be searched."""

    job: Job
    name: str
    machine: Machine
    sketch: Sketch
    cuts: Cuts
    software: Software
    limits: JobLimits
    guessed: bool
    """Nothing is known of the machine's speed: figures of some processor were taken."""
    compiles: bool = True
    """The model has units that consist of modules, which torch.compile can take one by one."""
    say: Callable[[str], None] = lambda text: None
    """Gets what is begun, in words."""
    learned: Learned = NOTHING
    """What runs on the machine say of predictions."""
    age: float | None = None
    """Seconds since the job was sketched, if an earlier plan did."""

    @staticmethod
    def of(
        job: Job, name: str, machine: Machine, *, split: bool = True, tp: bool = True, say: Callable[[str], None] = lambda text: None
    ) -> "PlanRequest":
        """Sketch the job; `split`: also find what ep and, with `tp`, tp can cut. `say` gets what is begun, in words.

        Processes may be forked later, so no threads may have computed anything by then.
        """
        import torch

        torch.set_num_threads(1)
        say("running the model on tensors without numbers")
        model, sketch = sketched(job)
        example = sampling.example(job, sampling.data_of(job))
        inputs = lambda n: data.first_samples(example, n)[0]  # noqa: E731
        if split:
            say("finding what tp and ep can cut" if tp else "finding what ep can cut")
        cuts = cuts_of(sketch, model, inputs, job, tp) if split else Cuts()
        known, guessed = sped(machine)
        limits, compiles = JobLimits(job, sketch, cuts), bool(compiled.module_units(sketch, model))
        return PlanRequest(job, name, known, sketch, cuts, software(job, sketch), limits, guessed, compiles, say)

    def on(self, machine: Machine) -> "PlanRequest":
        """The same job on another machine."""
        known, guessed = sped(machine)
        return replace(self, machine=known, guessed=guessed)

    @property
    def accelerated(self) -> bool:
        """Whether devices are more than a processor's cores."""
        return not self.machine.on_cores

    @property
    def sliceable(self) -> bool:
        """Whether tp can cut any layer."""
        return bool(self.cuts.slices.groups or self.cuts.slices.vocabulary)

    @property
    def attends(self) -> bool:
        """Whether it calls torch's attention, for whose sequence cut by cp there is a price."""
        return any(c.work.keys for c in self.sketch.calls)

    @property
    def heads(self) -> int:
        """The most ranks that can share out the heads of all its attention."""
        return gcd(*(round(p.batch) for call in self.sketch.calls if call.work.keys for p in call.work.products if not p.weight))

    @cached_property
    def pace(self) -> TimeModel:
        """Times of its blocks, which all searches of this job on this machine share."""
        loading = next((x.samples_per_s for x in self.machine.loaders if x.job == self.name), 0.0)
        made = self.software if self.accelerated else replace(self.software, cores=Cores.of(self.machine))
        table = sharding(self.job, self.sketch, self.cuts)
        work, fitted = workload_of(self.sketch, table, self.name, self.cuts), FITTED if self.accelerated else ON_CORES
        return TimeModel(work, self.machine, made, fitted, loading)

    def question(self, pins: dict[str, Any], memory: float | None = None, devices: int = 0) -> SearchSpace:
        """What to search, with keys that are given."""
        known, on_device = self.machine.device, self.accelerated
        values: dict[str, tuple[Any, ...]] = {"sequence_parallel": (True, False)}
        if on_device:
            formats = ("bf16", "fp32") if known.peak.bf16 else ("fp32",)
            values = {"precision": formats, "offload": ("none", "optimizer", "all"), "compile": (False, True)}
        host = ROOM * ((self.machine.host_memory or 0) / self.machine.devices_per_node or 2 * known.memory)  # if unknown, twice a device's
        sizes, unlike = {m.experts for m in self.cuts.mixtures}, self.machine.devices_per_node if self.machine.unlike else 0
        each = tuple(room(self.machine, memory or self.machine.memory(i)) for i in range(unlike))
        return SearchSpace(
            devices or self.machine.devices, self.job.batch, pins, max(each or (room(self.machine, memory),)), host, values,
            max(1, len(self.sketch.calls)), self.sliceable, self.attends, tuple(sorted(sizes)), self.heads, each,
            MARGIN * (memory or known.memory),
        )  # fmt: skip

    def searched(self, question: SearchSpace, within: float = inf) -> Found:
        """The best plans, by what runs on the machine say of predictions. Plans that cost more than `within` may be left out."""
        within = inf if self.learned.anchors else within  # it is of corrected times
        return self.learned.corrected(search(self.pace, question, self.refused(), within, self.say))

    def refused(self) -> Callable[[Plan], str]:
        """Why a plan cannot work, or nothing: what its strategies refuse, and stages that the model cannot be cut into."""
        limits = self.limits
        device = "cuda" if self.accelerated else "cpu"
        parted = any(self.sketch.has(g.container) for g in self.cuts.slices.groups) or bool(self.cuts.slices.vocabulary)

        def why(plan: Plan) -> str:
            try:
                check_plan(self.job, plan, device)
            except PlaitError as error:
                return error.problems[0].what
            if problem := mutations.refused_unmeasured(plan, self.sketch):
                return problem.what
            if plan.tp > 1 and not (parted if plan.pp * plan.cp > 1 else self.sliceable):
                return self.cuts.unfollowed or "no layer of the model can be cut"
            if plan.cp > 1 and not self.attends:
                return UNPRICED_CP
            if plan.compile and plan.across and not self.compiles:
                return "compile=true finds nothing to compile: the model's units are single layers of torch's"
            if problem := mutations.refused(plan, self.sketch, self.cuts.names if plan.tp > 1 else ()):
                return problem.what
            if problem := opaque_code.refused(plan, self.sketch.scripted, self.sketch.counting) or limits.unlike(plan):
                return problem.what
            if plan.tp > 1 and (reason := limits.uneven(plan.tp)):
                return reason
            return limits.staged(plan.pp, plan.stages_per_rank, plan.schedule) if plan.pp > 1 else ""

        return why


def room(machine: Machine, memory: float | None = None) -> float:
    """Bytes of a machine's device that a plan may take; `memory`: of the device, when the user says."""
    size = memory or machine.device.memory
    return size * ROOM if machine.on_cores else size * ROOM - CONTEXT


def software(job: Job, sketch: Sketch) -> Software:
    """Bytes per weight of a job: of weights, gradients and of what its optimizer keeps."""
    rows = [(prod(shape), dtype.itemsize) for _, shape, dtype in (*sketch.parameters, *sketch.frozen)]
    count = max(1, sum(n for n, _ in rows))
    trained = max(1, sum(prod(shape) for _, shape, _ in sketch.parameters))
    weights = sum(n * size for n, size in rows) / count
    kept = optimizer_state(job, sketch)
    if job.ema is not None:  # the average of the weights is kept where and as the optimizer's state is
        kept += sum(prod(shape) * averaged_in(dtype).itemsize for _, shape, dtype in sketch.parameters)
    return Software(weights, weights, kept / trained, weights)


def sped(machine: Machine) -> tuple[Machine, bool]:
    """The machine with figures of some processor where nothing is known of its speed, and whether that was so."""
    device, peaks = machine.device, machine.device.peak
    known = any(peaks.of(name) for name in ("fp32", "tf32", "fp16", "bf16", "fp8"))
    links = machine.links or ((BETWEEN,) if machine.devices > 1 else ())
    if known and device.memory_bandwidth and links == machine.links:
        return machine, False
    speed = Device(device.name, device.memory, device.memory_bandwidth or CORE[1],
                   peaks if known else Rates(fp32=CORE[0]), device.achievable)  # fmt: skip
    return replace(machine, device=speed, links=links), not known
