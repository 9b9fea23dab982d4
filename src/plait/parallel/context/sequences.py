"""The plan of a forward pass under `cp`: which calls of units run on a sequence shard.

A model may have several sequences: those of an encoder and a decoder, or of a text and an image. Each is sharded separately. An
attention may have its queries in one sequence and its keys in another. `parallel/context/sequence_finder.py` finds the sequences.

`SequenceLayout` has the rows of each rank, and `SequenceRows` is a tensor that represents the full sequence on a rank.
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
from plait.tensors.rows import Rows, make_dense
from plait.tensors.sharded_tensor import ShardedTensor, replace_dim
from plait.tensors.sharded_views import NotShardable
from plait.tensors.torch_private import (
    TreeSpec,
    checkpoint_frame,
    leaves_with_paths,
    tree_map_only,
    tree_unflatten,
    version,
)
from plait.tensors.trees import TensorSlot

SAMPLES = 3
"""Samples of the batch in the runs that find sequences."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a unit, positional and named."""
At = tuple[int, int]
"""A dim of a tensor, and the index of its sequence."""
Pair = tuple[int | None, int | None]
"""The sequences of an attention's queries and keys; None: no sequence, every rank has all rows."""


@dataclass(frozen=True)
class UnitPlan:
    """How a call of a unit runs: on sequence shards or on full sequences."""

    unit: str
    is_split: bool
    given: dict[str, At]
    """Arguments that are sharded: all with exactly one sequence dim, except those in `left`."""
    returned: dict[str, At]
    attends: tuple[Pair, ...] = ()
    """The sequences of its attention calls, in order."""
    left: frozenset[str] = frozenset()
    """Arguments that stay full although they have a sequence dim: a mask over keys."""
    fixed: frozenset[str] = frozenset()
    """Arguments without a sequence dim, whatever their sizes. Arguments that were absent in the measured pass are not listed."""
    has_full_shape: bool = False
    """The unit's code reads lengths: it gets tensors of the full shape, and computes this rank's rows (`SequenceShard`)."""
    row_modules: tuple[str, ...] = ()
    """Modules that run on plain rows (`parallel/context/unit_opening.py`)."""
    opened: bool = False
    """Positions interact in its own code, which gathers the rows that it needs (`parallel/context/unit_opening.py`)."""
    full_modules: tuple[str, ...] = ()
    """Modules that run on full sequences."""
    flops: int = 0
    """Operations of its matrix products on the short sequence of the check."""
    part: float = 1.0
    """Mean fraction of these operations that a rank computes."""

    @property
    def has_attention(self) -> bool:
        """Whether the unit attends over sequences."""
        return any(queries is not None for queries, _ in self.attends)


@dataclass(frozen=True)
class SequencePlan:
    """The calls of a forward pass, in order."""

    calls: tuple[UnitPlan, ...]
    draws: dict[tuple[str, int], int]
    """(place, dim) of random tensors that are drawn for sequence shards -> sequence."""
    lengths: tuple[int, ...]
    """Lengths of the sequences in the measured input."""
    units: dict[str, int] = field(init=False)
    """Units that run on shards -> the sequence of their outputs."""

    def __post_init__(self) -> None:
        units: dict[str, int] = {}
        for call in self.calls:
            if call.is_split:
                first = next(iter((*call.returned.values(), *call.given.values())))
                units.setdefault(call.unit, first[1])
        object.__setattr__(self, "units", units)

    def is_full_module(self, module: str) -> bool:
        """Whether a module inside a unit runs on full sequences."""
        inside = (f"{call.unit}.{name}." for call in self.calls for name in call.full_modules)
        return f"{module}.".startswith(tuple(inside))

    def find_sequence(self, place: str) -> int | None:
        """Return the sequence whose shards a module, or a place of random numbers, computes; None if there is none."""
        module = place.split("#")[0] + "."
        return next((number for unit, number in self.units.items() if module.startswith(f"{unit}.")), None)


def make_sequence_error(what: str, why: str, *fix: str) -> PlaitError:
    """Make a P040 error."""
    return PlaitError(Problem("P040", what, why=why, fix=(*fix, "cp=1")))


def make_length_error(length: int, ranks: int) -> PlaitError:
    """Make a P042 error."""
    least = 2 * ranks
    what = f"a sequence of {length} does not split over cp={ranks}"
    why = f"each rank needs at least two positions: {length} < 2 × {ranks}; one short sample is enough"
    pad = f"pad short samples in collate to a multiple of {least}:    F.pad(tokens, (0, -len(tokens) % {least}), value=PAD)"
    return PlaitError(Problem("P042", what, why=why, fix=(pad, f"cp={max(1, length // 2)}")))


