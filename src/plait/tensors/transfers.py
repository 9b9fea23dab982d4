"""Transfers between host and device without blocking: uploads are queued, and device values are read late.

A copy from memory that is not pinned, and an immediate read of a device value (`.item()`, `float(…)`), block the host until the device has
finished all queued work. Copies through pinned memory are queued as operators are; an event marks their completion. On a CPU there
is nothing to wait for.

Waits for messages of other ranks are recorded too, to separate compute time from waiting time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.tensors.module_state import choose_dtype
from plait.tensors.torch_private import tree_map_only


def upload_row(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return host values as a tensor of shape [values] on a device. The copy is asynchronous; later operators queue behind it."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


def move_tree(tree: object, device: torch.device, cast: torch.dtype | None) -> Any:
    """Move the tensors of a tree to the device, floating ones cast to `cast` if given."""
    if device.type == "cpu" and cast is None:
        return tree

    def move_tensor(t: Tensor) -> Tensor:
        return t.to(device, choose_dtype(t, cast), non_blocking=True)

    return tree_map_only(Tensor, move_tensor, tree)


def any_rank_has(own: Sequence[bool], summed: Tensor) -> list[bool]:
    """Return which items this rank or another one has. `own`: items of this rank; `summed` [n], on the device: number of ranks with each.

    The device is waited for only if this rank lacks an item. In a dry run `summed` is not reduced, so ranks have the same items.

    """
    if all(own):
        return [True] * len(own)
    return [here or count > 0 for here, count in zip(own, summed.tolist())]


class HostCopy:
    """An asynchronous copy of a row, of shape [n], to the host. It is queued now; `read` waits for it, once."""

    def __init__(self, row: Tensor):
        self.row = row.detach()
        self.event: torch.cuda.Event | None = None
        self.numbers: list[float] | None = None
        if row.device.type == "cuda":
            self.row = torch.empty(row.shape, dtype=row.dtype, pin_memory=True).copy_(self.row, non_blocking=True)
            self.event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps, which frees the host's core
            self.event.record()

    def read(self) -> list[float]:
        """Return the values, waiting for the device if necessary."""
        if self.numbers is None:
            if self.event is not None:
                self.event.synchronize()
            self.numbers = self.row.tolist()
        return self.numbers


Interval = tuple[float, float]
"""(begin, end) by `time.perf_counter`."""


@contextmanager
def record_waits(found: list[Interval]) -> Iterator[None]:
    """Context that appends every wait of this thread for a message to `found`. On a CPU, a wait ends when the message has arrived."""
    with record_group_waits(lambda group, begin, end: found.append((begin, end)), perf_counter):
        yield


ISSUING_PREFIXES = ("all", "reduce", "broadcast", "scatter", "gather", "send", "recv", "end_coalescing")
"""Prefixes for methods of a process group that return a `dist.Work`."""


@contextmanager
def record_group_waits(note: Callable[[dist.ProcessGroup | None, Any, Any], None], now: Callable[[], Any]) -> Iterator[None]:
    """Context that calls `note(group, begin, end)` after every wait of this thread for a message, with times of the clock `now`.

    The group is None if no method of a group returned the `dist.Work`.

    """
    thread, issued = get_ident(), dict[int, tuple[dist.Work, dist.ProcessGroup | None]]()
    names = [n for n in vars(dist.ProcessGroup) if n.strip("_").startswith(ISSUING_PREFIXES) and not n.startswith("__")]
    plain = {n: getattr(dist.ProcessGroup, n) for n in names}
    plain_wait = dist.Work.wait

    def issue(name: str) -> Callable[..., Any]:
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            work = plain[name](group, *args, **kwargs)
            issued[id(work)] = work, group  # kept until waited for, so that its id is not reused
            return work

        return call

    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        began = now()
        try:
            return plain_wait(work, *args, **kwargs)
        finally:
            if get_ident() == thread:
                note(issued.pop(id(work), (work, None))[1], began, now())

    usual = {n: vars(dist.ProcessGroup)[n] for n in names}, vars(dist.Work)["wait"]
    for name in names:
        setattr(dist.ProcessGroup, name, issue(name))
    dist.Work.wait = wait
    try:
        yield
    finally:
        dist.Work.wait = usual[1]
        for name, method in usual[0].items():
            setattr(dist.ProcessGroup, name, method)


def exposed_seconds(spans: list[Interval], waited: list[Interval]) -> float:
    """Return the seconds in the spans without the waits in them. Neither list overlaps itself."""
    inside = (max(0.0, min(b, d) - max(a, c)) for a, b in spans for c, d in waited)
    return sum(b - a for a, b in spans) - sum(inside)
