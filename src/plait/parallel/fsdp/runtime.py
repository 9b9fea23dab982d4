"""The runtime of a sharded model: its shards, and the reduction of their gradients (see `parallel/fsdp/strategy.py`).

Additional hooks undo the changes to a module's inputs and outputs that FSDP2's hooks make.

[Note: Collectives]
FSDP2 decides when a group of parameters is gathered, and when its gradients are reduced. This file decides how. On CPU processes,
gloo's own reduce-scatter is an all-reduce that blocks at once. So ranks exchange parts directly by sends and receives, while
backward continues, and wait for them when they are needed. docs/decisions/0006 has the measurements.
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
from plait.parallel.spec import compute_shard_ranges, is_shardable
from plait.tensors.collectives import REDUCE_SCATTER
from plait.tensors.parameters import ParameterAttributes
from plait.tensors.rows import chunk_range, full_ranges
from plait.tensors.torch_private import (
    dataclass_leaves,
    end_backward,
    is_view,
    list_sharded_params,
    local_tensor,
    make_wide_sum,
    storage_key,
    tree_flatten,
    tree_map_only,
)
from plait.tensors.transfers import any_rank_has

GRADIENT_TAG_BASE = 2**14
"""Messages with gradients have tags above this, messages with parameters have tags up to it."""


class _NewBuffers:
    """Allocates FSDP2's buffers as new tensors: inputs and outputs of gathers, and shards of reduced gradients."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class ShardGather(_NewBuffers):
    """Sends every rank's part to every other. `async_op` returns at once; the wait ends with the last part."""

    def __init__(self) -> None:
        self.tag = 0

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        size, rank = group.size(), group.rank()
        self.tag = self.tag % GRADIENT_TAG_BASE + 1  # two gathers between the same ranks may overlap
        parts = output_tensor.chunk(size)
        works = _exchange_all([input_tensor] * size, dict(enumerate(parts)), group, self.tag)
        if storage_key(output_tensor) != storage_key(input_tensor):
            parts[rank].copy_(input_tensor)
        return _JoinedWork(works, (output_tensor, input_tensor)) if async_op else _JoinedWork(works, ()).wait()


def _exchange_all(send: Sequence[Tensor], into: Mapping[int, Tensor], group: ProcessGroup, tag: int) -> list[dist.Work]:
    """Send a tensor to every other rank, by its index, and receive one from each. Return the works to wait for."""
    size, rank = group.size(), group.rank()
    works: list[dist.Work | None] = []
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        works.append(dist.isend(send[to], group=group, group_dst=to, tag=tag))
        works.append(dist.irecv(into[source], group=group, group_src=source, tag=tag))
    return [work for work in works if work is not None]


class _JoinedWork(dist.Work):
    """Several works as one; keeps their tensors alive."""

    def __init__(self, works: list[dist.Work], held: tuple[Tensor, ...]):
        super().__init__()
        self.works, self.held = works, held

    def wait(self, *timeout: object) -> None:  # type: ignore[override]
        for work in self.works:
            work.wait()
        self.works, self.held = [], ()


class ShardScatter(_NewBuffers):
    """Reduce-scatters gradients. A sum is computed later: before the next group's, or in `finish`.

    `output_tensor` is a view of a future `.grad`; it is valid after `finish`.
    """

    def __init__(self, replicas: ProcessGroup | None):
        self.replicas = replicas
        """The ranks with replicas of this rank's shards, or None."""
        self.others: dict[str, ProcessGroup | None] = {}
        """The same for parts on other ranks than the rest, by the name of their group."""
        self.last, self.tag = True, 0
        self.open_sum: tuple[_JoinedWork, Tensor, list[Tensor], ProcessGroup | None] | None = None
        """(messages, output of their sum, tensors to add, group of replicas) of the open sum."""
        self.sums: list[dist.Work] = []

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        self.reduce_open()
        size, rank = group.size(), group.rank()
        self.tag = self.tag % GRADIENT_TAG_BASE + 1
        parts, into = input_tensor.chunk(size), [output_tensor]
        into += [torch.empty_like(output_tensor) for _ in range(size - 2)]  # the first part arrives in the output
        received = {(rank - k) % size: part for k, part in enumerate(into, 1)}
        works = _JoinedWork(_exchange_all(parts, received, group, GRADIENT_TAG_BASE + self.tag), (input_tensor,))
        self.open_sum = works, output_tensor, [parts[rank], *into[1:]], self.find_replicas(group)

    def find_replicas(self, group: ProcessGroup) -> ProcessGroup | None:
        """Return the ranks with replicas of the parts on this group's ranks."""
        return self.others.get(group.group_name, self.replicas)

    def reduce_open(self) -> None:
        """Compute the open sum, and start its all-reduce over replicas."""
        if self.open_sum is None:
            return
        (works, output, parts, copies), self.open_sum = self.open_sum, None
        works.wait()
        for part in parts:
            output += part
        if copies is not None and self.last:
            work = dist.all_reduce(output, group=copies, async_op=True)
            assert work is not None
            self.sums.append(work)

    def finish(self) -> None:
        self.reduce_open()
        for work in self.sums:
            work.wait()
        self.sums = []


