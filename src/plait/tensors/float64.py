"""Float64 throughout, for `verify`: a model that casts to float32 in its own code is widened there too.

Many models compute a norm or a softmax "in float32" by an explicit cast, which in a float64 run would *narrow* the
numbers and hide differences below 1e-7. Inside this mode every request for a floating dtype is one for float64. The
reference and the candidate both run under it; training never does.
"""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.tensors.torch_private import tree_leaves, tree_map_only

RELATIVE, ABSOLUTE = 1e-9, 1e-11
"""Slices of products are summed in another order, nothing else differs."""
NARROW = frozenset({torch.float32, torch.bfloat16, torch.float16})
_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}


class Wide(TorchFunctionMode):
    """Replaces narrower floating dtypes by float64 in whatever torch function is called."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _CASTS:
            func, args, kwargs = Tensor.double, args[:1], {}
        args, kwargs = tuple(_widened(a) for a in args), {k: _widened(v) for k, v in (kwargs or {}).items()}
        try:
            return func(*args, **kwargs)
        except RuntimeError:  # a narrow tensor of the job's own, such as class weights, beside wide ones
            wide = tree_map_only(Tensor, lambda t: t.double() if t.dtype in NARROW else t, (args, kwargs))
            if all(a is b for a, b in zip(tree_leaves((args, kwargs)), tree_leaves(wide))):
                raise
        return func(*wide[0], **wide[1])


class Widest(TorchFunctionMode):
    """Widens every tensor a function is given: for sums of weights, which decide no tensor's number format."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        wide = tree_map_only(Tensor, lambda t: t.double() if t.dtype in NARROW else t, (args, kwargs or {}))
        return func(*wide[0], **wide[1])


def _widened(value: object) -> object:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


def near(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape and format and the same numbers, up to the rounding of float64."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, RELATIVE, ABSOLUTE, True))
