"""Which calls of units run on a rank's part of the sequence under `cp`, as values: the plan of one forward pass.

A model may have several sequences: an encoder's and a decoder's, a text's and an image's. Each is cut by itself, and an
attention may have its queries in one and its keys in another. `parallel/context/find.py` finds them.

Which rows of a sequence a rank holds, and a tensor that stands for the sequence of which it holds them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plait.config.errors import PlaitError, Problem
from plait.model.operations import UnitCall
from plait.model.sketch import Sketch
from plait.randomness.sub_block import Axis
from plait.tensors import collectives
from plait.tensors.rows import Rows, dense
from plait.tensors.sharded_tensor import ShardedTensor, lengthened
from plait.tensors.sharded_views import Elsewhere
from plait.tensors.torch_private import TreeSpec, checkpoint_frame, named_leaves, tree_map_only, tree_unflatten, version
from plait.tensors.trees import Slot

SAMPLES = 3
"""Of the batch in the runs that look for sequences."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a unit is given, by place and by name."""
At = tuple[int, int]
"""A dim of a tensor, and the number of the sequence that it is."""
Pair = tuple[int | None, int | None]
"""The sequences of an attention's queries and of its keys; None: no sequence, every rank has all of it."""


@dataclass(frozen=True)
class UnitPlan:
    """How a call of a unit runs: on a rank's stretches, or on whole sequences."""

    unit: str
    stretched: bool
    given: dict[str, At]
    """Arguments that are cut: all that have one dim of one sequence, but for those in `left`."""
    returned: dict[str, At]
    attends: tuple[Pair, ...] = ()
    """Its attentions, in order."""
    left: frozenset[str] = frozenset()
    """Arguments that stay whole though they have such a dim: a mask over keys."""
    fixed: frozenset[str] = frozenset()
    """Arguments that have no such dim, whatever their sizes: of others that were not there nobody knows."""
    poses: bool = False
    """Its code looks at lengths: it sees those of whole sequences, and computes this rank's rows (`Stretch`)."""
    alone: tuple[str, ...] = ()
    """Its modules that do not pose (`parallel/context/opened_unit.py`)."""
    opened: bool = False
    """Positions meet in its own code, which gathers what it needs of other ranks (`parallel/context/opened_unit.py`)."""
    together: tuple[str, ...] = ()
    """Its modules that run on whole sequences."""
    flops: int = 0
    """Of its products on the short sequence that was tried."""
    part: float = 1.0
    """How much of them a rank computes, on average."""

    @property
    def sees(self) -> bool:
        """Whether an attention in it is over sequences."""
        return any(queries is not None for queries, _ in self.attends)


@dataclass(frozen=True)
class SequencePlan:
    """The calls of a forward pass, in order."""

    calls: tuple[UnitPlan, ...]
    draws: dict[tuple[str, int], int]
    """(place, dim) of random tensors that are drawn on stretches -> sequence."""
    lengths: tuple[int, ...]
    """Of the sequences in the input that was tried."""
    units: dict[str, int] = field(init=False)
    """Units that run on stretches -> the sequence of what they return."""

    def __post_init__(self) -> None:
        units: dict[str, int] = {}
        for call in self.calls:
            if call.stretched:
                first = next(iter((*call.returned.values(), *call.given.values())))
                units.setdefault(call.unit, first[1])
        object.__setattr__(self, "units", units)

    def gathered(self, module: str) -> bool:
        """Whether a module inside a unit runs on whole sequences."""
        inside = (f"{call.unit}.{name}." for call in self.calls for name in call.together)
        return f"{module}.".startswith(tuple(inside))

    def on(self, place: str) -> int | None:
        """The sequence whose stretches a module, or a place where numbers are drawn, computes; None: none of them."""
        module = place.split("#")[0] + "."
        return next((number for unit, number in self.units.items() if module.startswith(f"{unit}.")), None)


def refused(what: str, why: str, *fix: str) -> PlaitError:
    """P040."""
    return PlaitError(Problem("P040", what, why=why, fix=(*fix, "cp=1")))


