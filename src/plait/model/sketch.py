"""The sketch: what a job is, found by running its model on fake tensors. No weights are computed with, no data moves.

The model runs twice, on two batch sizes. Whatever draws a random number is noted with its place and with the dim of
the drawn tensor that grew with the batch: that is all `randomness/keyed.py` needs to give any rank its own stretch of the
one global mask. Layers that look at the whole batch at once (batch statistics) are noted too, because splitting the
batch changes them unless they are synchronised.

A model that looks at values in its forward pass cannot run on fake tensors; a copy of it then runs for real.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn

from plait.config.errors import in_a_line
from plait.config.job import user_line
from plait.model import alike, units
from plait.model.experts import MoELayer
from plait.model.meter import Metered, MeteredCall
from plait.model.operations import ZERO, Effort, Figure, OperationCounts, Unit, UnitCall, line
from plait.model.slices import ParameterSlice, Slices
from plait.model.trace import Call, RunTrace, trace_run
from plait.randomness import keyed
from plait.tensors.opaque_code import is_scripted
from plait.tensors.parameters import ParameterAttributes, copy_module
from plait.tensors.trees import ProbeSizes, template


def places_of(
    rounds: list[list[RunTrace]], sizes: ProbeSizes, decides: bool = False
) -> tuple[dict[str, int | None], dict[str, tuple[int, ...]], list[str]]:
    """Batch dim and shape of every place, and the owners of draws that do not grow in step with the batch, in one dim. `decides`: the
    model decides at random what to run, so that a draw of one batch may be missing for another."""
    places: dict[str, int | None] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    coupled = []
    a, b = sizes
    for small, large in rounds:
        for place, shape in small.drawn.items():
            other = large.drawn.get(place)
            grown = [d for d, (m, n) in enumerate(zip(shape, other or ())) if m != n]
            one_dim = other is not None and len(shape) == len(other) and len(grown) < 2
            if other is None and decides:
                places.setdefault(place, UNKNOWN)  # not drawn in this run
                continue
            if other is None or not one_dim or any(shape[d] * b != other[d] * a for d in grown):
                coupled.append(place.split("#")[0] or "the model")
            elif place not in places:
                shapes[place] = tuple(n // a if d in grown else n for d, n in enumerate(shape))
            if places.get(place, UNKNOWN) in (None, UNKNOWN):
                places[place] = grown[0] if grown else None
    coupled += [place.split("#")[0] or "the model" for place, dim in places.items() if dim == UNKNOWN]
    return places, shapes, coupled


UNKNOWN = -1
"""In place of a batch dim, as in `randomness/distributions.py`."""


ROUNDS = 8
"""Pairs of runs for a model that decides at random what to run."""
PROBES = ProbeSizes(3, 5)
"""The two batch sizes of the runs: odd, so that dims of the model rarely have them."""


@dataclass(frozen=True)
class Sketch:
    """What `engine/build.py` and the strategies need to know of a model. All names are qualified module names."""

    parameters: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    """(name, shape, dtype) of every parameter that is trained, tied ones once."""
    frozen: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()
    """The same of every parameter that is not."""
    order: tuple[str, ...] = ()
    """Names of both, in the model's order."""
    buffers: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()
    """The same of every buffer."""
    attributes: Mapping[str, ParameterAttributes] = field(default_factory=dict, compare=False)
    """What code has put on parameters, of those that have any."""
    places: dict[str, int | None] = field(default_factory=dict)
    """Random place `module#call#draw` -> batch dim of the tensor drawn there (None: it has none)."""
    drawn: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Random place -> shape of the whole tensor drawn there for one sample: its batch dim has the rows of a sample."""
    unkeyed: tuple[str, ...] = ()
    """Modules whose random numbers plait cannot key (drawn by an operator without a rule)."""
    uneven: tuple[str, ...] = ()
    """Modules that draw a tensor whose shape does not grow with the batch in one dim: which part is a sample's is not known."""
    packed: tuple[str, ...] = ()
    """Recurrent modules with dropout between their layers in packed sequences."""
    batch_norms: tuple[str, ...] = ()
    """Batch-norm modules that use batch statistics in training: these can be synchronised."""
    batch_coupled: tuple[str, ...] = ()
    """Modules that use batch statistics by a direct call: these cannot be synchronised."""
    counting: tuple[str, ...] = ()
    """Buffers that every training forward changes, besides those of batch norms (counters, power iterations)."""
    rewritten: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Weights that every training forward changes (moving averages of others), and the modules whose code does it."""
    followed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Weights from which every training forward writes tensors outside of the model (a teacher's), and the modules whose code does it."""
    sampled: tuple[str, ...] = ()
    """Of both, those whose new value comes from the samples."""
    unshared: tuple[str, ...] = ()
    """Of these, those that a rank makes of its own samples, without `plait.global_mean` and `plait.global_batch`."""
    process_flags: tuple[str, ...] = ()
    """Attributes that are true because this process has made something that no checkpoint holds, such as hooks (`model/mutations.py`)."""
    coupled_in_eval: str = ""
    """What of it uses the batch in eval mode, in a phrase (`engine/analyse.py`)."""
    host_random: bool = False
    """True when the forward pass draws from Python's or numpy's generator."""
    decides: bool = False
    """True when it may decide by torch's generator what to run: it looks at values, and draws numbers for no sample."""
    by_values: bool = False
    """True when the model had to run on real tensors."""
    units: tuple[Unit, ...] = ()
    calls: tuple[UnitCall, ...] = ()
    needs: tuple[int, ...] = ()
    """Calls whose outputs the model's output depends on."""
    alike: tuple[tuple[str, ...], ...] = field(default=(), compare=False)
    """Rows of units each of which computes the same as the one before it, of what that returned."""
    rest: tuple[str, ...] = ()
    """Parameters that belong to no unit: the model's own, used by the code between units."""
    flops_between: Figure = ZERO
    """Floating-point operations of the code between units."""
    work_between: OperationCounts = field(default_factory=OperationCounts, compare=False)
    """What the code between units consists of."""
    saved_between: Figure = ZERO
    """Bytes that the code between units keeps for backward, besides what units keep too."""
    differentiates: bool = False
    """True when the forward pass asks for derivatives itself."""
    sequence_plan: Any = None
    """Where the sequence is in the model (`parallel/context/sequences.py`), when it is cut."""
    scripted: tuple[str, ...] = ()
    """Modules that `torch.jit` has compiled."""
    opaque: tuple[tuple[str, str], ...] = ()
    """Operators of higher order that the forward pass calls: the module whose code does it, and the operator."""
    unmeasured: str = ""
    """Why units could not be measured, if so; then there are none, and every parameter is in the rest."""
    unmeasured_at: str = ""
    """The line of the model's code at which that failed, if it is known."""
    whole_update: bool = False
    """The job's optimizer looks at whole tensors, of which the plan's ranks hold parts (`parallel/whole_tensors.py`)."""
    single_steps: bool = False
    """The job's optimizer stacks tensors, and makes a step for each of them (`model/optimizers.py`)."""
    slices: Slices = field(default_factory=Slices)
    """What tensor parallelism can cut; found only for a plan that has it."""
    cuts: tuple[ParameterSlice, ...] = ()
    """Every parameter that is cut into slices, by its first name."""
    shares: tuple[str, ...] = ()
    """Parameters whose gradient on a rank of a sliced model is a share of a sum over all of them."""
    mixtures: tuple[MoELayer, ...] = ()
    """Layers with experts; found only for a plan that shares them out."""

    def has(self, module: str) -> bool:
        """Whether a module lies in a unit of this sketch."""
        return any(f"{module}.".startswith(f"{unit.name}.") for unit in self.units)

    def local(self, rank: int) -> "Sketch":
        """The sketch of a rank's slices: the same model with smaller parameters."""
        cuts = {cut.parameter: cut for cut in self.cuts}
        sizes = {n: d.itemsize * prod(s) for n, s, d in (*self.parameters, *self.frozen)}
        cut = lambda rows: tuple((n, cuts[n].shape(s, rank) if n in cuts else s, d) for n, s, d in rows)  # noqa: E731
        parameters, frozen = cut(self.parameters), cut(self.frozen)
        here = {n: d.itemsize * prod(s) for n, s, d in (*parameters, *frozen)}
        less = lambda unit: sum(sizes[n] - here[n] for n in unit.parameters)  # noqa: E731
        units = tuple(replace(unit, weights=unit.weights - less(unit)) for unit in self.units)
        return replace(self, parameters=parameters, frozen=frozen, units=units)


