"""The sketch: an analysis of a job's model, by running it on fake tensors. No weights are computed and no data moves.

The model runs twice, on two batch sizes. Each random draw is recorded with its place and with the dim of the drawn tensor that grows with the
batch. With these, `randomness/keyed.py` gives any rank its part of the single global mask. Layers that use the complete batch (batch
statistics) are recorded too, because splitting the batch changes them unless they are synchronized.

A model that reads values in its forward pass cannot run on fake tensors. A copy of it then runs on real tensors.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn

from plait.config.errors import summarize_error
from plait.config.job import find_user_line
from plait.model import equal_layers, units
from plait.model.experts import MoELayer
from plait.model.meter import MeteredCall, MeteredRun
from plait.model.operations import ZERO_COST, LinearCost, OperationCounts, OpStats, Unit, UnitCall, fit_products
from plait.model.slices import ParameterSlice, Slices
from plait.model.trace import RunModel, RunTrace, trace_run
from plait.randomness import keyed
from plait.tensors.opaque_code import is_scripted
from plait.tensors.parameters import ParameterAttributes, copy_module
from plait.tensors.trees import ProbeSizes, make_template


def find_places(
    rounds: list[list[RunTrace]], sizes: ProbeSizes, decides: bool = False
) -> tuple[dict[str, int | None], dict[str, tuple[int, ...]], list[str]]:
    """Return the batch dim and shape of every random place, and the modules of draws that do not grow with the batch in exactly one dim.

    `decides`: the model has random branches, so a draw of one batch may be missing for another.
    """
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
"""An unknown batch dim, as in `randomness/distributions.py`."""


RUN_PAIRS = 8
"""Pairs of runs for a model with random branches."""
PROBE_SIZES = ProbeSizes(3, 5)
"""The two batch sizes of the runs. They are odd, so that dims of the model rarely equal them."""


@dataclass(frozen=True)
class Sketch:
    """The properties of a model that `engine/build.py` and the strategies use. All names are qualified module names."""

    parameters: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    """(name, shape, dtype) of every trained parameter; tied ones are listed once."""
    frozen: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()
    """(name, shape, dtype) of every frozen parameter."""
    order: tuple[str, ...] = ()
    """Names of all parameters, in the model's order."""
    buffers: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()
    """(name, shape, dtype) of every buffer."""
    attributes: Mapping[str, ParameterAttributes] = field(default_factory=dict, compare=False)
    """Attributes that code has set on parameters, by name."""
    places: dict[str, int | None] = field(default_factory=dict)
    """Random place `module#call#draw` -> batch dim of the tensor drawn there (None: it has none)."""
    drawn: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Random place -> full shape of the tensor drawn there for one sample: its batch dim has the rows of a sample."""
    unkeyed: tuple[str, ...] = ()
    """Modules with random draws that plait cannot key (operators without a rule)."""
    uneven_draws: tuple[str, ...] = ()
    """Modules that draw a tensor whose shape does not grow with the batch in one dim: the part of a sample is unknown."""
    packed_rnns: tuple[str, ...] = ()
    """Recurrent modules with dropout between their layers in packed sequences."""
    batch_norms: tuple[str, ...] = ()
    """Batch-norm modules that use batch statistics in training; these can be synchronized."""
    batch_coupled: tuple[str, ...] = ()
    """Modules that use batch statistics by a direct call; these cannot be synchronized."""
    changed_buffers: tuple[str, ...] = ()
    """Buffers that every training forward changes, except those of batch norms (counters, power iterations)."""
    rewritten: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Weights that every training forward changes (moving averages of others), and the modules that write them."""
    outside_writes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Weights from which every training forward writes tensors outside of the model (a teacher's), and the modules that write them."""
    from_samples: tuple[str, ...] = ()
    """Buffers and weights among these with new values that come from samples."""
    rank_dependent: tuple[str, ...] = ()
    """Those among them with values from a rank's own samples, without `plait.global_mean` and `plait.global_batch`."""
    process_flags: tuple[str, ...] = ()
    """Attributes that are True because of a per-process object that no checkpoint contains, such as hooks (`model/mutations.py`)."""
    coupled_in_eval: str = ""
    """A phrase for the part of the model that uses the batch in eval mode (`engine/model_analysis.py`)."""
    host_random: bool = False
    """The forward pass draws from Python's or numpy's generator."""
    has_random_branches: bool = False
    """Its control flow may depend on torch's generator: it reads values and draws numbers that belong to no sample."""
    needs_real_tensors: bool = False
    """The model had to run on real tensors."""
    units: tuple[Unit, ...] = ()
    calls: tuple[UnitCall, ...] = ()
    needs: tuple[int, ...] = ()
    """Calls on whose outputs the model's output depends."""
    alike: tuple[tuple[str, ...], ...] = field(default=(), compare=False)
    """Rows of equal units: each one computes the same as the previous one, on its output."""
    rest: tuple[str, ...] = ()
    """Parameters outside of all units, used by the code between units."""
    flops_between: LinearCost = ZERO_COST
    """Floating-point operations of the code between units."""
    work_between: OperationCounts = field(default_factory=OperationCounts, compare=False)
    """Operations of the code between units."""
    saved_between: LinearCost = ZERO_COST
    """Bytes that the code between units saves for backward, without those that units save too."""
    differentiates: bool = False
    """The forward pass itself computes derivatives."""
    sequence_plan: Any = None
    """The sequence dims in the model (`parallel/context/sequences.py`), if it is sharded."""
    scripted: tuple[str, ...] = ()
    """Modules compiled by `torch.jit`."""
    opaque: tuple[tuple[str, str], ...] = ()
    """Higher-order operators of the forward pass: (module that calls it, operator)."""
    unmeasured: str = ""
    """The reason why units could not be measured; then there are no units, and every parameter is in `rest`."""
    unmeasured_at: str = ""
    """The line of the model's code at which measuring failed, if known."""
    needs_whole_tensors: bool = False
    """The job's optimizer reads full tensors, of which the plan's ranks have shards (`parallel/tensor_owners.py`)."""
    steps_per_tensor: bool = False
    """The job's optimizer stacks tensors, and steps once for each of them (`model/optimizers.py`)."""
    slices: Slices = field(default_factory=Slices)
    """The parts that tensor parallelism can shard; only found for a plan with tp."""
    tp_shards: tuple[ParameterSlice, ...] = ()
    """Every parameter with tp shards, by its first name."""
    partial_gradients: tuple[str, ...] = ()
    """Parameters whose gradient on a rank of a tp-sharded model is a partial sum over all tp ranks."""
    moe_layers: tuple[MoELayer, ...] = ()
    """Layers with experts; only found for a plan that shards them."""

    def has_module(self, module: str) -> bool:
        """Whether a module lies in a unit of this sketch."""
        return any(f"{module}.".startswith(f"{unit.name}.") for unit in self.units)

    def make_local(self, rank: int) -> "Sketch":
        """Return the sketch of a rank's tp shards: the same model with smaller parameters."""
        cuts = {cut.parameter: cut for cut in self.tp_shards}
        sizes = {n: d.itemsize * prod(s) for n, s, d in (*self.parameters, *self.frozen)}
        cut = lambda rows: tuple((n, cuts[n].shape(s, rank) if n in cuts else s, d) for n, s, d in rows)  # noqa: E731
        parameters, frozen = cut(self.parameters), cut(self.frozen)
        here = {n: d.itemsize * prod(s) for n, s, d in (*parameters, *frozen)}
        less = lambda unit: sum(sizes[n] - here[n] for n in unit.parameters)  # noqa: E731
        units = tuple(replace(unit, weights=unit.weights - less(unit)) for unit in self.units)
        return replace(self, parameters=parameters, frozen=frozen, units=units)


@keyed.preserve_host_state()
def sketch_model(
    model: nn.Module, inputs: Callable[[int], Any], call: RunModel, unit_names: tuple[str, ...] | None = None,
    loss: Callable[[int], Callable[[Any], Any]] | None = None,
) -> Sketch:  # fmt: skip
    """Run `model` on batches of `PROBE_SIZES` samples and record its properties. `inputs(n)` makes a batch.

    `unit_names`: the names of its units, instead of a search. Raises J015 if a name matches no called module. `loss(n)` returns the loss of an output
    for
    n samples. It shows which values the loss uses, if units pass on values outside of their outputs.
    """
    probe = _Probe(model, inputs, call, units.find_units(model) if unit_names is None else units.find_named(model, unit_names))
    first = probe.run_first()
    again = units.revise_units(model, probe.chosen, first[0].metered) if unit_names is None else None
    if again is not None and probe.metering:
        probe.chosen = again
        first = probe.run_pair(0)
    host_random = any(run.host_random for run in first)
    decides = probe.by_values and None in find_places([first], PROBE_SIZES)[0].values()
    more = range(1, RUN_PAIRS if host_random or decides else 1)  # random branches: run enough pairs to see most of them
    rounds = [first, *(probe.run_pair(number) for number in more)]
    if loss is not None and any(call.aside for run in first for call in run.metered.calls):
        probe.limit_leaks(loss, rounds)
    if unit_names is not None and probe.metering:
        units.check_named(model, unit_names, [pair[0].metered for pair in rounds])
    small = [pair[0] for pair in rounds]
    places, drawn, coupled = find_places(rounds, PROBE_SIZES, host_random or decides)
    return Sketch(
        **_describe_tensors(model),
        places=places,
        drawn=drawn,
        unkeyed=_unique(name for run in small for name in run.unkeyed),
        uneven_draws=_unique(name for name in coupled if all(name not in run.packed_rnns for run in small)),
        packed_rnns=_unique(name for run in small for name in run.packed_rnns),
        batch_norms=_unique(name for run in small for name in run.batch_norms),
        batch_coupled=_unique(name for run in small for name in run.batch_coupled),
        changed_buffers=_unique(name for run in small for name in run.changed_buffers),
        rewritten={name: tuple(sorted(by)) for run in small for name, by in run.rewritten.items()},
        outside_writes={name: tuple(sorted(by)) for run in small for name, by in run.outside_writes.items()},
        from_samples=_unique(name for run in small for name in run.from_samples),
        rank_dependent=_unique(name for run in small for name in run.rank_dependent),
        process_flags=_unique(name for run in small for name in run.process_flags),
        host_random=host_random,
        has_random_branches=decides,
        needs_real_tensors=probe.by_values,
        scripted=tuple(name for name, module in model.named_modules() if is_scripted(module)),
        opaque=tuple(dict.fromkeys(call for run in small for call in run.opaque)),
        unmeasured=probe.unmeasured,
        unmeasured_at=probe.unmeasured_at,
        **_measure_units(model, probe.chosen, rounds),
    )


def _describe_tensors(model: nn.Module) -> dict[str, Any]:
    """Return the fields of a sketch that list parameters and buffers."""
    row = lambda name, t: (name, tuple(t.shape), t.dtype)  # noqa: E731
    return {
        "parameters": tuple(row(n, p) for n, p in model.named_parameters() if p.requires_grad),
        "frozen": tuple(row(n, p) for n, p in model.named_parameters() if not p.requires_grad),
        "order": tuple(name for name, _ in model.named_parameters()),
        "buffers": tuple(row(n, b) for n, b in model.named_buffers()),
        "attributes": {n: own for n, p in model.named_parameters() if (own := ParameterAttributes.capture(p))},
    }


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


class _Probe:
    """Runs of one model, on fake or real tensors, with or without measuring units."""

    def __init__(self, model: nn.Module, inputs: Callable[[int], Any], call: RunModel, chosen: dict[str, bool]):
        self.model, self.inputs, self.call, self.chosen = model, inputs, call, chosen
        self.by_values, self.metering = False, True
        self.unmeasured = self.unmeasured_at = ""

    def run_first(self) -> list[RunTrace]:
        """Run the first pair: on fake tensors, then on real ones; with units measured, otherwise without. The sketch then has the reason.

        Only an error of the last attempt is raised. It runs on real tensors without measuring, so it is the model's own error.
        """
        for self.by_values, self.metering in ((False, True), (False, False), (True, True)):
            try:
                pair = self.run_pair(0)
                if self.metering:
                    _measure_units(self.model, self.chosen, [pair])
                    self.unmeasured = self.unmeasured_at = ""
                return pair
            except Exception as error:
                if self.metering:
                    self.unmeasured, self.unmeasured_at = summarize_error(error), find_user_line(error)
        self.metering = False
        return self.run_pair(0)

    def limit_leaks(self, loss: Callable[[int], Callable[[Any], Any]], rounds: list[list[RunTrace]]) -> None:
        """Limit the leaks of these calls to values that the loss uses, instead of all values in the model's output."""
        inputs, judge = self.inputs(PROBE_SIZES[0]), loss(PROBE_SIZES[0])
        keyed.seed_host("sketch", 0)
        model = copy_module(self.model) if self.by_values else self.model
        try:
            trace = trace_run(model, inputs, self.call, not self.by_values, self.chosen, compute_loss=judge)
        except Exception:  # it may read values, and so depend on anything
            return
        read = trace.metered.calls
        for run in (run.metered.calls for pair in rounds for run in pair):
            if [call.unit for call in run] == [call.unit for call in read]:
                for call, judged in zip(run, read):
                    call.leaks = judged.leaks

    def run_pair(self, number: int) -> list[RunTrace]:
        """Run the model on both batch sizes. For a large model, the second run has a few of its equal layers."""
        small = self.run(PROBE_SIZES[0], number)
        return [small, self._run_shortened(small, number) or self.run(PROBE_SIZES[1], number)]

    def run(self, samples: int, number: int) -> RunTrace:
        """Run the model once. Runs of one `number` start with equal host generators, so that they take the same branches."""
        example = self.inputs(samples)
        keyed.seed_host("sketch", number)
        before = keyed.draw_host_numbers()
        keyed.seed_host("sketch", number)
        with warnings.catch_warnings():  # copying fake weights emits a warning
            warnings.simplefilter("ignore")
            model = copy_module(self.model) if self.by_values else self.model
        names = {name for name, _ in model.named_modules()}
        metering = [name for name in self.chosen if name in names] if self.metering else None
        found = trace_run(model, example, self.call, not self.by_values, metering)
        found.host_random = before[:2] != keyed.draw_host_numbers()[:2]
        return found

    def _run_shortened(self, small: RunTrace, number: int) -> RunTrace | None:
        """Compute the trace of the second run from runs with a few of the equal layers. Returns None if that is impossible."""
        if self.by_values or not self.metering or small.host_random:
            return None
        calls = small.metered.calls
        closed = {call.unit for call in calls} - _find_opened(self.model, [small.metered])
        rows = equal_layers.find_layer_rows(
            self.model, units.find_equal_rows([fit_single(c) for c in calls], [(c.call_hash,) for c in calls], closed)
        )
        if not rows:
            return None
        try:
            with equal_layers.remove_equal_layers(self.model, rows):
                short, large = (self.run(samples, number) for samples in PROBE_SIZES)
        except Exception:  # for example, code that counts its layers
            return None
        return equal_layers.extend_trace(small, short, large, rows)


def _find_opened(model: nn.Module, runs: Sequence[MeteredRun]) -> set[str]:
    """Return the units with parameters that are used outside of their own calls."""
    return units.find_tied(model, {call.unit for run in runs for call in run.calls}).union(*(run.opened for run in runs))


def _measure_units(model: nn.Module, chosen: dict[str, bool], rounds: list[list[RunTrace]]) -> dict[str, Any]:
    """Return the fields of a sketch with units and the costs of their calls, from the pair of runs with most calls."""
    everything = [run.metered for pair in rounds for run in pair]
    rows = sorted(everything, key=lambda run: -len(run.calls))
    called = units.merge_order([[call.unit for call in run.calls] for run in rows])
    names = {id(p): name for name, p in model.named_parameters()}
    open_ = _find_opened(model, everything)
    listed = []
    for name in called:
        module = model.get_submodule(name)
        parameters = list(module.parameters())
        weights = sum(p.numel() * p.element_size() for p in parameters)
        named = tuple(names[id(p)] for p in parameters)
        listed.append(Unit(name, type(module).__name__, named, weights, name not in open_, chosen[name]))
    small, large = (run.metered for run in max(rounds, key=lambda pair: len(pair[0].metered.calls)))
    same = units.has_same_calls(small, large)
    others = large.calls if same else [None] * len(small.calls)
    inside = {name for unit in listed for name in unit.parameters}
    calls = tuple(_fit_call(a, b) for a, b in zip(small.calls, others))
    courses = [(a.call_hash, b.call_hash) if b else () for a, b in zip(small.calls, others)]
    return {
        "units": tuple(listed),
        "calls": calls,
        "alike": units.find_equal_rows(calls, courses, set(called) - open_) if same else (),
        "needs": small.needs,
        "differentiates": any(run.differentiates for run in everything),
        "rest": tuple(name for name in names.values() if name not in inside),
        "work_between": _fit_work(small.effort, large.effort if same else None),
        "flops_between": _fit_cost(small, large if same else None, "flops"),
        "saved_between": _fit_cost(small, large if same else None, "saved"),
    }


def fit_single(call: MeteredCall) -> UnitCall:
    """Fit a call of a single run: its template is valid for that batch size only."""
    return _fit_call(call, None)


def _fit_call(small: MeteredCall, large: MeteredCall | None) -> UnitCall:
    figures = {name: _fit_cost(small, large, name) for name in ("flops", "inputs", "fresh", "output", "saved")}
    form = make_template(small.returned, None if large is None else large.returned, PROBE_SIZES)
    ends = [run.output // max(1, small.itemsize) for run in (small, large) if run is not None]
    work = _fit_work(small.effort, None if large is None else large.effort, ends)
    flags = {
        "backward": small.backward,
        "given": small.given,
        "writes": small.writes,
        "back": small.back,
        "leaks": tuple(sorted(small.leaks)),
        "aside": tuple(sorted(small.aside)),
    }
    return UnitCall(small.unit, small.needs, work=work, **figures, template=form, **flags)


def _fit_work(small: OpStats, large: OpStats | None, returned: Sequence[int] = (0, 0)) -> OperationCounts:
    """Fit the operations of a call. `returned`: elements of its output in each run."""
    a, b = PROBE_SIZES

    def per_sample(one: float, other: float) -> float:
        return one / a if large is None else (other - one) / (b - a)

    other = small if large is None else large
    wide = per_sample(small.moved[returned[0]], other.moved[returned[-1]])
    whole = per_sample(sum(small.moved.values()), sum(other.moved.values()))
    keys = per_sample(small.keys, other.keys)
    return OperationCounts(tuple(fit_products(small, large, PROBE_SIZES)), wide, whole - wide, float(small.operators), keys)


def _fit_cost(small: object, large: object, name: str) -> LinearCost:
    """Fit a line through both runs. With one run, the total is proportional to the number of samples."""
    a, b = PROBE_SIZES
    if large is None:
        return LinearCost(0.0, getattr(small, name) / a)
    each = (getattr(large, name) - getattr(small, name)) / (b - a)
    return LinearCost(getattr(small, name) - a * each, each)
