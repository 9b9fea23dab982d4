"""Results of one optimizer step: values available at once, values read from the device later, and timings.

[Note: Spans]
Spans time a step by the host clock on a CPU, and by device events on a GPU.

On a GPU the host only queues work, so its clock measures only the queueing. Instead an event is recorded in place of each host
timestamp, and read once the device has passed it. That costs the device next to nothing, and no wait.

Also the measurements for splitting the batch by speed: how long a rank computes in a step, and how many samples fit into its memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from plait.config.errors import Problem
from plait.config.phases import Phase
from plait.config.plan import Plan
from plait.data.batch import Batch
from plait.parallel.rank_model import RankModel
from plait.tensors.torch_private import tree_leaves
from plait.tensors.transfers import Interval, exposed_seconds, record_group_waits, record_waits

SPAN_NAMES = (
    "checkpoint", "evaluate", "record", "callbacks", "data", "step", "receive", "send", "replicate", "forward", "loss", "backward", "collect",
    "reduce", "optimizer", "wait",
)  # fmt: skip
DENSE_STEPS, SPARSE_INTERVAL = 32, 16
"""Communication waits are recorded in the first steps and in every n-th later step."""

TimeMark = Any
"""A moment: seconds of `time.perf_counter`, or a `torch.cuda.Event`."""
Span = tuple[str, float, float]
"""(name, start, seconds)."""

_SPAN_KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
_PHASES = ("data", "forward", "backward", "reduce", "optimizer")


def get_span_kind(name: str) -> str:
    """Return the entry of `SPAN_NAMES` for a span: F1.3 is forward, B, I and W are backward, `receive F1.3` is receive, `wait tp` is
    wait."""
    return _SPAN_KINDS.get(name[0]) or name.partition(" ")[0]


class DeviceClock:
    """A clock on the current stream of a GPU. Its timestamps are events, whose times are available once the device has passed them."""

    def __init__(self) -> None:
        self.origin: torch.cuda.Event | None = None
        """An event whose host time is available."""
        self.origin_time = 0.0
        self.free_events = list[torch.cuda.Event]()

    def now(self) -> torch.cuda.Event:
        """Record a timestamp in the stream. The first call waits for the device, to set the clock."""
        if self.origin is None:
            self.origin = torch.cuda.Event(enable_timing=True)
            self.origin.record()
            self.origin.synchronize()
            self.origin_time = perf_counter()
        event = self.free_events.pop() if self.free_events else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, events: Iterable[torch.cuda.Event]) -> list[float]:
        """Return seconds of `time.perf_counter` of completed events, in order. The clock reuses the events."""
        if self.origin is None:
            return []
        events = list(events)
        if events and not events[-1].query():  # the latest event was requested before it completed
            events[-1].synchronize()
        times = [self.origin_time + self.origin.elapsed_time(event) / 1000 for event in events]
        if events:  # the time between two events loses precision as it grows
            self.free_events += {self.origin, *events} - {events[-1]}
            self.origin, self.origin_time = events[-1], times[-1]
        return times


class Spans:
    """(name, begin, end) of timed spans in a step; spans may nest. `beat` is called at each beginning."""

    def __init__(self, beat: Callable[[str], None], device: torch.device):
        self.beat = beat
        self.clock = DeviceClock() if device.type == "cuda" else None
        self.now: Callable[[], TimeMark] = perf_counter if self.clock is None else self.clock.now
        self.marks: list[tuple[str, TimeMark, TimeMark | None]] = []
        self.waited, self._data_begin = 0.0, 0.0
        """Seconds that the host has waited for samples since the last step."""

    def begin(self, name: str) -> None:
        self.marks.append((name, self.now(), None))
        self.beat(name if name in _PHASES else "forward")
        if name == "data":
            self._data_begin = perf_counter()

    def end(self, name: str) -> None:
        """End the innermost open span of this name."""
        now = self.now()
        if name == "data":
            self.waited += perf_counter() - self._data_begin
        for i in range(len(self.marks) - 1, -1, -1):
            if self.marks[i][0] == name and self.marks[i][2] is None:
                self.marks[i] = (name, self.marks[i][1], now)
                return

    @contextmanager
    def record_span(self, name: str) -> Iterator[None]:
        """Record a span around the passes of a step; later work is recorded with the next step."""
        self.marks.append((name, self.now(), None))
        try:
            yield
        finally:
            self.end(name)

    @contextmanager
    def record_waits(self, step: int, axes: Callable[[dist.ProcessGroup], str]) -> Iterator[None]:
        """Record each wait for messages in a step as a span such as `wait tp`. `axes`: names a group's axes.

        When all ranks of a group have started a wait, the slowest one has arrived: the rest is the message itself.
        """
        if step > DENSE_STEPS and step % SPARSE_INTERVAL:
            yield
            return

        def record_wait(group: dist.ProcessGroup | None, begin: TimeMark, end: TimeMark) -> None:
            self.marks.append((f"wait {axes(group) if group is not None else 'others'}", begin, end))

        with record_group_waits(record_wait, self.now):
            yield

    def take_spans(self) -> Callable[[], list[Span]]:
        """Take the spans of the finished step. Returns a function that reads them, to be called once the device has finished.

        An open span ends with the step, and begins again with the next one.
        """
        now, clock = self.now(), self.clock
        marks = [(name, begin, now if end is None else end) for name, begin, end in self.marks]
        self.marks, self.waited = [(name, now, None) for name, _, end in self.marks if end is None], 0.0
        if clock is None:
            found = [(name, begin, end - begin) for name, begin, end in marks]
            return lambda: found
        return lambda: _read_spans(clock, marks, now)


def _read_spans(clock: DeviceClock, marks: list[tuple[str, TimeMark, TimeMark]], now: TimeMark) -> list[Span]:
    """Read the spans between device events; `now` is the latest event."""
    unique = [*dict.fromkeys(event for _, *ends in marks for event in ends if event is not now), now]
    times = dict(zip(unique, clock.read(unique)))
    return [(name, times[begin], times[end] - times[begin]) for name, begin, end in marks]


COMPUTE_SPANS = ("forward", "backward", "loss", "replicate")
MAX_MEMORY_FRACTION = 0.9
"""Fraction of a GPU's memory that local batches may grow into."""


