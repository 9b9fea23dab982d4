"""Units: the submodules a model is split into, and what each costs. Nothing of this is written by the user.

Choosing starts at the whole model and opens a module when it is never called itself (a `ModuleList`), or when it is
large against the whole and its parts can stand alone. Blocks, which are sisters of one class in a list, stay whole:
a transformer of four layers has four units there, though each is a quarter of it. What is no unit is code between
units, and a parameter that only such code uses belongs to the rest.

`model/meter.py` measures runs of the model with the units chosen here.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from torch import nn

from plait.config.errors import PlaitError, Problem, did_you_mean
from plait.model.meter import Metered, homes
from plait.model.operations import OperationCounts, UnitCall
from plait.tensors.opaque_code import is_scripted
from plait.tensors.torch_private import storage_key

SMALL = 8
"""A module of more than 1/8 of the weights is opened if it can be."""
NEAR = 1.5
"""Sizes of sister blocks differ by less: one of them may hold a table of positions for all."""
ROW = 4
"""Units in a row of alike ones, of which the others are worth looking for."""
LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
KNOWN_SHOWN = 12


def choose(model: nn.Module, called: Set[str] | None = None, reused: Set[str] = frozenset()) -> dict[str, bool]:
    """Names of the modules to take as units -> whether they are blocks. None lies inside another.

    `called`: the modules that a run really called; without it, every module with a forward of its own counts.
    `reused`: those of them that it called several times, which are blocks by their use.
    """
    names = {id(module): name for name, module in model.named_modules()}
    most = _size(model) / SMALL
    chosen: dict[str, bool] = {}

    def visit(module: nn.Module, repeated: bool, alike: bool) -> None:
        name = names[id(module)]
        if is_scripted(module):
            return
        own = bool(name) and has_forward(module) and (called is None or name in called)
        if own and (not _opens(module, alike, most) or (name in reused and not _holds_blocks(module))):
            chosen[name] = repeated or name in reused
            return
        kids = _children(module)
        for kid in kids:
            sisters = [s for s in kids if s is not kid and type(s) is type(kid)] if isinstance(module, LISTS) else []
            visit(kid, bool(sisters), any(_near(_size(kid), _size(sister)) for sister in sisters))

    visit(model, False, False)
    return chosen


def _opens(module: nn.Module, alike: bool, most: float) -> bool:
    """Whether to look for units inside a module that is called itself.

    Sisters of about one size are blocks, whatever is inside (the experts of a layer). Sisters of unequal size that hold
    blocks are stages, as in a Swin transformer. A module that uses parameters directly is opened for blocks only.
    """
    if alike or _size(module) <= most or not _children(module):
        return False
    return _holds_blocks(module) or not any(True for _ in module.parameters(recurse=False))


def _holds_blocks(module: nn.Module) -> bool:
    for inner in module.modules():
        if isinstance(inner, LISTS):
            classes = Counter(type(kid) for kid in _children(inner) if _children(kid))
            if any(count > 1 for count in classes.values()):
                return True
    return False


def _children(module: nn.Module) -> list[nn.Module]:
    return [kid for kid in module.children() if any(True for _ in kid.parameters())]


def _near(a: int, b: int) -> bool:
    return max(a, b) <= NEAR * min(a, b)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called at all; a `ModuleList` cannot."""
    return type(module).forward is not nn.Module.forward


def chosen_again(model: nn.Module, chosen: dict[str, bool], run: Metered) -> dict[str, bool] | None:
    """Another choice, where the run shows that the first was wrong.

    A module taken for a unit may be one that the model reaches into and never calls; a module that was opened may be
    a block that the model calls again and again.
    """
    called = {call.unit for call in run.calls}
    silent = tuple(f"{name}." for name in chosen if name not in called)
    reused = {name for name, times in run.outside.items() if times > 1}
    if reused - called or (silent and any(name.startswith(silent) for name in run.outside)):
        again = choose(model, run.entered, reused)
        return None if again == chosen else again
    return None


# — the user's own choice: Job.units —


