"""Installation of a rank's slices in a model, with the collectives at the start and end of their regions.

A block's own code runs on a slice as it does in full. Only the borders of a region are changed. The gradient of a
column's input is summed over ranks. The output of the row is a partial sum, which is reduced. See
`parallel/tensor/strategy.py` for the technique, `model/slices.py` for the data classes, and `tensors/collectives.py`
for the collectives.

[Note: Local sizes]
Many models compute sizes from their *input*. In `y.view(B, T, C)`, C is the width of the residual stream. After
attention over the rank's own heads, y has n times fewer elements, and no attribute can be divided. `LocalSizes(n)` runs
the block's own code and corrects such sizes if they are invalid:

- `view`, `reshape`, `unflatten` to n times as many elements as exist: the first dim that differs between the requested
  shape and the tensor's own is divided
- `split` into parts that are larger than the dim, or do not fill it: the parts are divided
- `expand` of a dim that is not 1 and n times smaller than requested: the dim keeps its size

`parallel/tensor/find/replayed_module.py` checks on every rank's slice whether this is correct for a block.

[Note: Vocabulary]
Embeddings and heads are sharded by rows of the vocabulary. A rank's embedding looks up the tokens of its shard and
returns zeros for the others; the sum over ranks is the full output. It is reduced at once, or when it is needed
(`parallel/tensor/sequence/runtime.py`). A rank's head computes the logits of its shard, as a `ShardedTensor` of all
logits. Its cross-entropy never gathers them. The number of rows need not divide by the ranks.
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
from plait.model.slices import ColumnRowPair, ParameterSlice, RegionArgument, ScaledAttribute, Slices
from plait.parallel.tensor.sequence.async_tp import FusedColumns, FusedRow, is_plain_linear
from plait.parallel.tensor.sequence.runtime import SequenceParallelUnits, replace_argument
from plait.randomness.sub_block import Axis
from plait.tensors import multihead
from plait.tensors.collectives import copy_to_region, reduce_from_region, scatter_to_region
from plait.tensors.module_state import DELEGATES_ATTRIBUTE, replace_parameters, run_class_forward
from plait.tensors.parameters import make_parameter_like
from plait.tensors.rows import Ranges, Rows, copy_ranges, full_ranges
from plait.tensors.sharded_tensor import ShardedTensor
from plait.tensors.torch_private import own_parameters, tree_map_only


def list_parameter_slices(model: nn.Module, slices: Slices, ranks: int) -> tuple[ParameterSlice, ...]:
    """Return the slices of all parameters, also of embeddings and heads. Tied parameters appear once, by their first
    name."""
    named, tables = {id(p): n for n, p in model.named_parameters()}, {}
    for name in slices.vocabulary:
        for parameter in model.get_submodule(name).parameters(recurse=False):
            key = named[id(parameter)]
            tables[key] = ParameterSlice(key, 0, Rows.make_chunks(parameter.shape[0], ranks).ranks)
    return (*(c for group in slices.groups for c in group.tp_shards), *tables.values())


def find_untied_embeddings(model: nn.Module, slices: Slices) -> tuple[str, ...]:
    """Return the embeddings that have no weight in common with a head."""
    modules = {name: model.get_submodule(name) for name in slices.vocabulary}
    heads = {id(p) for m in modules.values() if not isinstance(m, nn.Embedding) for p in m.parameters()}
    return tuple(name for name, m in modules.items() if not any(id(p) in heads for p in m.parameters()))


def find_vocabulary_heads(model: nn.Module, slices: Slices) -> tuple[str, ...]:
    """Return the heads that compute logits themselves. (The loss may compute them instead.)"""
    tables = [(name, model.get_submodule(name)) for name in slices.vocabulary]
    return tuple(name for name, m in tables if isinstance(m, nn.Linear) and "forward" not in vars(m))


def filter_local_modules(model: nn.Module, names: Iterable[str], own: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the modules whose parameters are all in `own`, so none of them is on another stage."""
    mine = {id(p) for p in own.values()}
    return [name for name in names if all(id(p) in mine for p in model.get_submodule(name).parameters())]


