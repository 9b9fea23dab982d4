"""Watching a model run once: which module draws what, normalises over the batch, or changes a buffer.

The run may be on fake tensors, which have shapes and no numbers, or on real ones. It leaves the model as it was.
"""

import logging
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from plait.config.errors import PlaitError, Problem
from plait.launch import one_device
from plait.model.deferred_init import roles
from plait.model.make import sparse_gradients_error
from plait.model.meter import Meter, Metered, homes
from plait.model.mutations import LISTENER, Mutations, OutsideWrites, ProcessFlags
from plait.model.operations import argument_of
from plait.randomness import distributions
from plait.randomness.distributions import DROPOUTS, DropoutCall, dropout_call, mask_shape
from plait.tensors import opaque_code
from plait.tensors.fake import PartlyFake, RealConstants
from plait.tensors.modules import ModuleState
from plait.tensors.opaque_code import READS
from plait.tensors.torch_private import (
    BatchNormBase,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    WrapperTensor,
    is_seeded,
    own_buffers,
    storage_key,
    tree_map_only,
)

Call = Callable[[nn.Module, Any], Any]
_NORMS = ("native_batch_norm", "_batch_norm_with_update", "_native_batch_norm_legit", "cudnn_batch_norm")
_TABLES = ("embedding", "_embedding_bag")
"""Names of operators whose weight has a sparse gradient if their argument `sparse` is true."""


@dataclass
class RunTrace:
    """What a run showed: drawn shapes by place, and names of modules and buffers."""

    drawn: dict[str, torch.Size] = field(default_factory=dict)
    unkeyed: list[str] = field(default_factory=list)
    packed: list[str] = field(default_factory=list)
    """Recurrent modules that drop out between their layers in a packed sequence, whose rows are of no one sample."""
    batch_norms: list[str] = field(default_factory=list)
    batch_coupled: list[str] = field(default_factory=list)
    counting: list[str] = field(default_factory=list)
    rewritten: dict[str, set[str]] = field(default_factory=dict)
    followed: dict[str, set[str]] = field(default_factory=dict)
    """Weights from which it writes tensors outside of the model, and the modules whose code does it."""
    sampled: list[str] = field(default_factory=list)
    unshared: list[str] = field(default_factory=list)
    process_flags: list[str] = field(default_factory=list)
    """Attributes that are true because this process has made something that no checkpoint holds (`ProcessFlags`)."""
    host_random: bool = False
    opaque: list[tuple[str, str]] = field(default_factory=list)
    """Operators of higher order, and the modules whose code calls them."""
    metered: Metered = field(default_factory=Metered)


@dataclass
class Keys:
    """For a run that takes the course that training takes. Its random numbers are those of `where` (seed, step, first
    sample, samples); whole numbers and small tensors are real, so that the model can look at them."""

    where: tuple[int, int, int, int]
    places: dict[str, int | None]
    notes: bool
    """Note where Python's and numpy's generators are after each call of a unit: `after`."""
    after: list[Any] = field(default_factory=list)


def trace_run(
    model: nn.Module,
    inputs: object,
    call: Call,
    fake: bool,
    units: Iterable[str] | None = None,
    keys: Keys | None = None, *,
    judge: Callable[[Any], Any] | None = None,
) -> RunTrace:  # fmt: skip
    """Run the model once and return what it showed; with the names of units, also what their calls cost.

    `judge`: makes the loss of the model's output, when it is asked what that depends on.
    """
    fakes = fakes_of(model) if fake else None
    meter = None if units is None else _meter(model, units, fakes)
    watcher = _Watcher(model, meter, keys)
    shown = keys is not None
    with _as_it_was(model, watcher.seen), watcher.hooked():
        around = nullcontext() if fakes is None else PartlyFake(fakes) if shown else RealConstants(fakes)
        with _silent(), opaque_code.opaque(), _keeping(meter), around as watcher.around:
            hide = lambda t: t if fakes is None or (shown and not t.is_floating_point()) else fakes.from_tensor(t)  # noqa: E731
            inputs = tree_map_only(torch.Tensor, hide, inputs)
            writes = watcher.writes = None if shown else Mutations(model, inputs, fakes)
            listening = LISTENER.set(writes)
            try:
                with watcher.operators, watcher:
                    output = call(model, inputs)
                    loss = None if judge is None else judge(output)
            finally:
                LISTENER.reset(listening)
        if watcher.flags is not None:
            watcher.seen.process_flags = watcher.flags.found
        if writes is not None:
            watcher.seen.counting = writes.buffers()
            watcher.seen.rewritten = writes.weights()
            watcher.seen.sampled, watcher.seen.unshared = map(writes.holding, (writes.sampled, writes.unshared))
            watcher.seen.followed = writes.outside
        if meter is not None:
            watcher.seen.metered = meter.finish(output, loss)
    return watcher.seen


