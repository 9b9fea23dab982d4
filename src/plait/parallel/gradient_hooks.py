"""The job's hooks on gradients of parameters: `register_hook`, `register_post_accumulate_grad_hook`.

On one device autograd calls them with the gradient of the whole batch. A rank's backward passes have parts of it: of its own
samples, of a micro-batch, of its shard. What a clamp makes of parts does not add up to what it makes of the sum, and a mask has the
shape of the whole. So the hooks are taken off the parameters, and called once in a step with the whole, summed gradient, before it is
clipped: on every rank that has a part of the parameter, in the reverse order of the model's parameters. The norm is computed anew then.

Costs: a parameter that `fsdp` or `tp` cuts is gathered, gradient and weights, while its hooks run. Nothing without hooks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.config.errors import FAILED, PlaitError, Problem, in_a_line
from plait.config.job import user_line
from plait.config.plan import Plan
from plait.model.sketch import Sketch
from plait.parallel.gradient_reducer import GradientReducer
from plait.parallel.rank_model import RankModel
from plait.parallel.whole_tensors import layouts
from plait.randomness.keyed import host_state
from plait.tensors.collectives import host_or
from plait.tensors.parameters import ParameterHooks
from plait.tensors.rows import Part
from plait.tensors.torch_private import FakeTensor, sharded_here

REGISTER = ("register the hook in the model's constructor, on the model's own parameter",)


def check(plan: Plan, sketch: Sketch, hooks: Mapping[str, object]) -> None:
    """P093 when a plan never has the whole gradient that the job's hooks are to be given."""
    if not hooks:
        return
    name, experts = next(iter(hooks)), [n for m in sketch.mixtures if plan.ep > 1 for n in hooks if n in m.names]
    whys = {
        f"grad_compression={plan.grad_compression}": (plan.grad_compression != "none", "what copies send is rounded before it is summed"),
        f"replica_groups={plan.replica_groups}": (
            plan.replica_groups > 1,
            "each group updates by gradients of its own samples",
        ),
        f"ep={plan.ep}": (
            bool(experts),
            f"{experts[0] if experts else ''} is one of the experts, which ranks hold some of",
        ),
    }
    for key, (there, why) in whys.items():
        if there:
            what = f"the hook on the gradient of {experts[0] if experts else name} does not work with {key}"
            raise PlaitError(Problem("P093", what, why=why, fix=(f"leave out {key}", "remove the hook")))


def apply(rank_model: RankModel) -> None:
    """Have the hooks called, those too that the job's optimizer has put on the parameters it was given. After all strategies."""
    hooks = dict(rank_model.setup.parameter_hooks)
    for name, parameter in rank_model.to_update().items():
        if found := ParameterHooks.of_job(parameter, take=True):
            known = hooks.get(name, ParameterHooks())
            hooks[name] = ParameterHooks({**known.before, **found.before}, {**known.after, **found.after})
    check(rank_model.plan, rank_model.whole_sketch, hooks)
    if hooks:
        rank_model.hooks.gradients_summed.append(GradientHooks(rank_model, hooks).run)


