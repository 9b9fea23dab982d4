"""Units on sequence shards between the regions of tensor parallelism (sequence parallelism).

A unit that computes row by row outside of its regions receives this rank's rows of the hidden states. At the start of a
region they are gathered, and at its end the output is reduce-scattered. Together these send the same bytes as one
all-reduce. The code between regions runs once over all ranks, not on every rank. See `parallel/tensor/strategy.py` for
the technique, and `parallel/tensor/sequence/replayed_unit.py` for the check of units.

Between units, rows are passed on as they are. Code around units sees a `LazyGather`: a tensor with the global shape,
which is gathered when code reads its values. The output of a vocabulary-parallel embedding is a `PartialSum` until
then, of which a unit on sequence shards gets its rows.

[Note: Tensors with the global shape]
Three classes have the global shape, while a rank has its rows of the sequence or a partial sum.

`GlobalShape`, inside a unit: a block that is a single module reads `batch, length, width = x.shape`, and reshapes
queries and keys by it. In a region these are full, but outside of it x is a sequence shard. So x has the global shape,
and operators on it run on this rank's rows. `parallel/tensor/sequence/replayed_unit.py` has checked that this is
correct for the unit.

`LazyGather`, between units, whose code was not checked: the output of a unit. The next unit takes its rows. Any other
use gathers the full tensor first.

`PartialSum`, between units: the output of a vocabulary-parallel embedding. Every rank looks up the tokens of its
vocabulary shard, and has zeros for the others; the sum over ranks is the embedding. If the next unit runs on sequence
shards, a reduce-scatter suffices, which sends half the bytes of an all-reduce. Linear operators apply to the partial
sums: positions are added on the first rank only, and a mask is multiplied on each rank. Any other use sums over ranks
first. Every rank has the full gradient of a full tensor, and so also of a partial sum and of tensors added to it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plait.model.slices import PositionwiseUnit, Slices
from plait.randomness.distributions import parse_dropout_call
from plait.randomness.sub_block import Axis, LocalRowsRule
from plait.tensors import collectives
from plait.tensors.fake import is_remote_fake
from plait.tensors.module_state import bind_forward
from plait.tensors.rows import Rows
from plait.tensors.sharded_tensor import FullShapeTensor, replace_dim
from plait.tensors.torch_private import (
    WrapperTensor,
    dataclass_leaves,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    version,
)


class SequenceCollectives:
    """Collectives on tensors of which each rank has its `rows` of `dim`, or a partial sum."""

    def __init__(self, group: ProcessGroup):
        self.group = group

    def take_rows(self, x: Tensor, dim: int, rows: Rows) -> Tensor:
        """Take this rank's rows of a tensor that all ranks have in full."""
        return collectives.scatter_to_region(x, dim, rows, self.group)

    def gather_full(self, x: Tensor, dim: int, rows: Rows) -> Tensor:
        """Gather the full tensor for code that all ranks run equally."""
        return collectives.gather_from_region(x, dim, rows, self.group)

    def enter_region(self, x: Tensor, dim: int, rows: Rows) -> Tensor:
        """Gather the full tensor at the start of a region."""
        return collectives.gather_partial(x, dim, rows, self.group)

    def leave_region(self, x: Tensor, dim: int, rows: Rows) -> Tensor:
        """Reduce-scatter partial sums at the end of a region into this rank's rows."""
        return collectives.reduce_scatter_region(x, dim, rows, self.group)

    def sum_ranks(self, x: Tensor) -> Tensor:
        """Sum partial sums on all ranks."""
        return collectives.reduce_from_region(x, self.group)


SHARD_DESCRIPTION = "hidden states on sequence shards: use sequence_parallel=false"
"""Name of these tensors in error messages."""