class SpeedMeter:
    """Measures one rank's compute time and memory. `busy`: seconds of forward and backward passes of the last step.

    Times are wall-clock, since a device shared with other processes is slow only by wall-clock. If speeds are compared, waits for
    other ranks are subtracted: on CPUs the waits are timed. On GPUs passes return before they are computed, so two events measure
    them.
    """

    def __init__(self, rank_model: RankModel):
        self.rank_model, self.busy, self.sample_room = rank_model, 0.0, 0
        self.wait_intervals = list[Interval]()
        self.compares_speeds = rank_model.techniques.balance is not None
        self.events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if self.compares_speeds and rank_model.device.type == "cuda":
            self.events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    @contextmanager
    def measure_passes(self) -> Iterator[None]:
        """Measure the passes of a step."""
        self.wait_intervals = []
        if not self.compares_speeds:
            yield
        elif self.events is None:
            with record_waits(self.wait_intervals):
                yield
        else:
            torch.cuda.reset_peak_memory_stats()
            self.events[0].record()
            yield
            self.events[1].record()

    def read(self, spans: Sequence[tuple[str, float, float]], samples: int) -> None:
        """Read the measurements of a step whose statistics are on the host. `samples`: samples of the step."""
        computing = [(start, start + took) for name, start, took in spans if get_span_kind(name) in COMPUTE_SPANS]
        self.busy = exposed_seconds(computing, self.wait_intervals)
        if self.events is not None:
            self.busy = self.events[0].elapsed_time(self.events[1]) / 1000
            self.sample_room = _estimate_room(samples)


def _estimate_room(samples: int) -> int:
    """Estimate how many samples fit, by the memory growth per sample; 0 if unavailable."""
    held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    whole = torch.cuda.mem_get_info()[1] * MAX_MEMORY_FRACTION
    return int(samples * (whole - held) / (peak - held)) if samples and peak > held else 0


def get_slowest_by_share(plan: Plan, busy: Sequence[float]) -> list[float]:
    """Return the compute seconds of the slowest rank of each local batch. `busy`: seconds by rank."""
    slowest = [0.0] * plan.ranks
    for rank, seconds in enumerate(busy):
        slowest[plan.dp_rank(rank)] = max(slowest[plan.dp_rank(rank)], seconds)
    return slowest


def get_room_by_share(plan: Plan, room: Sequence[float]) -> list[int]:
    """Return how many samples fit into the memory of every rank of each local batch. `room`: by rank; 0 if unavailable."""
    least = [0] * plan.ranks
    for rank, fits in enumerate(room):
        share = plan.dp_rank(rank)
        least[share] = min(least[share] or int(fits), int(fits) or least[share])
    return least


