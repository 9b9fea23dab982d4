"""Finds the sequence dims of a model by running it on other lengths.

The model runs on fake tensors with a batch, and again with one position less of a dim. Every dim of a unit's inputs and outputs,
and of every random tensor, that became one shorter is a dim of that sequence. The lengths are not given: each size in the input
is tried. A size is a sequence length if the queries of an attention become fewer with it. If inputs of one length can be
shortened independently (those of an encoder and of a decoder), they are two sequences.

Some models do not call torch's attention (it is written out, or they use a recurrence, a convolution or a Fourier transform).
There, a size is a sequence length if the hidden states that units pass on become one position shorter.

A sequence length may not be a size of the inputs (patches of an image with a class token, features behind convolutions). Then the
sequence is shortened inside the model: from the first attention over it on, units get one position less.

One run on a short sequence, as one of the ranks with a fake process group, shows which units communicate under `cp`. That run is
on real tensors, because code may make other masks on fake ones.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from plait.config.errors import PlaitError
from plait.model.meter import KNOWN_USE, OUTPUT
from plait.model.operations import UnitCall
from plait.model.sketch import Sketch
from plait.model.trace import RunModel, trace_run
from plait.model.trace import RunModel as Run
from plait.parallel.context.attention import AttentionCall, compute_attention
from plait.parallel.context.runtime import ContextParallelUnits
from plait.parallel.context.sequences import (
    Arguments,
    At,
    GroupLayout,
    Pair,
    SequenceLayout,
    SequencePlan,
    UnitPlan,
    make_sequence_error,
    shorten_for_check,
    shorten_inputs,
)
from plait.parallel.context.unit_opening import Layout
from plait.randomness.keyed import preserve_host_state, seed_host
from plait.randomness.sub_block import find_differing_dims
from plait.tensors.collectives import FakeProcessGroup
from plait.tensors.torch_private import checkpoint_frame, leaves_with_paths, tree_flatten, tree_unflatten

MAX_GROUP_TENSORS = 6
"""The largest number of input tensors of one length whose subsets are shortened separately."""
Shapes = dict[str, tuple[int, ...]]
"""Shapes of tensors, by their path in the arguments or in the output."""
NarrowInputs = Callable[[int, Arguments], Arguments]
"""(index of a call of a unit, its arguments) -> the arguments to use instead."""


@dataclass
class RecordedCall:
    """A call of a unit in one run."""

    unit: str
    given: Shapes
    returned: Shapes = field(default_factory=dict)
    attends: list[tuple[int, int]] = field(default_factory=list)
    """Number of queries and of keys of each attention inside."""


@dataclass
class ShorterRun:
    """A run with one position less of a sequence of `length`."""

    length: int
    calls: list[RecordedCall]
    drawn: Shapes


class SequenceFinder:
    """Finds the sequences of `model` on `inputs`, a batch of `SAMPLES`."""

    def __init__(self, model: nn.Module, inputs: object, call: Run, sketch: Sketch):
        self.model, self.inputs, self.call, self.fake = model, inputs, call, not sketch.needs_real_tensors
        self.names = list(dict.fromkeys([*(c.unit for c in sketch.calls), *(u.name for u in sketch.units)]))
        self.full_calls, self.drawn = record_run(model, inputs, call, self.names, fake=self.fake)
        self.found: list[ShorterRun] = []
        self.failed = ""
        self.shows_sequence: Callable[[RecordedCall, RecordedCall], bool] = has_fewer_queries
        """(call, the same call with one position less) -> whether it shows a sequence."""

    def run_shorter(self, length: int, inputs: object, narrow: NarrowInputs | None = None) -> ShorterRun | None:
        """Run with one position less. Returns None if no attention has fewer queries."""
        try:
            less, drawn = record_run(self.model, inputs, self.call, self.names, fake=self.fake, narrow=narrow)
        except PlaitError:
            raise
        except Exception as error:  # this size cannot be shortened
            told = f"{type(error).__name__}: {str(error)[:200]}"
            self.failed = self.failed or f"with {length - 1} instead of {length}: {told}"
            return None
        if not any(map(self.shows_sequence, self.full_calls, less)):
            return None
        if [w.unit for w in self.full_calls] != [s.unit for s in less]:
            raise make_sequence_error("the model calls other units for a shorter sequence", "its sequence of calls depends on the length")
        return ShorterRun(length, less, drawn)

    def run_shorter_from(self, start: int, length: int) -> ShorterRun | None:
        """Run with one position less for units from call `start` on."""
        narrow: NarrowInputs = lambda at, given: given if at < start else shorten_inputs(given, [length], [length - 1])  # noqa: E731
        return self.run_shorter(length, self.inputs, narrow)

    def find_in_inputs(self) -> None:
        """Find the sequences whose length is a size in the inputs."""
        for length in _list_lengths(self.inputs):
            together = self.run_shorter(length, shorten_inputs(self.inputs, [length], [length - 1]))
            if together is not None:
                self.found += self._find_independent(length) or [together]

    def _find_independent(self, length: int) -> list[ShorterRun]:
        """Return two runs if some of the tensors of this length can be shortened without the others, and vice versa."""
        flat, spec = tree_flatten(self.inputs)
        having = [i for i, t in enumerate(flat) if isinstance(t, Tensor) and length in t.shape[1:]]
        if not 1 < len(having) <= MAX_GROUP_TENSORS:
            return []

        def run_subset(some: Sequence[int]) -> ShorterRun | None:
            less = [shorten_inputs(t, [length], [length - 1]) if i in some else t for i, t in enumerate(flat)]
            return self.run_shorter(length, tree_unflatten(less, spec))

        for some in (c for n in range(1, len(having) // 2 + 1) for c in combinations(having, n)):
            one = run_subset(some)
            other = one and run_subset([i for i in having if i not in some])
            if one and other:
                return [one, other]
        return []

    def find_in_units(self) -> None:
        """Find the sequences that only units have."""
        hopeless = {1}
        for start, seen in enumerate(self.full_calls):
            for number, (length, _) in enumerate(seen.attends):
                if length in hopeless or any(has_fewer_queries(seen, less.calls[start], number) for less in self.found):
                    continue
                found = self.run_shorter_from(start, length)
                if found is not None and has_fewer_queries(seen, found.calls[start], number):
                    self.found.append(found)
                else:
                    hopeless.add(length)

    def find_in_blocks(self) -> None:
        """Find sequences of hidden states if no unit calls torch's attention: in the inputs, else in the inputs of blocks."""
        self.shows_sequence = has_shorter_states
        self.find_in_inputs()
        hopeless = {1}
        for start, seen in enumerate(self.full_calls) if not self.found else ():
            for length in dict.fromkeys(n for s in seen.given.values() if s in seen.returned.values() for n in s[1:-1]):
                found = None if length in hopeless else self.run_shorter_from(start, length)
                if found is not None:
                    self.found.append(found)
                    return
                hopeless.add(length)

    def find_dims(self, whole: Shapes, less: Sequence[Shapes]) -> dict[str, At]:
        """Find the sequence dim of each tensor that has exactly one. Tensors that change in another way stay full."""
        found: dict[str, list[At]] = {}
        for path, shape in whole.items():
            dims = [_find_shorter_dims(shape, other.get(path, ())) for other in less]
            found[path] = [(d, number) for number, some in enumerate(dims) for d in some or () if None not in dims]
        return {path: dims[0] for path, dims in found.items() if len(dims) == 1}

    def list_attentions(self, at: int) -> tuple[Pair, ...]:
        """List the sequences of each attention of a call."""

        def find_sequence(which: int, side: int) -> int | None:
            n = self.full_calls[at].attends[which][side]
            fewer = [less.calls[at].attends[which : which + 1] for less in self.found]
            return next((i for i, sizes in enumerate(fewer) if sizes and n - sizes[0][side] == 1), None)

        return tuple((find_sequence(i, 0), find_sequence(i, 1)) for i in range(len(self.full_calls[at].attends)))

    def make_plan(self, leaking: set[str]) -> SequencePlan:
        """Make the plan from the sequences, call by call. Raises P040 if the layout of a unit with attention is ambiguous."""
        calls = []
        for i, seen in enumerate(self.full_calls):
            less = [run.calls[i] for run in self.found]
            given = self.find_dims(seen.given, [s.given for s in less])
            returned = self.find_dims(seen.returned, [s.returned for s in less])
            attends = self.list_attentions(i)
            begun = any(c.has_attention or c.is_split for c in calls) or any(q is not None for q, _ in attends)
            begun = begun or any(has_shorter_states(seen, run.calls[i]) for run in self.found if self.shows_sequence is has_shorter_states)
            clear = bool(given) and begun and seen.unit not in leaking
            fixed = frozenset(seen.given) - set(given)
            made = UnitPlan(seen.unit, clear, given, returned, attends, fixed=fixed)
            if made.has_attention and not clear:
                why = "other code receives its results by another way than its return value (such as hooks that collect them)"
                why = why if seen.unit in leaking else _explain_unclear(seen, less)
                raise make_sequence_error(f"unit {seen.unit} cannot run on a sequence shard", why)
            calls.append(made)
        draws = {at: number for number, run in enumerate(self.found) for at in find_differing_dims(self.drawn, run.drawn)}
        return SequencePlan(tuple(calls), draws, tuple(run.length for run in self.found))


