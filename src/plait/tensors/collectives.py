"""Differentiable collectives for the borders of a region that the ranks of a group compute in parts; bytes; digests.

Inside such a region every rank runs the same code on its own part: a slice of the heads, a stretch of the sequence.
At its borders stand the functions here, each with its exact adjoint. They come in three pairs, and the backward of one
is the other of its pair, so that they can be differentiated any number of times:

    enter           a copy  -> a copy;   backward: the sum of the ranks' gradients
    total           a share of a sum -> the sum on every rank;   backward: a copy

    part            a whole -> this rank's part of it;   backward: the parts of all ranks together
    gather          a part  -> the whole on every rank;   backward: this rank's part

    gather_partial  a part  -> the whole on every rank;   backward: this rank's part of the sum over the ranks
    scatter_sum     a share of a sum -> this rank's part of the sum;   backward: the parts of all ranks together

Which of the two ways to gather is right depends on what follows. After `gather` every rank computes the same, so each
has the whole gradient already: summing would multiply it by the number of ranks. After `gather_partial` every rank
computes something else with the whole (its slice of the heads), so each has a share of the gradient only.

Each is a collective, forward and backward: every rank of the group must reach it, in the same order, also when the
forward pass is computed again in backward. What is a copy on all ranks is the same there bit by bit. A group of one
rank communicates nothing. Without gradients needed they are plain collectives.

Beside them: bytes from every rank to every rank, as tensors, so that nothing that arrives is unpickled; and whether
ranks hold the same bits, by a 64-bit digest per tensor.
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
from plait.tensors.transfers import upload

P = ParamSpec("P")
GATHER_PARTS = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SUM_PARTS = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The library's all-gather and reduce-scatter of equal parts of one tensor, under the names that the installed torch does not warn of."""
DIRECT: ContextVar[tuple[str, ...]] = ContextVar("direct", default=("cpu",))
"""Kinds of devices between which messages wait for each other in no order: parts are exchanged by sends and receives, and not by
the library's collectives, and a pipeline's receives are posted ahead."""


def directly(device: torch.device) -> bool:
    """Whether ranks on such devices exchange parts by sends and receives, and post receives ahead."""
    return device.type in DIRECT.get()


def hosts_talk(group: ProcessGroup | None) -> bool:
    """Whether the ranks of a group can sum tensors of their hosts, as beside `cpu:gloo,cuda:nccl`, without waiting for a device."""
    return "cpu" in dist.get_backend_config(group)


def host_or(device: torch.device, group: ProcessGroup | None) -> torch.device:
    """Where the ranks of a group tell each other numbers that their hosts know: on the hosts, if those talk, else on their devices."""
    return torch.device("cpu") if hosts_talk(group) else device


def rows_of_ranks(count: int, group: ProcessGroup, device: torch.device) -> Rows:
    """The rows of every rank of a group, of which this one has `count`. Hosts that can talk tell each other: no device is waited for."""
    where = host_or(device, group)
    sizes = [torch.empty(1, dtype=torch.int64, device=where) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([count], device=where), group=group)
    return Rows.of(torch.cat(sizes).tolist())


def exchange(data: bytes, group: ProcessGroup | None, device: torch.device) -> list[bytes]:
    """All-gather bytes: those of each rank, in the order of the ranks. Without a group, this rank's alone."""
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


TAG = 2**16
"""Of the messages here: above those of `parallel/fsdp/runtime.py`. Messages of one tag arrive in the order they were sent."""


class Absent(ProcessGroup):
    """A group whose other ranks are not there: nothing travels. In the place of their rows stand this rank's, which code can compute with."""

    def __init__(self, ranks: int, rank: int = 0):
        super().__init__(rank, ranks)  # pyrefly: ignore[bad-argument-type, missing-argument]  (not in torch's stub)


