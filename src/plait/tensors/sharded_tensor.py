"""A tensor of which every rank of a group holds a part, and which stands for the whole.

A job's loss is written for one device: it flattens the logits, shifts them, takes a cross-entropy. When tensor
parallelism computes each rank's words of the vocabulary, or context parallelism its stretches of the sequence, the
model's output is a `ShardedTensor`. It has the whole's shape, so that the loss runs unchanged, and the part's memory:

    views           reshape, transpose, slices, also of the dim that is cut, keep track of who holds what
    element-wise    each rank computes its part; a whole operand is cut to fit
    sums and means  are made over the ranks where they run over the cut dim
    cross-entropy   and its kin never gather the logits, whichever dim is cut (`tensors/sharded_losses.py`)
    anything else   gathers the whole and goes on with a plain tensor: right, at the price of the whole's memory

Gradients: every rank of the group computes the loss, and it is the same number on each. `backward` on every rank then
gives each rank the gradient of its own part, exactly once, with no factor of the number of ranks; and a whole tensor
that met a sharded one on the way (a temperature, class weights) its whole gradient on every rank. All of these are
collectives: every rank computes the same loss, in the same order.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.tensors import sharded_losses, sharded_views
from plait.tensors.collectives import enter, gather, part, total
from plait.tensors.rows import Rows
from plait.tensors.torch_private import FakeTensor, OpOverload, WrapperTensor, is_view, tree_leaves, tree_map

ELEMENTWISE = frozenset({
    "abs", "add", "addcdiv", "addcmul", "angle", "atan", "atan2", "bfloat16", "bitwise_and", "bitwise_not", "bitwise_or",
    "bitwise_xor", "bool", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clip", "clone", "complex", "conj", "contiguous",
    "copy", "cos", "cosh", "cpu", "cuda", "deg2rad", "detach", "div", "divide", "double", "elu", "empty_like",
    "eq", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "fill", "float", "float_power", "floor",
    "floor_divide", "fmax", "fmin", "fmod", "frac", "full_like", "ge", "gelu", "greater", "greater_equal", "gt",
    "half", "hardsigmoid", "hardswish", "hardtanh", "heaviside", "hypot", "int", "isfinite", "isinf", "isnan",
    "ldexp", "le", "leaky_relu", "lerp", "less", "less_equal", "lgamma", "log", "log10", "log1p", "log2",
    "logaddexp", "logaddexp2", "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "logsigmoid",
    "long", "lt", "masked_fill", "maximum", "minimum", "mish", "mul", "multiply", "nan_to_num", "ne", "neg",
    "negative", "not_equal", "ones_like", "polar", "positive", "pow", "rad2deg", "reciprocal", "relu", "relu6",
    "remainder", "round", "rsqrt", "rsub", "selu", "sgn", "sigmoid", "sign", "signbit", "silu", "sin", "sinh",
    "softplus", "softshrink", "softsign", "sqrt", "square", "sub", "subtract", "tan", "tanh", "tanhshrink",
    "threshold", "to", "true_divide", "trunc", "type_as", "where", "xlogy", "zero", "zeros_like", "__abs__",
    "__add__", "__and__", "__div__", "__eq__", "__floordiv__", "__ge__", "__gt__", "__iadd__", "__iand__",
    "__idiv__", "__ifloordiv__", "__imod__", "__imul__", "__invert__", "__ior__", "__ipow__", "__isub__",
    "__itruediv__", "__ixor__", "__le__", "__lt__", "__mod__", "__mul__", "__ne__", "__neg__", "__or__",
    "__pos__", "__pow__", "__radd__", "__rand__", "__rdiv__", "__rfloordiv__", "__rmod__", "__rmul__", "__ror__",
    "__rpow__", "__rsub__", "__rtruediv__", "__rxor__", "__sub__", "__truediv__", "__xor__",
})  # fmt: skip
"""Functions, methods and operators whose result has, at every place, to do with its operands at that place only."""
OF_THE_PART = frozenset({
    "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_signed",
    "_is_view", "ndimension", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "register_hook",
    "requires_grad_", "retain_grad",
})  # fmt: skip
"""Methods that the part answers for the whole."""


class ShardedTensor(Tensor):
    """Stands for the whole of which this rank of `group` holds `local`: its `rows` of dim `cut`."""

    local: Tensor
    cut: int
    rows: Rows
    group: ProcessGroup

    @staticmethod
    def __new__(cls, local: Tensor, dim: int, rows: Rows, group: ProcessGroup) -> "ShardedTensor":
        """ValueError when `local` has not this rank's number of rows."""
        dim %= local.dim()
        if local.shape[dim] != rows.sizes[group.rank()]:
            raise ValueError(f"{tuple(local.shape)} has {local.shape[dim]} rows, not {rows.sizes[group.rank()]}")
        shape = (*local.shape[:dim], rows.length, *local.shape[dim + 1 :])
        if isinstance(local, FakeTensor):  # it cannot become another class
            hollow = WrapperTensor.made(cls, local, list(shape))
        else:
            base = local.detach().new_empty(())
            if local.requires_grad:
                base.requires_grad_().register_hook(_lost)
            hollow = base.expand(shape).as_subclass(cls)
        hollow.local, hollow.cut, hollow.rows, hollow.group = local, dim, rows, group
        return hollow

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.__name__
        x = args[0] if args and isinstance(args[0], ShardedTensor) else None
        if name in ("__get__", "__set__"):
            return _attribute(func, *args)
        if name in OF_THE_PART and x is not None:
            return func(x.local, *args[1:], **kwargs)
        result = NotImplemented
        if (name if name.startswith("__") else name.rstrip("_")) in ELEMENTWISE:  # in place or not
            result = _elementwise(func, args, kwargs)
        elif x is not None:
            rule = RULES.get(name)
            result = rule(func, x, args[1:], kwargs) if rule is not None else NotImplemented
        return _whole(func, args, kwargs) if result is NotImplemented else result

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, *_: Any) -> Any:  # pyrefly: ignore[bad-override]
        """What an operator does that was called past torch's functions: only the whole can answer."""
        raise TypeError(
            f"{func} was given a tensor that is spread over ranks; call plait.tensors.sharded_tensor.whole(…) on it first"
        )

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.group.rank()

    def like(self, local: Tensor, dim: int | None = None, rows: Rows | None = None) -> "ShardedTensor":
        """Another tensor whose part on this rank is `local`, cut as this one unless said otherwise."""
        return ShardedTensor(local, self.cut if dim is None else dim, rows or self.rows, self.group)

    def whole(self) -> Tensor:
        """The plain tensor, on every rank. Backward: this rank's part of the gradient."""
        return gather(self.local, self.cut, self.rows, self.group)

    def fitting(self, other: Tensor) -> Tensor:
        """The part of `other`, which is broadcast against this tensor, that goes with this rank's part."""
        back = self.cut - len(self.shape)
        if isinstance(other, ShardedTensor):
            if other.cut - len(other.shape) == back and other.rows == self.rows and other.group is self.group:
                return other.local
            other = other.whole()
        if other.dim() >= -back and other.shape[back] == self.rows.length != 1:
            return part(other, back, self.rows, self.group)
        return enter(other, self.group) if other.requires_grad else other

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Spread({list(self.shape)}, dim {self.cut} over {len(self.rows.ranks)} ranks, here {self.local!r})"


