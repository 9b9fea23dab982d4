"""Measurements of `plait bench` inside each rank: matmuls by size and format, memory, collectives by size, a job's DataLoader.

All ranks measure at the same time, as they compute in training. The minimum of several times is used, because other programs can only
increase a time. On a CPU with one thread per process, the thread's CPU time is measured.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from math import inf
from time import perf_counter, process_time, thread_time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from plait.config.job import Job
from plait.engine.build import pick_device
from plait.launch.place import Place
from plait.tensors.collectives import ALL_GATHER, REDUCE_SCATTER, is_direct_exchange

Points = list[list[float]]

MATMUL_SIDES = {"cpu": (32, 64, 128, 256, 512, 1024, 2048), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192, 16384)}
MATMUL_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
COLLECTIVE_SIZES = {"cpu": tuple(4096 * 4**i for i in range(8)), "cuda": tuple(4096 * 4**i for i in range(10))}
"""Message sizes of collectives in bytes, limited by free memory: up to 64 MiB between CPU processes, up to 1 GiB between devices."""
MEMORY_FACTOR = 4
"""Free memory that a message needs, as a multiple of its bytes: sent data, received data, and the buffers of smaller messages."""
COPY_BYTES = {"cpu": 2**26, "cuda": 2**29}
"""Bytes of the copied block, far more than a cache holds."""
SLOW_CALL_S = {"matmul": 0.03, "collective": 0.2}
"""Seconds of one call after which larger sizes are skipped."""
BUDGET_S = 0.1
"""Seconds for which one call is repeated."""


def measure_compute(place: Place, kind: str) -> dict[str, Any]:
    """Measure square matmuls by format as points (flops, flop/s), and a memory copy in bytes/s (each byte is read and written)."""
    device = pick_device(kind, place)
    formats = ("fp32", "bf16", "fp16") if kind == "cpu" else tuple(MATMUL_DTYPES)
    found = {name: list(_time_matmuls(device, name, MATMUL_SIDES[kind])) for name in formats}
    source = torch.ones(COPY_BYTES[kind] // 4, device=device)
    target = torch.empty_like(source)
    moved = 2 * COPY_BYTES[kind] / _time_call(lambda: target.copy_(source), device)
    result: dict[str, Any] = {"matmuls": found, "memory": moved}
    if kind == "cpu":
        result["operator"] = _time_operator(device)
    if kind == "cuda":
        pinned = torch.empty(COPY_BYTES[kind] // 4, pin_memory=True)
        result["host"] = COPY_BYTES[kind] / _time_call(lambda: target.copy_(pinned, non_blocking=True), device)
    return result


def _time_operator(device: torch.device) -> float:
    """Return the seconds of a small operator's forward pass, called through modules with autograd, as in a model."""
    blocks = [torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU()] * 8
    model, x = torch.nn.Sequential(*blocks).to(device), torch.ones(4, 8, device=device)
    return _time_call(lambda: model(x), device) / len(blocks)


def _time_matmuls(device: torch.device, name: str, sides: tuple[int, ...]) -> Iterator[list[float]]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        for side in sides:
            a, b = (torch.randn(side, side, device=device).to(MATMUL_DTYPES[name]) for _ in range(2))
            seconds = _time_call(lambda a=a, b=b: torch.mm(a, b), device)
            yield [2.0 * side**3, 2.0 * side**3 / seconds]
            if seconds > SLOW_CALL_S["matmul"]:
                return
    finally:
        torch.set_float32_matmul_precision(before)


