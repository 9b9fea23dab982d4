"""torch's collectives for the groups of `nccl.py`: kernels of its operators, below the modes that record them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from device import nccl
from device.nccl import Fault, Group, Work

KEY = {"now": "CPU"}
INSTALLED: list[torch.library.Library] = []


def group_of(boxed: Any) -> Group | None:
    """Return the group if it is one of these."""
    found = dist.ProcessGroup.unbox(boxed)
    try:
        own = nccl.GROUPS.get(found._get_backend(torch.device(KEY["now"].lower())))
    except RuntimeError:
        return None
    if own is not None and dist.is_initialized() and found in dist.distributed_c10d._world.pg_group_ranks:
        own.ranks = dist.get_process_group_ranks(found)
    return own


def _parts(t: Tensor, sizes: list[int]) -> list[int]:
    """Return the element count of each shard of a tensor that is sharded along its first dim."""
    each = t.numel() // t.shape[0] if t.dim() and t.shape[0] else 1
    return [n * each for n in sizes]


def _even(group: Group, whole: Tensor, part: Tensor) -> None:
    if whole.numel() != part.numel() * group.size or whole.dtype != part.dtype:
        raise Fault(f"{nccl.form([whole])} are not {group.size} times {nccl.form([part])}")


def send(group: Group, tensors: list[Tensor], _: Any, dst: int, tag: int) -> Any:
    return group.message("send", tensors[0], dst, tag)


def recv_(group: Group, tensors: list[Tensor], _: Any, src: int, tag: int) -> Any:
    return group.message("recv", tensors[0], src, tag)


def allreduce_(group: Group, tensors: list[Tensor], _: Any, op: Any, *more: Any) -> Any:
    def run(work: Work) -> None:
        work.made[0].copy_(group.reduce(work.given[0], op))

    return tensors, group.collective("all_reduce", tensors, tensors, run)


def broadcast_(group: Group, tensors: list[Tensor], _: Any, root: int, *more: Any) -> Any:
    def run(work: Work) -> None:
        work.made[0].copy_(work.given[0])
        group.spread(work.made[0], root)

    return tensors, group.collective("broadcast", tensors, tensors, run, root=root)


def reduce_(group: Group, tensors: list[Tensor], _: Any, op: Any, root: int, *more: Any) -> Any:
    def run(work: Work) -> None:
        result = group.reduce(work.given[0], op)
        work.made[0].copy_(result if group.rank == root else work.given[0])

    return group.collective("reduce", tensors, tensors, run, root=root)


def allgather_(group: Group, outputs: list[list[Tensor]], inputs: list[Tensor], *more: Any) -> Any:
    """For shards of unequal sizes, NCCL broadcasts each."""
    (into,), (mine,) = outputs, inputs
    if into[group.rank].numel() != mine.numel() or any(t.dtype != mine.dtype for t in into):
        raise Fault(f"all_gather of {nccl.form([mine])} into {nccl.form(into)}: not the size of rank {group.rank}'s part")
    done = group.collective("all_gather", inputs, into, lambda work: group.gather(work.given[0], work.made))
    return outputs, done


def _allgather_base_(group: Group, output: Tensor, mine: Tensor, *more: Any) -> Any:
    _even(group, output, mine)

    def run(work: Work) -> None:
        group.gather(work.given[0], work.made[0].chunk(group.size) if mine.numel() else [])

    return output, group.collective("all_gather_into_tensor", [mine], [output], run)


def reduce_scatter_(group: Group, outputs: list[Tensor], inputs: list[list[Tensor]], _: Any, op: Any, *more: Any) -> Any:
    """For shards of unequal sizes, NCCL reduces each to its rank."""
    (parts,) = inputs
    if parts[group.rank].numel() != outputs[0].numel() or any(t.dtype != outputs[0].dtype for t in parts):
        raise Fault(f"reduce_scatter of {nccl.form(parts)} into {nccl.form(outputs)}: not this rank's part")

    def run(work: Work) -> None:
        sums = [group.reduce(t, op) for t in work.given]
        work.made[0].copy_(sums[group.rank])

    return outputs, group.collective("reduce_scatter", parts, outputs, run)


def _reduce_scatter_base_(group: Group, output: Tensor, whole: Tensor, _: Any, op: Any, *more: Any) -> Any:
    _even(group, whole, output)

    def run(work: Work) -> None:
        if output.numel():
            work.made[0].copy_(group.reduce(work.given[0], op).chunk(group.size)[group.rank])

    return output, group.collective("reduce_scatter_tensor", [whole], [output], run)


def alltoall_(group: Group, outputs: list[Tensor], inputs: list[Tensor], *more: Any) -> Any:
    sends, takes = [t.numel() for t in inputs], [t.numel() for t in outputs]
    run = lambda work: group.all_to_all(work.given, work.made)  # noqa: E731
    return outputs, group.collective("all_to_all", inputs, outputs, run, sends=sends, takes=takes)


def alltoall_base_(group: Group, output: Tensor, whole: Tensor, _: Any, taken: list[int], given: list[int], *more: Any) -> Any:
    for t, sizes in ((output, taken), (whole, given)):
        if sizes and (len(sizes) != group.size or sum(sizes) != t.shape[0]):
            raise Fault(f"Split sizes {sizes} do not add up to the {t.shape[0]} rows of dim 0 among {group.size} ranks")
        if not sizes and t.shape[0] % group.size:
            raise Fault(f"{t.shape[0]} rows cannot be split evenly among {group.size} ranks")
    sends = _parts(whole, list(given) or [whole.shape[0] // group.size] * group.size)
    takes = _parts(output, list(taken) or [output.shape[0] // group.size] * group.size)

    def run(work: Work) -> None:
        group.all_to_all(work.given[0].split(sends), work.made[0].split(takes))

    return group.collective("all_to_all_single", [whole], [output], run, sends=sends, takes=takes)


def gather_(group: Group, outputs: list[list[Tensor]], inputs: list[Tensor], _: Any, root: int, *more: Any) -> Any:
    into = outputs[0] if group.rank == root else []

    def run(work: Work) -> None:
        rows = [torch.empty_like(work.given[0]) for _ in range(group.size)]
        group.gather(work.given[0], rows)
        for made, row in zip(work.made, rows):
            made.copy_(row)

    return group.collective("gather", inputs, into, run, root=root)


def scatter_(group: Group, outputs: list[Tensor], inputs: list[list[Tensor]], _: Any, root: int, *more: Any) -> Any:
    parts = inputs[0] if group.rank == root else []
    sends = [t.numel() for t in parts] or [0] * group.size
    takes = [outputs[0].numel() if k == root else 0 for k in range(group.size)]

    def run(work: Work) -> None:
        nothing = work.made[0][:0]
        into = [work.made[0] if k == root else nothing for k in range(group.size)]
        group.all_to_all(work.given or [nothing] * group.size, into)

    return outputs, group.collective("scatter", parts, outputs, run, root=root, sends=sends, takes=takes)


def barrier(group: Group, tensor: Tensor, *more: Any) -> Any:
    return group.collective("barrier", [], [], lambda work: None)


OPERATORS: tuple[Callable[..., Any], ...] = (
    send, recv_, allreduce_, broadcast_, reduce_, allgather_, _allgather_base_, reduce_scatter_, _reduce_scatter_base_, alltoall_,
    alltoall_base_, gather_, scatter_, barrier,
)  # fmt: skip
UNKNOWN = (
    "allreduce_coalesced_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_",
    "recv_any_source_", "monitored_barrier_",
)  # fmt: skip
"""Operators that the double does not implement, or that NCCL does not support."""


def _kernel(operator: Callable[..., Any]) -> Callable[..., Any]:
    where = [a.name for a in getattr(torch.ops.c10d, operator.__name__).default._schema.arguments].index("process_group")
    own = torch.ops.c10d, operator.__name__

    def call(*args: Any) -> Any:
        group = group_of(args[where])
        if group is not None:
            return operator(group, *args)
        other = dist.ProcessGroup.unbox(args[where])
        if nccl.SPARE not in other._device_types:
            kind = other._get_backend(torch.device(KEY["now"].lower()))
            other._register_backend(nccl.SPARE, dist.ProcessGroup.BackendType.CUSTOM, kind)
        return nccl.plain(own[1])(*args)

    return call


def _unknown(name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        raise Fault(f"the double of NCCL has no {name}")

    return call


def install() -> None:
    """Register the kernels, once per process."""
    if INSTALLED:
        return
    library = torch.library.Library("c10d", "IMPL")
    INSTALLED.append(library)
    for operator in OPERATORS:
        library.impl(operator.__name__, _kernel(operator), KEY["now"])
    for name in UNKNOWN:
        library.impl(name, _unknown(name), KEY["now"])


def batch_isend_irecv(ops: list[Any]) -> list[Any]:
    """As on NCCL: one batch, on the communicator of the group."""
    group = group_of((ops[0].group or dist.group.WORLD).boxed())
    if group is None or ops[0].tensor.device.type != KEY["now"].lower():
        return PLAIN[0](ops)
    held: list[tuple[str, Tensor, int, int]] = []
    group.batch = nccl.keep(Work(group, "a part of a batch")), held
    try:
        for op in ops:
            if op.op is dist.isend:
                dist.isend(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer)
            else:
                dist.irecv(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer)
    finally:
        group.batch = None
    return [group.together(held)]


PLAIN: list[Callable[..., Any]] = []


def register(key: str) -> None:
    """Register the backend in torch, before ranks are forked. `key`: the dispatch key of the tensors to which the rules apply."""
    KEY["now"] = key
    if PLAIN:
        return
    PLAIN.append(dist.batch_isend_irecv)
    dist.Backend.register_backend(nccl.NAME, nccl.made, devices=["cpu", "cuda"])
    dist.distributed_c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv
