"""Finding the slices of any model: propose what to cut, and check that it computes the same.

The model runs once (`slicing_follow.py`), and every linear map learns which others its input was computed from. Maps
whose output reaches nothing but one other map are columns, that one is their row. What each rank needs of the columns
is read off gradients (`slicing_propose.py`), what the code needs to run on a slice is tried (`slicing_adapt.py`), and
nothing is accepted that was not seen to give every rank its slice of the whole, in float64 (`slicing_check.py`).

All of it happens in one process, on the model itself with random numbers in the place of its weights, which are put
back. No names of models, layers or attributes are known here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plait import randomness
from plait.slices import Group, Slices
from plait.slicing_adapt import adapted
from plait.slicing_check import Container, check, kept
from plait.slicing_follow import Follow, MapCall, Still
from plait.slicing_maps import find_maps, packed_attentions
from plait.slicing_propose import Refused, proposals
from plait.torchseam import tree_map_only
from plait.watching import Call
from plait.wide import Wide

SAMPLES = 3
"""In the batch that the model runs on: odd, so that the batch is not taken for something that ranks divide."""


def find(model: nn.Module, inputs: Callable[[int], Any], call: Call, n: int) -> Slices:
    """The slices of a model over n ranks. `inputs(k)` makes a batch of k samples, `call(model, batch)` runs it."""
    state = randomness.host_state()
    try:
        with torch.random.fork_rng(devices=[]), kept(model), _random_weights(model):
            return _Finder(model, inputs(SAMPLES), call, n).find()
    finally:
        randomness.restore_host(state)


class _Finder:
    def __init__(self, model: nn.Module, example: Any, call: Call, n: int):
        self.model, self.n = model, n
        self.maps = find_maps(model)
        self.packed = dict(packed_attentions(model))
        inner = tuple(f"{name}." for name in self.packed)
        self.maps = {k: v for k, v in self.maps.items() if not inner or not k.startswith(inner)}
        opaque = {name: m.module for name, m in self.maps.items()} | dict[str, nn.Module](self.packed)
        example = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, example)
        with kept(model), Wide(), Still():
            randomness.seed_host("slices")
            self.follow = Follow(model, opaque).run(lambda: call(model, example))
        self.groups: list[Group] = []
        self.reasons: dict[str, str] = {}

    def find(self) -> Slices:
        """Everything, in the order in which rows are called."""
        for row in dict.fromkeys(made.name for made in self.follow.calls if made.name in self.maps):
            try:
                found = self._group(row)
            except Refused as refused:
                self.reasons.setdefault(row, str(refused))
                found = None
            if found is not None:
                self.groups.append(found)
        return Slices(tuple(self.groups), (), self._whole())

    def _group(self, row: str) -> Group | None:
        calls = self.follow.made_by(row)
        columns = self._columns(row, calls)
        if not columns:
            return None
        containers = self._containers(calls, columns)
        reasons = []
        before = tuple(g for g in self.groups if _inside(g.container, containers[0].name))
        for proposal in proposals(containers[0], [self.maps[c] for c in columns], self.maps[row], self.n):
            found, wrong = adapted(containers[0], proposal, before)
            wrong = wrong or check(containers[1:], (*before, proposal)) if found else wrong
            if found is not None and not wrong:
                return found
            reasons.append(wrong)
        raise Refused(reasons[0])

    def _columns(self, row: str, calls: list[MapCall]) -> list[str]:
        """The maps whose output reaches this row and nothing else."""
        made = [c for call in calls for c in self.follow.maps_in(call.reads)]
        names = list(dict.fromkeys(c.name for c in made))
        taken = {name for g in self.groups for name in (*g.columns, g.row)}
        for name in names:
            if row == name or {name, row} & taken:
                return []
            bits = sum(1 << c.bit for c in self.follow.made_by(name))
            if bits & self.follow.output:
                self._because(name, row, f"what {name} returns reaches what the model returns, not {row} alone")
            readers = {c.name for c in self.follow.calls if c.reads & bits} - {row}
            if readers:
                self._because(name, row, f"what {name} returns reaches {min(readers)} too, not {row} alone")
            if name not in self.maps:
                self._because(name, row, f"{name} is no linear map")
            stray = {f"{name}.weight", f"{name}.bias"} & self.follow.stray
            if stray:
                self._because(name, row, f"{min(stray)} is used outside of {name}")
        return names

    def _because(self, name: str, row: str, reason: str) -> None:
        self.reasons.setdefault(name, reason)
        raise Refused(reason)

    def _containers(self, calls: list[MapCall], columns: list[str]) -> list[Container]:
        """The innermost calls of modules in which the columns and the row are called."""
        numbers = []
        for call in calls:
            chains = [call.parents, *(c.parents for c in self.follow.maps_in(call.reads))]
            common = [f for f, *others in zip(*chains) if all(f == o for o in others)]
            numbers.append(common[-1])
        names = {self.follow.frames[i].name for i in numbers}
        if len(names) > 1:
            raise Refused(f"{calls[0].name} is called in {' and '.join(sorted(names))}")
        return [Container(self.follow, i, self.maps) for i in dict.fromkeys(numbers)]

    def _whole(self) -> tuple[tuple[str, float, str], ...]:
        cut = {name for g in self.groups for name in (*g.columns, g.row)}
        total = sum(p.numel() for p in self.model.parameters())
        found = []
        for name, module in self.model.named_modules():
            size = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)
            if size and name not in cut:
                reason = self.reasons.get(name, "it is no layer between two others that nothing else reads")
                found.append((name, size / total, reason))
        return tuple(sorted(found, key=lambda row: -row[1]))


def _inside(name: str, container: str) -> bool:
    return not container or name == container or name.startswith(f"{container}.")


@contextmanager
def _random_weights(model: nn.Module) -> Iterator[None]:
    """Float64 random numbers in the place of weights: zeros that a constructor chose would prove nothing."""
    g = torch.Generator().manual_seed(0)
    before = [(p, p.data) for p in model.parameters()]
    try:
        for p, data in before:
            if p.is_floating_point():
                drawn = torch.randn(data.shape, generator=g, dtype=torch.float64)
                p.data = drawn / max(1, data[0].numel()) ** 0.5 if data.dim() > 1 and len(data) else 1 + drawn / 10
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.double())
        yield
    finally:
        for p, data in before:
            p.data = data