def _time_call(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call: the minimum of at least three calls after a warm-up call."""
    clock = thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter
    work()
    _synchronize(device)
    times, began = [], perf_counter()
    while len(times) < 3 or perf_counter() - began < BUDGET_S:
        start = clock()
        work()
        _synchronize(device)
        times.append(clock() - start)
    return max(min(times), 1e-9)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def list_group_sizes(world: int) -> list[int]:
    """List the group sizes to measure: powers of two that divide the number of ranks, and all ranks."""
    return sorted({2**i for i in range(1, world.bit_length()) if world % 2**i == 0} | ({world} - {1}))


def measure_collectives(place: Place, kind: str) -> dict[str, Any]:
    """Measure every collective in groups of neighboring ranks, all groups at the same time, as points (bytes, seconds)."""
    device = pick_device(kind, place)
    place.connect(device)
    found, sizes = [], select_sizes(_min_free_bytes(device), kind)
    for size in list_group_sizes(place.world):
        made = [dist.new_group(list(range(first, first + size))) for first in range(0, place.world, size)]
        mine = made[place.rank // size]
        assert isinstance(mine, ProcessGroup)
        group = MeasuredGroup(mine, size, place.rank % size, place.rank - place.rank % size)
        points = {name: _time_sizes(make, group, device, sizes) for name, make in COLLECTIVES.items()}
        found.append({"ranks": size, "points": points})
    dist.barrier()
    return {"groups": found}


class MeasuredGroup(NamedTuple):
    """A group of `size` neighboring ranks, with this rank's number in it and the global rank of its first member."""

    handle: ProcessGroup
    size: int
    rank: int
    first_rank: int


MakeCollective = Callable[[torch.Tensor, MeasuredGroup], Callable[[], Any]]


def select_sizes(free: float, kind: str) -> tuple[int, ...]:
    """Return the message sizes that fit into `free` bytes."""
    return tuple(size for size in COLLECTIVE_SIZES[kind] if MEMORY_FACTOR * size <= free)


def _min_free_bytes(device: torch.device) -> float:
    """Return the smallest number of free bytes over all ranks, so that all measure the same sizes."""
    if device.type != "cuda":
        return inf
    least = torch.tensor([torch.cuda.mem_get_info(device)[0]], dtype=torch.float64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return float(least)


def _time_sizes(make: MakeCollective, group: MeasuredGroup, device: torch.device, sizes: Iterable[int]) -> Points:
    found: Points = []
    for size in sizes:
        count = max(1, size // 4 // group.size) * group.size
        seconds = _time_on_ranks(make(torch.ones(count, device=device), group), device)
        found.append([4.0 * count, seconds])
        if seconds > SLOW_CALL_S["collective"]:
            break
    return found


def _time_on_ranks(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call on all ranks: the minimum over calls of the slowest rank's time. All ranks return the same.

    On a CPU, the time is the CPU time of all threads of the process, because the core can compute nothing else in that time.
    """
    clock = process_time if device.type == "cpu" else perf_counter
    longest, times = 0.0, []
    while len(times) < 4 or (longest < BUDGET_S and len(times) < 40):
        taken = torch.zeros(1, dtype=torch.float64, device=device)
        dist.all_reduce(taken)  # a barrier
        _synchronize(device)
        start = clock()
        work()
        _synchronize(device)
        taken[0] = clock() - start
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        times.append(float(taken))
        longest += times[-1]
    return min(times[1:])


def _make_all_reduce(tensor: torch.Tensor, group: MeasuredGroup) -> Callable[[], Any]:
    return lambda: dist.all_reduce(tensor, group=group.handle)


def _make_exchange(tensor: torch.Tensor, group: MeasuredGroup) -> Callable[[], Any]:
    """Send a part to every other rank, as plait gathers and scatters among CPU processes."""
    parts, received = list(tensor.chunk(group.size)), list(torch.empty_like(tensor).chunk(group.size))
    others = [k for k in range(group.size) if k != group.rank]

    def work() -> None:
        works = [dist.isend(parts[k], group=group.handle, group_dst=k) for k in others]
        works += [dist.irecv(received[k], group=group.handle, group_src=k) for k in others]
        for done in works:
            if done is not None:
                done.wait()

    return work


def _make_all_gather(tensor: torch.Tensor, group: MeasuredGroup, scatter: bool = False) -> Callable[[], Any]:
    """Gather or scatter as in training: point-to-point messages between CPU processes, one collective between devices."""
    if is_direct_exchange(tensor.device):
        return _make_exchange(tensor, group)
    mine = tensor.chunk(group.size)[group.rank].clone()
    if scatter:
        return lambda: REDUCE_SCATTER(mine, tensor, group=group.handle)
    return lambda: ALL_GATHER(tensor, mine, group=group.handle)


def _make_all_to_all(tensor: torch.Tensor, group: MeasuredGroup) -> Callable[[], Any]:
    received = torch.empty_like(tensor)
    return lambda: dist.all_to_all_single(received, tensor, group=group.handle)


def _make_send(tensor: torch.Tensor, group: MeasuredGroup) -> Callable[[], Any]:
    """Send from every rank to the next, all at once."""
    received = torch.empty_like(tensor)
    after, before = (group.first_rank + (group.rank + step) % group.size for step in (1, -1))

    def work() -> None:
        sent = dist.P2POp(dist.isend, tensor, after, group=group.handle)
        for done in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, received, before, group=group.handle)]):
            done.wait()

    return work


COLLECTIVES: dict[str, MakeCollective] = {
    "all_reduce": _make_all_reduce, "all_gather": _make_all_gather, "reduce_scatter": partial(_make_all_gather, scatter=True),
    "all_to_all": _make_all_to_all, "send": _make_send,
}  # fmt: skip


def measure_loading(place: Place, job: Job, seconds: float = 1.0) -> float:
    """Return the samples/s that this rank reads of its local batches: the best of several measurements."""
    from plait.data.batch import BatchShare, Position, open_data
    from plait.data.loading import iter_batches

    source = iter_batches(open_data(job.data), job.batch, job.seed, BatchShare(place.rank, place.world), Position())
    next(source)
    best, ends = 0.0, perf_counter() + seconds
    while perf_counter() < ends:
        start = perf_counter()
        count = sum(batch.count for batch in islice(source, 4))
        best = max(best, count / (perf_counter() - start))
    return best
