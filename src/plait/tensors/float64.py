"""Float64 throughout, for `verify`: a model that casts to float32 in its own code computes in float64 there too.

Many models compute a norm or a softmax "in float32" by an explicit cast, which in a float64 run would *narrow* the
values and hide differences below 1e-7. Inside `Wide` every request for a floating dtype is one for float64, and every
tensor that a function returns is in float64. The reference and the candidate both run under it; training never does.

[Note: narrow tensors inside Wide]
Some tensors are narrow nevertheless: attributes of modules and constants of files, which were made outside, and what
torch makes without a call that a mode sees (`torch.from_numpy`, `torch.FloatTensor`). Jobs also write into them:
`t[i] = v`, `t.index_add_(…)`, `out=t`. If a function were given a copy in float64, the write would be lost. Therefore a
narrow tensor has a *shadow*: float64 memory of the same layout as its storage. Functions are given views of the
shadow, so that every alias of a tensor sees what is written into one of them, and gradients pass. After each call the
two are synchronized: what a function wrote into the shadow is rounded into the storage, and what numpy or code outside
of the mode wrote into the storage is copied into the shadow.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, cast
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.tensors.modules import format_in
from plait.tensors.torch_private import (
    has_storage,
    no_functions,
    no_modes,
    storage_key,
    tree_leaves,
    tree_map_only,
    version,
)

RELATIVE, ABSOLUTE = 1e-9, 1e-11
"""Slices of products are summed in another order, nothing else differs."""
NARROW = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex32})
_TENSOR = cast(Any, Tensor)
_CASTS = {
    _TENSOR.float: _TENSOR.double, _TENSOR.half: _TENSOR.double, _TENSOR.bfloat16: _TENSOR.double,
    _TENSOR.cfloat: _TENSOR.cdouble, _TENSOR.chalf: _TENSOR.cdouble,
}  # fmt: skip
_LEGACY: dict[Any, Any] = {
    torch.FloatTensor: torch.DoubleTensor, torch.HalfTensor: torch.DoubleTensor, torch.BFloat16Tensor: torch.DoubleTensor,
    "torch.FloatTensor": "torch.DoubleTensor", "torch.cuda.FloatTensor": "torch.cuda.DoubleTensor",
}  # fmt: skip
"""What `Tensor.type` is given besides dtypes."""
_OF_MEMORY = {
    _TENSOR.numpy, _TENSOR.__array__, _TENSOR.data_ptr, _TENSOR.untyped_storage, _TENSOR.storage, _TENSOR.__dlpack__, _TENSOR.set_,
    _TENSOR.resize_, _TENSOR.requires_grad_, _TENSOR.data.__set__, _TENSOR.grad.__set__, _TENSOR.requires_grad.__set__,
}  # fmt: skip
"""What is about a tensor's own memory or its place in autograd's graph: it is given narrow tensors as they are."""
_SHARING = {torch.as_tensor, torch.asarray, torch.frombuffer, torch.from_dlpack}
"""They may return memory of others, such as numpy's: the tensor must go on sharing it."""
_NUMBERS = frozenset({int, float, bool, complex, slice, type(None), type(...), torch.device, torch.layout, torch.Size})
"""Types that contain no tensor and name no format."""
_DRAWING = {torch.rand, torch.randn, torch.normal, torch.rand_like, torch.randn_like}
"""In another format a generator draws other values: they are drawn in the format that is asked for, and then widened."""


def proof_format(cast: torch.dtype | None) -> AbstractContextManager[Any]:
    """The context in which the job's own code computes: `Wide` in a proof (`cast` is float64), no change in training."""
    return Wide() if cast is torch.float64 else nullcontext()


def widened(t: Tensor) -> Tensor:
    """The tensor in float64, or complex128, if its format is narrower."""
    return t.to(format_in(t, torch.float64)) if t.dtype in NARROW else t


class Wide(TorchFunctionMode):
    """Replaces narrower floating formats by float64 in every torch function that is called."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _CASTS:
            func, args, kwargs = _CASTS[func], args[:1], {}
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return _copied(func, *_asked_for(func, args, kwargs))
        if _all_wide(args) and _all_wide(kwargs.values()):  # most calls: `tree_map` would take longer than they do
            result = func(*args, **kwargs)
            return result if _all_wide((result,)) else _Call().returned(result, func in _SHARING)
        given = _asked_for(func, args, kwargs)
        if func in _OF_MEMORY:
            return func(*given[0], **given[1])
        call = _Call()
        args, kwargs = tree_map_only(Tensor, call.given, given)
        return call.returned(func(*args, **kwargs), func in _SHARING)


def _all_wide(values: Iterable[Any]) -> bool:
    """Whether no value is of a narrow format, asks for one, or may contain one that does."""
    for value in values:
        kind = type(value)
        if kind in _NUMBERS:
            continue
        if isinstance(value, Tensor):
            if value.dtype in NARROW:
                return False
        elif kind is torch.dtype:
            if value in NARROW:
                return False
        elif not (kind in (list, tuple) and _all_wide(value)):
            return False
    return True


def _asked_for(func: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, which asks for float64 where it asked for less."""
    if func in _DRAWING:
        return args, kwargs
    return tuple(_widened(a) for a in args), {k: _widened(v) for k, v in kwargs.items()}


