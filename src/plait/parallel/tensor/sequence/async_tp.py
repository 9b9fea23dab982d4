"""Asynchronous tensor parallelism: all-gather and reduce-scatter of sequence shards, fused with the matmuls of the
region.

At the start of a region, sequence shards are gathered and multiplied by the columns' weights. At its end, the row's
product is reduce-scattered. With `async_tp`, each of these is one operator of torch's symmetric memory on a GPU. It
multiplies the part of one rank while the next part is in transfer. A gather for several columns is one operator.

    columns   forward   all-gather + products          backward   product + reduce-scatter; the gathered rows are kept
    row       forward   product + reduce-scatter       backward   all-gather + product

On CPUs, and if ranks have unequal numbers of rows, plain collectives compute the same, so that a plan can be verified
on any machine. Only torch's own `nn.Linear` is fused; other columns and rows keep their own collectives.
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
from plait.parallel.tensor.sequence.runtime import (
    LazyGather,
    SequenceCollectives,
    SequenceParallelUnits,
    get_local_rows,
)
from plait.tensors.collectives import (
    FakeProcessGroup,
    all_gather_rows,
    copy_to_region,
    gather_partial,
    reduce_scatter_region,
    reduce_scatter_rows,
)
from plait.tensors.rows import Rows
from plait.tensors.torch_private import forward_hooks

FUSED_DEVICES: ContextVar[tuple[str, ...]] = ContextVar("fused", default=("cuda",))
"""Device types on which torch has these operators."""
RowLayout = tuple[int, Rows, ProcessGroup]
"""(dim of the sequence, rows of each rank, process group)."""


@cache
def load_symm_mem() -> Any:
    """Return torch's namespace with `fused_all_gather_matmul` and `fused_matmul_reduce_scatter`. They are not a stable
    API; a test covers them."""
    import torch.distributed.fsdp  # registers the operators

    return torch.ops.symm_mem


def can_fuse(x: Tensor, where: RowLayout) -> bool:
    """Return whether the fused operator applies: equal, consecutive rows per rank, on a device that supports it."""
    _, rows, group = where
    even = len(set(rows.sizes)) == 1 and rows == Rows.from_sizes(rows.sizes)
    return x.device.type in FUSED_DEVICES.get() and even and x.numel() > 0 and not isinstance(group, FakeProcessGroup)


def gather_matmul(x: Tensor, weights: Sequence[Tensor], where: RowLayout) -> tuple[Tensor, list[Tensor]]:
    """Gather all rows of `x` and multiply them by weights [in features, out features]. Not differentiable."""
    dim, rows, group = where
    if can_fuse(x, where):
        whole, products = load_symm_mem().fused_all_gather_matmul(x.contiguous(), list(weights), dim, group.group_name)
        return whole, products
    whole = all_gather_rows(x, dim, rows, group)
    return whole, [whole @ w for w in weights]


def matmul_reduce_scatter(pairs: Sequence[tuple[Tensor, Tensor]], where: RowLayout) -> Tensor:
    """Multiply tensors by weights, sum over pairs and ranks, and return this rank's rows. Not differentiable.

    If the operator is fused, several pairs are concatenated into one product.
    """
    dim, rows, group = where
    if can_fuse(pairs[0][0], where):
        x = pairs[0][0] if len(pairs) == 1 else torch.cat([x for x, _ in pairs], -1)
        weight = pairs[0][1] if len(pairs) == 1 else torch.cat([w for _, w in pairs])
        return load_symm_mem().fused_matmul_reduce_scatter(x.contiguous(), weight, "sum", dim, group.group_name)
    product = pairs[0][0] @ pairs[0][1]
    for x, weight in pairs[1:]:
        product = product + x @ weight
    return reduce_scatter_rows(product, dim, rows, group)


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of a weight [out features, in features] that multiplied x."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


class _ColumnsFunction(torch.autograd.Function):
    """Maps sequence shards to all rows and to the product of each column. All rows are an output too, so that the
    backward pass is differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: RowLayout, *weights: Tensor) -> Any:
        whole, products = gather_matmul(x, [w.t() for w in weights], where)
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
            of_x = _shard_gradient(pairs, of_whole, ctx.where)
        needed = zip(given, ctx.needs_input_grad[2:])
        return of_x, None, *(_weight_gradient(g, whole) if g is not None and needs else None for g, needs in needed)


def _shard_gradient(pairs: list[tuple[Tensor, Tensor]], of_whole: Tensor | None, where: RowLayout) -> Tensor | None:
    """Return the gradient of sequence shards, from the gradients of products and of all rows."""
    if of_whole is None and not torch.is_grad_enabled():
        return matmul_reduce_scatter(pairs, where) if pairs else None
    parts = [g @ w for g, w in pairs] + ([] if of_whole is None else [of_whole])
    dim, rows, group = where
    return reduce_scatter_region(sum(parts[1:], parts[0]), dim, rows, group) if parts else None


