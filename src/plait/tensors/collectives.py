"""Differentiable collectives at the borders of a region that ranks compute in parts; all-gather of bytes; digests.

Inside such a region every rank runs the same code on its own part, such as a slice of the heads or a sequence shard. At its borders are the
functions here, each with its exact adjoint. They come in three pairs, and the backward of one is the other of its pair, so they can be
differentiated any number of times:

copy_to_region          identity;   backward: all-reduce of the gradients
reduce_from_region      all-reduce of partial sums;   backward: identity

scatter_to_region       full tensor -> this rank's part;   backward: all-gather
gather_from_region      part -> full tensor on every rank;   backward: this rank's part

gather_partial          part -> full tensor on every rank;   backward: reduce-scatter
reduce_scatter_region   partial sum -> this rank's part of the sum;   backward: all-gather

The code after a gather decides between the two. After `gather_from_region` every rank computes the same, so each has the full gradient
already; a sum would multiply it by the number of ranks. After `gather_partial` every rank computes a different part (its slice of the
heads), so each has a partial gradient only.

Each function is a collective, forward and backward: every rank of the group must call it, in the same order, also when backward
recomputes the forward pass. Replicated results are bit-equal on all ranks. A group of one rank communicates nothing. If no gradients are
needed they are plain collectives.

Further functions exchange bytes as tensors, so that received data is never unpickled, and compare bits between ranks by a 64-bit digest
per tensor.
"""

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.tensors.rows import Rows
from plait.tensors.torch_private import WrapperTensor, storage_key
from plait.tensors.transfers import upload_row

P = ParamSpec("P")
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""torch's all-gather and reduce-scatter of equal parts of one tensor, under the names that the installed version does not deprecate."""
DIRECT_DEVICES: ContextVar[tuple[str, ...]] = ContextVar("direct", default=("cpu",))
"""Device types on which messages have no order between each other. Parts are exchanged by sends and receives instead of torch's
collectives, and a pipeline posts its receives ahead."""


def is_direct_exchange(device: torch.device) -> bool:
    """Return whether ranks on such devices exchange parts by sends and receives, and post receives ahead."""
    return device.type in DIRECT_DEVICES.get()


def can_reduce_on_hosts(group: ProcessGroup | None) -> bool:
    """Return whether the group can reduce host tensors, as with `cpu:gloo,cuda:nccl`, without waiting for a device."""
    return "cpu" in dist.get_backend_config(group)


def choose_exchange_device(device: torch.device, group: ProcessGroup | None) -> torch.device:
    """Return the device for exchanging host values: the CPU if the group has a host backend, else `device`."""
    return torch.device("cpu") if can_reduce_on_hosts(group) else device


def exchange_row_counts(count: int, group: ProcessGroup, device: torch.device) -> Rows:
    """Return the rows of every rank of a group; this rank has `count`. With a host backend no device is waited for."""
    where = choose_exchange_device(device, group)
    sizes = [torch.empty(1, dtype=torch.int64, device=where) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([count], device=where), group=group)
    return Rows.from_sizes(torch.cat(sizes).tolist())


def all_gather_bytes(data: bytes, group: ProcessGroup | None, device: torch.device) -> list[bytes]:
    """All-gather bytes, in the order of ranks. Without a group, return this rank's only."""
    if group is None:
        return [data]
    world = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device), group=group)
    longest = max(int(n) for n in lengths)
    if longest == 0:
        return [b""] * world
    mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
    rows = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(rows, mine.to(device), group=group)
    return [row[: int(n)].cpu().numpy().tobytes() for row, n in zip(rows, lengths)]


MESSAGE_TAG = 2**16
"""Tag of these messages, above those of `parallel/fsdp/runtime.py`. Messages with one tag arrive in the order of their sends."""


class FakeProcessGroup(ProcessGroup):
    """A group without communication, for this rank alone. Rows of the other ranks are replaced by this rank's, so that code can run."""

    def __init__(self, ranks: int, rank: int = 0):
        super().__init__(rank, ranks)  # pyrefly: ignore[bad-argument-type, missing-argument]  (not in torch's stub)


