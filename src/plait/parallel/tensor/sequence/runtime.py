"""Running units on stretches of the sequence, between the regions that are cut into slices (sequence parallelism).

A unit that works row by row outside its regions is given this rank's rows of the hidden states. Where a region begins
they are gathered, where it ends a rank's rows of the sum are all it gets: together these two send what the one sum over
the ranks sends without stretches, and what is between regions is computed and kept once, not on every rank. See
`parallel/tensor/strategy.py` for the technique, `parallel/tensor/sequence/check.py` for which units these are.

From unit to unit rows are handed on as they are. To the model's code around units they are a `LazyGather`: a tensor with the
shape of the whole, which is gathered when something asks for its numbers. What an embedding hands on that is cut by words
is `PartialSum` until then: each rank's share of a sum, of which a unit on stretches gets its rows.

[Note: Rows and shares under the shape of the whole]
Tensors with the shape of a whole of which a rank holds its rows of the sequence, or its share of a sum.

`GlobalShape`, inside a unit: a block that is one module reads `batch, length, width = x.shape` and shapes queries and
keys by it. In a region these are whole, outside of it x is a stretch. So x has the shape of the whole, and whatever is
done to it is done to this rank's rows. That this is right for what the unit does is not known here:
`parallel/tensor/sequence/check.py` has tried it.

`LazyGather`, between units, where nothing was tried: what a unit returned. The next unit takes its rows, and whatever
else is done with it is done with the whole, which is gathered then.

`PartialSum`, between units: what an embedding returned whose words are cut over the ranks. Every rank has looked up the
words that it holds, and zeros for the others; the sum of these shares is the embedding. If the next unit runs on
stretches, a rank needs the sum of its rows only, which is half of what the sum of all rows sends. What is linear is done
to the shares (positions are added to the first rank's alone, a mask drawn for the whole is multiplied with each), a unit
on stretches gets its rows of the sum, and whatever else is done with it is done with the sum, which is made then.
Gradients: what is whole has its whole gradient on every rank, and so have a share and what is added to it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plait.model.slices import PositionwiseUnit, Slices
from plait.randomness.distributions import dropout_call
from plait.randomness.sub_block import Axis, HeldRows
from plait.tensors import collectives
from plait.tensors.fake import is_unknown
from plait.tensors.modules import own_forward
from plait.tensors.rows import Rows
from plait.tensors.sharded_tensor import Shaped, lengthened
from plait.tensors.torch_private import (
    WrapperTensor,
    leaves,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    version,
)


class SequenceCollectives:
    """What the ranks of a group send each other of tensors of which each holds its `rows` of `dim`, or a share of a sum."""

    def __init__(self, group: ProcessGroup):
        self.group = group

    def taken(self, x: Tensor, dim: int, rows: Rows) -> Tensor:
        """This rank's rows of a whole that all ranks have."""
        return collectives.part(x, dim, rows, self.group)

    def gathered(self, x: Tensor, dim: int, rows: Rows) -> Tensor:
        """The whole, for code that does the same with it on all ranks."""
        return collectives.gather(x, dim, rows, self.group)

    def entered(self, x: Tensor, dim: int, rows: Rows) -> Tensor:
        """The whole, where a region begins."""
        return collectives.gather_partial(x, dim, rows, self.group)

    def left(self, x: Tensor, dim: int, rows: Rows) -> Tensor:
        """This rank's rows of the sum, where one ends."""
        return collectives.scatter_sum(x, dim, rows, self.group)

    def summed(self, x: Tensor) -> Tensor:
        """The sum, where all ranks go on with all of it."""
        return collectives.total(x, self.group)


HIDDEN = "hidden states that ranks hold in stretches: use sequence_parallel=false"
"""What errors call all of these."""


