"""Asynchronous tensor parallelism: gathers and scattered sums of stretches in one operator with the products beside them.

Where a region begins, stretches are gathered and multiplied by the columns' weights; where it ends, the row's product is
summed and each rank gets its rows. With `async_tp` each of these is one operator of torch's symmetric memory on a GPU:
the part of one rank is multiplied while the next is on its way. A gather for several columns is one operator for all.

    columns   forward   all-gather + products          backward   product + reduce-scatter; the gathered rows are kept
    row       forward   product + reduce-scatter       backward   all-gather + product

Elsewhere (processors, ranks with unlike numbers of rows) the same is computed by plain collectives, so that a plan is
proved on any machine. Only torch's own `nn.Linear` takes part; other columns and rows keep collectives of their own.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from plait.config.errors import PlaitError, Problem
from plait.model.slices import ColumnRowPair
from plait.parallel.tensor.sequence.runtime import LazyGather, SequenceCollectives, SequenceParallelUnits, rows_of
from plait.tensors.collectives import Absent, enter, gather_partial, gathered, scatter_sum, sum_part
from plait.tensors.rows import Rows
from plait.tensors.torch_private import hooks_of

FUSED: ContextVar[tuple[str, ...]] = ContextVar("fused", default=("cuda",))
"""Kinds of devices on which torch has these operators."""
Where = tuple[int, Rows, ProcessGroup]
"""The dim of the sequence, who has which rows of it, and the ranks."""


@cache
def symm_mem() -> Any:
    """`fused_all_gather_matmul` and `fused_matmul_reduce_scatter` of symmetric memory. Torch does not promise them: a test shows what is
    expected of both."""
    import torch.distributed.fsdp  # registers them

    return torch.ops.symm_mem


def fused(x: Tensor, where: Where) -> bool:
    """Whether one operator can do it: every rank has as many rows, one after another, on a device that has the operator."""
    _, rows, group = where
    even = len(set(rows.sizes)) == 1 and rows == Rows.of(rows.sizes)
    return x.device.type in FUSED.get() and even and x.numel() > 0 and not isinstance(group, Absent)


def gathered_products(x: Tensor, weights: Sequence[Tensor], where: Where) -> tuple[Tensor, list[Tensor]]:
    """All rows of `x`, and their products with each of the weights, [features in, features out]. Not differentiated."""
    dim, rows, group = where
    if fused(x, where):
        whole, products = symm_mem().fused_all_gather_matmul(x.contiguous(), list(weights), dim, group.group_name)
        return whole, products
    whole = gathered(x, dim, rows, group)
    return whole, [whole @ w for w in weights]


def summed_product(pairs: Sequence[tuple[Tensor, Tensor]], where: Where) -> Tensor:
    """This rank's rows of the sum over ranks and pairs of a tensor's product with a weight. Not differentiated.

    Several pairs are one product of longer rows where one operator does it.
    """
    dim, rows, group = where
    if fused(pairs[0][0], where):
        x = pairs[0][0] if len(pairs) == 1 else torch.cat([x for x, _ in pairs], -1)
        weight = pairs[0][1] if len(pairs) == 1 else torch.cat([w for _, w in pairs])
        return symm_mem().fused_matmul_reduce_scatter(x.contiguous(), weight, "sum", dim, group.group_name)
    product = pairs[0][0] @ pairs[0][1]
    for x, weight in pairs[1:]:
        product = product + x @ weight
    return sum_part(product, dim, rows, group)


def _of_weight(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of a weight [features out, features in] that has multiplied x."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


class _Columns(torch.autograd.Function):
    """Stretches -> all rows, and what each column makes of them. All rows are an output, so that what backward computes with
    them can be differentiated as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: Where, *weights: Tensor) -> Any:
        whole, products = gathered_products(x, [w.t() for w in weights], where)
        ctx.where = where
        ctx.save_for_backward(whole, *weights)
        ctx.set_materialize_grads(False)
        return whole, *products

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        whole, *weights = ctx.saved_tensors
        of_whole, *given = grads
        pairs = [(g, w) for g, w in zip(given, weights) if g is not None]
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = _stretch_gradient(pairs, of_whole, ctx.where)
        needed = zip(given, ctx.needs_input_grad[2:])
        return of_x, None, *(_of_weight(g, whole) if g is not None and needs else None for g, needs in needed)


def _stretch_gradient(pairs: list[tuple[Tensor, Tensor]], of_whole: Tensor | None, where: Where) -> Tensor | None:
    """The gradient of stretches, of those of what was made of all rows."""
    if of_whole is None and not torch.is_grad_enabled():
        return summed_product(pairs, where) if pairs else None
    parts = [g @ w for g, w in pairs] + ([] if of_whole is None else [of_whole])
    dim, rows, group = where
    return scatter_sum(sum(parts[1:], parts[0]), dim, rows, group) if parts else None


