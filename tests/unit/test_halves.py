"""A backward pass in two halves gives the gradients of an undivided one, for graphs of every shape."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plait.parallel.pipeline.stage import split_backward

WIDTH = 3


class Graph:
    """A random graph of operators over inputs, shared weights and earlier values."""

    def __init__(self, seed: int):
        self.choose = random.Random(seed)
        g = torch.Generator().manual_seed(seed)
        self.weights = [torch.randn(WIDTH, WIDTH, generator=g, dtype=torch.float64) for _ in range(4)]
        for weight in self.weights:
            weight.requires_grad_()
        self.weights[3].requires_grad_(self.choose.random() < 0.5)
        self.inputs = self.choose.randint(1, 3)
        self.steps = [
            (self.choose.randrange(7), self.choose.random(), self.choose.random(), self.choose.randrange(4))
            for _ in range(self.choose.randint(2, 9))
        ]
        self.ends = [self.choose.random() for _ in range(self.choose.randint(1, 3))]

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        values = list(inputs)
        for kind, a, b, w in self.steps:
            x, y, weight = values[int(a * len(values))], values[int(b * len(values))], self.weights[w]
            if kind < 3:
                values.append(x @ weight)
            elif kind == 3:
                values.append(x * y.tanh())
            elif kind == 4:
                values.append(x + y)
            elif kind == 5:  # not on the path to the inputs: two weights meet first
                values.append(x @ (weight @ self.weights[0]).tanh())
            else:  # of weights only
                values.append((weight * self.weights[1]).sin() + x.detach())
        return [values[-1], *(values[int(e * len(values))] for e in self.ends)]

    def batch(self, number: int) -> list[Tensor]:
        g = torch.Generator().manual_seed(100 + number)
        return [
            torch.randn(WIDTH, WIDTH, generator=g, dtype=torch.float64).requires_grad_(k == 0 or self.inputs != 2)
            for k in range(self.inputs)
        ]


def backward(
    graph: Graph, order: Callable[[list[Callable[[], None]]], None] | None, micros: int
) -> list[Tensor | None]:
    """Gradients of the weights and the inputs. `order` runs the second halves; without it backward is undivided."""
    found: list[Tensor | None] = []
    later: list[Callable[[], None]] = []
    for weight in graph.weights:
        weight.grad = None
    runs = []
    for micro in range(micros):
        inputs = graph.batch(micro)
        outputs = [t for t in graph.run(inputs) if t.requires_grad and not t.is_leaf]
        gradients: list[Tensor | None] = [torch.full_like(t, 0.3 + k) for k, t in enumerate(outputs)]
        runs.append((inputs, outputs, gradients))
    for inputs, outputs, gradients in runs:
        wanted = [t for t in inputs if t.requires_grad]
        if order is not None:
            later.append(split_backward(outputs, gradients, wanted))
        elif outputs:
            torch.autograd.backward(outputs, gradients)
        found += [None if t.grad is None else t.grad.clone() for t in wanted]
    if order is not None:
        order(later)
    return found + [None if w.grad is None else w.grad.clone() for w in graph.weights]


def same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert [t is None for t in found] == [t is None for t in expected]
    for a, b in zip(found, expected):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_equals_a_plain_backward(seed: int) -> None:
    graph = Graph(seed)
    same(backward(graph, lambda later: [w() for w in later] and None, 1), backward(graph, None, 1))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_several_micro_batches_open_at_once(seed: int, last_first: bool) -> None:
    """Second halves run when the schedule requires it, in any order, and each belongs to its own graph."""
    graph = Graph(seed)
    order = lambda later: [w() for w in (reversed(later) if last_first else later)] and None  # noqa: E731
    same(backward(graph, order, 3), backward(graph, None, 3))


class Times(torch.autograd.Function):
    """Computes x @ w, and counts how often its gradients were computed."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        Times.calls += 1
        x, w = ctx.saved_tensors
        return grads[0] @ w.T, x.T @ grads[0]


def test_what_the_second_half_could_only_find_on_the_way_to_the_inputs_is_not_put_off() -> None:
    """A weight that two operators lead to, and one behind a Python operator. The first half gives no other weight a gradient."""
    shared, own, python = (torch.randn(3, 3, requires_grad=True) for _ in range(3))
    x = torch.randn(2, 3, requires_grad=True)
    Times.calls = 0
    out = Times.apply(((x @ shared).relu() @ own).relu() @ shared, python)
    later = split_backward([out.sum()], [None], [x])
    assert x.grad is not None and shared.grad is not None and python.grad is not None and own.grad is None
    first = shared.grad.clone()
    later()
    assert own.grad is not None and torch.equal(shared.grad, first) and Times.calls == 1


def test_what_a_decoder_computes_by_itself_is_gone_through_once() -> None:
    """Two paths lead to the same weights: a norm behind attention to the encoder's states, and the sum after it."""
    own, norm, query, key = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(4))
    states = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    Times.calls = 0
    hidden = torch.ones(2, 3, dtype=torch.float64) @ own
    asked = Times.apply(hidden @ norm, query)
    out = (hidden + asked * (states @ key)).sin()
    later = split_backward([out.sum()], [None], [states])
    assert states.grad is not None and own.grad is not None and key.grad is None
    later()
    assert key.grad is not None and norm.grad is not None and query.grad is not None and Times.calls == 1


def test_the_two_halves_are_apart() -> None:
    """For a chain of products, the first half computes the gradient of the input, the second those of the weights."""
    weights = [torch.randn(3, 3, requires_grad=True) for _ in range(3)]
    x = h = torch.randn(2, 3, requires_grad=True)
    for w in weights:
        h = (h @ w).relu()
    later = split_backward([h.sum()], [None], [x])
    assert x.grad is not None and all(w.grad is None for w in weights)
    later()
    assert all(w.grad is not None for w in weights)


@pytest.mark.parametrize("skip", (False, True))
def test_a_weight_used_before_and_after_a_skip(skip: bool) -> None:
    w = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def run(split: bool) -> tuple[Tensor | None, Tensor | None]:
        w.grad = None
        x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        h = (x @ w).tanh()
        out = ((h @ w) + (x if skip else 0.0)).sin() @ w
        if split:
            split_backward([out], [torch.ones_like(out)], [x])()
        else:
            out.backward(torch.ones_like(out))
        return x.grad, w.grad

    same(list(run(True)), list(run(False)))
