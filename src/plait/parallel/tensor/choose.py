"""What a plan makes of the slices that a model has: which are cut, what that sends, and how much is said of it.

`parallel/tensor/find/finder.py` finds all slices; some of them cannot be cut beside stages, stretches or experts, and stay whole with that
reason. The result goes into the sketch, from which `parallel/tensor/strategy.py` wires a rank.

A unit that runs on a stretch of the sequence draws dropout for its rows alone. Along which dims of what is drawn a rank
has fewer numbers than one device would is not written anywhere in the model: the whole model runs once on fake tensors,
with its units on the first rank's stretches and the other ranks absent, and what it draws is compared with the sketch.
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
from plait.launch.kept import unnoted
from plait.model.alike import rows_of
from plait.model.make import BuiltModel
from plait.model.meter import OUTPUT
from plait.model.sketch import PROBES, Sketch
from plait.model.slices import ColumnRowPair, RegionBorder, Slices
from plait.model.trace import Call, trace_run
from plait.parallel.expert import find as experts
from plait.parallel.tensor import wiring
from plait.parallel.tensor.find.alike import found_of
from plait.parallel.tensor.find.finder import FOLLOWED, find
from plait.parallel.tensor.sequence.runtime import SequenceParallelUnits, put
from plait.parallel.tensor.wiring import vocabulary_heads
from plait.randomness.sub_block import differing
from plait.tensors.collectives import Absent
from plait.tensors.fake import FAKE_FAILURES
from plait.tensors.float64 import Wide
from plait.tensors.modules import forwards_kept
from plait.tensors.parameters import copy_module
from plait.tensors.rows import Rows
from plait.tensors.sharded_tensor import ShardedTensor
from plait.tensors.torch_private import tree_leaves


def on_first_rank(
    model: nn.Module,
    pairs: Callable[[int], Any],
    run: Callable[[nn.Module, Any], Any],
    slices: Slices,
    sketch: Sketch,
    *,
    ranks: int,
    fake: bool,
) -> Slices:
    """The slices with what units draw on stretches, and the lengths of their sequences, as the first rank has them.

    `pairs(n)` makes inputs and targets of n samples, `run(model, pair)` the loss; `fake`: of a model without numbers.
    """
    model = model if fake else copy_module(model)
    units, alone = [unit.name for unit in sketch.units], _AloneUnits(model, slices, Absent(ranks))
    handles = [hook for one in slices.stretches for border in one.borders for hook in alone.border(border, slices)]
    handles += [
        model.get_submodule(name).register_forward_hook(alone.spread)
        for name in slices.vocabulary
        if name not in slices.owed and not isinstance(model.get_submodule(name), nn.Embedding)
    ]
    try:
        with forwards_kept(model.get_submodule(one.unit) for one in slices.stretches):
            handles += [*alone.wrap(), *alone.install(units, vocabulary_heads(model, slices))]
            watched = trace_run(model, pairs(PROBES[0]), run, fake)
    finally:
        for handle in handles:
            handle.remove()
    batched = lambda place, d, n: n * PROBES[0] if sketch.places.get(place) == d else n  # noqa: E731
    whole = {p: [batched(p, d, n) for d, n in enumerate(shape)] for p, shape in sketch.drawn.items()}
    local = {place: tuple(shape) for place, shape in watched.drawn.items()}
    return replace(slices, drawn=differing(whole, local), lengths=tuple(sorted(alone.lengths)))


class _AloneUnits(SequenceParallelUnits):
    """Units on the stretches of a rank whose group is not there: what would be received is empty."""

    def __init__(self, model: nn.Module, slices: Slices, group: Absent):
        super().__init__(model, slices, group)
        self.lengths: set[int] = set()

    def border(self, border: RegionBorder, slices: Slices) -> list[Any]:
        """Hooks that gather where the region of a row begins, and take a rank's rows where it ends."""
        gathered: dict[int, tuple[Tensor, Tensor]] = {}

        def begins(key: int | str, dim: int) -> Callable[..., Any]:
            def entering(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                x = kwargs[key] if isinstance(key, str) else args[key]
                if gathered.get(id(x), (None,))[0] is not x:
                    gathered[id(x)] = x, self.begin(x, dim)
                return put(args, kwargs, key, gathered[id(x)][1])

            return entering

        def ends(module: nn.Module, args: tuple[Any, ...], output: Tensor | tuple[Any, ...]) -> Any:
            gathered.clear()
            first, *rest = output if isinstance(output, tuple) else (output,)
            mine = self.end(first, border.given[0].dim or 0)
            return (mine, *rest) if isinstance(output, tuple) else mine

        begin = [
            self.model.get_submodule(one.module).register_forward_pre_hook(
                begins(one.key, one.dim or 0), with_kwargs=True
            )
            for one in border.given
        ]
        group = next(group for group in slices.groups if group.row == border.row)
        container = self.model.get_submodule(group.container)  # torch's attention calls no module of its own
        end = container if isinstance(container, nn.MultiheadAttention) else self.model.get_submodule(border.row)
        return [*begin, end.register_forward_hook(ends)]

    def spread(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> ShardedTensor:
        """A head's logits, of which other ranks would have the other words."""
        rows = Rows.chunks(output.shape[-1], self.group.size())
        return ShardedTensor(rows.take(output, -1, 0), output.dim() - 1, rows, self.group)

    def split(self, length: int) -> Rows:
        """Notes the length too."""
        self.lengths.add(length)
        return super().split(length)

    def left(self, x: Tensor, dim: int, rows: Rows) -> Tensor:
        """This rank's rows of its own share: nobody has the others."""
        return self.taken(x, dim, rows)


def slices_of(
    sketch: Sketch,
    model: nn.Module,
    inputs: Callable[[int], object],
    call: Call,
    job: Job,
    plan: Plan,
    *,
    handed_on: Set[str] = frozenset(),
    most: float = inf,
) -> Slices:
    """The slices of a job's model that can be cut under a plan. `handed_on`: units whose output goes to another stage; `most`: bytes that
    looking for them may take (P034)."""
    rows, units = rows_of(model, sketch.alike), _rowwise(sketch, plan)

    def followed(left_out: Set[str] = frozenset()) -> Slices:
        given = tuple((c.unit, c.given) for c in sketch.calls if c.unit not in left_out)
        return find(model, inputs, call, plan.tp, job.tensor, units, given=given, most=most)

    out = {name for row in rows for name in row[2:-1]}
    found = (None if units else found_of(model, rows, lambda: followed(out))) or followed()
    sizes = {n: prod(shape) for n, shape, _ in (*sketch.parameters, *sketch.frozen)}
    share = lambda g: sum(sizes[c.parameter] for c in g.cuts) / sum(sizes.values())  # noqa: E731
    routed = _routed(sketch, model, inputs, call)
    reasons = [(group, _whole(group, sketch, plan, routed)) for group in found.groups]
    kept = [(group.row, share(group), why) for group, why in reasons if why]
    tables = wiring.tables_apart_from_heads(model, found) if plan.cp > 1 else found.vocabulary
    left = [(name, model.get_parameter(f"{name}.weight")) for name in found.vocabulary if name not in tables]
    why = f"the loss reads sequences that are cut over cp={plan.cp}, and a tensor of its is cut in one dim alone"
    kept += [(name, weight.numel() / sum(sizes.values()), why) for name, weight in left]
    whole = tuple(sorted((*found.whole, *kept), key=lambda row: -row[1]))
    groups = tuple(group for group, why in reasons if not why)
    found = replace(found, groups=groups, vocabulary=tables, whole=whole)
    if not found.stretches:
        return found
    crossing = tuple(replace(one, crosses=one.unit in handed_on) for one in found.stretches)
    return replace(found, stretches=crossing, owed=tuple(_owed(found, sketch, model, plan, handed_on)))


def room_to_follow(plan: Plan) -> float:
    """Bytes of this machine's memory that a rank may take to find slices: half of what is free, shared with the others."""
    with unnoted():  # a search that ends for lack of memory is not kept
        free = psutil.virtual_memory().available
    return max(FOLLOWED, free / 2 / plan.world)


def _owed(found: Slices, sketch: Sketch, model: nn.Module, plan: Plan, crossing: Set[str]) -> Iterator[str]:
    """The embeddings whose sum over the ranks can wait: units of their own, whose output no other stage gets."""
    times = Counter(call.unit for call in sketch.calls)
    for name in found.vocabulary:
        alone = isinstance(model.get_submodule(name), nn.Embedding) and name not in crossing
        if alone and times[name] and (times[name] == 1 or plan.pp == 1):  # else perhaps on several stages
            yield name


def _routed(sketch: Sketch, model: nn.Module, inputs: Callable[[int], object], call: Call) -> set[str]:
    """Parameters of experts that are given as many rows as the data says: nobody could say beforehand what they send."""
    if not sketch.by_values or sketch.mixtures:  # without numbers no row is sent anywhere
        return set()
    return {name for mixture in experts.find(model, inputs, call)[0] if not mixture.stacked for name in mixture.names}


def _whole(group: ColumnRowPair, sketch: Sketch, plan: Plan, routed: set[str]) -> str:
    """Why a group of slices stays whole under a plan, or nothing."""
    if not sketch.has(group.container):
        if plan.pp > 1:  # what crosses between stages is whole
            return "its slices go through several units, which stages may part"
        if plan.cp > 1:
            return f"its slices go through several units, and code between these sees sequences cut over cp={plan.cp}"
    if any(cut.parameter in mixture.names for mixture in sketch.mixtures for cut in group.cuts):
        return f"its expert is one of those that ep={plan.ep} shares out"
    if any(cut.parameter in routed for cut in group.cuts):
        return "how many rows its expert is given depends on the data, and so would what its slices send"
    lists = [f"{mixture.name}." for mixture in sketch.mixtures if not mixture.stacked]
    if any(f"{group.row}.".startswith(name.lstrip(".")) for name in lists):
        return "the code of its layer runs twice, once to see which rows its experts are given"
    return ""


def sliced(
    sketch: Sketch,
    made: BuiltModel,
    pairs: Callable[[int], Any],
    call: Call,
    job: Job,
    plan: Plan,
    *,
    wide: bool,
    handed_on: Set[str] = frozenset(),
) -> Sketch:
    """The sketch with the slices of the model. `pairs`: n -> inputs and targets of n samples; `wide`: the run is `verify`'s,
    in which nothing becomes float32."""
    found = slices_of(sketch, made.model, lambda n: pairs(n)[0], call, job, plan, handed_on=handed_on, most=room_to_follow(plan))
    names = {id(p): n for n, p in made.model.named_parameters()}
    biases = (made.model.get_submodule(g.row)._parameters.get("bias") for g in found.groups)
    shares = [n for one in (*found.groups, *found.stretches) for n in one.partial]
    shares += [names[id(b)] for b in biases if b is not None]
    if found.stretches:
        found = _with_draws(found, sketch, made, pairs, call, job, n=plan.tp, wide=wide)
    cuts = wiring.vocabulary_cuts(made.model, found, plan.tp)
    if not cuts:
        reasons = "; ".join(f"{name or 'the model'}: {reason}" for name, _, reason in found.whole[:3])
        why = reasons or "it has no linear maps"
        fix = (f'plait plan JOB --plan "tp={plan.tp}" --show tensor', "dp or fsdp instead of tp")
        raise PlaitError(Problem("P034", f"tp={plan.tp} can cut nothing of the model", why=why, fix=fix))
    return replace(sketch, slices=found, cuts=cuts, shares=tuple(dict.fromkeys(shares)))


def _with_draws(
    found: Slices,
    sketch: Sketch,
    made: BuiltModel,
    pairs: Callable[[int], Any],
    call: Call,
    job: Job,
    *,
    n: int,
    wide: bool,
) -> Slices:
    """The slices with what units draw on stretches, and the lengths of their sequences.

    They are seen in a run on tensors without numbers; with numbers, for a loss that looks at them; or with the sum of the
    outputs in the place of the loss, where it cannot be computed of so few samples: the first that works.
    """

    def run(loss: Callable[[Any, Any], Any], model: nn.Module, pair: Pair) -> object:
        with Wide() if wide else nullcontext():
            return loss(call(model, pair[0]), pair[1])

    def everything(outputs: object, targets: object) -> object:
        return sum(t.sum() for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad)

    def drawn(model: nn.Module, loss: Callable[[Any, Any], Any], fake: bool) -> Slices:
        return on_first_rank(model, pairs, partial(run, loss), found, sketch, ranks=n, fake=fake)

    ways = [(made.model, job.loss, False), (made.model, everything, False)]
    if not sketch.by_values:
        ways = [(made.fake, job.loss, True), ways[0], (made.fake, everything, True)]
    for way in ways[:-1]:
        with suppress(*FAKE_FAILURES):
            return drawn(*way)
    return drawn(*ways[-1])


def summary(sketch: Sketch) -> str:
    """How much of a model is cut, in one line."""
    sizes = {n: prod(shape) for n, shape, _ in (*sketch.parameters, *sketch.frozen)}
    cut = sum(sizes[c.parameter] for c in sketch.cuts) / sum(sizes.values())
    reasons = [f", the rest is whole on every rank ({n or 'the model'}: {why})" for n, _, why in sketch.slices.whole]
    return f"slices hold {cut:.0%} of the weights" + "".join(reasons[:1])


def _rowwise(sketch: Sketch, plan: Plan) -> dict[str, str]:
    """The units that might run on stretches between their regions, and why some must not."""
    looped = plan.pp > 1 and plan.stages_per_rank > 1
    if not plan.stretched or plan.ep * plan.cp > 1 or looped:
        return {}
    open_ = {u.name: "its parameters are used outside of it too" for u in sketch.units if not u.closed}
    writes = {c.unit: "it writes into what it is given" for c in sketch.calls if c.writes}
    leaking = [c.unit for c in sketch.calls if c.leaks or set(c.aside) - {OUTPUT}]
    leaks = dict.fromkeys(leaking, "it hands on values besides what it returns")
    times = Counter(c.unit for c in sketch.calls if plan.pp > 1)
    often = {unit: "it is called more than once, perhaps on several stages" for unit, n in times.items() if n > 1}
    return {c.unit: "" for c in sketch.calls} | open_ | writes | leaks | often
