"""Higher-order operators such as `torch.cond`, `while_loop`, `scan` and `flex_attention`, which take functions.

torch runs each by compiling the functions, which no mode that looks at operators may disturb. So such a call is one
opaque operator here: modes see what goes in and what comes out, and it runs without them, as in plain PyTorch. On tensors
without numbers it cannot run.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import handle_torch_function, has_torch_function

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
