"""Higher-order operators such as `torch.cond`, `while_loop`, `scan` and `flex_attention`, which take functions.

torch runs each by compiling the functions, which no mode that looks at operators may disturb. So such a call is one
opaque operator here: modes see what goes in and what comes out, and it runs without them, as in plain PyTorch. On tensors
without numbers it cannot run.

Modules compiled by `torch.jit.script` or `torch.jit.trace`: nothing can be hooked into them, so they stay whole.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import handle_torch_function, has_torch_function

from plait.config.errors import Problem
from plait.config.keys import SAME_LOSS
from plait.config.plan import Plan
from plait.tensors.torch_private import FakeTensor, compiled_by, no_modes, tree_leaves

_KEEPS: ContextVar[bool] = ContextVar("_KEEPS", default=False)


@contextmanager
def keeping() -> Iterator[None]:
    """Inside, what such an operator saves for its backward pass is kept, whatever hooks want of saved tensors: torch goes through its
    functions backwards while it runs, and a checkpoint around it would compute its unit again in the midst of that."""
    token = _KEEPS.set(True)
    try:
        yield
    finally:
        _KEEPS.reset(token)


def opaque() -> AbstractContextManager[None]:
    """A context in which calls of higher-order operators are opaque to every mode."""

    def called(name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return whole(name, run, (*args, kwargs), tuple(captured([a for a in args if callable(a)])))

    return compiled_by(called)


def whole(name: str, run: Callable[..., Any], given: tuple[Any, ...], inside: tuple[Tensor, ...]) -> Any:
    """One call of a higher-order operator, as a torch function: modes and tensor subclasses are asked first.

    `given`: its arguments, the last by name; `inside`: tensors that the functions among them have captured.
    """
    tensors = [t for t in (*tree_leaves(given), *inside) if isinstance(t, Tensor)]
    if has_torch_function(tensors):
        return handle_torch_function(whole, tensors, name, run, given, inside)
    if any(isinstance(t, FakeTensor) for t in tensors):
        raise NotImplementedError(f"{name} cannot run on tensors without numbers")
    with no_modes(), saved_tensors_hooks(lambda t: t, lambda t: t) if _KEEPS.get() else nullcontext():
        return run(*given[:-1], **given[-1])


def captured(values: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Tensors that functions among these values have captured: variables around them, and parameters of modules."""
    seen = set() if seen is None else seen
    for value in tree_leaves(values):
        if isinstance(value, nn.Module):
            yield from (*value.parameters(), *value.buffers())
        elif isinstance(value, Tensor):
            yield value
        elif callable(value) and id(value) not in seen:
            seen.add(id(value))
            cells = getattr(value, "__closure__", None) or ()
            for cell in cells:
                with suppress(ValueError):  # a variable that has no value yet
                    yield from captured(cell.cell_contents, seen)


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
