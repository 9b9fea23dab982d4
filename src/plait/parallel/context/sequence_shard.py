"""A tensor with the shape of a full sequence, of which each rank has one shard.

Units run on sequence shards, while the code between them was written for full sequences. A `SequenceShard` has the shape of the
full sequence, and the rows of this rank. Position-wise functions compute these rows. Code that only reads the shape gets that of
the full sequence. All other functions (the first token for a classifier, a mean over the sequence) first gather the full
sequence, which is correct and costs communication.

The gradients on a rank are partial sums over the ranks, for parameters and for full tensors. So taking rows of a full tensor
needs no communication, and gathering rows sums the gradients of the ranks.

[Note: Rules]
A rule of a function computes this rank's rows of the result, if the function reads no other rows. It also determines the sequence
dim of the result. A rule takes (function, shard, other arguments) and returns the result. It raises `NotShardable` if the function
needs the full sequence. Rules of views are those of all sharded tensors (`tensors/sharded_views.py`).

Products are computed with matrices that every rank has, or with another sequence, which is gathered. The scores of attention are
a product of one operand's rows with all rows of the other. Queries stay this rank's rows, keys are gathered, and each rank has
its rows of the scores. The product of scores and values sums over the sequence. It gathers the values, and computes the rows of
the output. Attention that is written out needs no other communication. A product that sums over sharded rows of both operands
gathers both.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.config.errors import PlaitError, Problem
from plait.parallel.context.sequences import SequenceRows
from plait.tensors import sharded_views
from plait.tensors.sharded_tensor import is_in_place, run_elementwise
from plait.tensors.sharded_views import NotShardable, Rules
from plait.tensors.torch_private import dataclass_leaves, tree_leaves, tree_map


def apply_features(func: Callable[..., Any], x: SequenceRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply linear, layer_norm, rms_norm and view_as_complex: functions of the last dims."""
    plain = not any(isinstance(t, SequenceRows) for t in tree_leaves((args, kwargs)))
    norm = func.__name__ in ("layer_norm", "rms_norm")
    sizes = len(args[0] if args else kwargs["normalized_shape"]) if norm else 1
    if not plain or x.shard_dim >= x.dim() - sizes:
        raise NotShardable
    return x.with_local(func(x.local, *args, **kwargs))