@keyed.host_kept()
def sketch(
    model: nn.Module, inputs: Callable[[int], Any], call: Call, wanted: tuple[str, ...] | None = None,
    loss: Callable[[int], Callable[[Any], Any]] | None = None,
) -> Sketch:  # fmt: skip
    """Run `model` on batches of `PROBES` samples (`inputs(n)` makes one) and note what it does.

    `wanted`: names of its units, instead of those that are found. J015 when one names no module that is called. `loss(n)`
    makes the loss of an output for n samples, asked what it depends on where units hand on more than they return.
    """
    probe = _Probe(model, inputs, call, units.choose(model) if wanted is None else units.named(model, wanted))
    first = probe.first()
    again = units.chosen_again(model, probe.chosen, first[0].metered) if wanted is None else None
    if again is not None and probe.metering:
        probe.chosen = again
        first = probe.pair(0)
    host_random = any(run.host_random for run in first)
    decides = probe.by_values and None in places_of([first], PROBES)[0].values()
    more = range(1, ROUNDS if host_random or decides else 1)  # branches taken at random: see most of them
    rounds = [first, *(probe.pair(number) for number in more)]
    if loss is not None and any(call.aside for run in first for call in run.metered.calls):
        probe.judge(loss, rounds)
    if wanted is not None and probe.metering:
        units.check_named(model, wanted, [pair[0].metered for pair in rounds])
    small = [pair[0] for pair in rounds]
    places, drawn, coupled = places_of(rounds, PROBES, host_random or decides)
    return Sketch(
        **_tensors(model),
        places=places,
        drawn=drawn,
        unkeyed=_unique(name for run in small for name in run.unkeyed),
        uneven=_unique(name for name in coupled if all(name not in run.packed for run in small)),
        packed=_unique(name for run in small for name in run.packed),
        batch_norms=_unique(name for run in small for name in run.batch_norms),
        batch_coupled=_unique(name for run in small for name in run.batch_coupled),
        counting=_unique(name for run in small for name in run.counting),
        rewritten={name: tuple(sorted(by)) for run in small for name, by in run.rewritten.items()},
        followed={name: tuple(sorted(by)) for run in small for name, by in run.followed.items()},
        sampled=_unique(name for run in small for name in run.sampled),
        unshared=_unique(name for run in small for name in run.unshared),
        process_flags=_unique(name for run in small for name in run.process_flags),
        host_random=host_random,
        decides=decides,
        by_values=probe.by_values,
        scripted=tuple(name for name, module in model.named_modules() if is_scripted(module)),
        opaque=tuple(dict.fromkeys(call for run in small for call in run.opaque)),
        unmeasured=probe.unmeasured,
        unmeasured_at=probe.unmeasured_at,
        **_measures(model, probe.chosen, rounds),
    )