def whole(x: Tensor) -> Tensor:
    """The plain tensor that `x` stands for, on every rank; `x` itself when it is plain. Can be differentiated."""
    return x.whole() if isinstance(x, ShardedTensor) else x


def _lost(gradient: Tensor) -> None:
    """A gradient came by a way that no function of torch's saw: through a torch.autograd.Function of the job's own."""
    raise TypeError("a torch.autograd.Function was given a tensor that is spread over ranks, and its gradient is lost")


def _attribute(func: Callable[..., Any], x: ShardedTensor, *value: Any) -> Any:
    name = getattr(func, "__self__").__name__  # noqa: B009  (of the descriptor whose `__get__` or `__set__` it is)
    if name == "shape":
        return torch.Size((*x.local.shape[: x.cut], x.rows.length, *x.local.shape[x.cut + 1 :]))
    if name in ("T", "mT", "H", "mH") and not x.local.is_complex():
        return sharded_views.moved(func, x, (), {})
    if name == "data" and not value:
        return x.like(x.local.data)
    return func(x.local, *value)


def _in_place(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and f"__{name[3:]}" in ELEMENTWISE)
    return name.endswith("_")


def _elementwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An element-wise function on the parts; the result is cut as the first sharded operand with the most dims."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    x = max((t for t in tensors if isinstance(t, ShardedTensor)), key=lambda t: len(t.shape))
    back = x.cut - len(x.shape)
    if "out" in kwargs or (func.__name__ == "where" and len(args) < 3):
        return NotImplemented
    if any(len(t.shape) >= -back and t.shape[back] not in (1, x.rows.length) for t in tensors):
        return NotImplemented
    if _in_place(func.__name__) and args[0] is not x:
        return NotImplemented
    args_, kwargs_ = tree_map(lambda t: x.fitting(t) if isinstance(t, Tensor) else t, (args, kwargs))
    result = func(*args_, **kwargs_)
    return args[0] if _in_place(func.__name__) else x.like(result, back)