class GlobalShape(Shaped):
    """The whole, of which `local` are this rank's rows of dim `along` (counted from the end)."""

    along: int
    inside = True
    described = HIDDEN

    @staticmethod
    def of(local: Tensor, dim: int, length: int) -> "GlobalShape":
        """Rows of a sequence of that length, along a dim."""
        return GlobalShape.around(local, lengthened(local, dim, length), along=dim - local.dim())

    def like(self, local: object) -> Any:
        """What was made of its rows, under the shape of the whole too where it has them."""
        fits = isinstance(local, Tensor) and not isinstance(local, GlobalShape) and local.dim() == self.dim()
        if not fits or local.shape[self.along] != self.local.shape[self.along]:
            return local
        return GlobalShape.of(local, self.along + local.dim(), self.shape[self.along])

    @classmethod
    def computed(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        largest = max((t for t in tree_leaves((args, kwargs)) if isinstance(t, GlobalShape)), key=lambda t: t.dim())
        result = func(*tree_map(rows_of, args), **tree_map(rows_of, kwargs))
        first = args[0] if args else None
        if isinstance(first, GlobalShape) and result is first.local:  # in place
            return first
        return tree_map(largest.like, result)

    def __repr__(self, **_: object) -> str:  # pyrefly: ignore[bad-override]
        return f"Posing(shape={tuple(self.shape)}, here {tuple(self.local.shape)})"


def rows_of(leaf: object) -> Any:
    """This rank's rows, of what has the shape of the whole."""
    return leaf.local if isinstance(leaf, GlobalShape) else leaf


class Lazy(Shaped):
    """A whole that is not there yet, to code between units: it is made when something asks for more than its shape."""

    by: SequenceCollectives
    described = HIDDEN

    def whole(self) -> Tensor:
        """The plain tensor."""
        raise NotImplementedError

    def waits(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a function gives that does not ask for the whole; NotImplemented of one that does."""
        same = args[0] is self and not kwargs and _same(func.__name__, self.shape, args[1:])
        return self if same else NotImplemented

    @classmethod
    def computed(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = next((a for a in args if isinstance(a, Lazy)), None)
        result = NotImplemented if first is None else first.waits(func, args, kwargs)
        return func(*tree_map(plain, args), **tree_map(plain, kwargs)) if result is NotImplemented else result


def _same(name: str, shape: Sequence[int], args: tuple[Any, ...]) -> bool:
    """Whether a function of a tensor gives all of it back as it is: `x[:, 0:]`, `x.view(x.shape)`."""
    if name == "__getitem__":
        index = list(args[0]) if isinstance(args[0], tuple) else [args[0]]
        at = next((i for i, each in enumerate(index) if each is Ellipsis), len(index))
        index[at : at + 1] = [slice(None)] * (len(shape) - len(index) + (at < len(index)))
        plain_slices = all(isinstance(i, slice) and _numbers((i.start, i.stop, i.step)) for i in index)
        return plain_slices and [i.indices(n) for i, n in zip(index, shape)] == [(0, n, 1) for n in shape]
    if name in ("view", "reshape"):
        sizes = list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else list(args)
        if not _numbers(sizes) or len(sizes) != len(shape):
            return False
        free = [d for d, n in enumerate(sizes) if n == -1]
        return len(free) < 2 and all(n == m or d in free for d, (n, m) in enumerate(zip(sizes, shape)))
    return name == "contiguous" and not args


def _numbers(values: Iterable[object]) -> bool:
    return all(type(v) in (int, type(None)) for v in values)


class LazyGather(Lazy):
    """The whole of which this rank has `local`, its `rows` of dim `cut`: gathered when something asks for more than the shape."""

    cut: int
    rows: Rows
    gathered: Tensor | None
    noted: int
    """The version of what was gathered when it was."""

    @staticmethod
    def of(local: Tensor, dim: int, rows: Rows, by: SequenceCollectives) -> "LazyGather":
        """The whole of which this rank computed `local`."""
        shape = lengthened(local, dim, rows.length)
        return LazyGather.around(local, shape, cut=dim, rows=rows, by=by, gathered=None, noted=0)

    def whole(self) -> Tensor:
        """The plain tensor, gathered once."""
        if self.gathered is None:
            self.gathered = self.by.gathered(self.local, self.cut, self.rows)
            self.noted = version(self.gathered)
        return self.gathered

    def mine(self) -> Tensor:
        """This rank's rows, as they are now: the model's code may have written to the whole."""
        if self.gathered is None or version(self.gathered) == self.noted:
            return self.local
        return self.by.taken(self.gathered, self.cut, self.rows)

    def __repr__(self, **_: object) -> str:  # pyrefly: ignore[bad-override]
        return f"Late(shape={tuple(self.shape)}, dim {self.cut}, here {tuple(self.local.shape)})"


def plain(leaf: object) -> Any:
    """The whole, where it waits."""
    return leaf.whole() if isinstance(leaf, Lazy) else leaf


ADDS = frozenset(("add", "__add__", "__radd__"))
SCALES = frozenset(("mul", "multiply", "__mul__", "__rmul__"))
DIVIDES = frozenset(("div", "divide", "true_divide", "__truediv__"))


class PartialSum(Lazy):
    """The sum of the `local` of all ranks."""

    resolved: Tensor | None
    """What it has become: None, the whole, or the `LazyGather` of a stretch."""

    @staticmethod
    def of(local: Tensor, by: SequenceCollectives) -> "PartialSum":
        """The sum of which this rank has the share `local`."""
        return PartialSum.around(local, list(local.shape), by=by, resolved=None)

    @property
    def inside(self) -> bool:  # type: ignore[override]
        """Numbers are drawn for the share, which has the shape of the whole."""
        return self.resolved is None

    def like(self, local: Tensor) -> "PartialSum":
        """Another sum, of this one's shares after something linear."""
        return PartialSum.of(local, self.by)

    def whole(self) -> Tensor:
        """The plain tensor, made once."""
        if self.resolved is None:
            self.resolved = self.by.summed(self.local)
        return plain(self.resolved)

    def stretch(self, dim: int, rows: Rows) -> Tensor:
        """For a unit on stretches: `LazyGather`, this rank's rows of the sum, unless the whole is there already."""
        if self.resolved is None:
            self.resolved = LazyGather.of(self.by.left(self.local, dim, rows), dim, rows, self.by)
        return self.resolved

    def waits(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is linear, on the shares."""
        name = func.__name__
        if name == "dropout" and args[0] is self:
            return NotImplemented if dropout_call(func, *args, **kwargs).drops else self
        if self.resolved is None and len(args) == 2 and not kwargs:
            other = args[1] if args[0] is self else args[0]
            if name in ADDS and isinstance(other, Tensor):
                return self._plus(other)
            if (name in SCALES or (name in DIVIDES and args[0] is self)) and _number(other):
                return self.like(func(*(self.local if a is self else a for a in args)))
        return super().waits(func, args, kwargs)

    def _plus(self, other: Tensor) -> Any:
        """With a tensor that every rank has, or another sum."""
        if other.dtype != self.dtype or other.device != self.device:
            return NotImplemented
        if isinstance(other, PartialSum):
            return self.like(self.local + other.local) if other.resolved is None else NotImplemented
        if isinstance(other, WrapperTensor):
            return NotImplemented
        return self.like(_Once.apply(self.local, other, self.by.group.rank() == 0))

    def __repr__(self, **_: object) -> str:  # pyrefly: ignore[bad-override]
        return f"Owed(shape={tuple(self.shape)})"


def _number(x: object) -> bool:
    """A number, or a tensor that is one and is not learned."""
    return isinstance(x, (int, float)) or (isinstance(x, Tensor) and not x.dim() and not x.requires_grad)


class _Once(torch.autograd.Function):
    """A share with something added that all ranks have: by the `first` of them only."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, other: Tensor, first: bool) -> Tensor:
        ctx.shapes = share.shape, other.shape
        shape = torch.broadcast_shapes(*ctx.shapes)
        return share + other if first else share.expand(shape).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        needed = zip(ctx.shapes, ctx.needs_input_grad)
        return (*(grads[0].sum_to_size(shape) if needs else None for shape, needs in needed), None)


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
