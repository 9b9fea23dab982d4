"""The job's hooks on gradients of parameters: `register_hook`, `register_post_accumulate_grad_hook`.

On one device, autograd calls them with the gradient of the full batch. A rank's backward has only parts of it: of its own
samples, of a micro-batch, or of its shard. A clamp of parts does not add up to a clamp of the sum, and a mask has the shape of
the full gradient. So the hooks are removed from the parameters. They are called once per step with the full, reduced gradient,
before it is clipped. Every rank with a part of the parameter calls them, in the reverse order of the model's parameters. Then the
norm is computed again.

Costs: a parameter that `fsdp` or `tp` shards is gathered, with its gradient, while its hooks run. Nothing without hooks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.config.errors import FAILED, PlaitError, Problem, summarize_error
from plait.config.job import find_user_line
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.gradient_reducer import GradientReducer
from plait.parallel.rank_model import RankModel
from plait.parallel.tensor_owners import list_layouts
from plait.randomness.keyed import get_host_state
from plait.tensors.collectives import choose_exchange_device
from plait.tensors.parameters import ParameterHooks
from plait.tensors.rows import Part
from plait.tensors.torch_private import FakeTensor, list_sharded_params

REGISTER_FIX = ("register the hook in the model's constructor, on the model's own parameter",)


def check_hooks(plan: Plan, sketch: Sketch, hooks: Mapping[str, object]) -> None:
    """Raise P093 if a plan never has the full gradient for the job's hooks."""
    if not hooks:
        return
    name, experts = next(iter(hooks)), [n for m in sketch.moe_layers if plan.ep > 1 for n in hooks if n in m.names]
    whys = {
        f"grad_compression={plan.grad_compression}": (plan.grad_compression != "none", "the messages of replicas are rounded before they are summed"),
        f"replica_groups={plan.replica_groups}": (
            plan.replica_groups > 1,
            "each group updates by gradients of its own samples",
        ),
        f"ep={plan.ep}": (
            bool(experts),
            f"{experts[0] if experts else ''} is an expert, and each rank has only some of the experts",
        ),
    }
    for key, (there, why) in whys.items():
        if there:
            what = f"the hook on the gradient of {experts[0] if experts else name} does not work with {key}"
            raise PlaitError(Problem("P093", what, why=why, fix=(f"leave out {key}", "remove the hook")))


def install_hooks(rank_model: RankModel) -> None:
    """Install the job's hooks, including those that its optimizer has registered on its parameters. Call it after all strategies."""
    hooks = dict(rank_model.setup.parameter_hooks)
    for name, parameter in rank_model.get_optimizer_params().items():
        if found := ParameterHooks.find_job_hooks(parameter, take=True):
            known = hooks.get(name, ParameterHooks())
            hooks[name] = ParameterHooks({**known.before, **found.before}, {**known.after, **found.after})
    check_hooks(rank_model.plan, rank_model.global_sketch, hooks)
    if hooks:
        rank_model.hooks.gradients_summed.append(GradientHooks(rank_model, hooks).run)


