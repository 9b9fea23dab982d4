"""Where the sequences are in a model: found by running it on other lengths.

The model runs on fake tensors with a batch, and again with one position less of something. Every dim of what a unit is
given or returns, and of every random tensor, that became one shorter is a dim of that sequence. Nobody says which sizes
in the input are lengths: those that occur are tried, and it is one with which the queries of an attention become fewer.
Inputs of one length that may be shortened one without the other (an encoder's and a decoder's) are two sequences.

Where no unit calls attention by its name (it is written out, or there is none: a recurrence, a convolution, a Fourier
transform), it is a length with which the hidden states that units pass on become one position shorter.

A sequence that no size in the input has (the patches of an image and its class token, features behind convolutions) is
shortened in the model instead: units get one position less from the first attention over it on.

Which units communicate when the model is cut over `cp` is seen in one run on a short sequence, as one of the ranks, with others that
never answer. That run is on real tensors, because code that makes masks at need makes others on fake ones.
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
from plait.model.meter import KNOWN, OUTPUT
from plait.model.operations import UnitCall
from plait.model.sketch import Sketch
from plait.model.trace import Call, trace_run
from plait.model.trace import Call as Run
from plait.parallel.context.attention import AttentionCall, plainly
from plait.parallel.context.opened_unit import Layout
from plait.parallel.context.runtime import ContextParallelUnits
from plait.parallel.context.sequences import (
    Arguments,
    At,
    GroupLayout,
    Pair,
    SequenceLayout,
    SequencePlan,
    UnitPlan,
    refused,
    short,
    shortened,
)
from plait.randomness.keyed import host_kept, seed_host
from plait.randomness.sub_block import differing
from plait.tensors.collectives import Absent
from plait.tensors.torch_private import checkpoint_frame, named_leaves, tree_flatten, tree_unflatten

PARTED = 6
"""Tensors of one length in the input of which groups are tried alone."""
Shapes = dict[str, tuple[int, ...]]
"""Of tensors, by their path in the arguments or in the output."""
Narrow = Callable[[int, Arguments], Arguments]
"""(number of a call of a unit, what it is given) -> what it is given instead."""


@dataclass
class UnitSeen:
    """A call of a unit in one run."""

    unit: str
    given: Shapes
    returned: Shapes = field(default_factory=dict)
    attends: list[tuple[int, int]] = field(default_factory=list)
    """Queries and keys of each attention inside."""


@dataclass
class Shorter:
    """A run with one position less of a sequence of `length`."""

    length: int
    calls: list[UnitSeen]
    drawn: Shapes


class SequenceFinder:
    """Looks for the sequences of `model` on `inputs`, a batch of `SAMPLES`."""

    def __init__(self, model: nn.Module, inputs: object, call: Run, sketch: Sketch):
        self.model, self.inputs, self.call, self.fake = model, inputs, call, not sketch.by_values
        self.names = list(dict.fromkeys([*(c.unit for c in sketch.calls), *(u.name for u in sketch.units)]))
        self.whole, self.drawn = record(model, inputs, call, self.names, fake=self.fake)
        self.found: list[Shorter] = []
        self.failed = ""
        self.counts: Callable[[UnitSeen, UnitSeen], bool] = moved
        """(call, the same with one position less) -> whether it shows a sequence."""

    def tried(self, length: int, inputs: object, narrow: Narrow | None = None) -> Shorter | None:
        """The run with one less, when there are fewer queries somewhere; else None."""
        try:
            less, drawn = record(self.model, inputs, self.call, self.names, fake=self.fake, narrow=narrow)
        except PlaitError:
            raise
        except Exception as error:  # it cannot be shortened there
            told = f"{type(error).__name__}: {str(error)[:200]}"
            self.failed = self.failed or f"with {length - 1} instead of {length}: {told}"
            return None
        if not any(map(self.counts, self.whole, less)):
            return None
        if [w.unit for w in self.whole] != [s.unit for s in less]:
            raise refused("the model calls other units for a shorter sequence", "its course depends on the length")
        return Shorter(length, less, drawn)

    def tried_from(self, start: int, length: int) -> Shorter | None:
        """`tried`, where units get one position less from call `start` on."""
        narrow: Narrow = lambda at, given: given if at < start else shortened(given, [length], [length - 1])  # noqa: E731
        return self.tried(length, self.inputs, narrow)

    def in_inputs(self) -> None:
        """Sequences whose length is a size in the inputs."""
        for length in _lengths(self.inputs):
            together = self.tried(length, shortened(self.inputs, [length], [length - 1]))
            if together is not None:
                self.found += self._parted(length) or [together]

    def _parted(self, length: int) -> list[Shorter]:
        """Two runs, when some of the tensors of this length may be shortened without the others, and these without them."""
        flat, spec = tree_flatten(self.inputs)
        having = [i for i, t in enumerate(flat) if isinstance(t, Tensor) and length in t.shape[1:]]
        if not 1 < len(having) <= PARTED:
            return []

        def alone(some: Sequence[int]) -> Shorter | None:
            less = [shortened(t, [length], [length - 1]) if i in some else t for i, t in enumerate(flat)]
            return self.tried(length, tree_unflatten(less, spec))

        for some in (c for n in range(1, len(having) // 2 + 1) for c in combinations(having, n)):
            one = alone(some)
            other = one and alone([i for i in having if i not in some])
            if one and other:
                return [one, other]
        return []

    def in_units(self) -> None:
        """Sequences that only units have."""
        hopeless = {1}
        for start, seen in enumerate(self.whole):
            for number, (length, _) in enumerate(seen.attends):
                if length in hopeless or any(moved(seen, less.calls[start], number) for less in self.found):
                    continue
                found = self.tried_from(start, length)
                if found is not None and moved(seen, found.calls[start], number):
                    self.found.append(found)
                else:
                    hopeless.add(length)

    def in_blocks(self) -> None:
        """Sequences of hidden states, where no unit calls attention by its name: in the inputs, else in what blocks are given."""
        self.counts = carried
        self.in_inputs()
        hopeless = {1}
        for start, seen in enumerate(self.whole) if not self.found else ():
            for length in dict.fromkeys(n for s in seen.given.values() if s in seen.returned.values() for n in s[1:-1]):
                found = None if length in hopeless else self.tried_from(start, length)
                if found is not None:
                    self.found.append(found)
                    return
                hopeless.add(length)

    def dims(self, whole: Shapes, less: Sequence[Shapes]) -> dict[str, At]:
        """The dims of tensors that are one sequence's, of those that have one; what changes in another way stays whole."""
        found: dict[str, list[At]] = {}
        for path, shape in whole.items():
            dims = [_moved(shape, other.get(path, ())) for other in less]
            found[path] = [(d, number) for number, some in enumerate(dims) for d in some or () if None not in dims]
        return {path: dims[0] for path, dims in found.items() if len(dims) == 1}

    def attends(self, at: int) -> tuple[Pair, ...]:
        """The sequences of each attention of a call."""

        def of(which: int, side: int) -> int | None:
            n = self.whole[at].attends[which][side]
            fewer = [less.calls[at].attends[which : which + 1] for less in self.found]
            return next((i for i, sizes in enumerate(fewer) if sizes and n - sizes[0][side] == 1), None)

        return tuple((of(i, 0), of(i, 1)) for i in range(len(self.whole[at].attends)))

    def sequence_plan(self, leaking: set[str]) -> SequencePlan:
        """What was found, call by call. P040 when a unit with attention is not clear."""
        calls = []
        for i, seen in enumerate(self.whole):
            less = [run.calls[i] for run in self.found]
            given = self.dims(seen.given, [s.given for s in less])
            returned = self.dims(seen.returned, [s.returned for s in less])
            attends = self.attends(i)
            begun = any(c.sees or c.stretched for c in calls) or any(q is not None for q, _ in attends)
            begun = begun or any(carried(seen, run.calls[i]) for run in self.found if self.counts is carried)
            clear = bool(given) and begun and seen.unit not in leaking
            fixed = frozenset(seen.given) - set(given)
            made = UnitPlan(seen.unit, clear, given, returned, attends, fixed=fixed)
            if made.sees and not clear:
                why = "other code gets what it computes by another way than through what it returns (hooks that collect it)"
                why = why if seen.unit in leaking else _unclear(seen, less)
                raise refused(f"unit {seen.unit} cannot run on a stretch of the sequence", why)
            calls.append(made)
        draws = {at: number for number, run in enumerate(self.found) for at in differing(self.drawn, run.drawn)}
        return SequencePlan(tuple(calls), draws, tuple(run.length for run in self.found))


