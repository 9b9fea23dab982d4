"""Rehearsing a micro-batch: its forward and backward on fake tensors, with a tape of what is allocated and freed.

What happens inside one process is run as it will be: number format, recomputation, batch statistics over all ranks,
the loss. Whole numbers are real, because code likes to look at them (which tokens are masked). What other ranks have
part in, and where gradients and parameters are kept, is not: a gradient is dropped as soon as it is there, parameters
count nothing. Those are charges of the strategies (`price`), which refer to the moments noted here by name: "start",
"forward u", "forward end u", "loss", "backward u" (the gradient of unit u's output is there), "backward end u" (the
gradient of its inputs is), "gradient p", "end".
"""

import gc
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.config.job import Job
from plait.config.plan import Plan
from plait.model.make import call
from plait.model.meter import tensors_in
from plait.model.sketch import Sketch
from plait.model.trace import fakes_of
from plait.parallel import recompute
from plait.parallel.data import batch_norm as batchnorm
from plait.parallel.fsdp import strategy as shard
from plait.parallel.fsdp.hooks import without_views
from plait.parallel.precision import autocast, plan_format
from plait.planner.dryrun.allocations import Allocations, Tape
from plait.randomness import keyed as randomness
from plait.tensors.fake import PartlyFake
from plait.tensors.torch_private import FakeTensor, FakeTensorMode, own_buffers, tree_leaves, tree_map_only
from plait.tensors.workspaces import Workspaces


@dataclass(frozen=True)
class Rehearsal:
    """The tape of one micro-batch, and the bytes of each parameter's gradient as backward leaves it."""

    tape: Tape
    gradients: dict[str, int] = field(default_factory=dict)


def rehearse(
    model: nn.Module, sketch: Sketch, job: Job, plan: Plan, batch: tuple[Any, Any], evaluates: bool = False
) -> Rehearsal:
    """Run one micro-batch (inputs, targets) of `job` through `model`, which is of no use afterwards.

    `evaluates`: of an evaluation, with the job's metrics, without backward.
    """
    fakes = None if sketch.by_values else fakes_of(model)
    if fakes is not None:
        fake(model, fakes, plan_format(plan) if plan.fsdp > 1 else None)
        batch = tree_map_only(Tensor, lambda t: fakes.from_tensor(t) if t.is_floating_point() else t, batch)
    meter, gradients = Allocations(), {}
    _wire(model, sketch, plan, meter)
    names = dict(model.named_parameters())
    for name, parameter in names.items():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_Dropping(name, meter, gradients))
    state = randomness.host_state()
    gc.collect()
    with ExitStack() as stack:
        if fakes is not None:
            stack.enter_context(PartlyFake(fakes))
            stack.enter_context(Workspaces())
        stack.enter_context(meter)
        meter.hold("", [*names.values(), *model.buffers()], free=True)
        meter.hold("", (t for t in tree_leaves(batch) if isinstance(t, Tensor)), free=True)
        meter.moment("start")
        if evaluates:
            _evaluated(model, job, plan, batch, meter)
        else:
            keyed = _Dropouts() if sketch.places else nullcontext()  # as in training, where it prolongs a few lives
            scaled = _forward(model, job, plan, keyed, batch) * 0.5
            meter.moment("loss")
            scaled.backward()
        meter.moment("end")
    randomness.restore_host(state)
    return Rehearsal(meter.tape, gradients)


def _forward(model: nn.Module, job: Job, plan: Plan, keyed: Any, batch: tuple[Any, Any]) -> Tensor:
    """As `engine/passes.py`: the model and the loss each in a context of the number format, which drops its casts at its end."""
    with keyed, torch.enable_grad():
        return _loss(_outputs(model, plan, batch[0]), job, plan, batch[1])


def _evaluated(model: nn.Module, job: Job, plan: Plan, batch: tuple[Any, Any], meter: Allocations) -> None:
    """As `engine/evaluate.py`. Metrics that look at values stop there: what they had made until then is counted."""
    assert job.evaluate is not None
    model.eval()
    with torch.no_grad(), autocast("cpu", plan_format(plan)):
        outputs = call(model, batch[0])
        meter.moment("loss")
        with suppress(Exception):
            for values in job.evaluate.metrics(outputs, batch[1]).values():
                torch.as_tensor(values).double().sum()


