"""Runs on fake tensors, which have a shape and no numbers: small ones real, a module's parameters replaced, true sizes.

Torch's rules for fake tensors give some results less memory than the library that computes them. A recurrent layer on
CPU keeps a workspace for backward; how large it is, only the library knows: it is asked, by running it. Some losses
return their sum in the memory of all that they summed.
"""

import threading
from typing import Any

import torch
from torch import Tensor, nn

from plait.tensors.modules import exchange_tensors, put_parameters
from plait.tensors.parameters import LiveStorages, deep_copy, like
from plait.tensors.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    fakes_around,
    is_seeded,
    schema,
    tree_map_only,
)
from plait.tensors.trees import flat

FAKE_FAILURES = RuntimeError, TypeError
"""What a model raises on fake tensors when it looks at values (``.item()``, ``if x.sum() > 0``)."""
SMALL = 1 << 20
"""Bytes of a tensor that is made for real, because code may look at it."""


CONSTANT = 1 << 26
"""Bytes up to which a constant is real: the positions of five samples of a million tokens, a mask of 8,192 tokens."""


class Unknowns(FakeTensorMode):
    """The mode of fake tensors that stand for values of other ranks."""


def is_unknown(t: object) -> bool:
    """Whether it stands for another rank's value. (In a dry run a rank's own tensors are fake too, of another mode.)"""
    return isinstance(t, FakeTensor) and isinstance(t.fake_mode, Unknowns)


class PartlyFake(TorchDispatchMode):
    """A mode in which small tensors are real, so that code may look at them, and large ones and their results are fake."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = list(flat((args, kwargs)))
        fakes = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
        fakes = fakes or (None if tensors else fakes_around() or self.fakes)
        if fakes is not None:
            with fakes:
                result = func(*args, **kwargs)
            if tensors or fakes is not self.fakes or any(map(self.hides, flat(result))):
                return result
        return func(*args, **kwargs)

    def hides(self, made: Tensor) -> bool:
        """Whether a new tensor, made from no other, is to be fake."""
        return made.numel() * made.element_size() > SMALL


LIFTED = torch.ops.aten.lift_fresh.default
"""The operator that is given what `torch.tensor` has made of values of Python."""


class RealConstants(TorchDispatchMode):
    """Fakes what comes from samples, weights and random numbers. The rest is the same in every step, such as positions and causal masks: it
    is real, so that code that looks at it runs as in training."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes
        self.constants, self.written = LiveStorages(), LiveStorages()
        """Tensors that hold constants, and those that held constants until something else was written into them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = list(flat((args, kwargs)))
        if self._is_constant(func, given) and self._is_small(func, args, kwargs):
            result = func(*args, **kwargs)
            for made in flat(result):
                if not isinstance(made, FakeTensor):
                    self.constants.add(made)
            return result
        for t in (t for t in _written(func, args, kwargs) if t in self.constants):
            self.constants.discard(t)
            self.written.add(t)
        with self.fakes:
            return func(*args, **kwargs)

    def faked(self, t: Tensor) -> Tensor:
        """The tensor for code that reads numbers without an operator: a fake one where they are not those of training."""
        return self.fakes.from_tensor(t) if t in self.written else t

    def _is_constant(self, func: OpOverload, given: list[Tensor]) -> bool:
        """Whether an operator computes a constant of constants. What is lifted is one."""
        return not is_seeded(func) and (func is LIFTED or all(t in self.constants for t in given))

    def _is_small(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether there is memory for the result."""
        if schema(func).is_mutable:
            return True
        try:
            with self.fakes:
                shapes = list(flat(func(*args, **kwargs)))
        except FAKE_FAILURES:  # its values say how much there is: no more than it is given
            return True
        return all(map(_is_reachable, shapes)) and sum(t.numel() * t.element_size() for t in shapes) <= CONSTANT


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes."""
    arguments = schema(func).arguments
    given = dict(zip((a.name for a in arguments), args)) | kwargs
    return flat([given.get(a.name) for a in arguments if a.is_write])


def _is_reachable(t: Tensor) -> bool:
    """Whether a tensor may be made on its device: a process that has not used a GPU must not begin to, because it may fork."""
    kind = (t.fake_device if isinstance(t, FakeTensor) else t.device).type
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_initialized())


def emptied(model: nn.Module, fakes: FakeTensorMode) -> nn.Module:
    """A deep copy of a module with fake parameters and floating buffers of this mode; no numbers are copied."""
    made: dict[int, Any] = {}
    with fakes:
        for p in model.parameters():
            made[id(p)] = like(p, _hollow(p))
        for b in model.buffers():
            if b.is_floating_point():  # code may look at whole numbers
                made[id(b)] = _hollow(b)
    return deep_copy(model, made)


def _hollow(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


def hollow(model: nn.Module, names: set[str], device: torch.device, fakes: FakeTensorMode | None = None) -> None:
    """Replace parameters by fake ones, which take no memory: other ranks hold them. `fakes`: the mode they belong to."""
    gone = [p for n, p in model.named_parameters() if n in names]
    with fakes or Unknowns(allow_non_fake_inputs=True):
        empty = [torch.empty(p.shape, dtype=p.dtype, device=device) for p in gone]
    put_parameters(model, {id(p): like(p, e) for p, e in zip(gone, empty)})


def emptied_on(model: nn.Module, fakes: FakeTensorMode, device: torch.device) -> nn.Module:
    """A copy of a module as it would be on a device, with fake parameters and floating buffers of this mode."""
    made = emptied(model, fakes)
    exchange_tensors(made, lambda t: t.detach().to(device))
    return made


ASKED = ("mkldnn_rnn_layer",)
SUMMED = ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
AS_GIVEN = ("native_group_norm_backward",)
"""Its first result has the number format of what it is given; torch's rule makes it wider."""
UNFOLDED = ("col2im",)
"""Its result lies in the memory of a tensor like its input."""


def sized(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> object:
    """The result of an operator on fake tensors, in as much memory as the library would give it."""
    name = func.overloadpacket.__name__
    if isinstance(result, tuple):
        if name in ASKED:
            return _asked(func, args, kwargs, result)
        if name in AS_GIVEN and isinstance(result[0], FakeTensor):
            return result[0].to(args[0].dtype), *result[1:]
    elif isinstance(result, FakeTensor) and (name in UNFOLDED or (name in SUMMED and result.dim() == 0)):
        memory = result.new_empty(torch.broadcast_shapes(*(t.shape for t in args[:2] if isinstance(t, Tensor))))
        return memory.as_strided(result.shape, result.stride())
    return result


def _asked(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: tuple[Any, ...]) -> tuple[Any, ...]:
    """The result, in the sizes that the library gives it: run for real, on a thread of its own, where no mode is on."""
    real: list[Any] = []

    def ask() -> None:
        zeros = lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).zero_()  # noqa: E731
        real_args, real_kwargs = tree_map_only(Tensor, zeros, (args, kwargs))
        real.extend(func(*real_args, **real_kwargs))  # with gradients on: without, it keeps nothing

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    pairs = zip(result, real, strict=True)
    return tuple(fake if fake.shape == made.shape else fake.new_empty(made.shape) for fake, made in pairs)
