"""Random numbers keyed by (seed, step, place in the model, global element index), independent of the plan.

If each rank draws dropout masks from its own generator, training depends on the number of ranks. Here every random
number of the forward pass is a pure function of

    seed · step · place (module name, index of its call, index of the draw in it) · index of the element in the GLOBAL tensor

So a rank with samples 32 to 63 of the batch draws exactly that part of the mask of one device. The generator is Philox
(Salmon et al. 2011). It is counter-based, so the cost of any part is proportional to its length. numpy runs it several
times faster than torch draws a mask, and a device runs it itself (`randomness/philox.py`). Elements are indexed with
the batch dim first. `model/sketch.py` finds the batch dim by running the model on two batch sizes. A dim with several
rows per sample is assumed to be sample-major, which `plait verify` checks. A draw without a batch dim (a mask on a
weight, a layer drop) is equal on all ranks.

Python's, numpy's and torch's own generators are seeded by (seed, step) before each forward pass. So host-side decisions
(``if random.random() < 0.1``) agree on all ranks and after a resume. Data augmentation is keyed by (seed, epoch,
sample).
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
    DROPOUT_LAYERS,
    DROPOUTS,
    REDRAWN,
    UNIT_DRAW,
    DropoutCall,
    OperatorCall,
    draw_mask,
    draw_nested,
    fill_with_median,
    find_mask_shape,
    find_rule_name,
    install_unit_dropout,
    make_philox_key,
    mask_op,
    parse_dropout_call,
    redraw,
)
from plait.randomness.sub_block import Rule, SubBlocks, chain_rules
from plait.tensors.module_state import bind_forward
from plait.tensors.torch_private import TorchDispatchMode, WrapperTensor, checkpoint_frame, is_seeded


def seed_host(*words: object, only: Container[int] = (0, 1, 2)) -> None:
    """Seed Python's (0), numpy's (1) and torch's (2) generators by the words, or `only` some of them."""
    number = make_philox_key(*words)
    if 0 in only:
        random.seed(number)
    if 1 in only:
        np.random.seed(number & 0xFFFFFFFF)
    if 2 in only:
        torch.default_generator.manual_seed(number & 0x7FFFFFFFFFFFFFFF)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(number & 0x7FFFFFFFFFFFFFFF)


def seed_device(*words: object) -> None:
    """Seed the generators of this process's GPU by the words, if it is in use, for draws that cannot be keyed."""
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(make_philox_key(*words) & 0x7FFFFFFFFFFFFFFF)


class HostState(NamedTuple):
    """The states of the host's generators."""

    python: tuple[Any, ...]
    numpy: dict[str, Any] | tuple[Any, ...]
    torch: Tensor


def get_host_state() -> HostState:
    """Return the state of Python's, numpy's and torch's generators, for `restore_host_state`."""
    return HostState(random.getstate(), np.random.get_state(), torch.get_rng_state())


def restore_host_state(state: HostState) -> None:
    """Restore the states of the host generators."""
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.set_rng_state(state.torch)


@contextmanager
def preserve_host_state() -> Iterator[None]:
    """Restore the host generators after this context. Also usable as a decorator."""
    state = get_host_state()
    try:
        yield
    finally:
        restore_host_state(state)


def draw_host_numbers() -> tuple[float, float, float]:
    """Draw a number from Python's, numpy's and torch's generators. After seeding, this shows which of them were used in
    between."""
    return random.random(), np.random.random(), float(torch.rand(()))


def make_permutation(seed: int, epoch: int, length: int) -> np.ndarray:
    """Return the sample order of an epoch, shape [length]: a pure function of (seed, epoch)."""
    return np.argsort(Philox(key=make_philox_key(seed, "order", epoch)).random_raw(length), kind="stable")


DRAWING: ContextVar[bool] = ContextVar("draws of keyed random functions", default=True)


@contextmanager
def disable_draws() -> Iterator[None]:
    """Make keyed random functions constant in this context: dropout keeps all elements, and distributions return their
    value at one half. A difference that remains has a cause other than random numbers."""
    token = DRAWING.set(False)
    try:
        yield
    finally:
        DRAWING.reset(token)


def is_drawing() -> bool:
    """Return whether keyed random functions draw. They do outside of `disable_draws`."""
    return DRAWING.get()


