"""Products of a rank's rows of a sequence: with matrices that every rank has, and with another sequence, which is gathered.

Scores of attention are a product in which one operand's rows meet all of the other's: queries stay a rank's rows, keys are
gathered, and each rank has its rows of the scores. The scores' product with the values sums over the sequence: it needs
all values, which are gathered, and makes the rows of the output. This is all that attention written out asks of other
ranks. A product that sums over rows which both sides hold in stretches needs the whole of both, and is made of wholes.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from plait.parallel.context.sequence_rules import Elsewhere

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""For dims that an equation calls `...`."""


def multiplied(func: Any, kind: Any, args: Any, kwargs: Any) -> Any:
    """matmul, bmm, mm and @."""
    a, b = _operands(("input", "tensor1", "other", "mat2", "tensor2"), args, kwargs)
    x, mine = _pair(kind, a, b)
    return x.like(func(*mine))


def added(func: Any, kind: Any, args: Any, kwargs: Any) -> Any:
    """baddbmm and addmm: a product, and something that is added to it."""
    other, a, b = _operands(("input", "mat1", "batch1", "mat2", "batch2"), args, kwargs)
    x, mine = _pair(kind, a, b)
    factors = {name: kwargs[name] for name in ("alpha", "beta") if name in kwargs}
    if len(args) + len(kwargs) > 3 + len(factors):
        raise Elsewhere
    return x.like(func(x.rows_of(other), *mine, **factors))


def _operands(names: tuple[str, ...], args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Operands in order, whether they have names or not."""
    return (*args, *(kwargs[name] for name in names if name in kwargs))


def _pair(kind: Any, a: Any, b: Any) -> tuple[Any, tuple[Tensor, Tensor]]:
    """(the operand whose rows the result has, both operands as they are multiplied)."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or min(a.dim(), b.dim()) < 2:
        raise Elsewhere
    if isinstance(a, kind) and a.along == -2:
        if b.dim() > a.dim():
            raise Elsewhere
        return a, (a.local, b.whole() if isinstance(b, kind) else b)
    if isinstance(b, kind) and b.along == -1 and not isinstance(a, kind) and a.dim() <= b.dim():
        return b, (a, b.local)
    x: Any = a if isinstance(a, kind) else b
    if x.along > -3 or max(a.dim(), b.dim()) > x.dim():
        raise Elsewhere
    return x, (x.rows_of(a), x.rows_of(b))


def einsum(func: Any, kind: Any, args: Any, kwargs: Any) -> Any:
    """The first letter of the result that is a sequence in an operand stays in rows; other operands have all they sum over."""
    equation, operands = args[0], args[1:]
    operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else list(operands)
    if not isinstance(equation, str) or "->" not in equation or kwargs:
        raise Elsewhere
    words, result = _spelled(equation, operands)
    cut = {i: words[i][t.cut] for i, t in enumerate(operands) if isinstance(t, kind)}
    kept = sorted((result.index(letter), i) for i, letter in cut.items() if letter in result)
    if not kept:
        raise Elsewhere
    at, first = kept[0]
    x, letter = operands[first], result[at]
    if any(word.count(letter) > 1 for word in words):
        raise Elsewhere
    mine = [t if t is x else _meeting(x, kind, t, word.find(letter)) for t, word in zip(operands, words)]
    found = func(",".join(words) + "->" + result, *(x.local if t is x else t for t in mine))
    return x.like(found, at)


def _meeting(x: Any, kind: Any, other: Tensor, dim: int) -> Tensor:
    """An operand beside `x`: its rows of the dim that is x's sequence in it (-1: of none), and all of every other."""
    if isinstance(other, kind) and other.cut == dim and (other.held, other.times) == (x.held, x.times):
        return other.local
    other = other.whole() if isinstance(other, kind) else other
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


PRODUCTS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    **dict.fromkeys(("matmul", "__matmul__", "bmm", "mm"), multiplied),
    **dict.fromkeys(("baddbmm", "addmm"), added),
    "einsum": einsum,
}
"""Name of a function -> (function, class of stretches, arguments) -> result; `Elsewhere` when it needs wholes."""
