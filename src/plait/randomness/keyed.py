"""Random numbers that no layout changes: keyed by (seed, step, place in the model, global element index).

A framework that draws a dropout mask from a per-rank generator trains another model on two devices than on one.
Here every random number of the forward pass is a pure function of

    seed · step · place (module name, which call of it, which draw in it) · index of the element in the GLOBAL tensor

so a rank that holds samples 32 to 63 of the batch draws exactly the stretch of the mask that one device would have
drawn there. The generator is Philox (counter-based: any stretch costs what it is long, Salmon et al. 2011), which
numpy runs several times faster than torch draws a mask, and which a device runs itself (`randomness/philox.py`).
Elements are indexed with the batch dim moved to the front; which dim that is, `model/sketch.py` finds by running the
model on two batch sizes (a dim that holds several rows per sample is taken sample by sample: that it is not the other
way round, `plait verify` tells). A draw that has no batch dim (a mask on a weight, a layer drop) is the same everywhere.

Python's, numpy's and torch's own generators are seeded by (seed, step) before each forward pass, so that host-side
decisions (``if random.random() < 0.1``) agree on all ranks and after a resume. The same rule keys data augmentation
by (seed, epoch, sample).
"""

import random
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.random import Philox
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from plait.config.errors import PlaitError, Problem
from plait.randomness.distributions import (
    COMPOSITES,
    DROPOUTS,
    LAYERS,
    REDRAWN,
    UNIT,
    DropoutCall,
    OperatorCall,
    draw_inside,
    draw_mask,
    draw_nested,
    dropout_call,
    key,
    mask_op,
    mask_shape,
    redraw,
    rule_of,
    undrawn,
)
from plait.randomness.sub_block import Rule, SubBlocks, first_of
from plait.tensors.modules import own_forward
from plait.tensors.torch_private import TorchDispatchMode, WrapperTensor, checkpoint_frame, is_seeded


def seed_host(*words: object, only: Container[int] = (0, 1, 2)) -> None:
    """Seed Python's (0), numpy's (1) and torch's (2) generators by the words, or `only` some of them."""
    number = key(*words)
    if 0 in only:
        random.seed(number)
    if 1 in only:
        np.random.seed(number & 0xFFFFFFFF)
    if 2 in only:
        torch.default_generator.manual_seed(number & 0x7FFFFFFFFFFFFFFF)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(number & 0x7FFFFFFFFFFFFFFF)


def seed_device(*words: object) -> None:
    """Seed the generators of this process's GPU by the words, if it is in use: what draws there and cannot be keyed draws by them."""
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(key(*words) & 0x7FFFFFFFFFFFFFFF)


class HostState(NamedTuple):
    """The states of the host's generators."""

    python: tuple[Any, ...]
    numpy: dict[str, Any] | tuple[Any, ...]
    torch: Tensor


def host_state() -> HostState:
    """The state of Python's, numpy's and torch's generators, for `restore_host`."""
    return HostState(random.getstate(), np.random.get_state(), torch.get_rng_state())


def restore_host(state: HostState) -> None:
    """Put the host generators back."""
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.set_rng_state(state.torch)


@contextmanager
def host_kept() -> Iterator[None]:
    """Python's, numpy's and torch's generators are afterwards as they were before; also as a decorator."""
    state = host_state()
    try:
        yield
    finally:
        restore_host(state)


def first_draws() -> tuple[float, float, float]:
    """The next number of Python's, numpy's and torch's generator: after seeding, it tells whether one was drawn from."""
    return random.random(), np.random.random(), float(torch.rand(()))


def permutation(seed: int, epoch: int, length: int) -> np.ndarray:
    """The sample order of an epoch: a pure function of (seed, epoch), of shape [length]."""
    return np.argsort(Philox(key=key(seed, "order", epoch)).random_raw(length), kind="stable")


DRAWING: ContextVar[bool] = ContextVar("draws of keyed random functions", default=True)


@contextmanager
def without_draws() -> Iterator[None]:
    """Keyed random functions inside give constants: dropout keeps everything, each distribution its value at one half. A
    difference that is still there without draws has another cause."""
    token = DRAWING.set(False)
    try:
        yield
    finally:
        DRAWING.reset(token)


def is_drawing() -> bool:
    """Whether keyed random functions draw, which they do outside of `without_draws`."""
    return DRAWING.get()


