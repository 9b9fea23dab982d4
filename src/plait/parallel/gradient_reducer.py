"""Reduces the gradients of a step over ranks. The table has the groups and the order (`parallel/spec.py`).

A reducer is used from the first micro-batch of a step to its update:

    begin    before each micro-batch's forward pass
    arm      before the last backward pass: gradients are sent as soon as they are ready, with the row of the step if it fits
    finish   after it: every gradient is that of the global batch

Replicas and shards are reduced first, by a `ReplicaSums`: in buckets or compressed (`parallel/data/buckets.py`), or into shards
(`parallel/fsdp/runtime.py`). The late sums follow: other stages, slices, sequence shards or experts use the same parameter, and each rank
has a part of its gradient. Last is one small message with the row of the step and the norm, in which every part of a parameter
counts once.

[Note: Row of a step]
Some statistics of a step are needed on all ranks. Each rank packs its own, ranks sum them with the gradients, and each unpacks
the totals. The packed row is a float64 tensor on the rank's device, with the fields of `StepStats` in the order of their
declaration. It is sent with the last gradients, since a separate message would cost as much as the gradients of a small model. A
value of one rank, such as its compute time, has an entry for each rank, to which the others add zero. So the totals have all
values after one sum. The loss stays on the device: nothing here waits for it, and the host reads the totals later
(`engine/stats_reader.py`).
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plait.config.keys import INNER_AXES, SAME_LOSS
from plait.config.plan import Plan
from plait.parallel.fsdp.runtime import FsdpRuntime
from plait.parallel.mesh import Mesh
from plait.parallel.spec import ShardPlan
from plait.tensors.collectives import can_reduce_on_hosts, is_direct_exchange
from plait.tensors.norm import square_sum, total_norm
from plait.tensors.transfers import any_rank_has, upload_row

Number = Tensor | float


@dataclass(frozen=True)
class WeightedSum:
    """The values that a job logged under one name: their sum times weights, and the weights."""

    total: Number
    weight: float


@dataclass(frozen=True)
class RunSignals:
    """Signals that ranks exchange in a run: of one rank, or summed over ranks."""

    stop: float
    """Number of ranks whose process got a stop signal."""
    disk_save: float
    """Progress of the checkpoint that the ranks are writing (`Checkpoints.word`)."""
    memory_save: float
    """Progress of the snapshot in memory."""
    end: float = 0.0
    """Number of ranks with a callback that ends the run. Missing in checkpoints from before callbacks existed."""


@dataclass
class StepStats:
    """Statistics of one step: of one rank before the sum, of all ranks after it. See [Note: Row of a step]."""

    loss: Number = 0.0
    """Weighted mean over the global batch; before the sum, this rank's part of it."""
    stop: float = 0.0
    """As `RunSignals.stop`."""
    samples: list[float] = field(default_factory=list)
    """Samples of each local batch. Ranks with the same samples each add their fraction."""
    busy: list[float] = field(default_factory=list)
    """Seconds that each rank computed."""
    waited: list[float] = field(default_factory=list)
    """Seconds that each rank waited for its samples."""
    room: list[float] = field(default_factory=list)
    """Samples that fit into each rank's memory; 0 if unknown. Empty without `batch_split=auto`."""
    disk_save: float = 0.0
    memory_save: float = 0.0
    end: float = 0.0
    new_names: float = 0.0
    """Number of ranks that logged a name which is new to some ranks."""
    logged: list[WeightedSum] = field(default_factory=list)
    """The sum of each name that all ranks have, in the order of `StepLog.names`."""

    @classmethod
    def zeros(cls, plan: Plan) -> Self:
        """Make stats with an entry for every value that ranks of this plan sum; nothing is logged."""
        by_rank = [0.0] * plan.world
        room = by_rank if plan.batch_split == "auto" else []
        return cls(samples=[0.0] * plan.ranks, busy=[*by_rank], waited=[*by_rank], room=[*room])

    def add_losses(self, losses: Sequence[Tensor], plan: Plan, device: torch.device) -> None:
        """Add this rank's weighted losses of the step. Ranks that compute the same loss each add their fraction."""
        alike = plan.along(SAME_LOSS)
        if device.type == "cpu":
            self.loss = sum(float(loss) for loss in losses) / alike
        elif losses:
            self.loss = torch.stack(list(losses)).sum() / alike

    def add_rank(self, rank: int, plan: Plan, *, samples: int, busy: float, waited: float, room: int) -> None:
        self.samples[plan.dp_rank(rank)] = samples / (plan.pp * plan.along(SAME_LOSS))
        self.busy[rank], self.waited[rank] = busy, waited
        if self.room:
            self.room[rank] = float(room)

    @property
    def signals(self) -> RunSignals:
        return RunSignals(self.stop, self.disk_save, self.memory_save, self.end)

    @signals.setter
    def signals(self, signals: RunSignals) -> None:
        self.stop, self.end = signals.stop, signals.end
        self.disk_save, self.memory_save = signals.disk_save, signals.memory_save

    def pack(self, device: torch.device) -> Tensor:
        """Pack the row: a float64 tensor on the device. Values on the device are copied there, so the host does not wait."""
        numbers = list(self._iter_numbers())
        if device.type == "cpu":
            return torch.tensor([float(number) for number in numbers], dtype=torch.float64)
        row = upload_row([0.0 if isinstance(number, Tensor) else number for number in numbers], device)
        for i, number in enumerate(numbers):
            if isinstance(number, Tensor):
                row[i].copy_(number)
        return row

    @classmethod
    def unpack(cls, row: Iterable[float], plan: Plan) -> Self:
        """Unpack the values of a row, which ends with the logged values."""
        stats, numbers = cls.zeros(plan), iter(row)
        for one in fields(stats):
            empty = getattr(stats, one.name)
            if one.name == "logged":
                stats.logged = [WeightedSum(total, weight) for total, weight in zip(numbers, numbers)]
            else:
                setattr(stats, one.name, list(islice(numbers, len(empty))) if isinstance(empty, list) else next(numbers))
        return stats

    @staticmethod
    def loss_in(row: Tensor) -> Tensor:
        """Return the loss of a packed row, a scalar on its device."""
        return row[0]

    def _iter_numbers(self) -> Iterator[Number]:
        for one in fields(self):
            value = getattr(self, one.name)
            for number in value if isinstance(value, list) else [value]:
                yield from (number.total, number.weight) if isinstance(number, WeightedSum) else (number,)


