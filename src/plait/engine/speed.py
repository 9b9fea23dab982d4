"""How long a rank computes in a step, and how many samples fit into its memory: what shares of the batch by speed go by."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from plait.config.plan import Plan
from plait.engine.spans import sort_of
from plait.parallel.rank_model import RankModel
from plait.tensors.waits import Interval, apart, waits

COMPUTING = ("forward", "backward", "loss", "replicate")
FULL = 0.9
"""Part of a GPU's memory that shares may grow into."""


class SpeedMeter:
    """Reads one rank's clock and memory. `busy`: seconds of forward and backward passes of the last step.

    The wall's, since a device that others use too is slow by the wall only. Where speeds are compared, what a rank waited for others
    is left out: on processors the waits are timed. On GPUs passes return before they are computed, so two events tell.
    """

    def __init__(self, rank_model: RankModel):
        self.rank_model, self.busy, self.room = rank_model, 0.0, 0
        self.waited = list[Interval]()
        self.compares = rank_model.techniques.balance is not None
        self.events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if self.compares and rank_model.device.type == "cuda":
            self.events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the passes of a step."""
        self.waited = []
        if not self.compares:
            yield
        elif self.events is None:
            with waits(self.waited):
                yield
        else:
            torch.cuda.reset_peak_memory_stats()
            self.events[0].record()
            yield
            self.events[1].record()

    def read(self, spans: Sequence[tuple[str, float, float]], samples: int) -> None:
        """After a step, whose numbers are on the host, with these spans and so many samples."""
        computing = [(start, start + took) for name, start, took in spans if sort_of(name) in COMPUTING]
        self.busy = apart(computing, self.waited)
        if self.events is not None:
            self.busy = self.events[0].elapsed_time(self.events[1]) / 1000
            self.room = _room(samples)


def _room(samples: int) -> int:
    """How many samples fit, as far as memory grows with them; 0 where that is not known."""
    held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    whole = torch.cuda.mem_get_info()[1] * FULL
    return int(samples * (whole - held) / (peak - held)) if samples and peak > held else 0


def slowest_of_share(plan: Plan, busy: Sequence[float]) -> list[float]:
    """Seconds that the slowest rank of each share computed. `busy`: those of each rank."""
    slowest = [0.0] * plan.ranks
    for rank, seconds in enumerate(busy):
        slowest[plan.share(rank)] = max(slowest[plan.share(rank)], seconds)
    return slowest


def room_of_share(plan: Plan, room: Sequence[float]) -> list[int]:
    """How many samples fit into the memory of every rank of a share. `room`: into each rank's; 0 if that is unknown."""
    least = [0] * plan.ranks
    for rank, fits in enumerate(room):
        share = plan.share(rank)
        least[share] = min(least[share] or int(fits), int(fits) or least[share])
    return least
