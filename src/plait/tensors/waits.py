"""When a rank waits for messages of others, so that the time it computes can be told from the time it waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter
from typing import Any

import torch.distributed as dist

Interval = tuple[float, float]
"""Begin and end, by `time.perf_counter`."""


@contextmanager
def waits(found: list[Interval]) -> Iterator[None]:
    """Inside, `found` gets every wait of this thread for a message, from which on a processor control returns when it is there."""
    plain, thread = dist.Work.wait, get_ident()

    def timed(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        try:
            return plain(work, *args, **kwargs)
        finally:
            if get_ident() == thread:
                found.append((began, perf_counter()))

    dist.Work.wait = timed
    try:
        yield
    finally:
        dist.Work.wait = plain


def apart(spans: list[Interval], waited: list[Interval]) -> float:
    """Seconds in the spans, without what was waited in them. Neither overlaps with its own kind."""
    inside = (max(0.0, min(b, d) - max(a, c)) for a, b in spans for c, d in waited)
    return sum(b - a for a, b in spans) - sum(inside)
