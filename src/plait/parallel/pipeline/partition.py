"""Partition of a model into pipeline stages with balanced times and small messages, and the ranks of stages and
parameters.

Everything here is arithmetic on a sketch and a plan. A stage is a contiguous part of the sequence of unit calls. Values
of earlier stages that later stages need cross every boundary between them. Examples are skip connections, encoder
outputs, and masks computed from them.

[Note: Forward paths]
A forward path is the sequence of unit calls of one forward pass, with their outputs. It determines what crosses between
stages.

Usually the path is that of the sketch. Inputs of a different size (other lengths, other image sizes) and models that
choose units at random take other paths. Then every rank finds the path by running a copy of the model on fake tensors.
All ranks have the same inputs, and the host generators are in the state that they have in training. So the ranks agree
without messages. The stage of a unit is fixed: each call belongs to the stage of its unit.
"""

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import inf
from operator import add
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from plait.config.errors import PlaitError, Problem, did_you_mean, summarize_error
from plait.config.plan import Plan
from plait.model.meter import BETWEEN, KNOWN_USE, OUTPUT
from plait.model.operations import UnitCall
from plait.model.sketch import PROBE_SIZES, Sketch, fit_single
from plait.model.trace import RandomKeys, RunModel, trace_run
from plait.parallel.pipeline.schedule_search import build_table
from plait.parallel.pipeline.schedules import ScheduleTable
from plait.randomness import keyed
from plait.tensors.fake import RemoteFakeMode, make_fake_copy_on
from plait.tensors.module_state import restore_attributes, save_attributes
from plait.tensors.torch_private import own_buffers, own_parameters
from plait.tensors.trees import Template, TensorForm, TensorSlot, capture_form, make_template

SLACK = 1.1
"""Allowed time of the longest stage, relative to the best possible, in exchange for smaller messages."""


@dataclass(frozen=True)
class StagePartition:
    """The stage of every unit call, and the calls whose outputs cross into each stage from the previous one."""

    stages: int
    owner: tuple[int, ...]
    crossing: tuple[tuple[int, ...], ...]
    """Per stage: calls of earlier stages that this or a later stage needs. Nothing crosses into stage 0."""


def map_unit_stages(sketch: Sketch, partition: StagePartition) -> dict[str, list[int]]:
    """Return the stages of the calls of each unit. A unit that the sketch did not call gets the stage of the unit
    before it."""
    stages_of: dict[str, list[int]] = {}
    for call, stage in zip(sketch.calls, partition.owner):
        stages_of.setdefault(call.unit, []).append(stage)
    before = 0
    for unit in sketch.units:
        before = stages_of.setdefault(unit.name, [before])[-1]
    return stages_of


@dataclass(frozen=True)
class ForwardPath:
    """The calls of a forward pass, their stages, and the outputs that cross between stages (see [Note: Forward paths])."""

    calls: tuple[UnitCall, ...]
    partition: StagePartition
    host_states: tuple[Any, ...] = ()
    """States of Python's and numpy's generators after each call; empty if the model does not draw from them."""
    unknowns: dict[tuple[int, int], list[tuple[Tensor, int]]] = field(default_factory=dict)
    """By (call, number of samples): placeholders in the shapes of its output, with their versions."""

    @cached_property
    def side_effect_calls(self) -> frozenset[int]:
        """Calls with results outside of their output, such as attributes, that code on other stages reads. They are
        unknown there."""
        owner, pairs = self.partition.owner, enumerate(self.calls)
        return frozenset(i for i, call in pairs if any(j < 0 or owner[j] != owner[i] for j in call.aside))

    def advance_host_rng(self, call: int) -> None:
        """Set Python's and numpy's generators to their state after a call that runs on another rank."""
        if self.host_states:
            random.setstate(self.host_states[call][0])
            np.random.set_state(self.host_states[call][1])

    def crossing_slots(self, stage: int) -> list[TensorSlot]:
        """Return the slots of the tensors that cross into a stage."""
        return [slot for call in self.partition.crossing[stage] for slot in self.calls[call].template.slots]