def shorten_inputs(inputs: object, lengths: Sequence[int], to: Sequence[int]) -> Any:
    """Shorten the inputs to `to[i]` positions where they have `lengths[i]`. Strides are those of a batch with these lengths."""
    sizes = dict(zip(lengths, to))

    def shorten(t: Tensor) -> Tensor:
        less = t
        for dim, size in enumerate(t.shape):
            less = less.narrow(dim, 0, sizes[size]) if size in sizes and (dim or size != SAMPLES) else less
        return less if less is t else make_dense(less)

    return tree_map_only(Tensor, shorten, inputs)


def shorten_for_check(sequence_plan: SequencePlan, inputs: object, ranks: int) -> Any:
    """Shorten the inputs for a check: short lengths for which the shards of the ranks differ."""
    return shorten_inputs(inputs, sequence_plan.lengths, [min(n, 4 * ranks + 1) for n in sequence_plan.lengths])


def localize_sketch(sketch: Sketch, sizes: Sequence[int]) -> Sketch:
    """Replace the outputs of calls in the sketch by those of a rank: for units on shards, `sizes[i]` rows of sequence i."""
    return replace(
        sketch, calls=tuple(_localize_call(c, made, sizes) for c, made in zip(sketch.calls, sketch.sequence_plan.calls))
    )


def _localize_call(call: UnitCall, made: UnitPlan, sizes: Sequence[int]) -> UnitCall:
    form = call.template
    if not made.is_split or not isinstance(form.spec, TreeSpec):
        return call
    paths = [path for path, _ in leaves_with_paths(tree_unflatten([object() for _ in form.leaves], form.spec))[0]]
    slots = []
    for path, slot in zip(paths, form.leaves):
        if isinstance(slot, TensorSlot) and path in made.returned:
            dim, number = made.returned[path]
            slot = replace(slot, base=(*slot.base[:dim], sizes[number], *slot.base[dim + 1 :]))
        slots.append(slot)
    return replace(call, template=replace(form, leaves=tuple(slots)))


def add_noise(model: nn.Module) -> None:
    """Add noise to constant parameters, which would hide differences in the values that they multiply."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() > 1 and bool((p == p.flatten()[0]).all()):
                p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).mul_(0.1).to(p.device, p.dtype))


def describe_opened(sketch: Sketch) -> list[str]:
    """Describe the cost of units that compute more than a rank's rows: one line for all similar units."""
    lines: dict[str, str] = {}
    for call, seen in zip(sketch.sequence_plan.calls, sketch.calls) if sketch.sequence_plan is not None else ():
        units = re.sub(r"\d+", "*", call.unit)
        if call.is_split and call.opened:
            whole = f", {', '.join(call.full_modules)} on full sequences" if call.full_modules else ""
            lines.setdefault(
                units,
                f"cp: positions interact in the code of {units} itself (attention written out, a convolution, …): the rows that it needs "
                f"are gathered{whole}, and a rank computes {call.part:.0%} of its products",
            )
        elif not call.is_split and seen.flops.for_batch(1):
            lines.setdefault(units, f"cp: {units} runs on the full sequence, on every rank")
    return list(lines.values())


@dataclass(frozen=True)
class SequenceLayout:
    """The rows of a sequence on a rank that cannot communicate."""

    rows: Rows
    rank: int

    @property
    def size(self) -> int:
        """Number of rows of this rank."""
        return self.rows.sizes[self.rank]

    def make_axis(self, local: int) -> Axis | None:
        """Return this rank's part of a dim of `local` rows, of one or several sequences, for its random numbers."""
        times, rest = divmod(local, self.size)
        return None if rest else (times * self.rows.length, self.rows.merge_dims(times, 1).ranks[self.rank])

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """Take this rank's rows, with the strides of a sequence of that length."""
        return make_dense(self.rows.take_part(whole, dim, self.rank))

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """Gather the full sequence. Gradients of the ranks are summed."""
        raise RuntimeError("its code needs all rows of the sequence")

    def gather_no_grad(self, local: Tensor, dim: int) -> Tensor:
        """Gather a full tensor without gradients."""
        return self.gather(local, dim)

    def to_loss_input(self, local: Tensor, dim: int) -> Tensor:
        """Convert to an input of the loss; without gradients, the full sequence."""
        return self.gather_no_grad(local, dim)


