"""Running units on stretches of the sequence, between the regions that are cut into slices (sequence parallelism).

A unit that works row by row outside its regions is given this rank's rows of the hidden states. Where a region begins
they are gathered, where it ends a rank's rows of the sum are all it gets: together these two send what the one sum over
the ranks sends without stretches, and what is between regions is computed and kept once, not on every rank. See
`parallel/tensor/strategy.py` for the technique, `parallel/tensor/sequence/check.py` for which units these are.

From unit to unit rows are handed on as they are. To the model's code around units they are a `LazyGather`: a tensor with the
shape of the whole, which is gathered when something asks for its numbers. What an embedding hands on that is cut by words
is `PartialSum` until then: each rank's share of a sum, of which a unit on stretches gets its rows.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plait.model.slices import PositionwiseUnit, Slices
from plait.parallel.tensor.sequence.lazy import (
    GlobalShape,
    Lazy,
    LazyGather,
    PartialSum,
    SequenceCollectives,
    plain,
    rows_of,
)
from plait.randomness.sub_block import Axis, HeldRows
from plait.tensors.fake import is_unknown
from plait.tensors.modules import own_forward
from plait.tensors.rows import Rows
from plait.tensors.torch_private import leaves, tree_flatten, tree_map, tree_unflatten


class SequenceParallelUnits(SequenceCollectives):
    """The units on stretches in the model of one rank."""

    def __init__(self, model: nn.Module, slices: Slices, group: ProcessGroup):
        super().__init__(group)
        self.model, self.slices = model, slices
        self.rows: Rows | None = None
        """Who has which rows in the unit that runs now."""
        self.coming: Rows | None = None
        self.posing = False
        """Whether that unit's sequences pose as wholes."""
        self.units = [_Unit(self, one) for one in slices.stretches]
        self.borders = {border.row: border for one in slices.stretches for border in one.borders}
        """By the row of a region."""

    def wrap(self) -> list[Any]:
        """Units on stretches know whose rows they run on; also when they are recomputed. After their regions are made.

        Returns the handles of hooks that gather what other stages get.
        """
        handles = []
        for unit in self.units:
            module = self.model.get_submodule(unit.on.unit)
            module.forward = _Inside(self, unit.on, module)
            if unit.on.crosses:  # before any other hook
                handles.append(module.register_forward_hook(unit.gather))
        return handles

    def install(self, units: Iterable[str], heads: Iterable[str]) -> list[Any]:
        """From now on units get rows. After all other hooks on units: these must see plain tensors."""
        on = {unit.on.unit: unit for unit in self.units}
        if not on and not self.slices.owed:
            return []
        heads = tuple(heads)
        handles = [self.model.register_forward_hook(_ended, prepend=True)]
        for name in dict.fromkeys((*on, *units, *heads)):
            module = self.model.get_submodule(name)
            if name not in on:
                enter = self._head if name in heads else _whole
                handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
                continue
            handles.append(module.register_forward_pre_hook(on[name].enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(on[name].leave))
        for name in self.slices.owed:
            handles.append(self.model.get_submodule(name).register_forward_hook(self._owing))
        return handles

    def _owing(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """An embedding hands on a share of a sum."""
        return None if is_unknown(output) else PartialSum.of(output, self)

    def _head(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A head cut by words begins a region of its own, and none ends there."""
        late = args[0] if args and isinstance(args[0], LazyGather) and args[0].gathered is None else None
        module.__dict__["_gathered"] = late is not None
        if late is None:
            return _whole(module, args, kwargs)
        return (self.entered(late.local, late.cut, late.rows), *args[1:]), kwargs

    def __call__(self, place: str, dim: int, whole: int | None, local: int) -> Axis | None:
        """A rule for `randomness/sub_block.py`: what a unit on stretches draws."""
        if self.rows is None or (place, dim) not in self.slices.drawn:
            return None
        return HeldRows(self.rows, self.group.rank(), self.slices.drawn)(place, dim, whole, local)

    @property
    def _here(self) -> Rows:
        """Who has which rows where a region begins or ends."""
        rows = self.rows or self.coming
        assert rows is not None
        return rows

    def split(self, length: int) -> Rows:
        """Who has which rows of a sequence."""
        return Rows.even(length, self.group.size())

    def begin(self, x: Tensor, dim: int) -> Tensor:
        """All rows of what a region begins with."""
        return self.entered(rows_of(x), dim, self._here)

    def end(self, x: Tensor, dim: int) -> Tensor:
        """What its unit gets of the sum."""
        return self.posed(self.left(x, dim, self._here), dim)

    def posed(self, mine: Tensor, dim: int) -> Tensor:
        """This rank's rows, as its unit sees them."""
        return GlobalShape.of(mine, dim, self._here.length) if self.posing else mine

    def where(self, dim: int) -> tuple[int, Rows, ProcessGroup]:
        """What a collective of this rank's rows needs to know where a region begins or ends."""
        return dim, self._here, self.group


def _whole(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(leaf, Lazy) for leaf in leaves((args, kwargs))):
        return tree_map(plain, (args, kwargs))
    return None


def _ended(module: nn.Module, args: tuple[Any, ...], output: object) -> Any:
    return tree_map(plain, output) if any(isinstance(leaf, Lazy) for leaf in leaves(output)) else None


class _Unit:
    """What stands before and after a unit on stretches."""

    def __init__(self, parallel_units: SequenceParallelUnits, stretched: PositionwiseUnit):
        self.parallel_units, self.on = parallel_units, stretched
        self.rows: Rows | None = None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key, dim, parallel_units = self.on.key, self.on.dim, self.parallel_units
        hidden = kwargs[key] if isinstance(key, str) else args[key]
        if isinstance(hidden, PartialSum):
            hidden = hidden.stretch(dim, parallel_units.split(hidden.shape[dim]))
        if isinstance(hidden, LazyGather) and hidden.cut == dim:
            local, rows = hidden.mine(), hidden.rows
        else:
            hidden = plain(hidden)
            rows = parallel_units.split(hidden.shape[dim])
            local = parallel_units.taken(hidden, dim, rows)
        self.rows = parallel_units.coming = rows
        put = lambda k, value: local if k == key else tree_map(plain, value)  # noqa: E731
        return tuple(put(i, a) for i, a in enumerate(args)), {k: put(k, a) for k, a in kwargs.items()}

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> Any:
        """What the next unit gets, or the code between them, is a whole that is not gathered yet."""
        return self._each(output, partial(LazyGather.of, by=self.parallel_units))

    def gather(self, module: nn.Module, args: tuple[Any, ...], output: object) -> Any:
        """What another stage gets is whole."""
        return self._each(output, self.parallel_units.gathered)

    def _each(self, output: object, make: Callable[[Tensor, int, Rows], Tensor]) -> Any:
        rows, self.rows = self.rows, None
        if rows is None:
            return None
        leaves(output)  # makes trees of dataclasses
        flat, spec = tree_flatten(output)
        for i, dim in self.on.returned:
            flat[i] = make(flat[i], dim, rows) if isinstance(flat[i], Tensor) else flat[i]
        return tree_unflatten(flat, spec)


class _Inside:
    """A unit's own forward on stretches. What it is given remembers whose rows it is of: it may run again in backward."""

    def __init__(self, parallel_units: SequenceParallelUnits, stretched: PositionwiseUnit, module: nn.Module):
        self.parallel_units, self.on, self.own = parallel_units, stretched, own_forward(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parallel_units, on = self.parallel_units, self.on
        hidden: Tensor = kwargs[on.key] if isinstance(on.key, str) else args[on.key]
        rows: Rows = vars(hidden).setdefault("whose_rows", parallel_units.coming)
        before = parallel_units.rows, parallel_units.posing
        parallel_units.rows, parallel_units.posing = rows, on.posing
        if on.posing:
            args, kwargs = put(args, kwargs, on.key, GlobalShape.of(hidden, on.dim, rows.length))
        try:
            output = self.own(*args, **kwargs)
            return tree_map(rows_of, output) if on.posing else output
        finally:
            parallel_units.rows, parallel_units.posing = before


def put(args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str, value: object) -> tuple[Any, Any]:
    """The arguments with another value at one place."""
    if isinstance(key, str):
        return args, {**kwargs, key: value}
    return (*args[:key], value, *args[key + 1 :]), kwargs