def partition_stages(sketch: Sketch, stages: int, first: tuple[str, ...] | None = None) -> StagePartition:
    """Partition the unit calls into stages. `first`: the first unit of each stage except stage 0, from `Job(stages=…)`.

    Raises P023 if the model has fewer unit calls than stages, or its units could not be measured.
    """
    calls = sketch.calls
    if len(calls) < stages:
        why = sketch.unmeasured or f"the sketch has {len(calls)} unit calls in a forward pass"
        fix = (f"use at most {max(len(calls), 1)} stages", "name smaller units with Job(units=…)")
        raise PlaitError(Problem("P023", f"the model cannot be split into {stages} stages", why=why, fix=fix))
    starts = _resolve_starts(sketch, stages, first) if first is not None else _balance_starts(sketch, stages)
    bounds = [0, *starts, len(calls)]
    owner = tuple(s for s in range(stages) for _ in range(bounds[s], bounds[s + 1]))
    return StagePartition(stages, owner, find_crossings(calls, sketch.needs, owner, stages))


def check_partition(sketch: Sketch, partition: StagePartition, looped: bool, shared: bool = False) -> None:
    """Raise P024 if a unit passes a value to another stage in another way than by its output.

    `looped`: a rank has several stages, so it runs the code between units several times. `shared`: several ranks
    compute a unit together (tp, cp or ep).
    """
    for norm in sketch.batch_norms:
        if not sketch.has_module(norm):
            _reject(f"{norm} has running batch statistics and is in no unit", "each stage would compute different statistics")
    for buffer in sketch.changed_buffers if looped else ():
        if not sketch.has_module(buffer):
            why = "a rank with several stages runs that code once per stage"
            _reject(f"code between units changes the buffer {buffer} in every forward pass", why)
    for name, by in sketch.rewritten.items():
        held = next((u.name for u in sketch.units if name in u.parameters), "")
        if not all(f"{module}.".startswith(f"{held}.") for module in by) if held else looped:
            where = f"unit {held}" if held else "the model"
            _reject(f"code outside of {where} writes its weight {name}", "each stage has only the weights of its own units")
    if sketch.differentiates:
        _reject("the model computes derivatives in its forward pass", "these need the backward of units on other stages")
    check_calls(sketch.calls, partition.owner)
    beside = min(ForwardPath(sketch.calls, partition).side_effect_calls, default=None) if shared else None
    if beside is not None:
        why = "other stages would run the unit to find the stored values, but under tp, cp or ep its ranks compute it together"
        _reject(f"unit {sketch.calls[beside].unit} passes a value outside of its output", why)


def check_calls(calls: tuple[UnitCall, ...], owners: tuple[int, ...]) -> None:
    """Raise P024 if one of these calls passes on a value that cannot be sent. `owners` are the stages of the calls."""
    for call, owner in zip(calls, owners):
        unit = f"unit {call.unit}"
        if call.writes:
            why = "only a unit's output is sent between stages, not its writes into an input"
            _reject(f"{unit} changes its input in place", why)
        last = owner == max(owners)  # where the loss is computed
        far = [i for i in call.leaks if (owners[i] != owner if i >= 0 else i == BETWEEN or not last)]
        if far:
            user = f"unit {calls[far[0]].unit}" if far[0] >= 0 else "the loss"
            why = f"{user} depends on a tensor of it in an attribute, a list or another object; only its output is sent between stages"
            if far[0] == BETWEEN:
                why = "code between units reads the value of a tensor that it stored in an attribute, a list or another object"
            _reject(f"{unit} passes a value outside of its output", why)
        if call.template.varies:
            why = (
                "stages derive the structure of received values from the first samples; only tensor sizes may change"
            )
            _reject(f"{unit} returns Python numbers, or a number of tensors, that depend on the batch", why)


def _reject(what: str, why: str) -> NoReturn:
    fix = ("return the tensor", "pp=1") if "outside of its output" in what else ("pp=1",)
    raise PlaitError(Problem("P024", what, why=why, fix=fix))


def _resolve_starts(sketch: Sketch, stages: int, first: tuple[str, ...]) -> list[int]:
    if len(first) != stages - 1:
        what = f"Job(stages=…) names {len(first)} units, but {stages} stages need {stages - 1}"
        raise PlaitError(Problem("P023", what, fix=("name the first unit of each stage except stage 0",)))
    names = [call.unit for call in sketch.calls]
    starts = []
    for unit in first:
        if unit not in names:
            what = f"Job(stages=…) contains an unknown unit: {unit}        {did_you_mean(unit, sorted(set(names)))}"
            raise PlaitError(Problem("P023", what, fix=("list the units with: plait sketch JOB",)))
        starts.append(names.index(unit))
    if starts != sorted(set(starts)) or starts[0] == 0:
        raise PlaitError(Problem("P023", "Job(stages=…) is not in the order of the unit calls", why=", ".join(first)))
    return starts


