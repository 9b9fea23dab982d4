"""Running a model whose layers are cut into slices: what happens where a region of slices begins and where it ends.

The block's own code runs on a slice as it does on the whole. Only its borders are wired: what a column is given is
entered (its gradient is summed over the ranks), what the row returns is a share of a sum (it is added up). See
`parallel/tensor/strategy.py` for the technique, `model/slices.py` for the values, `tensors/collectives.py` for the collectives.

Many models compute sizes from what their *input* has: `y.view(B, T, C)` with C the width of the residual stream, after
an attention over the rank's own heads, has n times fewer numbers than it asks for. No attribute can be divided there.
`LocalSizes(n)` runs the block's own code and corrects such requests when they cannot be meant:

- `view`, `reshape`, `unflatten` to n times as many numbers as there are: one dim is divided, the one where the
  requested shape and the tensor's own part ways;
- `split` into parts larger than the dim, or that do not fill it: the parts are divided;
- `expand` of a dim that is neither 1 nor as requested, but n times smaller: it stays as it is.

Whether this is right for a block is not argued but checked: `parallel/tensor/find/check.py` runs it on every rank's slice.

[Note: Vocabulary]
Embeddings and heads cut by rows of the vocabulary.

An embedding's rank looks up the tokens whose rows it has and gives zeros for the others; the sum over the ranks is the
whole. It is made at once, or when it is asked for (`parallel/tensor/sequence/runtime.py`). A head's rank computes
the logits of its rows; they stand for the whole in a `ShardedTensor`, which knows how to take a cross-entropy without ever
gathering them. Rows need not divide by the ranks.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from plait.model.sketch import Sketch
from plait.model.slices import ColumnRowPair, DividedNumber, ParameterSlice, RegionArgument, Slices
from plait.parallel.tensor.sequence.async_tp import FusedColumns, FusedRow, is_plain
from plait.parallel.tensor.sequence.runtime import SequenceParallelUnits, put
from plait.randomness.sub_block import Axis
from plait.tensors import multihead
from plait.tensors.collectives import enter, part, total
from plait.tensors.modules import WRAPS, class_forward, put_parameters
from plait.tensors.parameters import like
from plait.tensors.rows import Ranges, Rows, everything, taken
from plait.tensors.sharded_tensor import ShardedTensor
from plait.tensors.torch_private import tree_map_only


def vocabulary_cuts(model: nn.Module, slices: Slices, ranks: int) -> tuple[ParameterSlice, ...]:
    """How every parameter is cut, those of embeddings and heads too; tied ones once, by the model's first name."""
    named, tables = {id(p): n for n, p in model.named_parameters()}, {}
    for name in slices.vocabulary:
        for parameter in model.get_submodule(name).parameters(recurse=False):
            key = named[id(parameter)]
            tables[key] = ParameterSlice(key, 0, Rows.chunks(parameter.shape[0], ranks).ranks)
    return (*(c for group in slices.groups for c in group.cuts), *tables.values())


def tables_apart_from_heads(model: nn.Module, slices: Slices) -> tuple[str, ...]:
    """The embeddings that have no weight in common with a head."""
    modules = {name: model.get_submodule(name) for name in slices.vocabulary}
    heads = {id(p) for m in modules.values() if not isinstance(m, nn.Embedding) for p in m.parameters()}
    return tuple(name for name, m in modules.items() if not any(id(p) in heads for p in m.parameters()))


def vocabulary_heads(model: nn.Module, slices: Slices) -> tuple[str, ...]:
    """Those that multiply what they are given. (One that the loss takes over does not.)"""
    tables = [(name, model.get_submodule(name)) for name in slices.vocabulary]
    return tuple(name for name, m in tables if isinstance(m, nn.Linear) and "forward" not in vars(m))


def vocabulary_held(model: nn.Module, names: Iterable[str], own: Mapping[str, nn.Parameter]) -> list[str]:
    """Those whose parameters are all among a rank's `own`, not another stage's."""
    mine = {id(p) for p in own.values()}
    return [name for name in names if all(id(p) in mine for p in model.get_submodule(name).parameters())]


