"""Code that reads numbers from tensors and computes by them: other numbers in their place, to see what it computes then.

`if x.max() > 3:` is one way through the code with the numbers of a trial, and may be another with those of some step of training. What a
trial shows of the first way says nothing of the second. So a trial is repeated for each line of code at which numbers are read, with
others read there: the opposite of a truth value, and another number than a number (`other_outcomes`).

Nor does a trial show of which rows a number was read. `x.max() > 3` of some rows of `x` is the same as of all of them, until a row is larger
than the others. So a trial of code that reads numbers is also repeated with one row of another size (`UNEVEN`).
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

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
