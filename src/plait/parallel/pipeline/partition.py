"""Where to cut a model into stages, for balanced time and few bytes across, and which rank has which stages and parameters.

All of it is arithmetic on a sketch and a plan. Stages are stretches of the sequence of unit calls; what later stages need of
earlier ones (skip connections, encoder outputs, masks computed from them) crosses every boundary between.

The path of a forward pass: which units it calls, what they return, and so what crosses between stages.

As a rule it is that of the sketch. Inputs of another size (padded to another length, images of another size), and models
that decide at random what to run, take others: then every rank finds the path itself, by running a hollow copy of
the model, on fake tensors, with the inputs that all of them have and the host generators where training has them.
Nothing has to be sent to agree on it. What a stage owns stays: a call belongs to the stage of its unit.
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

from plait.config.errors import PlaitError, Problem, did_you_mean, in_a_line
from plait.config.plan import Plan
from plait.model.meter import BETWEEN, KNOWN, OUTPUT
from plait.model.operations import UnitCall
from plait.model.sketch import PROBES, Sketch, single
from plait.model.trace import Call, Keys, trace_run
from plait.parallel.pipeline.schedule_search import table
from plait.parallel.pipeline.schedules import Table
from plait.randomness import keyed
from plait.tensors.fake import Unknowns, emptied_on
from plait.tensors.modules import attributes_of, put_back
from plait.tensors.torch_private import own_buffers
from plait.tensors.trees import Slot, Template, TensorForm, taken, template

SLACK = 1.1
"""How much longer than the best possible the longest stage may be, for fewer bytes across."""


@dataclass(frozen=True)
class StagePartition:
    """The stage of every unit call, and the calls whose outputs cross into each stage from the one before it."""

    stages: int
    owner: tuple[int, ...]
    crossing: tuple[tuple[int, ...], ...]
    """By stage: calls of earlier stages that it or a later one needs. Nothing crosses into stage 0."""


def homes(sketch: Sketch, partition: StagePartition) -> dict[str, list[int]]:
    """The stages of the calls of each unit. A unit that these runs of the sketch left out goes with the one before it."""
    stages_of: dict[str, list[int]] = {}
    for call, stage in zip(sketch.calls, partition.owner):
        stages_of.setdefault(call.unit, []).append(stage)
    before = 0
    for unit in sketch.units:
        before = stages_of.setdefault(unit.name, [before])[-1]
    return stages_of


@dataclass(frozen=True)
class ForwardPath:
    """The calls of a forward pass, their stages, and what crosses. `samples` is the batch size templates are asked for."""

    calls: tuple[UnitCall, ...]
    cut: StagePartition
    after: tuple[Any, ...] = ()
    """Where Python's and numpy's generators are after each call; empty when the model does not draw from them."""
    unknowns: dict[tuple[int, int], list[tuple[Tensor, int]]] = field(default_factory=dict)
    """Of a call and a number of samples: unknowns in the shapes that it returns, with their versions."""

    @cached_property
    def aside(self) -> frozenset[int]:
        """Calls whose other results, past what they return, code on other stages gets hold of: these are unknown there."""
        owner, pairs = self.cut.owner, enumerate(self.calls)
        return frozenset(i for i, call in pairs if any(j < 0 or owner[j] != owner[i] for j in call.aside))

    def passed(self, call: int) -> None:
        """A call is made elsewhere: put Python's and numpy's generators where it leaves them."""
        if self.after:
            random.setstate(self.after[call][0])
            np.random.set_state(self.after[call][1])

    def slots(self, stage: int) -> list[Slot]:
        """The tensors that cross into a stage."""
        return [slot for call in self.cut.crossing[stage] for slot in self.calls[call].template.slots]


def cut(sketch: Sketch, stages: int, first: tuple[str, ...] | None = None) -> StagePartition:
    """Cut into `stages`. `first`: the first unit of each stage but stage 0, when the user chose.

    P023 when the model has fewer unit calls than stages, or nothing is known of its units.
    """
    calls = sketch.calls
    if len(calls) < stages:
        why = sketch.unmeasured or f"its units are called {len(calls)} times in a forward pass"
        fix = (f"at most {max(len(calls), 1)} stages", "Job(units=…) names smaller units")
        raise PlaitError(Problem("P023", f"the model cannot be cut into {stages} stages", why=why, fix=fix))
    starts = _chosen(sketch, stages, first) if first is not None else _balanced(sketch, stages)
    bounds = [0, *starts, len(calls)]
    owner = tuple(s for s in range(stages) for _ in range(bounds[s], bounds[s + 1]))
    return StagePartition(stages, owner, crossings(calls, sketch.needs, owner, stages))


def check(sketch: Sketch, partition: StagePartition, looped: bool, shared: bool = False) -> None:
    """P024 when a value goes from a unit to another stage by a way that is not what the unit returns.

    `looped`: a rank has several stages, and so runs the code between units several times. `shared`: ranks compute units together.
    """
    for norm in sketch.batch_norms:
        if not sketch.has(norm):
            _refuse(f"{norm} keeps batch statistics and lies in no unit", "every stage would keep others")
    for buffer in sketch.counting if looped else ():
        if not sketch.has(buffer):
            why = "a rank with several stages runs that code once for each"
            _refuse(f"code between units changes the buffer {buffer} in every forward pass", why)
    for name, by in sketch.rewritten.items():
        held = next((u.name for u in sketch.units if name in u.parameters), "")
        if not all(f"{module}.".startswith(f"{held}.") for module in by) if held else looped:
            where = f"the unit {held}" if held else "the model"
            _refuse(f"code outside of {where} changes its weight {name}", "stages have the weights of their own units")
    if sketch.differentiates:
        _refuse("the model takes derivatives in its forward pass", "they go back through units of other stages")
    check_calls(sketch.calls, partition.owner)
    beside = min(ForwardPath(sketch.calls, partition).aside, default=None) if shared else None
    if beside is not None:
        why = "other stages would run it to know what it leaves in objects, and beside tp, cp or ep its ranks compute it together"
        _refuse(f"unit {sketch.calls[beside].unit} hands on a value besides what it returns", why)


def check_calls(calls: tuple[UnitCall, ...], owners: tuple[int, ...]) -> None:
    """P024 when one of the calls, which lie in these stages, hands on a value that cannot be sent."""
    for call, owner in zip(calls, owners):
        unit = f"unit {call.unit}"
        if call.writes:
            why = "what it writes is not what it returns, and only that travels between stages"
            _refuse(f"{unit} changes what it is given, in place", why)
        last = owner == max(owners)  # where the loss is computed
        far = [i for i in call.leaks if (owners[i] != owner if i >= 0 else i == BETWEEN or not last)]
        if far:
            user = f"unit {calls[far[0]].unit}" if far[0] >= 0 else "the loss"
            why = f"{user} depends on a tensor of it in an attribute, a list or another object; only what it returns travels"
            if far[0] == BETWEEN:
                why = "code between units makes a number of a tensor of it in an attribute, a list or another object"
            _refuse(f"{unit} hands on a value besides what it returns", why)
        if call.template.varies:
            why = (
                "stages know the structure of what they receive from the first samples; tensors may grow, nothing else"
            )
            _refuse(f"{unit} returns numbers or a count of tensors that depend on the batch", why)


def _refuse(what: str, why: str) -> NoReturn:
    fix = ("return the tensor", "pp=1") if "besides" in what else ("pp=1",)
    raise PlaitError(Problem("P024", what, why=why, fix=fix))


def _chosen(sketch: Sketch, stages: int, first: tuple[str, ...]) -> list[int]:
    if len(first) != stages - 1:
        what = f"Job(stages=…) names {len(first)} cuts, {stages} stages need {stages - 1}"
        raise PlaitError(Problem("P023", what, fix=("one unit for the start of each stage but the first",)))
    names = [call.unit for call in sketch.calls]
    starts = []
    for unit in first:
        if unit not in names:
            what = f"Job(stages=…) names no unit of the model: {unit}        {did_you_mean(unit, sorted(set(names)))}"
            raise PlaitError(Problem("P023", what, fix=("plait sketch JOB lists the units",)))
        starts.append(names.index(unit))
    if starts != sorted(set(starts)) or starts[0] == 0:
        raise PlaitError(Problem("P023", "Job(stages=…) is not in the order of the units' calls", why=", ".join(first)))
    return starts


def costs(sketch: Sketch) -> list[float]:
    """Relative time of every call: operations, and a little for bytes, so that no call is free."""
    return [c.flops.of(1) + 10.0 * (c.output.of(1) + c.saved.of(1)) + 1.0 for c in sketch.calls]


def across(sketch: Sketch) -> list[float]:
    """Bytes per sample that cross a boundary before each call (and, last, after all of them)."""
    last = {i: i for i in range(len(sketch.calls))}
    for j, call in enumerate(sketch.calls):
        for i in call.needs:
            last[i] = j
    for i in sketch.needs:
        last[i] = len(sketch.calls)
    size = [c.output.of(1) for c in sketch.calls]
    return [sum(size[i] for i in range(b) if last[i] >= b) for b in range(len(sketch.calls) + 1)]


def _balanced(sketch: Sketch, stages: int) -> list[int]:
    """The boundaries with the fewest bytes across among those whose longest stage is within `SLACK` of the best."""
    total, sent = list(accumulate(costs(sketch), initial=0.0)), across(sketch)
    n = len(total) - 1
    limit = SLACK * _search(n, stages, lambda a, b: total[b] - total[a], max)[0]

    def bytes_of(a: int, b: int) -> float:
        if total[b] - total[a] > limit:
            return inf
        return sent[b] if b < n else 0.0

    return _search(n, stages, bytes_of, add)[1]


def _search(
    n: int, stages: int, price: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """(smallest joined price, boundaries) of cutting 0 … n into stretches, by dynamic programming."""
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


def crossings(
    calls: tuple[UnitCall, ...], needs: tuple[int, ...], owner: tuple[int, ...], stages: int
) -> tuple[tuple[int, ...], ...]:
    """By stage: calls before it that it, a later stage, or the model's output (`needs`) needs."""
    by_stage = []
    for stage in range(stages):
        needed = {i for j, call in enumerate(calls) if owner[j] >= stage for i in call.needs} | set(needs)
        by_stage.append(tuple(sorted(i for i in needed if owner[i] < stage)))
    return tuple(by_stage)