class RepeatableForward:
    """A module's forward that may run again in backward, with the hooks that note the module's place inside it."""

    def __init__(self, module: nn.Module):
        self.module, self.enter, self.leave = module, _nothing, _nothing
        self.own = own_forward(module)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        self.enter()
        try:
            return self.own(*args, **kwargs)
        finally:
            self.leave()


def _nothing() -> None: ...


class Randomness:
    """Gives a model its layout-free random numbers.

    `places` maps a place to the batch dim of the tensor drawn there (None: no batch dim); it comes from the sketch.
    A model without places pays only for seeding the host generators.

    Recomputed activations (`torch.utils.checkpoint`) draw again in backward and must draw the same. Every event of a
    forward pass (entering or leaving a module that draws, a draw) therefore gives torch's CPU generator a seed of its
    own and files a snapshot under it. A recomputation starts by restoring the generator, so the first thing that
    happens in it finds its snapshot and goes on from there.
    """

    def __init__(self, seed: int, places: dict[str, int | None], always: bool = False):
        self.seed, self.places, self.needed = seed, places, bool(places) or always
        self.rules: list[Rule] = []
        """What this rank holds of tensors that are drawn at random, by strategies: the first that says something is right."""
        self.windows: SubBlocks | None = None
        """What this rank holds of tensors that are cut otherwise than by samples. May change from pass to pass: a
        recomputation draws by those of its forward pass. Not for compiled models."""
        self.whose: WrapperTensor | None = None
        """A part under the shape of the whole (`WrapperTensor`), while something is drawn for it."""
        self.shared = False
        """Threads draw from one generator of torch's: a recomputation cannot find its place by it."""
        self.where = torch.zeros(4, dtype=torch.int64)  # seed, step, first sample, samples
        self._where = self.where.numpy()  # writes to it are no operators, which those who watch would see
        self._mode = _Keyed(self)
        self._owner: list[str] = []
        self._entered: list[object] = []
        self._pushed = 0
        self._inside: dict[str, int] = {}
        """Of the compiled unit that runs now: how often its dropout layers were called, by their names in it."""
        self._hooks: dict[str, tuple[Any, Any]] = {}
        self._calls: dict[str, int] = {}
        self._cursor = self._outside = 0
        self._replaying = self._resumed = False
        self._snapshots: dict[int, tuple[list[int], list[str], dict[str, int], SubBlocks | None]] = {}

    def install(self, model: nn.Module, drawn: Mapping[str, tuple[int, ...]] | None = None) -> Self:
        """Have the modules of a model note their places, once all strategies are applied to it. `drawn`: `Sketch.drawn`, for the rules."""
        if self.rules:
            self.windows = SubBlocks(drawn or {}, first_of(self.rules))
        owners = {place.split("#")[0] for place in self.places}
        for name, module in model.named_modules():
            region = module.__dict__.get("forward")
            if name in owners and isinstance(region, RepeatableForward):
                region.enter = partial(self._enter(name), module, ())
                region.leave = partial(self._leave, module, (), None)
            elif name in owners:
                before = module.register_forward_pre_hook(self._enter(name), prepend=True)
                self._hooks[name] = before, module.register_forward_hook(self._leave, always_call=True)
        return self

    def _enter(self, name: str):
        def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._before_event()
            self._calls[name] = self._calls.get(name, 0) + 1
            self._owner.append(f"{name}#{self._calls[name]}")
            self._entered.append(checkpoint_frame())
            self._push()
            self._after_event()

        return enter

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if self._owner:
            self._owner.pop()
        if self._entered:
            self._entered.pop()
        self._pop()
        self._after_event()

    def _push(self) -> None:
        """In a recomputation: torch's engine leaves the modes that were active around backward. One of them, or what draws inside
        of a module that is in another would be replaced twice."""
        if self._replaying:
            if not self._pushed:
                self._mode.__enter__()
            self._pushed += 1

    def _pop(self) -> None:
        if self._pushed:
            self._pushed -= 1
            if not self._pushed:
                self._mode.__exit__(None, None, None)

    def place(self) -> str:
        """The place of the next draw: `module#call#draw`."""
        self._before_event()
        owner = self._owner[-1] if self._owner else "#0"
        entered = self._entered[-1] if self._entered else None
        if not torch.compiler.is_compiling() and checkpoint_frame() is not entered:
            what = (
                "a checkpointed function draws random numbers by a direct call, and its recomputation would draw others"
            )
            why = f"in {owner.split('#')[0] or 'the model'}: what is recomputed is not a module"
            fix = ("checkpoint(a module that draws, …)", "use nn.Dropout inside it")
            raise PlaitError(Problem("J014", what, why=why, fix=fix))
        self._calls[owner] = self._calls.get(owner, 0) + 1
        place = f"{owner}#{self._calls[owner]}"
        self._after_event()
        return place

    def _before_event(self) -> None:
        """In a recomputation: go back to where it starts."""
        if not self._replaying or torch.compiler.is_compiling():
            return
        seed = torch.default_generator.initial_seed()
        if seed == self._cursor and self._resumed:
            return
        if self.shared or seed == self._outside or seed not in self._snapshots:
            what = "a recomputation draws random numbers, and torch's generator was not restored for it"
            why = "preserve_rng_state=False, or the model seeds torch itself, or threads share it (processes=one)"
            fix = ("checkpoint(…, preserve_rng_state=True)", "processes=per-device")
            raise PlaitError(Problem("J014", what, why=why, fix=fix))
        where, owner, calls, self.windows = self._snapshots[seed]
        self._where[:] = where
        self._owner[:], self._calls, self._cursor, self._resumed = owner, dict(calls), seed, True

    def _after_event(self) -> None:
        if torch.compiler.is_compiling():
            return
        self._cursor = self._cursor + 1 & 0x7FFFFFFFFFFFFFFF
        torch.default_generator.manual_seed(self._cursor)
        if not self._replaying:
            self._snapshots[self._cursor] = (self.where.tolist(), list(self._owner), dict(self._calls), self.windows)

    @contextmanager
    def at(self, step: int, first: int, count: int, stage: int = 0, turn: str = "") -> Iterator[None]:
        """The context of a forward pass on samples first … first + count − 1 of the global batch of `step`.

        `stage` tells the passes of several pipeline stages apart, for recomputation; it changes no keyed number. `turn`: the
        phase of the step, if the job has phases; each draws numbers of its own. A GPU's generator is seeded by samples and
        stage too: operators that draw inside, such as fused attention, would draw the same for all parts of the batch.
        """
        seed = key(self.seed, "phase", turn) & 0x7FFFFFFFFFFFFFFF if turn else self.seed
        seed_host(seed, "forward", step)
        seed_device(seed, "forward", step, first, stage)
        if not self.needed:
            yield
            return
        if int(self.where[1]) != step:
            self._snapshots.clear()
        self._where[:] = seed, step, first, count
        self._calls, self._replaying = {}, False
        self._owner.clear()
        self._entered.clear()
        self._cursor = key(seed, "event", step, first, stage) & 0x7FFFFFFFFFFFFFFF
        with self._mode:
            self._after_event()
            yield

    def passed(self, calls: dict[str, int]) -> None:
        """Count calls of modules that were made elsewhere: the places that follow go on from there."""
        for name, times in calls.items():
            self._calls[name] = self._calls.get(name, 0) + times

    def mark(self) -> Callable[[], None]:
        """Note how far the places are; the function returned goes back there, so that code that runs twice draws the same."""
        self._before_event()
        calls = dict(self._calls)
        self._after_event()

        def back() -> None:
            self._calls = dict(calls)

        return back

    @contextmanager
    def replay(self) -> Iterator[None]:
        """The context of a backward pass: what is recomputed in it draws what it drew in the forward pass."""
        if not self.needed:
            yield
            return
        self._replaying, self._resumed = True, False
        self._outside = torch.default_generator.initial_seed()  # what a checkpoint finds that restores nothing
        self._entered.clear()
        try:
            yield
        finally:
            self._replaying = False

    def compiled(self, model: nn.Module, units: Iterable[str]) -> None:
        """From now on the forwards of these modules are compiled, each run in `unit`. Their dropout layers draw inside of graphs,
        whatever else draws does so between them, where what it is keyed by is known."""
        self._mode.drawn = torch.compiler.disable(self._mode.drawn)
        for unit in units:
            for path, module in model.get_submodule(unit).named_modules():
                name = f"{unit}.{path}".strip(".")
                if path and type(module) in LAYERS and "forward" not in vars(module) and name in self._hooks:
                    for handle in self._hooks.pop(name):
                        handle.remove()
                    draw_inside(module, path, self._inside, self.where)

    @contextmanager
    def unit(self, unit: str) -> Iterator[None]:
        """The context of a call of a compiled unit."""
        if not self.needed:
            yield
            return
        self._before_event()
        before, inside = self._calls, dict(self._inside)
        absolute = lambda name: f"{unit}.{name}".strip(".")  # noqa: E731

        def draw(like: Tensor, place: str, p: float) -> Tensor:
            name, number, nth = place.split("#")
            name = absolute(name)
            place = f"{name}#{before.get(name, 0) + int(number)}#{nth}"
            return draw_mask(like, self.where, place, self.places.get(place, -1), p, self.windows)

        token = UNIT.set(draw)
        self._inside.clear()
        self._push()
        self._after_event()
        try:
            yield
        finally:
            self._pop()
            UNIT.reset(token)
            for name, times in self._inside.items():
                self._calls[absolute(name)] = self._calls.get(absolute(name), 0) + times
            self._inside.clear()
            self._inside.update(inside)
            self._after_event()

    def keep(self, x: Tensor, p: float, shape: torch.Size | None = None) -> Tensor:
        """A dropout mask like `x` (or of `shape`, to be broadcast): 1 / (1 − p) with probability 1 − p, else 0."""
        place = self.place()
        if not torch.compiler.is_compiling() and not DRAWING.get():
            return x.new_ones(())
        like = x if shape is None or shape == x.shape else x.new_empty(shape)
        drawn = like.detach(), self.where, place, self.places.get(place, -1), p
        return mask_op(*drawn) if self.windows is None else draw_mask(*drawn, self.windows)


