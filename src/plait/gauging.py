"""What `plait bench` measures inside each rank: matmuls by size and format, memory, collectives by size, a job's loader.

Several ranks measure at the same time, as they compute in training. The least of several times counts: what else the
machine does only ever adds. On a CPU with one thread per process it is the thread's own time.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from time import perf_counter, thread_time
from typing import Any

import torch
import torch.distributed as dist

from plait.job import Job
from plait.launch.place import Place

Points = list[list[float]]

SIDES = {"cpu": (32, 64, 128, 256, 512, 1024, 2048), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192, 16384)}
FORMATS = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SIZES = tuple(4096 * 4**i for i in range(8))
"""Bytes of a collective: 4 KiB to 64 MiB."""
COPIED = {"cpu": 2**26, "cuda": 2**29}
"""Bytes of the block that is copied: far more than a cache holds."""
SLOW = {"matmul": 0.03, "collective": 0.2}
"""Seconds: when one call takes longer, larger ones are left out."""
BUDGET = 0.1
"""Seconds for which one call is repeated."""


def device_of(place: Place, kind: str) -> torch.device:
    """The device of a rank on this machine."""
    device = torch.device(kind, place.local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    return device


def compute(place: Place, kind: str, sides: tuple[int, ...] = ()) -> dict[str, Any]:
    """Points (flops, flop/s) of square matmuls by format, and bytes/s of a copy in memory, each byte read and written."""
    device = device_of(place, kind)
    formats = ("fp32", "bf16", "fp16") if kind == "cpu" else tuple(FORMATS)
    found = {name: list(_matmuls(device, name, sides or SIDES[kind])) for name in formats}
    source = torch.ones(COPIED[kind] // 4, device=device)
    target = torch.empty_like(source)
    moved = 2 * COPIED[kind] / _least(lambda: target.copy_(source), device)
    result: dict[str, Any] = {"matmuls": found, "memory": moved}
    if kind == "cuda":
        pinned = torch.empty(COPIED[kind] // 4, pin_memory=True)
        result["host"] = COPIED[kind] / _least(lambda: target.copy_(pinned, non_blocking=True), device)
    return result


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


def communicate(place: Place, kind: str, sizes: tuple[int, ...] = ()) -> dict[str, Points]:
    """Points (bytes, seconds) of every collective among all ranks."""
    device = device_of(place, kind)
    place.connect(device)
    found = {}
    for name, prepare in COLLECTIVES.items():
        found[name] = []
        for size in sizes or SIZES:
            count = max(1, size // 4 // place.world) * place.world
            seconds = _together(prepare(torch.ones(count, device=device), place), device)
            found[name].append([4.0 * count, seconds])
            if seconds > SLOW["collective"]:
                break
    dist.barrier()
    return found


def _together(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call by all ranks: the least over calls of what the slowest rank took. The same on all ranks."""
    longest, times = 0.0, []
    while len(times) < 4 or (longest < BUDGET and len(times) < 40):
        taken = torch.zeros(1, dtype=torch.float64, device=device)
        dist.all_reduce(taken)  # all start together
        _settled(device)
        start = perf_counter()
        work()
        _settled(device)
        taken[0] = perf_counter() - start
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        times.append(float(taken))
        longest += times[-1]
    return min(times[1:])


def _all_reduce(whole: torch.Tensor, place: Place) -> Callable[[], Any]:
    return lambda: dist.all_reduce(whole)


def _all_gather(whole: torch.Tensor, place: Place) -> Callable[[], Any]:
    parts = list(whole.chunk(place.world))
    return lambda: dist.all_gather(parts, parts[place.rank].clone())


def _reduce_scatter(whole: torch.Tensor, place: Place) -> Callable[[], Any]:
    parts = list(whole.chunk(place.world))
    return lambda: dist.reduce_scatter(parts[place.rank].clone(), parts)


def _all_to_all(whole: torch.Tensor, place: Place) -> Callable[[], Any]:
    received = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(received, whole)


def _send(whole: torch.Tensor, place: Place) -> Callable[[], Any]:
    """Every rank to the next, all at once."""
    received = torch.empty_like(whole)
    after, before = (place.rank + 1) % place.world, (place.rank - 1) % place.world

    def work() -> None:
        for done in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, whole, after), dist.P2POp(dist.irecv, received, before)]
        ):
            done.wait()

    return work


COLLECTIVES = {"all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter,
               "all_to_all": _all_to_all, "send": _send}  # fmt: skip


def load(place: Place, job: Job, seconds: float = 1.0) -> float:
    """Samples/s that this rank reads of its share of the job's batches: the best of several stretches."""
    from plait.data import Position, Share
    from plait.loading import batches

    source = batches(job.data(), job.batch, job.seed, Share(place.rank, place.world), Position())
    next(source)
    best, ends = 0.0, perf_counter() + seconds
    while perf_counter() < ends:
        start = perf_counter()
        count = sum(batch.count for batch in islice(source, 4))
        best = max(best, count / (perf_counter() - start))
    return best
