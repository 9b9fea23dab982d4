"""The sums of a step's gradients over ranks: what is summed over whom, in which order, is in the table (`parallel/spec.py`).

A reducer lives from the first micro-batch of a step to its update:

    begin    before each micro-batch's forward pass
    ready    before the last backward pass: gradients are sent as soon as they are there, with the row of the step where it fits in
    finish   after it: every gradient is that of the global batch

Replicas and shards are summed first, by a `ReplicaSums`: in buckets or compressed (`data/buckets.py`), or into shards
(`fsdp/runtime.py`). Then come the late sums, of which a rank has only a part, because other stages, slices, stretches or experts use
the same parameter; and one small message with the row of the step and the norm, in which every part of every parameter counts once.

The numbers of a step that every rank must know: each rank packs its own, ranks sum them beside the gradients, and each unpacks the totals.

[Note: Row of a step]
The packed row is a float64 tensor on the rank's device, with the fields of `StepStats` in the order of their declaration. It travels with
the last gradients, since a message of its own would cost as much as a small model's gradients. A number that one rank alone knows, such as
the seconds that it computed, has a place for each rank, where the others add zero. So the totals hold all of them after one sum.
What computed the loss stays on the device: nothing here waits for it, and the host reads the totals later (`engine/stats_reader.py`).
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plait.config.keys import SAME_LOSS, WITHIN
from plait.config.plan import Plan
from plait.parallel.fsdp.runtime import FsdpRuntime
from plait.parallel.mesh import Mesh
from plait.parallel.spec import ShardPlan
from plait.tensors.collectives import directly, hosts_talk
from plait.tensors.norm import square_sum, total_norm
from plait.tensors.transfers import any_has, upload

Number = Tensor | float


@dataclass(frozen=True)
class WeightedSum:
    """What a job logged under one name: values times their weights, and the weights."""

    total: Number
    weight: float


@dataclass(frozen=True)
class RunSignals:
    """What ranks tell each other of the run. Of one rank, or summed over ranks."""

    stop: float
    """Ranks whose process was asked to stop."""
    disk_save: float
    """How far ranks are with the checkpoint that they are writing (`Checkpoints.word`)."""
    memory_save: float
    """How far they are with the snapshot in memory."""
    end: float = 0.0
    """Ranks with a callback that wants to end the run. Messages in checkpoints of before there were callbacks lack it."""


@dataclass
class StepStats:
    """Numbers of one step: of one rank before the sum, of all ranks after it. See [Note: Row of a step]."""

    loss: Number = 0.0
    """Weighted mean over the global batch; before the sum, this rank's part of it."""
    stop: float = 0.0
    """As `RunSignals.stop`."""
    samples: list[float] = field(default_factory=list)
    """Of each share of the batch. Ranks with the same samples each add their fraction."""
    busy: list[float] = field(default_factory=list)
    """Seconds that each rank computed."""
    waited: list[float] = field(default_factory=list)
    """Seconds that each rank waited for its samples."""
    room: list[float] = field(default_factory=list)
    """Samples that fit into each rank's memory; 0 if that is unknown. Empty without `batch_split=auto`."""
    disk_save: float = 0.0
    memory_save: float = 0.0
    end: float = 0.0
    new_names: float = 0.0
    """Ranks that logged a name which not all ranks know."""
    logged: list[WeightedSum] = field(default_factory=list)
    """Of each name that all ranks know, in the order of `StepLog.names`."""

    @classmethod
    def zeros(cls, plan: Plan) -> Self:
        """Stats with a place for everything that ranks of this plan sum; nothing is logged."""
        by_rank = [0.0] * plan.world
        room = by_rank if plan.batch_split == "auto" else []
        return cls(samples=[0.0] * plan.ranks, busy=[*by_rank], waited=[*by_rank], room=[*room])

    def add_losses(self, losses: Sequence[Tensor], plan: Plan, device: torch.device) -> None:
        """This rank's weighted losses of the step. Ranks that compute the same loss each add their fraction."""
        alike = plan.along(SAME_LOSS)
        if device.type == "cpu":
            self.loss = sum(float(loss) for loss in losses) / alike
        elif losses:
            self.loss = torch.stack(list(losses)).sum() / alike

    def add_rank(self, rank: int, plan: Plan, *, samples: int, busy: float, waited: float, room: int) -> None:
        self.samples[plan.share(rank)] = samples / (plan.pp * plan.along(SAME_LOSS))
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
        """The row: a float64 tensor on the device. Numbers that are there are copied on it, so the host does not wait."""
        numbers = list(self._numbers())
        if device.type == "cpu":
            return torch.tensor([float(number) for number in numbers], dtype=torch.float64)
        row = upload([0.0 if isinstance(number, Tensor) else number for number in numbers], device)
        for i, number in enumerate(numbers):
            if isinstance(number, Tensor):
                row[i].copy_(number)
        return row

    @classmethod
    def unpack(cls, row: Iterable[float], plan: Plan) -> Self:
        """The stats in the numbers of a packed row, whose end is what was logged."""
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
        """The loss in a packed row, a scalar on its device."""
        return row[0]

    def _numbers(self) -> Iterator[Number]:
        for one in fields(self):
            value = getattr(self, one.name)
            for number in value if isinstance(value, list) else [value]:
                yield from (number.total, number.weight) if isinstance(number, WeightedSum) else (number,)