def of_rows(region: Callable[Concatenate[Tensor, P], Tensor]) -> Callable[Concatenate[Tensor, P], Tensor]:
    """Let a function take a `WrapperTensor` that stands for a whole: it is applied to the part on this rank."""

    @wraps(region)
    def through(x: Tensor, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        if isinstance(x, WrapperTensor) and x.inside:
            return x.like(region(x.local, *args, **kwargs))
        return region(x, *args, **kwargs)

    return through


@of_rows
def enter(x: Tensor, group: ProcessGroup) -> Tensor:
    """`x` itself, where a region begins; backward sums its gradient over the ranks.

    Shares `x`'s memory, so writing it in place is an error (torch's own): other code knows it as `x`.
    """
    return x if group.size() == 1 else linear(x, _same, summed, group)


@of_rows
def total(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks, on every rank, where a region ends: each rank has a share of the result."""
    return x if group.size() == 1 else linear(x, summed, _same, group)


@of_rows
def part(x: Tensor, dim: int, rows: Rows, group: ProcessGroup) -> Tensor:
    """This rank's rows of `dim` of a whole that every rank has. Backward gives every rank the gradient of the whole."""
    if group.size() == 1:
        return x
    return linear(x, _rows, gathered, _checked(x, dim, rows.length), rows, group)


@of_rows
def gather(x: Tensor, dim: int, rows: Rows, group: ProcessGroup) -> Tensor:
    """The whole, from each rank's rows of `dim`; right where every rank computes the same after it.

    Backward: this rank's rows of the gradient, which every rank has whole.
    """
    if group.size() == 1:
        return x
    return linear(x, gathered, _rows, _checked(x, dim, rows.sizes[group.rank()]), rows, group)


def gather_partial(x: Tensor, dim: int, rows: Rows, group: ProcessGroup) -> Tensor:
    """The whole, from each rank's rows of `dim`; right where every rank computes another part after it.

    Backward: this rank's rows of the sum of all ranks' gradients.
    """
    if group.size() == 1:
        return x
    return linear(x, gathered, sum_part, _checked(x, dim, rows.sizes[group.rank()]), rows, group)


def scatter_sum(x: Tensor, dim: int, rows: Rows, group: ProcessGroup) -> Tensor:
    """This rank's rows of `dim` of the sum over the ranks, each of which has a share of the sum in every row."""
    if group.size() == 1:
        return x
    return linear(x, sum_part, gathered, _checked(x, dim, rows.length), rows, group)


def _checked(x: Tensor, dim: int, expected: int) -> int:
    """The dim, counted from the front. A wrong length would make other ranks wait for ever, so it is an error here."""
    if x.shape[dim] != expected:
        raise ValueError(f"dim {dim} of a tensor of shape {tuple(x.shape)} has {x.shape[dim]} rows, not {expected}")
    return dim % x.dim()


Collective = Callable[..., Tensor]
"""Linear in the tensor that is its first argument; what else it takes is the same for its adjoint."""


class _Linear(torch.autograd.Function):
    """`linear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: Collective, adjoint: Collective, where: tuple[object, ...]) -> Tensor:
        ctx.backward_by = adjoint, collective, where
        return collective(x, *where)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        return _Linear.apply(grads[0], *ctx.backward_by), None, None, None


def linear(x: Tensor, collective: Collective, adjoint: Collective, *where: object) -> Tensor:
    """`collective(x, *where)`, linear in `x`; the gradient is `adjoint(gradient, *where)`, and can be differentiated too."""
    return _Linear.apply(x, collective, adjoint, where)


def _same(x: Tensor, group: ProcessGroup) -> Tensor:
    return x


def _rows(x: Tensor, dim: int, rows: Rows, group: ProcessGroup) -> Tensor:
    return rows.take(x, dim, group.rank()).clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def summed(x: Tensor, group: ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """A new tensor: the sum over the ranks (or their maximum, …), the same on every rank. Not differentiated."""
    result = x.clone(memory_format=torch.contiguous_format)
    if not isinstance(group, Absent):
        dist.all_reduce(result, op=op, group=group)
    return result


@torch.no_grad()
def gathered(x: Tensor, dim: int, rows: Rows, group: ProcessGroup) -> Tensor:
    """The whole, from each rank's rows of `dim`. Not differentiated."""
    rank, x = group.rank(), x.contiguous()
    if isinstance(group, Absent):
        return x.index_select(dim, torch.arange(rows.length, device=x.device) % max(1, x.shape[dim]))
    whole = x.new_empty([*x.shape[:dim], rows.length, *x.shape[dim + 1 :]])
    if not directly(x.device) and _alike(rows, x):  # processes exchange parts straight into the whole, in one copy less
        straight = _one_after_another(rows, dim, x)
        room = whole if straight else x.new_empty([len(rows.sizes), *x.shape])
        GATHER_PARTS(room.view(-1), x.view(-1), group=group)
        return whole if straight else _placed(whole, dim, rows, room.unbind(0))
    parts: list[Tensor] = []
    for ranges, size in zip(rows.ranks, rows.sizes):
        place = whole.narrow(dim, ranges[0][0], size) if len(ranges) == 1 else None
        straight = place is not None and place.is_contiguous()
        parts.append(place if straight else x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]]))
    if directly(x.device):  # uneven parts are exchanged as they are; gloo's own gather wants them of one size
        _exchange([x] * len(parts), parts, group)
        parts[rank].copy_(x)
    else:
        dist.all_gather(parts, x, group=group)
    return _placed(whole, dim, rows, parts)


def _placed(whole: Tensor, dim: int, rows: Rows, parts: Sequence[Tensor]) -> Tensor:
    """The whole, with the parts of the ranks in it that are not there yet."""
    for ranges, size, received in zip(rows.ranks, rows.sizes, parts):
        if size and storage_key(received) == storage_key(whole):
            continue
        for (first, length), piece in zip(ranges, received.split([length for _, length in ranges], dim)):
            whole.narrow(dim, first, length).copy_(piece)
    return whole


