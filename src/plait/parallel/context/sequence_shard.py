"""A sequence of which each rank holds a stretch, as the model's code between units sees it: one tensor, whole.

Units run on stretches; the code around them was written for sequences. A `SequenceShard` has the shape of the whole sequence
and the rows of this rank. What is done to every element alone is done to those rows; what only looks at its shape gets
that of the whole; anything else (the first token for a classifier, a mean over the sequence) first gathers the whole,
which is right, and is communication.

Gradients on a rank are shares of a sum over the ranks, everywhere: of parameters, and of what was whole before. So the
rows of a whole are taken without a word to the others, and gathering one sums what the ranks found.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.config.errors import PlaitError, Problem
from plait.parallel.context.sequence_rules import OPERANDS, RULES
from plait.parallel.context.sequences import SequenceRows
from plait.tensors.sharded_tensor import elementwise, in_place
from plait.tensors.torch_private import leaves, tree_map


class SequenceShard(SequenceRows):
    """The rows of a sequence, with what torch's functions make of them."""

    rules = RULES

    def on_parts(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Functions that look at no other row, and products."""
        if func.__name__ == "dropout":  # each rank draws for its rows
            return elementwise(func, args, kwargs)
        if func.__name__ in OPERANDS:
            return OPERANDS[func.__name__](func, args, kwargs)
        return super().on_parts(func, args, kwargs)

    def on_wholes(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inside a unit, what was made of wholes is held in rows again: what follows is computed for these alone."""
        if args and args[0] is self and in_place(func.__name__):
            what = f"code between units writes into a sequence that ranks hold in stretches: {func.__name__}"
            raise PlaitError(Problem("P040", what, why="a rank has a part of it only", fix=("cp=1",)))
        found, given = super().on_wholes(func, args, kwargs), leaves((args, kwargs))
        inside = [t for t in given if isinstance(t, SequenceShard) and t.inside]
        if not inside:
            return found
        x, ids = max(inside, key=lambda t: t.dim()), {id(leaf) for leaf in given}
        return tree_map(lambda leaf: leaf if id(leaf) in ids else x.held_again(leaf), found)


def gathered(leaf: object) -> object:
    return leaf.whole() if isinstance(leaf, SequenceShard) else leaf


class _Shared(torch.autograd.Function):
    """A tensor of whose gradient every rank finds the whole: each keeps its share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        return grads[0] / ctx.ranks, None


def for_loss(outputs: object, ranks: int) -> object:
    """A model's outputs for a loss that each of so many ranks computes whole."""

    def one(leaf: object) -> object:
        if isinstance(leaf, SequenceShard):
            return leaf.held.finish(leaf.local, leaf.cut)
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            return _Shared.apply(leaf, ranks)
        return leaf

    leaves(outputs)  # makes trees of dataclasses
    return tree_map(one, outputs)