def find_sequences(model: nn.Module, inputs: object, call: Run, sketch: Sketch) -> SequencePlan:
    """Find the sequences of `model` on `inputs`, a batch of `SAMPLES`. Raises P040 if there are none."""
    if sketch.unmeasured or not sketch.calls:
        raise make_sequence_error("the model's units cannot be measured", sketch.unmeasured or "the model has none")
    finder = SequenceFinder(model, inputs, call, sketch)
    finder.find_in_inputs()
    finder.find_in_units()
    if not any(seen.attends for seen in finder.full_calls):
        finder.find_in_blocks()
    if finder.found:
        return finder.make_plan({c.unit for c in sketch.calls if _is_leaking(c)})
    why = "no input has a dim of the length of the queries of scaled_dot_product_attention"
    if not any(seen.attends for seen in finder.full_calls):
        why = "no input can be shortened by one position so that the hidden states of its units become shorter"
        raise make_sequence_error("the sequence dims of the model were not found", why)
    raise make_sequence_error("the sequence dims of the model were not found", finder.failed or why)


def _is_leaking(call: UnitCall) -> bool:
    """Whether other code gets a result of the call that is not in its return value. A tensor that is only passed to a loss which
    does not depend on it is ignored."""
    return bool({*call.leaks, *(set(call.aside) - {OUTPUT})} - {KNOWN_USE})


