"""Running a model whose layers are cut into slices: what happens where a region of slices begins and where it ends.

The block's own code runs on a slice as it does on the whole. Only its borders are wired: what a column is given is
entered (its gradient is summed over the ranks), what the row returns is a share of a sum (it is added up). See
`parallel/tensor/strategy.py` for the technique, `model/slices.py` for the values, `tensors/collectives.py` for the collectives.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plait.model.sketch import Sketch
from plait.model.slices import ColumnRowPair, DividedNumber, ParameterSlice, RegionArgument, RegionBorder
from plait.parallel.tensor import vocabulary
from plait.parallel.tensor.local_sizes import LocalSizes
from plait.parallel.tensor.sequence.runtime import SequenceParallelUnits
from plait.randomness.sub_block import Axis
from plait.tensors import multihead
from plait.tensors.collectives import enter, part, total
from plait.tensors.part import Ranges, everything
from plait.tensors.rows import Rows
from plait.tensors.torch_private import tree_map_only


def wire(
    model: nn.Module,
    sketch: Sketch,
    own: Mapping[str, nn.Parameter],
    ranks: Any,
    parallel_units: SequenceParallelUnits | None = None,
) -> tuple[list[ColumnRowPair], dict[str, nn.Parameter]]:
    """Cut what of a model is its `own` (not another stage's): the regions that are cut, and a rank's slices by name."""
    regions = [g for g in sketch.slices.groups if all(c.parameter in own for c in g.cuts)]
    mine = {id(p) for p in own.values()}
    tables = [m for m in sketch.slices.vocabulary if all(id(p) in mine for p in model.get_submodule(m).parameters())]
    lengths = {name: next(model.get_submodule(name).parameters()).shape[0] for name in tables}
    found = cut_parameters(model, {c.parameter: c for c in sketch.cuts if c.parameter in own}, ranks.rank())
    for region in regions:
        for integer in region.integers:
            set_integer(model, integer)
        SlicedRegion(model, region, ranks, None if parallel_units is None else parallel_units.borders.get(region.row))
    owed = () if parallel_units is None else parallel_units.slices.owed
    for name in tables:
        vocabulary.wire(model.get_submodule(name), lengths[name], ranks, name in owed)
    return regions, found


def cut_parameters(model: nn.Module, cuts: Mapping[str, ParameterSlice], rank: int) -> dict[str, nn.Parameter]:
    """Put this rank's slices in the place of parameters, everywhere they are used; the new ones by name."""
    named = dict(model.named_parameters())
    new = {
        id(named[name]): nn.Parameter(taken(named[name], cut, rank), named[name].requires_grad)
        for name, cut in cuts.items()
    }
    found = {name: new[id(named[name])] for name in cuts}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if id(parameter) in new:
                module._parameters[key] = new[id(parameter)]
    return found


def taken(whole: Tensor, cut: ParameterSlice, rank: int) -> Tensor:
    """A rank's slice of a tensor, in storage of its own."""
    pieces = [whole.detach().narrow(cut.dim, first, length) for first, length in cut.ranges[rank]]
    return torch.cat(pieces, cut.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)


def layout_of(shape: tuple[int, ...], cut: ParameterSlice, rank: int) -> tuple[tuple[int, ...], tuple[Ranges, ...]]:
    """The shape of the whole and this rank's ranges of it, as `Part` has them."""
    ranges = list(everything(shape))
    ranges[cut.dim] = cut.ranges[rank]
    return shape, tuple(ranges)


def set_integer(model: nn.Module, integer: DividedNumber) -> None:
    """Divide a number that a module's code has fixed. An object that holds it is copied for this module first."""
    holder: Any = model.get_submodule(integer.module)
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
        ranks: Any,
        on: tuple[RegionBorder, SequenceParallelUnits] | None = None,
    ):
        """`on`: where it begins and ends in a unit that runs on stretches of the sequence."""
        self.ranks, self.on = ranks, on
        self.entered: dict[int, tuple[Tensor, Tensor]] = {}
        """What the columns were given, by its id, and the same entered: several columns share one tensor, and one sum."""
        self.gathered: dict[int, tuple[Tensor, Tensor]] = {}
        """Stretches, by their id, and the wholes they are of."""
        for argument in on[0].given if on else ():
            self._wrap(model.get_submodule(argument.module), argument, self._gathered)
        for name in group.columns:
            column = model.get_submodule(name)
            column.register_forward_pre_hook(self._enter, with_kwargs=True)
            if isinstance(column, nn.MultiheadAttention):
                column.__class__ = type(
                    type(column).__name__, (_Heads, type(column)), {"_first": ranks.rank() * column.num_heads}
                )
        row = model.get_submodule(group.row)
        if ranks.rank() > 0:
            silence(row)
        row.register_forward_hook(self._leave)
        for argument in group.arguments:
            self._wrap(model.get_submodule(argument.module), argument, self._part)
        if group.resize:
            resize(model.get_submodule(group.container), ranks.size())

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return tuple(map(self._entered, args)), {key: self._entered(value) for key, value in kwargs.items()}

    def _entered(self, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.requires_grad):
            return value
        if id(value) not in self.entered:
            self.entered[id(value)] = value, enter(value, self.ranks)
        return self.entered[id(value)][1]

    def _leave(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.entered.clear()
        self.gathered.clear()
        if self.on is not None:
            border, parallel_units = self.on
            return parallel_units.end(output, border.dim, border.row)
        return total(output, self.ranks)

    def _gathered(self, value: Tensor, dim: int) -> Tensor:
        """All rows of what a unit on stretches gives the region; its gradient needs no other sum."""
        assert self.on is not None
        border, parallel_units = self.on
        if id(value) not in self.gathered:
            whole = parallel_units.begin(value, dim, border.row)
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
            if isinstance(key, str):
                return args, {**kwargs, key: mine}
            return (*args[:key], mine, *args[key + 1 :]), kwargs

        def handed_on(module: nn.Module, args: Any, output: Any) -> Any:
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
    row.__class__ = type(row.__class__.__name__, (_Silent, row.__class__), {"_silent": False})
    row.register_forward_pre_hook(lambda module, args: module.__dict__.update(_silent=True))
    row.register_forward_hook(lambda module, args, output: module.__dict__.update(_silent=False), always_call=True)


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
    kind = container.__class__
    forward = container.__dict__.get("forward")

    def resized(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with LocalSizes(ranks):
            return kind.forward(self, *args, **kwargs) if forward is None else forward(*args, **kwargs)

    if forward is None:
        container.__class__ = type(kind.__name__, (kind,), {"forward": resized})
    else:
        container.__dict__["forward"] = resized.__get__(container)
