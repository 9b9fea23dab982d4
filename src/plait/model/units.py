"""Units: the submodules into which a model is split, found automatically.

The search starts at the complete model. It opens a module in two cases: it is never called itself (a `ModuleList`), or it has a large fraction of the
weights and its parts are independent. Blocks, which are siblings of one class in a list, stay closed: a transformer of four layers has four
units there, though each is a quarter of it. All other code is code between units. A parameter used only by such code belongs to the rest.

`model/meter.py` measures runs of the model with these units.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from torch import nn

from plait.config.errors import PlaitError, Problem, did_you_mean
from plait.model.meter import MeteredRun, iter_homes
from plait.model.operations import OperationCounts, UnitCall
from plait.tensors.opaque_code import is_scripted
from plait.tensors.torch_private import storage_key

UNIT_FRACTION = 8
"""A module with more than 1/8 of the weights is opened if possible."""
SISTER_RATIO = 1.5
"""Maximum size ratio of sibling blocks: one of them may have a table of positions for all."""
LEAST_ROW = 4
"""Minimum number of equal units in a row."""
LIST_CLASSES = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
SHOWN_NAMES = 12


def find_units(model: nn.Module, called: Set[str] | None = None, reused: Set[str] = frozenset()) -> dict[str, bool]:
    """Return the names of the modules to use as units, with whether they are blocks. None lies inside another.

    `called`: modules that a run called; without it, every module with its own forward counts. `reused`: those that it called several times, which are
    therefore blocks.
    """
    names = {id(module): name for name, module in model.named_modules()}
    most = _count_parameters(model) / UNIT_FRACTION
    chosen: dict[str, bool] = {}

    def visit(module: nn.Module, repeated: bool, alike: bool) -> None:
        name = names[id(module)]
        if is_scripted(module):
            return
        own = bool(name) and has_forward(module) and (called is None or name in called)
        if own and (not _should_open(module, alike, most) or (name in reused and not _has_blocks(module))):
            chosen[name] = repeated or name in reused
            return
        kids = _list_children(module)
        for kid in kids:
            sisters = [s for s in kids if s is not kid and type(s) is type(kid)] if isinstance(module, LIST_CLASSES) else []
            visit(kid, bool(sisters), any(_is_near(_count_parameters(kid), _count_parameters(sister)) for sister in sisters))

    visit(model, False, False)
    return chosen


def _should_open(module: nn.Module, alike: bool, most: float) -> bool:
    """Whether to search units inside a module that is called itself.

    Siblings of similar size are blocks, whatever their contents (the experts of a layer). Siblings of unequal size that contain blocks are stages,
    as in a Swin transformer. A module that uses parameters directly is opened for blocks only.
    """
    if alike or _count_parameters(module) <= most or not _list_children(module):
        return False
    return _has_blocks(module) or not any(True for _ in module.parameters(recurse=False))


def _has_blocks(module: nn.Module) -> bool:
    for inner in module.modules():
        if isinstance(inner, LIST_CLASSES):
            classes = Counter(type(kid) for kid in _list_children(inner) if _list_children(kid))
            if any(count > 1 for count in classes.values()):
                return True
    return False


def _list_children(module: nn.Module) -> list[nn.Module]:
    return [kid for kid in module.children() if any(True for _ in kid.parameters())]


def _is_near(a: int, b: int) -> bool:
    return max(a, b) <= SISTER_RATIO * min(a, b)


def _count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called; a `ModuleList` cannot."""
    return type(module).forward is not nn.Module.forward


def revise_units(model: nn.Module, chosen: dict[str, bool], run: MeteredRun) -> dict[str, bool] | None:
    """Return another choice of units if the run contradicts the first one, otherwise None.

    The model may never call a unit but use its submodules. It may also call an opened module repeatedly, as a block.
    """
    called = {call.unit for call in run.calls}
    silent = tuple(f"{name}." for name in chosen if name not in called)
    reused = {name for name, times in run.called_outside.items() if times > 1}
    if reused - called or (silent and any(name.startswith(silent) for name in run.called_outside)):
        again = find_units(model, run.called_modules, reused)
        return None if again == chosen else again
    return None


# — units set by the user: Job.units —


