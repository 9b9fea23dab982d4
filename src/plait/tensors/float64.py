"""Float64 in proofs: a model with explicit casts to float32 computes in float64 there too.

Many models compute a norm or a softmax "in float32" by an explicit cast, which in a float64 run would *narrow* the values and hide
differences below 1e-7. Inside `Float64Mode` every requested floating dtype becomes float64, and every tensor that a function returns is in
float64. The reference and the candidate both run under it; training never does.

[Note: narrow tensors inside Float64Mode]
Some tensors remain narrow: attributes of modules and constants of files, created outside, and results of torch functions that a mode does not
see (`torch.from_numpy`, `torch.FloatTensor`). Jobs also write into them: `t[i] = v`, `t.index_add_(…)`, `out=t`. A write into a float64
copy would be lost. Therefore a narrow tensor has a *shadow*: float64 memory of the same layout as its storage. Functions receive views of
the shadow, so every alias of a tensor sees a write to one of them, and gradients pass. After each call both are synchronized. Values that a
function wrote into the shadow are rounded into the storage. Values that numpy or code outside of the mode wrote into the storage are
copied into the shadow.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, cast
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.tensors.module_state import choose_dtype
from plait.tensors.torch_private import (
    has_storage,
    no_functions,
    no_modes,
    storage_key,
    tree_leaves,
    tree_map_only,
    version,
)

RTOL, ATOL = 1e-9, 1e-11
"""Tolerances for a different order of summation in slices of products."""
NARROW_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex32})
_TENSOR = cast(Any, Tensor)
_CASTS = {
    _TENSOR.float: _TENSOR.double, _TENSOR.half: _TENSOR.double, _TENSOR.bfloat16: _TENSOR.double,
    _TENSOR.cfloat: _TENSOR.cdouble, _TENSOR.chalf: _TENSOR.cdouble,
}  # fmt: skip
_LEGACY: dict[Any, Any] = {
    torch.FloatTensor: torch.DoubleTensor, torch.HalfTensor: torch.DoubleTensor, torch.BFloat16Tensor: torch.DoubleTensor,
    "torch.FloatTensor": "torch.DoubleTensor", "torch.cuda.FloatTensor": "torch.cuda.DoubleTensor",
}  # fmt: skip
"""Arguments of `Tensor.type` that are not dtypes."""
_MEMORY_FUNCTIONS = {
    _TENSOR.numpy, _TENSOR.__array__, _TENSOR.data_ptr, _TENSOR.untyped_storage, _TENSOR.storage, _TENSOR.__dlpack__, _TENSOR.set_,
    _TENSOR.resize_, _TENSOR.requires_grad_, _TENSOR.data.__set__, _TENSOR.grad.__set__, _TENSOR.requires_grad.__set__,
}  # fmt: skip
"""Functions of a tensor's memory or its place in autograd's graph; they receive narrow tensors unchanged."""
_SHARING_FUNCTIONS = {torch.as_tensor, torch.asarray, torch.frombuffer, torch.from_dlpack}
"""Functions that may return memory of other objects, such as numpy's; the tensor must keep sharing it."""
_SCALAR_TYPES = frozenset({int, float, bool, complex, slice, type(None), type(...), torch.device, torch.layout, torch.Size})
"""Types that contain no tensor and name no dtype."""
_RANDOM_FUNCTIONS = {torch.rand, torch.randn, torch.normal, torch.rand_like, torch.randn_like}
"""Random functions. A generator draws other values in another dtype, so they run in the requested dtype and the result is widened."""


def use_proof_dtype(cast: torch.dtype | None) -> AbstractContextManager[Any]:
    """Context for the job's own code: `Float64Mode` in a proof (`cast` is float64), no change in training."""
    return Float64Mode() if cast is torch.float64 else nullcontext()


def widen(t: Tensor) -> Tensor:
    """Return the tensor in float64 or complex128 if its dtype is narrower."""
    return t.to(choose_dtype(t, torch.float64)) if t.dtype in NARROW_DTYPES else t