def find(model: nn.Module, inputs: object, call: Run, sketch: Sketch) -> SequencePlan:
    """The course of `model` on `inputs`, a batch of `SAMPLES`. P040 when there is none."""
    if sketch.unmeasured or not sketch.calls:
        raise refused("the model's units cannot be measured", sketch.unmeasured or "it has none")
    finder = SequenceFinder(model, inputs, call, sketch)
    finder.in_inputs()
    finder.in_units()
    if not any(seen.attends for seen in finder.whole):
        finder.in_blocks()
    if finder.found:
        return finder.sequence_plan({c.unit for c in sketch.calls if _leaks(c)})
    why = "no input has a dim of the length of the queries of scaled_dot_product_attention"
    if not any(seen.attends for seen in finder.whole):
        why = "nothing that it is given can be one position shorter, and with it the hidden states of its units"
        raise refused("where the model has its sequence is not found", why)
    raise refused("where the model has its sequence is not found", finder.failed or why)


def _leaks(call: UnitCall) -> bool:
    """Whether other code may see that a call computed a stretch: it is handed something past what the call returns, and not only
    passes it to a loss that does not depend on it."""
    return bool({*call.leaks, *(set(call.aside) - {OUTPUT})} - {KNOWN})


def moved(whole: UnitSeen, less: UnitSeen, number: int | None = None) -> bool:
    """Whether an attention of a call has a query less; `number`: which one."""
    only = slice(None) if number is None else slice(number, number + 1)
    return any(a - b == 1 for (a, _), (b, _) in zip(whole.attends[only], less.attends[only]))


