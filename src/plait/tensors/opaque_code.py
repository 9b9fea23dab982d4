"""Code that trials on test tensors cannot inspect: higher-order operators, scripted modules, and branches on tensor values.

[Note: Higher-order operators]
torch runs `torch.cond`, `while_loop`, `scan` and `flex_attention` by compiling the functions that they take, and modes must not interfere.
So such a call is one opaque operator here: modes see its inputs and outputs, and it runs without them, as in plain PyTorch. It cannot
run on fake tensors.

Modules compiled by `torch.jit.script` or `torch.jit.trace` accept no hooks, so they are never sharded.

[Note: Reads of tensor values]
`if x.max() > 3:` takes one branch with the values of a trial, and may take another with those of a training step. So a trial is repeated for
each line of code that reads values, with altered values there: the opposite of a bool, another number for a number
(`try_altered_reads`).

A trial also hides the rows that a read depends on. `x.max() > 3` of some rows of `x` equals that of all rows until one row is larger. So a
trial of code that reads values is also repeated with one row scaled (`UNEVEN_FACTORS`).
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
from plait.tensors.torch_private import FakeTensor, intercept_compiled, no_modes, tree_leaves

_KEEP_SAVED: ContextVar[bool] = ContextVar("_KEEPS", default=False)


@contextmanager
def keep_saved_tensors() -> Iterator[None]:
    """Context in which a higher-order operator keeps its saved tensors, ignoring saved-tensor hooks.

    torch runs backward through its functions during the call. An activation checkpoint around it would recompute its unit within the call.

    """
    token = _KEEP_SAVED.set(True)
    try:
        yield
    finally:
        _KEEP_SAVED.reset(token)


def hide_higher_order() -> AbstractContextManager[None]:
    """Context in which calls of higher-order operators are opaque to every mode."""

    def call(name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call_higher_order(name, run, (*args, kwargs), tuple(iter_captured([a for a in args if callable(a)])))

    return intercept_compiled(call)


def call_higher_order(name: str, run: Callable[..., Any], given: tuple[Any, ...], inside: tuple[Tensor, ...]) -> Any:
    """Call a higher-order operator as one torch function, dispatching to modes and tensor subclasses first.

    `given`: its arguments, the last by name; `inside`: tensors captured by the functions among them.

    """
    tensors = [t for t in (*tree_leaves(given), *inside) if isinstance(t, Tensor)]
    if has_torch_function(tensors):
        return handle_torch_function(call_higher_order, tensors, name, run, given, inside)
    if any(isinstance(t, FakeTensor) for t in tensors):
        raise NotImplementedError(f"{name} cannot run on fake tensors")
    with no_modes(), saved_tensors_hooks(lambda t: t, lambda t: t) if _KEEP_SAVED.get() else nullcontext():
        return run(*given[:-1], **given[-1])


def iter_captured(values: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield tensors captured by functions among these values: closure variables and parameters of modules."""
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
                with suppress(ValueError):  # a variable without a value yet
                    yield from iter_captured(cell.cell_contents, seen)


def is_scripted(module: nn.Module) -> bool:
    """Return whether the module is TorchScript."""
    return isinstance(module, torch.jit.ScriptModule)