class RepeatableForward:
    """A module's forward that may run again in backward, with hooks that record the module's place."""

    def __init__(self, module: nn.Module):
        self.module, self.enter, self.leave = module, _do_nothing, _do_nothing
        self.own = bind_forward(module)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        self.enter()
        try:
            return self.own(*args, **kwargs)
        finally:
            self.leave()


def _do_nothing() -> None: ...


class Randomness:
    """Replaces a model's random numbers by keyed ones, independent of the plan.

    `places` maps a place to the batch dim of the tensor drawn there (None: no batch dim); it comes from the sketch.
    Without places, only the host generators are seeded.

    [Note: Recomputation]
    Recomputed activations (`torch.utils.checkpoint`) draw again in backward and must draw the same numbers. Events of a
    forward pass are entering or leaving a module that draws, and each draw. Every event sets a unique seed on torch's
    CPU generator, and stores a snapshot under that seed. A recomputation first restores the generator. So its first
    event finds its snapshot and continues from there.
    """

    def __init__(self, seed: int, places: dict[str, int | None], always: bool = False):
        self.seed, self.places, self.is_needed = seed, places, bool(places) or always
        self.rules: list[Rule] = []
        """Rules of strategies for the ranges of random tensors on this rank. The first result that is not None is used."""
        self.sub_blocks: SubBlocks | None = None
        """Ranges of tensors that are split in other dims than samples. They may change between passes; a recomputation
        uses those of its forward pass. Not supported by compiled models."""
        self.drawn_wrapper: WrapperTensor | None = None
        """The `WrapperTensor` for whose part random numbers are drawn now."""
        self.is_shared = False
        """True if several threads use torch's generator, so that a recomputation cannot find its place by it."""
        self.where = torch.zeros(4, dtype=torch.int64)  # seed, step, first sample, samples
        self._where = self.where.numpy()  # numpy writes are not torch operators, which modes would intercept
        self._mode = _KeyedMode(self)
        self._owner: list[str] = []
        self._entered: list[object] = []
        self._pushed = 0
        self._inside: dict[str, int] = {}
        """Of the compiled unit that runs now: number of calls of each dropout layer, by its name in the unit."""
        self._hooks: dict[str, tuple[Any, Any]] = {}
        self._calls: dict[str, int] = {}
        self._cursor = self._outside = 0
        self._replaying = self._resumed = False
        self._snapshots: dict[int, tuple[list[int], list[str], dict[str, int], SubBlocks | None]] = {}

    def install(self, model: nn.Module, drawn: Mapping[str, tuple[int, ...]] | None = None) -> Self:
        """Install hooks that record places, after all strategies are applied. `drawn`: `Sketch.drawn`, for the rules."""
        if self.rules:
            self.sub_blocks = SubBlocks(drawn or {}, chain_rules(self.rules))
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
            self._push_mode()
            self._after_event()

        return enter

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if self._owner:
            self._owner.pop()
        if self._entered:
            self._entered.pop()
        self._pop_mode()
        self._after_event()

    def _push_mode(self) -> None:
        """Enter the mode in a recomputation, because torch's engine leaves modes that were active around backward. It
        is entered once only; otherwise draws in nested modules would be replaced twice."""
        if self._replaying:
            if not self._pushed:
                self._mode.__enter__()
            self._pushed += 1

    def _pop_mode(self) -> None:
        if self._pushed:
            self._pushed -= 1
            if not self._pushed:
                self._mode.__exit__(None, None, None)

    def next_place(self) -> str:
        """Return the place of the next draw: `module#call#draw`."""
        self._before_event()
        owner = self._owner[-1] if self._owner else "#0"
        entered = self._entered[-1] if self._entered else None
        if not torch.compiler.is_compiling() and checkpoint_frame() is not entered:
            what = (
                "a checkpointed function draws random numbers directly, and its recomputation would draw different ones"
            )
            why = f"in {owner.split('#')[0] or 'the model'}: the checkpointed function is not a module"
            fix = ("checkpoint(a module that draws, …)", "use nn.Dropout inside it")
            raise PlaitError(Problem("J014", what, why=why, fix=fix))
        self._calls[owner] = self._calls.get(owner, 0) + 1
        place = f"{owner}#{self._calls[owner]}"
        self._after_event()
        return place

    def _before_event(self) -> None:
        """Restore the snapshot of the current event in a recomputation (see [Note: Recomputation])."""
        if not self._replaying or torch.compiler.is_compiling():
            return
        seed = torch.default_generator.initial_seed()
        if seed == self._cursor and self._resumed:
            return
        if self.is_shared or seed == self._outside or seed not in self._snapshots:
            what = "a recomputation draws random numbers, and torch's generator was not restored for it"
            why = "preserve_rng_state=False, or the model seeds torch itself, or several threads use the generator (processes=one)"
            fix = ("checkpoint(…, preserve_rng_state=True)", "processes=per-device")
            raise PlaitError(Problem("J014", what, why=why, fix=fix))
        where, owner, calls, self.sub_blocks = self._snapshots[seed]
        self._where[:] = where
        self._owner[:], self._calls, self._cursor, self._resumed = owner, dict(calls), seed, True

    def _after_event(self) -> None:
        if torch.compiler.is_compiling():
            return
        self._cursor = self._cursor + 1 & 0x7FFFFFFFFFFFFFFF
        torch.default_generator.manual_seed(self._cursor)
        if not self._replaying:
            self._snapshots[self._cursor] = (self.where.tolist(), list(self._owner), dict(self._calls), self.sub_blocks)

    @contextmanager
    def forward_pass(self, step: int, first: int, count: int, stage: int = 0, turn: str = "") -> Iterator[None]:
        """Key the draws of a forward pass on samples first … first + count − 1 of the global batch of `step`.

        `stage` separates the passes of several pipeline stages for recomputation; it does not change keyed numbers.
        `turn`: the phase of the step, if the job has phases; each phase draws different numbers. A GPU's generator is
        seeded by samples and stage too. Otherwise operators with internal draws, such as fused attention, would draw
        the same for all parts of the batch.
        """
        seed = make_philox_key(self.seed, "phase", turn) & 0x7FFFFFFFFFFFFFFF if turn else self.seed
        seed_host(seed, "forward", step)
        seed_device(seed, "forward", step, first, stage)
        if not self.is_needed:
            yield
            return
        if int(self.where[1]) != step:
            self._snapshots.clear()
        self._where[:] = seed, step, first, count
        self._calls, self._replaying = {}, False
        self._owner.clear()
        self._entered.clear()
        self._cursor = make_philox_key(seed, "event", step, first, stage) & 0x7FFFFFFFFFFFFFFF
        with self._mode:
            self._after_event()
            yield

    def count_calls(self, calls: dict[str, int]) -> None:
        """Count calls of modules that run on other ranks, so that later places are correct."""
        for name, times in calls.items():
            self._calls[name] = self._calls.get(name, 0) + times

    def mark_places(self) -> Callable[[], None]:
        """Record the current places. Return a function that restores them, so that code that runs twice draws the same
        numbers."""
        self._before_event()
        calls = dict(self._calls)
        self._after_event()

        def restore() -> None:
            self._calls = dict(calls)

        return restore

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Reproduce the draws of the forward pass in recomputations of this backward pass."""
        if not self.is_needed:
            yield
            return
        self._replaying, self._resumed = True, False
        self._outside = torch.default_generator.initial_seed()  # found by a checkpoint that does not restore the generator
        self._entered.clear()
        try:
            yield
        finally:
            self._replaying = False

    def prepare_compiled(self, model: nn.Module, units: Iterable[str]) -> None:
        """Prepare units for torch.compile; each call must then run in `unit_call`. Their dropout layers draw inside of
        graphs. Other random functions draw between graphs, where their keys are known."""
        self._mode.run_keyed = torch.compiler.disable(self._mode.run_keyed)
        for unit in units:
            for path, module in model.get_submodule(unit).named_modules():
                name = f"{unit}.{path}".strip(".")
                if path and type(module) in DROPOUT_LAYERS and "forward" not in vars(module) and name in self._hooks:
                    for handle in self._hooks.pop(name):
                        handle.remove()
                    install_unit_dropout(module, path, self._inside, self.where)

    @contextmanager
    def unit_call(self, unit: str) -> Iterator[None]:
        """Key the draws of one call of a compiled unit."""
        if not self.is_needed:
            yield
            return
        self._before_event()
        before, inside = self._calls, dict(self._inside)
        absolute = lambda name: f"{unit}.{name}".strip(".")  # noqa: E731

        def draw(like: Tensor, place: str, p: float) -> Tensor:
            name, number, nth = place.split("#")
            name = absolute(name)
            place = f"{name}#{before.get(name, 0) + int(number)}#{nth}"
            return draw_mask(like, self.where, place, self.places.get(place, -1), p, self.sub_blocks)

        token = UNIT_DRAW.set(draw)
        self._inside.clear()
        self._push_mode()
        self._after_event()
        try:
            yield
        finally:
            self._pop_mode()
            UNIT_DRAW.reset(token)
            for name, times in self._inside.items():
                self._calls[absolute(name)] = self._calls.get(absolute(name), 0) + times
            self._inside.clear()
            self._inside.update(inside)
            self._after_event()

    def draw_dropout_mask(self, x: Tensor, p: float, shape: torch.Size | None = None) -> Tensor:
        """Draw a dropout mask like `x`, or of `shape` to be broadcast: 1 / (1 − p) with probability 1 − p, else 0."""
        place = self.next_place()
        if not torch.compiler.is_compiling() and not DRAWING.get():
            return x.new_ones(())
        like = x if shape is None or shape == x.shape else x.new_empty(shape)
        drawn = like.detach(), self.where, place, self.places.get(place, -1), p
        return mask_op(*drawn) if self.sub_blocks is None else draw_mask(*drawn, self.sub_blocks)


class KeyedDraws(TorchDispatchMode):
    """Replaces the draws inside composite random functions, operator by operator."""

    def __init__(self, randomness: Randomness):
        super().__init__()
        self.randomness = randomness

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not is_seeded(func) or find_rule_name(func) not in REDRAWN:
            return result
        place = self.randomness.next_place()
        if not DRAWING.get():
            return fill_with_median(result, OperatorCall(func, args, kwargs or {}))
        where, dim = self.randomness.where.tolist(), self.randomness.places.get(place, -1)
        return redraw(result, OperatorCall(func, args, kwargs or {}), where, place, dim, self.randomness.sub_blocks)


class _KeyedMode(TorchFunctionMode):
    """Replaces the random functions of a forward pass by keyed ones. torch.compile traces it without a graph break."""

    def __init__(self, randomness: Randomness):
        super().__init__()
        self.randomness = randomness
        self.run_keyed = self._run_keyed

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in DROPOUTS or (func in COMPOSITES and not _is_plain_attention(func, args, kwargs)):
            return self.run_keyed(func, args, kwargs)
        return func(*args, **kwargs)

    def _run_keyed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in DROPOUTS:
            return self._dropout(parse_dropout_call(func, *args, **kwargs))
        if torch.compiler.is_compiling():  # in the job's own compiled code draws cannot be keyed
            return func(*args, **kwargs)
        if func is torch.native_dropout and isinstance(args[0], WrapperTensor) and args[0].wraps_region:
            found = self._run_on_part(args[0], lambda part: self._run_keyed(func, (part, *args[1:]), kwargs))
            return tuple(map(args[0].with_local, found))
        with KeyedDraws(self.randomness):
            return func(*args, **kwargs)

    def _run_on_part(self, whole: WrapperTensor, run: Callable[[Tensor], Any]) -> Any:
        """Run a function on this rank's part of a tensor with the global shape, with the random numbers of that part."""
        before, self.randomness.drawn_wrapper = self.randomness.drawn_wrapper, whole
        try:
            return run(whole.local)
        finally:
            self.randomness.drawn_wrapper = before

    def _dropout(self, call: DropoutCall) -> Tensor:
        input = call.input
        if not call.drops:
            return input
        if isinstance(input, WrapperTensor) and input.wraps_region:
            return input.with_local(self._run_on_part(input, lambda part: self._dropout(call.with_input(part))))
        if not 0.0 <= call.p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {call.p}")
        if not torch.compiler.is_compiling() and input.is_nested:
            return draw_nested(input, self.randomness.where, self.randomness.next_place(), call.p)
        mask = self.randomness.draw_dropout_mask(input, call.p, find_mask_shape(call))
        return input.mul_(mask) if call.inplace else input * mask


def _is_plain_attention(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the call is attention without dropout."""
    given = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    return func is F.scaled_dot_product_attention and given == 0.0