def carried(whole: UnitSeen, less: UnitSeen) -> bool:
    """Whether a call is given and returns hidden states, of three dims or more, that have a position less in one dim."""

    def hidden(shapes: Shapes, others: Shapes) -> set[tuple[int, ...]]:
        dims = {path: _moved(shape, others.get(path, ())) or () for path, shape in shapes.items() if len(shape) > 2}
        return {shapes[path][: d[0] + 1] for path, d in dims.items() if len(d) == 1 and d[0] < len(shapes[path]) - 1}

    return bool(hidden(whole.given, less.given) & hidden(whole.returned, less.returned))


def _moved(shape: tuple[int, ...], other: tuple[int, ...]) -> list[int] | None:
    """Dims that are one shorter; None when there are others."""
    if len(shape) != len(other):
        return None
    dims = [d for d, (m, n) in enumerate(zip(shape, other)) if m != n]
    return None if any(shape[d] - other[d] != 1 for d in dims) else dims


def _lengths(inputs: object) -> list[int]:
    """Sizes in the inputs that may be a sequence's, the most frequent first, then the largest."""
    sizes = Counter(n for t in tree_flatten(inputs)[0] if isinstance(t, Tensor) for n in t.shape[1:] if n > 1)
    return sorted(sizes, key=lambda n: (-sizes[n], -n))


_ROWS = {F.scaled_dot_product_attention: -2, F.multi_head_attention_forward: 0}
"""Functions of attention, the second of torch's own module -> the dim of queries and keys that has the positions."""


