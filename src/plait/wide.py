"""Float64 throughout, for `verify`: a model that casts to float32 in its own code is widened there too.

Many models compute a norm or a softmax "in float32" by an explicit cast, which in a float64 run would *narrow* the
numbers and hide differences below 1e-7. Inside this mode every request for a floating dtype is one for float64. The
reference and the candidate both run under it; training never does.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NARROW = frozenset({torch.float32, torch.bfloat16, torch.float16})
_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}


class Wide(TorchFunctionMode):
    """Replaces narrower floating dtypes by float64 in whatever torch function is called."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _CASTS:
            func, args, kwargs = Tensor.double, args[:1], {}
        args = tuple(_widened(a) for a in args)
        return func(*args, **{k: _widened(v) for k, v in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value
