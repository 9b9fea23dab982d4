"""What `plait bench` measures inside each rank: matmuls by size and format, memory, collectives by size, a job's loader.

Several ranks measure at the same time, as they compute in training. The least of several times counts: what else the
machine does only ever adds. On a CPU with one thread per process it is the thread's own time.
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
from plait.tensors.collectives import GATHER_PARTS, SUM_PARTS, directly

Points = list[list[float]]

SIDES = {"cpu": (32, 64, 128, 256, 512, 1024, 2048), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192, 16384)}
FORMATS = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SIZES = {"cpu": tuple(4096 * 4**i for i in range(8)), "cuda": tuple(4096 * 4**i for i in range(10))}
"""Bytes of a collective: 4 KiB to 64 MiB between processes on CPUs, and to 1 GiB between devices, as far as they have room."""
ROOM = 4
"""How many times a message's bytes a device has to have free: what is sent, what arrives, and what smaller messages took."""
COPIED = {"cpu": 2**26, "cuda": 2**29}
"""Bytes of the block that is copied: far more than a cache holds."""
SLOW = {"matmul": 0.03, "collective": 0.2}
"""Seconds: when one call takes longer, larger ones are left out."""
BUDGET = 0.1
"""Seconds for which one call is repeated."""


def compute(place: Place, kind: str) -> dict[str, Any]:
    """Points (flops, flop/s) of square matmuls by format, and bytes/s of a copy in memory, each byte read and written."""
    device = pick_device(kind, place)
    formats = ("fp32", "bf16", "fp16") if kind == "cpu" else tuple(FORMATS)
    found = {name: list(_matmuls(device, name, SIDES[kind])) for name in formats}
    source = torch.ones(COPIED[kind] // 4, device=device)
    target = torch.empty_like(source)
    moved = 2 * COPIED[kind] / _least(lambda: target.copy_(source), device)
    result: dict[str, Any] = {"matmuls": found, "memory": moved}
    if kind == "cpu":
        result["operator"] = _operator(device)
    if kind == "cuda":
        pinned = torch.empty(COPIED[kind] // 4, pin_memory=True)
        result["host"] = COPIED[kind] / _least(lambda: target.copy_(pinned, non_blocking=True), device)
    return result


def _operator(device: torch.device) -> float:
    """Seconds of a small operator's forward pass, launched as a model does: modules, of which autograd keeps track."""
    blocks = [torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU()] * 8
    model, x = torch.nn.Sequential(*blocks).to(device), torch.ones(4, 8, device=device)
    return _least(lambda: model(x), device) / len(blocks)


def _matmuls(device: torch.device, name: str, sides: tuple[int, ...]) -> Iterator[list[float]]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        for side in sides:
            a, b = (torch.randn(side, side, device=device).to(FORMATS[name]) for _ in range(2))
            seconds = _least(lambda a=a, b=b: torch.mm(a, b), device)
            yield [2.0 * side**3, 2.0 * side**3 / seconds]
            if seconds > SLOW["matmul"]:
                return
    finally:
        torch.set_float32_matmul_precision(before)


def _least(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call: the least of at least three, after one that does not count."""
    clock = thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter
    work()
    _settled(device)
    times, began = [], perf_counter()
    while len(times) < 3 or perf_counter() - began < BUDGET:
        start = clock()
        work()
        _settled(device)
        times.append(clock() - start)
    return max(min(times), 1e-9)


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def groups(world: int) -> list[int]:
    """Sizes of groups to measure: powers of two that divide the ranks, and all of them."""
    return sorted({2**i for i in range(1, world.bit_length()) if world % 2**i == 0} | ({world} - {1}))


def communicate(place: Place, kind: str) -> dict[str, Any]:
    """Points (bytes, seconds) of every collective in groups of neighbours, while all such groups do the same."""
    device = pick_device(kind, place)
    place.connect(device)
    found, sizes = [], sizes_within(_free(device), kind)
    for size in groups(place.world):
        made = [dist.new_group(list(range(first, first + size))) for first in range(0, place.world, size)]
        mine = made[place.rank // size]
        assert isinstance(mine, ProcessGroup)
        group = MeasuredGroup(mine, size, place.rank % size, place.rank - place.rank % size)
        points = {name: _points(make, group, device, sizes) for name, make in COLLECTIVES.items()}
        found.append({"ranks": size, "points": points})
    dist.barrier()
    return {"groups": found}


class MeasuredGroup(NamedTuple):
    """A group of `size` neighbours, this rank's number in it, and the global rank of its first."""

    handle: ProcessGroup
    size: int
    rank: int
    first: int


Make = Callable[[torch.Tensor, MeasuredGroup], Callable[[], Any]]


def sizes_within(free: float, kind: str) -> tuple[int, ...]:
    """Bytes of the messages for which a device has room that has so many bytes free."""
    return tuple(size for size in SIZES[kind] if ROOM * size <= free)


def _free(device: torch.device) -> float:
    """Bytes that are free on the fullest of the ranks' devices: all measure the same sizes."""
    if device.type != "cuda":
        return inf
    least = torch.tensor([torch.cuda.mem_get_info(device)[0]], dtype=torch.float64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return float(least)


def _points(make: Make, group: MeasuredGroup, device: torch.device, sizes: Iterable[int]) -> Points:
    found: Points = []
    for size in sizes:
        count = max(1, size // 4 // group.size) * group.size
        seconds = _together(make(torch.ones(count, device=device), group), device)
        found.append([4.0 * count, seconds])
        if seconds > SLOW["collective"]:
            break
    return found


def _together(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call by all ranks: the least over calls of what the slowest rank took. The same on all ranks.

    On a CPU what it takes from a core, of all threads: nothing else can be computed then, and neighbours do not count.
    """
    clock = process_time if device.type == "cpu" else perf_counter
    longest, times = 0.0, []
    while len(times) < 4 or (longest < BUDGET and len(times) < 40):
        taken = torch.zeros(1, dtype=torch.float64, device=device)
        dist.all_reduce(taken)  # all start together
        _settled(device)
        start = clock()
        work()
        _settled(device)
        taken[0] = clock() - start
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        times.append(float(taken))
        longest += times[-1]
    return min(times[1:])


def _all_reduce(whole: torch.Tensor, group: MeasuredGroup) -> Callable[[], Any]:
    return lambda: dist.all_reduce(whole, group=group.handle)


def _exchanged(whole: torch.Tensor, group: MeasuredGroup) -> Callable[[], Any]:
    """Every rank sends a part to every other: how plait gathers and scatters among processes on CPUs."""
    parts, received = list(whole.chunk(group.size)), list(torch.empty_like(whole).chunk(group.size))
    others = [k for k in range(group.size) if k != group.rank]

    def work() -> None:
        works = [dist.isend(parts[k], group=group.handle, group_dst=k) for k in others]
        works += [dist.irecv(received[k], group=group.handle, group_src=k) for k in others]
        for done in works:
            if done is not None:
                done.wait()

    return work


def _all_gather(whole: torch.Tensor, group: MeasuredGroup, scatter: bool = False) -> Callable[[], Any]:
    """As in training: between processes messages of ours, between devices the library's collectives of one tensor."""
    if directly(whole.device):
        return _exchanged(whole, group)
    mine = whole.chunk(group.size)[group.rank].clone()
    if scatter:
        return lambda: SUM_PARTS(mine, whole, group=group.handle)
    return lambda: GATHER_PARTS(whole, mine, group=group.handle)


def _all_to_all(whole: torch.Tensor, group: MeasuredGroup) -> Callable[[], Any]:
    received = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(received, whole, group=group.handle)


def _send(whole: torch.Tensor, group: MeasuredGroup) -> Callable[[], Any]:
    """Every rank to the next, all at once."""
    received = torch.empty_like(whole)
    after, before = (group.first + (group.rank + step) % group.size for step in (1, -1))

    def work() -> None:
        sent = dist.P2POp(dist.isend, whole, after, group=group.handle)
        for done in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, received, before, group=group.handle)]):
            done.wait()

    return work


COLLECTIVES: dict[str, Make] = {
    "all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": partial(_all_gather, scatter=True),
    "all_to_all": _all_to_all, "send": _send,
}  # fmt: skip


def load(place: Place, job: Job, seconds: float = 1.0) -> float:
    """Samples/s that this rank reads of its share of the job's batches: the best of several stretches."""
    from plait.data.batch import BatchShare, Position, opened
    from plait.data.loading import batches

    source = batches(opened(job.data), job.batch, job.seed, BatchShare(place.rank, place.world), Position())
    next(source)
    best, ends = 0.0, perf_counter() + seconds
    while perf_counter() < ends:
        start = perf_counter()
        count = sum(batch.count for batch in islice(source, 4))
        best = max(best, count / (perf_counter() - start))
    return best