def _tensors(model: nn.Module) -> dict[str, Any]:
    """The fields of a sketch that say which parameters and buffers there are."""
    row = lambda name, t: (name, tuple(t.shape), t.dtype)  # noqa: E731
    return {
        "parameters": tuple(row(n, p) for n, p in model.named_parameters() if p.requires_grad),
        "frozen": tuple(row(n, p) for n, p in model.named_parameters() if not p.requires_grad),
        "order": tuple(name for name, _ in model.named_parameters()),
        "buffers": tuple(row(n, b) for n, b in model.named_buffers()),
        "attributes": {n: own for n, p in model.named_parameters() if (own := ParameterAttributes.of(p))},
    }


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


class _Probe:
    """Runs of one model, and how they have to be made: on fake tensors or for real, measuring units or not."""

    def __init__(self, model: nn.Module, inputs: Callable[[int], Any], call: Call, chosen: dict[str, bool]):
        self.model, self.inputs, self.call, self.chosen = model, inputs, call, chosen
        self.by_values, self.metering = False, True
        self.unmeasured = self.unmeasured_at = ""

    def first(self) -> list[RunTrace]:
        """The first pair: on fake tensors, else on real ones; measured, else not measured, and then the sketch gives the reason.

        Only a failure of the last way is raised: on real tensors, with nothing measured, the model itself fails.
        """
        for self.by_values, self.metering in ((False, True), (False, False), (True, True)):
            try:
                pair = self.pair(0)
                if self.metering:
                    _measures(self.model, self.chosen, [pair])
                    self.unmeasured = self.unmeasured_at = ""
                return pair
            except Exception as error:
                if self.metering:
                    self.unmeasured, self.unmeasured_at = in_a_line(error), user_line(error)
        self.metering = False
        return self.pair(0)

    def judge(self, loss: Callable[[int], Callable[[Any], Any]], rounds: list[list[RunTrace]]) -> None:
        """Let the calls of these runs leak what the loss depends on, and not all that is in the model's output."""
        inputs, judge = self.inputs(PROBES[0]), loss(PROBES[0])
        keyed.seed_host("sketch", 0)
        model = copy_module(self.model) if self.by_values else self.model
        try:
            trace = trace_run(model, inputs, self.call, not self.by_values, self.chosen, judge=judge)
        except Exception:  # it may look at numbers: then it may depend on anything
            return
        read = trace.metered.calls
        for run in (run.metered.calls for pair in rounds for run in pair):
            if [call.unit for call in run] == [call.unit for call in read]:
                for call, judged in zip(run, read):
                    call.leaks = judged.leaks

    def pair(self, number: int) -> list[RunTrace]:
        """The two runs: of a large model, the second has a few of its alike layers."""
        small = self.run(PROBES[0], number)
        return [small, self._shorter(small, number) or self.run(PROBES[1], number)]

    def run(self, samples: int, number: int) -> RunTrace:
        """One run. All of one number have the host generators in the same state, so that they take the same branches."""
        example = self.inputs(samples)
        keyed.seed_host("sketch", number)
        before = keyed.first_draws()
        keyed.seed_host("sketch", number)
        with warnings.catch_warnings():  # a copy of fake weights is warned of
            warnings.simplefilter("ignore")
            model = copy_module(self.model) if self.by_values else self.model
        names = {name for name, _ in model.named_modules()}
        metering = [name for name in self.chosen if name in names] if self.metering else None
        found = trace_run(model, example, self.call, not self.by_values, metering)
        found.host_random = before[:2] != keyed.first_draws()[:2]
        return found

    def _shorter(self, small: RunTrace, number: int) -> RunTrace | None:
        """What the second run of a model would show, from runs with a few of its alike layers. None if that cannot be said."""
        if self.by_values or not self.metering or small.host_random:
            return None
        calls = small.metered.calls
        closed = {call.unit for call in calls} - _opened(self.model, [small.metered])
        rows = alike.rows_of(self.model, units.alike([single(c) for c in calls], [(c.course,) for c in calls], closed))
        if not rows:
            return None
        try:
            with alike.shortened(self.model, rows):
                short, large = (self.run(samples, number) for samples in PROBES)
        except Exception:  # code that counts its layers, for example
            return None
        return alike.lengthened(small, short, large, rows)


