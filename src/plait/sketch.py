"""The sketch: what a job is, found by running its model on fake tensors. No weights are computed with, no data moves.

The model runs twice, on two batch sizes. Whatever draws a random number is noted with its place and with the dim of
the drawn tensor that grew with the batch: that is all `randomness.py` needs to give any rank its own stretch of the
one global mask. Layers that look at the whole batch at once (batch statistics) are noted too, because splitting the
batch changes them unless they are synchronised.

A model that looks at values in its forward pass cannot run on fake tensors; a copy of it then runs for real.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from plait import draws, randomness
from plait.torchseam import SEEDED, FakeTensorMode, fake_failures

Call = Callable[[nn.Module, Any], Any]
ROUNDS = 8
"""Pairs of runs for a model that decides at random what to run."""
PROBES = (3, 5)
"""The two batch sizes of the runs: odd, so that dims of the model rarely have them."""

_NORMS = ("native_batch_norm", "_batch_norm_with_update", "_native_batch_norm_legit", "cudnn_batch_norm")


@dataclass(frozen=True)
class Sketch:
    """What `build.py` and the strategies need to know of a model. All names are qualified module names."""

    parameters: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
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


def sketch(model: nn.Module, inputs: Callable[[int], Any], call: Call) -> Sketch:
    """Run `model` on batches of `PROBES` samples (`inputs(n)` makes one) and note what it does."""
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


def _pair(model: nn.Module, inputs: Callable[[int], Any], call: Call, fake: bool, number: int) -> list["_Watched"]:
    """The two runs, with the host generators in the same state, so that both take the same branches."""
    runs = []
    for n in PROBES:
        example = inputs(n)
        randomness.seed_host("sketch", number)
        before = randomness.first_draws()
        randomness.seed_host("sketch", number)
        runs.append(_watch(model if fake else copy.deepcopy(model), example, call, fake))
        runs[-1].host_random = before[:2] != randomness.first_draws()[:2]
    return runs


def _places(rounds: list[list["_Watched"]]) -> tuple[dict[str, int | None], list[str]]:
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
    assert isinstance(norm, _BatchNorm)
    return norm.num_features


def _wide(norm: nn.Module) -> torch.dtype:
    given = next((t.dtype for t in (*norm.parameters(), *norm.buffers()) if t.is_floating_point()), torch.float32)
    return torch.promote_types(given, torch.float32)


@dataclass
class _Watched:
    drawn: dict[str, torch.Size] = field(default_factory=dict)
    unkeyed: list[str] = field(default_factory=list)
    batch_norms: list[str] = field(default_factory=list)
    batch_coupled: list[str] = field(default_factory=list)
    counting: list[str] = field(default_factory=list)
    host_random: bool = False


def _watch(model: nn.Module, inputs: Any, call: Call, fake: bool) -> _Watched:
    watcher = _Watcher(model)
    before = _state(model)
    fakes = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it prints pages for what is raised here anyway
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whatever it is, training will say it
            if fakes is None:
                with watcher, watcher.operators:
                    call(model, inputs)
            else:
                with fakes, watcher, watcher.operators:
                    call(model, tree_map_only(torch.Tensor, fakes.from_tensor, inputs))
    finally:
        watcher.remove()
        watcher.seen.counting += _restore(model, before)
        logger.setLevel(level)
    return watcher.seen


Kept = list[tuple[nn.Module, dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]]


def _state(model: nn.Module) -> Kept:
    """What a forward pass may change on modules: attributes (caches), which tensors are buffers, and their values."""
    return [
        (m, dict(m.__dict__), dict(m._buffers), {n: b.clone() for n, b in m._buffers.items() if b is not None})
        for m in model.modules()
    ]


def _restore(model: nn.Module, before: Kept) -> list[str]:
    """Put it back (a cache filled on fake tensors must not stay); returns the names of buffers that were replaced."""
    names = {id(m): name for name, m in model.named_modules()}
    replaced = []
    for module, attributes, buffers, values in before:
        changed = [n for n, b in buffers.items() if module._buffers.get(n) is not b]
        replaced += [f"{names[id(module)]}.{n}".lstrip(".") for n in changed]
        module.__dict__.clear()
        module.__dict__.update(attributes)
        module._buffers.clear()
        module._buffers.update(buffers)
        for name, value in values.items():
            buffers[name].copy_(value)
    return replaced


class _Watcher(TorchFunctionMode):
    """Follows which module is running and which function it called; its `operators` see what that function drew."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.seen = _Watched()
        self.owner: list[tuple[str, str, nn.Module]] = [("", "#0", model)]
        self.calls: dict[str, int] = {}
        self.drew = 0
        self.operators = _Operators(self)
        self.handles: list[Any] = []
        norms = {id(b) for m in model.modules() if isinstance(m, _BatchNorm) for b in m.buffers()}
        self.buffers = {id(b): name for name, b in model.named_buffers() if id(b) not in norms}
        for name, module in model.named_modules():
            self.handles.append(module.register_forward_pre_hook(self._entering(name), prepend=True))
            self.handles.append(module.register_forward_hook(self._leaving, always_call=True))

    def _entering(self, name: str):
        def enter(module: nn.Module, args: Any) -> None:
            self.calls[name] = self.calls.get(name, 0) + 1
            self.owner.append((name, f"{name}#{self.calls[name]}", module))

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self.owner.pop()

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def place(self) -> str:
        owner = self.owner[-1][1]
        self.calls[owner] = self.calls.get(owner, 0) + 1
        return f"{owner}#{self.calls[owner]}"

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        dropout = func in randomness.PLAIN_DROPOUTS or func in randomness.FEATURE_DROPOUTS
        if dropout:
            return self._dropout(func, *args, **kwargs)
        self.operators.keyed = func in draws.COMPOSITES
        self.operators.per_sample = func in (torch.nn.functional.instance_norm, torch.instance_norm)
        try:
            return func(*args, **kwargs)
        finally:
            self.operators.keyed = self.operators.per_sample = False

    def _dropout(
        self,
        func: Any,
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool = True,
    ):
        if training and train and p > 0.0:
            shape = input.shape if func in randomness.PLAIN_DROPOUTS else input.shape[:2]
            self.seen.drawn[self.place()] = shape
        return input


