"""Numbers between host and device without a wait: those of the host are queued to the device, those of the device are read late.

A copy from memory that is not pinned, and a number of a device that is read at once (`.item()`, `float(…)`), make the host wait until
the device has done all that was queued before. Copies through pinned memory are queued as operators are; an event tells when one has
been made. On a CPU there is nothing to wait for.

How long a rank waits for messages of others is noted too, so that the time it computes can be told from the time it waits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.tensors.modules import format_in
from plait.tensors.torch_private import tree_map_only


def upload(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
    """A row of the host's numbers as a tensor of shape [values] on a device, which may not be there yet: operators queue behind it."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype).pin_memory().to(device, non_blocking=True)


def move(tree: object, device: torch.device, cast: torch.dtype | None) -> Any:
    """The tensors of a tree on the device, floating ones in `cast` when it is given."""
    if device.type == "cpu" and cast is None:
        return tree

    def one(t: Tensor) -> Tensor:
        return t.to(device, format_in(t, cast), non_blocking=True)

    return tree_map_only(Tensor, one, tree)


def any_has(own: Sequence[bool], summed: Tensor) -> list[bool]:
    """Which of some things this rank or another one has. `own`: which this one has; `summed` [n], on the device: how many ranks have each.

    It is read, and waited for, where this rank lacks any. In a dry run nothing was summed: there ranks have what this one has."""
    if all(own):
        return [True] * len(own)
    return [here or count > 0 for here, count in zip(own, summed.tolist())]


class HostCopy:
    """The numbers of a row, of shape [n], on their way to the host. The copy is queued now; `read` waits for it, once."""

    def __init__(self, row: Tensor):
        self.row = row.detach()
        self.event: torch.cuda.Event | None = None
        self.numbers: list[float] | None = None
        if row.device.type == "cuda":
            self.row = torch.empty(row.shape, dtype=row.dtype, pin_memory=True).copy_(self.row, non_blocking=True)
            self.event = torch.cuda.Event(blocking=True)  # who waits for it sleeps: the host's cores have other work
            self.event.record()

    def read(self) -> list[float]:
        """The numbers. Waits for the device where they are not there yet."""
        if self.numbers is None:
            if self.event is not None:
                self.event.synchronize()
            self.numbers = self.row.tolist()
        return self.numbers


Interval = tuple[float, float]
"""Begin and end, by `time.perf_counter`."""


@contextmanager
def waits(found: list[Interval]) -> Iterator[None]:
    """Inside, `found` gets every wait of this thread for a message, from which on a processor control returns when it is there."""
    with waits_by_group(lambda group, begin, end: found.append((begin, end)), perf_counter):
        yield


ISSUING = ("all", "reduce", "broadcast", "scatter", "gather", "send", "recv", "end_coalescing")
"""How the methods of a process group begin that return a `dist.Work`."""


@contextmanager
def waits_by_group(note: Callable[[dist.ProcessGroup | None, Any, Any], None], now: Callable[[], Any]) -> Iterator[None]:
    """Inside, `note(group, begin, end)` is called after every wait of this thread for a message, with begin and end by the clock `now`.

    The group is None if torch returned a `dist.Work` that no method of a group has returned.
    """
    thread, issued = get_ident(), dict[int, tuple[dist.Work, dist.ProcessGroup | None]]()
    names = [n for n in vars(dist.ProcessGroup) if n.strip("_").startswith(ISSUING) and not n.startswith("__")]
    plain = {n: getattr(dist.ProcessGroup, n) for n in names}
    plain_wait = dist.Work.wait

    def issue(name: str) -> Callable[..., Any]:
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            work = plain[name](group, *args, **kwargs)
            issued[id(work)] = work, group  # kept until it is waited for: another would get its id
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


def apart(spans: list[Interval], waited: list[Interval]) -> float:
    """Seconds in the spans, without what was waited in them. Neither overlaps with its own kind."""
    inside = (max(0.0, min(b, d) - max(a, c)) for a, b in spans for c, d in waited)
    return sum(b - a for a, b in spans) - sum(inside)