def wire_vocabulary(module: nn.Module, length: int, group: ProcessGroup, owed: bool = False) -> None:
    """Let an embedding or head of `length` rows use this rank's rows. `owed`: an embedding returns partial sums."""
    kind = _ShardedEmbedding if isinstance(module, nn.Embedding) else _ShardedHead
    module.__class__ = type(module.__class__.__name__, (kind, module.__class__), {})
    module.__dict__["_rows"] = Rows.make_chunks(length, group.size())
    module.__dict__["_ranks"] = group
    module.__dict__["_owed"] = owed


class _ShardedEmbedding(nn.Embedding):
    _rows: Rows
    _ranks: ProcessGroup
    _owed: bool

    def forward(self, input: Tensor) -> Tensor:
        """Return the sum over ranks, or this rank's partial sum if `_owed`."""
        first, count = self._rows.ranks[self._ranks.rank()][0]
        if count:
            here = (input >= first) & (input < first + count)
            padding = self.padding_idx
            padding = padding - first if padding is not None and first <= padding < first + count else None
            share = F.embedding(torch.where(here, input - first, 0), self.weight, padding)
            share = share * here.unsqueeze(-1).to(share.dtype)
        else:
            share = self.weight.new_zeros(*input.shape, self.embedding_dim) + self.weight.sum() * 0
        return share if self._owed else reduce_from_region(share, self._ranks)


class _ShardedHead(nn.Linear):
    _rows: Rows
    _ranks: ProcessGroup

    def forward(self, input: Tensor) -> ShardedTensor:
        if not self.__dict__.get("_gathered"):  # already gathered from sequence shards in `parallel/tensor/sequence/runtime.py`
            input = copy_to_region(input, self._ranks)
        logits = F.linear(input, self.weight, self.bias)
        return ShardedTensor(logits, logits.dim() - 1, self._rows, self._ranks)


_SHAPING = (Tensor.view, Tensor.reshape, torch.reshape)
_SPLITS = (Tensor.split, torch.split, Tensor.split_with_sizes, torch.split_with_sizes)


