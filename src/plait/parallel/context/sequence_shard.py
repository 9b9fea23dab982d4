"""A sequence of which each rank holds a stretch, as the model's code between units sees it: one tensor, whole.

Units run on stretches; the code around them was written for sequences. A `SequenceShard` has the shape of the whole sequence
and the rows of this rank. What is done to every element alone is done to those rows; what only looks at its shape gets
that of the whole; anything else (the first token for a classifier, a mean over the sequence) first gathers the whole,
which is right, and is communication.

Gradients on a rank are shares of a sum over the ranks, everywhere: of parameters, and of what was whole before. So the
rows of a whole are taken without a word to the others, and gathering one sums what the ranks found.

[Note: Rules]
What functions do to a rank's rows of a sequence: all that look at no other row, and where the sequence is then.

Each rule takes (function, stretch, other arguments) and gives the result. `Elsewhere` says that this function needs the
whole. Views are those of spread tensors (`tensors/sharded_views.py`).

Products of a rank's rows of a sequence: with matrices that every rank has, and with another sequence, which is gathered.

Scores of attention are a product in which one operand's rows meet all of the other's: queries stay a rank's rows, keys are
gathered, and each rank has its rows of the scores. The scores' product with the values sums over the sequence: it needs
all values, which are gathered, and makes the rows of the output. This is all that attention written out asks of other
ranks. A product that sums over rows which both sides hold in stretches needs the whole of both, and is made of wholes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.config.errors import PlaitError, Problem
from plait.parallel.context.sequences import SequenceRows
from plait.tensors import sharded_views
from plait.tensors.sharded_tensor import elementwise, in_place
from plait.tensors.sharded_views import Elsewhere, Rules
from plait.tensors.torch_private import leaves, tree_leaves, tree_map


def features(func: Callable[..., Any], x: SequenceRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """linear, layer_norm and rms_norm, and complex numbers of pairs: of the last dims."""
    plain = not any(isinstance(t, SequenceRows) for t in tree_leaves((args, kwargs)))
    norm = func.__name__ in ("layer_norm", "rms_norm")
    sizes = len(args[0] if args else kwargs["normalized_shape"]) if norm else 1
    if not plain or x.cut >= x.dim() - sizes:
        raise Elsewhere
    return x.like(func(x.local, *args, **kwargs))


def indexed_along(func: Callable[..., Any], x: SequenceRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """gather and take_along_dim of another dim, with numbers for every place."""
    dim, index = (*args, *(kwargs[name] for name in ("dim", "index", "indices") if name in kwargs))[:2]
    dim, index = (index, dim) if isinstance(dim, Tensor) else (dim, index)
    if not isinstance(dim, int) or dim % x.dim() == x.cut or index.dim() != x.dim():
        raise Elsewhere
    return x.like(torch.take_along_dim(x.local, x.fitting(index), dim))


def padded(func: Callable[..., Any], x: SequenceRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """F.pad of dims after the sequence's."""
    sizes = args[0] if args else kwargs["pad"]
    if len(sizes) // 2 >= -x.along:
        raise Elsewhere
    return x.like(func(x.local, *args, **kwargs))


