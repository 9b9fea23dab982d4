"""Record one run of a model: random draws, batch statistics and buffer writes of each module.

The run is on fake tensors, which have shapes and no values, or on real ones. It restores the model afterwards.
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
from plait.model.build_model import make_sparse_error
from plait.model.deferred_init import find_touched
from plait.model.meter import Meter, MeteredRun, iter_homes
from plait.model.mutations import MUTATION_RECORDER, MutationRecorder, ProcessFlags, RestoredWrites
from plait.model.operations import get_argument
from plait.randomness import distributions
from plait.randomness.distributions import DROPOUTS, DropoutCall, find_mask_shape, parse_dropout_call
from plait.tensors import opaque_code
from plait.tensors.fake import PartlyFakeMode, RealConstantsMode
from plait.tensors.module_state import ModuleState
from plait.tensors.opaque_code import READ_FUNCTIONS
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

RunModel = Callable[[nn.Module, Any], Any]
_NORM_OPERATORS = ("native_batch_norm", "_batch_norm_with_update", "_native_batch_norm_legit", "cudnn_batch_norm")
_EMBEDDING_OPERATORS = ("embedding", "_embedding_bag")
"""Names of operators whose weight has a sparse gradient if their argument `sparse` is true."""


@dataclass
class RunTrace:
    """The record of a run: shapes of random draws by place, and names of modules and buffers."""

    drawn: dict[str, torch.Size] = field(default_factory=dict)
    unkeyed: list[str] = field(default_factory=list)
    packed_rnns: list[str] = field(default_factory=list)
    """Recurrent modules with dropout between their layers in a packed sequence, whose rows mix samples."""
    batch_norms: list[str] = field(default_factory=list)
    batch_coupled: list[str] = field(default_factory=list)
    changed_buffers: list[str] = field(default_factory=list)
    rewritten: dict[str, set[str]] = field(default_factory=dict)
    outside_writes: dict[str, set[str]] = field(default_factory=dict)
    """Weights from which it writes tensors outside of the model, and the modules that write them."""
    from_samples: list[str] = field(default_factory=list)
    rank_dependent: list[str] = field(default_factory=list)
    process_flags: list[str] = field(default_factory=list)
    """Attributes that are True because of a per-process object that no checkpoint contains (`ProcessFlags`)."""
    host_random: bool = False
    opaque: list[tuple[str, str]] = field(default_factory=list)
    """Higher-order operators: (module that calls it, operator)."""
    metered: MeteredRun = field(default_factory=MeteredRun)


@dataclass
class RandomKeys:
    """Random keys for a run that takes the same path as training. Its random numbers are those of `position`: (seed, step, first sample, samples).

    Integers and small tensors are real, so that the model can read them.
    """

    position: tuple[int, int, int, int]
    places: dict[str, int | None]
    records_host: bool
    """Record the states of Python's and numpy's generators after each unit call in `host_states`."""
    host_states: list[Any] = field(default_factory=list)


def trace_run(
    model: nn.Module,
    inputs: object,
    call: RunModel,
    fake: bool,
    units: Iterable[str] | None = None,
    keys: RandomKeys | None = None, *,
    compute_loss: Callable[[Any], Any] | None = None,
) -> RunTrace:  # fmt: skip
    """Run the model once and return its trace. With the names of units, it includes the costs of their calls.

    `compute_loss`: returns the loss of the model's output, to find the values that it uses.
    """
    fakes = get_fake_mode(model) if fake else None
    meter = None if units is None else _make_meter(model, units, fakes)
    watcher = _Watcher(model, meter, keys)
    shown = keys is not None
    with _restore_model(model, watcher.trace), watcher.hook_modules():
        around = nullcontext() if fakes is None else PartlyFakeMode(fakes) if shown else RealConstantsMode(fakes)
        with _silence(), opaque_code.hide_higher_order(), _record_saved(meter), around as watcher.fake_mode:
            hide = lambda t: t if fakes is None or (shown and not t.is_floating_point()) else fakes.from_tensor(t)  # noqa: E731
            inputs = tree_map_only(torch.Tensor, hide, inputs)
            writes = watcher.writes = None if shown else MutationRecorder(model, inputs, fakes)
            listening = MUTATION_RECORDER.set(writes)
            try:
                with watcher.operators, watcher:
                    output = call(model, inputs)
                    loss = None if compute_loss is None else compute_loss(output)
            finally:
                MUTATION_RECORDER.reset(listening)
        if watcher.flags is not None:
            watcher.trace.process_flags = watcher.flags.found
        if writes is not None:
            watcher.trace.changed_buffers = writes.list_buffers()
            watcher.trace.rewritten = writes.find_written_weights()
            watcher.trace.from_samples, watcher.trace.rank_dependent = map(writes.list_marked, (writes.from_samples, writes.rank_dependent))
            watcher.trace.outside_writes = writes.outside_writers
        if meter is not None:
            watcher.trace.metered = meter.finish(output, loss)
    return watcher.trace


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress warnings, which training emits anyway, and the long messages of fake tensors before they raise."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def get_fake_mode(model: nn.Module) -> FakeTensorMode:
    """Return the fake tensor mode in which the model was built, or a new one."""
    tensors = (*model.parameters(), *model.buffers())
    built: Any = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
    return built or FakeTensorMode(allow_non_fake_inputs=True)


def _make_meter(model: nn.Module, names: Iterable[str], fakes: FakeTensorMode | None) -> Meter:
    units = {id(model.get_submodule(name)): name for name in names}
    named = [(n, t) for n, t in (*model.named_parameters(), *(("", b) for b in model.buffers()))]
    if fakes is not None:  # autograd gets views of both
        named += [(n, fakes.from_tensor(t)) for n, t in named if not isinstance(t, FakeTensor)]
    return Meter(units, iter_homes(model, units), named)


@contextmanager
def _record_saved(meter: Meter | None) -> Iterator[None]:
    """Enable autograd and report saved tensors to the meter. Without a meter, autograd is off."""
    if meter is None:
        with torch.no_grad():
            yield
    else:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(meter.pack, meter.unpack):
            yield


@contextmanager
def _restore_model(model: nn.Module, seen: RunTrace) -> Iterator[None]:
    """Undo all changes of the run to the model, such as a cache of fake tensors. Replaced buffers are recorded in `seen`."""
    modules, weights = list(opaque_code.iter_unscripted(model)), [(p, p.data) for p in model.parameters()]
    before, names = ModuleState(module for _, module in modules), {name for name, _ in model.named_parameters()}
    buffers = [(f"{name}.{n}".lstrip("."), m, n, b) for name, m in modules for n, b in own_buffers(m).items()]
    all_buffers = (*(b for *_, b in buffers), *(b for _, b in opaque_code.list_scripted_buffers(model)))
    try:
        yield
    finally:
        made = [name for name, _ in model.named_parameters() if name not in names]
        seen.changed_buffers += [name for name, m, n, b in buffers if own_buffers(m).get(n) is not b]
        before.restore()
        for buffer in all_buffers:
            if buffer is not None and not buffer.is_leaf:  # written with values that have a gradient
                buffer.detach_()
        for parameter, data in weights:
            if storage_key(parameter) != storage_key(data):
                parameter.data = data
        if made:
            raise PlaitError(_refuse_new_parameters(made))


def _refuse_new_parameters(names: list[str]) -> Problem:
    what = f"the model creates parameters in its forward pass: {', '.join(names[:3])}" + ", …" * (len(names) > 3)
    why = "the optimizer was created before the first forward pass, so these parameters are never trained or saved"
    fix = ("create them in __init__, or use lazy modules such as nn.LazyLinear, which take their sizes from the first batch",)
    return Problem("J052", what, why=why, where="Job(model=…)", fix=fix)


class _Watcher(TorchFunctionMode):
    """Tracks the running module and the function it called. Its `operators` see the random draws of that function."""

    def __init__(self, model: nn.Module, meter: Meter | None, keys: RandomKeys | None):
        super().__init__()
        self.trace, self.meter, self.keys = RunTrace(), meter, keys
        self.owner: list[tuple[str, str, nn.Module]] = [("", "#0", model)]
        self.calls: dict[str, int] = {}
        self.operators = _OperatorMode(self)
        self.writes: MutationRecorder | None = None
        self.fake_mode: object = None
        """The fake tensor mode of the run."""
        self.flags = ProcessFlags(opaque_code.iter_unscripted(model)) if keys is None else None  # not needed in a training step

    @contextmanager
    def hook_modules(self) -> Iterator[None]:
        """Hook the entry and exit of every module."""
        handles: list[RemovableHandle] = []
        for name, module in opaque_code.iter_unscripted(self.owner[0][2]):
            handles.append(module.register_forward_pre_hook(self._make_enter_hook(name), prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave_module, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _make_enter_hook(self, name: str):
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.meter is not None:
                self.meter.enter(name, module, (args, kwargs))
            self._check_flags()
            self.calls[name] = self.calls.get(name, 0) + 1
            self.owner.append((name, f"{name}#{self.calls[name]}", module))

        return enter

    def _check_flags(self) -> None:
        if self.flags is not None:
            self.flags.check_module(self.owner[-1][0], self.owner[-1][2])

    def _leave_module(self, module: nn.Module, args: tuple[Any, ...], output: object) -> Any:
        self._check_flags()
        self.owner.pop()
        output_instead = None
        if self.meter is not None:
            output_instead = self.meter.leave(module, output)
            ended = len(self.meter.metered.calls) - (self.meter.running is not None)
            if self.keys is not None and self.keys.records_host and len(self.keys.host_states) < ended:
                self.keys.host_states.append((random.getstate(), np.random.get_state()))
        return output_instead

    def make_place(self) -> str:
        owner = self.owner[-1][1]
        self.calls[owner] = self.calls.get(owner, 0) + 1
        return f"{owner}#{self.calls[owner]}"

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in DROPOUTS:
            result = self._record_dropout(parse_dropout_call(func, *args, **kwargs))
        elif func is opaque_code.call_higher_order:
            result = self._run_opaque(func, args, kwargs)
        else:
            result = self._run_other(func, args, kwargs)
        if self.meter is not None:
            self.meter.record_function(func, args, kwargs, result)
        return result

    def _run_other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.operators.keyed = func in distributions.COMPOSITES
        if distributions.has_packed_dropout(func, args):
            self.trace.packed_rnns.append(self.owner[-1][0] or type(self.owner[-1][2]).__name__)
        if getattr(func, "__name__", "") in READ_FUNCTIONS and isinstance(self.fake_mode, RealConstantsMode):
            args = (self.fake_mode.to_fake(args[0]), *args[1:])
        self.operators.per_sample = func in (torch.nn.functional.instance_norm, torch.instance_norm)
        try:
            return func(*args, **kwargs)
        finally:
            self.operators.keyed = self.operators.per_sample = False

    def _run_opaque(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an opaque function: its random draws cannot be keyed, and its operations are not counted."""
        name, _, module = self.owner[-1]
        before, metered = torch.get_rng_state(), self.meter.metered if self.meter is not None else None
        asked = metered is not None and metered.differentiates
        result = func(*args, **kwargs)
        if metered is not None:
            metered.differentiates = asked  # derivatives that torch itself computes do not count
        if not torch.equal(before, torch.get_rng_state()):
            self.trace.unkeyed.append(name or type(module).__name__)
        self.trace.opaque.append((name, args[0]))
        return result

    def _record_dropout(self, call: DropoutCall) -> torch.Tensor:
        input = call.input
        if isinstance(input, WrapperTensor) and input.wraps_region:
            return input.with_local(self._record_dropout(call.with_input(input.local)))
        if call.drops and input.is_nested:  # rows of any length: the draws of a sample do not depend on other samples
            self.trace.drawn[self.make_place()] = torch.Size([input.size(0)])
        elif call.drops:
            shape = find_mask_shape(call)
            self.trace.drawn[self.make_place()] = shape
            if torch.is_grad_enabled():  # a mask is multiplied with, and kept for backward
                mask = input.new_ones(shape)
                return input.mul_(mask) if call.inplace else input * mask
        return input


COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of torch's communication operators."""


class _OperatorMode(RestoredWrites):
    def __init__(self, watcher: _Watcher):
        super().__init__()
        self.watcher, self.keyed, self.per_sample = watcher, False, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, watcher = kwargs or {}, self.watcher
        if func.namespace in COLLECTIVE_NAMESPACES and watcher.keys is None:  # with keys, a rank's part runs, which may communicate
            raise one_device.communication_error(f"the job's forward pass or loss communicates: {func}")
        name, _, module = watcher.owner[-1]
        sparse = func.overloadpacket.__name__ in _EMBEDDING_OPERATORS and get_argument(func, args, kwargs, "sparse")
        if sparse and get_argument(func, args, kwargs, "weight").requires_grad:
            raise make_sparse_error(name or type(module).__name__)
        touched = find_touched(func, args, kwargs)
        result = self.run(func, args, kwargs, touched)
        if watcher.meter is not None:
            watcher.meter.record_operator(func, args, kwargs, result)
        if watcher.writes is not None:
            watcher.writes.record_operator(name, touched, result, self.own_storages)
        if is_seeded(func) and 0.0 not in [get_argument(func, args, kwargs, p) for p in ("dropout_p", "dropout")]:
            if self.keyed and distributions.find_rule_name(func) in distributions.REDRAWN:
                place, keys = watcher.make_place(), watcher.keys
                watcher.trace.drawn[place] = (result if isinstance(result, torch.Tensor) else result[0]).shape
                if keys is not None:
                    call, dim = distributions.OperatorCall(func, args, kwargs), keys.places.get(place, -1)
                    result = distributions.redraw(result, call, list(keys.position), place, dim)
            else:
                watcher.trace.unkeyed.append(name or type(module).__name__)
        elif func.overloadpacket.__name__ in _NORM_OPERATORS and _uses_batch(func, args, kwargs):
            if isinstance(module, BatchNormBase):
                watcher.trace.batch_norms.append(name)
            elif not self.per_sample:
                watcher.trace.batch_coupled.append(name or type(module).__name__)
        return result


def _uses_batch(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    training = get_argument(func, args, kwargs, "training")
    training = get_argument(func, args, kwargs, "train") if training is None else training
    return func.overloadpacket.__name__ == "_batch_norm_with_update" if training is None else bool(training)
