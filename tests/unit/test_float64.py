"""The float64 mode of proofs: in-place writes reach their target. The comparison of two float64 results."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from plait.proof.probes import measure_scale, relative_max_diff
from plait.tensors.float64 import Float64Mode, Float64Shadow, is_close
from plait.tensors.module_state import convert_module

X = torch.linspace(-1.0, 2.0, 6, dtype=torch.float64)


def test_rounding_is_near_and_a_difference_is_not() -> None:
    assert is_close(X, X * (1 + 1e-12))
    assert not is_close(X, X + 1e-8)
    assert not is_close(X, X.view(2, 3))
    assert not is_close(X, X.float())
    assert is_close(X * math.nan, X * math.nan)
    assert is_close(torch.arange(3), torch.arange(3)) and not is_close(torch.arange(3), torch.arange(1, 4))


def test_differences_are_relative_to_the_largest_number_or_a_floor() -> None:
    assert relative_max_diff(X, X + 1.0, measure_scale(X)) == 0.5
    assert relative_max_diff(0 * X, 0 * X + 1.0, measure_scale(0 * X, 4.0)) == 0.25
    assert relative_max_diff(X, X * math.nan, measure_scale(X)) == math.inf
    assert relative_max_diff(X[:0], X[:0], measure_scale(X[:0])) == 0.0


TABLE, SLOTS = torch.zeros(3, 4), torch.full((4,), 0.5)
PHASES = torch.polar(torch.ones(4), torch.arange(4.0))
HALF = torch.zeros(4, dtype=torch.bfloat16)


def _fresh(v: Tensor) -> Tensor:
    total = torch.empty(4).fill_(0.25)
    total.index_copy_(0, torch.tensor([2, 0]), v[:2])
    return total.put_(torch.tensor([3]), v[3:])


def _constant(v: Tensor) -> Tensor:
    SLOTS.copy_(v.detach())
    assert SLOTS.mul_(2.0) is SLOTS
    return SLOTS + v


def _view_of_a_view(v: Tensor) -> Tensor:
    row = TABLE.zero_()[1:].t()[:, 0]
    row[1:3] += v[1:3].detach()
    torch.sub(row, 1.0, out=row)
    return TABLE.sum(0) * v


def _numpy(v: Tensor) -> Tensor:
    memory = np.zeros(4, np.float32)
    t = torch.from_numpy(memory)
    t.masked_scatter_(torch.tensor([True, False, True, False]), v)
    memory[1] = 7.0
    assert t[1] == 7.0
    return t.index_fill(0, torch.tensor([3]), 2.0) * 1.0


def _legacy(v: Tensor) -> Tensor:
    t = torch.FloatTensor(2, 4).zero_()
    t.scatter_add_(0, torch.tensor([[1, 0, 1, 1]]), v[None])
    t.diagonal().copy_(v[:2])
    return t.type(torch.FloatTensor).sum(0)


def _out_of_a_chain(v: Tensor) -> Tensor:
    t = torch.ones(4)
    torch.addcmul(t, v.detach(), v.detach(), out=t)
    torch.cat([t[2:], t[:2]], out=SLOTS)
    return SLOTS * v


def _behind_autograd(v: Tensor) -> Tensor:
    SLOTS.data.fill_(3.0)
    SLOTS.detach()[2] = v[2].detach()
    return SLOTS * v


def _complex(v: Tensor) -> Tensor:
    turned = v.to(torch.cfloat) * PHASES.clone()
    torch.view_as_real(PHASES)[0, 1] = 0.5
    PHASES.real[1] = v[1].detach()
    return torch.view_as_real(turned + PHASES.conj()).sum(-1)


def _sixteen_bits(v: Tensor) -> Tensor:
    HALF.lerp_(v.detach().bfloat16(), 0.5)
    return (HALF.float() + v).half()


@pytest.mark.parametrize(
    "work",
    [_fresh, _constant, _view_of_a_view, _numpy, _legacy, _out_of_a_chain, _behind_autograd, _complex, _sixteen_bits],
    ids=lambda work: work.__name__,
)
def test_writes_reach_narrow_tensors_in_the_float64_mode(work: Callable[[Tensor], Tensor]) -> None:
    start = torch.tensor([0.5, 1.25, -2.0, 3.75])
    before = [t.clone() for t in (TABLE, SLOTS, PHASES, HALF)]
    plain_given, wide_given = start.clone().requires_grad_(), start.double().requires_grad_()
    plain = work(plain_given)
    plain.sum().backward()
    after = [t.clone() for t in (TABLE, SLOTS, PHASES, HALF)]
    for t, value in zip((TABLE, SLOTS, PHASES, HALF), before):
        t.copy_(value)
    with Float64Mode():
        wide = work(wide_given)
    wide.sum().backward()
    assert wide.dtype == torch.float64
    rounding = 1e-2 if work is _sixteen_bits else 1e-6
    torch.testing.assert_close(wide, plain.double(), rtol=rounding, atol=0)
    torch.testing.assert_close(wide_given.grad, plain_given.grad.double(), rtol=rounding, atol=0)
    for t, expected in zip((TABLE, SLOTS, PHASES, HALF), after):
        assert t.dtype in (torch.float32, torch.complex64, torch.bfloat16)
        torch.testing.assert_close(t, expected, rtol=rounding, atol=0)


def test_a_narrow_tensor_keeps_what_float64_wrote_into_it() -> None:
    kept = torch.zeros(2)
    for _ in range(3):
        with Float64Mode():
            kept += torch.tensor([1e-12, 1.0], dtype=torch.float64)
            read = kept - torch.tensor([0.0, 1.0])
    assert float(read[0]) == pytest.approx(3e-12, rel=1e-9)
    kept.zero_()  # outside of the mode
    with Float64Mode():
        assert float((kept + 0.0).sum()) == 0.0


def test_what_is_not_used_any_more_has_no_shadow() -> None:
    for _ in range(3):
        with Float64Mode():
            torch.from_numpy(np.zeros(4, np.float32)).add_(1.0)
    assert len(Float64Shadow.by_storage) <= 6


def test_a_module_is_converted_with_its_complex_tensors() -> None:
    module = nn.Module()
    module.register_buffer("phases", torch.polar(torch.ones(2), torch.arange(2.0)))
    module.weight = nn.Parameter(torch.ones(2))
    convert_module(module, None, torch.float64)
    assert module.phases.dtype == torch.complex128 and module.weight.dtype == torch.float64
    assert is_close(module.phases, module.phases * (1 + 1e-12)) and not is_close(module.phases, module.phases + 1e-8j)
