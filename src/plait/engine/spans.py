"""What took time in a step, by the clock of the host on a CPU, and by events of the device on a GPU.

On a GPU the host only queues work: its clock says how long that took. So an event is recorded where the host would look at its clock,
and events are read when the device has passed them. That costs the device next to nothing, and no wait.
"""

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch

SPANS = ("data", "receive", "send", "replicate", "forward", "loss", "backward", "collect", "reduce", "optimizer")

Mark = Any
"""A moment: seconds of `time.perf_counter`, or a `torch.cuda.Event`."""
Span = tuple[str, float, float]
"""(name, start, seconds)."""

_SORTS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
_PHASES = ("data", "forward", "backward", "reduce", "optimizer")


def sort_of(name: str) -> str:
    """Which of `SPANS` a span counts as: F1.3 is forward, B, I and W are backward, `receive F1.3` is receive."""
    return _SORTS.get(name[0]) or name.partition(" ")[0]


class DeviceClock:
    """A clock on the current stream of a GPU. Its moments are events, whose times are known once the device has passed them."""

    def __init__(self) -> None:
        self.zero: torch.cuda.Event | None = None
        """An event whose time on the host's clock is known."""
        self.at = 0.0
        self.free = list[torch.cuda.Event]()

    def now(self) -> torch.cuda.Event:
        """This moment of the stream. The first one waits for the device, to set the clock."""
        if self.zero is None:
            self.zero = torch.cuda.Event(enable_timing=True)
            self.zero.record()
            self.zero.synchronize()
            self.at = perf_counter()
        event = self.free.pop() if self.free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, events: Iterable[torch.cuda.Event]) -> list[float]:
        """Seconds of `time.perf_counter` of events that are over, in their order. The clock uses them again."""
        if self.zero is None:
            return []
        events = list(events)
        if events and not events[-1].query():  # somebody wants to know at once
            events[-1].synchronize()
        times = [self.at + self.zero.elapsed_time(event) / 1000 for event in events]
        if events:  # the time between two events is known to fewer digits the longer it is
            self.free += [self.zero, *events[:-1]]
            self.zero, self.at = events[-1], times[-1]
        return times


class Spans:
    """(name, begin, end) of what takes time in a step; spans may nest. `beat` is told of each beginning."""

    def __init__(self, beat: Callable[[str], None], device: torch.device):
        self.beat = beat
        self.clock = DeviceClock() if device.type == "cuda" else None
        self.now: Callable[[], Mark] = perf_counter if self.clock is None else self.clock.now
        self.open: list[tuple[str, Mark, Mark | None]] = []
        self.waited, self._since = 0.0, 0.0
        """Seconds in which the host has waited for samples, since the last step."""

    def begin(self, name: str) -> None:
        """Something begins."""
        self.beat(name if name in _PHASES else "forward")
        if name == "data":
            self._since = perf_counter()
        self.open.append((name, self.now(), None))

    def end(self, name: str) -> None:
        """The innermost open span of this name ends."""
        now = self.now()
        if name == "data":
            self.waited += perf_counter() - self._since
        for i in range(len(self.open) - 1, -1, -1):
            if self.open[i][0] == name and self.open[i][2] is None:
                self.open[i] = (name, self.open[i][1], now)
                return

    def taken(self) -> Callable[[], list[Span]]:
        """The spans of the step, which is over: a function that gives them, to be called once, when the device is through with them."""
        marks = [(name, begin, begin if end is None else end) for name, begin, end in self.open]
        self.open, self.waited = [], 0.0
        clock = self.clock
        if clock is None:
            found = [(name, begin, end - begin) for name, begin, end in marks]
            return lambda: found
        return lambda: _read(clock, marks)


def _read(clock: DeviceClock, marks: list[tuple[str, Mark, Mark]]) -> list[Span]:
    """The spans between a device's events."""
    unique = dict.fromkeys(event for _, *ends in marks for event in ends)
    times = dict(zip(unique, clock.read(unique)))
    return [(name, times[begin], times[end] - times[begin]) for name, begin, end in marks]
