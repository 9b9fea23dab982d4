"""Running a sharded model: its local parts, and the sums of their gradients (see `parallel/fsdp/strategy.py`).

What FSDP2's hooks on a unit would change for the model's code, and hooks beside them that keep it as it was.

[Note: Collectives]
How parts of parameters are gathered and gradients are summed into parts: the messages of a sharded model.

FSDP2 decides when a group of parameters is gathered and when its gradients are reduced. What is here decides how: on
CPU processes gloo's own reduce-scatter is an all-reduce in disguise and is waited for at once, so parts are exchanged
directly, by sends and receives, and waited for when somebody needs them, while backward goes on. docs/decisions/0006 has the measurements.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from plait.config.plan import Plan
from plait.parallel.spec import is_divisible, shard_of
from plait.tensors.collectives import SUM_PARTS
from plait.tensors.parameters import ParameterAttributes
from plait.tensors.rows import chunk, everything
from plait.tensors.torch_private import (
    end_backward,
    is_view,
    leaves,
    local_of,
    sharded_here,
    storage_key,
    tree_flatten,
    tree_map_only,
    widened,
)
from plait.tensors.transfers import any_has

TAGS = 2**14
"""Messages that carry gradients have tags above this, those that carry parameters below."""


class _NewBuffers:
    """FSDP2's own buffers are new tensors: what is sent and what is gathered, or this rank's part of the sum."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_NewBuffers):
    """Every rank sends its part to every other. `async_op` returns at once; the last part to arrive ends the wait."""

    def __init__(self) -> None:
        self.tag = 0

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        size, rank = group.size(), group.rank()
        self.tag = self.tag % TAGS + 1  # two gathers may be under way between the same ranks
        parts = output_tensor.chunk(size)
        works = _exchanged([input_tensor] * size, dict(enumerate(parts)), group, self.tag)
        if storage_key(output_tensor) != storage_key(input_tensor):
            parts[rank].copy_(input_tensor)
        return _All(works, (output_tensor, input_tensor)) if async_op else _All(works, ()).wait()


def _exchanged(send: Sequence[Tensor], into: Mapping[int, Tensor], group: ProcessGroup, tag: int) -> list[dist.Work]:
    """Send a tensor to every other rank, by its number, and receive one of each; all that is to be waited for."""
    size, rank = group.size(), group.rank()
    works: list[dist.Work | None] = []
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        works.append(dist.isend(send[to], group=group, group_dst=to, tag=tag))
        works.append(dist.irecv(into[source], group=group, group_src=source, tag=tag))
    return [work for work in works if work is not None]


class _All(dist.Work):
    """Several works as one; holds what they read and write."""

    def __init__(self, works: list[dist.Work], held: tuple[Tensor, ...]):
        super().__init__()
        self.works, self.held = works, held

    def wait(self, *timeout: object) -> None:  # type: ignore[override]
        for work in self.works:
            work.wait()
        self.works, self.held = [], ()


class Scatter(_NewBuffers):
    """Gradients summed into parts. The sum is made later: at the next group's turn, or in `finish`.

    `output_tensor` is a view of what becomes a parameter's `.grad`; nobody reads it before `finish` returns.
    """

    def __init__(self, copies: ProcessGroup | None):
        self.copies = copies
        """The group of ranks that hold copies of this rank's parts, or None."""
        self.others: dict[str, ProcessGroup | None] = {}
        """The same of parts that lie on other ranks than the rest, by the name of their group."""
        self.last, self.tag = True, 0
        self.open: tuple[_All, Tensor, list[Tensor], ProcessGroup | None] | None = None
        """(messages, what their sum goes to, what it is added up from besides, the group of copies)"""
        self.sums: list[dist.Work] = []

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        self.settle()
        size, rank = group.size(), group.rank()
        self.tag = self.tag % TAGS + 1
        parts, into = input_tensor.chunk(size), [output_tensor]
        into += [torch.empty_like(output_tensor) for _ in range(size - 2)]  # the first part arrives where the sum stays
        received = {(rank - k) % size: part for k, part in enumerate(into, 1)}
        works = _All(_exchanged(parts, received, group, TAGS + self.tag), (input_tensor,))
        self.open = works, output_tensor, [parts[rank], *into[1:]], self.of(group)

    def of(self, group: ProcessGroup) -> ProcessGroup | None:
        """The ranks with copies of parts that lie on this group's."""
        return self.others.get(group.group_name, self.copies)

    def settle(self) -> None:
        """Make the sum that is open, and start adding up the copies' sums of it."""
        if self.open is None:
            return
        (works, output, parts, copies), self.open = self.open, None
        works.wait()
        for part in parts:
            output += part
        if copies is not None and self.last:
            work = dist.all_reduce(output, group=copies, async_op=True)
            assert work is not None
            self.sums.append(work)

    def finish(self) -> None:
        self.settle()
        for work in self.sums:
            work.wait()
        self.sums = []