class _RowFunction(torch.autograd.Function):
    """Maps a row layer's input to this rank's rows of the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, where: RowLayout) -> Tensor:
        ctx.where = where
        ctx.save_for_backward(x, weight)
        return matmul_reduce_scatter([(x, weight.t())], where)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        (x, weight), grad = ctx.saved_tensors, grads[0]
        of_x, of_weight, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # double backward
            whole = gather_partial(grad, *ctx.where)
            product = whole @ weight
        else:
            whole, (product,) = gather_matmul(grad, [weight], ctx.where)
        return product if of_x else None, _weight_gradient(whole, x) if of_weight else None, None


def cast_for_autocast(t: Tensor) -> Tensor:
    """Cast a tensor as autocast would cast the input of a matmul."""
    kind = t.device.type
    mixed = torch.is_autocast_enabled(kind) and t.dtype is not torch.float64
    return t.to(torch.get_autocast_dtype(kind)) if mixed else t


def check_peer_access(device: torch.device, at: int, ranks: int) -> None:
    """Raise H015 if the GPUs of a tp group cannot access each other's memory. `at`: index of this rank in the group."""
    if device.type != "cuda":
        return
    first, seen = (device.index or 0) - at, torch.cuda.device_count()
    others = [i for i in range(first, first + ranks) if i != first + at]
    why = ""
    if first < 0 or first + ranks > seen:
        why = f"this process sees {seen} devices, which do not include all {ranks} ranks of tp"
    elif apart := [i for i in others if not torch.cuda.can_device_access_peer(first + at, i)]:
        why = f"device {first + at} cannot access the memory of device {apart[0]}"
    if why:
        fix = ("async_tp=false", f"tp={ranks} inside one machine whose GPUs have peer access")
        raise PlaitError(Problem("H015", "async_tp=true needs GPUs that can access each other's memory", why=why, fix=fix))


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module computes exactly like torch's `nn.Linear`, without hooks."""
    return type(module) is nn.Linear and not any(forward_hooks(module)) and "forward" not in vars(module)


class RegionCollectives(SequenceCollectives):
    """Gathers a lazy input of a region with the gradient rule of a region's start, if code reads its values."""

    def gather_full(self, x: Tensor, dim: int, rows: Rows) -> Tensor:
        return self.enter_region(x, dim, rows)


class FusedColumns:
    """The columns of a region. Their inputs are lazy (`LazyGather`), and the first column that is called gathers them.

    It also computes the other columns that had the same input in the last call.
    """

    def __init__(self, columns: Mapping[str, nn.Linear], units: SequenceParallelUnits):
        self.columns, self.units, self.collectives = columns, units, RegionCollectives(units.group)
        self.separate: set[str] = set()
        """Columns whose last input differed from that of the column before."""
        self.precomputed: dict[str, tuple[Tensor, Tensor]] = {}
        """By column: its expected input, and its precomputed output."""
        for name, column in columns.items():
            column.forward = _ColumnForward(self, name)

    @staticmethod
    def for_region(model: nn.Module, group: ColumnRowPair, units: SequenceParallelUnits) -> "FusedColumns | None":
        """Make the fused columns of a region. None if one of them is not a plain linear layer."""
        modules = {name: model.get_submodule(name) for name in group.columns}
        columns = {name: m for name, m in modules.items() if isinstance(m, nn.Linear) and is_plain_linear(m)}
        return FusedColumns(columns, units) if len(columns) == len(modules) else None

    def make_lazy(self, value: Tensor, dim: int) -> Tensor:
        """Wrap a sequence shard as a lazy tensor with the shape of all rows."""
        rows = self.units.get_row_layout(dim)[1]
        return LazyGather.from_shard(get_local_rows(value), dim, rows, self.collectives)

    def compute_product(self, name: str, x: Tensor) -> Tensor:
        """Return the output of a column for its input."""
        column = self.columns[name]
        if not isinstance(x, LazyGather) or x.gathered is not None:
            x = x.full_tensor() if isinstance(x, LazyGather) else copy_to_region(x, self.units.group)
            return F.linear(x, column.weight, column.bias)
        if name in self.precomputed:
            given, made = self.precomputed.pop(name)
            if given is x:
                return self._add_bias(column, made)
            self.separate.add(name)
        together = [name] if name in self.separate else [n for n in self.columns if n == name or n not in self.separate]
        weights = [cast_for_autocast(self.columns[n].weight) for n in together]
        _, *products = _ColumnsFunction.apply(cast_for_autocast(x.local), (x.shard_dim, x.rows, self.units.group), *weights)
        made = dict(zip(together, products))
        self.precomputed |= {n: (x, made[n]) for n in together if n != name}
        return self._add_bias(column, made[name])

    def _add_bias(self, column: nn.Linear, made: Tensor) -> Tensor:
        return made if column.bias is None else made + cast_for_autocast(column.bias)


class _ColumnForward:
    """Forward of a column-parallel layer: gathers its input with the fused operator."""

    def __init__(self, columns: FusedColumns, name: str):
        self.columns, self.name = columns, name

    def __call__(self, input: Tensor) -> Tensor:
        return self.columns.compute_product(self.name, input)


class FusedRow:
    """The forward of a row layer that returns this rank's rows of the sum. Each rank adds the bias to its own rows."""

    def __init__(self, row: nn.Linear, dim: int, units: SequenceParallelUnits):
        self.row, self.dim, self.units = row, dim, units
        row.forward = self

    def __call__(self, input: Tensor) -> Tensor:
        made = _RowFunction.apply(cast_for_autocast(input), cast_for_autocast(self.row.weight), self.units.get_row_layout(self.dim))
        return self.units.pose_as_full(made if self.row.bias is None else made + cast_for_autocast(self.row.bias), self.dim)