def _opened(model: nn.Module, runs: Sequence[Metered]) -> set[str]:
    """Units with parameters that are used outside of their own calls."""
    return units.tied(model, {call.unit for run in runs for call in run.calls}).union(*(run.opened for run in runs))


def _measures(model: nn.Module, chosen: dict[str, bool], rounds: list[list[RunTrace]]) -> dict[str, Any]:
    """The fields of a sketch that say what the units are and what their calls cost: those of the round with most."""
    everything = [run.metered for pair in rounds for run in pair]
    rows = sorted(everything, key=lambda run: -len(run.calls))
    called = units.in_order([[call.unit for call in run.calls] for run in rows])
    names = {id(p): name for name, p in model.named_parameters()}
    open_ = _opened(model, everything)
    listed = []
    for name in called:
        module = model.get_submodule(name)
        parameters = list(module.parameters())
        weights = sum(p.numel() * p.element_size() for p in parameters)
        named = tuple(names[id(p)] for p in parameters)
        listed.append(Unit(name, type(module).__name__, named, weights, name not in open_, chosen[name]))
    small, large = (run.metered for run in max(rounds, key=lambda pair: len(pair[0].metered.calls)))
    same = units.same_calls(small, large)
    others = large.calls if same else [None] * len(small.calls)
    inside = {name for unit in listed for name in unit.parameters}
    calls = tuple(_call(a, b) for a, b in zip(small.calls, others))
    courses = [(a.course, b.course) if b else () for a, b in zip(small.calls, others)]
    return {
        "units": tuple(listed),
        "calls": calls,
        "alike": units.alike(calls, courses, set(called) - open_) if same else (),
        "needs": small.needs,
        "differentiates": any(run.differentiates for run in everything),
        "rest": tuple(name for name in names.values() if name not in inside),
        "work_between": _work(small.effort, large.effort if same else None),
        "flops_between": _fit(small, large if same else None, "flops"),
        "saved_between": _fit(small, large if same else None, "saved"),
    }


