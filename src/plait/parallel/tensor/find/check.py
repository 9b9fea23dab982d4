"""Running the code between columns and row on a rank's slice, comparing it with the whole, and trying what makes them equal.

Maps are linear: with rows of its weight taken away, a column returns just the features that are left. So the check
needs no weights of maps at all. Every map in the container returns random numbers, in the whole run and in a rank's
run the same ones, of which a column returns the rank's features. What the code makes of them must be the same: what
the row is given is the rank's slice of what it is given in the whole, what any other map is given is equal, and so is
what the container returns, as far as anything looks at it. The same holds backward: for a random gradient of what the row is
given, each column is given its slice of the gradient. A hook that divides a gradient by its norm fails there.

Code that says `view(B, T, self.num_heads, -1)` runs on a slice when `num_heads` is divided. Which numbers those are is
not told by their names: each number of the modules concerned is changed in a run of the whole, and those that change
nothing are left alone. Combinations of the others are tried, the fewest first, until one passes the check; then the
same with `LocalSizes`, for sizes that the code computes from its input.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from plait.model.slices import ColumnRowPair, DividedNumber, ParameterSlice
from plait.parallel.tensor.find.linear_maps import Map
from plait.parallel.tensor.find.trace import DataflowTrace, MapCall, ModuleCall, Patch, Still, patched, snapshot
from plait.parallel.tensor.wiring import LocalSizes, set_integer
from plait.randomness import keyed
from plait.tensors.float64 import Wide, near
from plait.tensors.modules import state_kept
from plait.tensors.opaque_code import OtherNumbers, elsewhere, other_outcomes
from plait.tensors.rows import Ranges, taken
from plait.tensors.torch_private import leaves, tree_map_only

Values = dict[tuple[str, int], Any]
"""What each call of each map in a container returns, by name and number of the call."""


class OtherCode(Exception):
    """The code did something else than in the whole."""


class MapInput(NamedTuple):
    """What a call of a map is given."""

    name: str
    number: int
    """Of the call, among those of this map."""
    x: Tensor


@dataclass
class ReplayedRun:
    """What a run of a container showed."""

    given: list[MapInput] = field(default_factory=list)
    """Of the calls of maps, in order."""
    output: list[Any] = field(default_factory=list)
    """Leaves of what the container returned; the key of an argument that it hands on as it is."""
    arguments: dict[int | str, Tensor] = field(default_factory=dict)
    """The tensors it was given directly."""
    answers: dict[tuple[str, int], Tensor] | None = None
    """What each call of a map returned, where gradients of it are asked for."""

    def gradients(self, given: Mapping[tuple[str, int], Tensor]) -> dict[tuple[str, int], Tensor]:
        """The gradient of what each map returned. `given`: that of what maps are given."""
        ends = [(g.x, given[g.name, g.number]) for g in self.given if (g.name, g.number) in given and g.x.requires_grad]
        answers = self.answers or {}
        if not ends or not answers:
            return {}
        inputs, outputs = tuple(answers.values()), tuple(x for x, _ in ends)
        found = torch.autograd.grad(outputs, inputs, tuple(g for _, g in ends), retain_graph=True, allow_unused=True)
        return {key: g for key, g in zip(answers, found) if g is not None}


class ReplayedModule:
    """One call of a module, which can be repeated with other values and on a rank's slice."""

    than = "than in the whole"
    """How a message ends that a map is called more often in the repetition."""

    def __init__(self, follow: DataflowTrace, number: int, maps: Mapping[str, Map]):
        self.follow, self.frame, self.maps = follow, follow.frames[number], maps
        self.name, self.module = self.frame.name, self.frame.module
        self.inside: list[MapCall] = [c for c in follow.calls if number in c.parents]
        self.frames: list[ModuleCall] = [f for f in follow.frames if number in f.parents]
        kept = {name for name in follow.opaque if name.startswith(f"{self.name}.") or not self.name}
        hidden = {id(p) for name in kept for p in follow.opaque[name].parameters()}
        self.parameters = {
            name: p
            for name, p in self.module.named_parameters(self.name)
            if id(p) not in hidden and p.is_floating_point()
        }
        """Those of the code between maps."""

    def values(self, seed: int) -> Values:
        """Random outputs for every call of a map."""
        g = torch.Generator().manual_seed(seed)
        outputs: Values = {}
        counts: dict[str, int] = {}
        for call in self.inside:
            number = counts[call.name] = counts.get(call.name, -1) + 1
            outputs[call.name, number] = tree_map_only(Tensor, lambda t: _random(t, g), call.output)
        return outputs

    def run(
        self,
        values: Values,
        groups: Iterable[ColumnRowPair] = (),
        rank: int = 0,
        leaf: Mapping[str, Tensor] | None = None,
        backward: bool = False,
    ) -> ReplayedRun:
        """Run it whole, or as `rank` of the groups does. `leaf`: parameters to use instead of its own. `backward`: gradients follow."""
        shown, groups = ReplayedRun(answers={} if backward else None), tuple(groups)
        cuts = {cut.parameter: cut for group in groups for cut in group.cuts}
        replaced = dict(leaf or {})
        replaced |= {n: taken(p, cuts[n].dim, cuts[n].ranges[rank]) for n, p in self.parameters.items() if n in cuts}
        with ExitStack() as stack:
            stack.enter_context(state_kept(self.module.modules()))
            opaque = {made.name: self.follow.opaque[made.name] for made in self.inside}
            stack.enter_context(patched(opaque, self._returning(shown, values, cuts, rank)))
            for integer in {integer for group in groups for integer in group.integers}:
                set_integer(self.follow.model, integer)
            args, kwargs = self._arguments(shown, groups, rank)
            for mode in (Wide(), Still()):
                stack.enter_context(mode)
            stack.enter_context(torch.enable_grad())
            for n in {len(group.cuts[0].ranges) for group in groups if group.resize}:
                stack.enter_context(LocalSizes(n))
            keyed.restore_host(self.frame.state)
            own = {name[len(self.name) + bool(self.name) :]: p for name, p in replaced.items()}
            output = functional_call(self.module, own, args, kwargs) if own else self.module(*args, **kwargs)
        handed = {id(t): key for key, t in shown.arguments.items()}
        shown.output = [handed.get(id(t), t) for t in leaves(output)]
        return shown

    def _returning(self, shown: ReplayedRun, values: Values, cuts: Mapping[str, ParameterSlice], rank: int) -> Patch:
        counts: dict[str, int] = {}

        def make(name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
            cut = cuts.get(f"{name}.weight")
            column = name in self.maps and cut is not None and cut.dim == self.maps[name].out
            features = cut.ranges[rank] if column and cut is not None else None

            def call(*args: Any, **kwargs: Any) -> Any:
                number = counts[name] = counts.get(name, -1) + 1
                if (name, number) not in values:
                    raise OtherCode(f"{name} is called more often {self.than}")
                shown.given.append(MapInput(name, number, next(iter((*args, *kwargs.values())), torch.zeros(()))))
                answer = self._answer(shown.given[-1], values[name, number], features)
                if shown.answers is None or not isinstance(answer, Tensor) or not answer.is_floating_point():
                    return answer
                shown.answers[name, number] = answer.requires_grad_()
                return answer.clone()

            return call

        return make

    def _answer(self, call: MapInput, value: object, features: Ranges | None) -> Any:
        """What a map returns: these features of the value, or all of it."""
        if features is not None and isinstance(value, Tensor):
            return taken(value, self.maps[call.name].feature, features)
        return tree_map_only(Tensor, torch.clone, value)

    def _arguments(self, shown: ReplayedRun, groups: tuple[ColumnRowPair, ...], rank: int) -> tuple[Any, Any]:
        """What it is given, its own tensors fresh, those that are cut with this rank's part."""
        part = {a.key: a.dim for group in groups for a in group.arguments if a.module == self.name}

        def copied(key: int | str, value: object) -> object:
            if not isinstance(value, Tensor):
                return tree_map_only(Tensor, lambda t: _fresh(t) if t.requires_grad else t.clone(), value)
            fresh, dim = _fresh(value), part.get(key)
            if dim is not None and value.shape[dim] > 1:
                n = len(groups[0].cuts[0].ranges)
                fresh = fresh.chunk(n, dim)[rank]
            shown.arguments[key] = fresh
            return fresh

        args, kwargs = snapshot(self.frame.args), snapshot(self.frame.kwargs)
        return tuple(copied(i, a) for i, a in enumerate(args)), {k: copied(k, a) for k, a in kwargs.items()}

    def differs(self, whole: ReplayedRun, part: ReplayedRun, groups: Iterable[ColumnRowPair], rank: int) -> str:
        """What is wrong with a rank's run, or nothing."""
        rows = {group.row: next(c for c in group.cuts if c.parameter == f"{group.row}.weight") for group in groups}
        if [(g.name, g.number) for g in whole.given] != [(g.name, g.number) for g in part.given]:
            return "its code calls other layers on a slice than on the whole"
        for (name, _, a), (_, _, b) in zip(whole.given, part.given):
            want = taken(a, self.maps[name].feature, rows[name].ranges[rank]) if name in rows else a
            if name in rows and not torch.isfinite(a).all():
                return f"on random numbers {name} is given infinite ones, which proves nothing"
            if not _equal(want, b):
                what = "not that rank's part of what it is given in the whole" if name in rows else "something else"
                return f"on a slice {name} is given {what}"
        for i in self.frame.live:
            if i >= len(part.output) or not _equal(whole.output[i], part.output[i]):
                return f"on a slice {self.name or 'the model'} returns something else"
        return ""

    def differs_on_slices(self, values: Values, whole: ReplayedRun, groups: tuple[ColumnRowPair, ...]) -> str:
        """What is wrong with the run of some rank, or nothing."""
        for rank in range(len(groups[0].cuts[0].ranges)):
            if wrong := self.differs(whole, self.run(values, groups, rank), groups, rank):
                return wrong
        return ""

    def differs_backward(self, values: Values, groups: tuple[ColumnRowPair, ...]) -> str:
        """What is wrong with the gradients of the ranks' runs, or nothing. Rows are given large and small ones: a hook may have a limit."""
        whole = self.run(values, backward=True)
        parts = [self.run(values, groups, rank, backward=True) for rank in range(len(groups[0].cuts[0].ranges))]
        cuts = {cut.parameter.removesuffix(".weight"): cut for group in groups for cut in group.cuts}
        columns = {name for group in groups for name in group.columns if name in self.maps and name in cuts}
        rows = {group.row: next(c for c in group.cuts if c.parameter == f"{group.row}.weight") for group in groups}
        for size in GRADIENTS:
            g = torch.Generator().manual_seed(3)
            given = {(name, k): size * _random(x, g) for name, k, x in whole.given if name in rows}
            with state_kept(self.module.modules()):
                try:
                    expected = whole.gradients(given)
                except RuntimeError:  # the code has no gradient
                    return ""
                mine = lambda at, t, rank: taken(t, self.maps[at[0]].feature, rows[at[0]].ranges[rank])  # noqa: E731
                found = [part.gradients({at: mine(at, t, r) for at, t in given.items()}) for r, part in enumerate(parts)]
            for (name, k), t in ((key, t) for key, t in expected.items() if key[0] in columns):
                sums = torch.zeros_like(t)  # of ranks that share a feature, such as a head of keys, each has a part of its gradient
                for gradients, ranges in zip(found, cuts[name].ranges):
                    if (name, k) in gradients:
                        _add(sums, gradients[name, k], self.maps[name].feature, ranges)
                if not _equal(t, sums):
                    return f"on a slice the gradient of what {name} returns is not that rank's part of the gradient in the whole"
        return ""


def check(containers: Iterable[ReplayedModule], groups: tuple[ColumnRowPair, ...], seed: int = 1) -> str:
    """Why some rank would compute something else than its slice of the whole in one of the calls, or nothing."""
    for container in containers:
        values = container.values(seed)

        def run(container: ReplayedModule = container, values: Values = values) -> ReplayedRun | OtherCode:
            try:
                return container.run(values)
            except OtherCode as strayed:
                return strayed

        end = ""
        try:
            with OtherNumbers() as numbers:
                whole = container.run(values)
            if wrong := container.differs_on_slices(values, whole, groups):
                return wrong
            for lines, other in other_outcomes(run, numbers.read):
                end = elsewhere(lines)
                if isinstance(other, OtherCode):
                    return str(other) + end
                with OtherNumbers(lines):
                    if wrong := container.differs_on_slices(values, other, groups):
                        return wrong + end
            end = ""
            if wrong := container.differs_backward(values, groups):
                return wrong
        except Exception as error:
            lines = str(error).splitlines() or [""]
            return f"its code cannot run on a slice ({type(error).__name__}: {lines[0][:120]}){end}"
    return ""


def _add(whole: Tensor, part: Tensor, dim: int, ranges: Ranges) -> None:
    """Add a part to where it lies in the whole."""
    at = 0
    for first, length in ranges:
        whole.narrow(dim, first, length).add_(part.narrow(dim, at, length))
        at += length


def _random(like: Tensor, g: torch.Generator) -> Tensor:
    if not like.is_floating_point():
        return like
    return torch.rand(like.shape, generator=g, dtype=torch.float64).sub_(0.5).mul_(12**0.5)  # of variance 1


def _fresh(t: Tensor) -> Tensor:
    """A copy that can be written to; its gradient, where it had one, can be asked for."""
    if not t.is_floating_point():
        return t.clone()
    return t.detach().clone().requires_grad_().clone()


def _equal(a: object, b: object) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and (isinstance(a, (Tensor, int, float, str)) is False or a == b)
    return near(a, b)


GRADIENTS = (1.0, 1e4)
"""Sizes of the gradients that rows are given."""
TRIES = 200
"""Combinations to try, with sizes corrected and without."""
_NO_OBJECT = (Tensor, nn.Module, int, float, complex, str, bytes, list, tuple, dict, set, type(None), type)


def adapted(
    container: ReplayedModule, group: ColumnRowPair, before: tuple[ColumnRowPair, ...]
) -> tuple[ColumnRowPair | None, str]:
    """The group with what else it needs, or None and why nothing passes. `before`: groups found in the same code."""
    wrong = check([container], (*before, group))
    if not wrong:
        return group, ""
    choices = _choices(container, group, before)
    for resize in (False, True):
        for extra in itertools.islice(_combinations(choices), TRIES):
            if not extra and not resize:
                continue
            tried = replace(group, integers=(*group.integers, *extra), resize=resize)
            if not check([container], (*before, tried)):
                return tried, ""
    return None, wrong


def _combinations(choices: list[tuple[DividedNumber, ...]]) -> Iterator[tuple[DividedNumber, ...]]:
    """Some of the numbers, each divided in one of its ways, the fewest first."""
    for count in range(len(choices) + 1):
        for some in itertools.combinations(choices, count):
            yield from itertools.product(*some)


def _choices(
    container: ReplayedModule, group: ColumnRowPair, before: tuple[ColumnRowPair, ...]
) -> list[tuple[DividedNumber, ...]]:
    """For each number that makes a difference, the ways to divide it."""
    n = len(group.cuts[0].ranges)
    sizes = {sum(length for _, length in cut.ranges[0]) for cut in group.cuts}
    own = {integer.divisor for integer in group.integers}
    divisors = sorted({n, *own, *(n // d for d in own if n % d == 0)} - {1}, reverse=True) if sizes else [n]
    fixed = {(i.module, i.path) for g in (*before, group) for i in g.integers}
    values = container.values(2)
    choices = []
    for module, path, value in _numbers(container, group):
        ways = tuple(DividedNumber(module, path, d) for d in divisors if value % d == 0)
        if ways and (module, path) not in fixed and _matters(container, ways[0], values):
            choices.append(ways)
    return choices


def _matters(container: ReplayedModule, integer: DividedNumber, values: Values) -> bool:
    """Whether the whole computes something else, or nothing at all, with this number divided."""
    whole = container.run(values)
    alone = ColumnRowPair(container.name, (), "", (), (integer,))
    try:
        part = container.run(values, (alone,))
    except Exception:
        return True
    return bool(container.differs(whole, part, (), 0))


def _numbers(container: ReplayedModule, group: ColumnRowPair) -> Iterator[tuple[str, str, int]]:
    """(module, path, value) of whole numbers that the code between columns and row may use."""
    for name, module in _modules(container, group).items():
        for key, value in vars(module).items():
            if type(value) is int and value > 1:
                yield name, key, value
            elif not isinstance(value, _NO_OBJECT) and not callable(value) and hasattr(value, "__dict__"):
                for inner, number in vars(value).items():
                    if type(number) is int and number > 1:
                        yield name, f"{key}.{inner}", number


def _modules(container: ReplayedModule, group: ColumnRowPair) -> dict[str, nn.Module]:
    """The container, the modules around columns and row in it, and those called between them."""
    bits = sum(1 << made.bit for made in container.inside if made.name in group.columns)
    between: dict[str, nn.Module] = {}
    around = {f for made in container.inside if made.name in (*group.columns, group.row) for f in made.parents}
    frames = container.follow.frames
    for frame in container.frames:
        if frame is frames[frame.parents[-1]] and (frame.parents[-1] in around or frame.given & bits):
            between[frame.name] = frame.module
    return between
