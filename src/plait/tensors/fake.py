"""Runs on fake tensors, which have a shape and no data: small ones real, parameters replaced, memory as on a real device.

torch's rules for fake tensors give some results less memory than the library that computes them. A recurrent layer on CPU keeps a workspace
for backward; its size is found by running the operator. Some losses return their sum in the memory of the unreduced loss.
"""

import threading
from typing import Any

import torch
from torch import Tensor, nn

from plait.tensors.module_state import replace_parameters, replace_tensors
from plait.tensors.parameters import LiveStorages, deep_copy, make_parameter_like
from plait.tensors.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    active_fake_mode,
    is_seeded,
    schema,
    tree_map_only,
)
from plait.tensors.trees import flatten_tensors

FAKE_FAILURES = RuntimeError, TypeError
"""Exceptions of a model that reads values of fake tensors (``.item()``, ``if x.sum() > 0``)."""
MAX_REAL_BYTES = 1 << 20
"""Maximum bytes of a tensor that is real, since code may read it."""


MAX_CONSTANT_BYTES = 1 << 26
"""Maximum bytes of a real constant: the positions of five samples of a million tokens, a mask of 8,192 tokens."""


class RemoteFakeMode(FakeTensorMode):
    """Mode of fake tensors for values of other ranks."""


def is_remote_fake(t: object) -> bool:
    """Return whether it is a fake tensor for another rank's value. (A dry run's own tensors are fake too, in another mode.)"""
    return isinstance(t, FakeTensor) and isinstance(t.fake_mode, RemoteFakeMode)


class PartlyFakeMode(TorchDispatchMode):
    """Mode in which small new tensors are real, so that code may read them, and large ones and their results are fake."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = list(flatten_tensors((args, kwargs)))
        fakes = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
        fakes = fakes or (None if tensors else active_fake_mode() or self.fakes)
        if fakes is not None:
            with fakes:
                result = func(*args, **kwargs)
            if tensors or fakes is not self.fakes or any(map(self.should_fake, flatten_tensors(result))):
                return result
        return func(*args, **kwargs)

    def should_fake(self, made: Tensor) -> bool:
        """Return whether a new tensor, created without inputs, must be fake."""
        return made.numel() * made.element_size() > MAX_REAL_BYTES


LIFT_OP = torch.ops.aten.lift_fresh.default
"""Operator that receives the tensor which `torch.tensor` created from Python values."""


class RealConstantsMode(TorchDispatchMode):
    """Mode in which constants are real and values from samples, weights and random numbers are fake.

    Constants, such as positions and causal masks, are the same in every step, so code that reads them runs as in training.

    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes
        self.constants, self.overwritten = LiveStorages(), LiveStorages()
        """Tensors that hold constants, and those whose constants were overwritten."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = list(flatten_tensors((args, kwargs)))
        if self._is_constant(func, given) and self._is_small(func, args, kwargs):
            result = func(*args, **kwargs)
            for made in flatten_tensors(result):
                if not isinstance(made, FakeTensor):
                    self.constants.add(made)
            return result
        for t in (t for t in _list_written(func, args, kwargs) if t in self.constants):
            self.constants.discard(t)
            self.overwritten.add(t)
        with self.fakes:
            return func(*args, **kwargs)

    def to_fake(self, t: Tensor) -> Tensor:
        """Return the tensor for code that reads data without an operator: fake if its data differs from training."""
        return self.fakes.from_tensor(t) if t in self.overwritten else t

    def _is_constant(self, func: OpOverload, given: list[Tensor]) -> bool:
        """Return whether an operator computes a constant from constants. A lifted Python value is one."""
        return not is_seeded(func) and (func is LIFT_OP or all(t in self.constants for t in given))

    def _is_small(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the result fits in memory."""
        if schema(func).is_mutable:
            return True
        try:
            with self.fakes:
                shapes = list(flatten_tensors(func(*args, **kwargs)))
        except FAKE_FAILURES:  # its size depends on values and is at most that of the input
            return True
        return all(map(_is_reachable, shapes)) and sum(t.numel() * t.element_size() for t in shapes) <= MAX_CONSTANT_BYTES


