"""A tensor with the shape of the full tensor, of which every rank of a group holds a part.

A job's loss is written for one device: it flattens the logits, shifts them, takes a cross-entropy. With a sharded vocabulary (tensor
parallelism) or sequence (context parallelism) the model's output is a `ShardedTensor`. It has the full shape, so that the loss runs
unchanged, and the memory of the part:

views           reshape, transpose and slices track the ranges of each rank, also on the sharded dim
element-wise    each rank computes its part; a replicated operand is sliced to fit
sums and means  all-reduce if they run over the sharded dim
cross-entropy   and similar losses never gather the logits, for any sharded dim (`tensors/sharded_losses.py`)
other           gathers the full tensor and continues with a plain one, at the price of its memory

Gradients: every rank of the group computes the same loss. `backward` on every rank then gives each rank the gradient of its own part,
exactly once, without a factor of the number of ranks. A replicated tensor that is combined with a sharded one (a temperature, class
weights) gets its full gradient on every rank. All of these are collectives: every rank computes the same loss, in the same order.

A subclass with other gradients or another handling of replicated tensors overrides `gather_full`, `take_rows`, `enter_region`,
`run_on_parts` and `run_on_full` (`parallel/context/sequence_shard.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.tensors import sharded_losses, sharded_views
from plait.tensors.collectives import copy_to_region, gather_from_region, scatter_to_region
from plait.tensors.rows import Rows
from plait.tensors.sharded_views import NotShardable, Rules
from plait.tensors.torch_private import OpOverload, WrapperTensor, is_view, no_subclass_functions, tree_leaves, tree_map

PART_ATTRIBUTES = frozenset(("dtype", "device", "requires_grad", "is_leaf", "layout", "is_cuda", "is_cpu"))
"""Attributes read from the part."""
SHAPE_ATTRIBUTES = frozenset((
    "shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "is_floating_point", "is_complex", "get_device",
    "element_size", "__hash__",
))  # fmt: skip
"""Attributes and methods that need no data."""


class FullShapeTensor(WrapperTensor):
    """A wrapper with the shape of the full tensor."""

    description = ""
    """Description for errors."""
    _part: Tensor

    @classmethod
    def wrap(cls, local: Tensor, shape: list[int], **attributes: object) -> Self:
        """Create a tensor of that shape, of which this rank has `local`."""
        made = WrapperTensor.create(cls, local, shape)
        if local.requires_grad:
            with no_subclass_functions():
                made.register_hook(cls.raise_lost_gradient)
        vars(made).update(attributes, _part=local)
        return made

    @property
    def local(self) -> Tensor:  # type: ignore[override]
        """This rank's part. TypeError if autograd tracks the wrapper instead of the part, as after a user's autograd.Function."""
        if torch.is_grad_enabled() and not self._part.requires_grad:
            with no_subclass_functions():
                made_by = self.grad_fn
            if made_by is not None:
                self.raise_lost_gradient(self)
        return self._part

    @local.setter
    def local(self, part: Tensor) -> None:
        self._part = part

    @classmethod
    def raise_lost_gradient(cls, gradient: Tensor) -> None:
        """Raise TypeError for a gradient that bypassed torch's functions, through a user's torch.autograd.Function."""
        raise TypeError(f"a torch.autograd.Function was given {cls.description}")

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
        if name in PART_ATTRIBUTES:
            return func(args[0].local)
        if name in SHAPE_ATTRIBUTES:
            with no_subclass_functions():
                return func(*args, **(kwargs or {}))
        return cls.compute(func, args, kwargs or {})

    @classmethod
    def compute(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


def replace_dim(x: Tensor, dim: int, length: int) -> list[int]:
    """Return the shape of `x` with `length` in dim `dim`."""
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
"""Functions, methods and operators whose result depends, at each position, on the operands at that position only."""
PART_METHODS = frozenset({
    "is_contiguous", "is_signed", "stride", "_is_view", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor",
    "new_zeros", "register_hook", "requires_grad_", "retain_grad",
})  # fmt: skip
"""Methods called on the part."""


class ShardedTensor(FullShapeTensor):
    """A tensor of which this rank of `group` holds `local`: its `rows` of dim `cut`.

    `rules`: function name -> rule for the part.

    """

    shard_dim: int
    rows: Rows
    group: ProcessGroup
    description = "a tensor that is sharded over ranks, and its gradient is lost"
    rules: ClassVar[Rules] = sharded_losses.LOSS_RULES | sharded_views.VIEW_RULES

    @staticmethod
    def __new__(cls, local: Tensor, dim: int, rows: Rows, group: ProcessGroup) -> "ShardedTensor":
        """ValueError if the number of rows of `local` differs from this rank's."""
        if local.shape[dim] != rows.sizes[group.rank()]:
            raise ValueError(f"{tuple(local.shape)} has {local.shape[dim]} rows, not {rows.sizes[group.rank()]}")
        shape = replace_dim(local, dim % local.dim(), rows.length)
        return ShardedTensor.wrap(local, shape, shard_dim=dim % local.dim(), rows=rows, group=group)

    @classmethod
    def compute(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            return _handle_attribute(func, *args)
        if name in PART_METHODS and isinstance(args[0], ShardedTensor):
            found = func(args[0].local, *args[1:], **kwargs)
            return args[0] if found is args[0].local else found
        if name in ("to", "type_as") and not isinstance(args[0], ShardedTensor):  # dtype and device of another tensor
            args, kwargs = tree_map(lambda t: t.local if isinstance(t, ShardedTensor) else t, (args, kwargs))
            return func(*args, **kwargs)
        x = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, ShardedTensor))
        try:
            if (name if name.startswith("__") else name.rstrip("_")) in ELEMENTWISE:  # also in place
                return run_elementwise(func, args, kwargs)
            return x.run_on_parts(func, args, kwargs)
        except NotShardable:
            return x.run_on_full(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, *_: Any) -> Any:  # pyrefly: ignore[bad-override]
        """Raise TypeError for an operator called directly, which needs the full tensor."""
        raise TypeError(
            f"{func} was given a tensor that is sharded over ranks; call plait.tensors.sharded_tensor.to_full(…) on it first"
        )

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.group.rank()

    @property
    def dim_from_end(self) -> int:
        """The sharded dim, counted from the end."""
        return self.shard_dim - self.local.dim()

    def with_local(self, local: Tensor, dim: int | None = None, rows: Rows | None = None) -> "ShardedTensor":
        """Return a tensor with part `local` on this rank, sharded as this one by default."""
        return ShardedTensor(local, self.shard_dim if dim is None else dim, rows or self.rows, self.group)

    def gather_full(self) -> Tensor:
        """Return the plain full tensor, on every rank. Backward: this rank's part of the gradient."""
        return gather_from_region(self.local, self.shard_dim, self.rows, self.group)

    def take_rows(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's rows of a replicated tensor of the same length. Backward: all-gather."""
        return scatter_to_region(whole, dim, self.rows, self.group)

    def enter_region(self, whole: Tensor) -> Tensor:
        """Return a replicated operand for a computation in parts."""
        return copy_to_region(whole, self.group) if whole.requires_grad else whole

    def match_part(self, other: Tensor) -> Tensor:
        """Return the part of `other`, broadcast against this tensor, that matches this rank's part.

        NotShardable if it does not fit.

        """
        if isinstance(other, type(self)):
            if self.has_same_layout(other):
                return other.local
            other = other.gather_full()
        rows = other.shape[self.dim_from_end] if other.dim() >= -self.dim_from_end else 1
        if rows not in (1, self.rows.length):
            raise NotShardable
        return self.enter_region(other) if rows == 1 else self.take_rows(other, self.dim_from_end)

    def has_same_layout(self, other: "ShardedTensor") -> bool:
        """Return whether the other is sharded in the same dim, counted from the end, with the same rows and group."""
        return (other.dim_from_end, other.rows, other.group) == (self.dim_from_end, self.rows, self.group)

    def run_on_parts(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function on each rank's part. NotShardable if it needs the full tensor."""
        if func.__name__ not in self.rules or not args or args[0] is not self:
            raise NotShardable
        return self.rules[func.__name__](func, self, args[1:], kwargs)

    def run_on_full(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function on the full tensor on every rank; a result written in place is sharded again."""
        args_, kwargs_ = tree_map(lambda t: to_full(t) if isinstance(t, Tensor) else t, (args, kwargs))
        result = func(*args_, **kwargs_)
        if not args or args[0] is not self or not is_in_place(func.__name__):
            return result
        if is_view(self.local):
            raise RuntimeError(
                f"{func.__name__} writes into a view of a tensor that is sharded over ranks; write into a copy"
            )
        self.local = self.take_rows(args_[0], self.shard_dim)
        return None if func.__name__ == "__setitem__" else self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Spread({list(self.shape)}, dim {self.shard_dim} over {len(self.rows.ranks)} ranks, here {self.local!r})"


def to_full(x: Tensor) -> Tensor:
    """Return the plain full tensor of `x` on every rank; `x` itself if it is plain. Differentiable."""
    return x.gather_full() if isinstance(x, ShardedTensor) else x


def _handle_attribute(func: Callable[..., Any], x: ShardedTensor, *value: Any) -> Any:
    name = getattr(func, "__self__").__name__  # noqa: B009  (of the descriptor whose `__get__` or `__set__` it is)
    if name in ("T", "mT", "H", "mH"):
        return sharded_views.move_dims(func, x, (), {})
    if name in ("data", "real", "imag") and not value:
        return x.with_local(func(x.local))
    return func(x.local, *value)


def is_in_place(name: str) -> bool:
    """Return whether a function writes in place."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and f"__{name[3:]}" in ELEMENTWISE)
    return name.endswith("_")


def run_elementwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an element-wise function on the parts. The result is sharded as the first sharded operand with the most dims."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    x = max((t for t in tensors if isinstance(t, ShardedTensor)), key=lambda t: len(t.shape))
    written = is_in_place(func.__name__)
    if "out" in kwargs or (func.__name__ == "where" and len(args) < 3) or (written and args[0] is not x):
        raise NotShardable
    if any(len(t.shape) >= -x.dim_from_end and t.shape[x.dim_from_end] not in (1, x.rows.length) for t in tensors):
        raise NotShardable
    args_, kwargs_ = tree_map(lambda t: x.match_part(t) if isinstance(t, Tensor) else t, (args, kwargs))
    result = func(*args_, **kwargs_)
    return x if written else x.with_local(result, x.dim_from_end)