def has_fewer_queries(whole: RecordedCall, less: RecordedCall, number: int | None = None) -> bool:
    """Whether an attention of the call has one query less; `number`: its index."""
    only = slice(None) if number is None else slice(number, number + 1)
    return any(a - b == 1 for (a, _), (b, _) in zip(whole.attends[only], less.attends[only]))


def has_shorter_states(whole: RecordedCall, less: RecordedCall) -> bool:
    """Whether the inputs and outputs of a call are hidden states (3 dims or more) with one position less in one dim."""

    def find_shorter(shapes: Shapes, others: Shapes) -> set[tuple[int, ...]]:
        dims = {path: _find_shorter_dims(shape, others.get(path, ())) or () for path, shape in shapes.items() if len(shape) > 2}
        return {shapes[path][: d[0] + 1] for path, d in dims.items() if len(d) == 1 and d[0] < len(shapes[path]) - 1}

    return bool(find_shorter(whole.given, less.given) & find_shorter(whole.returned, less.returned))


def _find_shorter_dims(shape: tuple[int, ...], other: tuple[int, ...]) -> list[int] | None:
    """Return the dims that are one shorter; None if the shapes differ in another way."""
    if len(shape) != len(other):
        return None
    dims = [d for d, (m, n) in enumerate(zip(shape, other)) if m != n]
    return None if any(shape[d] - other[d] != 1 for d in dims) else dims


def _list_lengths(inputs: object) -> list[int]:
    """List the sizes in the inputs that may be a sequence length: the most frequent first, then the largest."""
    sizes = Counter(n for t in tree_flatten(inputs)[0] if isinstance(t, Tensor) for n in t.shape[1:] if n > 1)
    return sorted(sizes, key=lambda n: (-sizes[n], -n))


_ROW_DIMS = {F.scaled_dot_product_attention: -2, F.multi_head_attention_forward: 0}
"""Attention functions (the second is that of torch's module) -> the dim of queries and keys with the positions."""


