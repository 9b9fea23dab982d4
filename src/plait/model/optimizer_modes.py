"""Optimizers with two modes: `eval()` puts the weights that are to be evaluated into the parameters, `train()` those that are trained.

Schedule-free optimizers compute gradients at a point between two sequences of weights. Their result is the average sequence. A plain
loop calls `optimizer.train()` before training, and `optimizer.eval()` before it evaluates or saves the weights.

Defazio et al. 2024, The Road Less Scheduled.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def has_modes(optimizer: Optimizer) -> bool:
    """Whether the optimizer, or one that it wraps, has both modes."""
    return bool(_with_modes(optimizer, set()))


def train_mode(optimizer: Optimizer) -> None:
    """Call `train()`: some optimizers are made in the other mode, and refuse to step in it."""
    for each in _with_modes(optimizer, set()):
        each.train()


@torch.no_grad()
def weights_in_eval_mode(optimizer: Optimizer) -> list[tuple[nn.Parameter, Tensor]]:
    """Each parameter, and what it is in eval mode. The optimizer is in train mode again, and its parameters have the same bits as before:
    the way there and back rounds."""
    modes = _with_modes(optimizer, set())
    if not modes:
        return []
    parameters = [p for group in optimizer.param_groups for p in group["params"] if not p.is_meta]
    places = [(p.data, p.detach().clone()) for p in parameters]
    for each in modes:
        each.eval()
    found = [p.detach().clone() for p in parameters]
    for each in modes:
        each.train()
    for p, (place, before) in zip(parameters, places):
        place.copy_(before)
        p.data = place  # an optimizer may have assigned another tensor to it, which a model of shards would not see
    return [*zip(parameters, found)]


@contextmanager
def evaluation_mode(optimizer: Optimizer, written: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside, the parameters are those of the optimizer's eval mode, if it has one. `written` is called each time after they were written."""
    swapped = weights_in_eval_mode(optimizer)
    if not swapped:
        yield
        return
    _swap(swapped)
    written()
    try:
        yield
    finally:
        _swap(swapped)
        written()


@torch.no_grad()
def _swap(pairs: list[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, other in pairs:
        held = parameter.detach().clone()
        parameter.copy_(other)
        other.copy_(held)


def wrapped(value: dict[str, object] | Iterable[object]) -> Iterator[Optimizer]:
    """Optimizers among attributes, also in lists and dicts."""
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, Optimizer):
            yield each
        elif isinstance(each, (list, tuple)) or type(each) is dict:
            yield from wrapped(each)


def _with_modes(optimizer: Optimizer, seen: set[int]) -> list[Any]:
    """The optimizer if it has both modes, else those of the optimizers in it that have."""
    if id(optimizer) in seen:
        return []
    seen.add(id(optimizer))
    if callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None)):
        return [optimizer]
    return [found for each in wrapped(vars(optimizer)) for found in _with_modes(each, seen)]