def iter_unscripted(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with their names, each once, without those compiled by torch.jit."""
    compiled = {id(inner) for module in model.modules() if is_scripted(module) for inner in module.modules()}
    return ((name, module) for name, module in model.named_modules() if id(module) not in compiled)


def find_scripted_problem(plan: Plan, names: Iterable[str], written: Iterable[str]) -> Problem | None:
    """P071 if a compiled module writes a buffer, or if the plan must shard a compiled module. `written`: buffers written by forward."""
    names = list(names)
    first, kept = next(iter(names), None), next((n for n in written if n.rpartition(".")[0] in names), None)
    if kept is not None:
        what, why = (
            f"{kept} is written by a module that torch.jit has compiled",
            "plait can neither synchronize nor restore it",
        )
        return Problem("P071", what, why=why, fix=("use the module without torch.jit.script or torch.jit.trace",))
    axes = "fsdp", *reversed(SAME_LOSS), "ep"
    needs = [f"{axis}={getattr(plan, axis)}" for axis in axes if getattr(plan, axis) > 1]
    needs += ["offload=all"] if plan.offload == "all" else []
    if first is None or not needs:
        return None
    why = "torch.jit has compiled it, so its parameters and calls cannot be replaced by shards"
    fix = (f'--plan "dp={plan.devices}"', "use the module without torch.jit.script or torch.jit.trace")
    return Problem("P071", f"{first or 'the model'} cannot be sharded, which {needs[0]} needs", why=why, fix=fix)


def list_scripted_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers of the compiled modules, by name."""
    parts = [(name, module) for name, module in model.named_modules() if is_scripted(module)]
    named = {f"{name}.{inner}".lstrip("."): b for name, module in parts for inner, b in module.named_buffers()}
    return list(named.items())


T = TypeVar("T")
READ_FUNCTIONS = frozenset((
    "item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__contains__", "is_nonzero", "equal", "allclose",
))  # fmt: skip
"""Functions through which code reads tensor values."""
MAX_READS = 1000
"""Reads at one line after which a trial stops, since altered values may make a loop endless."""
UNEVEN_FACTORS = ((4096.0, 1.0), (4096.0, 2.0**-12), (1.0, 2.0**-12), (0.0, 1.0), (1.0, 0.0))
"""(factor of the last row of a trial, factor of the other rows)."""
_OWN = str(Path(__file__).parents[1])
_BELOW = (torch.overrides.__file__, torch.Tensor.__contains__.__code__.co_filename)


class CodeLine(NamedTuple):
    """A line of the job's code, or of a library's."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number}"


Lines = frozenset[CodeLine]


class AlteredReads(TorchFunctionMode):
    """Mode in which reads of tensor values at `lines` of code return altered values. `read`: line -> number of reads."""

    def __init__(self, lines: Lines = frozenset()):
        super().__init__()
        self.lines, self.read = lines, dict[CodeLine, int]()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        value = func(*args, **(kwargs or {}))
        line = _find_reading_line() if getattr(func, "__name__", "") in READ_FUNCTIONS else None
        if line is None:
            return value
        self.read[line] = self.read.get(line, 0) + 1
        if line not in self.lines:
            return value
        if self.read[line] > MAX_READS:
            raise RecursionError(f"{line} is reached again and again")
        return _alter(value)


def _find_reading_line() -> CodeLine | None:
    """Return the line that reads; None if it is plait's own code."""
    frame = inspect.currentframe()
    while frame and (
        frame.f_code is _find_reading_line.__code__
        or frame.f_code.co_name == "__torch_function__"
        or frame.f_code.co_filename in _BELOW
    ):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_OWN):
        return None
    return CodeLine(frame.f_code.co_filename, frame.f_lineno)


def _alter(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return 7.0 * abs(value) + 3.0
        case list():
            return [_alter(one) for one in value]
        case np.ndarray():
            return ~value if value.dtype == bool else value + 1
    return value


def try_altered_reads(run: Callable[[], T], read: Iterable[CodeLine]) -> Iterator[tuple[Lines, T]]:
    """Yield (lines, result of `run`) for altered reads at each line of `read`.

    A branch may read values at further lines; these are altered too. Runs that raise, as an assertion does, are skipped.

    """
    known = set(read)
    waiting = [frozenset((line,)) for line in read]
    while waiting:
        mode = AlteredReads(waiting.pop(0))
        try:
            with mode:
                result = run()
        except Exception:
            continue
        yield mode.lines, result
        waiting += [mode.lines | {line} for line in mode.read if line not in known]  # lines of a branch not taken before
        known |= mode.read.keys()


def scale_unevenly(x: torch.Tensor, dim: int, factors: tuple[float, float]) -> torch.Tensor:
    """Return `x` with its last row along `dim`, and its other rows, multiplied by `factors` (`UNEVEN_FACTORS`)."""
    last, others = factors
    sizes = torch.full((x.shape[dim],), others, dtype=x.dtype)
    sizes[-1:] = last
    return x * sizes.view(-1, *[1] * (x.dim() - 1 - dim % x.dim()))


def format_read_lines(lines: Lines) -> str:
    """Return the end of a message that lists the lines with altered reads; "" without any."""
    return f", if other values are read at {' and '.join(map(str, sorted(lines)))}" if lines else ""


def format_uneven_rows(factors: tuple[float, float]) -> str:
    """Return the end of a message that states the scaled rows (`UNEVEN_FACTORS`)."""
    return f", if one position is scaled by {factors[0]:g} and the others by {factors[1]:g} (its code reads tensor values)"