@dataclass(frozen=True)
class StageLayout:
    """How a model lies on the ranks of a pipeline. Ranks here are indices on the axis `pp`."""

    sketch: Sketch
    """Of the whole model."""
    cut: StagePartition
    owner: tuple[int, ...]
    """The rank of each stage."""
    homes: dict[str, tuple[int, ...]]
    """The ranks that hold each parameter."""

    @staticmethod
    def of(plan: Plan, sketch: Sketch, first: tuple[str, ...] | None = None) -> "StageLayout":
        """By the plan; `first`: the first unit of each stage but stage 0, when the user chose. P023 as `cut` has it."""
        partition = cut(sketch, plan.pp * plan.stages_per_rank, first)
        owner = table_of(plan, plan.microbatches).owner
        return StageLayout(sketch, partition, owner, _ranks_of_parameters(sketch, partition, owner, plan.pp))

    @property
    def handed_on(self) -> set[str]:
        """Units whose output goes to another stage."""
        return {self.sketch.calls[call].unit for calls in self.cut.crossing for call in calls}

    def units(self, index: int) -> set[str]:
        """Names of the units with a call in a stage of a rank."""
        called = homes(self.sketch, self.cut).items()
        return {unit for unit, stages in called if any(self.owner[stage] == index for stage in stages)}

    def part(self, index: int) -> Sketch:
        """The sketch of a rank's stages. Of what its calls need, what comes from another stage is left out."""
        sketch, units = self.sketch, self.units(index)
        names = {n for n, ranks in self.homes.items() if index in ranks}
        stage, mine = self.cut.owner, [i for i, c in enumerate(self.sketch.calls) if c.unit in units]
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