class _Operators(TorchDispatchMode):
    def __init__(self, watcher: _Watcher):
        super().__init__()
        self.watcher, self.keyed, self.per_sample = watcher, False, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        watcher = self.watcher
        name, _, module = watcher.owner[-1]
        if func._schema.is_mutable:
            written = [_argument(func, args, kwargs or {}, a.name) for a in func._schema.arguments if a.is_write]
            watcher.seen.counting += [watcher.buffers[id(t)] for t in written if id(t) in watcher.buffers]
        if func in SEEDED and 0.0 not in [
            _argument(func, args, kwargs or {}, name) for name in ("dropout_p", "dropout")
        ]:
            rule = func.overloadpacket.__name__.rstrip("_").removesuffix("_like") in draws.RULES
            if self.keyed and rule and isinstance(result, torch.Tensor):
                watcher.seen.drawn[watcher.place()] = result.shape
            else:
                watcher.seen.unkeyed.append(name or type(module).__name__)
        elif func.overloadpacket.__name__ in _NORMS and _uses_batch(func, args, kwargs or {}):
            if isinstance(module, _BatchNorm):
                watcher.seen.batch_norms.append(name)
            elif not self.per_sample:
                watcher.seen.batch_coupled.append(name or type(module).__name__)
        return result


def _uses_batch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    training = _argument(func, args, kwargs, "training")
    training = _argument(func, args, kwargs, "train") if training is None else training
    return func.overloadpacket.__name__ == "_batch_norm_with_update" if training is None else bool(training)


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """The value of an operator's argument, also when it is left at its default; None when there is no such argument."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return (
                args[i]
                if i < len(args)
                else kwargs.get(name, argument.default_value if argument.has_default_value() else None)
            )
    return None