class Float64Mode(TorchFunctionMode):
    """Replaces narrower floating dtypes by float64 in every torch function call."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _CASTS:
            func, args, kwargs = _CASTS[func], args[:1], {}
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return _call_with_copies(func, *_widen_arguments(func, args, kwargs))
        if _is_all_wide(args) and _is_all_wide(kwargs.values()):  # most calls; `tree_map` would take longer than the call
            result = func(*args, **kwargs)
            return result if _is_all_wide((result,)) else _WideCall().finish(result, func in _SHARING_FUNCTIONS)
        given = _widen_arguments(func, args, kwargs)
        if func in _MEMORY_FUNCTIONS:
            return func(*given[0], **given[1])
        call = _WideCall()
        args, kwargs = tree_map_only(Tensor, call.widen_input, given)
        return call.finish(func(*args, **kwargs), func in _SHARING_FUNCTIONS)


def _is_all_wide(values: Iterable[Any]) -> bool:
    """Return whether no value has a narrow dtype, requests one, or may contain such a value."""
    for value in values:
        kind = type(value)
        if kind in _SCALAR_TYPES:
            continue
        if isinstance(value, Tensor):
            if value.dtype in NARROW_DTYPES:
                return False
        elif kind is torch.dtype:
            if value in NARROW_DTYPES:
                return False
        elif not (kind in (list, tuple) and _is_all_wide(value)):
            return False
    return True


def _widen_arguments(func: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with requests for narrower dtypes replaced by float64."""
    if func in _RANDOM_FUNCTIONS:
        return args, kwargs
    return tuple(_widen_dtype(a) for a in args), {k: _widen_dtype(v) for k, v in kwargs.items()}


class _WideCall:
    """Narrow tensors among the arguments of one call, and their wide replacements."""

    def __init__(self):
        self.narrow = dict[int, tuple[Tensor, Tensor]]()
        """id of the replacement -> (narrow tensor, replacement)."""
        self.shadows = list[tuple[Float64Shadow, Tensor]]()
        self.copies = list[tuple[Tensor, Tensor, int]]()
        """(narrow tensor, its copy in float64, the copy's version before the call)."""

    def widen_input(self, t: Tensor) -> Tensor:
        """Return the replacement of a tensor: itself if wide, else a view of its shadow, or a copy tracked by autograd."""
        if t.dtype not in NARROW_DTYPES:
            return t
        if _is_plain_memory(t):
            shadow = Float64Shadow.get_synced(t)
            wide = shadow.view(t)
            self.shadows.append((shadow, t))
        else:
            wide = widen(t)
            self.copies.append((t, wide, version(wide)))
        self.narrow[id(wide)] = t, wide
        return wide

    def finish(self, result: object, sharing: bool) -> Any:
        """Return the call's result, with its own inputs unchanged and other tensors in float64. Writes reach their narrow targets."""
        for shadow, t in self.shadows:
            shadow.synchronize(t)
        for t, wide, before in self.copies:
            if version(wide) != before:
                t.copy_(wide)
        return tree_map_only(Tensor, lambda t: self._map_result(t, sharing), result)

    def _map_result(self, t: Tensor, sharing: bool) -> Tensor:
        if id(t) in self.narrow:
            return self.narrow[id(t)][0]
        return t if sharing else widen(t)