def find_named(model: nn.Module, patterns: Sequence[str]) -> dict[str, bool]:
    """Return the modules that match the patterns, as `find_units` does. Raises J015 if one lies inside another."""
    wanted = [_compile_pattern(pattern) for pattern in patterns]
    chosen = {
        name: False
        for name, module in model.named_modules()
        if name and has_forward(module) and not is_scripted(module) and any(r.fullmatch(name) for r in wanted)
    }
    for name in chosen:
        inner = next((other for other in chosen if other.startswith(f"{name}.")), None)
        if inner:
            raise PlaitError(Problem("J015", f"Job.units names {name} and {inner}, which lies inside it",
                                     why="a unit is not split further", fix=(f"name only one of {name} and {inner}",)))  # fmt: skip
    groups = Counter(re.sub(r"\d+", "*", name) for name in chosen)
    return {name: groups[re.sub(r"\d+", "*", name)] > 1 for name in chosen}


def check_named(model: nn.Module, patterns: Sequence[str], runs: Sequence[MeteredRun]) -> None:
    """Raise J015 if a pattern matches no module that the model calls."""
    called = {call.unit for run in runs for call in run.calls}
    entered = set().union(*(run.called_modules for run in runs))
    known = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", n) for n, _ in model.named_modules() if n in entered))
    problems = []
    for pattern in patterns:
        if not any(_compile_pattern(pattern).fullmatch(name) for name in called):
            hint = did_you_mean(pattern, [n for n in known if n][:SHOWN_NAMES] if known else ["no module"])
            why = "a unit is a module that the forward pass calls directly"
            problems.append(Problem("J015", f'Job.units: "{pattern}" names no called module        {hint}', why=why))
    if problems:
        raise PlaitError(problems)


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern. `*` matches any text within one part of a name: `layers.*` is `layers.3` and not `layers.3.norm`."""
    return re.compile("[^.]*".join(map(re.escape, pattern.split("*"))))


# — parameters of units —


def find_tied(model: nn.Module, units: Iterable[str]) -> set[str]:
    """Return the units that share a parameter, or its memory, with another unit or the rest."""
    holders: dict[int, set[str]] = {}
    for module, home in iter_homes(model, {id(model.get_submodule(name)): name for name in units}):
        for parameter in module.parameters(recurse=False):
            holders.setdefault(storage_key(parameter), set()).add(home)
    return {home for sharing in holders.values() if len(sharing) > 1 for home in sharing if home}


# — two runs —


def merge_order(runs: Iterable[list[str]]) -> list[str]:
    """Merge the units of several runs into one order. Units that a later run adds follow their predecessor there."""
    ordered: list[str] = []
    for run in runs:
        place = 0
        for name in run:
            if name not in ordered:
                ordered.insert(place, name)
            place = ordered.index(name) + 1
    return ordered


def has_same_calls(small: MeteredRun, large: MeteredRun) -> bool:
    """Whether both runs called the same units in the same order, each on the outputs of the same calls."""
    return [(c.unit, c.needs) for c in small.calls] == [(c.unit, c.needs) for c in large.calls]


def find_equal_rows(calls: Sequence[UnitCall], call_hashes: Sequence[tuple[int, ...]], closed: Set[str]) -> tuple[tuple[str, ...], ...]:
    """Return rows of at least `LEAST_ROW` units. Each unit computes the same as the previous one, on its output.

    `call_hashes`: hashes of each call in each run; `closed`: units whose parameters are not used elsewhere.
    """
    times = Counter(call.unit for call in calls)
    rows: list[list[str]] = [[]]
    for i, call in enumerate(calls):
        alone = times[call.unit] == 1 and call.unit in closed and i - 1 in call.needs
        plain = alone and not (call.leaks or call.aside or call.writes or call.back is not None)
        same = plain and rows[-1] and call_hashes[i] == call_hashes[i - 1] and _make_cost_key(call, i) == _make_cost_key(calls[i - 1], i - 1)
        if not same:
            rows.append([])
        if plain:
            rows[-1].append(call.unit)
    return tuple(tuple(row) for row in rows if len(row) >= LEAST_ROW)


def _make_cost_key(call: UnitCall, i: int) -> UnitCall:
    return replace(call, unit="", needs=tuple(n for n in call.needs if n != i - 1), work=OperationCounts())
