"""A clock for training over simulated links: computation is measured, and a model computes the time of messages.

Ranks train in real processes, and a `Trace` records the events of each step: the processor time of the training thread between two
messages, the start of each collective with its bytes, and the wait for it. `replay` then simulates these records on links of any
speed and latency, and with any slowdown of a rank, with a clock for each rank and its link. A collective starts when all of its
ranks have started it and their links are free. A rank that waits for it continues when it has ended; computation meanwhile costs no
time. Results therefore do not depend on other load of the machine, except that a busy machine computes more slowly. For this reason
every step has a yardstick, a fixed piece of work, and the step's seconds are measured in units of the yardstick.

The model has rings, as gloo and NCCL use for large messages:

    all-reduce    2 (n − 1) / n of the bytes, 2 (n − 1) hops
    all-gather    (n − 1) times a rank's own bytes, n − 1 hops
"""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import thread_time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
    "all_to_all_single",
    "barrier",
)
"""The recorded collectives. `Trace` does not see other communication, so a rank that uses it in a step is measured wrongly."""
WINDOW = 15
"""The number of steps over which the yardstick is measured."""


class Wire(NamedTuple):
    """A link: bytes per second in each direction, and seconds of a hop."""

    rate: float
    latency: float

    def seconds(self, kind: str, size: float, ranks: int) -> float:
        """Return the seconds of a collective to which each rank gives `size` bytes."""
        return self.passed(kind, size, ranks) / self.rate + self.hops(kind, ranks) * self.latency

    @staticmethod
    def passed(kind: str, size: float, ranks: int) -> float:
        """Return the bytes that a rank sends."""
        n = ranks
        parts = {"all_reduce": 2 * (n - 1) / n, "reduce_scatter_tensor": (n - 1) / n, "all_to_all_single": (n - 1) / n,
                 "all_gather": n - 1, "all_gather_into_tensor": n - 1, "broadcast": 1, "barrier": 0}  # fmt: skip
        return parts[kind] * size

    @staticmethod
    def hops(kind: str, ranks: int) -> int:
        """Return the number of sequential hops."""
        return (2 if kind in ("all_reduce", "barrier") else 1) * (ranks - 1)


