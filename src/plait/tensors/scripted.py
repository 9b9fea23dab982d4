"""Modules compiled by `torch.jit.script` or `torch.jit.trace`: nothing can be hooked into them, so they stay whole."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from plait.config.errors import Problem
from plait.config.keys import SAME_LOSS
from plait.config.plan import Plan


def is_scripted(module: nn.Module) -> bool:
    """Whether its code is TorchScript's."""
    return isinstance(module, torch.jit.ScriptModule)


def plain(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules with their names, each once, without those that torch.jit has compiled."""
    compiled = {id(inner) for module in model.modules() if is_scripted(module) for inner in module.modules()}
    return ((name, module) for name, module in model.named_modules() if id(module) not in compiled)


def refused(plan: Plan, names: Iterable[str], written: Iterable[str]) -> Problem | None:
    """P071 when one of the compiled modules writes a buffer, or a plan would have to take one apart. `written`: buffers that forward
    writes."""
    names = list(names)
    first, kept = next(iter(names), None), next((n for n in written if n.rpartition(".")[0] in names), None)
    if kept is not None:
        what, why = (
            f"{kept} is written by a module that torch.jit has compiled",
            "plait cannot synchronize it or put it back",
        )
        return Problem("P071", what, why=why, fix=("the module as it was before torch.jit.script or torch.jit.trace",))
    axes = "fsdp", *reversed(SAME_LOSS), "ep"
    needs = [f"{axis}={getattr(plan, axis)}" for axis in axes if getattr(plan, axis) > 1]
    needs += ["offload=all"] if plan.offload == "all" else []
    if first is None or not needs:
        return None
    why = "torch.jit has compiled it: its parameters and its calls cannot be replaced by parts of them"
    fix = (f'--plan "dp={plan.devices}"', "the module as it was before torch.jit.script or torch.jit.trace")
    return Problem("P071", f"{first or 'the model'} cannot be taken apart, which {needs[0]} needs", why=why, fix=fix)


def buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers of the compiled modules, by name."""
    parts = [(name, module) for name, module in model.named_modules() if is_scripted(module)]
    named = {f"{name}.{inner}".lstrip("."): b for name, module in parts for inner, b in module.named_buffers()}
    return list(named.items())