def gather_along(func: Callable[..., Any], x: SequenceRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply gather and take_along_dim along another dim, with an index for every place."""
    dim, index = (*args, *(kwargs[name] for name in ("dim", "index", "indices") if name in kwargs))[:2]
    dim, index = (index, dim) if isinstance(dim, Tensor) else (dim, index)
    if not isinstance(dim, int) or dim % x.dim() == x.shard_dim or index.dim() != x.dim():
        raise NotShardable
    return x.with_local(torch.take_along_dim(x.local, x.match_part(index), dim))


def pad_features(func: Callable[..., Any], x: SequenceRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply F.pad to dims after the sequence dim."""
    sizes = args[0] if args else kwargs["pad"]
    if len(sizes) // 2 >= -x.dim_from_end:
        raise NotShardable
    return x.with_local(func(x.local, *args, **kwargs))


def apply_rowwise(func: Callable[..., Any], x: SequenceRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function to every row separately: embeddings, pairs of complex values, `type` (which may return the name of the type)."""
    found = func(x.local, *args, **kwargs)
    return x.with_local(found) if isinstance(found, Tensor) else found


def resize_dims(func: Callable[..., Any], x: SequenceRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply expand and repeat to other dims."""
    sizes = list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else list(args)
    expands = func.__name__ == "expand"
    if len(sizes) < (-x.dim_from_end if expands else x.dim()):
        raise NotShardable
    if sizes[x.dim_from_end] not in ((-1, x.rows.length) if expands else (1,)):
        raise NotShardable
    if expands:
        sizes[x.dim_from_end] = x.local.shape[x.dim_from_end]
    return x.with_local(func(x.local, *sizes), x.dim_from_end + len(sizes))


def mask_triangle(func: Callable[..., Any], x: SequenceRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply tril and triu to rows of scores."""
    if x.dim_from_end != -2:
        raise NotShardable
    whole = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.local.device)
    return x.with_local(x.local.masked_fill(~x.take_rows(func(whole, *args, **kwargs), 0), 0))


def apply_extreme(func: Callable[..., Any], x: SequenceRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply max and min: of two tensors element by element, or along a dim."""
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, Tensor):
        if other.dim() > x.dim():
            raise NotShardable
        return x.with_local(func(x.local, x.match_part(other)))
    return sharded_views.run_other_dims(func, x, args, kwargs)


RULES: Rules = {
    **sharded_views.DIM_RULES,
    **dict.fromkeys(("linear", "layer_norm", "rms_norm", "view_as_complex"), apply_features),
    **dict.fromkeys(("embedding", "type", "view_as_real"), apply_rowwise),
    **dict.fromkeys(("max", "min"), apply_extreme),
    **dict.fromkeys(("gather", "take_along_dim"), gather_along),
    **dict.fromkeys(("expand", "repeat"), resize_dims),
    **dict.fromkeys(("tril", "triu"), mask_triangle),
    "pad": pad_features,
    **sharded_views.VIEW_RULES,
}
"""Name of a function -> its rule."""


ELLIPSIS_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""Letters for the dims that an equation abbreviates as `...`."""


def multiply_shards(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply matmul, bmm, mm and @."""
    a, b = _list_operands(("input", "tensor1", "other", "mat2", "tensor2"), args, kwargs)
    x, mine = _align_operands(a, b)
    return x.with_local(func(*mine))


def add_product(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply baddbmm and addmm: a product plus another tensor."""
    other, a, b = _list_operands(("input", "mat1", "batch1", "mat2", "batch2"), args, kwargs)
    x, mine = _align_operands(a, b)
    factors = {name: kwargs[name] for name in ("alpha", "beta") if name in kwargs}
    if len(args) + len(kwargs) > 3 + len(factors):
        raise NotShardable
    return x.with_local(func(x.match_part(other), *mine, **factors))


def _list_operands(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """List the operands in order, positional or named."""
    return (*args, *(kwargs[name] for name in names if name in kwargs))


def _align_operands(a: object, b: object) -> tuple[SequenceRows, tuple[Tensor, Tensor]]:
    """Return (the operand whose rows the result has, both operands in the form to multiply)."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or min(a.dim(), b.dim()) < 2:
        raise NotShardable
    if isinstance(a, SequenceRows) and a.dim_from_end == -2:
        if b.dim() > a.dim():
            raise NotShardable
        return a, (a.local, b.gather_full() if isinstance(b, SequenceRows) else b)
    if isinstance(b, SequenceRows) and b.dim_from_end == -1 and not isinstance(a, SequenceRows) and a.dim() <= b.dim():
        return b, (a, b.local)
    x = a if isinstance(a, SequenceRows) else b
    if not isinstance(x, SequenceRows) or x.dim_from_end > -3 or max(a.dim(), b.dim()) > x.dim():
        raise NotShardable
    return x, (x.match_part(a), x.match_part(b))


def apply_einsum(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply einsum. The first sharded letter of the result stays sharded; other operands are gathered where a sum needs it."""
    equation, operands = args[0], args[1:]
    operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else list(operands)
    if not isinstance(equation, str) or "->" not in equation or kwargs:
        raise NotShardable
    words, result = _expand_equation(equation, operands)
    cut = {i: words[i][t.shard_dim] for i, t in enumerate(operands) if isinstance(t, SequenceRows)}
    kept = sorted((result.index(letter), i) for i, letter in cut.items() if letter in result)
    if not kept:
        raise NotShardable
    at, first = kept[0]
    x, letter = operands[first], result[at]
    if any(word.count(letter) > 1 for word in words):
        raise NotShardable
    mine = [t if t is x else _match_operand(x, t, word.find(letter)) for t, word in zip(operands, words)]
    found = func(",".join(words) + "->" + result, *(x.local if t is x else t for t in mine))
    return x.with_local(found, at)


def _match_operand(x: SequenceRows, other: Tensor, dim: int) -> Tensor:
    """Convert another operand: its rows of `dim` (its dim with the sequence of `x`, -1 if none), and all of every other dim."""
    if isinstance(other, SequenceRows):
        if other.shard_dim == dim and (other.sequence_layout, other.times) == (x.sequence_layout, x.times):
            return other.local
        other = other.gather_full()
    if dim < 0 or other.shape[dim] == 1:
        return other
    if other.shape[dim] != x.rows.length:
        raise NotShardable
    return x.take_rows(other, dim)


def _expand_equation(equation: str, operands: list[Tensor]) -> tuple[list[str], str]:
    """Return the letters of each operand and of the result, with letters in place of `...`."""
    left, result = equation.replace(" ", "").split("->")
    words = left.split(",")
    if len(words) != len(operands):
        raise NotShardable
    more = [t.dim() - len(w.replace("...", "")) for w, t in zip(words, operands)]
    letters = [c for c in ELLIPSIS_LETTERS if c not in equation][: max(more)]
    if len(letters) < max(more):
        raise NotShardable
    words = [w.replace("...", "".join(letters[len(letters) - n :])) if n else w for w, n in zip(words, more)]
    return words, result.replace("...", "".join(letters))


def join_shards(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply cat along another dim, or stack, to tensors that are all shards."""
    parts: Sequence[Tensor] = args[0] if args else kwargs["tensors"]
    stretches, more = [t for t in parts if isinstance(t, SequenceRows)], func.__name__ == "stack"
    x = stretches[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % (x.dim() + more)
    if (dim == x.shard_dim and not more) or len(stretches) < len(parts) or not all(map(x.has_same_layout, stretches)):
        raise NotShardable
    return x.with_local(func([t.local for t in stretches], dim), x.shard_dim + (more and dim <= x.shard_dim))


OPERAND_RULES: dict[str, Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "mm"), multiply_shards),
    **dict.fromkeys(("baddbmm", "addmm"), add_product),
    **dict.fromkeys(("cat", "concat", "stack"), join_shards),
    "einsum": apply_einsum,
}
"""Name of a function -> (function, arguments) -> result. Raises `NotShardable` if it needs full tensors."""


class SequenceShard(SequenceRows):
    """The rows of a sequence, with rules for torch's functions."""

    rules = RULES

    def run_on_parts(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply a function that reads no other rows, or a product."""
        if func.__name__ == "dropout":  # each rank draws random numbers for its rows
            return run_elementwise(func, args, kwargs)
        if func.__name__ in OPERAND_RULES:
            return OPERAND_RULES[func.__name__](func, args, kwargs)
        return super().run_on_parts(func, args, kwargs)

    def run_on_full(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply a function to full tensors. Inside a unit, the result is sharded again, so that later functions compute only these rows."""
        if args and args[0] is self and is_in_place(func.__name__):
            what = f"code between units writes into a sequence that is sharded over ranks: {func.__name__}"
            raise PlaitError(Problem("P040", what, why="a rank has only one shard of it", fix=("cp=1",)))
        found, given = super().run_on_full(func, args, kwargs), dataclass_leaves((args, kwargs))
        inside = [t for t in given if isinstance(t, SequenceShard) and t.wraps_region]
        if not inside:
            return found
        x, ids = max(inside, key=lambda t: t.dim()), {id(leaf) for leaf in given}
        return tree_map(lambda leaf: leaf if id(leaf) in ids else x.shard_again(leaf), found)


def gather_shard(leaf: object) -> object:
    return leaf.gather_full() if isinstance(leaf, SequenceShard) else leaf


class _PartialGradient(torch.autograd.Function):
    """A tensor whose full gradient every rank computes: each rank keeps 1/N of it as its part of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        return grads[0] / ctx.ranks, None


def to_loss_inputs(outputs: object, ranks: int) -> object:
    """Convert a model's outputs for a loss that each of `ranks` ranks computes in full."""

    def convert(leaf: object) -> object:
        if isinstance(leaf, SequenceShard):
            return leaf.sequence_layout.to_loss_input(leaf.local, leaf.shard_dim)
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            return _PartialGradient.apply(leaf, ranks)
        return leaf

    dataclass_leaves(outputs)  # registers dataclasses as trees
    return tree_map(convert, outputs)
