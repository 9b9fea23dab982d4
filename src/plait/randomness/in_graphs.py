"""Dropout inside of compiled code: one graph for all units that are alike, though each draws numbers of its own.

A graph knows no place: the code of one block is the code of all. So a dropout layer inside a compiled unit says in the graph which
layer of the unit it is and which call of it, and the operator that draws asks outside of the graph which unit runs.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.config.errors import PlaitError, Problem
from plait.randomness.distributions import DropoutCall, mask_shape

LAYERS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Dropout: F.dropout, nn.Dropout1d: F.dropout1d, nn.Dropout2d: F.dropout2d, nn.Dropout3d: F.dropout3d,
}  # fmt: skip
"""Layers that draw one mask in each call, and the function that they call."""
Draw = Callable[[Tensor, str, float], Tensor]
"""(a tensor like the mask, the place inside the unit, p) -> the mask."""
UNIT: ContextVar[Draw | None] = ContextVar("unit", default=None)
"""What draws for the compiled unit that runs now."""


@torch.library.custom_op("plait::unit_mask", mutates_args=())
def _unit_mask(like: Tensor, where: Tensor, place: str, p: float) -> Tensor:
    return _drawn(like, place, p)


@_unit_mask.register_fake
def _(like: Tensor, where: Tensor, place: str, p: float) -> Tensor:
    return like.new_empty(like.shape)


def _drawn(like: Tensor, place: str, p: float) -> Tensor:
    draw = UNIT.get()
    if draw is None:
        what = f"the compiled code around {place.split('#')[0]} draws random numbers where no unit runs"
        why = "a checkpoint in the model's own code computes a part of a compiled unit again, and its place is not known there"
        raise PlaitError(
            Problem(
                "J014", what, why=why, fix=("recompute=full in the place of the model's checkpoint", "compile=false")
            )
        )
    return draw(like, place, p)


def draw_inside(module: nn.Module, name: str, calls: dict[str, int], where: Tensor) -> None:
    """Let a dropout layer draw inside of its compiled unit, in which it is called `name`.

    `calls`: how often layers were called in this call of the unit; `where`: the numbers' tensor, which a graph takes as its input
    so that it never holds a mask for a constant. The layers of all units get one class, and differ in no more than that: what
    belongs to one module alone would make a graph for it alone."""
    vars(module).update(_name=name, _unit_calls=calls, _where=where)
    module.__class__ = _in_unit(type(module))


@cache
def _in_unit(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_InUnit, kind), {"_func": staticmethod(LAYERS[kind])})


class _InUnit(nn.Module):
    _name: str
    _unit_calls: dict[str, int]
    _where: Tensor
    _func: Callable[..., Tensor]
    p: float
    inplace: bool

    def forward(self, input: Tensor) -> Tensor:
        """As the layer's own."""
        self._unit_calls[self._name] = number = self._unit_calls.get(self._name, 0) + 1
        if not self.training or self.p == 0.0:
            return input
        shape = mask_shape(DropoutCall(self._func, input, self.p, True, self.inplace))
        like = input.detach() if shape == input.shape else input.new_empty(shape)
        draw = _unit_mask if torch.compiler.is_compiling() else _now
        mask = draw(like, self._where, f"{self._name}#{number}#1", self.p)
        return input.mul_(mask) if self.inplace else input * mask


def _now(like: Tensor, where: Tensor, place: str, p: float) -> Tensor:
    return _drawn(like, place, p)