def estimate_call_costs(sketch: Sketch) -> list[float]:
    """Return the relative time of every call, from its operations and, with a small weight, its bytes."""
    return [c.flops.for_batch(1) + 10.0 * (c.output.for_batch(1) + c.saved.for_batch(1)) + 1.0 for c in sketch.calls]


def compute_boundary_bytes(sketch: Sketch) -> list[float]:
    """Return the bytes per sample that cross the boundary before each call, and after the last one."""
    last = {i: i for i in range(len(sketch.calls))}
    for j, call in enumerate(sketch.calls):
        for i in call.needs:
            last[i] = j
    for i in sketch.needs:
        last[i] = len(sketch.calls)
    size = [c.output.for_batch(1) for c in sketch.calls]
    return [sum(size[i] for i in range(b) if last[i] >= b) for b in range(len(sketch.calls) + 1)]


def _balance_starts(sketch: Sketch, stages: int) -> list[int]:
    """Choose the boundaries with the fewest bytes among those whose longest stage is within `SLACK` of the best."""
    total, sent = list(accumulate(estimate_call_costs(sketch), initial=0.0)), compute_boundary_bytes(sketch)
    n = len(total) - 1
    limit = SLACK * _search_boundaries(n, stages, lambda a, b: total[b] - total[a], max)[0]

    def price_bytes(a: int, b: int) -> float:
        if total[b] - total[a] > limit:
            return inf
        return sent[b] if b < n else 0.0

    return _search_boundaries(n, stages, price_bytes, add)[1]