class LocalSizes(TorchFunctionMode):
    """Corrects sizes while the code of a sliced block runs on one of n ranks (see [Note: Local sizes])."""

    def __init__(self, n: int):
        super().__init__()
        self.n = n

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _SHAPING:
            args, kwargs = self._correct_reshape(args, kwargs)
        elif func in (Tensor.unflatten, torch.unflatten) and not kwargs and len(args) == 3:
            args = self._correct_unflatten(*args)
        elif func in _SPLITS:
            args, kwargs = self._correct_split(args, kwargs)
        elif func is Tensor.expand and not kwargs:
            args = self._correct_expand(args)
        return func(*args, **kwargs)

    def _correct_reshape(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x, *rest = args
        sizes = kwargs.get("shape", kwargs.get("size")) if not rest else rest[0] if len(rest) == 1 else rest
        shape = _parse_sizes([sizes] if isinstance(sizes, int) else sizes)
        if shape is None:
            return args, kwargs
        return (x, correct_shape(tuple(x.shape), shape, self.n)), {}

    def _correct_unflatten(self, x: Tensor, dim: object, sizes: object) -> tuple[Any, ...]:
        shape = _parse_sizes(sizes)
        if shape is None or not isinstance(dim, int):
            return x, dim, sizes
        return x, dim, correct_shape((x.shape[dim],), shape, self.n)

    def _correct_split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Correct the parts of `split(x, size or sizes, dim=0)`."""
        names = ("split_size", "split_size_or_sections", "split_sizes")
        parts = args[1] if len(args) > 1 else next((kwargs[k] for k in names if k in kwargs), None)
        dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        size = args[0].shape[dim]
        if isinstance(parts, int):
            wrong = parts > 0 and parts % self.n == 0 and (size <= parts or size % parts != 0)
            parts = parts // self.n if wrong else parts
        elif (sizes := _parse_sizes(parts)) is not None:
            wrong = sum(sizes) == self.n * size and all(s % self.n == 0 for s in sizes)
            parts = [s // self.n for s in sizes] if wrong else parts
        else:
            return args, kwargs
        return (args[0], parts, dim), {}

    def _correct_expand(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        shape = _parse_sizes(rest[0] if len(rest) == 1 and not isinstance(rest[0], int) else rest)
        if shape is None or len(shape) < x.dim():
            return args
        front = len(shape) - x.dim()
        own = (None,) * front + tuple(x.shape)
        return x, tuple(
            have if have not in (None, 1) and ask == self.n * have else ask for have, ask in zip(own, shape)
        )


def _parse_sizes(sizes: object) -> tuple[int, ...] | None:
    """Return sizes as a tuple of integers, or None if they are something else (a dtype, a tensor)."""
    whole = isinstance(sizes, (tuple, list)) and all(isinstance(size, int) for size in sizes)
    return tuple(sizes) if whole else None


def correct_shape(have: tuple[int, ...], ask: tuple[int, ...], n: int) -> tuple[int, ...]:
    """Return the intended shape, if code requests `ask` for one n-th of its elements, in the shape `have`.

    >>> correct_shape((2, 5, 8), (2, 5, 16), 2), correct_shape((2, 5, 8), (2, 5, 4, 4), 2)
    ((2, 5, 8), (2, 5, 2, 4))
    >>> correct_shape((2, 2, 5, 4), (8, 5, 4), 2)
    (4, 5, 4)
    """
    if -1 in ask or prod(ask) != n * prod(have):
        return ask
    i = _find_mismatch(have, ask, n)
    at = next((k for k in range(i, len(ask)) if ask[k] % n == 0), None)
    return ask if at is None else (*ask[:at], ask[at] // n, *ask[at + 1 :])


def _find_mismatch(have: tuple[int, ...], ask: tuple[int, ...], n: int) -> int:
    """Return the first requested dim that is not a product of the tensor's own dims, from the left."""
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


def wire_slices(
    model: nn.Module,
    sketch: Sketch,
    own: Mapping[str, nn.Parameter],
    ranks: ProcessGroup,
    parallel_units: SequenceParallelUnits | None = None,
    async_tp: bool = False,
) -> tuple[list[ColumnRowPair], dict[str, nn.Parameter]]:
    """Shard the parameters in `own`, which excludes those of other stages. Return the sharded regions, and a rank's
    slices by name."""
    regions = [g for g in sketch.slices.groups if all(c.parameter in own for c in g.tp_shards)]
    tables = filter_local_modules(model, sketch.slices.vocabulary, own)
    lengths = {name: next(model.get_submodule(name).parameters()).shape[0] for name in tables}
    parts = slice_parameters(model, {c.parameter: c for c in sketch.tp_shards if c.parameter in own}, ranks.rank())
    for region in regions:
        for integer in region.scaled_attributes:
            divide_integer(model, integer)
        SlicedRegion(model, region, ranks, parallel_units, async_tp)
    owed = () if parallel_units is None else parallel_units.slices.deferred_sums
    for name in tables:
        wire_vocabulary(model.get_submodule(name), lengths[name], ranks, name in owed)
    return regions, parts


def slice_parameters(model: nn.Module, cuts: Mapping[str, ParameterSlice], rank: int) -> dict[str, nn.Parameter]:
    """Replace parameters by this rank's slices wherever they are used. Return the new ones by name."""
    named = dict(model.named_parameters())
    new = {
        id(p): make_parameter_like(
            p, copy_ranges(p.detach(), cut.dim, cut.ranges[rank]), make_slice_layout(tuple(p.shape), cut, rank)[1]
        )
        for p, cut in ((named[name], cut) for name, cut in cuts.items())
    }
    replace_parameters(model, new)
    return {name: new[id(named[name])] for name in cuts}


def make_slice_layout(shape: tuple[int, ...], cut: ParameterSlice, rank: int) -> tuple[tuple[int, ...], tuple[Ranges, ...]]:
    """Return the full shape and this rank's ranges of it, as in `Part`."""
    ranges = list(full_ranges(shape))
    ranges[cut.dim] = cut.ranges[rank]
    return shape, tuple(ranges)


def divide_integer(model: nn.Module, integer: ScaledAttribute) -> None:
    """Divide an integer that a module's code stores. An object that contains it is first copied for this module."""
    holder: object = model.get_submodule(integer.module)
    *path, name = integer.path.split(".")
    for step in path:
        inner = copy.copy(vars(holder)[step])  # a module's own __setattr__ would look for parameters
        vars(holder)[step] = inner
        holder = inner
    vars(holder)[name] //= integer.divisor


class SlicedRegion:
    """One region of slices in a rank's model."""

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
        """Where the region starts and ends in a unit on sequence shards; None for other units."""
        self.entered: dict[int, tuple[Tensor, Tensor]] = {}
        """Inputs of the columns by id, with the result at the region's start. Columns with the same input need one
        reduction."""
        self.gathered: dict[int, tuple[Tensor, Tensor]] = {}
        """Sequence shards by id, with the gathered full tensors."""
        self.columns, self.row = self._make_fused(model, group) if async_tp else (None, None)
        """Fused columns and row that gather or reduce themselves (`async_tp`)."""
        for argument in () if self.border is None else self.border.arguments:
            self._wrap_argument(model.get_submodule(argument.module), argument, self._gather_argument)
        for name in () if self.columns is not None else group.columns:
            column = model.get_submodule(name)
            column.register_forward_pre_hook(self._enter, with_kwargs=True)
            if isinstance(column, nn.MultiheadAttention):
                column.__class__ = type(
                    type(column).__name__, (_ShardedHeads, type(column)), {"_first": ranks.rank() * column.num_heads}
                )
        row = model.get_submodule(group.row)
        if ranks.rank() > 0 and self.row is None:
            silence_bias(row)
        row.register_forward_hook(self._leave)
        for argument in group.arguments:
            self._wrap_argument(model.get_submodule(argument.module), argument, self._take_part)
        if group.resize:
            resize_container(model.get_submodule(group.container), ranks.size())

    def _make_fused(self, model: nn.Module, group: ColumnRowPair) -> tuple[FusedColumns | None, FusedRow | None]:
        units, row = self.parallel_units, model.get_submodule(group.row)
        if units is None or self.border is None:
            return None, None
        plain_row = isinstance(row, nn.Linear) and is_plain_linear(row)
        return FusedColumns.for_region(model, group, units), FusedRow(row, self.border.dim, units) if plain_row else None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return tuple(map(self._enter_value, args)), {key: self._enter_value(value) for key, value in kwargs.items()}

    def _enter_value(self, value: object) -> object:
        if not (isinstance(value, Tensor) and value.requires_grad):
            return value
        if id(value) not in self.entered:
            self.entered[id(value)] = value, copy_to_region(value, self.ranks)
        return self.entered[id(value)][1]

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        self.entered.clear()
        self.gathered.clear()
        if self.columns is not None:
            self.columns.precomputed.clear()
        if self.row is not None:
            return output
        if self.parallel_units is not None and self.border is not None:
            return self.parallel_units.end_region(output, self.border.dim)
        return reduce_from_region(output, self.ranks)

    def _gather_argument(self, value: Tensor, dim: int) -> Tensor:
        """Return all rows of an input of the region. Fused columns gather it themselves. Its gradient needs no further
        reduction."""
        assert self.parallel_units is not None
        if id(value) not in self.gathered and self.columns is not None:
            self.gathered[id(value)] = value, self.columns.make_lazy(value, dim)
        elif id(value) not in self.gathered:
            whole = self.parallel_units.begin_region(value, dim)
            self.gathered[id(value)] = value, whole
            self.entered[id(whole)] = whole, whole
        return self.gathered[id(value)][1]

    def _wrap_argument(self, module: nn.Module, argument: RegionArgument, make: Callable[[Tensor, Any], Tensor]) -> None:
        replaced: list[tuple[Tensor, Tensor]] = []

        def replace_value(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            replaced.clear()
            key = argument.key
            value = kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None
            if not isinstance(value, Tensor):
                return args, kwargs
            mine = make(value, argument.dim)
            replaced.append((mine, value))
            return replace_argument(args, kwargs, key, mine)

        def restore_value(module: nn.Module, args: tuple[Any, ...], output: object) -> object:
            """Replace the part by the original value if the module returns it, for code outside of the region."""
            back = lambda t: next((value for mine, value in replaced if t is mine), t)  # noqa: E731
            output = tree_map_only(Tensor, back, output) if replaced else output
            replaced.clear()
            return output

        module.register_forward_pre_hook(replace_value, with_kwargs=True)
        module.register_forward_hook(restore_value)

    def _take_part(self, value: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return copy_to_region(value, self.ranks)
        rows = value.shape[dim]  # size 1 is broadcast over the ranks' slices
        return value if rows == 1 else scatter_to_region(value, dim, Rows.make_even(rows, self.ranks.size()), self.ranks)


class SlicedDraws:
    """Rule for `randomness/sub_block.py`: the ranges of a random tensor on a rank. In a region it is always the same
    dim that is sharded."""

    def __init__(self, groups: list[ColumnRowPair], rank: int, ranks: int):
        self.groups, self.rank, self.ranks = groups, rank, ranks
        self.known_dims: dict[str, int] = {}

    def __call__(self, place: str, dim: int, whole: int | None, local: int) -> Axis | None:
        if whole is None or whole != local * self.ranks or self.known_dims.get(place, dim) != dim:
            return None
        owner = place.split("#")[0] + "."
        for group in self.groups:
            if group.container == "" or owner.startswith(f"{group.container}."):
                self.known_dims[place] = dim  # another dim may have the same size by chance, such as a sequence of half the length
                same = (c.ranges[self.rank] for c in group.tp_shards if sum(n for r in c.ranges for _, n in r) == whole)
                return whole, next(same, ((self.rank * local, local),))
        return None


class _ShardedHeads(nn.MultiheadAttention):
    _first: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run attention on this rank's heads, like torch's own."""
        return multihead.multihead_forward(self, *args, **kwargs, first_head=self._first)


def silence_bias(row: nn.Module) -> None:
    """Make a row's bias zero during its call, except on the first rank, because the sum over ranks must contain it
    once."""
    if own_parameters(row).get("bias") is None:
        return
    row.__class__ = _make_silent_class(row.__class__)
    row.register_forward_pre_hook(lambda module, args: module.__dict__.update(_silent=True))
    row.register_forward_hook(lambda module, args, output: module.__dict__.update(_silent=False), always_call=True)


@cache
def _make_silent_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_SilentBias, kind), {"_silent": False})


class _SilentBias(nn.Module):
    _silent: bool

    @property
    def bias(self) -> Tensor:
        """Zeros for the layer's own code during a call; otherwise the parameter, for code that shards or saves it."""
        bias = own_parameters(self)["bias"]
        assert bias is not None
        if not self._silent:
            return bias
        return torch.where(torch.zeros((), dtype=torch.bool, device=bias.device), bias, 0.0)  # its gradient is zero


def resize_container(container: nn.Module, ranks: int) -> None:
    """Run the container's code under `LocalSizes`, so that sizes for view, split and expand become those of a slice."""
    if "_resized" in container.__dict__:
        return
    container.__dict__["_resized"] = True
    forward = container.__dict__.get("forward")
    if forward is None:
        container.__class__ = _make_resized_class(container.__class__, ranks)
        return

    def run_resized(*args: Any, **kwargs: Any) -> Any:
        with LocalSizes(ranks):
            return forward(*args, **kwargs)

    container.__dict__["forward"] = run_resized


@cache
def _make_resized_class(kind: type[nn.Module], ranks: int) -> type[nn.Module]:
    """Return a subclass whose forward runs under `LocalSizes`. All modules of a class get the same one, so they use the
    same compiled code."""

    def run_resized(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with LocalSizes(ranks):
            return run_class_forward(kind, self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": run_resized, DELEGATES_ATTRIBUTE: True})
