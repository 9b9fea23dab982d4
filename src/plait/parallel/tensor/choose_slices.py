"""Selection of the slices that a plan uses, among the slices that `parallel/tensor/find/finder.py` finds.

Some slices do not work together with pipeline stages, sequence shards or experts; their layers stay replicated, with
the reason. The result is stored in the sketch, from which `parallel/tensor/strategy.py` builds a rank.

A unit on a sequence shard draws dropout for its rows only. The model's code does not show which dims of a random tensor
are then smaller. So the full model runs once on fake tensors, with its units on the first rank's sequence shards and
without the other ranks. Its random tensors are compared with those of the sketch.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from math import inf, prod
from typing import Any

import psutil
from torch import Tensor, nn

from plait.config.errors import PlaitError, Problem
from plait.config.job import Job
from plait.config.plan import Plan
from plait.data.batch_rows import Pair
from plait.launch.sketch_cache import pause_watches
from plait.model.build_model import BuiltModel
from plait.model.equal_layers import find_layer_rows
from plait.model.meter import OUTPUT
from plait.model.sketch import PROBE_SIZES, Sketch
from plait.model.slices import ColumnRowPair, RegionBorder, Slices
from plait.model.trace import RunModel, trace_run
from plait.parallel.expert import mixture_finder as experts
from plait.parallel.tensor import wiring
from plait.parallel.tensor.find.finder import MIN_TRACE_BYTES, find_slices
from plait.parallel.tensor.find.repeated_layers import find_in_shortened
from plait.parallel.tensor.sequence.runtime import SequenceParallelUnits, replace_argument
from plait.parallel.tensor.wiring import find_vocabulary_heads
from plait.randomness.sub_block import find_differing_dims
from plait.tensors.collectives import FakeProcessGroup
from plait.tensors.fake import FAKE_FAILURES
from plait.tensors.float64 import Float64Mode
from plait.tensors.module_state import restore_forwards
from plait.tensors.parameters import copy_module
from plait.tensors.rows import Rows
from plait.tensors.sharded_tensor import ShardedTensor
from plait.tensors.torch_private import own_parameters, tree_leaves


def trace_first_rank(
    model: nn.Module,
    pairs: Callable[[int], Any],
    run: Callable[[nn.Module, Any], Any],
    slices: Slices,
    sketch: Sketch,
    *,
    ranks: int,
    fake: bool,
) -> Slices:
    """Add the random tensors of units on sequence shards, and their sequence lengths, as the first rank has them.

    `pairs(n)` makes inputs and targets of n samples, and `run(model, pair)` computes the loss. `fake`: the model has
    fake tensors.
    """
    model = model if fake else copy_module(model)
    units, alone = [unit.name for unit in sketch.units], _FirstRankUnits(model, slices, FakeProcessGroup(ranks))
    handles = [hook for one in slices.sequence_units for border in one.borders for hook in alone.hook_border(border, slices)]
    handles += [
        model.get_submodule(name).register_forward_hook(alone.shard_logits)
        for name in slices.vocabulary
        if name not in slices.deferred_sums and not isinstance(model.get_submodule(name), nn.Embedding)
    ]
    try:
        with restore_forwards(model.get_submodule(one.unit) for one in slices.sequence_units):
            handles += [*alone.wrap_units(), *alone.install_hooks(units, find_vocabulary_heads(model, slices))]
            watched = trace_run(model, pairs(PROBE_SIZES[0]), run, fake)
    finally:
        for handle in handles:
            handle.remove()
    batched = lambda place, d, n: n * PROBE_SIZES[0] if sketch.places.get(place) == d else n  # noqa: E731
    whole = {p: [batched(p, d, n) for d, n in enumerate(shape)] for p, shape in sketch.drawn.items()}
    local = {place: tuple(shape) for place, shape in watched.drawn.items()}
    return replace(slices, sequence_draws=find_differing_dims(whole, local), sequence_lengths=tuple(sorted(alone.lengths)))


class _FirstRankUnits(SequenceParallelUnits):
    """Units on the first rank's sequence shards, without its group: received rows are empty."""

    def __init__(self, model: nn.Module, slices: Slices, group: FakeProcessGroup):
        super().__init__(model, slices, group)
        self.lengths: set[int] = set()

    def hook_border(self, border: RegionBorder, slices: Slices) -> list[Any]:
        """Register hooks that gather where the region of a row layer begins, and take a rank's rows where it ends."""
        gathered: dict[int, tuple[Tensor, Tensor]] = {}

        def make_begin_hook(key: int | str, dim: int) -> Callable[..., Any]:
            def begin_hook(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                x = kwargs[key] if isinstance(key, str) else args[key]
                if gathered.get(id(x), (None,))[0] is not x:
                    gathered[id(x)] = x, self.begin_region(x, dim)
                return replace_argument(args, kwargs, key, gathered[id(x)][1])

            return begin_hook

        def end_hook(module: nn.Module, args: tuple[Any, ...], output: Tensor | tuple[Any, ...]) -> Any:
            gathered.clear()
            first, *rest = output if isinstance(output, tuple) else (output,)
            mine = self.end_region(first, border.arguments[0].dim or 0)
            return (mine, *rest) if isinstance(output, tuple) else mine

        begin = [
            self.model.get_submodule(one.module).register_forward_pre_hook(
                make_begin_hook(one.key, one.dim or 0), with_kwargs=True
            )
            for one in border.arguments
        ]
        group = next(group for group in slices.groups if group.row == border.row)
        container = self.model.get_submodule(group.container)  # torch's attention does not call its `out_proj` module
        end = container if isinstance(container, nn.MultiheadAttention) else self.model.get_submodule(border.row)
        return [*begin, end.register_forward_hook(end_hook)]

    def shard_logits(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> ShardedTensor:
        """Wrap a head's logits as the first rank's part of the vocabulary."""
        rows = Rows.make_chunks(output.shape[-1], self.group.size())
        return ShardedTensor(rows.take_part(output, -1, 0), output.dim() - 1, rows, self.group)

    def split_rows(self, length: int) -> Rows:
        """Split a sequence, and record its length."""
        self.lengths.add(length)
        return super().split_rows(length)

    def leave_region(self, x: Tensor, dim: int, rows: Rows) -> Tensor:
        """Take this rank's rows of its own partial sum; those of other ranks are missing."""
        return self.take_rows(x, dim, rows)


def find_plan_slices(
    sketch: Sketch,
    model: nn.Module,
    inputs: Callable[[int], object],
    call: RunModel,
    job: Job,
    plan: Plan,
    *,
    handed_on: Set[str] = frozenset(),
    most: float = inf,
) -> Slices:
    """Find the slices of a job's model that a plan can use. `handed_on`: units whose output crosses to another stage.
    `most`: memory limit of the search, in bytes (P034)."""
    rows, units = find_layer_rows(model, sketch.alike), _find_shardable_units(sketch, plan)

    def follow_model(left_out: Set[str] = frozenset()) -> Slices:
        given = tuple((c.unit, c.given) for c in sketch.calls if c.unit not in left_out)
        return find_slices(model, inputs, call, plan.tp, job.tensor, units, given=given, most=most)

    out = {name for row in rows for name in row[2:-1]}
    found = (None if units else find_in_shortened(model, rows, lambda: follow_model(out))) or follow_model()
    sizes = {n: prod(shape) for n, shape, _ in (*sketch.parameters, *sketch.frozen)}
    share = lambda g: sum(sizes[c.parameter] for c in g.tp_shards) / sum(sizes.values())  # noqa: E731
    routed = _find_routed_params(sketch, model, inputs, call)
    reasons = [(group, _explain_unsliced(group, sketch, plan, routed)) for group in found.groups]
    kept = [(group.row, share(group), why) for group, why in reasons if why]
    tables = wiring.find_untied_embeddings(model, found) if plan.cp > 1 else found.vocabulary
    left = [(name, model.get_parameter(f"{name}.weight")) for name in found.vocabulary if name not in tables]
    why = f"the loss reads sequence shards (cp={plan.cp}), and its tensors can be sharded in only one dim"
    kept += [(name, weight.numel() / sum(sizes.values()), why) for name, weight in left]
    whole = tuple(sorted((*found.unsliced, *kept), key=lambda row: -row[1]))
    groups = tuple(group for group, why in reasons if not why)
    found = replace(found, groups=groups, vocabulary=tables, unsliced=whole)
    if not found.sequence_units:
        return found
    crossing = tuple(replace(one, crosses_stages=one.unit in handed_on) for one in found.sequence_units)
    return replace(found, sequence_units=crossing, deferred_sums=tuple(_find_deferred_sums(found, sketch, model, plan, handed_on)))


def compute_trace_budget(plan: Plan) -> float:
    """Return the memory in bytes that a rank may use to find slices: half of the free memory, divided by the ranks."""
    with pause_watches():  # a search that fails for lack of memory is not cached
        free = psutil.virtual_memory().available
    return max(MIN_TRACE_BYTES, free / 2 / plan.world)


def _find_deferred_sums(found: Slices, sketch: Sketch, model: nn.Module, plan: Plan, crossing: Set[str]) -> Iterator[str]:
    """Find embeddings whose reduction over ranks can be deferred: units whose output does not cross to another stage."""
    times = Counter(call.unit for call in sketch.calls)
    for name in found.vocabulary:
        alone = isinstance(model.get_submodule(name), nn.Embedding) and name not in crossing
        if alone and times[name] and (times[name] == 1 or plan.pp == 1):  # otherwise it may be on several stages
            yield name


def _find_routed_params(sketch: Sketch, model: nn.Module, inputs: Callable[[int], object], call: RunModel) -> set[str]:
    """Find parameters of experts whose number of rows depends on the data, so that their messages cannot be planned."""
    if not sketch.needs_real_tensors or sketch.moe_layers:  # fake tensors are not routed to experts
        return set()
    return {name for mixture in experts.find_mixtures(model, inputs, call)[0] if not mixture.is_stacked for name in mixture.names}


def _explain_unsliced(group: ColumnRowPair, sketch: Sketch, plan: Plan, routed: set[str]) -> str:
    """Return why a group of slices is not used under a plan, or ""."""
    if not sketch.has_module(group.container):
        if plan.pp > 1:  # full tensors cross between stages
            return "its slices extend over several units, which may be on different stages"
        if plan.cp > 1:
            return f"its slices extend over several units, and the code between these sees sequence shards (cp={plan.cp})"
    if any(cut.parameter in mixture.names for mixture in sketch.moe_layers for cut in group.tp_shards):
        return f"its expert is sharded by ep={plan.ep}"
    if any(cut.parameter in routed for cut in group.tp_shards):
        return "the number of rows of its expert depends on the data, and so would the messages of its slices"
    lists = [f"{mixture.name}." for mixture in sketch.moe_layers if not mixture.is_stacked]
    if any(f"{group.row}.".startswith(name.lstrip(".")) for name in lists):
        return "the code of its layer runs twice, once to find the rows of its experts"
    return ""


def add_slices(
    sketch: Sketch,
    made: BuiltModel,
    pairs: Callable[[int], Any],
    call: RunModel,
    job: Job,
    plan: Plan,
    *,
    wide: bool,
    handed_on: Set[str] = frozenset(),
) -> Sketch:
    """Add the slices of the model to the sketch. `pairs`: n -> inputs and targets of n samples. `wide`: the run is that
    of `verify`, in float64."""
    found = find_plan_slices(sketch, made.model, lambda n: pairs(n)[0], call, job, plan, handed_on=handed_on, most=compute_trace_budget(plan))
    names = {id(p): n for n, p in made.model.named_parameters()}
    biases = (own_parameters(made.model.get_submodule(g.row)).get("bias") for g in found.groups)
    shares = [n for one in (*found.groups, *found.sequence_units) for n in one.partial_gradients]
    shares += [names[id(b)] for b in biases if b is not None]
    if found.sequence_units:
        found = _add_draws(found, sketch, made, pairs, call, job, n=plan.tp, wide=wide)
    cuts = wiring.list_parameter_slices(made.model, found, plan.tp)
    if not cuts:
        reasons = "; ".join(f"{name or 'the model'}: {reason}" for name, _, reason in found.unsliced[:3])
        why = reasons or "the model has no linear layers"
        fix = (f'plait plan JOB --plan "tp={plan.tp}" --show tensor', "use dp or fsdp instead of tp")
        raise PlaitError(Problem("P034", f"tp={plan.tp} can shard no layer of the model", why=why, fix=fix))
    return replace(sketch, slices=found, tp_shards=cuts, partial_gradients=tuple(dict.fromkeys(shares)))


def _add_draws(
    found: Slices,
    sketch: Sketch,
    made: BuiltModel,
    pairs: Callable[[int], Any],
    call: RunModel,
    job: Job,
    *,
    n: int,
    wide: bool,
) -> Slices:
    """Add the random tensors of units on sequence shards, and their sequence lengths.

    Three runs are tried, and the first that works is used. The first has fake tensors. The second has real tensors, for
    a loss that reads values. The third replaces the loss by the sum of the outputs, for losses that fail on so few
    samples.
    """

    def run(loss: Callable[[Any, Any], Any], model: nn.Module, pair: Pair) -> object:
        with Float64Mode() if wide else nullcontext():
            return loss(call(model, pair[0]), pair[1])

    def sum_outputs(outputs: object, targets: object) -> object:
        return sum(t.sum() for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad)

    def trace_draws(model: nn.Module, loss: Callable[[Any, Any], Any], fake: bool) -> Slices:
        return trace_first_rank(model, pairs, partial(run, loss), found, sketch, ranks=n, fake=fake)

    ways = [(made.model, job.loss, False), (made.model, sum_outputs, False)]
    if not sketch.needs_real_tensors:
        ways = [(made.fake, job.loss, True), ways[0], (made.fake, sum_outputs, True)]
    for way in ways[:-1]:
        with suppress(*FAKE_FAILURES):
            return trace_draws(*way)
    return trace_draws(*ways[-1])


def summarize_slices(sketch: Sketch) -> str:
    """Describe in one line which fraction of a model is sharded."""
    sizes = {n: prod(shape) for n, shape, _ in (*sketch.parameters, *sketch.frozen)}
    cut = sum(sizes[c.parameter] for c in sketch.tp_shards) / sum(sizes.values())
    reasons = [f"; the rest is replicated on every rank ({n or 'the model'}: {why})" for n, _, why in sketch.slices.unsliced]
    return f"tp shards {cut:.0%} of the weights" + "".join(reasons[:1])


def _find_shardable_units(sketch: Sketch, plan: Plan) -> dict[str, str]:
    """Return the units that may run on sequence shards between their regions: name -> "", or the reason why not."""
    looped = plan.pp > 1 and plan.stages_per_rank > 1
    if not plan.uses_sequence_shards or plan.ep * plan.cp > 1 or looped:
        return {}
    open_ = {u.name: "its parameters are also used outside of it" for u in sketch.units if not u.closed}
    writes = {c.unit: "it writes into its input" for c in sketch.calls if c.writes}
    leaking = [c.unit for c in sketch.calls if c.leaks or set(c.aside) - {OUTPUT}]
    leaks = dict.fromkeys(leaking, "it passes values outside of its output")
    times = Counter(c.unit for c in sketch.calls if plan.pp > 1)
    often = {unit: "it is called several times, perhaps on several stages" for unit, n in times.items() if n > 1}
    return {c.unit: "" for c in sketch.calls} | open_ | writes | leaks | often
