"""A module's forward wrapped and taken back, with whatever class and forward it has."""

import copy

import torch
from torch import nn

from plait.tensors.modules import forwards_kept, own_forward


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


class Triple(Double):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3.0 * x


def wrap(module: nn.Module) -> None:
    own = own_forward(module)
    module.forward = lambda x: own(x) + 1.0  # pyrefly: ignore[bad-assignment]


def test_wrapped_twice_the_last_is_outermost() -> None:
    module, x = Double(), torch.ones(())
    wrap(module)
    own = own_forward(module)
    module.forward = lambda x: own(x) * 10.0  # pyrefly: ignore[bad-assignment]
    assert module(x) == 30.0


def test_the_class_is_that_of_the_call() -> None:
    module = Double()
    wrap(module)
    module.__class__ = Triple
    assert module(torch.ones(())) == 4.0


def test_a_copy_of_the_module_has_a_forward_of_its_own() -> None:
    module = Double()
    module.forward = own_forward(module)  # pyrefly: ignore[bad-assignment]
    other = copy.deepcopy(module)
    other.factor = 5.0
    assert (module(torch.ones(())), other(torch.ones(()))) == (2.0, 5.0)


def test_forwards_are_taken_back_to_those_that_were_there() -> None:
    plain, wrapped = Double(), Double()
    wrap(wrapped)
    before = wrapped.forward
    with forwards_kept([plain, wrapped]):
        wrap(plain)
        wrap(wrapped)
        assert (plain(torch.ones(())), wrapped(torch.ones(()))) == (3.0, 4.0)
    assert "forward" not in vars(plain)
    assert wrapped.forward is before
