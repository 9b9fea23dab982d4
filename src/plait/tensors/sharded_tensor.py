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

Where gradients are something else, or wholes are dealt with differently, a class of its own says so, in the methods
`whole`, `mine`, `entered`, `on_parts` and `on_wholes` (`parallel/context/sequence_shard.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.tensors import sharded_losses, sharded_views
from plait.tensors.collectives import enter, gather, part
from plait.tensors.rows import Rows
from plait.tensors.sharded_views import Elsewhere, Rules
from plait.tensors.torch_private import OpOverload, WrapperTensor, is_view, plainly, tree_leaves, tree_map

FORMAT = frozenset(("dtype", "device", "requires_grad", "is_leaf", "layout", "is_cuda", "is_cpu"))
"""Attributes that the part answers for the whole."""
SHAPE = frozenset((
    "shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "is_floating_point", "is_complex", "get_device",
    "element_size", "__hash__",
))  # fmt: skip
"""Attributes and methods that need no numbers."""


class Shaped(WrapperTensor):
    """Something with the shape of the whole."""

    described = ""
    """What an error calls it."""
    _part: Tensor

    @classmethod
    def around(cls, local: Tensor, shape: list[int], **attributes: object) -> Self:
        """What has that shape, of which this rank has `local`."""
        made = WrapperTensor.made(cls, local, shape)
        if local.requires_grad:
            with plainly():
                made.register_hook(cls.lost)
        vars(made).update(attributes, _part=local)
        return made

    @property
    def local(self) -> Tensor:  # type: ignore[override]
        """This rank's part. TypeError where autograd follows this tensor and not the part, as what a Function of the user's own returned."""
        if torch.is_grad_enabled() and not self._part.requires_grad:
            with plainly():
                made_by = self.grad_fn
            if made_by is not None:
                self.lost(self)
        return self._part

    @local.setter
    def local(self, part: Tensor) -> None:
        self._part = part

    @classmethod
    def lost(cls, gradient: Tensor) -> None:
        """A gradient came by a way that no function of torch's saw: through a torch.autograd.Function of the user's own."""
        raise TypeError(f"a torch.autograd.Function was given {cls.described}")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        if name in FORMAT:
            return func(args[0].local)
        if name in SHAPE:
            with plainly():
                return func(*args, **(kwargs or {}))
        return cls.computed(func, args, kwargs or {})

    @classmethod
    def computed(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


def lengthened(x: Tensor, dim: int, length: int) -> list[int]:
    """The shape of `x` with a dim of that length."""
    return [length if d == dim else n for d, n in enumerate(x.shape)]


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
    "is_contiguous", "is_signed", "stride", "_is_view", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor",
    "new_zeros", "register_hook", "requires_grad_", "retain_grad",
})  # fmt: skip
"""Methods that the part answers for the whole."""


class ShardedTensor(Shaped):
    """Stands for the whole of which this rank of `group` holds `local`: its `rows` of dim `cut`.

    `rules`: by the name of a function, what is done to the part.
    """

    cut: int
    rows: Rows
    group: ProcessGroup
    described = "a tensor that is spread over ranks, and its gradient is lost"
    rules: ClassVar[Rules] = sharded_losses.RULES | sharded_views.RULES

    @staticmethod
    def __new__(cls, local: Tensor, dim: int, rows: Rows, group: ProcessGroup) -> "ShardedTensor":
        """ValueError when `local` has not this rank's number of rows."""
        if local.shape[dim] != rows.sizes[group.rank()]:
            raise ValueError(f"{tuple(local.shape)} has {local.shape[dim]} rows, not {rows.sizes[group.rank()]}")
        shape = lengthened(local, dim % local.dim(), rows.length)
        return ShardedTensor.around(local, shape, cut=dim % local.dim(), rows=rows, group=group)

    @classmethod
    def computed(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            return _attribute(func, *args)
        if name in OF_THE_PART and isinstance(args[0], ShardedTensor):
            found = func(args[0].local, *args[1:], **kwargs)
            return args[0] if found is args[0].local else found
        if name in ("to", "type_as") and not isinstance(args[0], ShardedTensor):  # the format and the device of another
            args, kwargs = tree_map(lambda t: t.local if isinstance(t, ShardedTensor) else t, (args, kwargs))
            return func(*args, **kwargs)
        x = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, ShardedTensor))
        try:
            if (name if name.startswith("__") else name.rstrip("_")) in ELEMENTWISE:  # in place or not
                return elementwise(func, args, kwargs)
            return x.on_parts(func, args, kwargs)
        except Elsewhere:
            return x.on_wholes(func, args, kwargs)

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

    @property
    def along(self) -> int:
        """The cut dim, counted from the end."""
        return self.cut - self.local.dim()

    def like(self, local: Tensor, dim: int | None = None, rows: Rows | None = None) -> "ShardedTensor":
        """Another tensor whose part on this rank is `local`, cut as this one unless said otherwise."""
        return ShardedTensor(local, self.cut if dim is None else dim, rows or self.rows, self.group)

    def whole(self) -> Tensor:
        """The plain tensor, on every rank. Backward: this rank's part of the gradient."""
        return gather(self.local, self.cut, self.rows, self.group)

    def mine(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's rows of a whole as long as this one. Backward: the parts of all ranks together."""
        return part(whole, dim, self.rows, self.group)

    def entered(self, whole: Tensor) -> Tensor:
        """A whole operand of what is computed in parts."""
        return enter(whole, self.group) if whole.requires_grad else whole

    def fitting(self, other: Tensor) -> Tensor:
        """The part of `other`, which is broadcast against this tensor, that goes with this rank's part.

        Elsewhere when it does not fit.
        """
        if isinstance(other, type(self)):
            if self.alike(other):
                return other.local
            other = other.whole()
        rows = other.shape[self.along] if other.dim() >= -self.along else 1
        if rows not in (1, self.rows.length):
            raise Elsewhere
        return self.entered(other) if rows == 1 else self.mine(other, self.along)

    def alike(self, other: "ShardedTensor") -> bool:
        """Whether another is cut in the same dim, counted from the end, and in the same way."""
        return (other.along, other.rows, other.group) == (self.along, self.rows, self.group)

    def on_parts(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What each rank computes of its part. Elsewhere when the whole is needed."""
        if func.__name__ not in self.rules or not args or args[0] is not self:
            raise Elsewhere
        return self.rules[func.__name__](func, self, args[1:], kwargs)

    def on_wholes(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What every rank computes of the whole; what is written in place is cut again."""
        args_, kwargs_ = tree_map(lambda t: whole(t) if isinstance(t, Tensor) else t, (args, kwargs))
        result = func(*args_, **kwargs_)
        if not args or args[0] is not self or not in_place(func.__name__):
            return result
        if is_view(self.local):
            raise RuntimeError(
                f"{func.__name__} writes into a view of a tensor that is spread over ranks; write into a copy"
            )
        self.local = self.mine(args_[0], self.cut)
        return None if func.__name__ == "__setitem__" else self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Spread({list(self.shape)}, dim {self.cut} over {len(self.rows.ranks)} ranks, here {self.local!r})"


def whole(x: Tensor) -> Tensor:
    """The plain tensor that `x` stands for, on every rank; `x` itself when it is plain. Can be differentiated."""
    return x.whole() if isinstance(x, ShardedTensor) else x


def _attribute(func: Callable[..., Any], x: ShardedTensor, *value: Any) -> Any:
    name = getattr(func, "__self__").__name__  # noqa: B009  (of the descriptor whose `__get__` or `__set__` it is)
    if name in ("T", "mT", "H", "mH"):
        return sharded_views.moved(func, x, (), {})
    if name in ("data", "real", "imag") and not value:
        return x.like(func(x.local))
    return func(x.local, *value)


def in_place(name: str) -> bool:
    """Whether a function writes."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and f"__{name[3:]}" in ELEMENTWISE)
    return name.endswith("_")


def elementwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An element-wise function on the parts; the result is cut as the first sharded operand with the most dims."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    x = max((t for t in tensors if isinstance(t, ShardedTensor)), key=lambda t: len(t.shape))
    written = in_place(func.__name__)
    if "out" in kwargs or (func.__name__ == "where" and len(args) < 3) or (written and args[0] is not x):
        raise Elsewhere
    if any(len(t.shape) >= -x.along and t.shape[x.along] not in (1, x.rows.length) for t in tensors):
        raise Elsewhere
    args_, kwargs_ = tree_map(lambda t: x.fitting(t) if isinstance(t, Tensor) else t, (args, kwargs))
    result = func(*args_, **kwargs_)
    return x if written else x.like(result, x.along)
