"""What a rank knows of the job's model before anything of it is cut: the sketch, and what the plan's strategies need to know of all of it.

[Note: Samples that meet in eval mode]
Whether a model in eval mode computes for a sample something else when other samples come with it.

A batch norm without running statistics, a softmax over the samples, or a mean over them does that. Then an evaluation depends on how
many samples come at once, and so on the plan. It is found by a run on three samples: the third is changed, and what is returned for
the first must stay. Both runs have the same shapes, so a model whose samples do not meet rounds alike in both.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint.fingerprint import structure
from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.plan import Plan
from plait.data import batch as data
from plait.data import loading, sampling
from plait.data.loading import DeviceCopies
from plait.engine.evaluate import WHERE, try_metrics, unchanged
from plait.launch.place import Place
from plait.losses.global_batch import adapt_balance_losses
from plait.model.make import BuiltModel, call, judged
from plait.model.mutations import OutsideWrites
from plait.model.sketch import Sketch, sketch
from plait.parallel import fp8, gradient_hooks, mutations
from plait.parallel.context import strategy as context
from plait.parallel.expert import find
from plait.parallel.expert import strategy as expert
from plait.parallel.fsdp import optimizer_check
from plait.parallel.order import shard_plan
from plait.parallel.pipeline.partition import StageLayout
from plait.parallel.precision import forward_format, trained_format
from plait.parallel.rank_setup import RankSetup
from plait.parallel.tensor import choose
from plait.randomness.keyed import host_kept, seed_host
from plait.tensors import opaque_code
from plait.tensors.fake import FAKE_FAILURES
from plait.tensors.float64 import proof_format
from plait.tensors.modules import device_of, loss_kept, state_kept
from plait.tensors.parameters import ParameterAttributes, ParameterHooks
from plait.tensors.torch_private import BatchNormBase, own_buffers, tree_leaves, tree_map_only

ROUNDINGS, MOST = 1000, 0.05
"""A difference counts from this many roundings of the largest value, or from this share of it."""
LARGEST = 256 << 20
"""Bytes of a model that is run. Of larger ones, layers tell that are known to use the batch."""


def coupling_in_eval(setup: RankSetup, made: BuiltModel) -> str:
    """What of the model uses the batch in eval mode: a phrase, or ""."""
    plan, evaluate, model = setup.plan, setup.job.evaluate, made.model
    if evaluate is None or plan.shares * plan.microbatches * plan.replica_groups == 1:
        return ""
    for name, module in model.named_modules():
        if isinstance(module, BatchNormBase) and module.running_mean is None:
            return f"the batch norm {name} has no running statistics"
    held = [*model.parameters(), *model.buffers()]
    if any(t.is_meta for t in held) or made.fake is not model or sum(t.nbytes for t in held) > LARGEST:
        return ""
    try:
        with host_kept(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seed_host(setup.job.seed, "evaluate", 0)
            pair = data.example(evaluate.data, data.opened(evaluate.data, WHERE), WHERE)
            pairs = [setup.moved(data.first_samples(pair, n)) for n in (2, 3)]
            with forward_format(plan, setup.cast, setup.at.type):
                found = _depends(partial(_run, setup, made), pairs, evaluate.metrics)
    except Exception:  # it does not run so, and an evaluation will say why
        return ""
    return "the output for a sample changes with the other samples of its batch" if found else ""


def _run(setup: RankSetup, made: BuiltModel, inputs: object) -> Any:
    """The model's outputs in eval mode, with the same random numbers each time."""
    seed_host(setup.job.seed, "evaluate", 0)
    with unchanged(made.model):
        return setup.call(made.model, inputs)


def _depends(run: Callable[[object], Any], pairs: list[Any], metrics: Callable[[Any, Any], Any]) -> bool:
    """Whether what is returned for the first of three samples depends on the third."""
    (fewer, _), (three, targets) = pairs
    if not _per_sample(fewer, three):
        return False  # it is not known what of the inputs belongs to a sample
    inputs, changed = (tree_map_only(Tensor, partial(_unlike, last=last), three) for last in (False, True))
    few, outputs, again, other = run(fewer), run(inputs), run(inputs), run(changed)
    rows = _first_rows(few, outputs, other)
    if not rows or any(_first_rows(few, outputs, again)):
        return False  # it returns something else each time
    if all(rows) or not any(rows):
        return all(rows)
    values = [metrics(each, targets) for each in (outputs, other)]  # some of what is returned is of all samples by its nature
    return any(_differ(values[0][n][0], values[1][n][0]) for n in values[0] if torch.as_tensor(values[0][n]).dim())


def _per_sample(fewer: object, more: object) -> bool:
    """Whether all tensors have a row for each of two, and of three samples."""
    pairs = list(zip(*([t for t in tree_leaves(tree) if isinstance(t, Tensor)] for tree in (fewer, more)), strict=True))
    return bool(pairs) and all(a.dim() and a.shape[0] == 2 and b.shape == (3, *a.shape[1:]) for a, b in pairs)


def _unlike(t: Tensor, last: bool) -> Tensor:
    """Of one sample three times: three samples. `last`: with another third one."""
    other = t.clone()
    if t.is_floating_point() or t.is_complex():
        other[1], other[2] = t[1] * 0.75 - 0.125, t[2] * -0.5 + 0.5 if last else t[2] * 1.5 + 0.25
    elif t.dtype is not torch.bool and t.dim() > 1:
        other[1], other[2] = t[1].roll(1, -1), t[2].flip(-1) if last else t[2]
    return other


def _first_rows(few: object, outputs: object, other: object) -> list[bool]:
    """Of each output that has a row per sample: whether the first row differs."""
    trees = [[t for t in tree_leaves(tree) if isinstance(t, Tensor)] for tree in (few, outputs, other)]
    rows = [t for t in zip(*trees, strict=True) if t[0].dim() and t[0].shape[0] == 2 and t[1].shape[0] == 3]
    return [_differ(a[0], b[0]) for _, a, b in rows if a.is_floating_point()]


def _differ(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or not a.numel():
        return False
    wide = a.double()
    most = min(ROUNDINGS * torch.finfo(a.dtype).eps, MOST) if a.is_floating_point() else 0.0
    largest = float(wide.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return not torch.allclose(wide, b.double(), 0.0, most * largest, equal_nan=True)


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
    adapt_balance_losses(model)
    return found


def whole_sketch(setup: RankSetup, made: BuiltModel) -> Sketch:
    """What `analyse` finds; and the job's metrics are tried, and whether samples meet in eval mode."""
    found = analyse(setup, made)
    with state_kept(made.model.modules()), OutsideWrites():
        try_metrics(setup, found, runnable(made))
        return replace(found, coupled_in_eval=coupling_in_eval(setup, runnable(made)))


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
    if problem := opaque_code.refused(plan, found.scripted, found.counting) or mutations.refused_unmeasured(plan, found):
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
    with suppress(*FAKE_FAILURES):
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