def table_of(plan: Plan, microbatches: int) -> Table:
    """The order of a pipeline's forwards and backwards, for so many micro-batches."""
    return table(plan.schedule, plan.pp, microbatches, plan.stages_per_rank)


def _ranks_of_parameters(
    sketch: Sketch, partition: StagePartition, owner: tuple[int, ...], ranks: int
) -> dict[str, tuple[int, ...]]:
    """The ranks of a pipeline that hold each parameter: those with a unit that has it; all, when code between units may."""
    holders: dict[str, set[int]] = {name: set() for name, _, _ in (*sketch.parameters, *sketch.frozen)}
    stages = homes(sketch, partition)
    for unit in sketch.units:
        for name in unit.parameters:
            holders[name] |= {owner[stage] for stage in stages[unit.name]} if unit.closed else set(range(ranks))
    return {name: tuple(sorted(r or range(ranks))) for name, r in holders.items()}


KEPT = 256
"""Paths that are remembered."""


@dataclass(frozen=True)
class Forward:
    """A forward pass to come: its inputs, and which samples of which step these are. `step` −1: an evaluation."""

    inputs: object
    samples: int
    first: int = 0
    step: int = -1


class ForwardPaths:
    """The forward paths of a model that is cut into stages. `call` runs the model in the format of training."""

    def __init__(
        self, model: nn.Module, sketch: Sketch, cut: StagePartition, call: Call, inputs: Callable[[int], Any], device: torch.device
    ):
        self.model, self.sketch, self.call = model, sketch, call
        self.first = ForwardPath(sketch.calls, cut)
        self.seed = 0
        """The job's, which the host generators start from."""
        self.fixed = False
        """There is no other path than the first: what crosses is a stretch of a sequence (cp), which no run here shows."""
        self.fakes = Unknowns(allow_non_fake_inputs=True)
        self.form: Template = template(taken(inputs(PROBES[0])), taken(inputs(PROBES[1])), PROBES)
        """Of the inputs that the sketch has seen."""
        self.random = sketch.host_random or sketch.decides
        self.known: OrderedDict[Any, ForwardPath] = OrderedDict()
        self.owner = homes(sketch, cut)
        try:
            self.hollow: nn.Module | None = emptied_on(model, self.fakes, device)
        except Exception:  # a model that cannot be copied has the first path only
            self.hollow = None

    def of(self, forward: Forward) -> ForwardPath:
        """The path of a forward pass. P025 when it cannot be found, P024 when stages cannot follow it."""
        if self.fixed:
            return self.first
        form = signature(forward.inputs)
        if form == self._usual(forward.samples) and not self.random:
            return self.first
        key = (form, self.model.training, (forward.step, forward.first) if self.random else None)
        if key not in self.known or (self.random and forward.step < 0):
            self.known[key] = self._run(forward)
            while len(self.known) > KEPT:
                self.known.popitem(last=False)
        self.known.move_to_end(key)
        return self.known[key]

    def _usual(self, samples: int) -> tuple[Any, ...]:
        """The signature of inputs like those of the sketch."""
        form = lambda slot: TensorForm(slot.shape(samples), slot.dtype, slot.grad)  # noqa: E731
        rows = (_row(form(leaf) if isinstance(leaf, Slot) else leaf) for leaf in self.form.leaves)
        return repr(self.form.spec), tuple(rows)

    def _run(self, forward: Forward) -> ForwardPath:
        if self.hollow is None:
            raise self._unknown("the model cannot be copied")
        for module, other in zip(self.hollow.modules(), self.model.modules()):
            module.training = other.training
        state = keyed.host_state()
        if forward.step >= 0:
            keyed.seed_host(self.seed, "forward", forward.step)
        keys = Keys((self.seed, forward.step, forward.first, forward.samples), self.sketch.places, self.random)
        units = [unit.name for unit in self.sketch.units]
        held = attributes_of(self.model.modules())  # a function kept in one may know it and not its copy
        for module, other in zip(self.hollow.modules(), self.model.modules()):
            vars(other).update(_parameters=module._parameters, _buffers=own_buffers(module))
        try:
            trace = trace_run(self.hollow, forward.inputs, self.call, True, units, keys)
        except Exception as error:
            raise self._unknown(in_a_line(error)) from error
        finally:
            keyed.restore_host(state)
            put_back(held)
        calls = tuple(self._judged(single(call)) for call in trace.metered.calls)
        owner = self._owned(calls)
        check_calls(calls, owner)
        stages = self.first.cut.stages
        cut = StagePartition(stages, owner, crossings(calls, trace.metered.needs, owner, stages))
        return ForwardPath(calls, cut, tuple(keys.after) if self.sketch.host_random else ())

    def _judged(self, call: UnitCall) -> UnitCall:
        """The call, without leaks to a loss that the sketch has seen depend on nothing of the kind."""
        known = {leak for other in self.sketch.calls if other.unit == call.unit for leak in other.leaks}
        return replace(call, leaks=tuple(leak for leak in call.leaks if leak not in (OUTPUT, KNOWN) or leak in known))

    def _owned(self, calls: tuple[UnitCall, ...]) -> tuple[int, ...]:
        """The stage of every call: that of its unit's call in the sketch. P024 when they are not in order."""
        times: dict[str, int] = {}
        owner: list[int] = []
        for call in calls:
            stages = self.owner[call.unit]
            number = times[call.unit] = times.get(call.unit, -1) + 1
            owner.append(stages[min(number, len(stages) - 1)])
            if len(owner) > 1 and owner[-1] < owner[-2]:
                what = f"unit {call.unit} of stage {owner[-1]} is called after one of stage {owner[-2]}"
                why = "on other inputs, or other random numbers, the model calls its units in another order than in the sketch"
                raise PlaitError(Problem("P024", what, why=why, fix=("pp=1", "Job(stages=…) cuts elsewhere")))
        return tuple(owner)

    def _unknown(self, why: str) -> PlaitError:
        if self.random:
            what = "the model decides by random numbers what to run, and that cannot be found without values of other stages"
            return PlaitError(Problem("P024", what, why=why, fix=("pp=1",)))
        what = "what crosses between stages cannot be found for inputs of this size"
        return PlaitError(Problem("P025", what, why=why, fix=("pad samples to one length", "pp=1")))


def signature(inputs: object) -> tuple[Any, ...]:
    """The tree of some inputs, shapes and formats of tensors, and what else is in it."""
    spec, rows = taken(inputs)
    return repr(spec), tuple(map(_row, rows))


def _row(leaf: object) -> object:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, TensorForm) else repr(leaf)
