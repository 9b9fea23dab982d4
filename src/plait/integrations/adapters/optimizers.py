"""An optimizer that is there already, made again for other parameters: its class, its groups, their settings.

A parameter is found again by its place among the model's trained parameters, an order that every plan keeps.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from plait import PlaitError
from plait.config.errors import Problem, in_a_line
from plait.tensors.parameters import like

NOT_SETTINGS = ("params", "param_names", "initial_lr")
"""Keys of a group that its constructor is not given. `initial_lr` is what a scheduler left: the rate that it multiplies."""

Make = Callable[[list[nn.Parameter]], Optimizer]


def made_again(given: object, model: nn.Module, code: str) -> Make:
    """Makes optimizers like this one, of the model's trained parameters in their order.

    Raises `PlaitError` with the adapter's code for one that has taken steps, that has parameters of another model, or that
    cannot be made from what its groups say.
    """
    optimizer = _usable(given, code)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = _groups(optimizer, {id(p): i for i, p in enumerate(trained)}, code)
    accepted = inspect.signature(type(optimizer)).parameters
    everything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    defaults = {k: v for k, v in optimizer.defaults.items() if everything or k in accepted}

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        grouped = [{**settings, "params": [parameters[i] for i in places]} for places, settings in groups]
        return type(optimizer)(grouped, **defaults)

    try:
        again = make([like(p, torch.empty_like(p, device="meta")) for p in trained])
        same = [_settings(g) for g in again.param_groups] == [settings for _, settings in groups]
    except Exception as error:  # a constructor may raise anything
        raise _unmade(optimizer, code, f"its class, given what its groups say, raised {in_a_line(error)}") from error
    if not same:
        raise _unmade(optimizer, code, "made from what its groups say, it has other settings")
    return make


def _usable(optimizer: object, code: str) -> Optimizer:
    """Refuse what is no optimizer of torch, and one that has begun."""
    if not isinstance(optimizer, Optimizer) or type(optimizer).__module__.startswith("accelerate"):
        what = f"the optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}"
        fix = ("give the torch.optim.Optimizer itself, as it is before accelerator.prepare",)
        raise PlaitError(Problem(code, what, why="it is made again for the parameters of each process", fix=fix))
    if optimizer.state:
        what = f"the {type(optimizer).__name__} has taken steps already"
        why = f"it has state for {len(optimizer.state)} tensors, which a job does not begin with"
        raise PlaitError(Problem(code, what, why=why, fix=("make the optimizer anew",)))
    return optimizer


def _groups(optimizer: Optimizer, places: dict[int, int], code: str) -> list[tuple[list[int], dict[str, Any]]]:
    """(places of its parameters among those that are trained, settings) of each group."""
    found = []
    for number, group in enumerate(optimizer.param_groups):
        strange = [p for p in group["params"] if p.requires_grad and id(p) not in places]
        if strange:
            what = f"group {number} of the {type(optimizer).__name__} has {len(strange)} parameters that are not the model's"
            why = f"the first has the shape {list(strange[0].shape)}; the job trains the parameters of its model"
            fix = ("make the optimizer of model.parameters(), of the model that you give",)
            raise PlaitError(Problem(code, what, why=why, fix=fix))
        found.append(([places[id(p)] for p in group["params"] if id(p) in places], _settings(group)))
    return found


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    settings = {k: v for k, v in group.items() if k not in NOT_SETTINGS}
    return {**settings, "lr": group["initial_lr"]} if "initial_lr" in group else settings


def _unmade(optimizer: Optimizer, code: str, why: str) -> PlaitError:
    what = f"the {type(optimizer).__name__} cannot be made again for other parameters"
    fix = ("optimizer=lambda parameters: …    a function that makes it",)
    return PlaitError(Problem(code, what, why=why, fix=fix))