class GlobalShape(FullShapeTensor):
    """A tensor with the global shape, of which `local` are this rank's rows of dim `along`, counted from the end."""

    along: int
    wraps_region = True
    description = SHARD_DESCRIPTION

    @staticmethod
    def from_shard(local: Tensor, dim: int, length: int) -> "GlobalShape":
        """Wrap rows of a sequence of the global length along a dim."""
        return GlobalShape.wrap(local, replace_dim(local, dim, length), along=dim - local.dim())

    def with_local(self, local: object) -> Any:
        """Wrap a result of an operator on the rows, if it has the same rows; else return it unchanged."""
        fits = isinstance(local, Tensor) and not isinstance(local, GlobalShape) and local.dim() == self.dim()
        if not fits or local.shape[self.along] != self.local.shape[self.along]:
            return local
        return GlobalShape.from_shard(local, self.along + local.dim(), self.shape[self.along])

    @classmethod
    def compute(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        largest = max((t for t in tree_leaves((args, kwargs)) if isinstance(t, GlobalShape)), key=lambda t: t.dim())
        result = func(*tree_map(get_local_rows, args), **tree_map(get_local_rows, kwargs))
        first = args[0] if args else None
        if isinstance(first, GlobalShape) and result is first.local:  # in place
            return first
        return tree_map(largest.with_local, result)

    def __repr__(self, **_: object) -> str:  # pyrefly: ignore[bad-override]
        return f"Posing(shape={tuple(self.shape)}, here {tuple(self.local.shape)})"


def get_local_rows(leaf: object) -> Any:
    """Return this rank's rows of a tensor with the global shape; other values unchanged."""
    return leaf.local if isinstance(leaf, GlobalShape) else leaf


class LazyTensor(FullShapeTensor):
    """A full tensor for code between units, computed when code reads more than its shape."""

    by: SequenceCollectives
    description = SHARD_DESCRIPTION

    def full_tensor(self) -> Tensor:
        """Return the full tensor, as a plain tensor."""
        raise NotImplementedError

    def apply_lazily(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function that does not need the full tensor, else NotImplemented."""
        same = args[0] is self and not kwargs and _is_identity(func.__name__, self.shape, args[1:])
        return self if same else NotImplemented

    @classmethod
    def compute(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = next((a for a in args if isinstance(a, LazyTensor)), None)
        result = NotImplemented if first is None else first.apply_lazily(func, args, kwargs)
        return func(*tree_map(make_plain, args), **tree_map(make_plain, kwargs)) if result is NotImplemented else result


def _is_identity(name: str, shape: Sequence[int], args: tuple[Any, ...]) -> bool:
    """Return whether a function returns its tensor unchanged, such as `x[:, 0:]` or `x.view(x.shape)`."""
    if name == "__getitem__":
        index = list(args[0]) if isinstance(args[0], tuple) else [args[0]]
        at = next((i for i, each in enumerate(index) if each is Ellipsis), len(index))
        index[at : at + 1] = [slice(None)] * (len(shape) - len(index) + (at < len(index)))
        plain_slices = all(isinstance(i, slice) and _is_all_integers((i.start, i.stop, i.step)) for i in index)
        return plain_slices and [i.indices(n) for i, n in zip(index, shape)] == [(0, n, 1) for n in shape]
    if name in ("view", "reshape"):
        sizes = list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else list(args)
        if not _is_all_integers(sizes) or len(sizes) != len(shape):
            return False
        free = [d for d, n in enumerate(sizes) if n == -1]
        return len(free) < 2 and all(n == m or d in free for d, (n, m) in enumerate(zip(sizes, shape)))
    return name == "contiguous" and not args


def _is_all_integers(values: Iterable[object]) -> bool:
    return all(type(v) in (int, type(None)) for v in values)


class LazyGather(LazyTensor):
    """A full tensor of which this rank has `local`, its `rows` of dim `cut`. It is gathered when code reads more than
    its shape."""

    shard_dim: int
    rows: Rows
    gathered: Tensor | None
    noted: int
    """Version of the gathered tensor at the time of the gather."""

    @staticmethod
    def from_shard(local: Tensor, dim: int, rows: Rows, by: SequenceCollectives) -> "LazyGather":
        """Make a lazy tensor from this rank's rows."""
        shape = replace_dim(local, dim, rows.length)
        return LazyGather.wrap(local, shape, shard_dim=dim, rows=rows, by=by, gathered=None, noted=0)

    def full_tensor(self) -> Tensor:
        """Return the full tensor, gathered once."""
        if self.gathered is None:
            self.gathered = self.by.gather_full(self.local, self.shard_dim, self.rows)
            self.noted = version(self.gathered)
        return self.gathered

    def get_local_rows(self) -> Tensor:
        """Return this rank's current rows, including writes of the model's code to the gathered tensor."""
        if self.gathered is None or version(self.gathered) == self.noted:
            return self.local
        return self.by.take_rows(self.gathered, self.shard_dim, self.rows)

    def __repr__(self, **_: object) -> str:  # pyrefly: ignore[bad-override]
        return f"Late(shape={tuple(self.shape)}, dim {self.shard_dim}, here {tuple(self.local.shape)})"


def make_plain(leaf: object) -> Any:
    """Return the full tensor of a lazy one; other values unchanged."""
    return leaf.full_tensor() if isinstance(leaf, LazyTensor) else leaf


ADDS = frozenset(("add", "__add__", "__radd__"))
SCALES = frozenset(("mul", "multiply", "__mul__", "__rmul__"))
DIVIDES = frozenset(("div", "divide", "true_divide", "__truediv__"))


class PartialSum(LazyTensor):
    """A full tensor that is the sum of `local` over all ranks."""

    resolved: Tensor | None
    """The result after the reduction: None, the full tensor, or the `LazyGather` of a sequence shard."""

    @staticmethod
    def from_local(local: Tensor, by: SequenceCollectives) -> "PartialSum":
        """Make a lazy tensor from this rank's partial sum."""
        return PartialSum.wrap(local, list(local.shape), by=by, resolved=None)

    @property
    def wraps_region(self) -> bool:  # type: ignore[override]
        """True while it is a partial sum: random numbers are then drawn for `local`, which has the global shape."""
        return self.resolved is None

    def with_local(self, local: Tensor) -> "PartialSum":
        """Wrap the partial sum after a linear operator."""
        return PartialSum.from_local(local, self.by)

    def full_tensor(self) -> Tensor:
        """Return the full tensor, summed once."""
        if self.resolved is None:
            self.resolved = self.by.sum_ranks(self.local)
        return make_plain(self.resolved)

    def reduce_to_shard(self, dim: int, rows: Rows) -> Tensor:
        """Reduce-scatter into a `LazyGather` of this rank's rows, for a unit on sequence shards. Returns the full
        tensor if it exists."""
        if self.resolved is None:
            self.resolved = LazyGather.from_shard(self.by.leave_region(self.local, dim, rows), dim, rows, self.by)
        return self.resolved

    def apply_lazily(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply a linear function to the partial sums."""
        name = func.__name__
        if name == "dropout" and args[0] is self:
            return NotImplemented if parse_dropout_call(func, *args, **kwargs).drops else self
        if self.resolved is None and len(args) == 2 and not kwargs:
            other = args[1] if args[0] is self else args[0]
            if name in ADDS and isinstance(other, Tensor):
                return self._add_tensor(other)
            if (name in SCALES or (name in DIVIDES and args[0] is self)) and _is_scalar(other):
                return self.with_local(func(*(self.local if a is self else a for a in args)))
        return super().apply_lazily(func, args, kwargs)

    def _add_tensor(self, other: Tensor) -> Any:
        """Add a tensor that every rank has in full, or another partial sum."""
        if other.dtype != self.dtype or other.device != self.device:
            return NotImplemented
        if isinstance(other, PartialSum):
            return self.with_local(self.local + other.local) if other.resolved is None else NotImplemented
        if isinstance(other, WrapperTensor):
            return NotImplemented
        return self.with_local(_AddOnFirstRank.apply(self.local, other, self.by.group.rank() == 0))

    def __repr__(self, **_: object) -> str:  # pyrefly: ignore[bad-override]
        return f"Owed(shape={tuple(self.shape)})"


def _is_scalar(x: object) -> bool:
    """Return whether x is a number, or a scalar tensor that is not trained."""
    return isinstance(x, (int, float)) or (isinstance(x, Tensor) and not x.dim() and not x.requires_grad)


class _AddOnFirstRank(torch.autograd.Function):
    """Adds a full tensor to a partial sum, on the `first` rank only."""

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
    """The units on sequence shards of one rank's model."""

    def __init__(self, model: nn.Module, slices: Slices, group: ProcessGroup):
        super().__init__(group)
        self.model, self.slices = model, slices
        self.current_rows: Rows | None = None
        """Rows of each rank in the unit that runs now."""
        self.next_rows: Rows | None = None
        self.is_posing = False
        """True if that unit's sequences have the global shape."""
        self.units = [_UnitHooks(self, one) for one in slices.sequence_units]
        self.borders = {border.row: border for one in slices.sequence_units for border in one.borders}
        """By row of a region."""

    def wrap_units(self) -> list[Any]:
        """Wrap units on sequence shards, so that their rows are set, also in recomputation. Runs after their regions
        are made.

        Returns the handles of hooks that gather the outputs for other stages.
        """
        handles = []
        for unit in self.units:
            module = self.model.get_submodule(unit.spec.unit)
            module.forward = _ShardForward(self, unit.spec, module)
            if unit.spec.crosses_stages:  # before all other hooks
                handles.append(module.register_forward_hook(unit.gather_output))
        return handles

    def install_hooks(self, units: Iterable[str], heads: Iterable[str]) -> list[Any]:
        """Install hooks that pass rows to units. Runs after all other hooks on units, which must see plain tensors."""
        on = {unit.spec.unit: unit for unit in self.units}
        if not on and not self.slices.deferred_sums:
            return []
        heads = tuple(heads)
        handles = [self.model.register_forward_hook(_gather_output, prepend=True)]
        for name in dict.fromkeys((*on, *units, *heads)):
            module = self.model.get_submodule(name)
            if name not in on:
                enter = self._enter_head if name in heads else _gather_inputs
                handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
                continue
            handles.append(module.register_forward_pre_hook(on[name].enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(on[name].leave))
        for name in self.slices.deferred_sums:
            handles.append(self.model.get_submodule(name).register_forward_hook(self._defer_sum))
        return handles

    def _defer_sum(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """Wrap the output of a vocabulary-parallel embedding as a partial sum."""
        return None if is_remote_fake(output) else PartialSum.from_local(output, self)

    def _enter_head(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather the input of a vocabulary-parallel head like the start of a region, which has no end."""
        late = args[0] if args and isinstance(args[0], LazyGather) and args[0].gathered is None else None
        module.__dict__["_gathered"] = late is not None
        if late is None:
            return _gather_inputs(module, args, kwargs)
        return (self.enter_region(late.local, late.shard_dim, late.rows), *args[1:]), kwargs

    def __call__(self, place: str, dim: int, whole: int | None, local: int) -> Axis | None:
        """Rule for `randomness/sub_block.py`: the ranges of a random tensor that a unit on sequence shards draws."""
        if self.current_rows is None or (place, dim) not in self.slices.sequence_draws:
            return None
        return LocalRowsRule(self.current_rows, self.group.rank(), self.slices.sequence_draws)(place, dim, whole, local)

    @property
    def _region_rows(self) -> Rows:
        """Rows of each rank where a region starts or ends."""
        rows = self.current_rows or self.next_rows
        assert rows is not None
        return rows

    def split_rows(self, length: int) -> Rows:
        """Split a sequence into rows of each rank."""
        return Rows.make_even(length, self.group.size())

    def begin_region(self, x: Tensor, dim: int) -> Tensor:
        """Gather all rows at the start of a region."""
        return self.enter_region(get_local_rows(x), dim, self._region_rows)

    def end_region(self, x: Tensor, dim: int) -> Tensor:
        """Reduce-scatter at the end of a region, in the form that its unit expects."""
        return self.pose_as_full(self.leave_region(x, dim, self._region_rows), dim)

    def pose_as_full(self, mine: Tensor, dim: int) -> Tensor:
        """Return this rank's rows in the form that their unit expects: with the global shape, or as they are."""
        return GlobalShape.from_shard(mine, dim, self._region_rows.length) if self.is_posing else mine

    def get_row_layout(self, dim: int) -> tuple[int, Rows, ProcessGroup]:
        """Return (dim, rows of each rank, group) for collectives where a region starts or ends."""
        return dim, self._region_rows, self.group


def _gather_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(leaf, LazyTensor) for leaf in dataclass_leaves((args, kwargs))):
        return tree_map(make_plain, (args, kwargs))
    return None


def _gather_output(module: nn.Module, args: tuple[Any, ...], output: object) -> Any:
    return tree_map(make_plain, output) if any(isinstance(leaf, LazyTensor) for leaf in dataclass_leaves(output)) else None


class _UnitHooks:
    """Hooks before and after a unit on sequence shards."""

    def __init__(self, parallel_units: SequenceParallelUnits, stretched: PositionwiseUnit):
        self.parallel_units, self.spec = parallel_units, stretched
        self.rows: Rows | None = None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key, dim, parallel_units = self.spec.key, self.spec.dim, self.parallel_units
        hidden = kwargs[key] if isinstance(key, str) else args[key]
        if isinstance(hidden, PartialSum):
            hidden = hidden.reduce_to_shard(dim, parallel_units.split_rows(hidden.shape[dim]))
        if isinstance(hidden, LazyGather) and hidden.shard_dim == dim:
            local, rows = hidden.get_local_rows(), hidden.rows
        else:
            hidden = make_plain(hidden)
            rows = parallel_units.split_rows(hidden.shape[dim])
            local = parallel_units.take_rows(hidden, dim, rows)
        self.rows = parallel_units.next_rows = rows
        put = lambda k, value: local if k == key else tree_map(make_plain, value)  # noqa: E731
        return tuple(put(i, a) for i, a in enumerate(args)), {k: put(k, a) for k, a in kwargs.items()}

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> Any:
        """Wrap the output as a lazy full tensor."""
        return self._map_returned(output, partial(LazyGather.from_shard, by=self.parallel_units))

    def gather_output(self, module: nn.Module, args: tuple[Any, ...], output: object) -> Any:
        """Gather the output for another stage."""
        return self._map_returned(output, self.parallel_units.gather_full)

    def _map_returned(self, output: object, make: Callable[[Tensor, int, Rows], Tensor]) -> Any:
        rows, self.rows = self.rows, None
        if rows is None:
            return None
        dataclass_leaves(output)  # registers dataclasses as trees
        flat, spec = tree_flatten(output)
        for i, dim in self.spec.returned:
            flat[i] = make(flat[i], dim, rows) if isinstance(flat[i], Tensor) else flat[i]
        return tree_unflatten(flat, spec)


class _ShardForward:
    """A unit's own forward on a sequence shard. It stores the row layout on its input, because it may run again in
    backward."""

    def __init__(self, parallel_units: SequenceParallelUnits, stretched: PositionwiseUnit, module: nn.Module):
        self.parallel_units, self.spec, self.own = parallel_units, stretched, bind_forward(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parallel_units, on = self.parallel_units, self.spec
        hidden: Tensor = kwargs[on.key] if isinstance(on.key, str) else args[on.key]
        rows: Rows = vars(hidden).setdefault("whose_rows", parallel_units.next_rows)
        before = parallel_units.current_rows, parallel_units.is_posing
        parallel_units.current_rows, parallel_units.is_posing = rows, on.sees_full_shape
        if on.sees_full_shape:
            args, kwargs = replace_argument(args, kwargs, on.key, GlobalShape.from_shard(hidden, on.dim, rows.length))
        try:
            output = self.own(*args, **kwargs)
            return tree_map(get_local_rows, output) if on.sees_full_shape else output
        finally:
            parallel_units.current_rows, parallel_units.is_posing = before


def replace_argument(args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str, value: object) -> tuple[Any, Any]:
    if isinstance(key, str):
        return args, {**kwargs, key: value}
    return (*args[:key], value, *args[key + 1 :]), kwargs
