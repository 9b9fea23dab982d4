"""What a container's code needs besides cut parameters to run on a slice: whole numbers divided, sizes corrected.

Code that says `view(B, T, self.num_heads, -1)` runs on a slice when `num_heads` is divided. Which numbers those are is
not told by their names: each number of the modules concerned is changed in a run of the whole, and those that change
nothing are left alone. Combinations of the others are tried, the fewest first, until one passes the check; then the
same with `Resized`, for sizes that the code computes from its input.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from plait.model.slices import ColumnRowPair, DividedNumber
from plait.parallel.tensor.find.check import ReplayedModule, Values, check

TRIES = 200
"""Combinations to try, with sizes corrected and without."""
_NO_OBJECT = (Tensor, nn.Module, int, float, complex, str, bytes, list, tuple, dict, set, type(None), type)


def adapted(
    container: ReplayedModule, group: ColumnRowPair, before: tuple[ColumnRowPair, ...]
) -> tuple[ColumnRowPair | None, str]:
    """The group with what else it needs, or None and why nothing passes. `before`: groups found in the same code."""
    wrong = check([container], (*before, group))
    if not wrong:
        return group, ""
    choices = _choices(container, group, before)
    for resize in (False, True):
        for extra in itertools.islice(_combinations(choices), TRIES):
            if not extra and not resize:
                continue
            tried = replace(group, integers=(*group.integers, *extra), resize=resize)
            if not check([container], (*before, tried)):
                return tried, ""
    return None, wrong


def _combinations(choices: list[tuple[DividedNumber, ...]]) -> Iterator[tuple[DividedNumber, ...]]:
    """Some of the numbers, each divided in one of its ways, the fewest first."""
    for count in range(len(choices) + 1):
        for some in itertools.combinations(choices, count):
            yield from itertools.product(*some)


def _choices(
    container: ReplayedModule, group: ColumnRowPair, before: tuple[ColumnRowPair, ...]
) -> list[tuple[DividedNumber, ...]]:
    """For each number that makes a difference, the ways to divide it."""
    n = len(group.cuts[0].ranges)
    sizes = {sum(length for _, length in cut.ranges[0]) for cut in group.cuts}
    own = {integer.divisor for integer in group.integers}
    divisors = sorted({n, *own, *(n // d for d in own if n % d == 0)} - {1}, reverse=True) if sizes else [n]
    fixed = {(i.module, i.path) for g in (*before, group) for i in g.integers}
    values = container.values(2)
    found = []
    for module, path, value in _numbers(container, group):
        ways = tuple(DividedNumber(module, path, d) for d in divisors if value % d == 0)
        if ways and (module, path) not in fixed and _matters(container, ways[0], values):
            found.append(ways)
    return found


def _matters(container: ReplayedModule, integer: DividedNumber, values: Values) -> bool:
    """Whether the whole computes something else, or nothing at all, with this number divided."""
    whole = container.run(values)
    alone = ColumnRowPair(container.name, (), "", (), (integer,))
    try:
        part = container.run(values, (alone,))
    except Exception:
        return True
    return bool(container.differs(whole, part, (), 0))


def _numbers(container: ReplayedModule, group: ColumnRowPair) -> Iterator[tuple[str, str, int]]:
    """(module, path, value) of whole numbers that the code between columns and row may use."""
    for name, module in _modules(container, group).items():
        for key, value in vars(module).items():
            if type(value) is int and value > 1:
                yield name, key, value
            elif not isinstance(value, _NO_OBJECT) and not callable(value) and hasattr(value, "__dict__"):
                for inner, number in vars(value).items():
                    if type(number) is int and number > 1:
                        yield name, f"{key}.{inner}", number


def _modules(container: ReplayedModule, group: ColumnRowPair) -> dict[str, nn.Module]:
    """The container, the modules around columns and row in it, and those called between them."""
    bits = sum(1 << made.bit for made in container.inside if made.name in group.columns)
    found: dict[str, Any] = {}
    around = {f for made in container.inside if made.name in (*group.columns, group.row) for f in made.parents}
    frames = container.follow.frames
    for frame in container.frames:
        if frame is frames[frame.parents[-1]] and (frame.parents[-1] in around or frame.given & bits):
            found[frame.name] = frame.module
    return found
