"""Comparison of the code between column and row layers on a rank's slice with the full code, and search for what makes
them equal.

Layers are linear: without some rows of its weight, a column layer returns the remaining features unchanged. So the
check needs no weights of linear layers. Every linear layer in the container returns random values, the same in the full
run and in a rank's run. A column layer returns only the rank's features of them. The input of the row layer must then
be the rank's slice of its input in the full run. The inputs of other layers, and the container's outputs that are used,
must be equal. The same is checked backward. For a random gradient at the row's input, each column must receive its
slice of the gradient. A hook that divides a gradient by its norm fails this check.

[Note: Divided integers]
Code like `view(B, T, self.num_heads, -1)` runs on a slice if `num_heads` is divided. Attribute names do not reveal
which integers to divide. So each integer of the modules involved is changed in a full run, and integers without an
effect are skipped. Combinations of the others are tried, the smallest first, until one passes the check. Then the same
is tried with `LocalSizes`, for sizes that the code computes from its input.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from plait.model.slices import ColumnRowPair, ParameterSlice, ScaledAttribute
from plait.parallel.tensor.find.dataflow_trace import (
    DataflowTrace,
    DisableDropout,
    MapCall,
    ModuleCall,
    Patch,
    copy_arguments,
    patch_forwards,
)
from plait.parallel.tensor.find.linear_maps import LinearMap
from plait.parallel.tensor.wiring import LocalSizes, divide_integer
from plait.randomness import keyed
from plait.tensors.float64 import Float64Mode, is_close
from plait.tensors.module_state import restore_module_state
from plait.tensors.opaque_code import AlteredReads, format_read_lines, try_altered_reads
from plait.tensors.rows import Ranges, copy_ranges
from plait.tensors.torch_private import dataclass_leaves, tree_map_only

Values = dict[tuple[str, int], Any]
"""The output of each call of each linear layer in a container, by name and index of the call."""


class CodeMismatch(Exception):
    """Raised if the code behaves differently than in the full run."""


class MapInput(NamedTuple):
    """The input of one call of a linear layer."""

    name: str
    number: int
    """Index among the calls of this layer."""
    x: Tensor


@dataclass
class ReplayedRun:
    """Inputs and outputs recorded in one run of a container."""

    map_inputs: list[MapInput] = field(default_factory=list)
    """Inputs of linear layers, in the order of the calls."""
    output: list[Any] = field(default_factory=list)
    """Leaves of the container's output. An argument that is returned unchanged is represented by its key."""
    arguments: dict[int | str, Tensor] = field(default_factory=dict)
    """Tensors among the container's direct arguments."""
    map_outputs: dict[tuple[str, int], Tensor] | None = None
    """Output of each call of a linear layer, if gradients are needed."""

    def compute_gradients(self, given: Mapping[tuple[str, int], Tensor]) -> dict[tuple[str, int], Tensor]:
        """Return the gradient at the output of each linear layer. `given`: the gradients at inputs of linear layers."""
        ends = [(g.x, given[g.name, g.number]) for g in self.map_inputs if (g.name, g.number) in given and g.x.requires_grad]
        answers = self.map_outputs or {}
        if not ends or not answers:
            return {}
        inputs, outputs = tuple(answers.values()), tuple(x for x, _ in ends)
        found = torch.autograd.grad(outputs, inputs, tuple(g for _, g in ends), retain_graph=True, allow_unused=True)
        return {key: g for key, g in zip(answers, found) if g is not None}