class KeyedDraws(TorchDispatchMode):
    """A dispatch mode inside composite random functions: it replaces the draws themselves, operator by operator."""

    def __init__(self, randomness: Randomness):
        super().__init__()
        self.randomness = randomness

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not is_seeded(func) or rule_of(func) not in REDRAWN:
            return result
        place = self.randomness.place()
        if not DRAWING.get():
            return undrawn(result, OperatorCall(func, args, kwargs or {}))
        where, dim = self.randomness.where.tolist(), self.randomness.places.get(place, -1)
        return redraw(result, OperatorCall(func, args, kwargs or {}), where, place, dim, self.randomness.windows)


class _Keyed(TorchFunctionMode):
    """Replaces the random functions of a forward pass by keyed ones. Traced by torch.compile without a break."""

    def __init__(self, randomness: Randomness):
        super().__init__()
        self.randomness = randomness
        self.drawn = self._drawn

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in DROPOUTS or (func in COMPOSITES and not _plain_attention(func, args, kwargs)):
            return self.drawn(func, args, kwargs)
        return func(*args, **kwargs)

    def _drawn(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in DROPOUTS:
            return self._dropout(dropout_call(func, *args, **kwargs))
        if torch.compiler.is_compiling():  # by the job's own code: it cannot be keyed there
            return func(*args, **kwargs)
        if func is torch.native_dropout and isinstance(args[0], WrapperTensor) and args[0].inside:
            found = self._of_part(args[0], lambda part: self._drawn(func, (part, *args[1:]), kwargs))
            return tuple(map(args[0].like, found))
        with KeyedDraws(self.randomness):
            return func(*args, **kwargs)

    def _of_part(self, whole: WrapperTensor, run: Callable[[Tensor], Any]) -> Any:
        """What `run` gives of this rank's part of a tensor that has the shape of the whole, with the random numbers of that part."""
        before, self.randomness.whose = self.randomness.whose, whole
        try:
            return run(whole.local)
        finally:
            self.randomness.whose = before

    def _dropout(self, call: DropoutCall) -> Tensor:
        input = call.input
        if not call.drops:
            return input
        if isinstance(input, WrapperTensor) and input.inside:
            return input.like(self._of_part(input, lambda part: self._dropout(call.on(part))))
        if not 0.0 <= call.p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {call.p}")
        if not torch.compiler.is_compiling() and input.is_nested:
            return draw_nested(input, self.randomness.where, self.randomness.place(), call.p)
        mask = self.randomness.keep(input, call.p, mask_shape(call))
        return input.mul_(mask) if call.inplace else input * mask


def _plain_attention(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is an attention that draws nothing."""
    given = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    return func is F.scaled_dot_product_attention and given == 0.0