def wire_vocabulary(module: nn.Module, length: int, group: ProcessGroup, owed: bool = False) -> None:
    """Let an embedding or a head of `length` rows work on this rank's. `owed`: an embedding's sum is made elsewhere."""
    kind = _Embedding if isinstance(module, nn.Embedding) else _Head
    module.__class__ = type(module.__class__.__name__, (kind, module.__class__), {})
    module.__dict__["_rows"] = Rows.chunks(length, group.size())
    module.__dict__["_ranks"] = group
    module.__dict__["_owed"] = owed


class _Embedding(nn.Embedding):
    _rows: Rows
    _ranks: ProcessGroup
    _owed: bool

    def forward(self, input: Tensor) -> Tensor:
        """The sum over the ranks, or this rank's share of it."""
        first, count = self._rows.ranks[self._ranks.rank()][0]
        if count:
            here = (input >= first) & (input < first + count)
            padding = self.padding_idx
            padding = padding - first if padding is not None and first <= padding < first + count else None
            share = F.embedding(torch.where(here, input - first, 0), self.weight, padding)
            share = share * here.unsqueeze(-1).to(share.dtype)
        else:
            share = self.weight.new_zeros(*input.shape, self.embedding_dim) + self.weight.sum() * 0
        return share if self._owed else total(share, self._ranks)


class _Head(nn.Linear):
    _rows: Rows
    _ranks: ProcessGroup

    def forward(self, input: Tensor) -> ShardedTensor:
        if not self.__dict__.get("_gathered"):  # by `parallel/tensor/sequence/runtime.py`, from stretches
            input = enter(input, self._ranks)
        logits = F.linear(input, self.weight, self.bias)
        return ShardedTensor(logits, logits.dim() - 1, self._rows, self._ranks)


_SHAPING = (Tensor.view, Tensor.reshape, torch.reshape)
_SPLITS = (Tensor.split, torch.split, Tensor.split_with_sizes, torch.split_with_sizes)