def _outputs(model: nn.Module, plan: Plan, inputs: Any) -> Any:
    with autocast("cpu", plan_format(plan)):
        return call(model, inputs)


def _loss(outputs: Any, job: Job, plan: Plan, targets: Any) -> Tensor:
    with autocast("cpu", plan_format(plan)):
        return job.loss(outputs, targets)


def fake(model: nn.Module, fakes: FakeTensorMode, half: torch.dtype | None) -> None:
    """Make every tensor of the model a fake one; with `half`, parameters in that format, as they are gathered."""

    def one(t: Tensor, dtype: torch.dtype | None) -> Tensor:
        with fakes:
            made = (t if isinstance(t, FakeTensor) else fakes.from_tensor(t.detach())).detach()
            return made.to(dtype) if dtype is not None and t.is_floating_point() else made.clone()

    made = {id(p): nn.Parameter(one(p, half), p.requires_grad) for p in model.parameters()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, made[id(parameter)])
        buffers = own_buffers(module)
        buffers.update({name: None if b is None else one(b, None) for name, b in buffers.items()})


def _wire(model: nn.Module, sketch: Sketch, plan: Plan, meter: Allocations) -> None:
    """What the plan's strategies change inside this process, and the marks of the units around it."""
    if plan.devices > 1 and plan.processes != "one":
        batchnorm.synchronise(model, sketch.batch_norms, batchnorm.Pretended(plan.devices))
    writing = {call.unit for call in sketch.calls if call.writes}  # these could not change what the mark gives them
    for name in ["", *(u.name for u in sketch.units if u.name not in writing)]:
        mark, module = _Marks(name, meter), model.get_submodule(name)
        module.register_forward_pre_hook(mark.before, with_kwargs=True)
        module.register_forward_hook(mark.after)
    if recompute.wanted(plan):
        recompute.apply(SimpleNamespace(model=model, sketch=sketch, plan=plan, cast=None))
    if shard.wanted(plan):
        for names in shard.groups(sketch):
            for name in names:
                model.get_submodule(name).register_forward_hook(without_views)
        model.register_forward_hook(without_views)


class _Marks:
    """Notes when a unit's forward and backward begin and end."""

    def __init__(self, unit: str, meter: Allocations):
        self.unit, self.meter = unit, meter

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.meter.moment(f"forward {self.unit}")
        if not torch.is_grad_enabled():
            return None

        def one(t: Tensor) -> Tensor:
            return _Ending.apply(t, self) if t.requires_grad else t

        return tree_map_only(Tensor, one, (args, kwargs))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.meter.moment(f"forward end {self.unit}")
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self.meter.moment(f"backward {self.unit}"))


class _Ending(torch.autograd.Function):
    """Nothing; in backward, the moment when the gradient of a unit's input is there."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, marks: _Marks) -> Tensor:
        ctx.marks = marks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.marks.meter.moment(f"backward end {ctx.marks.unit}")
        return gradients[0], None


class _Dropping:
    """Notes the bytes of a parameter's gradient when it is there, and drops it."""

    def __init__(self, name: str, meter: Allocations, gradients: dict[str, int]):
        self.name, self.meter, self.gradients = name, meter, gradients

    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.gradients[self.name] = parameter.grad.untyped_storage().nbytes()
        parameter.grad = None
        self.meter.moment(f"gradient {self.name}")


class _Dropouts(TorchFunctionMode):
    """Dropout as `randomness/keyed.py` computes it: a mask of its own, multiplied with."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        plain, feature = func in randomness.PLAIN_DROPOUTS, func in randomness.FEATURE_DROPOUTS
        if not plain and not feature:
            return func(*args, **(kwargs or {}))
        return self._dropout(plain, *args, **(kwargs or {}))

    def _dropout(
        self, plain: bool, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
    ) -> Tensor:  # fmt: skip
        if not (training and train) or p == 0.0:
            return input
        shape = input.shape if plain else (*input.shape[:2], *(1 for _ in input.shape[2:]))
        mask = input.detach().new_ones(shape)
        return input.mul_(mask) if inplace else input * mask
