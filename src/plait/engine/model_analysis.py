"""Analyze the job's model before it is sharded: make the sketch, and collect the facts that the plan's strategies need about the full
model.

[Note: Samples that meet in eval mode]
Checks whether the output for one sample in eval mode depends on the other samples of its batch.

A batch norm without running statistics, a softmax over samples, or a mean over samples causes that. The metrics of an evaluation then
depend on its batch size, and so on the plan. The check runs three samples twice and changes the third in between: the output for the
first must stay the same. Both runs have the same shapes, so rounding is the same in both if samples are independent.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint.fingerprint import describe_modules
from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.plan import Plan
from plait.data import batch as data
from plait.data import loading, sampling
from plait.data.loading import DevicePrefetcher
from plait.engine.evaluate import DATA_ARGUMENT, restore_after_eval, try_metrics
from plait.launch.place import Place
from plait.losses.global_batch import adapt_balance_losses
from plait.model.build_model import BuiltModel, make_loss, run_model
from plait.model.mutations import RestoredWrites
from plait.model.sketch import Sketch, sketch_model
from plait.parallel import fp8, gradient_hooks, mutations
from plait.parallel.apply_order import make_shard_plan
from plait.parallel.context import strategy as context
from plait.parallel.expert import mixture_finder
from plait.parallel.expert import strategy as expert
from plait.parallel.fsdp import optimizer_check
from plait.parallel.pipeline.partition import StageLayout
from plait.parallel.precision import make_forward_context, make_trace_context
from plait.parallel.rank_setup import RankSetup
from plait.parallel.tensor import choose_slices
from plait.randomness.keyed import preserve_host_state, seed_host
from plait.tensors import opaque_code
from plait.tensors.fake import FAKE_FAILURES
from plait.tensors.float64 import use_proof_dtype
from plait.tensors.module_state import find_device, restore_loss_state, restore_module_state
from plait.tensors.parameters import ParameterAttributes, ParameterHooks
from plait.tensors.torch_private import BatchNormBase, own_buffers, tree_leaves, tree_map_only

MAX_ROUNDINGS, MAX_RELATIVE_DIFF = 1000, 0.05
"""A difference counts above this many roundings of the largest value, or above this fraction of it, whichever is smaller."""
MAX_RUN_BYTES = 256 << 20
"""Bytes of the largest model that is run. In larger models only known layers are checked."""


def find_eval_coupling(setup: RankSetup, made: BuiltModel) -> str:
    """Describe the part of the model that uses batch statistics in eval mode; "" if there is none."""
    plan, evaluate, model = setup.plan, setup.job.evaluate, made.model
    if evaluate is None or plan.shares * plan.microbatches * plan.replica_groups == 1:
        return ""
    for name, module in model.named_modules():
        if isinstance(module, BatchNormBase) and module.running_mean is None:
            return f"the batch norm {name} has no running statistics"
    held = [*model.parameters(), *model.buffers()]
    if any(t.is_meta for t in held) or made.fake is not model or sum(t.nbytes for t in held) > MAX_RUN_BYTES:
        return ""
    try:
        with preserve_host_state(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seed_host(setup.job.seed, "evaluate", 0)
            pair = data.open_first_sample(evaluate.data, data.open_data(evaluate.data, DATA_ARGUMENT), DATA_ARGUMENT)
            pairs = [setup.move_tree(data.make_sketch_batch(pair, n)) for n in (2, 3)]
            with make_forward_context(plan, setup.cast, setup.model_device.type):
                found = _depends_on_others(partial(_run_in_eval, setup, made), pairs, evaluate.metrics)
    except Exception:  # the model does not run here; the first evaluation reports why
        return ""
    return "the output for a sample changes with the other samples of its batch" if found else ""


def _run_in_eval(setup: RankSetup, made: BuiltModel, inputs: object) -> Any:
    """Run the model in eval mode with the same random seed each time, and return its outputs."""
    seed_host(setup.job.seed, "evaluate", 0)
    with restore_after_eval(made.model):
        return setup.call(made.model, inputs)


def _depends_on_others(run: Callable[[object], Any], pairs: list[Any], metrics: Callable[[Any, Any], Any]) -> bool:
    """Return whether the output for the first of three samples depends on the third."""
    (fewer, _), (three, targets) = pairs
    if not _has_sample_rows(fewer, three):
        return False  # the inputs have no clear rows per sample
    inputs, changed = (tree_map_only(Tensor, partial(_vary_samples, last=last), three) for last in (False, True))
    few, outputs, again, other = run(fewer), run(inputs), run(inputs), run(changed)
    rows = _compare_first_rows(few, outputs, other)
    if not rows or any(_compare_first_rows(few, outputs, again)):
        return False  # the model is not deterministic
    if all(rows) or not any(rows):
        return all(rows)
    values = [metrics(each, targets) for each in (outputs, other)]  # some outputs cover all samples by design
    return any(_differ(values[0][n][0], values[1][n][0]) for n in values[0] if torch.as_tensor(values[0][n]).dim())


def _has_sample_rows(fewer: object, more: object) -> bool:
    """Return whether all tensors have one row per sample, in a batch of two and in a batch of three."""
    pairs = list(zip(*([t for t in tree_leaves(tree) if isinstance(t, Tensor)] for tree in (fewer, more)), strict=True))
    return bool(pairs) and all(a.dim() and a.shape[0] == 2 and b.shape == (3, *a.shape[1:]) for a, b in pairs)


def _vary_samples(t: Tensor, last: bool) -> Tensor:
    """Change the second and third of three equal samples. `last`: change the third differently."""
    other = t.clone()
    if t.is_floating_point() or t.is_complex():
        other[1], other[2] = t[1] * 0.75 - 0.125, t[2] * -0.5 + 0.5 if last else t[2] * 1.5 + 0.25
    elif t.dtype is not torch.bool and t.dim() > 1:
        other[1], other[2] = t[1].roll(1, -1), t[2].flip(-1) if last else t[2]
    return other


def _compare_first_rows(few: object, outputs: object, other: object) -> list[bool]:
    """For each output with one row per sample: whether its first row differs."""
    trees = [[t for t in tree_leaves(tree) if isinstance(t, Tensor)] for tree in (few, outputs, other)]
    rows = [t for t in zip(*trees, strict=True) if t[0].dim() and t[0].shape[0] == 2 and t[1].shape[0] == 3]
    return [_differ(a[0], b[0]) for _, a, b in rows if a.is_floating_point()]


def _differ(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or not a.numel():
        return False
    wide = a.double()
    most = min(MAX_ROUNDINGS * torch.finfo(a.dtype).eps, MAX_RELATIVE_DIFF) if a.is_floating_point() else 0.0
    largest = float(wide.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return not torch.allclose(wide, b.double(), 0.0, most * largest, equal_nan=True)


def make_rank_setup(job: Job, plan: Plan, place: Place, device: torch.device, cast: torch.dtype | None, *, made: BuiltModel) -> RankSetup:
    """Make the setup of a rank from its model `made`, before any analysis."""
    model, data = made.model, sampling.open_job_data(job)
    example = sampling.open_sketch_data(job, data)
    with preserve_host_state():
        loading.check_not_batches(job, data, example[0])
    own = dict(model.named_parameters())
    found = RankSetup(
        job, plan, place, device, cast, model, data, example,
        call=_make_training_call(plan, cast, lambda: find_device(model, device)),
        device_copies=DevicePrefetcher(device),
        attributes={n: ParameterAttributes.capture(p) for n, p in own.items()},
        parameter_hooks={n: hooks for n, p in own.items() if (hooks := ParameterHooks.detach_from(p))},
        structure=describe_modules(model),
        fp8_layers=fp8.require_layers(model, plan.tp) if plan.precision == "fp8" else (),
        meta_shards=made.shards,
    )  # fmt: skip
    adapt_balance_losses(model)
    return found


def make_global_sketch(setup: RankSetup, made: BuiltModel) -> Sketch:
    """Analyze the model, try the job's metrics, and check whether samples depend on each other in eval mode."""
    found = analyze_model(setup, made)
    with restore_module_state(made.model.modules()), RestoredWrites():
        try_metrics(setup, found, get_runnable(made))
        return replace(found, coupled_in_eval=find_eval_coupling(setup, get_runnable(made)))