class LocalSizes(TorchFunctionMode):
    """Active while the code of a sliced block runs on one of n ranks."""

    def __init__(self, n: int):
        super().__init__()
        self.n = n

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _SHAPING:
            args, kwargs = self._shaped(args, kwargs)
        elif func in (Tensor.unflatten, torch.unflatten) and not kwargs and len(args) == 3:
            args = self._unflattened(*args)
        elif func in _SPLITS:
            args, kwargs = self._split(args, kwargs)
        elif func is Tensor.expand and not kwargs:
            args = self._expanded(args)
        return func(*args, **kwargs)

    def _shaped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x, *rest = args
        sizes = kwargs.get("shape", kwargs.get("size")) if not rest else rest[0] if len(rest) == 1 else rest
        shape = _sizes([sizes] if isinstance(sizes, int) else sizes)
        if shape is None:
            return args, kwargs
        return (x, resized(tuple(x.shape), shape, self.n)), {}

    def _unflattened(self, x: Tensor, dim: object, sizes: object) -> tuple[Any, ...]:
        shape = _sizes(sizes)
        if shape is None or not isinstance(dim, int):
            return x, dim, sizes
        return x, dim, resized((x.shape[dim],), shape, self.n)

    def _split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """`split(x, size or sizes, dim=0)`."""
        names = ("split_size", "split_size_or_sections", "split_sizes")
        parts = args[1] if len(args) > 1 else next((kwargs[k] for k in names if k in kwargs), None)
        dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        size = args[0].shape[dim]
        if isinstance(parts, int):
            wrong = parts > 0 and parts % self.n == 0 and (size <= parts or size % parts != 0)
            parts = parts // self.n if wrong else parts
        elif (sizes := _sizes(parts)) is not None:
            wrong = sum(sizes) == self.n * size and all(s % self.n == 0 for s in sizes)
            parts = [s // self.n for s in sizes] if wrong else parts
        else:
            return args, kwargs
        return (args[0], parts, dim), {}

    def _expanded(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        shape = _sizes(rest[0] if len(rest) == 1 and not isinstance(rest[0], int) else rest)
        if shape is None or len(shape) < x.dim():
            return args
        front = len(shape) - x.dim()
        own = (None,) * front + tuple(x.shape)
        return x, tuple(
            have if have not in (None, 1) and ask == self.n * have else ask for have, ask in zip(own, shape)
        )


def _sizes(sizes: object) -> tuple[int, ...] | None:
    """Whole numbers, or None when it is something else (a dtype, a tensor)."""
    whole = isinstance(sizes, (tuple, list)) and all(isinstance(size, int) for size in sizes)
    return tuple(sizes) if whole else None


def resized(have: tuple[int, ...], ask: tuple[int, ...], n: int) -> tuple[int, ...]:
    """The shape that code meant which asks for `ask` and holds one n-th of it, in the shape `have`.

    >>> resized((2, 5, 8), (2, 5, 16), 2), resized((2, 5, 8), (2, 5, 4, 4), 2), resized((2, 2, 5, 4), (8, 5, 4), 2)
    ((2, 5, 8), (2, 5, 2, 4), (4, 5, 4))
    """
    if -1 in ask or prod(ask) != n * prod(have):
        return ask
    i = _parting(have, ask, n)
    at = next((k for k in range(i, len(ask)) if ask[k] % n == 0), None)
    return ask if at is None else (*ask[:at], ask[at] // n, *ask[at + 1 :])


def _parting(have: tuple[int, ...], ask: tuple[int, ...], n: int) -> int:
    """The first requested dim that is not made of the tensor's own dims, from the left."""
    i = j = 0
    while i < len(ask) and j < len(have):
        if ask[i] == n * have[j] and ask[i] != have[j]:
            return i
        start, left, right = i, have[j], ask[i]
        while left != right:
            if left < right and j + 1 < len(have):
                j += 1
                left *= have[j]
            elif right < left and i + 1 < len(ask):
                i += 1
                right *= ask[i]
            else:
                return start
        i, j = i + 1, j + 1
    return i if i < len(ask) else 0


def wire(
    model: nn.Module,
    sketch: Sketch,
    own: Mapping[str, nn.Parameter],
    ranks: ProcessGroup,
    parallel_units: SequenceParallelUnits | None = None,
    async_tp: bool = False,
) -> tuple[list[ColumnRowPair], dict[str, nn.Parameter]]:
    """Cut what of a model is its `own` (not another stage's): the regions that are cut, and a rank's slices by name."""
    regions = [g for g in sketch.slices.groups if all(c.parameter in own for c in g.cuts)]
    tables = vocabulary_held(model, sketch.slices.vocabulary, own)
    lengths = {name: next(model.get_submodule(name).parameters()).shape[0] for name in tables}
    parts = cut_parameters(model, {c.parameter: c for c in sketch.cuts if c.parameter in own}, ranks.rank())
    for region in regions:
        for integer in region.integers:
            set_integer(model, integer)
        SlicedRegion(model, region, ranks, parallel_units, async_tp)
    owed = () if parallel_units is None else parallel_units.slices.owed
    for name in tables:
        wire_vocabulary(model.get_submodule(name), lengths[name], ranks, name in owed)
    return regions, parts


def cut_parameters(model: nn.Module, cuts: Mapping[str, ParameterSlice], rank: int) -> dict[str, nn.Parameter]:
    """Put this rank's slices in the place of parameters, everywhere they are used; the new ones by name."""
    named = dict(model.named_parameters())
    new = {
        id(p): like(
            p, taken(p.detach(), cut.dim, cut.ranges[rank]), layout_of(tuple(p.shape), cut, rank)[1]
        )
        for p, cut in ((named[name], cut) for name, cut in cuts.items())
    }
    put_parameters(model, new)
    return {name: new[id(named[name])] for name in cuts}


def layout_of(shape: tuple[int, ...], cut: ParameterSlice, rank: int) -> tuple[tuple[int, ...], tuple[Ranges, ...]]:
    """The shape of the whole and this rank's ranges of it, as `Part` has them."""
    ranges = list(everything(shape))
    ranges[cut.dim] = cut.ranges[rank]
    return shape, tuple(ranges)


def set_integer(model: nn.Module, integer: DividedNumber) -> None:
    """Divide a number that a module's code has fixed. An object that holds it is copied for this module first."""
    holder: object = model.get_submodule(integer.module)
    *path, name = integer.path.split(".")
    for step in path:
        inner = copy.copy(vars(holder)[step])  # a module's own __setattr__ would look for parameters
        vars(holder)[step] = inner
        holder = inner
    vars(holder)[name] //= integer.divisor


class SlicedRegion:
    """One group of slices in the model of one rank."""

    def __init__(
        self,
        model: nn.Module,
        group: ColumnRowPair,
        ranks: ProcessGroup,
        parallel_units: SequenceParallelUnits | None,
        async_tp: bool = False,
    ):
        self.ranks, self.parallel_units = ranks, parallel_units
        self.border = None if parallel_units is None else parallel_units.borders.get(group.row)
        """Where it begins and ends in a unit that runs on stretches of the sequence."""
        self.entered: dict[int, tuple[Tensor, Tensor]] = {}
        """What the columns were given, by its id, and the same entered: several columns share one tensor, and one sum."""
        self.gathered: dict[int, tuple[Tensor, Tensor]] = {}
        """Stretches, by their id, and the wholes they are of."""
        self.columns, self.row = self._fused(model, group) if async_tp else (None, None)
        """What gathers or sums by itself (`async_tp`)."""
        for argument in () if self.border is None else self.border.given:
            self._wrap(model.get_submodule(argument.module), argument, self._gathered)
        for name in () if self.columns is not None else group.columns:
            column = model.get_submodule(name)
            column.register_forward_pre_hook(self._enter, with_kwargs=True)
            if isinstance(column, nn.MultiheadAttention):
                column.__class__ = type(
                    type(column).__name__, (_Heads, type(column)), {"_first": ranks.rank() * column.num_heads}
                )
        row = model.get_submodule(group.row)
        if ranks.rank() > 0 and self.row is None:
            silence(row)
        row.register_forward_hook(self._leave)
        for argument in group.arguments:
            self._wrap(model.get_submodule(argument.module), argument, self._part)
        if group.resize:
            resize(model.get_submodule(group.container), ranks.size())

    def _fused(self, model: nn.Module, group: ColumnRowPair) -> tuple[FusedColumns | None, FusedRow | None]:
        units, row = self.parallel_units, model.get_submodule(group.row)
        if units is None or self.border is None:
            return None, None
        plain_row = isinstance(row, nn.Linear) and is_plain(row)
        return FusedColumns.of(model, group, units), FusedRow(row, self.border.dim, units) if plain_row else None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return tuple(map(self._entered, args)), {key: self._entered(value) for key, value in kwargs.items()}

    def _entered(self, value: object) -> object:
        if not (isinstance(value, Tensor) and value.requires_grad):
            return value
        if id(value) not in self.entered:
            self.entered[id(value)] = value, enter(value, self.ranks)
        return self.entered[id(value)][1]

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        self.entered.clear()
        self.gathered.clear()
        if self.columns is not None:
            self.columns.ahead.clear()
        if self.row is not None:
            return output
        if self.parallel_units is not None and self.border is not None:
            return self.parallel_units.end(output, self.border.dim)
        return total(output, self.ranks)

    def _gathered(self, value: Tensor, dim: int) -> Tensor:
        """All rows of what a unit on stretches gives the region, or what its columns gather themselves; its gradient
        needs no other sum."""
        assert self.parallel_units is not None
        if id(value) not in self.gathered and self.columns is not None:
            self.gathered[id(value)] = value, self.columns.given(value, dim)
        elif id(value) not in self.gathered:
            whole = self.parallel_units.begin(value, dim)
            self.gathered[id(value)] = value, whole
            self.entered[id(whole)] = whole, whole
        return self.gathered[id(value)][1]

    def _wrap(self, module: nn.Module, argument: RegionArgument, make: Callable[[Tensor, Any], Tensor]) -> None:
        replaced: list[tuple[Tensor, Tensor]] = []

        def wrap(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            replaced.clear()
            key = argument.key
            value = kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None
            if not isinstance(value, Tensor):
                return args, kwargs
            mine = make(value, argument.dim)
            replaced.append((mine, value))
            return put(args, kwargs, key, mine)

        def handed_on(module: nn.Module, args: tuple[Any, ...], output: object) -> object:
            """A module may return what it was given: others must get it as it was."""
            back = lambda t: next((value for mine, value in replaced if t is mine), t)  # noqa: E731
            output = tree_map_only(Tensor, back, output) if replaced else output
            replaced.clear()
            return output

        module.register_forward_pre_hook(wrap, with_kwargs=True)
        module.register_forward_hook(handed_on)

    def _part(self, value: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return enter(value, self.ranks)
        rows = value.shape[dim]  # one row is broadcast over the ranks' slices too
        return value if rows == 1 else part(value, dim, Rows.even(rows, self.ranks.size()), self.ranks)


class SlicedDraws:
    """Which numbers of a drawn tensor a rank holds: a rule for `randomness/sub_block.py`. In a region one dim is cut, the same always."""

    def __init__(self, groups: list[ColumnRowPair], rank: int, ranks: int):
        self.groups, self.rank, self.ranks = groups, rank, ranks
        self.found: dict[str, int] = {}

    def __call__(self, place: str, dim: int, whole: int | None, local: int) -> Axis | None:
        if whole is None or whole != local * self.ranks or self.found.get(place, dim) != dim:
            return None
        owner = place.split("#")[0] + "."
        for group in self.groups:
            if group.container == "" or owner.startswith(f"{group.container}."):
                self.found[place] = dim  # another dim may have as many rows by chance: a sequence half as long
                same = (c.ranges[self.rank] for c in group.cuts if sum(n for r in c.ranges for _, n in r) == whole)
                return whole, next(same, ((self.rank * local, local),))
        return None


class _Heads(nn.MultiheadAttention):
    _first: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As torch's own, on this rank's heads."""
        return multihead.forward(self, *args, **kwargs, first_head=self._first)


def silence(row: nn.Module) -> None:
    """A row's bias must be added once: on all ranks but the first it is zero while the row is called."""
    if row._parameters.get("bias") is None:
        return
    row.__class__ = _silenced(row.__class__)
    row.register_forward_pre_hook(lambda module, args: module.__dict__.update(_silent=True))
    row.register_forward_hook(lambda module, args, output: module.__dict__.update(_silent=False), always_call=True)


@cache
def _silenced(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_Silent, kind), {"_silent": False})


class _Silent(nn.Module):
    _silent: bool

    @property
    def bias(self) -> Tensor:
        """Zeros in the place of the parameter, for the layer's own code; whoever shards or saves it sees the parameter."""
        bias = self._parameters["bias"]
        assert bias is not None
        if not self._silent:
            return bias
        return torch.where(torch.zeros((), dtype=torch.bool, device=bias.device), bias, 0.0)  # its gradient: zeros


def resize(container: nn.Module, ranks: int) -> None:
    """Sizes that the container's code gives to view, split and the like become those of a slice."""
    if "_resized" in container.__dict__:
        return
    container.__dict__["_resized"] = True
    forward = container.__dict__.get("forward")
    if forward is None:
        container.__class__ = _resized(container.__class__, ranks)
        return

    def resized(*args: Any, **kwargs: Any) -> Any:
        with LocalSizes(ranks):
            return forward(*args, **kwargs)

    container.__dict__["forward"] = resized


@cache
def _resized(kind: type[nn.Module], ranks: int) -> type[nn.Module]:
    """The same class on one of the ranks: one for all modules of a class, which can then share compiled code."""

    def resized(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with LocalSizes(ranks):
            return class_forward(kind, self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": resized, WRAPS: True})