def _search_boundaries(
    n: int, stages: int, price: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Split 0 … n into contiguous parts by dynamic programming. Return (smallest joined price, inner boundaries)."""
    rows: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for stage in range(1, stages + 1):
        row: dict[int, tuple[float, int]] = {}
        ends = [n] if stage == stages else range(stage, n - (stages - stage) + 1)
        for end in ends:
            row[end] = min(
                (join(value, price(begin, end)), begin) for begin, (value, _) in rows[-1].items() if begin < end
            )
        rows.append(row)
    bounds, end = [], n
    for row in reversed(rows[1:]):
        end = row[end][1]
        bounds.append(end)
    return rows[-1][n][0], bounds[-2::-1]


def find_crossings(
    calls: tuple[UnitCall, ...], needs: tuple[int, ...], owner: tuple[int, ...], stages: int
) -> tuple[tuple[int, ...], ...]:
    """List per stage the earlier calls that this stage, a later stage, or the model's output (`needs`) needs."""
    by_stage = []
    for stage in range(stages):
        needed = {i for j, call in enumerate(calls) if owner[j] >= stage for i in call.needs} | set(needs)
        by_stage.append(tuple(sorted(i for i in needed if owner[i] < stage)))
    return tuple(by_stage)


@dataclass(frozen=True)
class StageLayout:
    """The placement of a model on the ranks of a pipeline. Ranks are indices on the axis `pp`."""

    sketch: Sketch
    """Sketch of the full model."""
    partition: StagePartition
    owner: tuple[int, ...]
    """The rank of each stage."""
    param_ranks: dict[str, tuple[int, ...]]
    """The ranks that have each parameter."""

    @staticmethod
    def from_plan(plan: Plan, sketch: Sketch, first: tuple[str, ...] | None = None) -> "StageLayout":
        """Compute the placement of a plan. `first`: the first unit of each stage except stage 0. Raises P023 like
        `partition_stages`."""
        partition = partition_stages(sketch, plan.pp * plan.stages_per_rank, first)
        owner = make_plan_table(plan, plan.microbatches).owner
        return StageLayout(sketch, partition, owner, _map_parameter_ranks(sketch, partition, owner, plan.pp))

    @property
    def crossing_units(self) -> set[str]:
        """Names of units whose output crosses to another stage."""
        return {self.sketch.calls[call].unit for calls in self.partition.crossing for call in calls}

    def list_units(self, index: int) -> set[str]:
        """Return the names of the units that have a call in a stage of a rank."""
        called = map_unit_stages(self.sketch, self.partition).items()
        return {unit for unit, stages in called if any(self.owner[stage] == index for stage in stages)}

    def make_local_sketch(self, index: int) -> Sketch:
        """Return the sketch of a rank's stages. Dependencies on calls of other stages are removed."""
        sketch, units = self.sketch, self.list_units(index)
        names = {n for n, ranks in self.param_ranks.items() if index in ranks}
        stage, mine = self.partition.owner, [i for i, c in enumerate(self.sketch.calls) if c.unit in units]
        number = {i: k for k, i in enumerate(mine)}
        out = {i for j, c in enumerate(sketch.calls) for i in c.needs if stage[i] != stage[j]} | set(sketch.needs)
        near = lambda i: tuple(number[j] for j in sketch.calls[i].needs if j in number and stage[j] == stage[i])  # noqa: E731
        inside = lambda module: any(f"{module}.".startswith(f"{u}.") for u in units)  # noqa: E731
        return replace(
            sketch,
            parameters=tuple(row for row in sketch.parameters if row[0] in names),
            frozen=tuple(row for row in sketch.frozen if row[0] in names),
            batch_norms=tuple(n for n in sketch.batch_norms if inside(n)),
            units=tuple(u for u in sketch.units if u.name in units),
            calls=tuple(replace(sketch.calls[i], needs=near(i)) for i in mine),
            needs=tuple(number[i] for i in mine if i in out),
            rest=tuple(n for n in sketch.rest if n in names),
        )


def make_plan_table(plan: Plan, microbatches: int) -> ScheduleTable:
    """Build the schedule table of a plan, for a number of micro-batches."""
    return build_table(plan.schedule, plan.pp, microbatches, plan.stages_per_rank)


def _map_parameter_ranks(
    sketch: Sketch, partition: StagePartition, owner: tuple[int, ...], ranks: int
) -> dict[str, tuple[int, ...]]:
    """Map each parameter to the ranks that have it: the ranks of its units, or all ranks if code between units may use
    it."""
    holders: dict[str, set[int]] = {name: set() for name, _, _ in (*sketch.parameters, *sketch.frozen)}
    stages = map_unit_stages(sketch, partition)
    for unit in sketch.units:
        for name in unit.parameters:
            holders[name] |= {owner[stage] for stage in stages[unit.name]} if unit.closed else set(range(ranks))
    return {name: tuple(sorted(r or range(ranks))) for name, r in holders.items()}


MAX_CACHED_PATHS = 256
"""Maximum number of cached forward paths."""


@dataclass(frozen=True)
class ForwardRequest:
    """The inputs of a forward pass that will run, and the position of its samples in a step. `step` is −1 in an
    evaluation."""

    inputs: object
    samples: int
    first: int = 0
    step: int = -1


class ForwardPaths:
    """Finds and caches the forward paths of a partitioned model. `call` runs the model in the number format of
    training."""

    def __init__(
        self, model: nn.Module, sketch: Sketch, cut: StagePartition, call: RunModel, inputs: Callable[[int], Any], device: torch.device
    ):
        self.model, self.sketch, self.call = model, sketch, call
        self.sketch_path = ForwardPath(sketch.calls, cut)
        self.seed = 0
        """The job's seed, from which the host generators are seeded."""
        self.is_fixed = False
        """True under cp: sequence shards cross between stages, which a run in this process cannot reproduce. Only the
        sketch's path is used."""
        self.fakes = RemoteFakeMode(allow_non_fake_inputs=True)
        self.example_template: Template = make_template(capture_form(inputs(PROBE_SIZES[0])), capture_form(inputs(PROBE_SIZES[1])), PROBE_SIZES)
        """Template of the inputs that the sketch used."""
        self.is_random = sketch.host_random or sketch.has_random_branches
        self.found_paths: OrderedDict[Any, ForwardPath] = OrderedDict()
        self.owner = map_unit_stages(sketch, cut)
        try:
            self.fake_model: nn.Module | None = make_fake_copy_on(model, self.fakes, device)
        except Exception:  # a model that cannot be copied supports the sketch's path only
            self.fake_model = None

    def find_path(self, forward: ForwardRequest) -> ForwardPath:
        """Return the path of a forward pass. Raises P025 if it cannot be found, and P024 if the stages cannot run it."""
        if self.is_fixed:
            return self.sketch_path
        form = make_input_signature(forward.inputs)
        if form == self._make_usual_signature(forward.samples) and not self.is_random:
            return self.sketch_path
        key = (form, self.model.training, (forward.step, forward.first) if self.is_random else None)
        if key not in self.found_paths or (self.is_random and forward.step < 0):
            self.found_paths[key] = self._trace_path(forward)
            while len(self.found_paths) > MAX_CACHED_PATHS:
                self.found_paths.popitem(last=False)
        self.found_paths.move_to_end(key)
        return self.found_paths[key]

    def _make_usual_signature(self, samples: int) -> tuple[Any, ...]:
        """Return the signature of inputs that have the sketch's structure."""
        form = lambda slot: TensorForm(slot.shape_for(samples), slot.dtype, slot.grad)  # noqa: E731
        rows = (_describe_leaf(form(leaf) if isinstance(leaf, TensorSlot) else leaf) for leaf in self.example_template.leaves)
        return repr(self.example_template.spec), tuple(rows)

    def _trace_path(self, forward: ForwardRequest) -> ForwardPath:
        if self.fake_model is None:
            raise self._make_path_error("the model cannot be copied")
        for module, other in zip(self.fake_model.modules(), self.model.modules()):
            module.training = other.training
        state = keyed.get_host_state()
        if forward.step >= 0:
            keyed.seed_host(self.seed, "forward", forward.step)
        keys = RandomKeys((self.seed, forward.step, forward.first, forward.samples), self.sketch.places, self.is_random)
        units = [unit.name for unit in self.sketch.units]
        held = save_attributes(self.model.modules())  # a function stored in an attribute may refer to the model and not to its copy
        for module, other in zip(self.fake_model.modules(), self.model.modules()):
            vars(other).update(_parameters=own_parameters(module), _buffers=own_buffers(module))
        try:
            trace = trace_run(self.fake_model, forward.inputs, self.call, True, units, keys)
        except Exception as error:
            raise self._make_path_error(summarize_error(error)) from error
        finally:
            keyed.restore_host_state(state)
            restore_attributes(held)
        calls = tuple(self._drop_false_leaks(fit_single(call)) for call in trace.metered.calls)
        owner = self._assign_stages(calls)
        check_calls(calls, owner)
        stages = self.sketch_path.partition.stages
        cut = StagePartition(stages, owner, find_crossings(calls, trace.metered.needs, owner, stages))
        return ForwardPath(calls, cut, tuple(keys.host_states) if self.sketch.host_random else ())

    def _drop_false_leaks(self, call: UnitCall) -> UnitCall:
        """Remove leaks into the loss that the sketch did not see for this unit."""
        known = {leak for other in self.sketch.calls if other.unit == call.unit for leak in other.leaks}
        return replace(call, leaks=tuple(leak for leak in call.leaks if leak not in (OUTPUT, KNOWN_USE) or leak in known))

    def _assign_stages(self, calls: tuple[UnitCall, ...]) -> tuple[int, ...]:
        """Assign to each call the stage of its unit's call in the sketch. Raises P024 if the stages are not ascending."""
        times: dict[str, int] = {}
        owner: list[int] = []
        for call in calls:
            stages = self.owner[call.unit]
            number = times[call.unit] = times.get(call.unit, -1) + 1
            owner.append(stages[min(number, len(stages) - 1)])
            if len(owner) > 1 and owner[-1] < owner[-2]:
                what = f"unit {call.unit} of stage {owner[-1]} is called after a unit of stage {owner[-2]}"
                why = "for other inputs or random numbers, the model calls its units in a different order than in the sketch"
                raise PlaitError(Problem("P024", what, why=why, fix=("pp=1", "choose other stages with Job(stages=…)")))
        return tuple(owner)

    def _make_path_error(self, why: str) -> PlaitError:
        if self.is_random:
            what = "the model chooses at random which units to run, and the choice depends on values of other stages"
            return PlaitError(Problem("P024", what, why=why, fix=("pp=1",)))
        what = "the tensors that cross between stages are unknown for inputs of this size"
        return PlaitError(Problem("P025", what, why=why, fix=("pad samples to one length", "pp=1")))


def make_input_signature(inputs: object) -> tuple[Any, ...]:
    """Return a hashable signature of inputs: their tree, tensor shapes and dtypes, and the other leaves."""
    spec, rows = capture_form(inputs)
    return repr(spec), tuple(map(_describe_leaf, rows))


def _describe_leaf(leaf: object) -> object:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, TensorForm) else repr(leaf)
