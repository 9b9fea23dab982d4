"""Runs on tensors of which small ones are real and large ones are fake; parameters that are elsewhere, replaced by fake ones.

Sizes of what operators make on fake tensors, where torch's own rules have them otherwise than the library that computes.

A recurrent layer on CPU keeps a workspace for backward that torch's rule has as empty. How large it is, only the library
knows: it is asked, by running it. Some losses return their sum in the memory of all that they summed.
"""

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plait.tensors.modules import put_parameters
from plait.tensors.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    Unknowns,
    fakes_around,
    tree_map,
    tree_map_only,
)

SMALL = 1 << 20
"""Bytes of a tensor that is made for real, because code may look at it."""


class PartlyFake(TorchDispatchMode):
    """Small tensors are real, so that code may look at them; large ones, and what comes of them, are fake."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.fakes = fakes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = list(given_to((args, tuple(kwargs.values()))))
        fakes = next((t.fake_mode for t in given if isinstance(t, FakeTensor)), None)
        fakes = fakes or (None if given else fakes_around() or self.fakes)
        if fakes is not None:
            with fakes:
                result = func(*args, **kwargs)
            if given or fakes is not self.fakes or any(map(self.hides, given_to((result,)))):
                return result
        return func(*args, **kwargs)

    def hides(self, made: Tensor) -> bool:
        """Whether what is made from nothing is to be fake."""
        return made.numel() * made.element_size() > SMALL


def given_to(args: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or results, which are in tuples and lists only."""
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from given_to(value)


def hollow(model: nn.Module, names: set[str], device: torch.device, fakes: FakeTensorMode | None = None) -> None:
    """Replace parameters by fake ones, which take no memory: other ranks hold them. `fakes`: the mode they belong to."""
    gone = [p for n, p in model.named_parameters() if n in names]
    with fakes or Unknowns(allow_non_fake_inputs=True):
        empty = [torch.empty(p.shape, dtype=p.dtype, device=device) for p in gone]
    put_parameters(model, {id(p): nn.Parameter(e, p.requires_grad) for p, e in zip(gone, empty)})


ASKED = ("mkldnn_rnn_layer",)
SUMMED = ("mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss")
AS_GIVEN = ("native_group_norm_backward",)
"""Its first result has the number format of what it is given; torch's rule makes it wider."""
UNFOLDED = ("col2im",)
"""Its result lies in the memory of a tensor like its input."""


def sized(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """What an operator made, in as much memory as the library would give it."""
    name = func.overloadpacket.__name__
    if name in ASKED:
        return _asked(func, args, kwargs, result)
    if name in AS_GIVEN and isinstance(result[0], FakeTensor):
        return result[0].to(args[0].dtype), *result[1:]
    whole = name in UNFOLDED or (name in SUMMED and result.dim() == 0)
    if whole and isinstance(result, FakeTensor):
        memory = result.new_empty(torch.broadcast_shapes(*(t.shape for t in args[:2] if isinstance(t, Tensor))))
        return memory.as_strided(result.shape, result.stride())
    return result


def _asked(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    real: list[Any] = []
    given = tree_map_only(Tensor, lambda t: (t.shape, t.stride(), t.dtype), (args, kwargs))

    def ask() -> None:
        made = tree_map(
            lambda x: torch.empty_strided(*x[:2], dtype=x[2]).zero_() if _is_spec(x) else x, given, is_leaf=_is_spec
        )
        real.extend(func(*made[0], **made[1]))  # with gradients on: without, it keeps nothing

    thread = threading.Thread(target=ask)  # modes are those of a thread: there it runs for real
    thread.start()
    thread.join()
    pairs = zip(result, real, strict=True)
    return tuple(fake if fake.shape == made.shape else fake.new_empty(made.shape) for fake, made in pairs)


def _is_spec(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 3 and isinstance(x[0], torch.Size)
