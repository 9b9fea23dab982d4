"""Optimizers that stack tensors (a Muon that orthogonalizes matrices of one shape together), stepped with one tensor at a time.

Such an optimizer keeps one state for a group of tensors and needs a gradient of each. A rank has some of the tensors, so both would depend
on the plan. If a trial shows that each tensor is updated by its own gradient and state alone (`parallel/fsdp/optimizer_check.py`), its step
is made once for each tensor of this rank, with parameter groups of that tensor. Its state is then that of one tensor, and goes
from plan to plan as any other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from plait.model.combined_optimizer import CombinedOptimizer


def step_singly(optimizer: Optimizer) -> None:
    """From now on a step of this optimizer is one for each tensor that has a gradient; its hooks run once."""
    inner = optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [optimizer]

    def step(self: Optimizer, closure: object = None) -> None:
        for one in inner:
            own = _without_hooks(type(one).step)
            for _ in _each_alone(one):
                own(one)

    optimizer.step = MethodType(Optimizer.profile_hook_step(step), optimizer)  # pyrefly: ignore[bad-assignment]


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function that torch's `profile_hook_step` wrapped, with its other decorators."""
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


@contextmanager
def _kept(optimizer: Optimizer) -> Iterator[list[dict[str, Any]]]:
    """Its parameter groups, which are as they were afterwards."""
    groups = optimizer.param_groups
    lists = [group["params"] for group in groups]
    try:
        yield groups
    finally:
        optimizer.param_groups = groups
        for group, parameters in zip(groups, lists):
            group["params"] = parameters


def _each_alone(optimizer: Optimizer) -> Iterator[None]:
    """Has the optimizer one tensor at a time, of those that have a gradient."""
    with _kept(optimizer) as groups:
        for group in groups:
            for parameter in [p for p in group["params"] if p.grad is not None]:
                optimizer.param_groups, group["params"] = [group], [parameter]
                yield