def get_runnable(made: BuiltModel) -> BuiltModel:
    """Return the model for runs on real data; it may still be in host memory."""
    return BuiltModel(made.model, made.model) if made.on_host else made


def analyze_model(setup: RankSetup, made: BuiltModel, existing_sketch: Sketch | None = None) -> Sketch:
    """Make the sketch of the job's model with everything that the plan's strategies need. `existing_sketch`: extend this one instead."""
    with opaque_code.hide_higher_order(), restore_loss_state(setup.job.loss, made.model):
        return _analyze_model(setup, made, existing_sketch)


def _analyze_model(setup: RankSetup, made: BuiltModel, existing_sketch: Sketch | None) -> Sketch:
    job, plan = setup.job, setup.plan
    found = _sketch_on_device(setup, made) if existing_sketch is None else existing_sketch
    if problem := opaque_code.find_scripted_problem(plan, found.scripted, found.changed_buffers) or mutations.find_unmeasured(plan, found):
        raise PlaitError(problem)
    found = mark_open_head(found, job)
    if expert.is_enabled(plan):
        with RestoredWrites():
            experts = mixture_finder.find_mixtures(made.model, lambda n: setup.make_samples(n)[0], setup.call)
            found = replace(found, moe_layers=expert.select_mixtures(*experts, plan))
    if plan.tp > 1:
        handed_on = StageLayout.from_plan(plan, found, job.stages).crossing_units if plan.pp > 1 else frozenset()
        wide = setup.cast is torch.float64
        found = choose_slices.add_slices(found, get_runnable(made), setup.make_samples, setup.call, job, plan, wide=wide, handed_on=handed_on)
    mutations.check_writes(plan, found)
    gradient_hooks.check_hooks(plan, found, setup.parameter_hooks)
    found = context.plan_sequences(setup, found) if context.is_enabled(plan) else found
    needs = optimizer_check.check_optimizer(job, make_shard_plan(job, plan, found), found)
    return replace(found, needs_whole_tensors=needs.full_tensors, steps_per_tensor=needs.singly)


