"""One call of a unit, on the whole and on a rank's stretch of the sequence, in one process: see `parallel/tensor/sequence/check.py`.

Where a region begins, a run on a stretch compares what it is given with the stretch of what the whole run was given,
and goes on with that whole; its row returns this rank's rows. Maps return the same random numbers in both runs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from plait.model.slices import ColumnRowPair
from plait.parallel.tensor.find.calls import snapshot
from plait.parallel.tensor.find.check import ABSOLUTE, RELATIVE, OtherCode, ReplayedModule, ReplayedRun, Values
from plait.parallel.tensor.find.linear_maps import Map
from plait.parallel.tensor.find.trace import DataflowTrace
from plait.parallel.tensor.sequence.lazy import GlobalShape, rows_of
from plait.parallel.tensor.sequence.runtime import put
from plait.tensors.rows import Rows
from plait.tensors.torch_private import tree_map_only


class OnRows(ReplayedModule):
    """One call of a unit: run whole, then on stretches."""

    base: ReplayedRun
    """What the whole run showed."""
    made: Values
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
        self.fresh()

    def fresh(self) -> None:
        """Before a run."""
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

    def _arguments(self, seen: ReplayedRun, groups: tuple[ColumnRowPair, ...], rank: int) -> tuple[Any, Any]:
        known: dict[int, Tensor] = {}
        self.others: list[Tensor] = []

        def fresh(t: Tensor) -> Tensor:
            if id(t) not in known:
                plain = t.detach().clone()
                known[id(t)] = plain.requires_grad_().clone() if t.is_floating_point() else plain
                self.others += [known[id(t)]] if t.requires_grad else []
            return known[id(t)]

        args, kwargs = tree_map_only(Tensor, fresh, (snapshot(self.frame.args), snapshot(self.frame.kwargs)))
        if self.cut is not None:
            key, dim = self.hidden
            whole = kwargs[key] if isinstance(key, str) else args[key]
            self.others = [t for t in self.others if t is not whole]
            args, kwargs = put(args, kwargs, key, self._mine(whole, dim))
        seen.arguments |= {k: v for k, v in (*enumerate(args), *kwargs.items()) if isinstance(v, Tensor)}
        return args, kwargs

    @contextmanager
    def listened(self) -> Iterator[None]:
        """Regions begin: the whole run notes what they are given, a run on a stretch gives them that."""
        counts: dict[str, int] = {}
        handles = []
        modules = dict(self.module.named_modules(prefix=self.name))
        for name in dict.fromkeys([*self.column, *(name for names in self.around.values() for name in names)]):

            def enter(_: Any, args: Any, kwargs: Any, name: str = name) -> Any:
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

    def _begins(self, name: str, number: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if (name, number) not in self.before:
            raise OtherCode(f"{name} is called more often on a stretch than on the whole")
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

    def _returning(self, seen: ReplayedRun, values: Any, cuts: Any, rank: int) -> Callable[..., Any]:
        if self.cut is None:
            return super()._returning(seen, values, cuts, rank)
        before = {(name, number): x for name, number, x in self.base.given}
        counts: dict[str, int] = {}

        def make(name: str, module: Any, forward: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                at = name, counts.setdefault(name, 0)
                counts[name] += 1
                if at not in values:
                    raise OtherCode(f"{name} is called more often on a stretch than on the whole")
                return self._answer(name, next(iter((*args, *kwargs.values()))), before[at], values[at])

            return call

        return make

    def _answer(self, name: str, given: Tensor, before: Tensor, value: Any) -> Any:
        """What a map returns: columns all rows, a row this rank's, others those that they are given."""
        given, copied = rows_of(given), tree_map_only(Tensor, torch.clone, value)
        if (name in self.column or name in self.row) and not near(given, before):
            raise OtherCode(f"on a stretch {name} is given something else")
        if name in self.column:
            self.wholes += [given] if id(given) not in self.full else []
            if self.column[name].container != name:
                return copied
            return (self._mine(copied[0], self.dim_of(self.column[name])), *copied[1:])
        if name in self.row:
            return self._mine(copied, self.dim_of(self.row[name]))
        if name not in self.maps or self.maps[name].weight.dim() != 2:
            raise OtherCode(f"{name} is not cut and may look at several positions")
        if given.shape == before.shape:
            raise OtherCode(f"{name} is computed whole, between stretches")
        self.alone.add(name)
        self.stretches.append(given)
        return self._mine(copied, self.along(name, given, before))

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


def near(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and format hold the same numbers, up to rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, RELATIVE, ABSOLUTE, True))
