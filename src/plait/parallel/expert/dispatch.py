"""Rows that travel to the ranks that hold their experts, and back: all-to-all with uneven counts.

Every rank of a group knows for each expert of a layer which of its rows go there. The ranks tell each other how many,
exchange the rows, compute with the experts they hold, and send the results back in the order in which they came. The
backward pass is the same journey in the other direction, so an expert's gradient is the sum over the rows of all ranks
and nothing has to be summed or divided afterwards (see `parallel/expert/strategy.py`).

All of these are collectives: every rank must come to each of them, in the same order, also one that has no row for any
expert or gets none, also when the forward pass is computed again in backward. The pieces here see to that: what leaves
and what arrives can always be differentiated, and nothing that arrived is left out of the graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from plait.tensors.collectives import host_or
from plait.tensors.rows import Rows
from plait.tensors.transfers import upload

Serve = Callable[[Tensor, list[int | None]], Tensor]
"""(rows sorted by expert, how many are for each of this rank's experts; None: nobody called it) -> a row for each."""


@dataclass(frozen=True)
class ExpertPlacement:
    """How the experts of one layer lie on the ranks of a group: rank after rank, sizes differ by at most one."""

    group: ProcessGroup
    experts: int

    @property
    def rows(self) -> Rows:
        """Which experts each rank has."""
        return Rows.even(self.experts, self.group.size())

    @property
    def mine(self) -> range:
        """The experts of this rank."""
        ((first, length),) = self.rows.ranks[self.group.rank()]
        return range(first, first + length)


def through(rows: Tensor, counts: list[int | None], way: ExpertPlacement, serve: Serve) -> Tensor:
    """A result for each row, from the rank that has the row's expert; in the order of the rows.

    rows [n, …], sorted by expert; `counts`: how many belong to each expert of the layer, None where there was no call.
    """
    mine = len(way.mine)
    asked = _counts(counts, way, rows.device)
    given = [sum(n or 0 for n in counts[first : first + length]) for ((first, length),) in way.rows.ranks]
    taken = [sum(max(n, 0) for n in row) for row in asked]
    arrived = travel(rows, given, taken, way.group)
    order = numbered([max(n, 0) for row in asked for n in row], rows.device).remainder(mine).argsort(stable=True)
    called = [[row[e] for row in asked if row[e] >= 0] for e in range(mine)]
    results = serve(arrived.index_select(0, order), [sum(c) if c else None for c in called])
    results = results if len(results) else tied(results, arrived)
    return travel(results.index_select(0, order.argsort()), taken, given, way.group)


def numbered(counts: Sequence[int], device: torch.device) -> Tensor:
    """0 as often as the first count says, then 1 as often as the second, and so on: on the device, without a wait for it."""
    repeats = upload(counts, device, torch.int64)
    return torch.arange(len(counts), device=device).repeat_interleave(repeats, output_size=sum(counts))


def _counts(counts: list[int | None], way: ExpertPlacement, device: torch.device) -> list[list[int]]:
    """Of each rank: how many rows it has for each expert of this rank; −1 where it did not call it. The hosts tell each other, where
    they can: all of them know theirs, and no device is waited for."""
    device = host_or(device, way.group)
    sizes, mine = list(way.rows.sizes), len(way.mine)
    sent = torch.tensor([-1 if n is None else n for n in counts], dtype=torch.int64, device=device)
    received = torch.empty(mine * len(sizes), dtype=torch.int64, device=device)
    dist.all_to_all_single(received, sent, [mine] * len(sizes), sizes, group=way.group)
    return received.view(len(sizes), mine).tolist()


def travel(rows: Tensor, given: list[int], taken: list[int], group: ProcessGroup) -> Tensor:
    """Rows [n, …] sent to the ranks of the group, `given[r]` to rank r, in order; of rank r come `taken[r]`."""
    needed = torch.is_grad_enabled() and not rows.requires_grad
    anchor = torch.zeros((), requires_grad=needed)  # so that backward comes here on every rank, and once
    return _Travel.apply(rows, anchor, given, taken, group)


def tied(result: Tensor, *others: Tensor) -> Tensor:
    """`result`, from which backward also comes to the `others`, with zeros."""
    return _Tied.apply(result, *others)


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, anchor: Tensor, given: list[int], taken: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.way = given, taken, group
        ctx.save_for_backward(anchor.new_empty(0))  # a recomputation comes as far as this on every rank
        return moved(rows, given, taken, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        _ = ctx.saved_tensors  # and on every rank it happens before the gradients travel
        given, taken, group = ctx.way
        return moved(grads[0], taken, given, group), None, None, None, None


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(o.shape, o.dtype, o.device) for o in others]
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        return grads[0], *(torch.zeros(s, dtype=d, device=where) for s, d, where in ctx.others)


def moved(rows: Tensor, given: list[int], taken: list[int], group: ProcessGroup) -> Tensor:
    """`travel`, not differentiated."""
    received = rows.new_empty([sum(taken), *rows.shape[1:]])
    dist.all_to_all_single(received, rows.contiguous(), taken, given, group=group)
    return received