class Float64Shadow:
    """Float64 memory for a narrow storage. See [Note: narrow tensors inside Float64Mode]."""

    by_storage: ClassVar[dict[int, "Float64Shadow"]] = {}
    """Storage key -> shadow, while the storage is alive."""

    def __init__(self, memory: Tensor):
        key = storage_key(memory)
        self.storage = ref(memory.untyped_storage(), lambda _: Float64Shadow.by_storage.pop(key, None))
        self.last_storage = memory.clone()
        """Values of the storage at the last synchronization."""
        self.wide = memory.double()

    @staticmethod
    def get_synced(t: Tensor) -> "Float64Shadow":
        """Return the shadow of a tensor's storage, synchronized."""
        found = Float64Shadow.by_storage.get(storage_key(t))
        if found is None or found.last_storage.dtype != t.dtype.to_real():
            with hide_from_modes():
                found = Float64Shadow.by_storage[storage_key(t)] = Float64Shadow(_view_storage(t))
        else:
            found.synchronize(t)
        return found

    def synchronize(self, t: Tensor) -> None:
        """Copy changes of the storage of `t` into the shadow, then round the shadow into the storage."""
        with hide_from_modes():
            memory = _view_storage(t)
            others = _view_bits(memory) != _view_bits(self.last_storage)
            if bool(others.any()):
                self.wide[others] = memory[others].double()
            rounded = self.wide.detach().to(memory.dtype)
            if not torch.equal(_view_bits(rounded), _view_bits(memory)):
                memory.copy_(rounded)
            if not torch.equal(_view_bits(memory), _view_bits(self.last_storage)):
                self.last_storage = memory.clone()

    @staticmethod
    def flush_written(keys: set[int]) -> None:
        """Round shadows with these storage keys into their tensors, after writes from outside of `Float64Mode`."""
        for shadow in [*Float64Shadow.by_storage.values()]:
            storage = shadow.storage() if storage_key(shadow.wide) in keys else None
            if storage is not None:
                shadow.synchronize(torch.empty(0, dtype=shadow.last_storage.dtype, device=shadow.last_storage.device).set_(storage))

    def view(self, t: Tensor) -> Tensor:
        """Return the view of the shadow for a tensor of its storage."""
        wide = torch.view_as_complex(self.wide.view(-1, 2)) if t.is_complex() else self.wide
        part = wide.as_strided(t.shape, t.stride(), t.storage_offset())
        return part.conj() if t.is_conj() else part


@contextmanager
def hide_from_modes() -> Iterator[None]:
    """Context in which neither modes nor autograd see calls."""
    with no_functions(), no_modes(), torch.no_grad():
        yield


def _is_plain_memory(t: Tensor) -> bool:
    """Return whether a tensor is plain memory: no subclass, no transform of torch.func, no gradient."""
    if type(t) not in (Tensor, torch.nn.Parameter) or t.requires_grad or t.layout is not torch.strided:
        return False
    return has_storage(t) and t.device.type != "meta" and not t.is_neg() and not t.is_inference()


def _view_storage(t: Tensor) -> Tensor:
    """Return the full storage of a tensor, as real values."""
    return torch.empty(0, dtype=t.dtype.to_real(), device=t.device).set_(t.untyped_storage())


def _view_bits(t: Tensor) -> Tensor:
    return t.view(torch.int32 if t.element_size() == 4 else torch.int16)


def _call_with_copies(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call that torch.compile traces, which cannot use shadows: narrow tensors are copied if dtypes must agree."""
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        wide = tree_map_only(Tensor, widen, (args, kwargs))
        if all(a is b for a, b in zip(tree_leaves((args, kwargs)), tree_leaves(wide))):
            raise
    return func(*wide[0], **wide[1])


class WidenAllMode(TorchFunctionMode):
    """Widens every tensor argument, for sums of weights, which do not affect the dtype of any tensor."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        wide = tree_map_only(Tensor, widen, (args, kwargs or {}))
        return func(*wide[0], **wide[1])


def _widen_dtype(value: object) -> object:
    """Return a dtype, or a legacy type, in float64."""
    if isinstance(value, torch.dtype) and value in NARROW_DTYPES:
        return torch.complex128 if value.is_complex else torch.float64
    return _LEGACY.get(value, value) if isinstance(value, (str, type(torch.FloatTensor))) else value


def is_close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have equal shape and dtype and equal values, up to the rounding of float64."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    inexact = a.is_floating_point() or a.is_complex()
    return torch.equal(a, b) or (inexact and torch.allclose(a, b, RTOL, ATOL, True))