class GradientHooks:
    """Calls the hooks of one rank's parameters."""

    def __init__(self, rank_model: RankModel, hooks: Mapping[str, ParameterHooks]):
        self.rank_model, plan = rank_model, rank_model.plan
        names = [n for n, _ in rank_model.module.named_parameters() if n in hooks and n in rank_model.params]
        self.hooks = {n: hooks[n] for n in reversed(names)}
        self.alone = plan.devices == 1 and plan.microbatches == 1
        if plan.along(plan.part_axes) > 1:
            rank_model.mesh.connect(*plan.part_axes)
        self.group = rank_model.mesh.group_or_none(*plan.part_axes)
        self.layouts = [] if self.group is None else layouts(rank_model)
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self.cut = [n for n in self.hooks if not all(row[n].whole for row in self.layouts)]

    def run(self, reducer: GradientReducer) -> None:
        """Call them with the gradients that are there, and give parameters what they make of them. All ranks call it."""
        rank_model, names = self.rank_model, self._used()
        before = host_state()
        with torch.no_grad(), self._weights_gathered(names):
            for name in names:
                self._run(name)
        if names and not self.alone and not _same(before, host_state()):
            what = f"hooks on gradients draw random numbers, {names[0]}'s or another's"
            why = f"with {rank_model.plan} each rank calls them once in a step, and draws other numbers than one device"
            fix = ("draw from a torch.Generator that the hook makes anew in each call, from a seed",)
            raise PlaitError(Problem("P093", what, why=why, fix=fix))
        reducer.measure()

    def _used(self) -> list[str]:
        """The parameters with hooks that have a gradient: the same on all ranks with parts of them."""
        own, hooked = self.rank_model.params, [n for n, hooks in self.hooks.items() if hooks]
        used = {n for n in hooked if own[n].grad is not None}
        if self.group is not None and self.cut:
            where = host_or(own[self.cut[0]].device, self.group)
            there = torch.tensor([n in used for n in self.cut], dtype=torch.float64, device=where)
            dist.all_reduce(there, group=self.group)
            used |= {n for n, count in zip(self.cut, there.tolist()) if count}
        return [n for n in hooked if n in used]

    @contextmanager
    def _weights_gathered(self, names: list[str]) -> Iterator[None]:
        """Under `fsdp` a hook may look at the weight, by the module that has it: it is whole inside."""
        shards = self.rank_model.techniques.shards
        there = {id(p) for n, p in shards.sharded.items() if n in names} if shards is not None else set()
        modules = [
            m for m in (shards.modules if shards is not None else ()) if there & {id(p) for p, _ in sharded_here(m)}
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
            own.grad if not cut else self._gathered(name, torch.zeros_like(own) if own.grad is None else own.grad)
        )
        assert gradient is not None
        parameter = own
        if cut and hooks.after:
            parameter = rank_model.setup.attributes[name].parameter(self._gathered(name, own.detach()), own.requires_grad)
        if isinstance(gradient, FakeTensor):
            return  # a dry run: hooks may look at values
        loss_scale = rank_model.techniques.loss_scale
        scale = 1.0 if loss_scale is None else loss_scale.value
        try:
            result = _called(hooks, parameter, gradient / scale if loss_scale is not None else gradient)
        except PlaitError:
            raise
        except Exception as error:  # it is the user's code
            raise self._raised(name, error) from error
        if isinstance(result, str):
            raise self._steps(name)
        result = result * scale if result is not None and loss_scale is not None else result
        own.grad = self._own_part(name, result) if cut and result is not None else result

    def _gathered(self, name: str, part: Tensor) -> Tensor:
        """The whole of which every rank has a part. Of ranks with the same part the first sends it."""
        mine = self.layouts[self.rank][name]
        whole = part.new_zeros(mine.shape)
        first = next(i for i, row in enumerate(self.layouts) if row[name].ranges == mine.ranges)
        for piece in Part(part, mine.shape, mine.ranges).pieces() if first == self.rank else ():
            piece.inside(whole).copy_(piece.tensor)
        dist.all_reduce(whole, group=self.group)
        return whole

    def _own_part(self, name: str, whole: Tensor) -> Tensor:
        mine, part = self.layouts[self.rank][name], torch.empty_like(self.rank_model.params[name])
        for piece in Part(part, mine.shape, mine.ranges).pieces():
            piece.tensor.copy_(piece.inside(whole))
        return part.detach()

    def _raised(self, name: str, error: Exception) -> PlaitError:
        what = f"the hook on the gradient of {name} raised {in_a_line(error)}"
        why = f"it is called with the whole gradient of the batch; with {self.rank_model.plan} other weights are parts on each rank"
        fix = ("use nothing in the hook but the gradient, the parameter and tensors of your own", '--plan "dp=…"')
        return PlaitError(Problem("P093", what, why=why, where=user_line(error), fix=fix), FAILED)

    def _steps(self, name: str) -> PlaitError:
        what = f"the hook on the gradient of {name} changes the weight itself"
        why = "clipping, skipped steps and checkpoints know of updates by Job.optimizer alone"
        fix = ("update weights in Job.optimizer only", '--plan "… offload=optimizer"    where memory is short')
        return PlaitError(Problem("P093", what, why=why, fix=fix), FAILED)


def _called(hooks: ParameterHooks, parameter: nn.Parameter, gradient: Tensor) -> Tensor | str | None:
    """What they make of a gradient; a text where they change the parameter itself."""
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


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two states of the host's generators are the same."""
    numpy = all(np.array_equal(a, b) for a, b in zip(one[1], other[1]))
    return one[0] == other[0] and numpy and bool(torch.equal(one[2], other[2]))
