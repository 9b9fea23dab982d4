"""The sketch: what a job is, found by running its model on fake tensors. No weights are computed with, no data moves.

The model runs twice, on two batch sizes. Whatever draws a random number is noted with its place and with the dim of
the drawn tensor that grew with the batch: that is all `randomness.py` needs to give any rank its own stretch of the
one global mask. Layers that look at the whole batch at once (batch statistics) are noted too, because splitting the
batch changes them unless they are synchronised.

A model that looks at values in its forward pass cannot run on fake tensors; a copy of it then runs for real.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from plait import randomness
from plait.torchseam import BatchNormBase, fake_failures
from plait.watching import Call, Watched, watch

ROUNDS = 8
"""Pairs of runs for a model that decides at random what to run."""
PROBES = (3, 5)
"""The two batch sizes of the runs: odd, so that dims of the model rarely have them."""


@dataclass(frozen=True)
class Figure:
    """A quantity of one unit call in a batch of n samples: fixed + each * n."""

    fixed: float
    each: float

    def of(self, samples: float) -> float:
        """The quantity in a batch of so many samples."""
        return self.fixed + self.each * samples


@dataclass(frozen=True)
class Unit:
    """A submodule that is not cut further: the grain of sharding, recompute, stages and timing."""

    name: str
    kind: str
    """The module's class."""
    parameters: tuple[str, ...]
    """Names of its parameters (as `named_parameters` of the whole model has them)."""
    weights: int
    """Bytes of its parameters."""
    closed: bool
    """Its parameters are used inside its own calls only: not tied to another unit's, not touched by code around it."""
    repeated: bool
    """One of several sisters of the same class: a block."""


@dataclass(frozen=True)
class UnitCall:
    """One call of a unit, in the order of the forward pass. Figures are those of the forward pass."""

    unit: str
    needs: tuple[int, ...]
    """Earlier calls whose outputs its inputs depend on, through the model's own code between units."""
    flops: Figure
    inputs: Figure
    """Bytes of the tensors it is given."""
    output: Figure
    """Bytes of the tensors it returns."""
    saved: Figure
    """Bytes that autograd keeps for its backward, parameters and what was kept before it not counted."""


@dataclass(frozen=True)
class Sketch:
    """What `build.py` and the strategies need to know of a model. All names are qualified module names."""

    parameters: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    """(name, shape, dtype) of every parameter that is trained, tied ones once."""
    frozen: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()
    """The same of every parameter that is not."""
    places: dict[str, int | None] = field(default_factory=dict)
    """Random place `module#call#draw` -> batch dim of the tensor drawn there (None: it has none)."""
    unkeyed: tuple[str, ...] = ()
    """Modules whose random numbers plait cannot key (drawn by an operator without a rule)."""
    batch_norms: tuple[str, ...] = ()
    """Batch-norm modules that use batch statistics in training: these can be synchronised."""
    channels: dict[str, tuple[int, torch.dtype]] = field(default_factory=dict)
    """Of each batch-norm module: its channels, and the format it computes its statistics in."""
    batch_coupled: tuple[str, ...] = ()
    """Modules that use batch statistics by a direct call: these cannot be synchronised."""
    counting: tuple[str, ...] = ()
    """Buffers that every training forward changes, besides those of batch norms (counters, power iterations)."""
    host_random: bool = False
    """True when the forward pass draws from Python's or numpy's generator."""
    by_values: bool = False
    """True when the model had to run on real tensors."""
    units: tuple[Unit, ...] = ()
    calls: tuple[UnitCall, ...] = ()
    needs: tuple[int, ...] = ()
    """Calls whose outputs the model's output depends on."""
    rest: tuple[str, ...] = ()
    """Parameters that belong to no unit: the model's own, used by the code between units."""
    flops_between: Figure = Figure(0.0, 0.0)
    """Floating-point operations of the code between units."""
    saved_between: Figure = Figure(0.0, 0.0)
    """Bytes that the code between units keeps for backward, besides what units keep too."""
    unmeasured: str = ""
    """Why units could not be measured, if so; then there are none, and every parameter is in the rest."""


class _Probe:
    """The runs of one model, and how they have to be made: on fake tensors or for real, metered or not."""

    def __init__(self, model: nn.Module, inputs: Callable[[int], Any], call: Call, wanted: tuple[str, ...] | None):
        self.model, self.inputs, self.call, self.wanted = model, inputs, call, wanted
        self.by_values, self.unmeasured = False, ""
        self.units: dict[str, bool] | None = None if wanted is None else units.named(model, wanted)
        if self.units is None:
            self.units = units.choose(model)
        self.rounds: list[list[Watched]] = []

    def run(self) -> None:
        """Make all runs. What measuring alone cannot do must not stop a training: then it is left out, and said."""
        try:
            first = self._first(fake=True)
        except fake_failures():
            self.by_values, self.unmeasured = True, ""
            first = self._first(fake=False)
        again = self.wanted is None and self.units is not None and units.chosen_again(self.model, self.units, first[0].metered)
        if again:
            self.units = again
            first = self.pair(0)
        self.rounds.append(first)
        if any(run.host_random for run in first):  # branches taken at random: see most of them
            self.rounds += [self.pair(number) for number in range(1, ROUNDS)]

    def _first(self, fake: bool) -> list[Watched]:
        """The first pair of runs, without measuring when only measuring is what fails."""
        pass


def sketch(
    model: nn.Module, inputs: Callable[[int], Any], call: Call, wanted: tuple[str, ...] | None = None
) -> Sketch:
    """Run `model` on batches of `PROBES` samples (`inputs(n)` makes one) and note what it does.

    `wanted`: names of its units, instead of those that are found. J015 when one names no module that is called.
    """
    state = randomness.host_state()
    by_values, rounds = False, []
    try:
        rounds.append(_pair(model, inputs, call, True, 0))
    except fake_failures():
        by_values = True
        rounds.append(_pair(model, inputs, call, False, 0))
    host_random = any(run.host_random for run in rounds[0])
    for number in range(1, ROUNDS if host_random else 1):  # branches taken at random: see most of them
        rounds.append(_pair(model, inputs, call, not by_values, number))
    randomness.restore_host(state)
    small = [pair[0] for pair in rounds]
    places, coupled = _places(rounds)
    norms = {name: model.get_submodule(name) for run in small for name in run.batch_norms}
    return Sketch(
        tuple((n, tuple(p.shape), p.dtype) for n, p in model.named_parameters() if p.requires_grad),
        tuple((n, tuple(p.shape), p.dtype) for n, p in model.named_parameters() if not p.requires_grad),
        places=places,
        unkeyed=_unique([*(name for run in small for name in run.unkeyed), *coupled]),
        batch_norms=tuple(norms),
        channels={name: (_channels(norm), _wide(norm)) for name, norm in norms.items()},
        batch_coupled=_unique(name for run in small for name in run.batch_coupled),
        counting=_unique(name for run in small for name in run.counting),
        host_random=host_random,
        by_values=by_values,
    )


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _pair(model: nn.Module, inputs: Callable[[int], Any], call: Call, fake: bool, number: int) -> list["Watched"]:
    """The two runs, with the host generators in the same state, so that both take the same branches."""
    runs = []
    for n in PROBES:
        example = inputs(n)
        randomness.seed_host("sketch", number)
        before = randomness.first_draws()
        randomness.seed_host("sketch", number)
        runs.append(watch(model if fake else copy.deepcopy(model), example, call, fake))
        runs[-1].host_random = before[:2] != randomness.first_draws()[:2]
    return runs


def _places(rounds: list[list["Watched"]]) -> tuple[dict[str, int | None], list[str]]:
    """Batch dim of every place, and the owners of draws that do not grow in step with the batch, in one dim."""
    places: dict[str, int | None] = {}
    coupled = []
    a, b = PROBES
    for small, large in rounds:
        for place, shape in small.drawn.items():
            other = large.drawn.get(place)
            grown = [d for d, (m, n) in enumerate(zip(shape, other or ())) if m != n]
            if (
                other is None
                or len(shape) != len(other)
                or len(grown) > 1
                or any(shape[d] * b != other[d] * a for d in grown)
            ):
                coupled.append(place.split("#")[0] or "the model")
            places.setdefault(place, grown[0] if grown else None)
    return places, coupled


def _channels(norm: nn.Module) -> int:
    assert isinstance(norm, BatchNormBase)
    return norm.num_features


def _wide(norm: nn.Module) -> torch.dtype:
    given = next((t.dtype for t in (*norm.parameters(), *norm.buffers()) if t.is_floating_point()), torch.float32)
    return torch.promote_types(given, torch.float32)