def accept_wrappers(region: Callable[Concatenate[Tensor, P], Tensor]) -> Callable[Concatenate[Tensor, P], Tensor]:
    """Let a function take a `WrapperTensor`: it is applied to the part on this rank."""

    @wraps(region)
    def call_region(x: Tensor, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        if isinstance(x, WrapperTensor) and x.wraps_region:
            return x.with_local(region(x.local, *args, **kwargs))
        return region(x, *args, **kwargs)

    return call_region


@accept_wrappers
def copy_to_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return `x` at the start of a region; backward all-reduces its gradient.

    The result shares the memory of `x`, so writing it in place is an error (of torch).

    """
    return x if group.size() == 1 else apply_linear(x, _identity, all_reduce_copy, group)


@accept_wrappers
def reduce_from_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over ranks at the end of a region, on every rank. Each rank has a partial sum."""
    return x if group.size() == 1 else apply_linear(x, all_reduce_copy, _identity, group)


@accept_wrappers
def scatter_to_region(x: Tensor, dim: int, rows: Rows, group: ProcessGroup) -> Tensor:
    """Return this rank's rows of `dim` of a replicated tensor. Backward all-gathers the gradient."""
    if group.size() == 1:
        return x
    return apply_linear(x, _slice_rows, all_gather_rows, _check_dim(x, dim, rows.length), rows, group)


@accept_wrappers
def gather_from_region(x: Tensor, dim: int, rows: Rows, group: ProcessGroup) -> Tensor:
    """Gather the full tensor from each rank's rows of `dim`, if every rank computes the same afterwards.

    Backward: this rank's rows of the gradient, which is equal on every rank.

    """
    if group.size() == 1:
        return x
    return apply_linear(x, all_gather_rows, _slice_rows, _check_dim(x, dim, rows.sizes[group.rank()]), rows, group)


def gather_partial(x: Tensor, dim: int, rows: Rows, group: ProcessGroup) -> Tensor:
    """Gather the full tensor from each rank's rows of `dim`, if every rank computes a different part afterwards.

    Backward: this rank's rows of the sum of all ranks' gradients.

    """
    if group.size() == 1:
        return x
    return apply_linear(x, all_gather_rows, reduce_scatter_rows, _check_dim(x, dim, rows.sizes[group.rank()]), rows, group)


def reduce_scatter_region(x: Tensor, dim: int, rows: Rows, group: ProcessGroup) -> Tensor:
    """Return this rank's rows of `dim` of the sum over ranks. Each rank has a partial sum of every row."""
    if group.size() == 1:
        return x
    return apply_linear(x, reduce_scatter_rows, all_gather_rows, _check_dim(x, dim, rows.length), rows, group)


def _check_dim(x: Tensor, dim: int, expected: int) -> int:
    """Return the dim, counted from the front. ValueError for a wrong length, which would make other ranks hang."""
    if x.shape[dim] != expected:
        raise ValueError(f"dim {dim} of a tensor of shape {tuple(x.shape)} has {x.shape[dim]} rows, not {expected}")
    return dim % x.dim()


Collective = Callable[..., Tensor]
"""Linear in its first argument, a tensor; the adjoint takes the same other arguments."""


class _LinearOp(torch.autograd.Function):
    """Autograd function of `apply_linear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: Collective, adjoint: Collective, where: tuple[object, ...]) -> Tensor:
        ctx.backward_by = adjoint, collective, where
        return collective(x, *where)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        return _LinearOp.apply(grads[0], *ctx.backward_by), None, None, None


def apply_linear(x: Tensor, collective: Collective, adjoint: Collective, *where: object) -> Tensor:
    """Return `collective(x, *where)`, linear in `x`. The gradient is `adjoint(gradient, *where)`, also differentiable."""
    return _LinearOp.apply(x, collective, adjoint, where)


def _identity(x: Tensor, group: ProcessGroup) -> Tensor:
    return x


def _slice_rows(x: Tensor, dim: int, rows: Rows, group: ProcessGroup) -> Tensor:
    return rows.take_part(x, dim, group.rank()).clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def all_reduce_copy(x: Tensor, group: ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Return the sum over ranks (or their maximum, …) as a new tensor, equal on every rank. Not differentiable."""
    result = x.clone(memory_format=torch.contiguous_format)
    if not isinstance(group, FakeProcessGroup):
        dist.all_reduce(result, op=op, group=group)
    return result


@torch.no_grad()
def all_gather_rows(x: Tensor, dim: int, rows: Rows, group: ProcessGroup) -> Tensor:
    """Return the full tensor, from each rank's rows of `dim`. Not differentiable."""
    rank, x = group.rank(), x.contiguous()
    if isinstance(group, FakeProcessGroup):
        return x.index_select(dim, torch.arange(rows.length, device=x.device) % max(1, x.shape[dim]))
    whole = x.new_empty([*x.shape[:dim], rows.length, *x.shape[dim + 1 :]])
    if not is_direct_exchange(x.device) and _has_equal_rows(rows, x):  # processes receive parts directly into the full tensor, which saves a copy
        straight = _is_concatenation(rows, dim, x)
        room = whole if straight else x.new_empty([len(rows.sizes), *x.shape])
        ALL_GATHER(room.view(-1), x.view(-1), group=group)
        return whole if straight else _place_rows(whole, dim, rows, room.unbind(0))
    parts: list[Tensor] = []
    for ranges, size in zip(rows.ranks, rows.sizes):
        place = whole.narrow(dim, ranges[0][0], size) if len(ranges) == 1 else None
        straight = place is not None and place.is_contiguous()
        parts.append(place if straight else x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]]))
    if is_direct_exchange(x.device):  # uneven parts are exchanged directly; gloo's own gather requires equal sizes
        _exchange_pairwise([x] * len(parts), parts, group)
        parts[rank].copy_(x)
    else:
        dist.all_gather(parts, x, group=group)
    return _place_rows(whole, dim, rows, parts)


