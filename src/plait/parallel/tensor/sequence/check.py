"""Which units may run on a stretch of the sequence between their regions: found, and checked before it is done.

Outside its regions a transformer's block computes every position alone: norms, dropout, residuals. A unit is run once
on the whole and then on a rank's stretch of its hidden states, in one process. As in `parallel/tensor/find/check.py`, maps
return the same random numbers in both runs, in float64. Where a region begins, the stretch must be that of what the
region was given in the whole run, and becomes it; where it ends, the rank gets its stretch of what the row returned.
If what the unit returns is the stretch of what it returned in the whole, and nothing else told the ranks apart, its code
works row by row.

A region may begin at its columns, or at the module that they lie in, when its code looks at how long the sequence is.
Gradients that come from stretches are shares of a sum over the ranks: of parameters they are added up once after
backward. Nothing adds up those of other tensors, so a unit that uses one of these on stretches stays as it is.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from plait.config.errors import in_a_line
from plait.model.slices import ColumnRowPair, PositionwiseUnit, RegionArgument, RegionBorder, Slices
from plait.parallel.tensor.find.check import MapInput, OtherCode, ReplayedModule, ReplayedRun, Values
from plait.parallel.tensor.find.linear_maps import Map
from plait.parallel.tensor.find.trace import DataflowTrace, snapshot
from plait.parallel.tensor.sequence.runtime import GlobalShape, put, rows_of
from plait.tensors.float64 import near
from plait.tensors.opaque_code import UNEVEN, CodeLine, OtherNumbers, elsewhere, other_outcomes, uneven, unevenly
from plait.tensors.rows import Ranges, Rows
from plait.tensors.torch_private import tree_map_only

DEEP = 4
"""A unit with more regions tries all at the columns, or all at the modules around them."""
NO_SEQUENCE = "nothing that it is given has a dim of a sequence that it keeps"


class UnitOnRows(ReplayedModule):
    """One call of a unit, run whole and then on stretches: whether it runs on stretches, and how."""

    than = "on a stretch than on the whole"
    base: ReplayedRun
    """What the whole run showed."""
    values_of_maps: Values
    """What maps return in both."""

    def __init__(self, follow: DataflowTrace, number: int, maps: Mapping[str, Map], groups: list[ColumnRowPair]):
        super().__init__(follow, number, maps)
        self.groups = groups
        self.column = {name: g for g in groups for name in g.columns}
        self.row = {g.row: g for g in groups}
        self.around = {g.row: self._modules_around(g) for g in groups}
        self.before: dict[tuple[str, int], tuple[Any, Any]] = {}
        self.cut: tuple[Rows, int] | None = None
        self.hidden: tuple[int | str, int] = (0, 0)
        self.level: dict[str, ColumnRowPair] = {}
        self.posing = False
        self.factors: tuple[float, float] | None = None
        """What the last position of its hidden states, and the others, are multiplied by."""
        self.fresh()

    def fresh(self) -> None:
        self.entered: dict[str, dict[tuple[str, int | str], int]] = {}
        """By the row of a region: (module, argument) -> dim of what is gathered where it begins."""
        self.gathered: dict[int, tuple[Tensor, Tensor]] = {}
        self.full: dict[int, Tensor] = {}
        """What is gathered, whole."""
        self.stretches: list[Tensor] = []
        """What was computed from stretches."""
        self.wholes: list[Tensor] = []
        self.alone: set[str] = set()
        """Maps that are not cut, and run on stretches."""

    def _modules_around(self, group: ColumnRowPair) -> list[str]:
        """Modules inside the unit that all columns lie in, the innermost first."""
        paths = [name.split(".") for name in group.columns]
        same = [step for step, *others in zip(*(path[:-1] for path in paths)) if all(o == step for o in others)]
        least = self.name.count(".") + 1
        return [".".join(same[:n]) for n in range(len(same), least, -1)]

    # — what replaces what in a run on a stretch —

    def _arguments(self, shown: ReplayedRun, groups: tuple[ColumnRowPair, ...], rank: int) -> tuple[Any, Any]:
        known: dict[int, Tensor] = {}
        self.others: list[Tensor] = []

        def fresh(t: Tensor) -> Tensor:
            if id(t) not in known:
                plain = t.detach().clone()
                known[id(t)] = plain.requires_grad_().clone() if t.is_floating_point() else plain
                self.others += [known[id(t)]] if t.requires_grad else []
            return known[id(t)]

        key, dim = self.hidden
        args, kwargs = snapshot(self.frame.args), snapshot(self.frame.kwargs)
        if self.factors is not None:
            args, kwargs = put(args, kwargs, key, uneven(self._argument(key), dim, self.factors))
        args, kwargs = tree_map_only(Tensor, fresh, (args, kwargs))
        if self.cut is not None:
            whole = kwargs[key] if isinstance(key, str) else args[key]
            self.others = [t for t in self.others if t is not whole]
            args, kwargs = put(args, kwargs, key, self._mine(whole, dim))
        shown.arguments |= {k: v for k, v in (*enumerate(args), *kwargs.items()) if isinstance(v, Tensor)}
        return args, kwargs

    @contextmanager
    def listened(self) -> Iterator[None]:
        """Regions begin: the whole run notes what they are given, a run on a stretch gives them that."""
        counts: dict[str, int] = {}
        handles = []
        modules = dict(self.module.named_modules(prefix=self.name))
        for name in dict.fromkeys([*self.column, *(name for names in self.around.values() for name in names)]):

            def enter(_: object, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> Any:
                number = counts[name] = counts.get(name, -1) + 1
                if self.cut is None:
                    self.before[name, number] = args, kwargs
                    return None
                return self._begins(name, number, args, kwargs) if name in self.level else None

            handles.append(modules[name].register_forward_pre_hook(enter, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begins(self, name: str, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if (name, number) not in self.before:
            raise OtherCode(f"{name} is called more often {self.than}")
        before, group = self.before[name, number], self.level[name]
        for key, value in (*enumerate(args), *kwargs.items()):
            whole = (before[1] if isinstance(key, str) else before[0])[key]
            mine = rows_of(value)
            if not isinstance(mine, Tensor) or mine.shape == whole.shape:
                continue
            dim = self.along(name, mine, whole)
            if id(value) not in self.gathered:
                full = whole.detach().clone().requires_grad_()
                self.gathered[id(value)] = value, full
                self.full[id(full)] = full
                self.stretches.append(mine)
            args, kwargs = put(args, kwargs, key, self.gathered[id(value)][1])
            if self.entered.setdefault(group.row, {}).setdefault((name, key), dim) != dim:
                raise OtherCode(f"{name} is given sequences along different dims")
        return args, kwargs

    def along(self, name: str, part: Tensor, whole: Tensor) -> int:
        """The dim along which `part` is this rank's stretch of `whole`."""
        assert self.cut is not None
        rows, rank = self.cut
        dims = [d for d, (m, n) in enumerate(zip(whole.shape, part.shape)) if m != n]
        if whole.dim() != part.dim() or len(dims) != 1 or whole.shape[dims[0]] != rows.length:
            raise OtherCode(f"on a stretch {name} is given {list(part.shape)}, on the whole {list(whole.shape)}")
        if not near(part, rows.take(whole, dims[0], rank)):
            raise OtherCode(f"on a stretch {name} is given something else than that stretch of the whole")
        return dims[0]

    def _answer(self, call: MapInput, value: object, features: Ranges | None) -> Any:
        """What a map returns: columns all rows, a row this rank's, others those that they are given."""
        if self.cut is None:
            return super()._answer(call, value, features)
        name, number, x = call
        before = next(x for other, at, x in self.base.given if (other, at) == (name, number))
        x, copied = rows_of(x), tree_map_only(Tensor, torch.clone, value)
        if (name in self.column or name in self.row) and not near(x, before):
            raise OtherCode(f"on a stretch {name} is given something else")
        if name in self.column:
            self.wholes += [x] if id(x) not in self.full else []
            if self.column[name].container != name:
                return copied
            return (self._mine(copied[0], self.dim_of(self.column[name])), *copied[1:])
        if name in self.row:
            return self._mine(copied, self.dim_of(self.row[name]))
        if name not in self.maps or self.maps[name].weight.dim() != 2:
            raise OtherCode(f"{name} is not cut and may look at several positions")
        if x.shape == before.shape:
            raise OtherCode(f"{name} is computed whole, between stretches")
        self.alone.add(name)
        self.stretches.append(x)
        return self._mine(copied, self.along(name, x, before))

    def _mine(self, whole: Tensor, dim: int) -> Tensor:
        assert self.cut is not None
        rows, rank = self.cut
        mine = rows.take(whole, dim, rank)
        return GlobalShape.of(mine, dim, rows.length) if self.posing else mine

    def dim_of(self, group: ColumnRowPair) -> int:
        dims = set(self.entered.get(group.row, {}).values())
        if len(dims) != 1:
            raise OtherCode(f"the region of {group.row} is given no stretch" if not dims else "its dims differ")
        return dims.pop()

    def checked(self, known: list[PositionwiseUnit], ranks: int, samples: int, handed: set[int]) -> PositionwiseUnit:
        """How it runs on stretches. `OtherCode` when it does not."""
        places = list(self._places(samples, handed))
        places.sort(key=lambda place: place not in [(one.key, one.dim) for one in known])
        if not places:
            raise OtherCode(NO_SEQUENCE)
        try:
            self.values_of_maps = self.values(1)
            with OtherNumbers() as numbers:
                self._run_whole()
        except Exception as error:
            raise OtherCode(f"its code cannot be run alone ({type(error).__name__})") from error
        reasons = []
        for self.posing, self.hidden in product((False, True), places):
            for levels in self._levels():
                try:
                    found = self._tried(levels, ranks)
                    if numbers.read:
                        self._try_with_other_numbers(found, levels, ranks, numbers.read)
                    return found
                except OtherCode as strayed:
                    reasons.append(str(strayed))
                except Exception as error:
                    lines = str(error).splitlines() or [""]
                    reasons.append(f"its code cannot run on a stretch ({type(error).__name__}: {lines[0][:120]})")
        raise OtherCode(reasons[0])

    def _run_whole(self) -> None:
        """Run on the whole: `base`, and `before`, what regions are given."""
        self.cut, self.before = None, {}
        with self.listened():
            self.base = self.run(self.values_of_maps)

    def _try_with_other_numbers(
        self, found: PositionwiseUnit, levels: dict[str, ColumnRowPair], ranks: int, read: Iterable[CodeLine]
    ) -> None:
        """`OtherCode` if the unit runs on stretches in another way, or not at all, where its code reads other numbers. `read`: the lines
        at which it reads any."""

        def run() -> OtherCode | None:
            try:
                return self._run_whole()
            except OtherCode as strayed:
                return strayed

        def compare() -> None:
            other = self._tried(levels, ranks)
            more = set(other.partial) - set(found.partial)  # fewer may be used: a layer is for some samples only
            if more or replace(other, partial=found.partial) != found:
                raise OtherCode("its code does something else on a stretch")

        usual, end = (self.base, self.before), ""
        try:
            for lines, strayed in other_outcomes(run, read):
                end = elsewhere(lines)
                if strayed is not None:
                    raise strayed
                with OtherNumbers(lines):
                    compare()
            for self.factors in UNEVEN:
                end = unevenly(self.factors)
                self._run_whole()
                compare()
        except Exception as error:
            reason = str(error) if isinstance(error, OtherCode) else in_a_line(error)
            raise OtherCode(reason + end) from error
        finally:
            (self.base, self.before), self.factors = usual, None

    def _places(self, samples: int, handed: set[int]) -> Iterator[tuple[int | str, int]]:
        """(argument, dim) that may be hidden states and their sequence: [samples, sequence, …] or [sequence, samples, …]."""
        for key, value in (*enumerate(self.frame.args), *self.frame.kwargs.items()):
            if not (isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 2):
                continue
            if not self.groups and id(value) not in handed:
                continue
            batch = next((d for d in (0, 1) if value.shape[d] == samples), None)
            if batch is not None and value.shape[1 - batch] > 1:
                yield key, 1 - batch

    def _levels(self) -> Iterator[dict[str, ColumnRowPair]]:
        """Modules at which regions begin."""
        choices = [[dict.fromkeys(g.columns, g)] for g in self.groups]
        for choice, group in zip(choices, self.groups):
            choice += [{name: group} for name in self.around[group.row]] if not self.posing else []
        picked = product(*choices) if len(choices) <= DEEP else zip(*((c[0], c[-1]) for c in choices))
        for some in picked:
            yield {name: group for one in some for name, group in one.items()}

    def _tried(self, levels: dict[str, ColumnRowPair], ranks: int) -> PositionwiseUnit:
        key, dim = self.hidden
        length = self._argument(key).shape[dim]
        rows = Rows.even(length, min(ranks, length))
        for rank in (0, len(rows.ranks) - 1):
            self.level, self.cut = levels, (rows, rank)
            self.fresh()
            leaf = {n: p.detach().clone().requires_grad_() for n, p in self.parameters.items()}
            with self.listened():
                shown = self.run(self.values_of_maps, leaf=leaf)
            returned = self._returned(shown)
            partial = self._shares(leaf)
        return PositionwiseUnit(self.name, key, dim, returned, self._borders(), posing=self.posing, partial=partial)

    def _argument(self, key: int | str) -> Tensor:
        return self.frame.kwargs[key] if isinstance(key, str) else self.frame.args[key]

    def _returned(self, shown: ReplayedRun) -> tuple[tuple[int, int], ...]:
        """(leaf, dim) of what it returns as stretches. `OtherCode` when something else is not what it is in the whole."""
        returned = []
        if len(shown.output) != len(self.base.output):
            raise OtherCode("on a stretch it returns something else")
        for i, (a, b) in enumerate(zip(self.base.output, map(rows_of, shown.output))):
            if not isinstance(a, Tensor) or not isinstance(b, Tensor):
                if type(a) is not type(b) or (isinstance(a, (int, float, str)) and a != b):
                    raise OtherCode("on a stretch it returns something else")
                returned += [(i, self.hidden[1])] if a == self.hidden[0] and type(a) is type(self.hidden[0]) else []
            elif a.shape != b.shape:
                returned.append((i, self.along(f"the caller of {self.name}", b, a)))
                self.stretches.append(b)
            elif not near(a, b) and i in self.frame.live:
                raise OtherCode("on a stretch it returns something else")
            else:
                self.wholes.append(b)
        if not returned:
            raise OtherCode(NO_SEQUENCE)
        return tuple(returned)

    def _shares(self, leaf: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Names of parameters that are used on stretches. `OtherCode` when a gradient would not be added up as it should."""
        mine = _reached(self.stretches, [*leaf.values(), *self.others, *self.full.values()])
        whole = _reached(self.wholes, [*leaf.values(), *self.full.values()])
        cut = {c.parameter for g in self.groups for c in g.cuts}
        names = [n for n, p in leaf.items() if id(p) in mine]
        if any(id(t) in mine for t in self.others):
            raise OtherCode("it uses a learned argument besides its hidden states on stretches")
        if any(id(t) in mine | whole for t in self.full.values()):
            raise OtherCode("it uses what a region is given outside of it too")
        for name in names:
            if name in cut or id(leaf[name]) in whole:
                raise OtherCode(f"{name} is used on stretches and on the whole")
        for argument in (a for g in self.groups for a in g.arguments):
            hidden = argument.module == self.name and argument.key == self.hidden[0]
            if hidden or any((argument.module, argument.key) in given for given in self.entered.values()):
                raise OtherCode("a region uses its hidden states by another way than through its columns")
        named = {id(p): n for n, p in self.follow.model.named_parameters()}
        modules = dict(self.module.named_modules(prefix=self.name))
        names += [named[id(p)] for name in sorted(self.alone) for p in modules[name].parameters()]
        return tuple(dict.fromkeys(names))

    def _borders(self) -> tuple[RegionBorder, ...]:
        borders = []
        for group in self.groups:
            dim = self.dim_of(group)
            arguments = tuple(RegionArgument(name, key, dim) for name, key in self.entered[group.row])
            packed = group.container in group.columns  # its `out_proj` returns [samples, sequence, features] always
            borders.append(RegionBorder(group.row, arguments, 1 if packed else dim))
        return tuple(borders)


def stretched(
    follow: DataflowTrace, maps: Mapping[str, Map], slices: Slices, units: Mapping[str, str], ranks: int, samples: int
) -> Slices:
    """The slices with the units that run on stretches. `units`: name -> why not, or nothing, in the order of calls."""
    positionwise: list[PositionwiseUnit] = []
    reasons: list[tuple[str, str]] = []
    handed: set[int] = set()
    for unit, reason in units.items():
        groups = [g for g in slices.groups if _within(g.row, unit)]
        frames = [i for i, frame in enumerate(follow.frames) if frame.name == unit]
        if not frames:
            continue
        of_calls: list[PositionwiseUnit] = []
        try:
            if reason:
                raise OtherCode(reason)
            if any(not _within(name, unit) for g in groups for name in g.columns):
                raise OtherCode("a region of its goes through other units too")
            for number in frames:
                known = [*of_calls[-1:], *positionwise[-1:]]
                of_calls.append(UnitOnRows(follow, number, maps, groups).checked(known, ranks, samples, handed))
            if any(one != of_calls[0] for one in of_calls):
                raise OtherCode("its calls differ")
        except OtherCode as strayed:
            reasons += [(unit, str(strayed))] if groups else []
            continue
        positionwise.append(of_calls[0])
        for number in frames:
            handed |= {id(follow.frames[number].output[i]) for i, _ in of_calls[0].returned}
    if not any(one.borders for one in positionwise):
        positionwise = []
    return replace(slices, stretches=tuple(positionwise), unstretched=tuple(reasons))


def _within(name: str, unit: str) -> bool:
    return f"{name}.".startswith(f"{unit}.")


def _reached(ends: Iterable[Tensor], starts: list[Tensor]) -> set[int]:
    """The ids of those tensors that some of the ends were computed from."""
    ends = [t for t in ends if t.requires_grad]
    if not ends or not starts:
        return set()
    gradients = torch.autograd.grad([t.sum() for t in ends], starts, allow_unused=True, retain_graph=True)
    return {id(t) for t, gradient in zip(starts, gradients) if gradient is not None}
