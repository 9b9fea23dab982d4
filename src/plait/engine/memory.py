"""Measure a rank's memory: its tensors by category of a plan's memory estimate, the overhead of the allocator, and other use of the
device.

`measure_memory` serves the run's record, out-of-memory reports and the benchmark. It reads counters: no step waits for it. Peaks
count from `reset_peaks` on, which `plait train` calls when the first step is over. Building, compiling and kernel selection take
memory once; a run needs the memory of its steps. The first step's own peaks are recorded before the reset.
"""

import resource
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from plait.engine.memory_use import MemoryUse
from plait.tensors.torch_private import local_tensor, storage_key, tree_leaves

if TYPE_CHECKING:
    from plait.engine.engine import Engine

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes per unit of the system's peak resident size."""


def measure_memory(engine: "Engine") -> MemoryUse:
    """Measure this rank's memory: tensors between two steps, and peaks since the last reset."""
    device, process = engine.rank_model.device, psutil.Process()
    here, host = _sum_by_category(engine, device)
    resident = process.memory_info().rss, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
    if device.type == "cpu":
        return MemoryUse("cpu", here, resident=resident[0], resident_peak=max(resident))
    stats = torch.cuda.memory_stats(device)
    peak = lambda what: int(stats.get(f"{what}_bytes.all.peak", 0))  # noqa: E731
    free, total = torch.cuda.mem_get_info(device)
    beside = max(0, total - free - int(stats.get("reserved_bytes.all.current", 0)))
    return MemoryUse(
        str(device), here, host, peak("requested"), peak("allocated"), peak("reserved"), int(stats.get("num_alloc_retries", 0)),
        beside, total, resident[0], max(resident),
    )  # fmt: skip


def reset_peaks(device: torch.device) -> None:
    """Reset the peaks of the device. (Those of host memory cannot be reset.)"""
    if device.type != "cpu":
        torch.cuda.reset_peak_memory_stats(device)


def iterate_kept_tensors(engine: "Engine") -> Iterator[tuple[str, Iterable[Any]]]:
    """Yield (memory category, tensors) of a rank between two steps; a repeated tensor counts in its first category."""
    rank_model = engine.rank_model
    yield "parameters", [*rank_model.params.values(), *rank_model.module.parameters()]
    yield "buffers", rank_model.module.buffers()
    yield "host copies", (rank_model.techniques.masters or {}).values()
    state = [list(each.values()) for each in engine.optimizer.state.values()]
    yield "optimizer", (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
    if rank_model.techniques.compressor is not None:
        yield "residuals", rank_model.techniques.compressor.state().values()
    if rank_model.techniques.average is not None:
        yield "average", rank_model.techniques.average.tensors.values()
    if rank_model.techniques.replica_groups is not None:
        yield "outer", rank_model.techniques.replica_groups.list_extra_tensors()
    for reducer in rank_model.reducers.values():
        yield "gradients", reducer.list_buffers()


def _sum_by_category(engine: "Engine", device: torch.device) -> tuple[dict[str, int], dict[str, int]]:
    """Sum the bytes of a rank between two steps, on its device and on the host. Each storage counts once."""
    here, host, seen = dict[str, int](), dict[str, int](), set[int]()
    for category, tensors in iterate_kept_tensors(engine):
        for tensor in map(local_tensor, tensors):
            key = storage_key(tensor)
            if key in seen or tensor.is_meta:
                continue
            seen.add(key)
            found = here if tensor.device == device else host
            found[category] = found.get(category, 0) + tensor.untyped_storage().nbytes()
    return here, host