def _place_rows(whole: Tensor, dim: int, rows: Rows, parts: Sequence[Tensor]) -> Tensor:
    """Copy the ranks' parts that are not in place yet into the full tensor and return it."""
    for ranges, size, received in zip(rows.ranks, rows.sizes, parts):
        if size and storage_key(received) == storage_key(whole):
            continue
        for (first, length), piece in zip(ranges, received.split([length for _, length in ranges], dim)):
            whole.narrow(dim, first, length).copy_(piece)
    return whole


def _has_equal_rows(rows: Rows, x: Tensor) -> bool:
    """Return whether every rank has equally many rows, so that one tensor can receive all parts without a further copy."""
    return len(set(rows.sizes)) == 1 and x.numel() > 0


def _is_concatenation(rows: Rows, dim: int, x: Tensor) -> bool:
    """Return whether the full tensor is the ranks' parts in sequence in memory."""
    return math.prod(x.shape[:dim]) == 1 and rows == Rows.from_sizes(rows.sizes)


@torch.no_grad()
def reduce_scatter_rows(x: Tensor, dim: int, rows: Rows, group: ProcessGroup) -> Tensor:
    """Return this rank's rows of `dim` of the sum over ranks. Not differentiable.

    gloo implements reduce-scatter as an all-reduce. So on CPU the parts are exchanged and added here, in the order of ranks;
    16-bit values are added in 32 bits.

    """
    ranks, rank = group.size(), group.rank()
    if isinstance(group, FakeProcessGroup):
        return rows.take_part(x, dim, rank).contiguous()
    if not is_direct_exchange(x.device) and _has_equal_rows(rows, x):
        apart = [rows.take_part(x, dim, r) for r in range(ranks)]
        result = torch.empty_like(apart[rank], memory_format=torch.contiguous_format)
        straight = _is_concatenation(rows, dim, x)
        joined = x.contiguous().view(-1) if straight else torch.cat([t.reshape(-1) for t in apart])
        REDUCE_SCATTER(result.view(-1), joined, group=group)
        return result
    parts = [rows.take_part(x, dim, r).contiguous() for r in range(ranks)]
    if not is_direct_exchange(x.device):  # parts of unequal size
        result = torch.empty_like(parts[rank])
        dist.reduce_scatter(result, parts, group=group)
        return result
    received = [torch.empty_like(parts[rank]) for _ in range(ranks)]
    _exchange_pairwise(parts, received, group)
    received[rank] = parts[rank]
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    result = received[0].to(wide, copy=True)
    for other in received[1:]:
        result += other
    return result.to(x.dtype)