class DeviceScatter(Scatter):
    """The same on a device with streams, where the library's own collectives overlap by themselves: parts are summed on one stream of
    FSDP2's, and over the copies of a part on another, beside the next group's parts."""

    def __init__(self, copies: ProcessGroup | None):
        super().__init__(copies)
        self.due: ProcessGroup | None = None
        """The copies over which the sum that was just asked for is to be made too."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        SUM_PARTS(output_tensor, input_tensor, group=group)
        self.due = self.of(group) if self.last else None

    def sum_over_copies(self, part: Tensor) -> None:
        """What FSDP2 calls after each sum of parts, on its stream for all-reduces."""
        copies, self.due = self.due, None
        if copies is None:
            return
        if part.is_cuda:  # it was made on the other stream, and may be given back before this one is through with it
            part.record_stream(torch.cuda.current_stream(part.device))
        dist.all_reduce(part, group=copies)

    def settle(self) -> None:
        """Nothing is open: work is ordered by the stream."""


def padded(shape: Sequence[int], ranks: int, dim: int = 0) -> int:
    """Elements of the largest part of a tensor cut along a dim."""
    return chunk(shape[dim], ranks, 0)[1] * math.prod(n for d, n in enumerate(shape) if d != dim)


@dataclass(frozen=True)
class ShardGroup:
    """Where the parts of a parameter are: the group of ranks that hold them, of those that hold the same, which dim is cut."""

    group: ProcessGroup
    copies: ProcessGroup | None
    """None when nobody else holds the same."""
    dim: int = 0


class FsdpRuntime:
    """The sharded model of one rank: what the engine calls around backward, and the tensors the optimizer updates.

    `own` are this rank's parts as plain parameters that share storage with FSDP2's: element-wise optimizers need no
    more, and pay nothing for DTensor's dispatch. Scalars cannot be sharded: they stay whole, and their gradients are summed in one
    small message.
    """

    rounds = False

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        attributes: Mapping[str, ParameterAttributes],
        scatter: Scatter,
        *,
        usual: ShardGroup,
        apart: Mapping[str, ShardGroup],
        same_slices: ProcessGroup | None,
    ):
        """`attributes`: of the parameters that are its own, by name. `apart`: where those of experts are that other ranks share than the rest.
        `same_slices`: the ranks over which gradients of tensors that are not sharded are summed; None: all there are."""
        self.model, self.zero, self.scatter = model, plan.zero_stage, scatter
        self.usual, self.apart, self.same_slices, self.pipelined = usual, apart, same_slices, plan.pp > 1
        from torch.distributed.fsdp import FSDPModule

        watch = torch.compiler.disable(self._watch) if plan.compile else self._watch
        self.modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        named = {n: p for n, p in model.named_parameters() if n in attributes}
        self.sharded = {n: p for n, p in named.items() if is_divisible(p.shape)}
        self.scalars = [p for p in named.values() if not is_divisible(p.shape) and p.requires_grad]
        self.attributes = {n: own for n, own in attributes.items() if own and n in self.sharded}
        self.own = {n: self._part(n, p) if n in self.sharded else p for n, p in named.items()}
        self.trained = [n for n, p in self.sharded.items() if p.requires_grad]
        self.used: set[str] = set()
        self.gathered: dict[str, Tensor] = {}
        """What backward gives the gradient of a part to: the parameter as it is while it is gathered. Filled in when it first is."""
        self.silent: set[FSDPModule] = set()
        """Modules none of whose parameters this turn trains: nothing of theirs is summed."""
        self.held_whole = False
        """Gradients of micro-batches are added up here, and not over ranks."""
        self.idle = False
        """Whatever this rank computes in this step is not counted: it used no parameter."""
        self.partial: dict[str, Tensor] = {}
        """Summed gradients of the step's micro-batches before the last."""
        for module in self.modules:
            module.register_forward_pre_hook(watch)

    def _part(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer is given of a sharded parameter."""
        if name not in self.attributes:
            return nn.Parameter(local_of(parameter), parameter.requires_grad)
        at, shape = self.where(name), self.attributes[name].shape
        mine = shard_of(everything(shape), at.dim, at.group.size(), at.group.rank())
        self.attributes[name].put_on(parameter)
        return self.attributes[name].parameter(local_of(parameter), parameter.requires_grad, mine)

    def _watch(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Note which parameters get a gradient; a parameter that no rank used must keep none, as on one device."""
        if "_noting" in module.__dict__:
            return
        found = {id(p): n for n, p in self.model.named_parameters() if not hasattr(p, "placements")}
        for parameter in module.parameters() if self.attributes else ():
            if (name := found.get(id(parameter))) in self.attributes:
                self.attributes[name].put_on(parameter)
        if not torch.is_grad_enabled():
            return
        watched = 0
        for parameter in module.parameters():
            name = found.get(id(parameter))
            if name in self.sharded and parameter.requires_grad:
                add = widened(self.modules[0], parameter)
                parameter.register_post_accumulate_grad_hook(lambda _, name=name, add=add: self._use(name, add))
                self.gathered[name] = parameter
                watched += 1
        module.__dict__["_noting"] = watched

    def _use(self, name: str, add: Callable[[], None]) -> None:
        if self.held_whole:  # else FSDP2 does it, after each backward pass of the module
            add()
        if not self.idle or name in self.apart:  # an expert computes for others too
            self.used.add(name)

    def trains(self, has: Callable[[str], bool]) -> None:
        """From now on only the parameters of which `has` is true get gradients (see `engine/passes.py`)."""
        named = {id(p): n for n, p in self.sharded.items()}
        held = {m: [named[id(p)] for p, _ in sharded_here(m) if id(p) in named] for m in self.modules}
        self.silent = {m for m, names in held.items() if not any(map(has, names))}

    def gathered_of(self, has: Callable[[str], bool]) -> list[Tensor]:
        """What backward must lead to for those parameters to get gradients, as far as a forward pass has used them."""
        scalars = (p for n, p in self.own.items() if n not in self.sharded and p.requires_grad and has(n))
        return [*(p for n, p in self.gathered.items() if has(n)), *scalars]

    def where(self, name: str) -> ShardGroup:
        """Where the parts of a parameter are."""
        return self.apart.get(name, self.usual)

    def size(self, name: str) -> int:
        """Elements of the largest part of a parameter."""
        where = self.where(name)
        return padded(self.sharded[name].shape, where.group.size(), where.dim)

    def begin(self, last: bool, idle: bool) -> None:
        """Before a micro-batch's forward pass. `last`: its backward ends the step. In a pipeline: before the first pass of the step, and
        `last` when all backward passes are through, whose gradients were kept whole until then."""
        self._put_by()
        self.idle = idle
        if self.pipelined:
            self._hold(not last)
            return
        self.scatter.last = last and not self.partial
        for module in self.modules:
            sums = (last or self.zero > 1) and module not in self.silent
            module.set_requires_gradient_sync(sums, recurse=False)
            module.set_reshard_after_backward(last or self.zero > 2, recurse=False)

    def _put_by(self) -> None:
        """Keep the summed gradients of the micro-batches before."""
        self.scatter.finish()
        for name, parameter in self.sharded.items():
            if parameter.grad is not None:
                gradient, parameter.grad = local_of(parameter.grad), None
                if name in self.partial:
                    self.partial[name] += gradient
                else:
                    self.partial[name] = gradient

    def _hold(self, on: bool) -> None:
        root, self.held_whole = self.modules[0], on
        root.set_is_last_backward(not on)
        for module in self.modules:
            module.set_requires_gradient_sync(not on, recurse=False)
            module.set_reshard_after_backward(not on or (self.zero > 2 and module is not root), recurse=False)
        if not on:
            end_backward(root)

    def ready(self, step_row: Tensor | None) -> None:
        """FSDP2 sums the gradients of a unit when its backward is through."""

    def finish(self) -> None:
        """Give every part its summed gradient: of zeros where nobody used the parameter."""
        self.scatter.finish()
        self._give()
        if self.scalars:
            none = torch.zeros(2, dtype=torch.float64, device=self.scalars[0].device)
            mine = self._scalar_gradients()
            rows = torch.stack(
                [none if g is None else torch.stack([g.double().sum(), none[0] + 1]) for g in mine]
            )  # an empty one has no item
            dist.all_reduce(rows, group=self.same_slices)
            there = any_has([g is not None for g in mine], rows[:, 1])
            for parameter, value, has in zip(self.scalars, rows[:, 0], there):
                parameter.grad = value.to(parameter.dtype).expand_as(parameter).clone() if has else None
        self.idle = False

    def held(self) -> list[Tensor]:
        """Gradients are made in each step."""
        return []

    def _scalar_gradients(self) -> list[Tensor | None]:
        """Gradients of the tensors that are not sharded; None of those that no counted sample of this rank used."""
        return [None if self.idle else p.grad for p in self.scalars]

    def _give(self) -> None:
        late: dict[ProcessGroup | None, list[tuple[Tensor, int]]] = {}
        for name in self.trained:
            parameter, own = self.sharded[name], self.own[name]
            gradient = None if parameter.grad is None else local_of(parameter.grad)
            if name in self.partial:
                gradient = self.partial[name] if gradient is None else gradient.add_(self.partial[name])
                late.setdefault(self.where(name).copies, []).append((gradient, self.size(name)))
            own.grad, parameter.grad = gradient, None
        self.partial = {}
        for copies, sums in late.items():
            if copies is not None:
                flat = torch.cat([F.pad(g.reshape(-1), (0, n - g.numel())) for g, n in sums])
                dist.all_reduce(flat, group=copies)
                for (gradient, _), part in zip(sums, flat.split([n for _, n in sums])):
                    gradient.copy_(part[: gradient.numel()].view_as(gradient))

    def reshard(self) -> None:
        """Forget gathered parameters: the parts have changed, or the memory is wanted."""
        for module in self.modules:
            module.reshard()


def without_views(module: nn.Module, args: tuple[Any, ...], output: object) -> object:
    """FSDP2's hook on an output that is a view is lost when the model's code changes it in place: give it a copy."""
    leaves(output)  # a dataclass that torch's trees have not met is one leaf to them
    return tree_map_only(Tensor, lambda t: t.clone() if t.requires_grad and is_view(t) else t, output)


def keep_arguments(module: nn.Module) -> None:
    """FSDP2's hook makes other tensors of the inputs, in other lists and dicts. The module's code is given the lists, dicts and objects of
    who calls it, which it may change, and one tensor for each: it may ask whether two are one (`key is value`, as torch's attention does)."""
    calls: list[tuple[Any, dict[int, Tensor]]] = []
    """What each call that runs was given, and by the id of each tensor in its place the own one."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(((args, kwargs), {}))

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, owners = calls[-1]
        own, made = tree_flatten(given)[0], tree_flatten((args, kwargs))[0]
        if len(own) != len(made):
            return None  # another hook gives the module something else
        pairs = [(old, new) for old, new in zip(own, made) if isinstance(old, Tensor) and isinstance(new, Tensor)]
        first = {id(old): new for old, new in reversed(pairs)}
        owners.update((id(first[id(old)]), old) for old, _ in pairs)
        return put_inside(given, first)

    def left(_: nn.Module, args: tuple[Any, ...], output: object) -> None:
        put_inside(*calls.pop())

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_pre_hook(after, with_kwargs=True)
    module.register_forward_hook(left, always_call=True)


def put_inside(value: object, table: Mapping[int, Tensor]) -> Any:
    """The value with tensors replaced by those that `table` has for their ids. Lists, dicts and objects stay the same ones."""
    if isinstance(value, Tensor):
        return table.get(id(value), value)
    if isinstance(value, (list, deque)):
        for k, each in enumerate(value):
            value[k] = put_inside(each, table)
    elif isinstance(value, dict):
        for key, each in value.items():
            value[key] = put_inside(each, table)
    elif isinstance(value, tuple):
        found = [put_inside(each, table) for each in value]
        changed = any(new is not old for new, old in zip(found, value))
        return value if not changed else type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    elif hasattr(value, "__dict__") and not any(leaf is value for leaf in leaves(value)):  # an object that torch's trees see into
        put_inside(vars(value), table)
    return value
