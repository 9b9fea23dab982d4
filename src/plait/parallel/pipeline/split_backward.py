"""A backward pass in two halves: first the gradients of the inputs, which another stage waits for; later the weights'.

The first half runs the operators that lie on a way to the inputs, for that way only. Where such an operator also leads
to a parameter, the gradient that came to it is kept; the second half starts there. Nothing is computed twice: what a
checkpoint recomputes in the first half is kept for the second. Three kinds of parameters are not put off, because the second
half would go a way again: those that several such operators lead to (a unit that is called twice, a bias that all layers
share, a decoder's first layer, which each attention to the encoder's states leads to), the others that one of these operators
leads to, and those behind an operator written in Python, which computes all its gradients at once.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from plait.tensors.torch_private import GraphExecGroup
from plait.tensors.trees import nodes_behind


def halves(outputs: list[Tensor], gradients: list[Tensor | None], inputs: list[Tensor]) -> Callable[[], None]:
    """Put the gradients of `inputs` into their `.grad`; the function that is returned does it for all parameters.

    Shapes of `gradients` are those of `outputs`; None stands for a scalar's 1. The graph lives until the second half.
    """
    ends = [(t, g) for t, g in zip(outputs, gradients) if t.requires_grad and t.grad_fn is not None]
    goals = {get_gradient_edge(t).node for t in inputs}
    leading = _leading([get_gradient_edge(t).node for t, _ in ends], goals)
    later, now = _put_off([node for node in leading if node not in goals], leading)
    came: dict[Node, tuple[Tensor | None, ...]] = {}
    group = GraphExecGroup()
    handles = [node.register_prehook(partial(came.__setitem__, node)) for node, _ in later]
    inner = [(t, g) for t, g in ends if get_gradient_edge(t).node in leading]
    if inner:
        with group:
            torch.autograd.backward(*map(list, zip(*inner)), retain_graph=True, inputs=[*inputs, *now])
    for handle in handles:
        handle.remove()
    outer = [(t, g) for t, g in ends if get_gradient_edge(t).node not in leading]

    def weights() -> None:
        with group:
            for node, targets in later:
                edges = [(GradientEdge(node, i), g) for i, g in enumerate(came.pop(node, ())) if g is not None]
                if edges:
                    torch.autograd.backward(*map(list, zip(*edges)), retain_graph=True, inputs=targets)
            if outer:
                torch.autograd.backward([t for t, _ in outer], [g for _, g in outer], retain_graph=True)

    return weights


def _put_off(nodes: list[Node], leading: Collection[Node]) -> tuple[list[tuple[Node, list[Tensor]]], list[Tensor]]:
    """(operators on the way to the inputs, each with the parameters that the second half finds from it; the parameters that
    are not put off)."""
    led = {node: {id(t): t for t in _parameters(node, leading)} for node in nodes}
    times = Counter(key for parameters in led.values() for key in parameters)
    later, now = list[tuple[Node, list[Tensor]]](), dict[int, Tensor]()
    for node, parameters in led.items():
        if isinstance(node, BackwardCFunction) or any(times[key] > 1 for key in parameters):
            now |= parameters
        elif parameters:
            later.append((node, list(parameters.values())))
    return later, list(now.values())


def _leading(roots: list[Node], goals: set[Node]) -> Collection[Node]:
    """Nodes from which a goal can be reached, those next to it first: in an order that is always the same."""
    leading, met, stack = dict.fromkeys(goals), set[Node](), [(node, False) for node in roots]
    while stack:
        node, done = stack.pop()
        if done:
            if any(n in leading for n, _ in node.next_functions):
                leading[node] = None
        elif node not in met:
            met.add(node)
            stack.append((node, True))
            stack += [(n, False) for n, _ in node.next_functions if n is not None and n not in met]
    return leading


def _parameters(node: Node, leading: Collection[Node]) -> Iterator[Tensor]:
    """Parameters that are reached from a node without touching the way to the inputs."""
    yield from (at.variable for at in nodes_behind((n for n, _ in node.next_functions), leading) if hasattr(at, "variable"))