def _whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any other function, on the whole; a tensor written in place is cut again."""
    args_, kwargs_ = tree_map(lambda t: whole(t) if isinstance(t, Tensor) else t, (args, kwargs))
    result = func(*args_, **kwargs_)
    x = args[0] if args and isinstance(args[0], ShardedTensor) else None
    if x is None or not _in_place(func.__name__):
        return result
    if is_view(x.local):
        raise RuntimeError(
            f"{func.__name__} writes into a view of a tensor that is spread over ranks; write into a copy"
        )
    x.local = part(args_[0], x.cut, x.rows, x.group)
    return None if func.__name__ == "__setitem__" else x


def _named(names: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with torch's own names for numpy's axis and keepdims."""
    words = {"axis": "dim", "keepdims": "keepdim"}
    return dict(zip(names.split(), args)) | {words.get(k, k): v for k, v in kwargs.items()}


def _sum(func: Callable[..., Any], x: ShardedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = _named("dim keepdim dtype", args, kwargs)
    if isinstance(named.get("dim"), torch.dtype) or not set(named) <= {"dim", "keepdim", "dtype"}:
        return NotImplemented
    ndim = len(x.shape)
    dims = named.get("dim")
    dims = range(ndim) if dims is None or dims == () else [dims] if isinstance(dims, int) else dims
    dims = sorted(d % ndim for d in dims)
    keep, dtype = named.get("keepdim", False), named.get("dtype")
    if x.cut not in dims:
        return x.like(func(x.local, dims, keep, dtype=dtype), x.cut - (0 if keep else sum(d < x.cut for d in dims)))
    local = x.local if dtype is None else x.local.to(dtype)
    kind = None if dtype is None and not local.is_floating_point() else local.dtype
    wide = torch.float32 if local.dtype in (torch.float16, torch.bfloat16) else None
    result = total(local.sum(dims, keep, dtype=wide), x.group)
    if func.__name__ == "mean":
        result = result / math.prod(x.shape[d] for d in dims)
    return result if kind is None else result.to(kind)


def _logsumexp(x: ShardedTensor, keep: bool) -> Tensor:
    local = sharded_losses.widened(x.local)
    most = sharded_losses.most(local, x.cut, x.group)
    return (total((local - most).exp().sum(x.cut, True), x.group).log() + most).sum(x.cut, keep)


def _softmax(func: Callable[..., Any], x: ShardedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """softmax, log_softmax and logsumexp."""
    dim = args[0] if args else kwargs.get("dim")
    if not isinstance(dim, int) or dim % len(x.shape) != x.cut:
        return _within(func, x, args, kwargs)
    if func.__name__ == "logsumexp":
        keep = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
        return _logsumexp(x, keep).to(x.local.dtype)
    dtype = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype)), x.local.dtype)
    x = x.like(x.local.to(dtype))
    result = sharded_losses.widened(x.local) - enter(_logsumexp(x, True), x.group)
    return x.like((result.exp() if func.__name__ == "softmax" else result).to(dtype))


def _within(func: Callable[..., Any], x: ShardedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions along one dim that is not cut."""
    dim = _named("dim", args, kwargs).get("dim")
    if not isinstance(dim, int) or isinstance(dim, bool) or dim % len(x.shape) == x.cut:
        return NotImplemented
    fewer = lambda t: len(t.shape) < len(x.shape) and dim % len(x.shape) < x.cut  # noqa: E731
    return tree_map(lambda t: x.like(t, x.cut - fewer(t)), func(x.local, *args, **kwargs))


def _size(func: Callable[..., Any], x: ShardedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func.__name__ == "size":
        dim = args[0] if args else kwargs.get("dim")
        return x.shape if dim is None else x.shape[dim]
    return x.shape[0] if func.__name__ == "__len__" else x.shape.numel()


WITHIN = (
    "all", "amax", "amin", "any", "argmax", "argmin", "argsort", "cumsum", "max", "min", "prod", "sort", "std", "var",
)  # fmt: skip
RULES = {
    **dict.fromkeys(("__len__", "nelement", "numel", "size"), _size),
    **dict.fromkeys(("sum", "mean"), _sum),
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp"), _softmax),
    **dict.fromkeys(WITHIN, _within),
    **sharded_views.RULES,
    **sharded_losses.RULES,
}
"""Name of a function -> (function, sharded tensor, other arguments) -> result, or NotImplemented."""