class DeviceScatter(ShardScatter):
    """Reduce-scatters gradients on a device with streams, where the library's collectives overlap.

    Parts are reduced on one stream of FSDP2's. They are all-reduced over replicas on another stream, at the same time as the next
    group's parts.
    """

    def __init__(self, replicas: ProcessGroup | None):
        super().__init__(replicas)
        self.pending: ProcessGroup | None = None
        """The replicas over which the last reduced part still has to be all-reduced."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        REDUCE_SCATTER(output_tensor, input_tensor, group=group)
        self.pending = self.find_replicas(group) if self.last else None

    def sum_over_replicas(self, part: Tensor) -> None:
        """All-reduce a part over replicas. FSDP2 calls it after each reduce-scatter, on its stream for all-reduces."""
        copies, self.pending = self.pending, None
        if copies is None:
            return
        if part.is_cuda:  # allocated on the other stream, which may free it while this stream uses it
            part.record_stream(torch.cuda.current_stream(part.device))
        dist.all_reduce(part, group=copies)

    def reduce_open(self) -> None:
        """Do nothing: the stream orders the work."""


def compute_padded_size(shape: Sequence[int], ranks: int, dim: int = 0) -> int:
    """Elements of the largest part of a tensor that is sharded along a dim."""
    return chunk_range(shape[dim], ranks, 0)[1] * math.prod(n for d, n in enumerate(shape) if d != dim)


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that shard a parameter, the ranks with replicas of the same shard, and the sharded dim."""

    group: ProcessGroup
    replicas: ProcessGroup | None
    """None if no other rank has the same shard."""
    dim: int = 0


