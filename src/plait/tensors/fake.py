"""Runs on tensors of which small ones are real and large ones are fake; parameters that are elsewhere, replaced by fake ones."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plait.tensors.torch_private import FakeTensor, FakeTensorMode, TorchDispatchMode, Unknowns, fakes_around

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


def given_to(args: Any) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or results, which are in tuples and lists only."""
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from given_to(value)


def hollow(model: nn.Module, names: set[str], device: torch.device, fakes: FakeTensorMode | None = None) -> None:
    """Replace parameters by fake ones, which take no memory: other ranks hold them. `fakes`: the mode they belong to."""
    gone: dict[int, nn.Parameter] = {}
    fakes, named = fakes or Unknowns(allow_non_fake_inputs=True), {id(p): n for n, p in model.named_parameters()}
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if named.get(id(parameter)) in names:
                if id(parameter) not in gone:
                    with fakes:
                        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    gone[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                setattr(module, key, gone[id(parameter)])