def named(model: nn.Module, patterns: Sequence[str]) -> dict[str, bool]:
    """The modules that the patterns name, as `choose` returns them. J015 when one lies inside another."""
    wanted = [_regex(pattern) for pattern in patterns]
    chosen = {
        name: False
        for name, module in model.named_modules()
        if name and has_forward(module) and not is_scripted(module) and any(r.fullmatch(name) for r in wanted)
    }
    for name in chosen:
        inner = next((other for other in chosen if other.startswith(f"{name}.")), None)
        if inner:
            raise PlaitError(Problem("J015", f"Job.units names {name} and {inner}, which lies inside it",
                                     why="a unit is not cut further", fix=(f"name only one of {name} and {inner}",)))  # fmt: skip
    groups = Counter(re.sub(r"\d+", "*", name) for name in chosen)
    return {name: groups[re.sub(r"\d+", "*", name)] > 1 for name in chosen}


def check_named(model: nn.Module, patterns: Sequence[str], runs: Sequence[Metered]) -> None:
    """J015 when a pattern names no module that the model calls."""
    called = {call.unit for run in runs for call in run.calls}
    entered = set().union(*(run.entered for run in runs))
    known = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", n) for n, _ in model.named_modules() if n in entered))
    problems = []
    for pattern in patterns:
        if not any(_regex(pattern).fullmatch(name) for name in called):
            hint = did_you_mean(pattern, [n for n in known if n][:KNOWN_SHOWN] if known else ["no module"])
            why = "a unit is a module that the forward pass calls by itself"
            problems.append(Problem("J015", f'Job.units: "{pattern}" names no called module        {hint}', why=why))
    if problems:
        raise PlaitError(problems)


def _regex(pattern: str) -> re.Pattern[str]:
    """`*` stands for anything within one part of the name: `layers.*` is `layers.3` and not `layers.3.norm`."""
    return re.compile("[^.]*".join(map(re.escape, pattern.split("*"))))


# — who owns which parameter —


def tied(model: nn.Module, units: Iterable[str]) -> set[str]:
    """Units that share a parameter, or its memory, with another unit or the rest."""
    holders: dict[int, set[str]] = {}
    for module, home in homes(model, {id(model.get_submodule(name)): name for name in units}):
        for parameter in module.parameters(recurse=False):
            holders.setdefault(storage_key(parameter), set()).add(home)
    return {home for sharing in holders.values() if len(sharing) > 1 for home in sharing if home}


# — two runs —


def in_order(runs: Iterable[list[str]]) -> list[str]:
    """The units of several runs in one order: what a later run adds stands behind what came before it there."""
    ordered: list[str] = []
    for run in runs:
        place = 0
        for name in run:
            if name not in ordered:
                ordered.insert(place, name)
            place = ordered.index(name) + 1
    return ordered


def same_calls(small: Metered, large: Metered) -> bool:
    """Whether both runs called the same units in the same order, each on the outputs of the same calls."""
    return [(c.unit, c.needs) for c in small.calls] == [(c.unit, c.needs) for c in large.calls]


def alike(calls: Sequence[UnitCall], courses: Sequence[tuple[int, ...]], closed: Set[str]) -> tuple[tuple[str, ...], ...]:
    """Units of which each computes the same as the one before it, on what that returned: their names, in rows of at least `ROW`. `courses`: what
    each call computes in each run; `closed`: units of which nothing else has a parameter."""
    times = Counter(call.unit for call in calls)
    rows: list[list[str]] = [[]]
    for i, call in enumerate(calls):
        alone = times[call.unit] == 1 and call.unit in closed and i - 1 in call.needs
        plain = alone and not (call.leaks or call.aside or call.writes or call.back is not None)
        same = plain and rows[-1] and courses[i] == courses[i - 1] and _costs(call, i) == _costs(calls[i - 1], i - 1)
        if not same:
            rows.append([])
        if plain:
            rows[-1].append(call.unit)
    return tuple(tuple(row) for row in rows if len(row) >= ROW)


def _costs(call: UnitCall, i: int) -> UnitCall:
    return replace(call, unit="", needs=tuple(n for n in call.needs if n != i - 1), work=OperationCounts())