class GradientHooks:
    """Calls the hooks of one rank's parameters."""

    def __init__(self, rank_model: RankModel, hooks: Mapping[str, ParameterHooks]):
        self.rank_model, plan = rank_model, rank_model.plan
        names = [n for n, _ in rank_model.module.named_parameters() if n in hooks and n in rank_model.params]
        self.hooks = {n: hooks[n] for n in reversed(names)}
        self.is_single = plan.devices == 1 and plan.microbatches == 1
        if plan.along(plan.part_axes) > 1:
            rank_model.mesh.connect(*plan.part_axes)
        self.group = rank_model.mesh.group_or_none(*plan.part_axes)
        self.layouts = [] if self.group is None else list_layouts(rank_model)
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self.cut = [n for n in self.hooks if not all(row[n].is_full for row in self.layouts)]

    def run(self, reducer: GradientReducer) -> None:
        """Call the hooks with the current gradients, and assign their results. All ranks call it."""
        rank_model, names = self.rank_model, self._list_used()
        before = get_host_state()
        with torch.no_grad(), self._gather_weights(names):
            for name in names:
                self._run(name)
        if names and not self.is_single and not _is_same_state(before, get_host_state()):
            what = f"hooks on gradients draw random numbers (that of {names[0]} or another one)"
            why = f"with {rank_model.plan} each rank calls them once per step, and draws other numbers than one device"
            fix = ("draw from a torch.Generator that the hook makes in each call from a seed",)
            raise PlaitError(Problem("P093", what, why=why, fix=fix))
        reducer.remeasure_norm()

    def _list_used(self) -> list[str]:
        """List the parameters with hooks that have a gradient: the same on all ranks with parts of them."""
        own, hooked = self.rank_model.params, [n for n, hooks in self.hooks.items() if hooks]
        used = {n for n in hooked if own[n].grad is not None}
        if self.group is not None and self.cut:
            where = choose_exchange_device(own[self.cut[0]].device, self.group)
            there = torch.tensor([n in used for n in self.cut], dtype=torch.float64, device=where)
            dist.all_reduce(there, group=self.group)
            used |= {n for n, count in zip(self.cut, there.tolist()) if count}
        return [n for n in hooked if n in used]

    @contextmanager
    def _gather_weights(self, names: list[str]) -> Iterator[None]:
        """Context in which the modules of these parameters are gathered: under `fsdp` a hook may read the full weight."""
        shards = self.rank_model.techniques.shards
        there = {id(p) for n, p in shards.sharded.items() if n in names} if shards is not None else set()
        modules = [
            m for m in (shards.modules if shards is not None else ()) if there & {id(p) for p, _ in list_sharded_params(m)}
        ]
        for module in modules:
            module.unshard()
        try:
            yield
        finally:
            for module in modules:
                module.reshard()

    def _run(self, name: str) -> None:
        rank_model, own, hooks = self.rank_model, self.rank_model.params[name], self.hooks[name]
        cut = name in self.cut
        gradient = (
            own.grad if not cut else self._gather_full(name, torch.zeros_like(own) if own.grad is None else own.grad)
        )
        assert gradient is not None
        parameter = own
        if cut and hooks.after:
            parameter = rank_model.setup.attributes[name].make_parameter(self._gather_full(name, own.detach()), own.requires_grad)
        if isinstance(gradient, FakeTensor):
            return  # a dry run: hooks may read values
        loss_scale = rank_model.techniques.loss_scale
        scale = 1.0 if loss_scale is None else loss_scale.value
        try:
            result = _call_hooks(hooks, parameter, gradient / scale if loss_scale is not None else gradient)
        except PlaitError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise self._make_raised_error(name, error) from error
        if isinstance(result, str):
            raise self._make_step_error(name)
        result = result * scale if result is not None and loss_scale is not None else result
        own.grad = self._take_own_part(name, result) if cut and result is not None else result

    def _gather_full(self, name: str, part: Tensor) -> Tensor:
        """Gather a full tensor. Of the ranks with the same part, the first sends it."""
        mine = self.layouts[self.rank][name]
        whole = part.new_zeros(mine.shape)
        first = next(i for i, row in enumerate(self.layouts) if row[name].ranges == mine.ranges)
        for piece in Part(part, mine.shape, mine.ranges).iter_rects() if first == self.rank else ():
            piece.slice_tensor(whole).copy_(piece.tensor)
        dist.all_reduce(whole, group=self.group)
        return whole

    def _take_own_part(self, name: str, whole: Tensor) -> Tensor:
        mine, part = self.layouts[self.rank][name], torch.empty_like(self.rank_model.params[name])
        for piece in Part(part, mine.shape, mine.ranges).iter_rects():
            piece.tensor.copy_(piece.slice_tensor(whole))
        return part.detach()

    def _make_raised_error(self, name: str, error: Exception) -> PlaitError:
        what = f"the hook on the gradient of {name} raised {summarize_error(error)}"
        why = f"it is called with the full gradient of the batch; with {self.rank_model.plan} each rank has only parts of other weights"
        fix = ("use only the gradient, the parameter and your own tensors in the hook", '--plan "dp=…"')
        return PlaitError(Problem("P093", what, why=why, where=find_user_line(error), fix=fix), FAILED)

    def _make_step_error(self, name: str) -> PlaitError:
        what = f"the hook on the gradient of {name} changes the weight itself"
        why = "clipping, skipped steps and checkpoints only include updates by Job.optimizer"
        fix = ("update weights in Job.optimizer only", '--plan "… offload=optimizer"    if memory is short')
        return PlaitError(Problem("P093", what, why=why, fix=fix), FAILED)


def _call_hooks(hooks: ParameterHooks, parameter: nn.Parameter, gradient: Tensor) -> Tensor | str | None:
    """Call the hooks on a gradient and return their result; a string if they change the parameter itself."""
    for hook in [*hooks.before.values()]:
        result = hook(gradient)
        if result is not None and (result.shape, result.dtype) != (gradient.shape, gradient.dtype):
            raise TypeError(
                f"it returned {result.dtype} of shape {[*result.shape]} for {gradient.dtype} of {[*gradient.shape]}"
            )
        gradient = gradient if result is None else result.detach()
    if not hooks.after:
        return gradient
    before, parameter.grad = parameter.detach().clone(), gradient
    for hook in [*hooks.after.values()]:
        hook(parameter)
    return parameter.grad if torch.equal(before, parameter.detach()) else "changed"


def _is_same_state(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two states of the host's generators are equal."""
    numpy = all(np.array_equal(a, b) for a, b in zip(one[1], other[1]))
    return one[0] == other[0] and numpy and bool(torch.equal(one[2], other[2]))
