"""What a rank knows of the job's model before anything of it is cut: the sketch, and what the plan's strategies need to know of all of it."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from plait.checkpoint.fingerprint import structure
from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.plan import Plan
from plait.data import loading, sampling
from plait.data.device_copies import DeviceCopies
from plait.engine import batch_dependence, try_metrics
from plait.launch.place import Place
from plait.losses import transformers
from plait.model.make import BuiltModel, call, judged
from plait.model.mutations import OutsideWrites
from plait.model.sketch import Sketch, sketch
from plait.parallel import fp8, gradient_hooks, mutations, unmeasured
from plait.parallel.context import strategy as context
from plait.parallel.expert import find
from plait.parallel.expert import strategy as expert
from plait.parallel.fsdp import optimizer_check
from plait.parallel.order import shard_plan
from plait.parallel.pipeline.partition import StageLayout
from plait.parallel.precision import trained_format
from plait.parallel.rank_setup import RankSetup
from plait.parallel.tensor import choose
from plait.randomness.keyed import host_kept
from plait.tensors import opaque_code
from plait.tensors.float64 import proof_format
from plait.tensors.modules import device_of, loss_kept, state_kept
from plait.tensors.parameters import ParameterAttributes, ParameterHooks
from plait.tensors.torch_private import fake_failures, own_buffers


def setup_of(job: Job, plan: Plan, place: Place, device: torch.device, cast: torch.dtype | None, *, made: BuiltModel) -> RankSetup:
    """A rank that has a model, `made`, and knows nothing of it yet."""
    model, data = made.model, sampling.data_of(job)
    example = sampling.example(job, data)
    with host_kept():
        loading.check(job, data, example[0])
    own = dict(model.named_parameters())
    found = RankSetup(
        job, plan, place, device, cast, model, data, example,
        call=_call_as_trained(plan, cast, lambda: device_of(model, device)),
        inputs=DeviceCopies(device),
        attributes={n: ParameterAttributes.of(p) for n, p in own.items()},
        parameter_hooks={n: hooks for n, p in own.items() if (hooks := ParameterHooks.taken(p))},
        structure=structure(model),
        fp8_layers=fp8.layers_of(model, plan.tp) if plan.precision == "fp8" else (),
        shares=made.shares,
    )  # fmt: skip
    transformers.adapt(model)
    return found


def whole_sketch(setup: RankSetup, made: BuiltModel) -> Sketch:
    """What `analyse` finds; and the job's metrics are tried, and whether samples meet in eval mode."""
    found = analyse(setup, made)
    with state_kept(made.model.modules()), OutsideWrites():
        try_metrics.metrics(setup, found, runnable(made))
        return replace(found, coupled_in_eval=batch_dependence.reason(setup, runnable(made)))


def runnable(made: BuiltModel) -> BuiltModel:
    """The model as runs with its numbers take it, where it is in the host's memory still."""
    return BuiltModel(made.model, made.model) if made.on_host else made


def analyse(setup: RankSetup, made: BuiltModel, seen: Sketch | None = None) -> Sketch:
    """The sketch of the job's model (`seen`, when there is one), with what the plan's strategies need to know of all of it."""
    with opaque_code.opaque(), loss_kept(setup.job.loss, made.model):
        return _analyse(setup, made, seen)


def _analyse(setup: RankSetup, made: BuiltModel, seen: Sketch | None) -> Sketch:
    job, plan = setup.job, setup.plan
    found = _sketched(setup, made) if seen is None else seen
    if problem := opaque_code.refused(plan, found.scripted, found.counting) or unmeasured.refused(plan, found):
        raise PlaitError(problem)
    found = with_open_head(found, job)
    if expert.wanted(plan):
        with OutsideWrites():
            experts = find.find(made.model, lambda n: setup.samples(n)[0], setup.call)
            found = replace(found, mixtures=expert.found(*experts, plan))
    if plan.tp > 1:
        handed_on = StageLayout.of(plan, found, job.stages).handed_on if plan.pp > 1 else frozenset()
        wide = setup.cast is torch.float64
        found = choose.sliced(found, runnable(made), setup.samples, setup.call, job, plan, wide=wide, handed_on=handed_on)
    mutations.check(plan, found)
    gradient_hooks.check(plan, found, setup.parameter_hooks)
    found = context.stretched(setup, found) if context.wanted(plan) else found
    needs = optimizer_check.needs(job, shard_plan(job, plan, found), found)
    return replace(found, whole_update=needs.whole, single_steps=needs.singly)


def _sketched(setup: RankSetup, made: BuiltModel) -> Sketch:
    """The sketch of a model as it is on the device, which chooses what operators do inside. One that runs with its numbers only
    has to go there as a whole."""
    at = setup.device  # of `made.fake`, where the model itself may be in the host's memory
    run = _call_as_trained(setup.plan, setup.cast, lambda: at)
    judge = lambda n: partial(_judged_as_trained, setup.cast, judged(setup.job, setup.samples(n, at)[1]))  # noqa: E731
    of = lambda model: sketch(model, lambda n: setup.samples(n, at)[0], run, setup.job.units, judge)  # noqa: E731
    if not made.on_host:
        return of(made.fake)
    with suppress(*fake_failures()):
        found = of(made.fake)
        if not found.by_values:
            return found
    to_device(made.model, at)
    return of(made.model)


def to_device(model: nn.Module, device: torch.device) -> None:
    """What is left of a model that was cut in the host's memory goes to the device."""
    for parameter in model.parameters():
        if parameter.device != device and not parameter.is_meta:
            parameter.data = parameter.detach().to(device)
    for module in model.modules():
        buffers = own_buffers(module)
        buffers.update({name: b if b is None or b.is_meta else b.to(device) for name, b in buffers.items()})


def _judged_as_trained(cast: torch.dtype | None, judge: Callable[[Any], Any], outputs: object) -> Any:
    """The loss of outputs in the number format of a proof, or in the job's own."""
    with proof_format(cast):
        return judge(outputs)


def _call_as_trained(plan: Plan, cast: torch.dtype | None, at: Callable[[], torch.device]) -> Callable[[nn.Module, Any], Any]:
    """A call in the number format of training: stages wait for outputs in the format that they will have. `at`: where the model runs,
    which is not asked of its own tensors, since to ask a tensor without numbers is an operator to those who watch."""

    def run(model: nn.Module, inputs: object) -> Any:
        with trained_format(plan, cast, at().type, model):
            return call(model, inputs)

    return call if plan.pp == 1 and cast is None else run


def with_open_head(sketched: Sketch, job: Job) -> Sketch:
    """The sketch of a job whose loss multiplies by the weight of `head` itself: that unit is used outside its call."""
    head = getattr(job.loss, "head", None)
    if head is None:
        return sketched
    units = (replace(u, closed=u.closed and not f"{head}.".startswith(f"{u.name}.")) for u in sketched.units)
    return replace(sketched, units=tuple(units))
