"""What one optimizer step did: what the host knows at once, what it reads of the device, late, and what took time.

[Note: Spans]
What took time in a step, by the clock of the host on a CPU, and by events of the device on a GPU.

On a GPU the host only queues work: its clock says how long that took. So an event is recorded where the host would look at its clock,
and events are read when the device has passed them. That costs the device next to nothing, and no wait.

Here is also what shares of the batch by speed go by: how long a rank computes in a step, and how many samples fit into its memory.
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
from plait.tensors.transfers import Interval, apart, waits, waits_by_group

SPANS = (
    "checkpoint", "evaluate", "record", "callbacks", "data", "step", "receive", "send", "replicate", "forward", "loss", "backward", "collect",
    "reduce", "optimizer", "wait",
)  # fmt: skip
DENSE, SPARSE = 32, 16
"""Waits for messages are recorded in the first steps and in every n-th one that follows: recording costs less than 1 % of a step."""

Mark = Any
"""A moment: seconds of `time.perf_counter`, or a `torch.cuda.Event`."""
Span = tuple[str, float, float]
"""(name, start, seconds)."""

_SORTS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
_PHASES = ("data", "forward", "backward", "reduce", "optimizer")


def sort_of(name: str) -> str:
    """Which of `SPANS` a span counts as: F1.3 is forward, B, I and W are backward, `receive F1.3` is receive, `wait tp` is wait."""
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
        if events and not events[-1].query():  # the latest one: somebody wants to know at once
            events[-1].synchronize()
        times = [self.at + self.zero.elapsed_time(event) / 1000 for event in events]
        if events:  # the time between two events is known to fewer digits the longer it is
            self.free += {self.zero, *events} - {events[-1]}
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
        self.open.append((name, self.now(), None))
        self.beat(name if name in _PHASES else "forward")
        if name == "data":
            self._since = perf_counter()

    def end(self, name: str) -> None:
        """The innermost open span of this name ends."""
        now = self.now()
        if name == "data":
            self.waited += perf_counter() - self._since
        for i in range(len(self.open) - 1, -1, -1):
            if self.open[i][0] == name and self.open[i][2] is None:
                self.open[i] = (name, self.open[i][1], now)
                return

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """A span of what happens around the passes of a step; what comes after them is recorded with the step that follows."""
        self.open.append((name, self.now(), None))
        try:
            yield
        finally:
            self.end(name)

    @contextmanager
    def waits_of(self, step: int, axes: Callable[[dist.ProcessGroup], str]) -> Iterator[None]:
        """Around a step: if its waits for messages are recorded, each is a span, such as `wait tp`. `axes`: names a group's axes.

        When all ranks of a group have begun a wait, the slowest one has arrived: what follows is the message itself.
        """
        if step > DENSE and step % SPARSE:
            yield
            return

        def note(group: dist.ProcessGroup | None, begin: Mark, end: Mark) -> None:
            self.open.append((f"wait {axes(group) if group is not None else 'others'}", begin, end))

        with waits_by_group(note, self.now):
            yield

    def taken(self) -> Callable[[], list[Span]]:
        """The spans of the step, which is over: a function that gives them, to be called once, when the device is through with them. A span
        that is open ends with the step, and begins again with the next one."""
        now, clock = self.now(), self.clock
        marks = [(name, begin, now if end is None else end) for name, begin, end in self.open]
        self.open, self.waited = [(name, now, None) for name, _, end in self.open if end is None], 0.0
        if clock is None:
            found = [(name, begin, end - begin) for name, begin, end in marks]
            return lambda: found
        return lambda: _read(clock, marks, now)


def _read(clock: DeviceClock, marks: list[tuple[str, Mark, Mark]], now: Mark) -> list[Span]:
    """The spans between a device's events, of which `now` is the latest."""
    unique = [*dict.fromkeys(event for _, *ends in marks for event in ends if event is not now), now]
    times = dict(zip(unique, clock.read(unique)))
    return [(name, times[begin], times[end] - times[begin]) for name, begin, end in marks]


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