class _Row(torch.autograd.Function):
    """A row's share of a sum -> this rank's rows of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, where: Where) -> Tensor:
        ctx.where = where
        ctx.save_for_backward(x, weight)
        return summed_product([(x, weight.t())], where)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        (x, weight), grad = ctx.saved_tensors, grads[0]
        of_x, of_weight, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # a gradient that will be differentiated
            whole = gather_partial(grad, *ctx.where)
            product = whole @ weight
        else:
            whole, (product,) = gathered_products(grad, [weight], ctx.where)
        return product if of_x else None, _of_weight(whole, x) if of_weight else None, None


def narrowed(t: Tensor) -> Tensor:
    """What autocast would give a product."""
    kind = t.device.type
    mixed = torch.is_autocast_enabled(kind) and t.dtype is not torch.float64
    return t.to(torch.get_autocast_dtype(kind)) if mixed else t


def check_peers(device: torch.device, at: int, ranks: int) -> None:
    """H015 when the GPUs of a tp group cannot read each other's memory. `at`: the place of this rank among them."""
    if device.type != "cuda":
        return
    first, seen = (device.index or 0) - at, torch.cuda.device_count()
    others = [i for i in range(first, first + ranks) if i != first + at]
    why = ""
    if first < 0 or first + ranks > seen:
        why = f"the {ranks} ranks of tp are not all on devices that this process sees, which are {seen}"
    elif apart := [i for i in others if not torch.cuda.can_device_access_peer(first + at, i)]:
        why = f"device {first + at} cannot read the memory of device {apart[0]}"
    if why:
        fix = ("async_tp=false", f"tp={ranks} inside one machine whose GPUs have peer access")
        raise PlaitError(Problem("H015", "async_tp=true needs GPUs that read each other's memory", why=why, fix=fix))


def is_plain(module: nn.Module) -> bool:
    """Whether a module multiplies as torch's own `nn.Linear` does, and nothing looks at what it is given."""
    return type(module) is nn.Linear and not any(hooks_of(module)) and "forward" not in vars(module)


class Entering(SequenceCollectives):
    """What a region is given is gathered as where a region begins, if more than its shape is asked for."""

    def gathered(self, x: Tensor, dim: int, rows: Rows) -> Tensor:
        return self.entered(x, dim, rows)


class FusedColumns:
    """The columns of a region: what they are given are stretches that wait (`LazyGather`), and a column gathers them itself.

    The first that is called computes all that were given the same when they were called last.
    """

    def __init__(self, columns: Mapping[str, nn.Linear], units: SequenceParallelUnits):
        self.columns, self.units, self.by = columns, units, Entering(units.group)
        self.apart: set[str] = set()
        """Columns that were given something else than the one before."""
        self.ahead: dict[str, tuple[Tensor, Tensor]] = {}
        """What columns will be given, and what they will make of it."""
        for name, column in columns.items():
            column.forward = _Column(self, name)

    @staticmethod
    def of(model: nn.Module, group: ColumnRowPair, units: SequenceParallelUnits) -> "FusedColumns | None":
        """Those of a region; None where one of them is no plain linear layer."""
        modules = {name: model.get_submodule(name) for name in group.columns}
        columns = {name: m for name, m in modules.items() if isinstance(m, nn.Linear) and is_plain(m)}
        return FusedColumns(columns, units) if len(columns) == len(modules) else None

    def given(self, value: Tensor, dim: int) -> Tensor:
        """A stretch under the shape of all rows."""
        rows = self.units.where(dim)[1]
        return LazyGather.of(rows_of(value), dim, rows, self.by)

    def product(self, name: str, x: Tensor) -> Tensor:
        """What a column makes of what it is given."""
        column = self.columns[name]
        if not isinstance(x, LazyGather) or x.gathered is not None:
            x = x.whole() if isinstance(x, LazyGather) else enter(x, self.units.group)
            return F.linear(x, column.weight, column.bias)
        if name in self.ahead:
            given, made = self.ahead.pop(name)
            if given is x:
                return self._biased(column, made)
            self.apart.add(name)
        together = [name] if name in self.apart else [n for n in self.columns if n == name or n not in self.apart]
        weights = [narrowed(self.columns[n].weight) for n in together]
        _, *products = _Columns.apply(narrowed(x.local), (x.cut, x.rows, self.units.group), *weights)
        made = dict(zip(together, products))
        self.ahead |= {n: (x, made[n]) for n in together if n != name}
        return self._biased(column, made[name])

    def _biased(self, column: nn.Linear, made: Tensor) -> Tensor:
        return made if column.bias is None else made + narrowed(column.bias)


class _Column:
    """A column's forward."""

    def __init__(self, columns: FusedColumns, name: str):
        self.columns, self.name = columns, name

    def __call__(self, input: Tensor) -> Tensor:
        return self.columns.product(self.name, input)


class FusedRow:
    """A row's forward, whose output are this rank's rows of the sum. Each rank adds the bias to its own rows."""

    def __init__(self, row: nn.Linear, dim: int, units: SequenceParallelUnits):
        self.row, self.dim, self.units = row, dim, units
        row.forward = self

    def __call__(self, input: Tensor) -> Tensor:
        made = _Row.apply(narrowed(input), narrowed(self.row.weight), self.units.where(self.dim))
        return self.units.posed(made if self.row.bias is None else made + narrowed(self.row.bias), self.dim)