class _Attention(TorchFunctionMode):
    """Notes the numbers of queries and keys of every attention."""

    def __init__(self) -> None:
        super().__init__()
        self.running: UnitSeen | None = None
        self.between = False
        """There was one in code between units."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        at = _ROWS.get(func)
        if at is not None and self.running is not None:
            query, key = (*args, *(kwargs[name] for name in ("query", "key") if name in kwargs))[:2]
            self.running.attends.append((query.shape[at], key.shape[at]))
        self.between |= at is not None and self.running is None
        return func(*args, **kwargs)


def record(
    model: nn.Module, inputs: object, call: Run, names: Iterable[str], *, fake: bool, narrow: Narrow | None = None
) -> tuple[list[UnitSeen], Shapes]:
    """What the units were given and returned in one run, and what was drawn. `fake`: on tensors without numbers."""
    found: list[UnitSeen] = []
    attention = _Attention()
    with ExitStack() as stack:
        for name in names:
            module = model.get_submodule(name)

            def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> Any:
                given = (args, kwargs) if narrow is None else narrow(len(found), (args, kwargs))
                attention.running = UnitSeen(name, _shapes(given))
                found.append(attention.running)
                seed_host("course", len(found))  # layers dropped at random are the same, whatever dropout drew before
                return None if narrow is None else given

            def leave(_: nn.Module, args: tuple[Any, ...], output: object) -> None:
                attention.running, found[-1].returned = None, _shapes(output)
                seed_host("course", len(found), "left")

            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        stack.enter_context(host_kept())
        seed_host("course")
        with attention:
            watched = trace_run(model, inputs, call, fake)
    if attention.between:
        units = f"units are {', '.join(dict.fromkeys(s.unit for s in found))}"[:200]
        named = 'Job(units=("blocks.*",)) names the blocks that hold it'
        raise refused("attention is in code between units, which sees whole sequences", units, named)
    return found, {place: tuple(shape) for place, shape in watched.drawn.items()}


def _shapes(tree: object) -> Shapes:
    return {path: tuple(t.shape) for path, t in named_leaves(tree)[0] if isinstance(t, Tensor)}


def _unclear(seen: UnitSeen, less: Sequence[UnitSeen]) -> str:
    for other in less:
        for whole, shapes in ((seen.given, other.given), (seen.returned, other.returned)):
            for path, shape in whole.items():
                if _moved(shape, shapes.get(path, ())) is None:
                    return f"one position less changes {path} from {list(shape)} to {list(shapes.get(path, ()))}"
    return "nothing that it is given has a dim of the sequence"


@dataclass(frozen=True)
class Communication:
    """What tells other ranks something: units, `""` for code between them; and how many heads the queries of attentions have."""

    units: frozenset[str] = frozenset()
    heads: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Deaf(GroupLayout):
    """Rows of a rank whose group never answers."""

    tell: Callable[[], None]

    def gather(self, local: Tensor, dim: int) -> Tensor:
        self.tell()
        shape = list(local.shape)
        shape[dim] = self.cut.length - shape[dim]
        return torch.cat([local, local.new_zeros(shape)], dim)

    def fetch(self, local: Tensor, dim: int) -> Tensor:
        return self.gather(local, dim)


def communication(
    model: nn.Module, inputs: object, call: Call, parallel_units: ContextParallelUnits, layout: Layout
) -> Communication:
    """What tells other ranks something in a forward pass; `parallel_units` has wrapped the model.

    P040 when a unit itself would compute its attention again, seeing its rows alone.
    """
    units, heads, absent = set[str](), set[int](), Absent(parallel_units.ranks)

    def answer(asked: AttentionCall, queries: SequenceLayout, keys: SequenceLayout) -> Tensor:
        if checkpoint_frame() is not parallel_units.frame:
            why = "a checkpoint in its own code (torch.utils.checkpoint) holds its attention, and runs that alone in backward"
            fix = "checkpoint the whole unit", "activation_checkpointing=full in the plan"
            raise refused(f"unit {parallel_units.unit} cannot run on a stretch of the sequence", why, *fix)
        units.add(parallel_units.unit)
        heads.add(asked.q.shape[1])
        return plainly(replace(asked, mask=None, causal=False))

    def run(module: nn.Module, given: object) -> object:
        with torch.enable_grad():
            return call(module, given)

    tell = lambda: units.add(parallel_units.unit)  # noqa: E731
    parallel_units.hold = lambda length: _Deaf(layout(length, parallel_units.ranks), 0, absent, tell)
    parallel_units.answer = answer
    handles = parallel_units.install()
    try:
        try:
            trace_run(model, short(parallel_units.sequence_plan, inputs, parallel_units.ranks), run, False)
        except PlaitError:
            raise
        except Exception:  # it may need its own length
            trace_run(model, inputs, run, False)
    finally:
        for handle in handles:
            handle.remove()
        parallel_units.held = {}
    return Communication(frozenset(units), frozenset(heads))
