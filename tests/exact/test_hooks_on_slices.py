"""Under tp, code between a column-parallel and a row-parallel layer is not sliced if its backward needs the full gradient. Elementwise code is."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rarely import sampled
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.proof.verify import verify


class _Unit(torch.autograd.Function):
    """The identity; its backward normalizes gradients to length one, or centers them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, center: bool) -> Tensor:
        ctx.center = center
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,) = grads
        return (g - g.mean(-1, keepdim=True) if ctx.center else g / (g.norm(dim=-1, keepdim=True) + 1e-9)), None


class _Signs(torch.autograd.Function):
    """A straight-through estimator: elementwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() < 1)


def _hooked(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def between(u: Tensor) -> Tensor:
        if u.requires_grad:
            u.register_hook(change)
        return F.gelu(u)

    return between


WHOLE = {
    "norm": _hooked(lambda g: g / (g.norm() + 1e-9)),
    "clip by norm": _hooked(lambda g: g * (50.0 / (g.norm() + 1e-9)).clamp(max=1.0)),
    "unit": lambda u: _Unit.apply(F.gelu(u), False),
    "centered": lambda u: _Unit.apply(F.gelu(u), True),
}
ELEMENTS = {
    "clamp": _hooked(lambda g: g.clamp(-1e-3, 1e-3)),
    "scale": _hooked(lambda g: 0.5 * g),
    "signs": _Signs.apply,
}


class Net(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.up, self.down, self.out = nn.Linear(6, 8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.out(h + self.down(self.between(self.up(h))))


class Points:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return x, x[:2].sin()


def job(between: Callable[[Tensor], Tensor]) -> plait.Job:
    return plait.Job(
        model=lambda: Net(between), loss=F.mse_loss, data=Points, optimizer=lambda p: torch.optim.SGD(p, 0.1), batch=8, steps=10
    )


@pytest.mark.parametrize("name", sampled(4, WHOLE))
def test_what_looks_at_a_whole_gradient_is_not_sliced(name: str) -> None:
    with pytest.raises(PlaitError, match="P034") as error:
        verify(job(WHOLE[name]), Plan.parse("tp=2"))
    found = str(error.value)
    assert "the gradient at the output of up is not" in found or "depends on all features" in found


@pytest.mark.slow
@pytest.mark.parametrize("name", ELEMENTS)
def test_what_acts_on_elements_is_sliced_and_equal(name: str) -> None:
    verdict = verify(job(ELEMENTS[name]), Plan.parse("tp=2"))
    assert verdict.equal and not verdict.inexact, verdict.to_dict()


class Block(nn.Module):
    """Two layers; the second halves the gradient that the first receives."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.down.register_full_backward_hook(lambda module, inputs, outputs: tuple(0.5 * g for g in inputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


@pytest.mark.slow
def test_a_hook_that_expects_gradients_of_all_inputs_bears_the_trials() -> None:
    """A trial without a gradient of the input passed None to the hook, and the run ended with the hook's error (C005)."""
    blocks = lambda: nn.Sequential(nn.Linear(6, 8), Block(), nn.LayerNorm(8), Block(), nn.Linear(8, 2))  # noqa: E731
    verdict = verify(dataclasses.replace(job(torch.tanh), model=blocks), Plan.parse("tp=2"))
    assert verdict.equal and not verdict.inexact, verdict.to_dict()