@dataclass(frozen=True)
class GroupLayout(SequenceLayout):
    """The rows of a sequence on this rank of a group."""

    group: ProcessGroup

    def gather(self, local: Tensor, dim: int) -> Tensor:
        return collectives.gather_partial(local, dim, self.rows, self.group)

    def gather_no_grad(self, local: Tensor, dim: int) -> Tensor:
        return collectives.all_gather_rows(local, dim % local.dim(), self.rows, self.group)

    def to_loss_input(self, local: Tensor, dim: int) -> Tensor:
        if not torch.is_grad_enabled():
            return self.gather_no_grad(local, dim)
        return ShardedTensor(local, dim, self.rows, self.group)


class SequenceRows(ShardedTensor):
    """A tensor that represents a full sequence by this rank's rows.

    `inside`: in a unit, where random numbers are drawn for this rank's rows alone.
    """

    sequence_layout: SequenceLayout
    times: int
    """Inside a unit: number of sequences in the dim, if the batch dim is merged into it."""
    known: tuple[Any, Tensor] | None = None
    """Inside a unit: the gathered tensor, with the state for which it is valid."""
    description = "a sequence that is sharded over ranks, and its gradient is lost"

    @classmethod
    def of(cls, local: Tensor, dim: int, held: SequenceLayout, inside: bool = False, times: int = 1) -> Self:
        """Make the sequence whose rows of `dim` on this rank are `local`."""
        rows = held.rows if times == 1 else held.rows.merge_dims(times, 1)
        shape = replace_dim(local, dim % local.dim(), rows.length)
        return cls.wrap(local, shape, shard_dim=dim % local.dim(), rows=rows, sequence_layout=held, wraps_region=inside, times=times)

    @property
    def rank(self) -> int:
        """This rank's index in the layout."""
        return self.sequence_layout.rank

    def with_local(self, local: Tensor, dim: int | None = None, rows: Rows | None = None) -> Self:
        """Make another tensor whose rows are `local`: of one full sequence, or of several inside a unit. Raises `NotShardable` for other rows."""
        times = self.times
        if rows is not None:
            times = rows.length // self.sequence_layout.rows.length
            if rows.merge_dims(1, 1) != self.sequence_layout.rows.merge_dims(times, 1) or (times > 1 and not self.wraps_region):
                raise NotShardable
        return self.of(local, self.shard_dim if dim is None else dim, self.sequence_layout, self.wraps_region, times)

    def gather_full(self) -> Tensor:
        """Gather all rows as a plain tensor. Backward returns this rank's rows of the sum of all ranks' gradients."""
        if not self.wraps_region:
            return self.sequence_layout.gather(self.local, self.shard_dim)
        state = version(self.local), torch.is_grad_enabled(), checkpoint_frame()
        if self.known is None or self.known[0] != state:
            self.known = state, self._map_sequences(self.local, self.shard_dim, self.sequence_layout.gather)
        return self.known[1]

    def take_rows(self, whole: Tensor, dim: int) -> Tensor:
        """Take this rank's rows of a tensor of the same length, without communication."""
        return self._map_sequences(whole, dim % whole.dim(), self.sequence_layout.take)

    def enter_region(self, whole: Tensor) -> Tensor:
        """Enter an operand that all ranks have: each rank computes a part of its gradient."""
        return whole

    def has_same_layout(self, other: ShardedTensor) -> bool:
        """Whether another shard is split in the same dim, counted from the end, and in the same way."""
        same = isinstance(other, SequenceRows) and (other.sequence_layout, other.times) == (self.sequence_layout, self.times)
        return same and other.dim_from_end == self.dim_from_end

    def _map_sequences(self, t: Tensor, dim: int, what: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Apply a function to every sequence of a dim with several sequences."""
        if self.times == 1:
            return what(t, dim)
        return what(t.unflatten(dim, (self.times, -1)), dim + 1).flatten(dim, dim + 1)

    def shard_again(self, leaf: object) -> object:
        """Shard a full tensor that has the dims of this one, and its length in the sequence dim."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, SequenceRows) or leaf.dim() != self.dim():
            return leaf
        return self.with_local(self.take_rows(leaf, self.shard_dim)) if leaf.shape[self.shard_dim] == self.rows.length else leaf