@contextmanager
def _silent() -> Iterator[None]:
    """No warnings, which training will give anyway, and not the pages that fake tensors print for what is raised anyway."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def fakes_of(model: nn.Module) -> FakeTensorMode:
    """A mode for fake tensors: the one that the model itself was built in, if it was."""
    tensors = (*model.parameters(), *model.buffers())
    built: Any = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
    return built or FakeTensorMode(allow_non_fake_inputs=True)


def _meter(model: nn.Module, names: Iterable[str], fakes: FakeTensorMode | None) -> Meter:
    units = {id(model.get_submodule(name)): name for name in names}
    named = [(n, t) for n, t in (*model.named_parameters(), *(("", b) for b in model.buffers()))]
    if fakes is not None:  # autograd meets views of both
        named += [(n, fakes.from_tensor(t)) for n, t in named if not isinstance(t, FakeTensor)]
    return Meter(units, homes(model, units), named)


@contextmanager
def _keeping(meter: Meter | None) -> Iterator[None]:
    """Let autograd run, and tell the meter what it keeps; without a meter it stays off."""
    if meter is None:
        with torch.no_grad():
            yield
    else:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(meter.pack, meter.unpack):
            yield


@contextmanager
def _as_it_was(model: nn.Module, seen: RunTrace) -> Iterator[None]:
    """What a run inside changes on the model is put back: a cache filled on fake tensors must not stay. Buffers that were
    replaced are noted in `seen`."""
    modules, weights = list(opaque_code.plain(model)), [(p, p.data) for p in model.parameters()]
    before, names = ModuleState(module for _, module in modules), {name for name, _ in model.named_parameters()}
    buffers = [(f"{name}.{n}".lstrip("."), m, n, b) for name, m in modules for n, b in own_buffers(m).items()]
    all_buffers = (*(b for *_, b in buffers), *(b for _, b in opaque_code.buffers(model)))
    try:
        yield
    finally:
        made = [name for name, _ in model.named_parameters() if name not in names]
        seen.counting += [name for name, m, n, b in buffers if own_buffers(m).get(n) is not b]
        before.restore()
        for buffer in all_buffers:
            if buffer is not None and not buffer.is_leaf:  # written with what has a gradient
                buffer.detach_()
        for parameter, data in weights:
            if storage_key(parameter) != storage_key(data):
                parameter.data = data
        if made:
            raise PlaitError(_made_in_forward(made))


def _made_in_forward(names: list[str]) -> Problem:
    what = f"the model makes parameters in its forward pass: {', '.join(names[:3])}" + ", …" * (len(names) > 3)
    why = "the optimizer was given the parameters before the first forward pass: these are never trained, and no checkpoint has them"
    fix = ("make them in __init__; nn.LazyLinear and the other lazy modules take their sizes from the first batch",)
    return Problem("J052", what, why=why, where="Job(model=…)", fix=fix)


class _Watcher(TorchFunctionMode):
    """Follows which module is running and which function it called; its `operators` see what that function drew."""

    def __init__(self, model: nn.Module, meter: Meter | None, keys: Keys | None):
        super().__init__()
        self.seen, self.meter, self.keys = RunTrace(), meter, keys
        self.owner: list[tuple[str, str, nn.Module]] = [("", "#0", model)]
        self.calls: dict[str, int] = {}
        self.operators = _Operators(self)
        self.writes: Mutations | None = None
        self.around: object = None
        """The mode for fake tensors that the run is in."""
        self.flags = ProcessFlags(opaque_code.plain(model)) if keys is None else None  # a step of training asks for none

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Be told of every module that is entered and left."""
        handles: list[RemovableHandle] = []
        for name, module in opaque_code.plain(self.owner[0][2]):
            handles.append(module.register_forward_pre_hook(self._entering(name), prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leaving, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str):
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.meter is not None:
                self.meter.enter(name, module, (args, kwargs))
            self._look()
            self.calls[name] = self.calls.get(name, 0) + 1
            self.owner.append((name, f"{name}#{self.calls[name]}", module))

        return enter

    def _look(self) -> None:
        if self.flags is not None:
            self.flags.look(self.owner[-1][0], self.owner[-1][2])

    def _leaving(self, module: nn.Module, args: tuple[Any, ...], output: object) -> Any:
        self._look()
        self.owner.pop()
        output_instead = None
        if self.meter is not None:
            output_instead = self.meter.leave(module, output)
            ended = len(self.meter.metered.calls) - (self.meter.running is not None)
            if self.keys is not None and self.keys.notes and len(self.keys.after) < ended:
                self.keys.after.append((random.getstate(), np.random.get_state()))
        return output_instead

    def place(self) -> str:
        owner = self.owner[-1][1]
        self.calls[owner] = self.calls.get(owner, 0) + 1
        return f"{owner}#{self.calls[owner]}"

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in DROPOUTS:
            result = self._dropout(dropout_call(func, *args, **kwargs))
        elif func is opaque_code.whole:
            result = self._whole(func, args, kwargs)
        else:
            result = self._other(func, args, kwargs)
        if self.meter is not None:
            self.meter.function(func, args, kwargs, result)
        return result

    def _other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.operators.keyed = func in distributions.COMPOSITES
        if distributions.draws_in_packed(func, args):
            self.seen.packed.append(self.owner[-1][0] or type(self.owner[-1][2]).__name__)
        if getattr(func, "__name__", "") in READS and isinstance(self.around, RealConstants):
            args = (self.around.faked(args[0]), *args[1:])
        self.operators.per_sample = func in (torch.nn.functional.instance_norm, torch.instance_norm)
        try:
            return func(*args, **kwargs)
        finally:
            self.operators.keyed = self.operators.per_sample = False

    def _whole(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Nothing looks into it: what it draws cannot be keyed, what it computes is not counted."""
        name, _, module = self.owner[-1]
        before, metered = torch.get_rng_state(), self.meter.metered if self.meter is not None else None
        asked = metered is not None and metered.differentiates
        result = func(*args, **kwargs)
        if metered is not None:
            metered.differentiates = asked  # how torch finds its backward is its own affair
        if not torch.equal(before, torch.get_rng_state()):
            self.seen.unkeyed.append(name or type(module).__name__)
        self.seen.opaque.append((name, args[0]))
        return result

    def _dropout(self, call: DropoutCall) -> torch.Tensor:
        input = call.input
        if isinstance(input, WrapperTensor) and input.inside:
            return input.like(self._dropout(call.on(input.local)))
        if call.drops and input.is_nested:  # rows of any length: what a sample draws does not depend on the others
            self.seen.drawn[self.place()] = torch.Size([input.size(0)])
        elif call.drops:
            shape = mask_shape(call)
            self.seen.drawn[self.place()] = shape
            if torch.is_grad_enabled():  # a mask is multiplied with, and kept for backward
                mask = input.new_ones(shape)
                return input.mul_(mask) if call.inplace else input * mask
        return input


COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of torch's operators that communicate."""


class _Operators(OutsideWrites):
    def __init__(self, watcher: _Watcher):
        super().__init__()
        self.watcher, self.keyed, self.per_sample = watcher, False, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, watcher = kwargs or {}, self.watcher
        if func.namespace in COLLECTIVES and watcher.keys is None:  # with keys it is a rank's part that runs, which communicates
            raise one_device.communicates(f"the job's forward pass or loss communicates: {func}")
        name, _, module = watcher.owner[-1]
        sparse = func.overloadpacket.__name__ in _TABLES and argument_of(func, args, kwargs, "sparse")
        if sparse and argument_of(func, args, kwargs, "weight").requires_grad:
            raise sparse_gradients_error(name or type(module).__name__)
        touched = roles(func, args, kwargs)
        result = self.run(func, args, kwargs, touched)
        if watcher.meter is not None:
            watcher.meter.operator(func, args, kwargs, result)
        if watcher.writes is not None:
            watcher.writes.operator(name, touched, result, self.own)
        if is_seeded(func) and 0.0 not in [argument_of(func, args, kwargs, p) for p in ("dropout_p", "dropout")]:
            if self.keyed and distributions.rule_of(func) in distributions.REDRAWN:
                place, keys = watcher.place(), watcher.keys
                watcher.seen.drawn[place] = (result if isinstance(result, torch.Tensor) else result[0]).shape
                if keys is not None:
                    call, dim = distributions.OperatorCall(func, args, kwargs), keys.places.get(place, -1)
                    result = distributions.redraw(result, call, list(keys.where), place, dim)
            else:
                watcher.seen.unkeyed.append(name or type(module).__name__)
        elif func.overloadpacket.__name__ in _NORMS and _uses_batch(func, args, kwargs):
            if isinstance(module, BatchNormBase):
                watcher.seen.batch_norms.append(name)
            elif not self.per_sample:
                watcher.seen.batch_coupled.append(name or type(module).__name__)
        return result


def _uses_batch(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    training = argument_of(func, args, kwargs, "training")
    training = argument_of(func, args, kwargs, "train") if training is None else training
    return func.overloadpacket.__name__ == "_batch_norm_with_update" if training is None else bool(training)