def too_short(length: int, ranks: int) -> PlaitError:
    """P042."""
    least = 2 * ranks
    what = f"a sequence of {length} does not split over cp={ranks}"
    why = f"each rank holds two positions or more: {length} < 2 × {ranks}; one short sample is enough"
    pad = f"pad short samples in collate to a multiple of {least}:    F.pad(tokens, (0, -len(tokens) % {least}), value=PAD)"
    return PlaitError(Problem("P042", what, why=why, fix=(pad, f"cp={max(1, length // 2)}")))


def shortened(inputs: object, lengths: Sequence[int], to: Sequence[int]) -> Any:
    """The inputs with `to[i]` positions where they have `lengths[i]`, laid out as a batch of these lengths."""
    sizes = dict(zip(lengths, to))

    def one(t: Tensor) -> Tensor:
        less = t
        for dim, size in enumerate(t.shape):
            less = less.narrow(dim, 0, sizes[size]) if size in sizes and (dim or size != SAMPLES) else less
        return less if less is t else dense(less)

    return tree_map_only(Tensor, one, inputs)


def short(sequence_plan: SequencePlan, inputs: object, ranks: int) -> Any:
    """The inputs with lengths that are as good as any for a look at the model: unlike stretches for all ranks."""
    return shortened(inputs, sequence_plan.lengths, [min(n, 4 * ranks + 1) for n in sequence_plan.lengths])


def as_held(sketch: Sketch, sizes: Sequence[int]) -> Sketch:
    """The sketch with what calls return as a rank has it: of units on stretches, `sizes[i]` rows of sequence i."""
    return replace(
        sketch, calls=tuple(_held(c, made, sizes) for c, made in zip(sketch.calls, sketch.sequence_plan.calls))
    )


def _held(call: UnitCall, made: UnitPlan, sizes: Sequence[int]) -> UnitCall:
    form = call.template
    if not made.stretched or not isinstance(form.spec, TreeSpec):
        return call
    paths = [path for path, _ in named_leaves(tree_unflatten([object() for _ in form.leaves], form.spec))[0]]
    slots = []
    for path, slot in zip(paths, form.leaves):
        if isinstance(slot, Slot) and path in made.returned:
            dim, number = made.returned[path]
            slot = replace(slot, base=(*slot.base[:dim], sizes[number], *slot.base[dim + 1 :]))
        slots.append(slot)
    return replace(call, template=replace(form, leaves=tuple(slots)))


def seeds(model: nn.Module) -> None:
    """Give parameters that are constant some noise: what they multiply would not be seen."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() > 1 and bool((p == p.flatten()[0]).all()):
                p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).mul_(0.1).to(p.device, p.dtype))


def opened_units(sketch: Sketch) -> list[str]:
    """Of units that compute more than a rank's rows: what that costs, in a line for those that are alike."""
    lines: dict[str, str] = {}
    for call, seen in zip(sketch.sequence_plan.calls, sketch.calls) if sketch.sequence_plan is not None else ():
        units = re.sub(r"\d+", "*", call.unit)
        if call.stretched and call.opened:
            whole = f", {', '.join(call.together)} on whole sequences" if call.together else ""
            lines.setdefault(
                units,
                f"cp: positions meet in the code of {units} itself (attention written out, a convolution, …): what must meet "
                f"is gathered{whole}, and a rank computes {call.part:.0%} of its products",
            )
        elif not call.stretched and seen.flops.of(1):
            lines.setdefault(units, f"cp: {units} runs on the whole sequence, on every rank")
    return list(lines.values())


@dataclass(frozen=True)
class SequenceLayout:
    """Which rows of a sequence a rank holds that cannot ask the others for theirs."""

    cut: Rows
    rank: int

    @property
    def size(self) -> int:
        """Rows of this rank."""
        return self.cut.sizes[self.rank]

    def axis(self, local: int) -> Axis | None:
        """What this rank holds of a dim of `local` rows, of one sequence or of several, for what is drawn for its rows."""
        times, rest = divmod(local, self.size)
        return None if rest else (times * self.cut.length, self.cut.merged(times, 1).ranks[self.rank])

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's rows, laid out as a sequence of their number."""
        return dense(self.cut.take(whole, dim, self.rank))

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """The whole; gradients of the ranks are summed."""
        raise RuntimeError("its code needs all rows of the sequence")

    def fetch(self, local: Tensor, dim: int) -> Tensor:
        """The whole of something without gradients."""
        return self.gather(local, dim)

    def finish(self, local: Tensor, dim: int) -> Tensor:
        """What stands for the whole in a loss; where nothing is learned, the whole."""
        return self.fetch(local, dim)