def _exchange_pairwise(send: list[Tensor], into: list[Tensor], group: ProcessGroup) -> None:
    """Send one tensor to every other rank and receive one from each; empty ones are not sent."""
    ranks, rank, works = group.size(), group.rank(), []
    for k in range(1, ranks):
        to, source = (rank + k) % ranks, (rank - k) % ranks
        if send[to].numel():
            works.append(dist.isend(send[to], group=group, group_dst=to, tag=MESSAGE_TAG))
        if into[source].numel():
            works.append(dist.irecv(into[source], group=group, group_src=source, tag=MESSAGE_TAG))
    for work in works:
        work.wait()


DIGEST_CHUNK = 1 << 18
"""Elements processed at once, which bounds temporary copies of a large tensor."""


def digest_tensors(named: list[tuple[str, Tensor]]) -> Tensor:
    """Return one order-sensitive 64-bit digest per tensor: int64 [len(named)] on the host, with one wait per device."""
    found = torch.zeros(len(named), dtype=torch.int64)
    for device in dict.fromkeys(t.device for _, t in named):
        at = [i for i, (_, t) in enumerate(named) if t.device == device]
        found[at] = torch.stack([digest_tensor(named[i][1].detach()) for i in at]).cpu()
    return found


def digest_tensor(t: Tensor) -> Tensor:
    """Return an order-sensitive 64-bit digest, computed on the tensor's device and equal on every device type."""
    raw = t.contiguous().reshape(-1).view(torch.uint8)
    raw = raw if raw.numel() % 8 == 0 else torch.cat([raw, raw.new_zeros(-raw.numel() % 8)])
    raw = raw.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for start in range(0, raw.numel(), DIGEST_CHUNK):
        part = raw[start : start + DIGEST_CHUNK]
        odd = torch.arange(start + 1, start + len(part) + 1, device=t.device) * 2 + 1
        total += ((part ^ (part >> 29)) * odd).sum()  # wraps around: arithmetic modulo 2^64
    return total


def find_differing(named: list[tuple[str, Tensor]], group: ProcessGroup | None, device: torch.device) -> list[str]:
    """Return names of tensors that are not bit-equal on all ranks of the group. `device`: the group's device. Collective."""
    names, apart = compare_across_ranks(named, group, device)
    return [name for name, differs in zip(names, apart.tolist()) if differs]


def compare_across_ranks(
    named: list[tuple[str, Tensor]], group: ProcessGroup | None, device: torch.device
) -> tuple[list[str], Tensor]:
    """Return names, and a bool row on `device`: whether each tensor differs between ranks of the group. Collective.

    `device` is the group's device. It is not waited for, unless tensors are on another one.

    """
    there, elsewhere = ([pair for pair in named if (pair[1].device.type == device.type) is same] for same in (True, False))
    rows = [torch.stack([digest_tensor(t.detach()) for _, t in there])] if there else []
    rows += [upload_row(digest_tensors(elsewhere).tolist(), device, torch.int64)] if elsewhere else []
    mine, ranks = torch.cat(rows), dist.get_world_size(group)
    everyone = mine.new_empty(ranks, len(mine))
    ALL_GATHER(everyone.view(-1), mine, group=group)
    return [name for name, _ in (*there, *elsewhere)], (everyone != mine).any(0)
