"""A model and an optimizer that are there already, made again: a job's are made several times, in several processes.

A model is handed out fresh at every call. An optimizer is made again for other parameters with its class, its groups and their settings:
a parameter is found again by its place among the model's trained parameters, an order that every plan keeps.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from plait import PlaitError
from plait.config.errors import Problem, in_a_line
from plait.tensors.parameters import copy_module, like

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


def handed_out(model: nn.Module, code: str) -> Callable[[], nn.Module]:
    """Makes copies of the model, with the weights that it has now. No random number is drawn.

    The model is held, not copied before it is needed; one on a GPU is copied to host memory. Raises `PlaitError` with the
    adapter's code for what is no module, or cannot be copied.
    """
    if not isinstance(model, nn.Module):
        what = f"the model is a {type(model).__name__}, not a torch.nn.Module"
        raise PlaitError(Problem(code, what, fix=("give the model itself, as it is before training",)))
    if any(p.device.type not in ("cpu", "meta") for p in model.parameters()):
        model = copy_module(model).cpu()

    def fresh() -> nn.Module:
        try:
            return copy_module(model, {id(t): t.detach().clone() for t in _plain_tensors(model)})
        except (TypeError, RuntimeError, NotImplementedError) as error:
            what = f"the {type(model).__name__} cannot be copied: {in_a_line(error)}"
            why = "each process trains a copy of the model it was given"
            fix = ("dataclasses.replace(job, model=lambda: …)    a function that makes the model",)
            raise PlaitError(Problem(code, what, why=why, fix=fix)) from error

    return fresh


def _plain_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Its tensors that are no parameters. torch copies them storage by storage, which a model of fake tensors has not."""
    yield from model.buffers()
    for module in model.modules():
        yield from (t for t in vars(module).values() if type(t) is Tensor)
