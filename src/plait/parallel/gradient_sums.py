"""The sums of a step on ranks that are not all alike: stages, slices, stretches, experts.

Copies and shards sum gradients over the ranks that hold the same part of the model (`inner`). What is left is done
here, after them: gradients of which a rank has only a part of the sum, because other stages, slices or stretches use
the same parameter; the norm, in which every part of every parameter counts once; and the row of numbers that all
ranks must know.
"""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.config.keys import WITHIN
from plait.parallel.built import Built, GradientReducer
from plait.parallel.data.buckets import Reducer
from plait.parallel.data.compressed import CompressedReducer
from plait.parallel.mesh import Mesh
from plait.parallel.spec import ShardPlan
from plait.tensors.collectives import directly, hosts_talk
from plait.tensors.norm import square_sum
from plait.tensors.transfers import any_has, upload


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


class CrossGroupSums:
    """What the engine calls around a step's passes. `names`: all trained parameters of the model, in its order.

    What is summed after replicas and shards, and how many ranks have the same part of a parameter, is in the table (`parallel/spec.py`).
    """

    def __init__(self, names: list[str], inner: GradientReducer | None, built: Built):
        self.names, self.own, self.everybody = names, built.own, built.mesh.group_or_none(*WITHIN)
        self.inner, self.shards = inner, built.shards
        self.copies = inner if isinstance(inner, (Reducer, CompressedReducer)) else None
        self.pipelined, self.plan = built.pipe is not None, built.plan
        self.late = late_sums(built.table, built.mesh, set(names))
        self.replicas = {n: built.table.replicas(n, built.mesh.at) for n in names if n in built.own}
        self.flagged: list[str] = [] if self.shards is None else names
        """Parameters of which a rank cannot tell alone whether any used them: where it has a part of each, there is a gradient."""
        self.step_row = self.row = torch.empty(0)
        self.work: dist.Work | None = None
        self.everywhere: ProcessGroup | None = None
        """Ranks of other replica groups that hold the same parts, in a step in which all groups sum their gradients."""
        self.elsewhere = set[str]()
        """Of those flagged, the ones that other replica groups used in such a step."""
        self.told: Callable[[Tensor], list[float]] = Tensor.tolist
        """How often each of some parameters got a gradient, from what all ranks of a group said together."""

    @property
    def idle(self) -> bool:
        """Whether this rank's samples weigh nothing: what sums its gradients over copies and shards knows it."""
        return self.inner is not None and self.inner.idle

    @idle.setter
    def idle(self, idle: bool) -> None:
        if self.inner is not None:
            self.inner.idle = idle

    def before(self, last: bool) -> None:
        """Before a micro-batch's forward pass: whether its backward ends the step. In a pipeline, before its end."""
        if self.shards is not None and self.pipelined:
            self.shards.hold(not last)
        elif self.inner is not None and not self.pipelined:
            self.inner.before(last)

    def after(self) -> None:
        """After a backward that does not end the step."""
        if self.inner is not None and not self.pipelined:
            self.inner.after()

    def arm(self, step_row: Tensor) -> None:
        """`step_row` is a row of numbers to sum over all ranks."""
        self.step_row = step_row
        if self.copies is not None and not self.pipelined:
            self.copies.arm(None)

    def finish(self) -> Tensor:
        """Sum gradients over copies, shards and whoever has a part of the sum; the summed row of the step, whose numbers are
        there once `norm` was asked for."""
        if isinstance(self.copies, CompressedReducer):  # what a copy sends is rounded once, when it has all of it
            self._partial()
            self.copies.settle()
        else:
            self._inner()
            self._partial()
        if self.everywhere is not None:
            self._add_up(self._trained(self.names), self.everywhere)
            self._used_elsewhere(self.everywhere)
        used = upload([float(self._used(n)) for n in self.flagged], self.step_row.device)
        self.row = torch.cat([self.step_row, self.square_of(self.names).reshape(1), used])
        self.work = dist.all_reduce(self.row, group=self.everybody, async_op=True)
        if self.shards is not None:
            self._forget_unused()
            self.shards.used.clear()
            self.elsewhere.clear()
        return self.row[: len(self.step_row)]

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

    def _inner(self) -> None:
        if self.shards is not None:
            self.shards.settle()
        elif self.copies is not None:
            (self.copies.settle if self.pipelined else self.copies.finish)()

    def _partial(self) -> None:
        for late in self.late:
            self._add_up(self._trained(late.names), late.group, late.means)

    def _wait(self) -> None:
        """What follows comes after the sum of the row; on a GPU its stream waits, and not the host."""
        if self.work is not None:
            self.work.wait()
            self.work = None

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

    def measure(self) -> None:
        """The norm anew: gradients were changed after `finish`. All ranks call it."""
        self._wait()
        squares = self.square_of(self.names).reshape(1)
        dist.all_reduce(squares, group=self.everybody)
        self.row[len(self.step_row)] = squares[0]

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
            there = has.tolist() if apart or bool(has.all()) else self.told(flat[-len(mine) :])
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

    def norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """The gradient norm over all ranks' parts, as `finish` found it: a float64 scalar on the device."""
        self._wait()
        return self.row[len(self.step_row)].sqrt()