class ReplayedModule:
    """One call of a module, which can be repeated with other values and on a rank's slice."""

    than_where = "than in the full run"
    """End of the message for a linear layer that is called more often when the code is repeated."""

    def __init__(self, follow: DataflowTrace, number: int, maps: Mapping[str, LinearMap]):
        self.trace, self.call, self.maps = follow, follow.module_calls[number], maps
        self.name, self.module = self.call.name, self.call.module
        self.map_calls: list[MapCall] = [c for c in follow.map_calls if number in c.parents]
        self.module_calls: list[ModuleCall] = [f for f in follow.module_calls if number in f.parents]
        kept = {name for name in follow.opaque if name.startswith(f"{self.name}.") or not self.name}
        hidden = {id(p) for name in kept for p in follow.opaque[name].parameters()}
        self.parameters = {
            name: p
            for name, p in self.module.named_parameters(self.name)
            if id(p) not in hidden and p.is_floating_point()
        }
        """Parameters of the code between linear layers."""

    def draw_values(self, seed: int) -> Values:
        """Draw a random output for every call of a linear layer."""
        g = torch.Generator().manual_seed(seed)
        outputs: Values = {}
        counts: dict[str, int] = {}
        for call in self.map_calls:
            number = counts[call.name] = counts.get(call.name, -1) + 1
            outputs[call.name, number] = tree_map_only(Tensor, lambda t: _random_like(t, g), call.output)
        return outputs

    def run(
        self,
        values: Values,
        groups: Iterable[ColumnRowPair] = (),
        rank: int = 0,
        leaf: Mapping[str, Tensor] | None = None,
        backward: bool = False,
    ) -> ReplayedRun:
        """Repeat the call in full, or as `rank` of the groups. `leaf`: replacements of its parameters. `backward`:
        record for gradients."""
        shown, groups = ReplayedRun(map_outputs={} if backward else None), tuple(groups)
        cuts = {cut.parameter: cut for group in groups for cut in group.tp_shards}
        replaced = dict(leaf or {})
        replaced |= {n: copy_ranges(p, cuts[n].dim, cuts[n].ranges[rank]) for n, p in self.parameters.items() if n in cuts}
        with ExitStack() as stack:
            stack.enter_context(restore_module_state(self.module.modules()))
            opaque = {made.name: self.trace.opaque[made.name] for made in self.map_calls}
            stack.enter_context(patch_forwards(opaque, self._make_patch(shown, values, cuts, rank)))
            for integer in {integer for group in groups for integer in group.scaled_attributes}:
                divide_integer(self.trace.model, integer)
            args, kwargs = self._make_arguments(shown, groups, rank)
            for mode in (Float64Mode(), DisableDropout()):
                stack.enter_context(mode)
            stack.enter_context(torch.enable_grad())
            for n in {len(group.tp_shards[0].ranges) for group in groups if group.resize}:
                stack.enter_context(LocalSizes(n))
            keyed.restore_host_state(self.call.state)
            own = {name[len(self.name) + bool(self.name) :]: p for name, p in replaced.items()}
            output = functional_call(self.module, own, args, kwargs) if own else self.module(*args, **kwargs)
        handed = {id(t): key for key, t in shown.arguments.items()}
        shown.output = [handed.get(id(t), t) for t in dataclass_leaves(output)]
        return shown

    def _make_patch(self, shown: ReplayedRun, values: Values, cuts: Mapping[str, ParameterSlice], rank: int) -> Patch:
        counts: dict[str, int] = {}

        def make_forward(name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
            cut = cuts.get(f"{name}.weight")
            column = name in self.maps and cut is not None and cut.dim == self.maps[name].out_dim
            features = cut.ranges[rank] if column and cut is not None else None

            def call(*args: Any, **kwargs: Any) -> Any:
                number = counts[name] = counts.get(name, -1) + 1
                if (name, number) not in values:
                    raise CodeMismatch(f"{name} is called more often {self.than_where}")
                shown.map_inputs.append(MapInput(name, number, next(iter((*args, *kwargs.values())), torch.zeros(()))))
                answer = self._return_value(shown.map_inputs[-1], values[name, number], features)
                if shown.map_outputs is None or not isinstance(answer, Tensor) or not answer.is_floating_point():
                    return answer
                shown.map_outputs[name, number] = answer.requires_grad_()
                return answer.clone()

            return call

        return make_forward

    def _return_value(self, call: MapInput, value: object, features: Ranges | None) -> Any:
        """Return a linear layer's output: these features of the value, or all of it."""
        if features is not None and isinstance(value, Tensor):
            return copy_ranges(value, self.maps[call.name].feature_dim, features)
        return tree_map_only(Tensor, torch.clone, value)

    def _make_arguments(self, shown: ReplayedRun, groups: tuple[ColumnRowPair, ...], rank: int) -> tuple[Any, Any]:
        """Copy the arguments. Sharded ones are replaced by this rank's part."""
        part = {a.key: a.dim for group in groups for a in group.arguments if a.module == self.name}

        def copy_value(key: int | str, value: object) -> object:
            if not isinstance(value, Tensor):
                return tree_map_only(Tensor, lambda t: _fresh_copy(t) if t.requires_grad else t.clone(), value)
            fresh, dim = _fresh_copy(value), part.get(key)
            if dim is not None and value.shape[dim] > 1:
                n = len(groups[0].tp_shards[0].ranges)
                fresh = fresh.chunk(n, dim)[rank]
            shown.arguments[key] = fresh
            return fresh

        args, kwargs = copy_arguments(self.call.args), copy_arguments(self.call.kwargs)
        return tuple(copy_value(i, a) for i, a in enumerate(args)), {k: copy_value(k, a) for k, a in kwargs.items()}

    def find_difference(self, whole: ReplayedRun, part: ReplayedRun, groups: Iterable[ColumnRowPair], rank: int) -> str:
        """Return how a rank's run differs from the full run, or ""."""
        rows = {group.row: next(c for c in group.tp_shards if c.parameter == f"{group.row}.weight") for group in groups}
        if [(g.name, g.number) for g in whole.map_inputs] != [(g.name, g.number) for g in part.map_inputs]:
            return "its code calls different layers on a slice than in the full run"
        for (name, _, a), (_, _, b) in zip(whole.map_inputs, part.map_inputs):
            want = copy_ranges(a, self.maps[name].feature_dim, rows[name].ranges[rank]) if name in rows else a
            if name in rows and not torch.isfinite(a).all():
                return f"on random values the input of {name} is infinite, so the check proves nothing"
            if not _is_equal(want, b):
                what = "not that rank's part of its input in the full run" if name in rows else "something else"
                return f"on a slice the input of {name} is {what}"
        for i in self.call.used_leaves:
            if i >= len(part.output) or not _is_equal(whole.output[i], part.output[i]):
                return f"on a slice {self.name or 'the model'} returns different values"
        return ""

    def compare_slices(self, values: Values, whole: ReplayedRun, groups: tuple[ColumnRowPair, ...]) -> str:
        """Return how the run of some rank differs from the full run, or ""."""
        for rank in range(len(groups[0].tp_shards[0].ranges)):
            if wrong := self.find_difference(whole, self.run(values, groups, rank), groups, rank):
                return wrong
        return ""

    def compare_gradients(self, values: Values, groups: tuple[ColumnRowPair, ...]) -> str:
        """Return how the gradients of the ranks' runs differ from the full run, or "". Both small and large gradients
        are tested, because a hook may clip them."""
        whole = self.run(values, backward=True)
        parts = [self.run(values, groups, rank, backward=True) for rank in range(len(groups[0].tp_shards[0].ranges))]
        cuts = {cut.parameter.removesuffix(".weight"): cut for group in groups for cut in group.tp_shards}
        columns = {name for group in groups for name in group.columns if name in self.maps and name in cuts}
        rows = {group.row: next(c for c in group.tp_shards if c.parameter == f"{group.row}.weight") for group in groups}
        for size in GRADIENT_SCALES:
            g = torch.Generator().manual_seed(3)
            given = {(name, k): size * _random_like(x, g) for name, k, x in whole.map_inputs if name in rows}
            with restore_module_state(self.module.modules()):
                try:
                    expected = whole.compute_gradients(given)
                except RuntimeError:  # the code is not differentiable
                    return ""
                mine = lambda at, t, rank: copy_ranges(t, self.maps[at[0]].feature_dim, rows[at[0]].ranges[rank])  # noqa: E731
                found = [part.compute_gradients({at: mine(at, t, r) for at, t in given.items()}) for r, part in enumerate(parts)]
            for (name, k), t in ((key, t) for key, t in expected.items() if key[0] in columns):
                sums = torch.zeros_like(t)  # ranks that have the same feature, such as a head of keys, each have a part of its gradient
                for gradients, ranges in zip(found, cuts[name].ranges):
                    if (name, k) in gradients:
                        _add_part(sums, gradients[name, k], self.maps[name].feature_dim, ranges)
                if not _is_equal(t, sums):
                    return f"on a slice the gradient at the output of {name} is not that rank's part of the full gradient"
        return ""


def check_slices(containers: Iterable[ReplayedModule], groups: tuple[ColumnRowPair, ...], seed: int = 1) -> str:
    """Return why some rank would not compute its slice of the full result in one of the calls, or ""."""
    for container in containers:
        values = container.draw_values(seed)

        def run(container: ReplayedModule = container, values: Values = values) -> ReplayedRun | CodeMismatch:
            try:
                return container.run(values)
            except CodeMismatch as strayed:
                return strayed

        end = ""
        try:
            with AlteredReads() as numbers:
                whole = container.run(values)
            if wrong := container.compare_slices(values, whole, groups):
                return wrong
            for lines, other in try_altered_reads(run, numbers.read):
                end = format_read_lines(lines)
                if isinstance(other, CodeMismatch):
                    return str(other) + end
                with AlteredReads(lines):
                    if wrong := container.compare_slices(values, other, groups):
                        return wrong + end
            end = ""
            if wrong := container.compare_gradients(values, groups):
                return wrong
        except Exception as error:
            lines = str(error).splitlines() or [""]
            return f"its code cannot run on a slice ({type(error).__name__}: {lines[0][:120]}){end}"
    return ""


def _add_part(whole: Tensor, part: Tensor, dim: int, ranges: Ranges) -> None:
    """Add a part to its ranges of the full tensor."""
    at = 0
    for first, length in ranges:
        whole.narrow(dim, first, length).add_(part.narrow(dim, at, length))
        at += length


def _random_like(like: Tensor, g: torch.Generator) -> Tensor:
    if not like.is_floating_point():
        return like
    return torch.rand(like.shape, generator=g, dtype=torch.float64).sub_(0.5).mul_(12**0.5)  # variance 1


def _fresh_copy(t: Tensor) -> Tensor:
    """Return a writable copy. Floating-point copies require a gradient."""
    if not t.is_floating_point():
        return t.clone()
    return t.detach().clone().requires_grad_().clone()


def _is_equal(a: object, b: object) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and (isinstance(a, (Tensor, int, float, str)) is False or a == b)
    return is_close(a, b)


GRADIENT_SCALES = (1.0, 1e4)
"""Scales of the gradients at inputs of row layers."""
MAX_COMBINATIONS = 200
"""Maximum number of combinations to try, with corrected sizes and without."""
_PLAIN_TYPES = (Tensor, nn.Module, int, float, complex, str, bytes, list, tuple, dict, set, type(None), type)


def adapt_group(
    container: ReplayedModule, group: ColumnRowPair, before: tuple[ColumnRowPair, ...]
) -> tuple[ColumnRowPair | None, str]:
    """Return the group with everything else that it needs, or None and the reason (see [Note: Divided integers]).
    `before`: groups of the same code that are already accepted."""
    wrong = check_slices([container], (*before, group))
    if not wrong:
        return group, ""
    choices = _find_choices(container, group, before)
    for resize in (False, True):
        for extra in itertools.islice(_iter_combinations(choices), MAX_COMBINATIONS):
            if not extra and not resize:
                continue
            tried = replace(group, scaled_attributes=(*group.scaled_attributes, *extra), resize=resize)
            if not check_slices([container], (*before, tried)):
                return tried, ""
    return None, wrong


def _iter_combinations(choices: list[tuple[ScaledAttribute, ...]]) -> Iterator[tuple[ScaledAttribute, ...]]:
    """Iterate over combinations of integers, each divided in one of its ways, the smallest first."""
    for count in range(len(choices) + 1):
        for some in itertools.combinations(choices, count):
            yield from itertools.product(*some)


def _find_choices(
    container: ReplayedModule, group: ColumnRowPair, before: tuple[ColumnRowPair, ...]
) -> list[tuple[ScaledAttribute, ...]]:
    """Return the ways to divide each integer that has an effect."""
    n = len(group.tp_shards[0].ranges)
    sizes = {sum(length for _, length in cut.ranges[0]) for cut in group.tp_shards}
    own = {integer.divisor for integer in group.scaled_attributes}
    divisors = sorted({n, *own, *(n // d for d in own if n % d == 0)} - {1}, reverse=True) if sizes else [n]
    fixed = {(i.module, i.path) for g in (*before, group) for i in g.scaled_attributes}
    values = container.draw_values(2)
    choices = []
    for module, path, value in _iter_integers(container, group):
        ways = tuple(ScaledAttribute(module, path, d) for d in divisors if value % d == 0)
        if ways and (module, path) not in fixed and _has_effect(container, ways[0], values):
            choices.append(ways)
    return choices


def _has_effect(container: ReplayedModule, integer: ScaledAttribute, values: Values) -> bool:
    """Return whether the full run changes or fails if this integer is divided."""
    whole = container.run(values)
    alone = ColumnRowPair(container.name, (), "", (), (integer,))
    try:
        part = container.run(values, (alone,))
    except Exception:
        return True
    return bool(container.find_difference(whole, part, (), 0))


def _iter_integers(container: ReplayedModule, group: ColumnRowPair) -> Iterator[tuple[str, str, int]]:
    """Iterate over (module, path, value) of integers that the code between columns and row may use."""
    for name, module in _find_modules(container, group).items():
        for key, value in vars(module).items():
            if type(value) is int and value > 1:
                yield name, key, value
            elif not isinstance(value, _PLAIN_TYPES) and not callable(value) and hasattr(value, "__dict__"):
                for inner, number in vars(value).items():
                    if type(number) is int and number > 1:
                        yield name, f"{key}.{inner}", number


def _find_modules(container: ReplayedModule, group: ColumnRowPair) -> dict[str, nn.Module]:
    """Return the container, its submodules that contain the columns and the row, and modules called between them."""
    bits = sum(1 << made.bit for made in container.map_calls if made.name in group.columns)
    between: dict[str, nn.Module] = {}
    around = {f for made in container.map_calls if made.name in (*group.columns, group.row) for f in made.parents}
    frames = container.trace.module_calls
    for frame in container.module_calls:
        if frame is frames[frame.parents[-1]] and (frame.parents[-1] in around or frame.sources & bits):
            between[frame.name] = frame.module
    return between
