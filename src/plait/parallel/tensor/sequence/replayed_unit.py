"""Check of which units can run on a sequence shard between their regions.

Outside of its regions, a transformer block computes every position independently: norms, dropout, residuals. The check
runs a unit in full, and then on a rank's sequence shard of its hidden states, in one process. As in
`parallel/tensor/find/replayed_module.py`, linear layers return the same random values in both runs, in float64. At the
start of a region, the shard must equal that part of the region's input in the full run. It is then replaced by the full
input. At its end, the rank receives its shard of the row's output. If the unit's outputs are shards of its full
outputs, and all other values are equal, its code works row by row.

A region starts at its columns, or at the module that contains them if its code reads the sequence length. Gradients
from sequence shards are partial sums. Those of parameters are reduced once, after backward. Those of other tensors are
not reduced, so a unit that uses such a tensor on its shard is rejected.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from plait.config.errors import summarize_error
from plait.model.slices import ColumnRowPair, PositionwiseUnit, RegionArgument, RegionBorder, Slices
from plait.parallel.tensor.find.dataflow_trace import DataflowTrace, copy_arguments
from plait.parallel.tensor.find.linear_maps import LinearMap
from plait.parallel.tensor.find.replayed_module import CodeMismatch, MapInput, ReplayedModule, ReplayedRun, Values
from plait.parallel.tensor.sequence.runtime import GlobalShape, get_local_rows, replace_argument
from plait.tensors.float64 import is_close
from plait.tensors.opaque_code import (
    UNEVEN_FACTORS,
    AlteredReads,
    CodeLine,
    format_read_lines,
    format_uneven_rows,
    scale_unevenly,
    try_altered_reads,
)
from plait.tensors.rows import Ranges, Rows
from plait.tensors.torch_private import tree_map_only

MAX_MIXED_REGIONS = 4
"""A unit with more regions starts all of them at the columns, or all at the enclosing modules."""
NO_SEQUENCE = "none of its inputs has a sequence dim that its output also has"


class ReplayedUnit(ReplayedModule):
    """One call of a unit, repeated in full and on sequence shards."""

    than_where = "on a sequence shard than in the full run"
    full_run: ReplayedRun
    """The recorded full run."""
    map_values: Values
    """Outputs of linear layers in both runs."""

    def __init__(self, follow: DataflowTrace, number: int, maps: Mapping[str, LinearMap], groups: list[ColumnRowPair]):
        super().__init__(follow, number, maps)
        self.groups = groups
        self.group_of_column = {name: g for g in groups for name in g.columns}
        self.group_of_row = {g.row: g for g in groups}
        self.enclosing_modules = {g.row: self._find_enclosing(g) for g in groups}
        self.full_arguments: dict[tuple[str, int], tuple[Any, Any]] = {}
        self.shard: tuple[Rows, int] | None = None
        self.hidden_argument: tuple[int | str, int] = (0, 0)
        self.region_starts: dict[str, ColumnRowPair] = {}
        self.posing = False
        self.scales: tuple[float, float] | None = None
        """Factors on the last position of its hidden states, and on the others."""
        self.reset_run()

    def reset_run(self) -> None:
        self.gathered_dims: dict[str, dict[tuple[str, int | str], int]] = {}
        """By row of a region: (module, argument) -> dim along which its start gathers."""
        self.gathered: dict[int, tuple[Tensor, Tensor]] = {}
        self.gathered_full: dict[int, Tensor] = {}
        """Gathered tensors, in full."""
        self.shard_tensors: list[Tensor] = []
        """Tensors computed from sequence shards."""
        self.full_tensors: list[Tensor] = []
        self.unsliced_maps: set[str] = set()
        """Linear layers that are not sharded and run on sequence shards."""

    def _find_enclosing(self, group: ColumnRowPair) -> list[str]:
        """Return the submodules that contain all columns, innermost first."""
        paths = [name.split(".") for name in group.columns]
        same = [step for step, *others in zip(*(path[:-1] for path in paths)) if all(o == step for o in others)]
        least = self.name.count(".") + 1
        return [".".join(same[:n]) for n in range(len(same), least, -1)]

    # — replacements in a run on a sequence shard —

    def _make_arguments(self, shown: ReplayedRun, groups: tuple[ColumnRowPair, ...], rank: int) -> tuple[Any, Any]:
        known: dict[int, Tensor] = {}
        self.others: list[Tensor] = []

        def copy_tensor(t: Tensor) -> Tensor:
            if id(t) not in known:
                plain = t.detach().clone()
                known[id(t)] = plain.requires_grad_().clone() if t.is_floating_point() else plain
                self.others += [known[id(t)]] if t.requires_grad else []
            return known[id(t)]

        key, dim = self.hidden_argument
        args, kwargs = copy_arguments(self.call.args), copy_arguments(self.call.kwargs)
        if self.scales is not None:
            args, kwargs = replace_argument(args, kwargs, key, scale_unevenly(self._get_argument(key), dim, self.scales))
        args, kwargs = tree_map_only(Tensor, copy_tensor, (args, kwargs))
        if self.shard is not None:
            whole = kwargs[key] if isinstance(key, str) else args[key]
            self.others = [t for t in self.others if t is not whole]
            args, kwargs = replace_argument(args, kwargs, key, self._take_shard(whole, dim))
        shown.arguments |= {k: v for k, v in (*enumerate(args), *kwargs.items()) if isinstance(v, Tensor)}
        return args, kwargs

    @contextmanager
    def hook_regions(self) -> Iterator[None]:
        """Hook the starts of regions. A full run records their inputs; a run on a shard gets the recorded inputs."""
        counts: dict[str, int] = {}
        handles = []
        modules = dict(self.module.named_modules(prefix=self.name))
        for name in dict.fromkeys([*self.group_of_column, *(name for names in self.enclosing_modules.values() for name in names)]):

            def enter_region(_: object, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> Any:
                number = counts[name] = counts.get(name, -1) + 1
                if self.shard is None:
                    self.full_arguments[name, number] = args, kwargs
                    return None
                return self._begin_region(name, number, args, kwargs) if name in self.region_starts else None

            handles.append(modules[name].register_forward_pre_hook(enter_region, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin_region(self, name: str, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if (name, number) not in self.full_arguments:
            raise CodeMismatch(f"{name} is called more often {self.than_where}")
        before, group = self.full_arguments[name, number], self.region_starts[name]
        for key, value in (*enumerate(args), *kwargs.items()):
            whole = (before[1] if isinstance(key, str) else before[0])[key]
            mine = get_local_rows(value)
            if not isinstance(mine, Tensor) or mine.shape == whole.shape:
                continue
            dim = self.find_shard_dim(name, mine, whole)
            if id(value) not in self.gathered:
                full = whole.detach().clone().requires_grad_()
                self.gathered[id(value)] = value, full
                self.gathered_full[id(full)] = full
                self.shard_tensors.append(mine)
            args, kwargs = replace_argument(args, kwargs, key, self.gathered[id(value)][1])
            if self.gathered_dims.setdefault(group.row, {}).setdefault((name, key), dim) != dim:
                raise CodeMismatch(f"{name} has sequences along different dims as input")
        return args, kwargs

    def find_shard_dim(self, name: str, part: Tensor, whole: Tensor) -> int:
        """Return the dim along which `part` is this rank's shard of `whole`. Raises `CodeMismatch` if there is none."""
        assert self.shard is not None
        rows, rank = self.shard
        dims = [d for d, (m, n) in enumerate(zip(whole.shape, part.shape)) if m != n]
        if whole.dim() != part.dim() or len(dims) != 1 or whole.shape[dims[0]] != rows.length:
            raise CodeMismatch(f"the input of {name} is {list(part.shape)} on a sequence shard, and {list(whole.shape)} in the full run")
        if not is_close(part, rows.take_part(whole, dims[0], rank)):
            raise CodeMismatch(f"on a sequence shard the input of {name} is not that shard of the full input")
        return dims[0]

    def _return_value(self, call: MapInput, value: object, features: Ranges | None) -> Any:
        """Return a linear layer's output: all rows for columns, this rank's rows for a row, and for others the rows of
        their input."""
        if self.shard is None:
            return super()._return_value(call, value, features)
        name, number, x = call
        before = next(x for other, at, x in self.full_run.map_inputs if (other, at) == (name, number))
        x, copied = get_local_rows(x), tree_map_only(Tensor, torch.clone, value)
        if (name in self.group_of_column or name in self.group_of_row) and not is_close(x, before):
            raise CodeMismatch(f"on a sequence shard the input of {name} is not that of the full run")
        if name in self.group_of_column:
            self.full_tensors += [x] if id(x) not in self.gathered_full else []
            if self.group_of_column[name].container != name:
                return copied
            return (self._take_shard(copied[0], self.find_region_dim(self.group_of_column[name])), *copied[1:])
        if name in self.group_of_row:
            return self._take_shard(copied, self.find_region_dim(self.group_of_row[name]))
        if name not in self.maps or self.maps[name].weight.dim() != 2:
            raise CodeMismatch(f"{name} is not sharded and may combine several positions")
        if x.shape == before.shape:
            raise CodeMismatch(f"{name} is computed in full, between sequence shards")
        self.unsliced_maps.add(name)
        self.shard_tensors.append(x)
        return self._take_shard(copied, self.find_shard_dim(name, x, before))

    def _take_shard(self, whole: Tensor, dim: int) -> Tensor:
        assert self.shard is not None
        rows, rank = self.shard
        mine = rows.take_part(whole, dim, rank)
        return GlobalShape.from_shard(mine, dim, rows.length) if self.posing else mine

    def find_region_dim(self, group: ColumnRowPair) -> int:
        dims = set(self.gathered_dims.get(group.row, {}).values())
        if len(dims) != 1:
            raise CodeMismatch(f"the region of {group.row} has no sequence shard as input" if not dims else "its dims differ")
        return dims.pop()

    def check_unit(self, known: list[PositionwiseUnit], ranks: int, samples: int, handed: set[int]) -> PositionwiseUnit:
        """Return how the unit runs on sequence shards. Raises `CodeMismatch` if it cannot."""
        places = list(self._find_candidates(samples, handed))
        places.sort(key=lambda place: place not in [(one.key, one.dim) for one in known])
        if not places:
            raise CodeMismatch(NO_SEQUENCE)
        try:
            self.map_values = self.draw_values(1)
            with AlteredReads() as numbers:
                self._run_full()
        except Exception as error:
            raise CodeMismatch(f"its code cannot run separately ({type(error).__name__})") from error
        reasons = []
        for self.posing, self.hidden_argument in product((False, True), places):
            for levels in self._iter_region_starts():
                try:
                    found = self._try_shards(levels, ranks)
                    if numbers.read:
                        self._retry_other_numbers(found, levels, ranks, numbers.read)
                    return found
                except CodeMismatch as strayed:
                    reasons.append(str(strayed))
                except Exception as error:
                    lines = str(error).splitlines() or [""]
                    reasons.append(f"its code cannot run on a sequence shard ({type(error).__name__}: {lines[0][:120]})")
        raise CodeMismatch(reasons[0])

    def _run_full(self) -> None:
        """Run the unit in full, and record `full_run` and `full_arguments` of regions."""
        self.shard, self.full_arguments = None, {}
        with self.hook_regions():
            self.full_run = self.run(self.map_values)

    def _retry_other_numbers(
        self, found: PositionwiseUnit, levels: dict[str, ColumnRowPair], ranks: int, read: Iterable[CodeLine]
    ) -> None:
        """Repeat the check with other values where the code reads tensor values, at the lines `read`. Raises
        `CodeMismatch` if the result differs."""

        def run() -> CodeMismatch | None:
            try:
                return self._run_full()
            except CodeMismatch as strayed:
                return strayed

        def compare_runs() -> None:
            other = self._try_shards(levels, ranks)
            more = set(other.partial_gradients) - set(found.partial_gradients)  # a parameter may be unused
            if more or replace(other, partial_gradients=found.partial_gradients) != found:
                raise CodeMismatch("its code behaves differently on a sequence shard")

        usual, end = (self.full_run, self.full_arguments), ""
        try:
            for lines, strayed in try_altered_reads(run, read):
                end = format_read_lines(lines)
                if strayed is not None:
                    raise strayed
                with AlteredReads(lines):
                    compare_runs()
            for self.scales in UNEVEN_FACTORS:
                end = format_uneven_rows(self.scales)
                self._run_full()
                compare_runs()
        except Exception as error:
            reason = str(error) if isinstance(error, CodeMismatch) else summarize_error(error)
            raise CodeMismatch(reason + end) from error
        finally:
            (self.full_run, self.full_arguments), self.scales = usual, None

    def _find_candidates(self, samples: int, handed: set[int]) -> Iterator[tuple[int | str, int]]:
        """Iterate over (argument, sequence dim) of possible hidden states: [samples, sequence, …] or [sequence,
        samples, …]."""
        for key, value in (*enumerate(self.call.args), *self.call.kwargs.items()):
            if not (isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 2):
                continue
            if not self.groups and id(value) not in handed:
                continue
            batch = next((d for d in (0, 1) if value.shape[d] == samples), None)
            if batch is not None and value.shape[1 - batch] > 1:
                yield key, 1 - batch

    def _iter_region_starts(self) -> Iterator[dict[str, ColumnRowPair]]:
        """Iterate over choices of the modules at which regions start."""
        choices = [[dict.fromkeys(g.columns, g)] for g in self.groups]
        for choice, group in zip(choices, self.groups):
            choice += [{name: group} for name in self.enclosing_modules[group.row]] if not self.posing else []
        picked = product(*choices) if len(choices) <= MAX_MIXED_REGIONS else zip(*((c[0], c[-1]) for c in choices))
        for some in picked:
            yield {name: group for one in some for name, group in one.items()}

    def _try_shards(self, levels: dict[str, ColumnRowPair], ranks: int) -> PositionwiseUnit:
        key, dim = self.hidden_argument
        length = self._get_argument(key).shape[dim]
        rows = Rows.make_even(length, min(ranks, length))
        for rank in (0, len(rows.ranks) - 1):
            self.region_starts, self.shard = levels, (rows, rank)
            self.reset_run()
            leaf = {n: p.detach().clone().requires_grad_() for n, p in self.parameters.items()}
            with self.hook_regions():
                shown = self.run(self.map_values, leaf=leaf)
            returned = self._find_returned(shown)
            partial = self._find_partial(leaf)
        return PositionwiseUnit(self.name, key, dim, returned, self._make_borders(), sees_full_shape=self.posing, partial_gradients=partial)

    def _get_argument(self, key: int | str) -> Tensor:
        return self.call.kwargs[key] if isinstance(key, str) else self.call.args[key]

    def _find_returned(self, shown: ReplayedRun) -> tuple[tuple[int, int], ...]:
        """Return (leaf, dim) of outputs that are sequence shards. Raises `CodeMismatch` if another output differs from
        the full run."""
        returned = []
        if len(shown.output) != len(self.full_run.output):
            raise CodeMismatch("on a sequence shard it returns different values")
        for i, (a, b) in enumerate(zip(self.full_run.output, map(get_local_rows, shown.output))):
            if not isinstance(a, Tensor) or not isinstance(b, Tensor):
                if type(a) is not type(b) or (isinstance(a, (int, float, str)) and a != b):
                    raise CodeMismatch("on a sequence shard it returns different values")
                returned += [(i, self.hidden_argument[1])] if a == self.hidden_argument[0] and type(a) is type(self.hidden_argument[0]) else []
            elif a.shape != b.shape:
                returned.append((i, self.find_shard_dim(f"the caller of {self.name}", b, a)))
                self.shard_tensors.append(b)
            elif not is_close(a, b) and i in self.call.used_leaves:
                raise CodeMismatch("on a sequence shard it returns different values")
            else:
                self.full_tensors.append(b)
        if not returned:
            raise CodeMismatch(NO_SEQUENCE)
        return tuple(returned)

    def _find_partial(self, leaf: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Return the parameters that are used on shards. Raises `CodeMismatch` if a gradient would not be reduced
        correctly."""
        mine = _find_reached(self.shard_tensors, [*leaf.values(), *self.others, *self.gathered_full.values()])
        whole = _find_reached(self.full_tensors, [*leaf.values(), *self.gathered_full.values()])
        cut = {c.parameter for g in self.groups for c in g.tp_shards}
        names = [n for n, p in leaf.items() if id(p) in mine]
        if any(id(t) in mine for t in self.others):
            raise CodeMismatch("it uses a trained argument other than its hidden states on sequence shards")
        if any(id(t) in mine | whole for t in self.gathered_full.values()):
            raise CodeMismatch("it also uses the input of a region outside of that region")
        for name in names:
            if name in cut or id(leaf[name]) in whole:
                raise CodeMismatch(f"{name} is used on sequence shards and in full")
        for argument in (a for g in self.groups for a in g.arguments):
            hidden = argument.module == self.name and argument.key == self.hidden_argument[0]
            if hidden or any((argument.module, argument.key) in given for given in self.gathered_dims.values()):
                raise CodeMismatch("a region uses its hidden states in another way than through its columns")
        named = {id(p): n for n, p in self.trace.model.named_parameters()}
        modules = dict(self.module.named_modules(prefix=self.name))
        names += [named[id(p)] for name in sorted(self.unsliced_maps) for p in modules[name].parameters()]
        return tuple(dict.fromkeys(names))

    def _make_borders(self) -> tuple[RegionBorder, ...]:
        borders = []
        for group in self.groups:
            dim = self.find_region_dim(group)
            arguments = tuple(RegionArgument(name, key, dim) for name, key in self.gathered_dims[group.row])
            packed = group.container in group.columns  # its `out_proj` always returns [samples, sequence, features]
            borders.append(RegionBorder(group.row, arguments, 1 if packed else dim))
        return tuple(borders)


def find_sharded_units(
    follow: DataflowTrace, maps: Mapping[str, LinearMap], slices: Slices, units: Mapping[str, str], ranks: int, samples: int
) -> Slices:
    """Add to the slices the units that run on sequence shards. `units`: name -> "", or why not, in the order of calls."""
    positionwise: list[PositionwiseUnit] = []
    reasons: list[tuple[str, str]] = []
    handed: set[int] = set()
    for unit, reason in units.items():
        groups = [g for g in slices.groups if _is_within(g.row, unit)]
        frames = [i for i, frame in enumerate(follow.module_calls) if frame.name == unit]
        if not frames:
            continue
        of_calls: list[PositionwiseUnit] = []
        try:
            if reason:
                raise CodeMismatch(reason)
            if any(not _is_within(name, unit) for g in groups for name in g.columns):
                raise CodeMismatch("one of its regions extends over other units")
            for number in frames:
                known = [*of_calls[-1:], *positionwise[-1:]]
                of_calls.append(ReplayedUnit(follow, number, maps, groups).check_unit(known, ranks, samples, handed))
            if any(one != of_calls[0] for one in of_calls):
                raise CodeMismatch("its calls differ")
        except CodeMismatch as strayed:
            reasons += [(unit, str(strayed))] if groups else []
            continue
        positionwise.append(of_calls[0])
        for number in frames:
            handed |= {id(follow.module_calls[number].output[i]) for i, _ in of_calls[0].returned}
    if not any(one.borders for one in positionwise):
        positionwise = []
    return replace(slices, sequence_units=tuple(positionwise), full_sequence_units=tuple(reasons))


def _is_within(name: str, unit: str) -> bool:
    return f"{name}.".startswith(f"{unit}.")


def _find_reached(ends: Iterable[Tensor], starts: list[Tensor]) -> set[int]:
    """Return the ids of tensors that some of the ends were computed from."""
    ends = [t for t in ends if t.requires_grad]
    if not ends or not starts:
        return set()
    gradients = torch.autograd.grad([t.sum() for t in ends], starts, allow_unused=True, retain_graph=True)
    return {id(t) for t, gradient in zip(starts, gradients) if gradient is not None}
