"""A unit run on some rows of its sequences: its arguments cut, its rows posing as the whole where its code counts positions."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.parallel.context.attention import ShardedAttention, WholeAttention, apart
from plait.parallel.context.sequence_shard import SequenceShard
from plait.parallel.context.sequences import Arguments, At, SequenceLayout, UnitPlan, seeds
from plait.tensors import multihead
from plait.tensors.modules import convert
from plait.tensors.parameters import copy_module
from plait.tensors.torch_private import BatchNormBase, named_leaves, tree_map_only, tree_unflatten


def widened(module: nn.Module) -> nn.Module:
    """A copy in float64 that draws nothing, its attention visible. Batch norms go on taking statistics of what they are given."""
    made = convert(copy_module(module), None, torch.float64).eval()
    for name, inner in module.named_modules():
        if isinstance(inner, BatchNormBase) and inner.training:
            made.get_submodule(name).train()
    seeds(made)
    show(made)
    return made


def show(module: nn.Module) -> None:
    """Let torch's own attention module call `scaled_dot_product_attention` where it can be seen."""
    for inner in module.modules():
        if isinstance(inner, nn.MultiheadAttention) and type(inner).forward is nn.MultiheadAttention.forward:
            inner.forward = partial(multihead.forward, inner)  # pyrefly: ignore


Besides = dict[str, tuple[int, SequenceLayout]]
"""Of what a unit returns in rows though no run of the model showed that it has one dim of a sequence (weights of attention
have two): by its path, the dim and the rows."""


def posed(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: UnitPlan,
    held: Mapping[int, SequenceLayout],
    besides: Besides,
) -> Any:
    """What a unit returns, run on this rank's rows: as they are, or under the shape of the whole."""
    if not call.poses:
        return forward(*args, **kwargs)

    def whole(path: str, leaf: object) -> object:
        dim, number = (0, None) if path in call.left else call.given.get(path, (0, None))
        mine = None if number is None else held.get(number)
        if mine is None or not isinstance(leaf, Tensor) or leaf.shape[dim] != mine.size:
            return leaf
        return SequenceShard.of(leaf, dim, mine, True)

    def rows(path: str, leaf: object) -> object:
        at = call.returned.get(path)
        if not isinstance(leaf, SequenceShard):
            return rows_of(leaf, at, held) if isinstance(leaf, Tensor) else leaf
        if at is None and leaf.times == 1:
            besides[path] = leaf.cut, leaf.held
            return leaf.local
        return leaf.local if at is not None and at[0] == leaf.cut else rows_of(leaf.whole(), at, held)

    args, kwargs = each(whole, (args, kwargs))
    return each(rows, forward(*args, **kwargs))


def each(make: Callable[[str, object], object], tree: object) -> Any:
    """A tree with its leaves made again from their paths and what they are."""
    flat, spec = named_leaves(tree)
    return tree_unflatten([make(path, leaf) for path, leaf in flat], spec)


def rows_of(whole: Tensor, at: At | None, held: Mapping[int, SequenceLayout]) -> Tensor:
    """The rows that are held of the sequence that a dim is."""
    return whole if at is None or at[1] not in held else held[at[1]].take(whole, at[0])


@dataclass(frozen=True)
class OutputOnRows:
    """What a unit returned, run on some rows."""

    leaves: list[tuple[str, Any]]
    call: UnitPlan
    held: Mapping[int, SequenceLayout]
    besides: Besides

    def differences(self, expected: list[tuple[str, Any]]) -> Iterator[float]:
        """How far each tensor is from these rows of what the unit returns on all. ValueError when it returns other things."""
        if [path for path, _ in self.leaves] != [path for path, _ in expected]:
            raise ValueError("it returns something else")
        for (path, found), (_, whole) in zip(self.leaves, expected):
            if isinstance(whole, Tensor):
                dim, mine = self.besides.get(path, (0, None))
                rows = (
                    rows_of(whole, self.call.returned.get(path), self.held) if mine is None else mine.take(whole, dim)
                )
                yield apart(found, rows) if isinstance(found, Tensor) else 1.0


def on_rows(
    unit: nn.Module, given: Arguments, call: UnitPlan, held: Mapping[int, SequenceLayout], whole: WholeAttention
) -> OutputOnRows:
    """Run a unit on the rows that are held of what it is given, its attentions answered from a run on the whole."""
    whole.number, whole.worst, besides = 0, 0.0, Besides()
    args, kwargs = cut_arguments(copied(given), call, held)
    with ShardedAttention(held, call.attends, whole.answer):
        return OutputOnRows(named_leaves(posed(unit, args, kwargs, call, held, besides))[0], call, held, besides)


def cut_arguments(given: Arguments, call: UnitPlan, held: Mapping[int, SequenceLayout]) -> Arguments:
    """(args, kwargs) with this rank's rows of what is cut."""

    def one(path: str, leaf: object) -> object:
        at = None if path in call.left else call.given.get(path)
        return rows_of(leaf, at, held) if isinstance(leaf, Tensor) else leaf

    return each(one, given)


def lengths_of(made: UnitPlan, given: Arguments) -> dict[int, int]:
    """Sequence -> its length, of all that a unit is given something of."""
    named = {path: leaf for path, leaf in named_leaves(given)[0] if isinstance(leaf, Tensor)}
    return {number: named[path].shape[dim] for path, (dim, number) in made.given.items() if path in named}


def copied(given: Arguments) -> Arguments:
    """Arguments with their tensors cloned: a unit may write into them."""
    return tree_map_only(Tensor, torch.clone, given)


def wide(t: Tensor) -> Tensor:
    """In float64, if it has numbers with a point."""
    if t.is_complex():
        return t.to(torch.complex128)
    return t.double() if t.is_floating_point() else t