class _AttentionRecorder(TorchFunctionMode):
    """Records the number of queries and keys of every attention."""

    def __init__(self) -> None:
        super().__init__()
        self.running: RecordedCall | None = None
        self.between = False
        """Whether code between units called attention."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        at = _ROW_DIMS.get(func)
        if at is not None and self.running is not None:
            query, key = (*args, *(kwargs[name] for name in ("query", "key") if name in kwargs))[:2]
            self.running.attends.append((query.shape[at], key.shape[at]))
        self.between |= at is not None and self.running is None
        return func(*args, **kwargs)


def record_run(
    model: nn.Module, inputs: object, call: Run, names: Iterable[str], *, fake: bool, narrow: NarrowInputs | None = None
) -> tuple[list[RecordedCall], Shapes]:
    """Record the inputs and outputs of the units in one run, and the random tensors. `fake`: run on fake tensors."""
    found: list[RecordedCall] = []
    attention = _AttentionRecorder()
    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)

            def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> Any:
                given = (args, kwargs) if narrow is None else narrow(len(found), (args, kwargs))
                attention.running = RecordedCall(name, _list_shapes(given))
                found.append(attention.running)
                seed_host("course", len(found))  # stochastic depth drops the same layers, whatever dropout drew before
                return None if narrow is None else given

            def leave(_: nn.Module, args: tuple[Any, ...], output: object) -> None:
                attention.running, found[-1].returned = None, _list_shapes(output)
                seed_host("course", len(found), "left")

            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        stack.enter_context(preserve_host_state())
        seed_host("course")
        with attention:
            watched = trace_run(model, inputs, call, fake)
    if attention.between:
        units = f"units are {', '.join(dict.fromkeys(s.unit for s in found))}"[:200]
        named = 'Job(units=("blocks.*",)) names the blocks that contain it'
        raise make_sequence_error("attention is in code between units, which runs on full sequences", units, named)
    return found, {place: tuple(shape) for place, shape in watched.drawn.items()}


def _list_shapes(tree: object) -> Shapes:
    return {path: tuple(t.shape) for path, t in leaves_with_paths(tree)[0] if isinstance(t, Tensor)}


def _explain_unclear(seen: RecordedCall, less: Sequence[RecordedCall]) -> str:
    for other in less:
        for whole, shapes in ((seen.given, other.given), (seen.returned, other.returned)):
            for path, shape in whole.items():
                if _find_shorter_dims(shape, shapes.get(path, ())) is None:
                    return f"one position less changes {path} from {list(shape)} to {list(shapes.get(path, ()))}"
    return "none of its inputs has a sequence dim"


@dataclass(frozen=True)
class Communication:
    """The units that communicate (`""` for code between units), and the numbers of query heads of attention."""

    units: frozenset[str] = frozenset()
    heads: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _SilentLayout(GroupLayout):
    """The rows of a rank with a fake process group."""

    notify: Callable[[], None]

    def gather(self, local: Tensor, dim: int) -> Tensor:
        self.notify()
        shape = list(local.shape)
        shape[dim] = self.rows.length - shape[dim]
        return torch.cat([local, local.new_zeros(shape)], dim)

    def gather_no_grad(self, local: Tensor, dim: int) -> Tensor:
        return self.gather(local, dim)


def find_communication(
    model: nn.Module, inputs: object, call: RunModel, parallel_units: ContextParallelUnits, layout: Layout
) -> Communication:
    """Find the units that communicate in a forward pass; `parallel_units` has wrapped the model.

    Raises P040 if a unit's own checkpoint would recompute its attention on this rank's rows alone.
    """
    units, heads, absent = set[str](), set[int](), FakeProcessGroup(parallel_units.ranks)

    def attend(asked: AttentionCall, queries: SequenceLayout, keys: SequenceLayout) -> Tensor:
        if checkpoint_frame() is not parallel_units.frame:
            why = "a checkpoint in its own code (torch.utils.checkpoint) contains its attention, and recomputes it alone in backward"
            fix = "checkpoint the whole unit", "activation_checkpointing=full in the plan"
            raise make_sequence_error(f"unit {parallel_units.unit} cannot run on a sequence shard", why, *fix)
        units.add(parallel_units.unit)
        heads.add(asked.q.shape[1])
        return compute_attention(replace(asked, mask=None, causal=False))

    def run(module: nn.Module, given: object) -> object:
        with torch.enable_grad():
            return call(module, given)

    tell = lambda: units.add(parallel_units.unit)  # noqa: E731
    parallel_units.make_layout = lambda length: _SilentLayout(layout(length, parallel_units.ranks), 0, absent, tell)
    parallel_units.backend = attend
    handles = parallel_units.install()
    try:
        try:
            trace_run(model, shorten_for_check(parallel_units.sequence_plan, inputs, parallel_units.ranks), run, False)
        except PlaitError:
            raise
        except Exception:  # it may need the original length
            trace_run(model, inputs, run, False)
    finally:
        for handle in handles:
            handle.remove()
        parallel_units.layouts = {}
    return Communication(frozenset(units), frozenset(heads))
