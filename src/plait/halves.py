"""A backward pass in two halves: first the gradients of the inputs, which another stage waits for; later the weights'.

The first half runs the operators that lie on a way to the inputs, for that way only. Where such an operator also leads
to a parameter, the gradient that came to it is kept; the second half starts there. Nothing is computed twice: what a
checkpoint recomputes in the first half is kept for the second.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from plait.torchseam import GraphExecGroup


def halves(outputs: list[Tensor], gradients: list[Tensor | None], inputs: list[Tensor]) -> Callable[[], None]:
    """Put the gradients of `inputs` into their `.grad`; the function that is returned does it for all parameters.

    Shapes of `gradients` are those of `outputs`; None stands for a scalar's 1. The graph lives until the second half.
    """
    given = [(t, g) for t, g in zip(outputs, gradients) if t.requires_grad and t.grad_fn is not None]
    goals = {get_gradient_edge(t).node for t in inputs}
    leading = _leading([get_gradient_edge(t).node for t, _ in given], goals)
    borders = [
        node for node in leading - goals if any(n is not None and n not in leading for n, _ in node.next_functions)
    ]
    came: dict[Node, tuple[Any, ...]] = {}
    group = GraphExecGroup()

    def keep(node: Node) -> Any:
        def kept(grads: tuple[Any, ...]) -> None:
            came[node] = grads

        return node.register_prehook(kept)

    handles = [keep(node) for node in borders]
    inner = [(t, g) for t, g in given if get_gradient_edge(t).node in leading]
    if inner:
        ends, grads = zip(*inner)
        with group:
            found = torch.autograd.grad(ends, inputs, grads, retain_graph=True, allow_unused=True)
        for t, gradient in zip(inputs, found):
            if gradient is not None:
                t.grad = gradient if t.grad is None else t.grad + gradient
    for handle in handles:
        handle.remove()
    outer = [(t, g) for t, g in given if get_gradient_edge(t).node not in leading]

    def weights() -> None:
        with group:
            later()

    def later() -> None:
        for nodes, targets in _together(borders, leading):
            edges = [(GradientEdge(n, i), g) for n in nodes for i, g in enumerate(came.get(n, ())) if g is not None]
            again = [n.register_prehook(partial(_instead, came[n])) for n in nodes if len(nodes) > 1 and n in came]
            if edges:
                torch.autograd.backward([e for e, _ in edges], [g for _, g in edges], retain_graph=True, inputs=targets)
            for handle in again:
                handle.remove()
        came.clear()
        if outer:
            torch.autograd.backward([t for t, _ in outer], [g for _, g in outer], retain_graph=True)

    return weights


def _leading(roots: list[Node], goals: set[Node]) -> set[Node]:
    """Nodes from which a goal can be reached."""
    found, met, stack = set(goals), set[Node](), [(node, False) for node in roots]
    while stack:
        node, done = stack.pop()
        if done:
            if any(n in found for n, _ in node.next_functions):
                found.add(node)
        elif node not in met:
            met.add(node)
            stack.append((node, True))
            stack += [(n, False) for n, _ in node.next_functions if n is not None and n not in met]
    return found


def _together(borders: list[Node], leading: set[Node]) -> list[tuple[list[Node], list[Tensor]]]:
    """Borders by the parameters they lead to. Those that lead to one parameter go together: from the later one the
    earlier ones are met again, and must be given what came to them, not that once more."""
    groups: list[tuple[list[Node], dict[int, Tensor]]] = []
    for node in borders:
        found = {id(t): t for t in _parameters(node, leading)}
        alike = [g for g in groups if not g[1].keys().isdisjoint(found)]
        groups = [g for g in groups if all(g is not other for other in alike)]
        groups.append(
            ([node, *(n for g in alike for n in g[0])], {**found, **{k: t for g in alike for k, t in g[1].items()}})
        )
    return [(nodes, list(targets.values())) for nodes, targets in groups if targets]


def _instead(grads: tuple[Any, ...], summed: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(torch.zeros_like(s) if g is None and s is not None else g for g, s in zip(grads, summed))


def _parameters(node: Node, leading: set[Node]) -> Iterator[Tensor]:
    """Parameters that are reached from a node without touching the way to the inputs."""
    met, ahead = set[Node](), [n for n, _ in node.next_functions if n is not None and n not in leading]
    while ahead:
        at = ahead.pop()
        if at in met:
            continue
        met.add(at)
        if hasattr(at, "variable"):
            yield at.variable
        ahead += [n for n, _ in at.next_functions if n is not None and n not in leading]