def own_size(kind: str, args: tuple[Any, ...]) -> int:
    """Return the bytes that a rank gives to a collective, from its arguments."""
    if kind == "barrier":
        return 0
    given = (
        args[1]
        if kind in ("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
        else args[0]
    )
    return given.nbytes if isinstance(given, Tensor) else sum(t.nbytes for t in given)


class _Waited:
    """A work handle whose wait is recorded."""

    def __init__(self, work: Any, trace: "Trace", key: int):
        self.work, self.trace, self.key = work, trace, key

    def wait(self, *args: Any) -> Any:
        self.trace.mark()
        done = self.work.wait(*args)
        self.trace.event("wait", self.key)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


@dataclass
class Trace:
    """Records the events of this rank, but only between begin and end."""

    steps: list[list[Any]] = field(default_factory=list)
    """The events of each step: seconds computing, [begin, number, collective, bytes, group], [wait, number]."""
    yardsticks: list[float] = field(default_factory=list)
    on: bool = False
    _since: float = 0.0
    _count: int = 0
    _real: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def __enter__(self) -> "Trace":
        for name in COLLECTIVES:
            self._real[name] = getattr(dist, name)
            setattr(dist, name, self._seen(name, self._real[name]))
        self._a = torch.ones(96, 96)
        return self

    def __exit__(self, *exception: Any) -> None:
        for name, real in self._real.items():
            setattr(dist, name, real)

    def begin(self) -> None:
        """Begin a step."""
        self.yardsticks.append(self._yardstick())
        self.steps.append([])
        self.on, self._since = True, thread_time()

    def end(self) -> None:
        """End the step."""
        self.mark()
        self.on = False

    def mark(self) -> None:
        """Record the computation since the last event."""
        if self.on:
            now = thread_time()
            self.steps[-1].append(now - self._since)
            self._since = now

    def event(self, *what: Any) -> None:
        """Record an event other than computation; its own processor time does not count."""
        if self.on:
            self.steps[-1].append(list(what))
            self._since = thread_time()

    def _yardstick(self) -> float:
        x, before = self._a, thread_time()
        for _ in range(6):
            x = torch.tanh(x @ self._a * 1e-3)
        return thread_time() - before

    def _seen(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **words: Any) -> Any:
            if not self.on:
                return real(*args, **words)
            self.mark()
            number, self._count = self._count, self._count + 1
            group = words.get("group")
            ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
            self.event("begin", number, name, own_size(name, args), ranks)
            work = real(*args, **words)
            if words.get("async_op") and work is not None:
                self._since = thread_time()
                return _Waited(work, self, number)
            self.event("wait", number)
            return work

        return called

    def save(self, path: Path) -> None:
        """Write a file that `Recorded.load` reads."""
        path.write_text(json.dumps({"steps": self.steps, "yardsticks": self.yardsticks}))


@dataclass
class Recorded:
    """The traces of all ranks of a run."""

    steps: list[list[list[Any]]]
    """The events by rank and step."""
    yardsticks: list[list[float]]

    @staticmethod
    def load(paths: Sequence[Path]) -> "Recorded":
        """Load the files of all ranks, in order."""
        found = [json.loads(path.read_text()) for path in paths]
        return Recorded([f["steps"] for f in found], [f["yardsticks"] for f in found])

    def in_yardsticks(self, unit: float) -> "Recorded":
        """Return the traces, scaled to a machine whose yardstick takes `unit` seconds."""
        steps = []
        for own, sticks in zip(self.steps, self.yardsticks):
            rows = []
            for i, events in enumerate(own):
                near = statistics.median(sticks[max(0, i - WINDOW // 2) : i + WINDOW // 2 + 1])
                rows.append([e * unit / near if isinstance(e, float) else e for e in events])
            steps.append(rows)
        return Recorded(steps, self.yardsticks)

    def repeated(self, steps: int) -> "Recorded":
        """Return the same steps, repeated until the number is reached."""
        found = []
        for own in self.steps:
            most = 1 + max((e[1] for row in own for e in row if isinstance(e, list)), default=0)
            rows = []
            for i in range(steps):
                again = i // len(own) * most
                rows.append([[e[0], e[1] + again, *e[2:]] if isinstance(e, list) else e for e in own[i % len(own)]])
            found.append(rows)
        return Recorded(found, [y * -(-steps // len(y)) for y in self.yardsticks])

    @property
    def computing(self) -> float:
        """Return the computing seconds of a step: the median over the steps, of the slowest rank."""
        return max(statistics.median(sum(e for e in row if isinstance(e, float)) for row in own) for own in self.steps)


@dataclass(frozen=True)
class Played:
    """A run on a clock of modeled links."""

    ends: list[float]
    """Seconds from the start to the end of each step, on the last rank."""
    sent: float
    """The mean bytes that a rank sent in a step."""

    def at(self, step: int) -> float:
        """Return the time at which this number of steps was complete."""
        return self.ends[step - 1] if step else 0.0


def replay(run: Recorded, wire: Wire, slower: Sequence[float]) -> Played:
    """Replay a run over links of this kind; rank r computes `slower[r]` times as long as recorded."""
    ranks = range(len(run.steps))
    events = [[e for row in own for e in [*row, None]] for own in run.steps]
    clocks, free, at = [0.0] * len(events), [0.0] * len(events), [0] * len(events)
    begun: dict[tuple[tuple[int, ...], int], dict[int, float]] = {}
    ended: dict[tuple[tuple[int, ...], int], float] = {}
    counts: list[dict[tuple[int, ...], int]] = [{} for _ in ranks]
    keys: list[dict[int, tuple[tuple[int, ...], int]]] = [{} for _ in ranks]
    ends: list[list[float]] = [[] for _ in ranks]
    sent = 0.0

    def take(r: int) -> bool:
        """Process rank r's next event, if that is possible yet."""
        nonlocal sent
        event = events[r][at[r]]
        if event is None:
            ends[r].append(clocks[r])
        elif isinstance(event, float):
            clocks[r] += event * slower[r]
        elif event[0] == "begin":
            _, number, kind, size, members = event
            group = tuple(members)
            nth = counts[r][group] = counts[r].get(group, 0) + 1
            keys[r][number] = key = (group, nth)
            begun.setdefault(key, {})[r] = clocks[r]
            sent += wire.passed(kind, size, len(group))
            if len(begun[key]) == len(group):
                start = max(*begun.pop(key).values(), *(free[m] for m in group)) if len(group) > 1 else clocks[r]
                ended[key] = start + wire.seconds(kind, size, len(group))
                for m in group:
                    free[m] = ended[key]
        else:
            key = keys[r][event[1]]
            if key not in ended:
                return False
            clocks[r] = max(clocks[r], ended[key])
        at[r] += 1
        return True

    while any(at[r] < len(events[r]) for r in ranks):
        moved = False
        for r in ranks:
            while at[r] < len(events[r]) and take(r):
                moved = True
        if not moved:
            raise RuntimeError("ranks wait for each other: the traces are not of one run")
    steps = len(ends[0])
    return Played([max(e[i] for e in ends) for i in range(steps)], sent / len(events) / steps)