class _Call:
    """The narrow tensors that one call of a function is given, and what it is given in their place."""

    def __init__(self):
        self.narrow = dict[int, tuple[Tensor, Tensor]]()
        """By the id of the tensor in its place: the narrow one, and that one."""
        self.shadows = list[tuple[Shadow, Tensor]]()
        self.copies = list[tuple[Tensor, Tensor, int]]()
        """(narrow tensor, its copy in float64, the copy's version before the call)."""

    def given(self, t: Tensor) -> Tensor:
        """What stands for a tensor: itself if it is wide, else a view of its shadow, or a copy that autograd knows of."""
        if t.dtype not in NARROW:
            return t
        if _plain(t):
            shadow = Shadow.of(t)
            wide = shadow.view(t)
            self.shadows.append((shadow, t))
        else:
            wide = widened(t)
            self.copies.append((t, wide, version(wide)))
        self.narrow[id(wide)] = t, wide
        return wide

    def returned(self, result: object, sharing: bool) -> Any:
        """What the call returns: tensors that it was given, others in float64. What it wrote reaches its targets."""
        for shadow, t in self.shadows:
            shadow.synchronize(t)
        for t, wide, before in self.copies:
            if version(wide) != before:
                t.copy_(wide)
        return tree_map_only(Tensor, lambda t: self._returned(t, sharing), result)

    def _returned(self, t: Tensor, sharing: bool) -> Tensor:
        if id(t) in self.narrow:
            return self.narrow[id(t)][0]
        return t if sharing else widened(t)


class Shadow:
    """The float64 memory that stands for a narrow storage. See [Note: narrow tensors inside Wide]."""

    known: ClassVar[dict[int, "Shadow"]] = {}
    """By the number of the storage, while it lives."""

    def __init__(self, memory: Tensor):
        key = storage_key(memory)
        self.storage = ref(memory.untyped_storage(), lambda _: Shadow.known.pop(key, None))
        self.seen = memory.clone()
        """The storage as it was when the two were synchronized."""
        self.wide = memory.double()

    @staticmethod
    def of(t: Tensor) -> "Shadow":
        """The shadow of a tensor's storage, synchronized."""
        found = Shadow.known.get(storage_key(t))
        if found is None or found.seen.dtype != t.dtype.to_real():
            with unseen():
                found = Shadow.known[storage_key(t)] = Shadow(_memory(t))
        else:
            found.synchronize(t)
        return found

    def synchronize(self, t: Tensor) -> None:
        """Copy into the shadow what others wrote into the storage of `t`, then round into the storage what is in the shadow."""
        with unseen():
            memory = _memory(t)
            others = _bits(memory) != _bits(self.seen)
            if bool(others.any()):
                self.wide[others] = memory[others].double()
            rounded = self.wide.detach().to(memory.dtype)
            if not torch.equal(_bits(rounded), _bits(memory)):
                memory.copy_(rounded)
            if not torch.equal(_bits(memory), _bits(self.seen)):
                self.seen = memory.clone()

    @staticmethod
    def written(keys: set[int]) -> None:
        """The shadows with these storages were written from outside of `Wide`: round what is in them into the tensors they stand for."""
        for shadow in [*Shadow.known.values()]:
            storage = shadow.storage() if storage_key(shadow.wide) in keys else None
            if storage is not None:
                shadow.synchronize(torch.empty(0, dtype=shadow.seen.dtype, device=shadow.seen.device).set_(storage))

    def view(self, t: Tensor) -> Tensor:
        """The part of the shadow that stands for a tensor of its storage."""
        wide = torch.view_as_complex(self.wide.view(-1, 2)) if t.is_complex() else self.wide
        part = wide.as_strided(t.shape, t.stride(), t.storage_offset())
        return part.conj() if t.is_conj() else part


@contextmanager
def unseen() -> Iterator[None]:
    """A context in which neither modes nor autograd see what is called."""
    with no_functions(), no_modes(), torch.no_grad():
        yield


def _plain(t: Tensor) -> bool:
    """Whether a tensor is memory and no more: of no subclass, under no transform of torch.func, without a gradient."""
    if type(t) not in (Tensor, torch.nn.Parameter) or t.requires_grad or t.layout is not torch.strided:
        return False
    return has_storage(t) and t.device.type != "meta" and not t.is_neg() and not t.is_inference()


def _memory(t: Tensor) -> Tensor:
    """The whole storage of a tensor, as real values."""
    return torch.empty(0, dtype=t.dtype.to_real(), device=t.device).set_(t.untyped_storage())


def _bits(t: Tensor) -> Tensor:
    return t.view(torch.int32 if t.element_size() == 4 else torch.int16)


def _copied(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that torch.compile traces, which cannot follow shadows: a narrow tensor is copied where formats must agree."""
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        wide = tree_map_only(Tensor, widened, (args, kwargs))
        if all(a is b for a, b in zip(tree_leaves((args, kwargs)), tree_leaves(wide))):
            raise
    return func(*wide[0], **wide[1])


class Widest(TorchFunctionMode):
    """Widens every tensor a function is given: for sums of weights, which decide no tensor's number format."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        wide = tree_map_only(Tensor, widened, (args, kwargs or {}))
        return func(*wide[0], **wide[1])


def _widened(value: object) -> object:
    """A dtype, or what stands for one, in float64."""
    if isinstance(value, torch.dtype) and value in NARROW:
        return torch.complex128 if value.is_complex else torch.float64
    return _LEGACY.get(value, value) if isinstance(value, (str, type(torch.FloatTensor))) else value


def near(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape and format and the same numbers, up to the rounding of float64."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    inexact = a.is_floating_point() or a.is_complex()
    return torch.equal(a, b) or (inexact and torch.allclose(a, b, RELATIVE, ABSOLUTE, True))