def _sketch_on_device(setup: RankSetup, made: BuiltModel) -> Sketch:
    """Sketch the model for its device, since the device selects the implementations of operators.

    A model in host memory that needs real data to run is moved to the device in full.
    """
    at = setup.device  # of `made.fake`; the model itself may be in host memory
    run = _make_training_call(setup.plan, setup.cast, lambda: at)
    judge = lambda n: partial(_compute_loss, setup.cast, make_loss(setup.job, setup.make_samples(n, at)[1]))  # noqa: E731
    of = lambda model: sketch_model(model, lambda n: setup.make_samples(n, at)[0], run, setup.job.units, judge)  # noqa: E731
    if not made.on_host:
        return of(made.fake)
    with suppress(*FAKE_FAILURES):
        found = of(made.fake)
        if not found.needs_real_tensors:
            return found
    move_to_device(made.model, at)
    return of(made.model)


def move_to_device(model: nn.Module, device: torch.device) -> None:
    """Move the remaining tensors of a model that was sharded in host memory to the device."""
    for parameter in model.parameters():
        if parameter.device != device and not parameter.is_meta:
            parameter.data = parameter.detach().to(device)
    for module in model.modules():
        buffers = own_buffers(module)
        buffers.update({name: b if b is None or b.is_meta else b.to(device) for name, b in buffers.items()})


def _compute_loss(cast: torch.dtype | None, judge: Callable[[Any], Any], outputs: object) -> Any:
    """Compute the loss of outputs, in float64 for a proof, else in the job's own number format."""
    with use_proof_dtype(cast):
        return judge(outputs)


def _make_training_call(plan: Plan, cast: torch.dtype | None, at: Callable[[], torch.device]) -> Callable[[nn.Module, Any], Any]:
    """Make a function that calls the model in the number format of training, since pipeline stages allocate receive buffers in that
    format.

    `at` returns the device of the model. The model's tensors are not queried, since dispatch modes would record that as an operator.
    """

    def run(model: nn.Module, inputs: object) -> Any:
        with make_trace_context(plan, cast, at().type, model):
            return run_model(model, inputs)

    return run_model if plan.pp == 1 and cast is None else run


def mark_open_head(global_sketch: Sketch, job: Job) -> Sketch:
    """Mark the unit `head` as used outside its call if the job's loss multiplies by its weight."""
    head = getattr(job.loss, "head", None)
    if head is None:
        return global_sketch
    units = (replace(u, closed=u.closed and not f"{head}.".startswith(f"{u.name}.")) for u in global_sketch.units)
    return replace(global_sketch, units=tuple(units))