def single(call: MeteredCall) -> UnitCall:
    """A call of one run: its template holds for batches of that size only."""
    return _call(call, None)


def _call(small: MeteredCall, large: MeteredCall | None) -> UnitCall:
    figures = {name: _fit(small, large, name) for name in ("flops", "inputs", "fresh", "output", "saved")}
    form = template(small.returned, None if large is None else large.returned, PROBES)
    ends = [run.output // max(1, small.itemsize) for run in (small, large) if run is not None]
    work = _work(small.effort, None if large is None else large.effort, ends)
    flags = {
        "backward": small.backward,
        "given": small.given,
        "writes": small.writes,
        "back": small.back,
        "leaks": tuple(sorted(small.leaks)),
        "aside": tuple(sorted(small.aside)),
    }
    return UnitCall(small.unit, small.needs, work=work, **figures, template=form, **flags)


def _work(small: Effort, large: Effort | None, returned: Sequence[int] = (0, 0)) -> OperationCounts:
    """What a call consists of. `returned`: elements of its output in each run."""
    a, b = PROBES

    def each(one: float, other: float) -> float:
        return one / a if large is None else (other - one) / (b - a)

    other = small if large is None else large
    wide = each(small.moved[returned[0]], other.moved[returned[-1]])
    whole = each(sum(small.moved.values()), sum(other.moved.values()))
    keys = each(small.keys, other.keys)
    return OperationCounts(tuple(line(small, large, PROBES)), wide, whole - wide, float(small.operators), keys)


def _fit(small: object, large: object, name: str) -> Figure:
    """The line through both runs; when only one can be used, all of it is for each sample."""
    a, b = PROBES
    if large is None:
        return Figure(0.0, getattr(small, name) / a)
    each = (getattr(large, name) - getattr(small, name)) / (b - a)
    return Figure(getattr(small, name) - a * each, each)