def _alike(rows: Rows, x: Tensor) -> bool:
    """Whether every rank has as many rows of a tensor, so that one tensor can hold all parts: no copy on the way."""
    return len(set(rows.sizes)) == 1 and x.numel() > 0


def _one_after_another(rows: Rows, dim: int, x: Tensor) -> bool:
    """Whether the parts of the ranks, one after another in memory, are the whole."""
    return math.prod(x.shape[:dim]) == 1 and rows == Rows.of(rows.sizes)


@torch.no_grad()
def sum_part(x: Tensor, dim: int, rows: Rows, group: ProcessGroup) -> Tensor:
    """This rank's rows of `dim` of the sum over the ranks. Not differentiated.

    gloo's own reduce-scatter is an all-reduce in disguise, so on CPU the parts are exchanged and added up here, in the
    order of the ranks; 16-bit numbers are added in 32.
    """
    ranks, rank = group.size(), group.rank()
    if isinstance(group, Absent):
        return rows.take(x, dim, rank).contiguous()
    if not directly(x.device) and _alike(rows, x):
        apart = [rows.take(x, dim, r) for r in range(ranks)]
        result = torch.empty_like(apart[rank], memory_format=torch.contiguous_format)
        straight = _one_after_another(rows, dim, x)
        joined = x.contiguous().view(-1) if straight else torch.cat([t.reshape(-1) for t in apart])
        SUM_PARTS(result.view(-1), joined, group=group)
        return result
    parts = [rows.take(x, dim, r).contiguous() for r in range(ranks)]
    if not directly(x.device):  # parts of unequal size
        result = torch.empty_like(parts[rank])
        dist.reduce_scatter(result, parts, group=group)
        return result
    received = [torch.empty_like(parts[rank]) for _ in range(ranks)]
    _exchange(parts, received, group)
    received[rank] = parts[rank]
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    result = received[0].to(wide, copy=True)
    for other in received[1:]:
        result += other
    return result.to(x.dtype)


def _exchange(send: list[Tensor], into: list[Tensor], group: ProcessGroup) -> None:
    """Send one tensor to every other rank and receive one from each; empty ones are not sent."""
    ranks, rank, works = group.size(), group.rank(), []
    for k in range(1, ranks):
        to, source = (rank + k) % ranks, (rank - k) % ranks
        if send[to].numel():
            works.append(dist.isend(send[to], group=group, group_dst=to, tag=TAG))
        if into[source].numel():
            works.append(dist.irecv(into[source], group=group, group_src=source, tag=TAG))
    for work in works:
        work.wait()


STRETCH = 1 << 18
"""Numbers that are worked on at once: a large tensor must not be copied several times over."""


def digests(named: list[tuple[str, Tensor]]) -> Tensor:
    """One 64-bit digest per tensor, sensitive to order: int64 of shape [len(named)], on the host, which waits once for each device."""
    found = torch.zeros(len(named), dtype=torch.int64)
    for device in dict.fromkeys(t.device for _, t in named):
        at = [i for i, (_, t) in enumerate(named) if t.device == device]
        found[at] = torch.stack([digest(named[i][1].detach()) for i in at]).cpu()
    return found


def digest(t: Tensor) -> Tensor:
    """A 64-bit digest, sensitive to the order of the elements, computed on the tensor's device: the same on every kind."""
    raw = t.contiguous().reshape(-1).view(torch.uint8)
    raw = raw if raw.numel() % 8 == 0 else torch.cat([raw, raw.new_zeros(-raw.numel() % 8)])
    raw = raw.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for start in range(0, raw.numel(), STRETCH):
        part = raw[start : start + STRETCH]
        odd = torch.arange(start + 1, start + len(part) + 1, device=t.device) * 2 + 1
        total += ((part ^ (part >> 29)) * odd).sum()  # wraps around: arithmetic modulo 2^64
    return total


def differing(named: list[tuple[str, Tensor]], group: ProcessGroup | None, device: torch.device) -> list[str]:
    """Names of the tensors that are not bit-equal on all ranks of the group; `device` is where the group communicates."""
    names, apart = differences(named, group, device)
    return [name for name, differs in zip(names, apart.tolist()) if differs]


def differences(
    named: list[tuple[str, Tensor]], group: ProcessGroup | None, device: torch.device
) -> tuple[list[str], Tensor]:
    """Names, and of each whether its tensor is not bit-equal on all ranks of the group: a boolean row on `device`, where the group
    communicates. Nothing waits for the device, unless tensors lie on another one."""
    there, elsewhere = ([pair for pair in named if (pair[1].device.type == device.type) is same] for same in (True, False))
    rows = [torch.stack([digest(t.detach()) for _, t in there])] if there else []
    rows += [upload(digests(elsewhere).tolist(), device, torch.int64)] if elsewhere else []
    mine, ranks = torch.cat(rows), dist.get_world_size(group)
    everyone = mine.new_empty(ranks, len(mine))
    GATHER_PARTS(everyone.view(-1), mine, group=group)
    return [name for name, _ in (*there, *elsewhere)], (everyone != mine).any(0)