def alone(func: Callable[..., Any], x: SequenceRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every row becomes another by itself: embeddings, pairs of complex numbers, `type` (or the name of the one that it has)."""
    found = func(x.local, *args, **kwargs)
    return x.like(found) if isinstance(found, Tensor) else found


def resized(func: Callable[..., Any], x: SequenceRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """expand and repeat of other dims."""
    sizes = list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else list(args)
    expands = func.__name__ == "expand"
    if len(sizes) < (-x.along if expands else x.dim()):
        raise Elsewhere
    if sizes[x.along] not in ((-1, x.rows.length) if expands else (1,)):
        raise Elsewhere
    if expands:
        sizes[x.along] = x.local.shape[x.along]
    return x.like(func(x.local, *sizes), x.along + len(sizes))


def triangle(func: Callable[..., Any], x: SequenceRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """tril and triu of rows of scores."""
    if x.along != -2:
        raise Elsewhere
    whole = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.local.device)
    return x.like(x.local.masked_fill(~x.mine(func(whole, *args, **kwargs), 0), 0))


def extreme(func: Callable[..., Any], x: SequenceRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """max and min: of two tensors, place by place, or along a dim."""
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, Tensor):
        if other.dim() > x.dim():
            raise Elsewhere
        return x.like(func(x.local, x.fitting(other)))
    return sharded_views.others(func, x, args, kwargs)


RULES: Rules = {
    **sharded_views.OTHERS,
    **dict.fromkeys(("linear", "layer_norm", "rms_norm", "view_as_complex"), features),
    **dict.fromkeys(("embedding", "type", "view_as_real"), alone),
    **dict.fromkeys(("max", "min"), extreme),
    **dict.fromkeys(("gather", "take_along_dim"), indexed_along),
    **dict.fromkeys(("expand", "repeat"), resized),
    **dict.fromkeys(("tril", "triu"), triangle),
    "pad": padded,
    **sharded_views.RULES,
}
"""Name of a function -> its rule."""


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""For dims that an equation calls `...`."""


def multiplied(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """matmul, bmm, mm and @."""
    a, b = _operands(("input", "tensor1", "other", "mat2", "tensor2"), args, kwargs)
    x, mine = _pair(a, b)
    return x.like(func(*mine))


def added(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """baddbmm and addmm: a product, and something that is added to it."""
    other, a, b = _operands(("input", "mat1", "batch1", "mat2", "batch2"), args, kwargs)
    x, mine = _pair(a, b)
    factors = {name: kwargs[name] for name in ("alpha", "beta") if name in kwargs}
    if len(args) + len(kwargs) > 3 + len(factors):
        raise Elsewhere
    return x.like(func(x.fitting(other), *mine, **factors))


def _operands(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Operands in order, whether they have names or not."""
    return (*args, *(kwargs[name] for name in names if name in kwargs))


def _pair(a: object, b: object) -> tuple[SequenceRows, tuple[Tensor, Tensor]]:
    """(the operand whose rows the result has, both operands as they are multiplied)."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or min(a.dim(), b.dim()) < 2:
        raise Elsewhere
    if isinstance(a, SequenceRows) and a.along == -2:
        if b.dim() > a.dim():
            raise Elsewhere
        return a, (a.local, b.whole() if isinstance(b, SequenceRows) else b)
    if isinstance(b, SequenceRows) and b.along == -1 and not isinstance(a, SequenceRows) and a.dim() <= b.dim():
        return b, (a, b.local)
    x = a if isinstance(a, SequenceRows) else b
    if not isinstance(x, SequenceRows) or x.along > -3 or max(a.dim(), b.dim()) > x.dim():
        raise Elsewhere
    return x, (x.fitting(a), x.fitting(b))


def einsum(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first letter of the result that is a sequence in an operand stays in rows; other operands have all they sum over."""
    equation, operands = args[0], args[1:]
    operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else list(operands)
    if not isinstance(equation, str) or "->" not in equation or kwargs:
        raise Elsewhere
    words, result = _spelled(equation, operands)
    cut = {i: words[i][t.cut] for i, t in enumerate(operands) if isinstance(t, SequenceRows)}
    kept = sorted((result.index(letter), i) for i, letter in cut.items() if letter in result)
    if not kept:
        raise Elsewhere
    at, first = kept[0]
    x, letter = operands[first], result[at]
    if any(word.count(letter) > 1 for word in words):
        raise Elsewhere
    mine = [t if t is x else _meeting(x, t, word.find(letter)) for t, word in zip(operands, words)]
    found = func(",".join(words) + "->" + result, *(x.local if t is x else t for t in mine))
    return x.like(found, at)


def _meeting(x: SequenceRows, other: Tensor, dim: int) -> Tensor:
    """An operand beside `x`: its rows of the dim that is x's sequence in it (-1: of none), and all of every other."""
    if isinstance(other, SequenceRows):
        if other.cut == dim and (other.held, other.times) == (x.held, x.times):
            return other.local
        other = other.whole()
    if dim < 0 or other.shape[dim] == 1:
        return other
    if other.shape[dim] != x.rows.length:
        raise Elsewhere
    return x.mine(other, dim)


def _spelled(equation: str, operands: list[Tensor]) -> tuple[list[str], str]:
    """The letters of each operand and of the result, also of those that the equation calls `...`."""
    left, result = equation.replace(" ", "").split("->")
    words = left.split(",")
    if len(words) != len(operands):
        raise Elsewhere
    more = [t.dim() - len(w.replace("...", "")) for w, t in zip(words, operands)]
    letters = [c for c in LETTERS if c not in equation][: max(more)]
    if len(letters) < max(more):
        raise Elsewhere
    words = [w.replace("...", "".join(letters[len(letters) - n :])) if n else w for w, n in zip(words, more)]
    return words, result.replace("...", "".join(letters))


def joined(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """cat along another dim, or stack, of tensors that are all stretches."""
    parts: Sequence[Tensor] = args[0] if args else kwargs["tensors"]
    stretches, more = [t for t in parts if isinstance(t, SequenceRows)], func.__name__ == "stack"
    x = stretches[0]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % (x.dim() + more)
    if (dim == x.cut and not more) or len(stretches) < len(parts) or not all(map(x.alike, stretches)):
        raise Elsewhere
    return x.like(func([t.local for t in stretches], dim), x.cut + (more and dim <= x.cut))


OPERANDS: dict[str, Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "mm"), multiplied),
    **dict.fromkeys(("baddbmm", "addmm"), added),
    **dict.fromkeys(("cat", "concat", "stack"), joined),
    "einsum": einsum,
}
"""Name of a function -> (function, arguments) -> result; `Elsewhere` when it needs wholes."""


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