class ReplicaSums(Protocol):
    """What sums gradients over the ranks that have the same part of the model and other samples."""

    @property
    def rounds(self) -> bool:
        """What a rank sends is rounded: the late sums are made before it, so that each gradient is rounded once."""
        ...

    def begin(self, last: bool, idle: bool) -> None:
        """Before a micro-batch's forward pass. `last`: its backward ends the step. `idle`: this rank's samples of the step weigh nothing."""
        ...

    def ready(self, step_row: Tensor | None) -> None:
        """The next backward is the last of the step. `step_row`: a row of numbers to sum with the gradients."""
        ...

    def finish(self) -> Tensor | None:
        """Give every parameter its summed gradient. The summed row, float64, where there was one."""
        ...

    def held(self) -> list[Tensor]:
        """What is kept from step to step."""
        ...


@dataclass(frozen=True)
class LateSum:
    """Gradients that a group of ranks sums after those of replicas and shards, in as few messages as they have number formats."""

    names: tuple[str, ...]
    means: frozenset[str]
    """Those of which all ranks have the same: their mean is taken."""
    group: ProcessGroup


def late_sums(table: ShardPlan, mesh: Mesh, names: Container[str]) -> list[LateSum]:
    """Those of a rank, in an order that is the same on all ranks. `names`: of the parameters that matter."""
    found = []
    for axes, only in table.late_views():
        group = mesh.group_or_none(*axes, only=only)
        if group is not None and group.size() > 1 and (not only or mesh.at[axes[0]] in only):
            sums = {n: r for n, s in table.specs.items() for r in s.grad if r.late and (r.axes, r.only(mesh.at)) == (axes, only) and n in names}
            found.append(LateSum(tuple(sums), frozenset(n for n, one in sums.items() if one.op == "mean"), group))
    return found