@dataclass
class StepNumbers:
    """What the ranks summed in a step, or found out in it."""

    loss: float
    """Weighted mean over the global batch."""
    norm: float
    """Gradient norm over all parameters, before clipping."""
    skipped: bool
    """Nothing was updated, on any rank: an fp16 overflow, or a step that was not finite and was to be left out."""
    spans: list[Span]
    """(name, start, seconds) of what took time on this rank; starts are `time.perf_counter`, and on a GPU the times are the device's.
    Names are those of `SPANS`, and under `pp` those of actions, `receive F1.3`, `F1.3` and `send F1.3`: see `sort_of`."""
    by_rank: list[tuple[int, float]]
    """(samples of this step, seconds computing in the last step whose times were known) of each share; where ranks have the same,
    of the slowest."""
    data_by_rank: list[float] = field(default_factory=list)
    """Seconds that each rank waited for this step's samples."""
    note: str = ""
    """What is to be said of shares of the batch that change."""
    trouble: Problem | None = None
    """What was not finite in a step that was left out, and where it began."""
    logged: dict[str, float] = field(default_factory=dict)
    """What the job recorded with `plait.log`: means over the global batch; and a callback with `Engine.log`."""
    norms: dict[str, float] = field(default_factory=dict)
    """With `group_norms`, the gradient norm of each parameter group over all ranks, before clipping: by its number, or its "name"."""
    loss_scale: float | None = None
    """Under fp16, the factor on the losses of the step."""


class Numbered(Protocol):
    """What has the numbers of a step."""

    @property
    def known(self) -> bool:
        """Whether they are on the host, and complete: what a step logged for the first time, and why it was left out, comes last."""

    @property
    def numbers(self) -> StepNumbers:
        """The numbers. Waits for the device where they are not known."""


@dataclass(frozen=True)
class Known:
    """Numbers that are on the host."""

    numbers: StepNumbers
    known: bool = True


@dataclass
class Step:
    """What one optimizer step did. `samples`: seen after it, over all ranks.

    Each of `StepNumbers` is an attribute of the step too: `step.loss`, `step.norm`, …. On a GPU these are on their way to the host when
    the step returns: the first look at one of them waits for the device. `known` says whether they are there. Who looks one step
    later does not wait.
    """

    step: int
    lr: float
    """Learning rate of the first parameter group."""
    samples: int
    size: int
    """Samples in this step over all ranks."""
    tokens: int
    """Elements of integer inputs of rank 2 or more on this rank; 0 when the inputs are no tokens."""
    stop: bool
    """Some rank was asked to stop, as far as is known: all ranks see it in the same step, on a GPU in the one that follows."""
    source: "Numbered"
    """Where its numbers are, or will be."""
    lrs: list[float] = field(default_factory=list)
    """Learning rate of each parameter group."""
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    """Loss, norm and lr of each phase that was due, in a job that has phases; those above are of the first with every=1."""
    given: dict[str, float] = field(default_factory=dict)
    """What callbacks add to what was logged."""

    @property
    def known(self) -> bool:
        """Whether its numbers are on the host."""
        return self.source.known

    def __getattr__(self, name: str) -> Any:
        if name not in StepNumbers.__dataclass_fields__:
            raise AttributeError(f"a Step has no attribute {name!r}")
        found = getattr(self.source.numbers, name)
        return found | self.given if name == "logged" else found


def merged(steps: list[tuple[Phase | None, Step]]) -> Step:
    """What a step did, from what each of its turns did. Loss, norm and learning rate are those of the first phase that is due in
    every step, so that they are of one phase throughout a run; those of all are in `phases`."""
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
    return replace(last, lr=main.lr, source=Known(numbers), phases=phases)


def tokens(batch: Batch) -> int:
    """Elements of the first integer input with a sequence dim."""
    count = 0
    for micro in batch.micro:
        first = next((t for t in tree_leaves(micro.inputs) if isinstance(t, Tensor)), None)
        if first is not None and first.dim() == 2 and not first.is_floating_point():
            count += first.numel() if micro.count else 0
    return count