class ReplicaSums(Protocol):
    """Reduces gradients over the ranks with the same part of the model and other samples."""

    @property
    def is_rounding(self) -> bool:
        """Whether messages are rounded. Then the late sums come first, so that each gradient is rounded once."""
        ...

    def begin(self, last: bool, idle: bool) -> None:
        """Start a micro-batch, before its forward pass. `last`: its backward ends the step. `idle`: this rank's samples of the step
        have weight zero."""
        ...

    def arm(self, step_row: Tensor | None) -> None:
        """Announce the last backward of the step. `step_row`: a row of values to sum with the gradients."""
        ...

    def finish(self) -> Tensor | None:
        """Assign the reduced gradient of every parameter. Return the summed row in float64, if there was one."""
        ...

    def list_buffers(self) -> list[Tensor]:
        """List the tensors that are kept between steps."""
        ...


@dataclass(frozen=True)
class LateSum:
    """Gradients that a group of ranks reduces after those of replicas and shards, in one message per number format."""

    names: tuple[str, ...]
    means: frozenset[str]
    """Names whose gradients are equal on all ranks: their mean is taken."""
    group: ProcessGroup


def list_late_sums(table: ShardPlan, mesh: Mesh, names: Container[str]) -> list[LateSum]:
    """List the late sums of a rank, in an order that is the same on all ranks. `names`: the parameters to include."""
    found = []
    for axes, only in table.list_late_groups():
        group = mesh.group_or_none(*axes, only=only)
        if group is not None and group.size() > 1 and (not only or mesh.coordinates[axes[0]] in only):
            sums = {
                n: r
                for n, s in table.specs.items()
                for r in s.grad_reductions
                if r.is_late and (r.axes, r.find_set(mesh.coordinates)) == (axes, only) and n in names
            }
            found.append(LateSum(tuple(sums), frozenset(n for n, one in sums.items() if one.op == "mean"), group))
    return found


