"""Running the code between columns and row on a rank's slice, and comparing it with the whole.

Maps are linear: with rows of its weight taken away, a column returns just the features that are left. So the check
needs no weights of maps at all. Every map in the container returns random numbers, in the whole run and in a rank's
run the same ones, of which a column returns the rank's features. What the code makes of them must be the same: what
the row is given is the rank's slice of what it is given in the whole, what any other map is given is equal, and so is
what the container returns, as far as anything looks at it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from plait.model.slices import ColumnRowPair, ParameterSlice, Ranges
from plait.parallel.tensor.find.calls import MapCall, ModuleCall, Still, patched, snapshot
from plait.parallel.tensor.find.linear_maps import Map
from plait.parallel.tensor.find.trace import DataflowTrace
from plait.parallel.tensor.local_sizes import LocalSizes
from plait.parallel.tensor.wiring import set_integer
from plait.randomness import keyed
from plait.tensors.float64 import Wide
from plait.tensors.torch_private import leaves, own_buffers, tree_map_only

RELATIVE, ABSOLUTE = 1e-9, 1e-11
"""In float64. Slices of products are summed in another order, nothing else differs."""

Values = dict[tuple[str, int], Any]
"""What each call of each map in a container returns, by name and number of the call."""


class OtherCode(Exception):
    """The code did something else than in the whole."""


@dataclass
class ReplayedRun:
    """What a run of a container showed."""

    given: list[tuple[str, int, Tensor]] = field(default_factory=list)
    """(map, number of the call, its input) in order."""
    output: list[Any] = field(default_factory=list)
    """Leaves of what the container returned; the key of an argument that it hands on as it is."""
    arguments: dict[int | str, Tensor] = field(default_factory=dict)
    """The tensors it was given directly."""


class ReplayedModule:
    """One call of a module, which can be repeated with other values and on a rank's slice."""

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
        found: Values = {}
        counts: dict[str, int] = {}
        for made in self.inside:
            number = counts[made.name] = counts.get(made.name, -1) + 1
            found[made.name, number] = tree_map_only(Tensor, lambda t: _random(t, g), made.output)
        return found

    def run(
        self,
        values: Values,
        groups: Iterable[ColumnRowPair] = (),
        rank: int = 0,
        leaf: Mapping[str, Tensor] | None = None,
    ) -> ReplayedRun:
        """Run it whole, or as `rank` of the groups does. `leaf`: parameters to use instead of its own."""
        seen, groups = ReplayedRun(), tuple(groups)
        cuts = {cut.parameter: cut for group in groups for cut in group.cuts}
        replaced = dict(leaf or {})
        replaced |= {n: taken(p, cuts[n].dim, cuts[n].ranges[rank]) for n, p in self.parameters.items() if n in cuts}
        with ExitStack() as stack:
            stack.enter_context(kept(self.module))
            stack.enter_context(patched(self._opaque(), self._returning(seen, values, cuts, rank)))
            for integer in {integer for group in groups for integer in group.integers}:
                set_integer(self.follow.model, integer)
            args, kwargs = self._arguments(seen, groups, rank)
            for mode in (Wide(), Still()):
                stack.enter_context(mode)
            stack.enter_context(torch.enable_grad())
            for n in {len(group.cuts[0].ranges) for group in groups if group.resize}:
                stack.enter_context(LocalSizes(n))
            keyed.restore_host(self.frame.state)
            own = {name[len(self.name) + bool(self.name) :]: p for name, p in replaced.items()}
            output = functional_call(self.module, own, args, kwargs) if own else self.module(*args, **kwargs)
        handed = {id(t): key for key, t in seen.arguments.items()}
        seen.output = [handed.get(id(t), t) for t in leaves(output)]
        return seen

    def _opaque(self) -> dict[str, nn.Module]:
        return {made.name: self.follow.opaque[made.name] for made in self.inside}

    def _returning(self, seen: ReplayedRun, values: Values, cuts: Mapping[str, ParameterSlice], rank: int) -> Any:
        counts: dict[str, int] = {}

        def make(name: str, module: nn.Module, forward: Any) -> Any:
            cut = cuts.get(f"{name}.weight")
            column = name in self.maps and cut is not None and cut.dim == self.maps[name].out

            def call(*args: Any, **kwargs: Any) -> Any:
                number = counts[name] = counts.get(name, -1) + 1
                if (name, number) not in values:
                    raise OtherCode(f"{name} is called more often than in the whole")
                seen.given.append((name, number, next(iter((*args, *kwargs.values())), torch.zeros(()))))
                made = values[name, number]
                if column and cut is not None:
                    return taken(made, self.maps[name].feature, cut.ranges[rank])
                return tree_map_only(Tensor, lambda t: t.clone(), made)

            return call

        return make

    def _arguments(self, seen: ReplayedRun, groups: tuple[ColumnRowPair, ...], rank: int) -> tuple[Any, Any]:
        """What it is given, its own tensors fresh, those that are cut with this rank's part."""
        part = {a.key: a.dim for group in groups for a in group.arguments if a.module == self.name}

        def given(key: int | str, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return tree_map_only(Tensor, lambda t: _fresh(t) if t.requires_grad else t.clone(), value)
            fresh, dim = _fresh(value), part.get(key)
            if dim is not None and value.shape[dim] > 1:
                n = len(groups[0].cuts[0].ranges)
                fresh = fresh.chunk(n, dim)[rank]
            seen.arguments[key] = fresh
            return fresh

        args, kwargs = snapshot(self.frame.args), snapshot(self.frame.kwargs)
        return tuple(given(i, a) for i, a in enumerate(args)), {k: given(k, a) for k, a in kwargs.items()}

    def differs(self, whole: ReplayedRun, part: ReplayedRun, groups: Iterable[ColumnRowPair], rank: int) -> str:
        """What is wrong with a rank's run, or nothing."""
        rows = {group.row: next(c for c in group.cuts if c.parameter == f"{group.row}.weight") for group in groups}
        if [x[:2] for x in whole.given] != [x[:2] for x in part.given]:
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


def check(containers: Iterable[ReplayedModule], groups: tuple[ColumnRowPair, ...], seed: int = 1) -> str:
    """Why some rank would compute something else than its slice of the whole in one of the calls, or nothing."""
    for container in containers:
        values = container.values(seed)
        try:
            whole = container.run(values)
            for rank in range(len(groups[0].cuts[0].ranges)):
                wrong = container.differs(whole, container.run(values, groups, rank), groups, rank)
                if wrong:
                    return wrong
        except Exception as error:
            lines = str(error).splitlines() or [""]
            return f"its code cannot run on a slice ({type(error).__name__}: {lines[0][:120]})"
    return ""


@contextmanager
def kept(root: nn.Module) -> Iterator[None]:
    """What a call changes on modules is put back: attributes (numbers, caches), hooks, and buffers, of which it gets copies."""
    hooks = [(some, dict(some)) for m in root.modules() for some in vars(m).values() if type(some) is OrderedDict]
    before = [(m, dict(vars(m)), dict(own_buffers(m))) for m in root.modules()]
    copies = {id(b): b.detach().clone() for _, _, buffers in before for b in buffers.values() if b is not None}
    try:
        for module, _, buffers in before:
            own_buffers(module).update({n: b if b is None else copies[id(b)] for n, b in buffers.items()})
        yield
    finally:
        for module, attributes, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            own_buffers(module).clear()
            own_buffers(module).update(buffers)
        for some, content in hooks:
            some.clear()
            some.update(content)


def taken(whole: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """These stretches of one dim of a tensor, in storage of their own."""
    return torch.cat([whole.narrow(dim, first, length) for first, length in ranges], dim)


def _random(like: Tensor, g: torch.Generator) -> Tensor:
    if not like.is_floating_point():
        return like
    return torch.rand(like.shape, generator=g, dtype=torch.float64).sub_(0.5).mul_(12**0.5)  # of variance 1


def _fresh(t: Tensor) -> Tensor:
    """A copy that can be written to; its gradient, where it had one, can be asked for."""
    if not t.is_floating_point():
        return t.clone()
    return t.detach().clone().requires_grad_().clone()


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and (isinstance(a, (Tensor, int, float, str)) is False or a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, RELATIVE, ABSOLUTE, True))