@dataclass(frozen=True)
class GroupLayout(SequenceLayout):
    """Which rows of a sequence this rank of a group holds."""

    group: ProcessGroup

    def gather(self, local: Tensor, dim: int) -> Tensor:
        return collectives.gather_partial(local, dim, self.cut, self.group)

    def fetch(self, local: Tensor, dim: int) -> Tensor:
        return collectives.gathered(local, dim % local.dim(), self.cut, self.group)

    def finish(self, local: Tensor, dim: int) -> Tensor:
        if not torch.is_grad_enabled():
            return self.fetch(local, dim)
        return ShardedTensor(local, dim, self.cut, self.group)


class SequenceRows(ShardedTensor):
    """A sequence of which this rank has rows. `inside`: in a unit, where random numbers are drawn for this rank's rows alone."""

    held: SequenceLayout
    times: int
    """Inside a unit: how often the dim has the sequence, one after the other, where the batch's dim is in it too."""
    known: tuple[Any, Tensor] | None = None
    """Inside a unit: the whole, once it was gathered, and what must not have changed since."""
    described = "a sequence that ranks hold in stretches, and its gradient is lost"

    @classmethod
    def of(cls, local: Tensor, dim: int, held: SequenceLayout, inside: bool = False, times: int = 1) -> Self:
        """The sequence whose rows of dim `dim` on this rank are `local`."""
        rows = held.cut if times == 1 else held.cut.merged(times, 1)
        shape = lengthened(local, dim % local.dim(), rows.length)
        return cls.around(local, shape, cut=dim % local.dim(), rows=rows, held=held, inside=inside, times=times)

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return self.held.rank

    def like(self, local: Tensor, dim: int | None = None, rows: Rows | None = None) -> Self:
        """Another tensor whose rows are `local`: of whole sequences, one, or several inside a unit. Elsewhere if they are not."""
        times = self.times
        if rows is not None:
            times = rows.length // self.held.cut.length
            if rows.merged(1, 1) != self.held.cut.merged(times, 1) or (times > 1 and not self.inside):
                raise Elsewhere
        return self.of(local, self.cut if dim is None else dim, self.held, self.inside, times)

    def whole(self) -> Tensor:
        """All rows, as a plain tensor. Backward: this rank's rows of the sum of all ranks' gradients."""
        if not self.inside:
            return self.held.gather(self.local, self.cut)
        state = version(self.local), torch.is_grad_enabled(), checkpoint_frame()
        if self.known is None or self.known[0] != state:
            self.known = state, self._each(self.local, self.cut, self.held.gather)
        return self.known[1]

    def mine(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's rows of something as long as this one, without a word to the others."""
        return self._each(whole, dim % whole.dim(), self.held.take)

    def entered(self, whole: Tensor) -> Tensor:
        """An operand that all ranks have: each finds a share of its gradient."""
        return whole

    def alike(self, other: ShardedTensor) -> bool:
        """Whether another stretch is cut in the same dim, counted from the end, and in the same way."""
        same = isinstance(other, SequenceRows) and (other.held, other.times) == (self.held, self.times)
        return same and other.along == self.along

    def _each(self, t: Tensor, dim: int, what: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Something done to every sequence of a dim that has several."""
        if self.times == 1:
            return what(t, dim)
        return what(t.unflatten(dim, (self.times, -1)), dim + 1).flatten(dim, dim + 1)

    def held_again(self, leaf: object) -> object:
        """This rank's rows of a whole that has as many dims as this one, and as many rows in the dim of the sequence."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, SequenceRows) or leaf.dim() != self.dim():
            return leaf
        return self.like(self.mine(leaf, self.cut)) if leaf.shape[self.cut] == self.rows.length else leaf
