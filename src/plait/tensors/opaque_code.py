"""Code that a run on trial tensors does not show: operators that take functions, and code that goes by the numbers of tensors.

Higher-order operators such as `torch.cond`, `while_loop`, `scan` and `flex_attention`, which take functions.

torch runs each by compiling the functions, which no mode that looks at operators may disturb. So such a call is one
opaque operator here: modes see what goes in and what comes out, and it runs without them, as in plain PyTorch. On tensors
without numbers it cannot run.

Modules compiled by `torch.jit.script` or `torch.jit.trace`: nothing can be hooked into them, so they stay whole.

[Note: Numbers that are read]
Code that reads numbers from tensors and computes by them: other numbers in their place, to see what it computes then.

`if x.max() > 3:` is one way through the code with the numbers of a trial, and may be another with those of some step of training. What a
trial shows of the first way says nothing of the second. So a trial is repeated for each line of code at which numbers are read, with
others read there: the opposite of a truth value, and another number than a number (`other_outcomes`).

Nor does a trial show of which rows a number was read. `x.max() > 3` of some rows of `x` is the same as of all of them, until a row is larger
than the others. So a trial of code that reads numbers is also repeated with one row of another size (`UNEVEN`).
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

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


T = TypeVar("T")
READS = frozenset((
    "item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__contains__", "is_nonzero", "equal", "allclose",
))  # fmt: skip
"""Names of the functions through which code reads numbers."""
ENDLESS = 1000
"""Reads at one line after which a repetition is given up: other numbers may keep a loop from ending."""
UNEVEN = ((4096.0, 1.0), (4096.0, 2.0**-12), (1.0, 2.0**-12), (0.0, 1.0), (1.0, 0.0))
"""What the last row of a trial is multiplied by, and what the other rows are."""
_OWN = str(Path(__file__).parents[1])
_BELOW = (torch.overrides.__file__, torch.Tensor.__contains__.__code__.co_filename)


class CodeLine(NamedTuple):
    """A line of the job's code, or of a library's."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number}"


Lines = frozenset[CodeLine]


class OtherNumbers(TorchFunctionMode):
    """At `lines` of code other numbers are read from tensors than they hold. `read`: each line at which any are read."""

    def __init__(self, lines: Lines = frozenset()):
        super().__init__()
        self.lines, self.read = lines, dict[CodeLine, int]()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        value = func(*args, **(kwargs or {}))
        line = _line() if getattr(func, "__name__", "") in READS else None
        if line is None:
            return value
        self.read[line] = self.read.get(line, 0) + 1
        if line not in self.lines:
            return value
        if self.read[line] > ENDLESS:
            raise RecursionError(f"{line} is reached again and again")
        return _other(value)


def _line() -> CodeLine | None:
    """The line that reads; None if it is plait's own code."""
    frame = inspect.currentframe()
    while frame and (frame.f_code is _line.__code__ or frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename in _BELOW):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_OWN):
        return None
    return CodeLine(frame.f_code.co_filename, frame.f_lineno)


def _other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return 7.0 * abs(value) + 3.0
        case list():
            return [_other(one) for one in value]
        case np.ndarray():
            return ~value if value.dtype == bool else value + 1
    return value


def other_outcomes(run: Callable[[], T], read: Iterable[CodeLine]) -> Iterator[tuple[Lines, T]]:
    """What `run` returns for each line of `read`, at which its code reads numbers, with others read there: the lines, more than one
    where a branch reads some too, and the result. Without those for which the code raises, as an assertion does."""
    known = set(read)
    waiting = [frozenset((line,)) for line in read]
    while waiting:
        mode = OtherNumbers(waiting.pop(0))
        try:
            with mode:
                result = run()
        except Exception:
            continue
        yield mode.lines, result
        waiting += [mode.lines | {line} for line in mode.read if line not in known]  # lines of a branch that was not taken before
        known |= mode.read.keys()


def uneven(x: torch.Tensor, dim: int, factors: tuple[float, float]) -> torch.Tensor:
    """`x` with its last row along `dim`, and its others, multiplied by `factors` (`UNEVEN`)."""
    last, others = factors
    sizes = torch.full((x.shape[dim],), others, dtype=x.dtype)
    sizes[-1:] = last
    return x * sizes.view(-1, *[1] * (x.dim() - 1 - dim % x.dim()))


def elsewhere(lines: Lines) -> str:
    """The end of a message: at which lines other numbers lead to what it says; nothing where there are none."""
    return f", if other numbers are read at {' and '.join(map(str, sorted(lines)))}" if lines else ""


def unevenly(factors: tuple[float, float]) -> str:
    """The end of a message: with rows of which sizes (`UNEVEN`) what it says was found."""
    return f": its code reads numbers, and one position's were {factors[0]:g}, the others' {factors[1]:g} times as large"