class FsdpRuntime:
    """The sharded model of one rank: called around backward, with the tensors that the optimizer updates.

    `own` are this rank's shards as plain parameters that share storage with FSDP2's. Element-wise optimizers need no more, and
    avoid the overhead of DTensor. Scalars cannot be sharded: they stay full, and their gradients are reduced in one small
    message.
    """

    is_rounding = False

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        attributes: Mapping[str, ParameterAttributes],
        scatter: ShardScatter,
        *,
        main_group: ShardGroup,
        expert_groups: Mapping[str, ShardGroup],
        same_slices: ProcessGroup | None,
    ):
        """`attributes`: attributes of this rank's own parameters, by name. `expert_groups`: placement of the expert parameters
        that are sharded over other ranks than the rest. `same_slices`: the ranks that reduce gradients of tensors which are not sharded; None:
        all ranks."""
        self.model, self.zero, self.scatter = model, plan.zero_stage, scatter
        self.main_group, self.expert_groups, self.same_slices, self.pipelined = main_group, expert_groups, same_slices, plan.pp > 1
        from torch.distributed.fsdp import FSDPModule

        watch = torch.compiler.disable(self._watch_parameters) if plan.compile else self._watch_parameters
        self.modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        named = {n: p for n, p in model.named_parameters() if n in attributes}
        self.sharded = {n: p for n, p in named.items() if is_shardable(p.shape)}
        self.scalars = [p for p in named.values() if not is_shardable(p.shape) and p.requires_grad]
        self.attributes = {n: own for n, own in attributes.items() if own and n in self.sharded}
        self.own = {n: self._make_part(n, p) if n in self.sharded else p for n, p in named.items()}
        self.trained = [n for n, p in self.sharded.items() if p.requires_grad]
        self.used: set[str] = set()
        self.gathered: dict[str, Tensor] = {}
        """The gathered parameter to which backward assigns the gradient of a shard. Set when it is first gathered."""
        self.untrained: set[FSDPModule] = set()
        """Modules without parameters that the current phase trains: their gradients are not reduced."""
        self.is_accumulating = False
        """Whether gradients of micro-batches are accumulated on this rank, without a reduction."""
        self.idle = False
        """Whether this rank's results of this step do not count, as if it used no parameter."""
        self.partial_gradients: dict[str, Tensor] = {}
        """Reduced gradients of the step's micro-batches before the last."""
        for module in self.modules:
            module.register_forward_pre_hook(watch)

    def _make_part(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """Make the optimizer's parameter for a sharded parameter."""
        if name not in self.attributes:
            return nn.Parameter(local_tensor(parameter), parameter.requires_grad)
        at, shape = self.find_group(name), self.attributes[name].shape
        mine = compute_shard_ranges(full_ranges(shape), at.dim, at.group.size(), at.group.rank())
        self.attributes[name].apply_to(parameter)
        return self.attributes[name].make_parameter(local_tensor(parameter), parameter.requires_grad, mine)

    def _watch_parameters(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Record which parameters get a gradient. A parameter that no rank used must have none, as on one device."""
        if "_noting" in module.__dict__:
            return
        found = {id(p): n for n, p in self.model.named_parameters() if not hasattr(p, "placements")}
        for parameter in module.parameters() if self.attributes else ():
            if (name := found.get(id(parameter))) in self.attributes:
                self.attributes[name].apply_to(parameter)
        if not torch.is_grad_enabled():
            return
        watched = 0
        for parameter in module.parameters():
            name = found.get(id(parameter))
            if name in self.sharded and parameter.requires_grad:
                add = make_wide_sum(self.modules[0], parameter)
                parameter.register_post_accumulate_grad_hook(lambda _, name=name, add=add: self._mark_used(name, add))
                self.gathered[name] = parameter
                watched += 1
        module.__dict__["_noting"] = watched

    def _mark_used(self, name: str, add: Callable[[], None]) -> None:
        if self.is_accumulating:  # else FSDP2 accumulates, after each backward pass of the module
            add()
        if not self.idle or name in self.expert_groups:  # an expert also computes tokens of other ranks
            self.used.add(name)

    def select_trained(self, has: Callable[[str], bool]) -> None:
        """Let only the parameters get gradients for which `has` is true (see the phases of a job)."""
        named = {id(p): n for n, p in self.sharded.items()}
        held = {m: [named[id(p)] for p, _ in list_sharded_params(m) if id(p) in named] for m in self.modules}
        self.untrained = {m for m, names in held.items() if not any(map(has, names))}

    def list_gathered(self, has: Callable[[str], bool]) -> list[Tensor]:
        """List the tensors that backward must reach for those parameters to get gradients, if a forward pass has used them."""
        scalars = (p for n, p in self.own.items() if n not in self.sharded and p.requires_grad and has(n))
        return [*(p for n, p in self.gathered.items() if has(n)), *scalars]

    def find_group(self, name: str) -> ShardGroup:
        """Return the ranks that shard a parameter."""
        return self.expert_groups.get(name, self.main_group)

    def get_padded_size(self, name: str) -> int:
        """Return the elements of the largest shard of a parameter."""
        where = self.find_group(name)
        return compute_padded_size(self.sharded[name].shape, where.group.size(), where.dim)

    def begin(self, last: bool, idle: bool) -> None:
        """Start a micro-batch, before its forward pass. `last`: its backward ends the step.

        In a pipeline: called before the first pass of the step. Called again with `last` after all backward passes, whose
        gradients were accumulated until then.
        """
        self._store_gradients()
        self.idle = idle
        if self.pipelined:
            self._set_accumulating(not last)
            return
        self.scatter.last = last and not self.partial_gradients
        for module in self.modules:
            sums = (last or self.zero > 1) and module not in self.untrained
            module.set_requires_gradient_sync(sums, recurse=False)
            module.set_reshard_after_backward(last or self.zero > 2, recurse=False)

    def _store_gradients(self) -> None:
        """Store the reduced gradients of the previous micro-batches."""
        self.scatter.finish()
        for name, parameter in self.sharded.items():
            if parameter.grad is not None:
                gradient, parameter.grad = local_tensor(parameter.grad), None
                if name in self.partial_gradients:
                    self.partial_gradients[name] += gradient
                else:
                    self.partial_gradients[name] = gradient

    def _set_accumulating(self, on: bool) -> None:
        root, self.is_accumulating = self.modules[0], on
        root.set_is_last_backward(not on)
        for module in self.modules:
            module.set_requires_gradient_sync(not on, recurse=False)
            module.set_reshard_after_backward(not on or (self.zero > 2 and module is not root), recurse=False)
        if not on:
            end_backward(root)

    def arm(self, step_row: Tensor | None) -> None:
        """Do nothing: FSDP2 reduces the gradients of a unit after its backward."""

    def finish(self) -> None:
        """Assign the reduced gradient of every shard: zeros if no rank used the parameter."""
        self.scatter.finish()
        self._assign_gradients()
        if self.scalars:
            none = torch.zeros(2, dtype=torch.float64, device=self.scalars[0].device)
            mine = self._list_scalar_gradients()
            rows = torch.stack(
                [none if g is None else torch.stack([g.double().sum(), none[0] + 1]) for g in mine]
            )  # an empty tensor has no item
            dist.all_reduce(rows, group=self.same_slices)
            there = any_rank_has([g is not None for g in mine], rows[:, 1])
            for parameter, value, has in zip(self.scalars, rows[:, 0], there):
                parameter.grad = value.to(parameter.dtype).expand_as(parameter).clone() if has else None
        self.idle = False

    def list_buffers(self) -> list[Tensor]:
        """Return nothing: gradients are allocated in each step."""
        return []

    def _list_scalar_gradients(self) -> list[Tensor | None]:
        """List the gradients of tensors that are not sharded; None if no counted sample of this rank used them."""
        return [None if self.idle else p.grad for p in self.scalars]

    def _assign_gradients(self) -> None:
        late: dict[ProcessGroup | None, list[tuple[Tensor, int]]] = {}
        for name in self.trained:
            parameter, own = self.sharded[name], self.own[name]
            gradient = None if parameter.grad is None else local_tensor(parameter.grad)
            if name in self.partial_gradients:
                gradient = self.partial_gradients[name] if gradient is None else gradient.add_(self.partial_gradients[name])
                late.setdefault(self.find_group(name).replicas, []).append((gradient, self.get_padded_size(name)))
            own.grad, parameter.grad = gradient, None
        self.partial_gradients = {}
        for copies, sums in late.items():
            if copies is not None:
                flat = torch.cat([F.pad(g.reshape(-1), (0, n - g.numel())) for g, n in sums])
                dist.all_reduce(flat, group=copies)
                for (gradient, _), part in zip(sums, flat.split([n for _, n in sums])):
                    gradient.copy_(part[: gradient.numel()].view_as(gradient))

    def reshard(self) -> None:
        """Free gathered parameters: after the shards have changed, or to save memory."""
        for module in self.modules:
            module.reshard()


def copy_views(module: nn.Module, args: tuple[Any, ...], output: object) -> object:
    """Clone outputs that are views: if the model's code changes a view in place, FSDP2's hook on it is lost."""
    dataclass_leaves(output)  # registers dataclasses, which are leaves to torch's trees before
    return tree_map_only(Tensor, lambda t: t.clone() if t.requires_grad and is_view(t) else t, output)


def keep_arguments(module: nn.Module) -> None:
    """Let a module's code get the caller's own lists, dicts and objects, which it may change.

    FSDP2's hook replaces tensors of the inputs, in new lists and dicts. Equal tensors stay one object, because the code may
    compare them by identity (`key is value` in torch's attention).
    """
    calls: list[tuple[Any, dict[int, Tensor]]] = []
    """The arguments of each running call, and the original tensor for the id of each replaced one."""

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(((args, kwargs), {}))

    def restore(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, owners = calls[-1]
        own, made = tree_flatten(given)[0], tree_flatten((args, kwargs))[0]
        if len(own) != len(made):
            return None  # another hook replaced the module's arguments
        pairs = [(old, new) for old, new in zip(own, made) if isinstance(old, Tensor) and isinstance(new, Tensor)]
        first = {id(old): new for old, new in reversed(pairs)}
        owners.update((id(first[id(old)]), old) for old, _ in pairs)
        return replace_by_identity(given, first)

    def finish(_: nn.Module, args: tuple[Any, ...], output: object) -> None:
        replace_by_identity(*calls.pop())

    module.register_forward_pre_hook(record, prepend=True, with_kwargs=True)
    module.register_forward_pre_hook(restore, with_kwargs=True)
    module.register_forward_hook(finish, always_call=True)


def replace_by_identity(value: object, table: Mapping[int, Tensor]) -> Any:
    """Replace tensors by those that `table` has for their ids. Lists, dicts and objects stay the same objects."""
    if isinstance(value, Tensor):
        return table.get(id(value), value)
    if isinstance(value, (list, deque)):
        for k, each in enumerate(value):
            value[k] = replace_by_identity(each, table)
    elif isinstance(value, dict):
        for key, each in value.items():
            value[key] = replace_by_identity(each, table)
    elif isinstance(value, tuple):
        found = [replace_by_identity(each, table) for each in value]
        changed = any(new is not old for new, old in zip(found, value))
        return value if not changed else type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    elif hasattr(value, "__dict__") and not any(leaf is value for leaf in dataclass_leaves(value)):  # an object that torch's trees traverse
        replace_by_identity(vars(value), table)
    return value