class GradientReducer:
    """Reduces the gradients of one rank; in a job with phases, of one phase.

    `own`: this rank's parts of parameters, by name. `names`: names of the trained parameters of the full model, in its order.
    `sums`: None if no other rank has the same part. `shards`: equal to `sums` if parameters are sharded.
    """

    def __init__(
        self, table: ShardPlan, mesh: Mesh, own: Mapping[str, nn.Parameter], names: list[str], *,
        sums: ReplicaSums | None, shards: FsdpRuntime | None,
    ):  # fmt: skip
        self.names, self.own, self.sums, self.shards = names, own, sums, shards
        self.has_full_model = not table.plan.across and shards is None
        """Whether every rank has the full model: it computes the norm alone, and `sums` sends the row of the step."""
        self.norm_group = mesh.group_or_none(*INNER_AXES)
        self.outer_group = mesh.group("replica_groups") if table.plan.replica_groups > 1 else None
        """The ranks of other replica groups with the same parts."""
        self.late = list_late_sums(table, mesh, set(names))
        self.replicas = {n: 1 if self.has_full_model else table.count_replicas(n, mesh.coordinates) for n in names if n in own}
        """Name -> number of ranks in the sum of a norm with the same part; 1 if each computes the norm alone."""
        self.flagged: list[str] = [] if shards is None else names
        """Parameters whose use is not visible on one rank: with a part of each, a rank always has a gradient."""
        self.step_row = self.row = torch.empty(0)
        self.work: dist.Work | None = None
        self.used_elsewhere = set[str]()
        """Flagged parameters that other replica groups used, in a step in which all groups reduce their gradients."""
        self.counts: Callable[[Tensor], list[float]] = Tensor.tolist
        """(summed flags on the device) -> number of ranks of a group with a gradient, for each of some parameters."""

    def begin(self, last: bool, idle: bool) -> None:
        """Start a micro-batch, before its forward pass. `last`: its backward ends the step. `idle`: this rank's samples of the step
        have weight zero."""
        if self.sums is not None:
            self.sums.begin(last, idle)

    def arm(self, step_row: Tensor) -> None:
        """Announce the last backward of the step; in a pipeline, after it. `step_row`: values to sum over all ranks, float64."""
        self.step_row = step_row
        if self.sums is not None:
            self.sums.arm(step_row if self.has_full_model else None)

    def finish(self, over_groups: bool = False) -> Tensor:
        """Assign the reduced gradient of every parameter, and None if no rank used it. Return the summed row of the step.

        The values of the row are valid after `get_norm`. `over_groups`: all replica groups reduce their gradients together in
        this step.
        """
        rounds = self.sums is not None and self.sums.is_rounding
        if rounds:
            self._sum_late()
        row = None if self.sums is None else self.sums.finish()
        if not rounds:
            self._sum_late()
        if self.has_full_model:
            return self.step_row if row is None else row
        if over_groups and self.outer_group is not None:
            self._reduce_gradients(self._select_trained(self.names), self.outer_group)
            self._find_used_elsewhere(self.outer_group)
        used = upload_row([float(self._is_used(n)) for n in self.flagged], self.step_row.device)
        self.row = torch.cat([self.step_row, self.compute_square(self.names).reshape(1), used])
        self.work = dist.all_reduce(self.row, group=self.norm_group, async_op=True)
        if self.shards is not None:
            self._clear_unused()
            self.shards.used.clear()
            self.used_elsewhere.clear()
        return self.row[: len(self.step_row)]

    def get_norm(self) -> Tensor:
        """Return the norm of the full model's reduced gradients: a float64 scalar on the device."""
        if self.has_full_model:
            return total_norm([p.grad for p in self.own.values() if p.grad is not None], self.step_row.device)
        self._wait()
        return self.row[len(self.step_row)].sqrt()

    def remeasure_norm(self) -> None:
        """Compute the norm again, after gradients were changed. All ranks call it."""
        if self.has_full_model:
            return
        self._wait()
        squares = self.compute_square(self.names).reshape(1)
        dist.all_reduce(squares, group=self.norm_group)
        self.row[len(self.step_row)] = squares[0]

    def compute_norms(self, groups: Iterable[Iterable[str]]) -> Tensor:
        """Compute the norm of each of some groups of parameters: float64 of shape [groups], on the device. All ranks call it."""
        squares = torch.stack([self.compute_square(names) for names in groups])
        if not self.has_full_model:
            dist.all_reduce(squares, group=self.norm_group)
        return squares.sqrt()

    def compute_square(self, names: Iterable[str]) -> Tensor:
        """Compute this rank's part of the squared norm of these gradients, on the device. Each part counts once, however many ranks have it."""
        alike: dict[int, list[Tensor]] = {}
        for name in names:
            gradient = self.own[name].grad if name in self.own else None
            if gradient is not None:
                alike.setdefault(self.replicas[name], []).append(gradient)
        device = self.step_row.device
        shares = [square_sum(found, device) / count for count, found in alike.items()]
        return torch.stack(shares).sum() if shares else square_sum((), device)

    def list_buffers(self) -> list[Tensor]:
        """List the tensors that are kept between steps."""
        return [] if self.sums is None else self.sums.list_buffers()

    def _clear_unused(self) -> None:
        """Remove the gradients of parameters that no rank used, which are zeros under `fsdp`. Only the other ranks' flags show
        whether they used it."""
        has = [n not in self.own or self._is_used(n) for n in self.flagged]
        if all(has):
            return
        self._wait()
        for name, there in zip(self.flagged, any_rank_has(has, self.row[len(self.step_row) + 1 :])):
            if not there:
                self.own[name].grad = None

    def _sum_late(self) -> None:
        for late in self.late:
            self._reduce_gradients(self._select_trained(late.names), late.group, late.means)

    def _wait(self) -> None:
        """Wait for the sum of the row; on a GPU, its stream waits and not the host."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def _is_used(self, name: str) -> bool:
        if self.shards is not None and name in self.shards.sharded:
            return name in self.shards.used or name in self.used_elsewhere
        return name in self.own and self.own[name].grad is not None

    def _reduce_gradients(self, names: list[str], group: ProcessGroup, means: Container[str] = ()) -> None:
        """Reduce the gradients of some parameters over a group, one message per number format. A gradient that no rank has stays None.

        `means`: names whose gradients are equal on these ranks. Flags for existing gradients are sent behind the gradients, or by
        the hosts if this avoids a wait for the device.
        """
        formats = dict.fromkeys(self.own[n].dtype for n in names)
        for dtype in formats:
            mine = [n for n in names if self.own[n].dtype == dtype]
            sizes = [self._get_size(n) for n in mine]
            flat = torch.zeros(sum(sizes) + len(mine), dtype=dtype, device=self.own[mine[0]].device)
            for name, part, flag in zip(mine, flat.split([*sizes, len(mine)]), flat[-len(mine) :]):
                gradient = self.own[name].grad
                if gradient is not None:
                    part[: gradient.numel()].copy_(gradient.reshape(-1))
                    if name in means:
                        part.div_(group.size())
                    flag.fill_(1.0)
            has = torch.tensor([float(self.own[n].grad is not None) for n in mine])
            apart = not is_direct_exchange(flat.device) and can_reduce_on_hosts(group)
            if apart:
                dist.all_reduce(has, group=group)
            dist.all_reduce(flat, group=group)
            there = has.tolist() if apart or bool(has.all()) else self.counts(flat[-len(mine) :])
            for name, part, times in zip(mine, flat.split([*sizes, len(mine)]), there):
                parameter = self.own[name]
                parameter.grad = part[: parameter.numel()].view_as(parameter) if times else None

    def _select_trained(self, names: Iterable[str]) -> list[str]:
        return [n for n in names if n in self.own and self.own[n].requires_grad]

    def _find_used_elsewhere(self, group: ProcessGroup) -> None:
        used = upload_row([float(self._is_used(n)) for n in self.flagged], self.step_row.device)
        if self.flagged:
            dist.all_reduce(used, group=group)
            self.used_elsewhere = {n for n, times in zip(self.flagged, used.tolist()) if times}

    def _get_size(self, name: str) -> int:
        """Return the elements of a parameter in a message: unequal shards are padded to the largest."""
        if self.shards is not None and name in self.shards.sharded:
            return self.shards.get_padded_size(name)
        return self.own[name].numel()