class GradientReducer:
    """Sums the gradients of one rank: in a job with phases, of one phase.

    `own`: this rank's parts of parameters, by name. `names`: of the trained parameters of the whole model, in its order. `sums`: None where
    no other rank has the same part. `shards`: what `sums` is too, where parameters are sharded.
    """

    def __init__(
        self, table: ShardPlan, mesh: Mesh, own: Mapping[str, nn.Parameter], names: list[str], *,
        sums: ReplicaSums | None, shards: FsdpRuntime | None,
    ):  # fmt: skip
        self.names, self.own, self.sums, self.shards = names, own, sums, shards
        self.whole = not table.plan.across and shards is None
        """Every rank has the whole model: it knows the norm alone, and `sums` carries the row of the step."""
        self.everybody = mesh.group_or_none(*WITHIN)
        self.groups = mesh.group("replica_groups") if table.plan.replica_groups > 1 else None
        """Ranks of other replica groups that hold the same parts."""
        self.late = late_sums(table, mesh, set(names))
        self.replicas = {n: 1 if self.whole else table.replicas(n, mesh.at) for n in names if n in own}
        """How many of the ranks that sum a norm have the same part; 1 where each knows it alone."""
        self.flagged: list[str] = [] if shards is None else names
        """Parameters of which a rank cannot tell alone whether any used them: where it has a part of each, there is a gradient."""
        self.step_row = self.row = torch.empty(0)
        self.work: dist.Work | None = None
        self.elsewhere = set[str]()
        """Of those flagged, the ones that other replica groups used in a step in which all groups sum their gradients."""
        self.counts: Callable[[Tensor], list[float]] = Tensor.tolist
        """How many ranks of a group have a gradient of each of some parameters, from the summed flags on the device."""

    def begin(self, last: bool, idle: bool) -> None:
        """Before a micro-batch's forward pass. `last`: its backward ends the step. `idle`: this rank's samples of the step weigh nothing."""
        if self.sums is not None:
            self.sums.begin(last, idle)

    def ready(self, step_row: Tensor) -> None:
        """The next backward is the last of the step; a pipeline is through with it. `step_row`: numbers to sum over all ranks, float64."""
        self.step_row = step_row
        if self.sums is not None:
            self.sums.ready(step_row if self.whole else None)

    def finish(self, over_groups: bool = False) -> Tensor:
        """Give every parameter its summed gradient, and none to those that nobody used; the summed row of the step, whose numbers are there
        once `norm` was asked for. `over_groups`: all replica groups sum theirs together in this step."""
        rounds = self.sums is not None and self.sums.rounds
        if rounds:
            self._sum_late()
        row = None if self.sums is None else self.sums.finish()
        if not rounds:
            self._sum_late()
        if self.whole:
            return self.step_row if row is None else row
        if over_groups and self.groups is not None:
            self._add_up(self._trained(self.names), self.groups)
            self._used_elsewhere(self.groups)
        used = upload([float(self._used(n)) for n in self.flagged], self.step_row.device)
        self.row = torch.cat([self.step_row, self.square_of(self.names).reshape(1), used])
        self.work = dist.all_reduce(self.row, group=self.everybody, async_op=True)
        if self.shards is not None:
            self._forget_unused()
            self.shards.used.clear()
            self.elsewhere.clear()
        return self.row[: len(self.step_row)]

    def norm(self) -> Tensor:
        """The norm of the whole model's summed gradients: a float64 scalar on the device."""
        if self.whole:
            return total_norm([p.grad for p in self.own.values() if p.grad is not None], self.step_row.device)
        self._wait()
        return self.row[len(self.step_row)].sqrt()

    def measure(self) -> None:
        """Measure the norm anew: gradients were changed after `finish`. All ranks call it."""
        if self.whole:
            return
        self._wait()
        squares = self.square_of(self.names).reshape(1)
        dist.all_reduce(squares, group=self.everybody)
        self.row[len(self.step_row)] = squares[0]

    def norms(self, groups: Iterable[Iterable[str]]) -> Tensor:
        """The norm of each of some groups of parameters, float64 of shape [groups] on the device. All ranks call it."""
        squares = torch.stack([self.square_of(names) for names in groups])
        if not self.whole:
            dist.all_reduce(squares, group=self.everybody)
        return squares.sqrt()

    def square_of(self, names: Iterable[str]) -> Tensor:
        """This rank's share of the squared norm of these gradients, on the device: each part counts once, however many ranks hold it."""
        alike: dict[int, list[Tensor]] = {}
        for name in names:
            gradient = self.own[name].grad if name in self.own else None
            if gradient is not None:
                alike.setdefault(self.replicas[name], []).append(gradient)
        device = self.step_row.device
        shares = [square_sum(found, device) / count for count, found in alike.items()]
        return torch.stack(shares).sum() if shares else square_sum((), device)

    def held(self) -> list[Tensor]:
        """What is kept from step to step."""
        return [] if self.sums is None else self.sums.held()

    def _forget_unused(self) -> None:
        """Under `fsdp` a parameter that nobody used has a gradient of zeros: take it away. Only the others know of what this rank
        did not use."""
        has = [n not in self.own or self._used(n) for n in self.flagged]
        if all(has):
            return
        self._wait()
        for name, there in zip(self.flagged, any_has(has, self.row[len(self.step_row) + 1 :])):
            if not there:
                self.own[name].grad = None

    def _sum_late(self) -> None:
        for late in self.late:
            self._add_up(self._trained(late.names), late.group, late.means)

    def _wait(self) -> None:
        """What follows comes after the sum of the row; on a GPU its stream waits, and not the host."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def _used(self, name: str) -> bool:
        if self.shards is not None and name in self.shards.sharded:
            return name in self.shards.used or name in self.elsewhere
        return name in self.own and self.own[name].grad is not None

    def _add_up(self, names: list[str], group: ProcessGroup, means: Container[str] = ()) -> None:
        """Sum over a group the gradients of some parameters, one message per number format; those nobody has stay None. `means`: those
        of which the ranks have the same.

        Which there are is told behind the gradients, or by the hosts, where that saves them waiting for a device.
        """
        formats = dict.fromkeys(self.own[n].dtype for n in names)
        for dtype in formats:
            mine = [n for n in names if self.own[n].dtype == dtype]
            sizes = [self._size(n) for n in mine]
            flat = torch.zeros(sum(sizes) + len(mine), dtype=dtype, device=self.own[mine[0]].device)
            for name, part, flag in zip(mine, flat.split([*sizes, len(mine)]), flat[-len(mine) :]):
                gradient = self.own[name].grad
                if gradient is not None:
                    part[: gradient.numel()].copy_(gradient.reshape(-1))
                    if name in means:
                        part.div_(group.size())
                    flag.fill_(1.0)
            has = torch.tensor([float(self.own[n].grad is not None) for n in mine])
            apart = not directly(flat.device) and hosts_talk(group)
            if apart:
                dist.all_reduce(has, group=group)
            dist.all_reduce(flat, group=group)
            there = has.tolist() if apart or bool(has.all()) else self.counts(flat[-len(mine) :])
            for name, part, times in zip(mine, flat.split([*sizes, len(mine)]), there):
                parameter = self.own[name]
                parameter.grad = part[: parameter.numel()].view_as(parameter) if times else None

    def _trained(self, names: Iterable[str]) -> list[str]:
        return [n for n in names if n in self.own and self.own[n].requires_grad]

    def _used_elsewhere(self, group: ProcessGroup) -> None:
        used = upload([float(self._used(n)) for n in self.flagged], self.step_row.device)
        if self.flagged:
            dist.all_reduce(used, group=group)
            self.elsewhere = {n for n, times in zip(self.flagged, used.tolist()) if times}

    def _size(self, name: str) -> int:
        """Elements of a parameter in a message: shards of unequal ranks are padded to the largest."""
        if self.shards is not None and name in self.shards.sharded:
            return self.shards.size(name)
        return self.own[name].numel()