def _list_written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes."""
    arguments = schema(func).arguments
    given = dict(zip((a.name for a in arguments), args)) | kwargs
    return flatten_tensors([given.get(a.name) for a in arguments if a.is_write])


def _is_reachable(t: Tensor) -> bool:
    """Return whether a tensor may be created on its device. A process without a CUDA context must not create one, since it may fork."""
    kind = (t.fake_device if isinstance(t, FakeTensor) else t.device).type
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_initialized())


def make_fake_copy(model: nn.Module, fakes: FakeTensorMode) -> nn.Module:
    """Return a deep copy of a module with fake parameters and floating buffers of this mode; no data is copied."""
    made: dict[int, Any] = {}
    with fakes:
        for p in model.parameters():
            made[id(p)] = make_parameter_like(p, _make_empty(p))
        for b in model.buffers():
            if b.is_floating_point():  # code may read integers
                made[id(b)] = _make_empty(b)
    return deep_copy(model, made)


def _make_empty(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


def replace_with_fakes(model: nn.Module, names: set[str], device: torch.device, fakes: FakeTensorMode | None = None) -> None:
    """Replace parameters that other ranks hold by fake ones without memory. `fakes`: their mode."""
    gone = [p for n, p in model.named_parameters() if n in names]
    with fakes or RemoteFakeMode(allow_non_fake_inputs=True):
        empty = [torch.empty(p.shape, dtype=p.dtype, device=device) for p in gone]
    replace_parameters(model, {id(p): make_parameter_like(p, e) for p, e in zip(gone, empty)})


def make_fake_copy_on(model: nn.Module, fakes: FakeTensorMode, device: torch.device) -> nn.Module:
    """Return a copy of a module on a device, with fake parameters and floating buffers of this mode."""
    made = make_fake_copy(model, fakes)
    replace_tensors(made, lambda t: t.detach().to(device))
    return made


RUN_FOR_SIZES = ("mkldnn_rnn_layer",)
REDUCED_LOSSES = ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
KEEPS_INPUT_DTYPE = ("native_group_norm_backward",)
"""Its first result has the dtype of its input; torch's rule widens it."""
KEEPS_INPUT_MEMORY = ("col2im",)
"""Its result uses the memory of a tensor like its input."""


def match_real_memory(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> object:
    """Return the fake result of an operator, with as much memory as the real one."""
    name = func.overloadpacket.__name__
    if isinstance(result, tuple):
        if name in RUN_FOR_SIZES:
            return _match_real_sizes(func, args, kwargs, result)
        if name in KEEPS_INPUT_DTYPE and isinstance(result[0], FakeTensor):
            return result[0].to(args[0].dtype), *result[1:]
    elif isinstance(result, FakeTensor) and (name in KEEPS_INPUT_MEMORY or (name in REDUCED_LOSSES and result.dim() == 0)):
        memory = result.new_empty(torch.broadcast_shapes(*(t.shape for t in args[:2] if isinstance(t, Tensor))))
        return memory.as_strided(result.shape, result.stride())
    return result


def _match_real_sizes(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the result with real sizes, found by running the operator in a separate thread without modes."""
    real: list[Any] = []

    def run_real() -> None:
        zeros = lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).zero_()  # noqa: E731
        real_args, real_kwargs = tree_map_only(Tensor, zeros, (args, kwargs))
        real.extend(func(*real_args, **real_kwargs))  # gradients are enabled, since otherwise no workspace is kept

    thread = threading.Thread(target=run_real)
    thread.start()
    thread.join()
    pairs = zip(result, real, strict=True)
    return tuple(fake if fake.shape == made.shape else fake.new_empty(made.shape) for fake, made in pairs)