@dataclass
class StepNumbers:
    """Results of a step: values reduced over the ranks, and local ones."""

    loss: float
    """Weighted mean over the global batch."""
    norm: float
    """Gradient norm over all parameters, before clipping."""
    skipped: bool
    """Whether no rank updated anything: an fp16 overflow, or a non-finite step with on_nan=skip."""
    spans: list[Span]
    """(name, start, seconds) of timed spans on this rank. Starts are `time.perf_counter`; on a GPU the times are the device's. Names are
    those of `SPAN_NAMES`, and under `pp` those of actions, `receive F1.3`, `F1.3` and `send F1.3`: see `get_span_kind`."""
    by_rank: list[tuple[int, float]]
    """(samples of this step, compute seconds of the last measured step) of each local batch; of its slowest rank, if ranks share it."""
    data_by_rank: list[float] = field(default_factory=list)
    """Seconds that each rank waited for this step's samples."""
    note: str = ""
    """A note about a changed batch split."""
    trouble: Problem | None = None
    """The problem of a skipped step: the non-finite value, and its source."""
    logged: dict[str, float] = field(default_factory=dict)
    """Values that the job recorded with `plait.log`, as means over the global batch, and those of callbacks from `Engine.log`."""
    norms: dict[str, float] = field(default_factory=dict)
    """With `group_norms`, the gradient norm of each parameter group over all ranks, before clipping, by its number or "name"."""
    loss_scale: float | None = None
    """Under fp16, the factor on the losses of the step."""


class NumbersSource(Protocol):
    """A source of the statistics of a step."""

    @property
    def known(self) -> bool:
        """Whether they are on the host and complete. Newly logged names and the problem of a skipped step arrive last."""

    @property
    def numbers(self) -> StepNumbers:
        """The statistics. Waits for the device if they are not on the host."""


@dataclass(frozen=True)
class HostNumbers:
    """Statistics that are on the host."""

    numbers: StepNumbers
    known: bool = True


@dataclass
class Step:
    """The result of one optimizer step. `samples`: seen after it, over all ranks.

    Each field of `StepNumbers` is an attribute of the step too: `step.loss`, `step.norm`, …. On a GPU these are still being copied to
    the host when the step returns: the first access waits for the device. `known` is true once they are there. Access one step later
    does not wait.
    """

    step: int
    lr: float
    """Learning rate of the first parameter group."""
    samples: int
    size: int
    """Samples in this step over all ranks."""
    tokens: int
    """Elements of integer inputs of rank 2 or more on this rank; 0 if the inputs are not tokens."""
    stop: bool
    """Whether a stop was requested on any rank so far. All ranks see it in the same step, on a GPU in the next one."""
    source: "NumbersSource"
    """Source of its statistics."""
    lrs: list[float] = field(default_factory=list)
    """Learning rate of each parameter group."""
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    """Loss, norm and lr of each due phase, in a job with phases; the fields above are those of the first phase with every=1."""
    given: dict[str, float] = field(default_factory=dict)
    """Values that callbacks add to the logged ones."""

    @property
    def known(self) -> bool:
        """Whether its statistics are on the host."""
        return self.source.known

    def __getattr__(self, name: str) -> Any:
        if name not in StepNumbers.__dataclass_fields__:
            raise AttributeError(f"a Step has no attribute {name!r}")
        found = getattr(self.source.numbers, name)
        return found | self.given if name == "logged" else found


def merge_phase_steps(steps: list[tuple[Phase | None, Step]]) -> Step:
    """Merge the steps of all due phases into one.

    Loss, norm and learning rate are those of the first phase that is due in every step, so they belong to one phase throughout a run.
    Those of all phases are in `phases`.
    """
    last = steps[-1][1]
    if steps[-1][0] is None:
        return last
    main = next(step for phase, step in steps if phase is not None and phase.every == 1)
    trouble = next((step.trouble for _, step in steps if step.trouble is not None), None)
    norms, logged = dict[str, float](), dict[str, float]()
    for _, step in steps:
        norms, logged = norms | step.norms, logged | step.logged
    numbers = replace(
        last.source.numbers, loss=main.loss, norm=main.norm, trouble=trouble, norms=norms, logged=logged,
        skipped=any(step.skipped for _, step in steps), spans=[span for _, step in steps for span in step.spans],
    )  # fmt: skip
    phases = {phase.name: {"loss": step.loss, "norm": step.norm, "lr": step.lr} for phase, step in steps if phase}
    return replace(last, lr=main.lr, source=HostNumbers(numbers), phases=phases)


def count_tokens(batch: Batch) -> int:
    """Count the elements of the first integer input with a sequence dim."""
    count = 0
    for micro in batch.micro_batches:
        first = next((t for t in tree_leaves(micro.inputs) if isinstance(t, Tensor)), None)
        if first is not None and first.dim() == 2 and not first.is_floating_point():
            count += first.numel() if micro.count else 0
    return count
