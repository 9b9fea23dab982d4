"""Runs a unit on some rows of its sequences, with tensors of the full shape if its code counts positions."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.parallel.context.attention import FullAttention, ShardedAttention, max_relative_diff
from plait.parallel.context.sequence_shard import SequenceShard
from plait.parallel.context.sequences import Arguments, At, SequenceLayout, UnitPlan, add_noise
from plait.tensors import multihead
from plait.tensors.module_state import convert_module
from plait.tensors.parameters import copy_module
from plait.tensors.torch_private import BatchNormBase, leaves_with_paths, tree_map_only, tree_unflatten


def copy_float64(module: nn.Module) -> nn.Module:
    """Copy a module to float64, in eval mode, with its attention exposed. Batch norms in training mode stay in it."""
    made = convert_module(copy_module(module), None, torch.float64).eval()
    for name, inner in module.named_modules():
        if isinstance(inner, BatchNormBase) and inner.training:
            made.get_submodule(name).train()
    add_noise(made)
    expose_attention(made)
    return made


def expose_attention(module: nn.Module) -> None:
    """Let torch's own attention module call `scaled_dot_product_attention`, where it can be intercepted."""
    for inner in module.modules():
        if isinstance(inner, nn.MultiheadAttention) and type(inner).forward is nn.MultiheadAttention.forward:
            inner.forward = partial(multihead.multihead_forward, inner)  # pyrefly: ignore


ExtraOutputs = dict[str, tuple[int, SequenceLayout]]
"""Sharded outputs that the measured runs did not show, because they have the sequence in two dims (weights of attention): path ->
dim and layout."""


def call_on_rows(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: UnitPlan,
    held: Mapping[int, SequenceLayout],
    besides: ExtraOutputs,
) -> Any:
    """Call a unit on this rank's rows: as plain tensors, or as tensors of the full shape."""
    if not call.has_full_shape:
        return forward(*args, **kwargs)

    def to_shard(path: str, leaf: object) -> object:
        dim, number = (0, None) if path in call.left else call.given.get(path, (0, None))
        mine = None if number is None else held.get(number)
        if mine is None or not isinstance(leaf, Tensor) or leaf.shape[dim] != mine.size:
            return leaf
        return SequenceShard.of(leaf, dim, mine, True)

    def to_rows(path: str, leaf: object) -> object:
        at = call.returned.get(path)
        if not isinstance(leaf, SequenceShard):
            return take_rows(leaf, at, held) if isinstance(leaf, Tensor) else leaf
        if at is None and leaf.times == 1:
            besides[path] = leaf.shard_dim, leaf.sequence_layout
            return leaf.local
        return leaf.local if at is not None and at[0] == leaf.shard_dim else take_rows(leaf.gather_full(), at, held)

    args, kwargs = map_named_leaves(to_shard, (args, kwargs))
    return map_named_leaves(to_rows, forward(*args, **kwargs))


def map_named_leaves(make: Callable[[str, object], object], tree: object) -> Any:
    """Map the leaves of a tree by a function of their path and value."""
    flat, spec = leaves_with_paths(tree)
    return tree_unflatten([make(path, leaf) for path, leaf in flat], spec)


def take_rows(whole: Tensor, at: At | None, held: Mapping[int, SequenceLayout]) -> Tensor:
    """Take this rank's rows of a full tensor."""
    return whole if at is None or at[1] not in held else held[at[1]].take(whole, at[0])


@dataclass(frozen=True)
class OutputOnRows:
    """The output of a unit that ran on some rows."""

    leaves: list[tuple[str, Any]]
    call: UnitPlan
    held: Mapping[int, SequenceLayout]
    extra_outputs: ExtraOutputs

    def compute_diffs(self, expected: list[tuple[str, Any]]) -> Iterator[float]:
        """Yield the relative difference of each tensor from these rows of the full output. Raises ValueError for another structure."""
        if [path for path, _ in self.leaves] != [path for path, _ in expected]:
            raise ValueError("its output has another structure")
        for (path, found), (_, whole) in zip(self.leaves, expected):
            if isinstance(whole, Tensor):
                dim, mine = self.extra_outputs.get(path, (0, None))
                rows = (
                    take_rows(whole, self.call.returned.get(path), self.held) if mine is None else mine.take(whole, dim)
                )
                yield max_relative_diff(found, rows) if isinstance(found, Tensor) else 1.0


def run_on_rows(
    unit: nn.Module, given: Arguments, call: UnitPlan, held: Mapping[int, SequenceLayout], whole: FullAttention
) -> OutputOnRows:
    """Run a unit on a rank's rows of its arguments, with attention over the keys and values of the full run."""
    whole.call_count, whole.max_diff, besides = 0, 0.0, ExtraOutputs()
    args, kwargs = shard_arguments(clone_arguments(given), call, held)
    with ShardedAttention(held, call.attends, whole.attend):
        return OutputOnRows(leaves_with_paths(call_on_rows(unit, args, kwargs, call, held, besides))[0], call, held, besides)


def shard_arguments(given: Arguments, call: UnitPlan, held: Mapping[int, SequenceLayout]) -> Arguments:
    """Take this rank's rows of the sharded arguments."""

    def take_argument(path: str, leaf: object) -> object:
        at = None if path in call.left else call.given.get(path)
        return take_rows(leaf, at, held) if isinstance(leaf, Tensor) else leaf

    return map_named_leaves(take_argument, given)


def find_lengths(made: UnitPlan, given: Arguments) -> dict[int, int]:
    """Return sequence -> length, for all sequences in a unit's arguments."""
    named = {path: leaf for path, leaf in leaves_with_paths(given)[0] if isinstance(leaf, Tensor)}
    return {number: named[path].shape[dim] for path, (dim, number) in made.given.items() if path in named}


def clone_arguments(given: Arguments) -> Arguments:
    """Clone the tensors of the arguments, because a unit may write into them."""
    return tree_map_only(Tensor, torch.clone, given)


def to_float64(t: Tensor) -> Tensor:
    """Convert floating-point tensors to float64."""
    if t.is_complex():
        return t.to(torch.complex128)
    return t.double() if t.is_floating_point() else t
