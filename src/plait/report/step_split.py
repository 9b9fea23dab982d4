"""Split the time of a step by cause, for each rank.

A step of a rank lasts from its first span to the first span of its next step. Its seconds have these parts:

    computing         forward and backward passes without the waits inside them
    waiting           for the slowest rank: until all ranks of the group have reached the collective
    communication     after that, by the axes of the group: `communication tp`; stage messages after they were sent
    bubble            in a pipeline: until the message of another stage was sent
    data, optimizer, checkpoint, evaluate    the spans of these names
    gradients         packing and unpacking of reduced gradients
    Python            around the passes: start and end of a step, its records, callbacks
    other             gaps between spans, without a record

Collectives equalize the wall time of ranks: a slow rank waits less than the others. So the slow rank is the last to arrive. Its own parts
show the reason: its data, its passes, or the gaps between its spans.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean

from plait.config.keys import AXES
from plait.config.plan import Plan
from plait.parallel.pipeline.schedule_search import build_table
from plait.report.measured_step import COMPUTE_KINDS, PYTHON_SPANS, WARMUP_STEPS, RecordedStep, Span
from plait.report.timeline import find_arrivals, has_table_actions

SPAN_PARTS = dict.fromkeys((*COMPUTE_KINDS, "forward", "backward", "loss", "replicate", "collect", "send"), "computing")
SPAN_PARTS |= {"reduce": "gradients"} | dict.fromkeys(PYTHON_SPANS, "Python")
"""Parts by span name; all other spans are a part of their own name."""


@dataclass(frozen=True)
class RankSplit:
    """Mean seconds of one rank's steps. `parts` sum to `seconds`."""

    rank: int
    seconds: float
    parts: dict[str, float]
    late_seconds: float = 0.0
    """Seconds by which this rank delayed collectives, relative to the median rank."""

    def get_fraction(self, *names: str) -> float:
        """Return the fraction of the step in these parts."""
        return sum(self.parts.get(name, 0.0) for name in names) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class StepSplit:
    """The split of all ranks over `steps` steps. `is_complete`: waits inside passes were recorded."""

    ranks: tuple[RankSplit, ...] = ()
    steps: int = 0
    is_complete: bool = True
    forward: float = 0.0
    """Mean seconds of a rank's forward passes."""
    messages: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Mean seconds of each wait of rank 0 after all ranks have arrived, in the order of a step, by the axes of the group."""

    @property
    def mean(self) -> dict[str, float]:
        """Mean seconds over the ranks, by part, largest first."""
        total = defaultdict[str, float](float)
        for rank in self.ranks:
            for name, seconds in rank.parts.items():
                total[name] += seconds / len(self.ranks)
        return dict(sorted(total.items(), key=lambda part: -part[1]))

    @property
    def seconds(self) -> float:
        return sum(self.mean.values())

    @property
    def sent_seconds(self) -> dict[str, float]:
        return {name.partition(" ")[2]: seconds for name, seconds in self.mean.items() if name.startswith("communication")}


def split_steps(plan: Plan, steps: Sequence[RecordedStep]) -> StepSplit:
    """Split the typical ones of these consecutive steps. Steps with recorded waits are preferred."""
    pairs = [(a, b) for a, b in pairwise(steps) if b.step == a.step + 1 and len(a.ranks) == len(b.ranks)]
    warm = [pair for pair in pairs if pair[0].step > WARMUP_STEPS] or pairs
    if not warm:
        return StepSplit()
    within = [pair for pair in warm if any(s.kind == "wait" for spans in pair[0].ranks for s in spans)]
    chosen = within or warm
    parts = [defaultdict[str, float](float) for _ in chosen[0][0].ranks]
    late, forward, messages = [0.0] * len(parts), 0.0, defaultdict[str, list[list[float]]](list)
    for a, b in chosen:
        causes = _find_arrivals(plan, a, late)
        forward += sum(s.end - s.start for spans in a.ranks for s in spans if s.kind in ("F", "forward")) / len(parts) / len(chosen)
        for name, took in _list_waits(a.ranks[0], causes).items():
            messages[name].append(took)
        for rank, spans in enumerate(a.ranks):
            _add_step(parts[rank], spans, b.ranks[rank][0].start, causes)
    found = [{name: seconds / len(chosen) for name, seconds in each.items()} for each in parts]
    for rank, each in enumerate(found):  # rare and long, so averaged over all steps
        for name in ("checkpoint", "evaluate"):
            took = sum(s.end - s.start for a, _ in warm for s in a.ranks[rank] if s.name == name)
            each[name] = took / len(warm)
    ranks = (
        RankSplit(r, sum(each.values()), {n: s for n, s in each.items() if s > 0}, late[r] / len(chosen))
        for r, each in enumerate(found)
    )
    means = {name: tuple(map(mean, zip(*each))) for name, each in messages.items()}
    return StepSplit(tuple(ranks), len(chosen), bool(within) or plan.world == 1, forward, means)


def _list_waits(spans: Sequence[Span], arrived: dict[Span, float]) -> dict[str, list[float]]:
    """Return seconds of each wait of a step after all ranks have arrived, in order, by the axes of its group."""
    found = defaultdict[str, list[float]](list)
    for s in (s for s in spans if s.kind == "wait"):
        found[s.name.partition(" ")[2]].append(s.end - min(s.end, max(s.start, arrived.get(s, s.start))))
    return found


def _add_step(parts: dict[str, float], spans: Sequence[Span], end: float, arrived: dict[Span, float]) -> None:
    """Add one step of a rank, which ends at the start of its next one."""
    at = spans[0].start
    for s in spans:
        parts["other"] += max(0.0, s.start - at)
        at = max(at, s.end)
        took, sort = s.end - s.start, s.kind
        if sort == "wait" or sort == "receive":
            others = max(0.0, min(s.end, arrived.get(s, s.start)) - s.start)
            parts["bubble" if sort == "receive" else "waiting for the slowest rank"] += others
            parts[f"communication {s.name.partition(' ')[2] if sort == 'wait' else 'pp'}"] += took - others
        elif sort in ("checkpoint", "evaluate"):
            continue
        else:
            parts[SPAN_PARTS.get(sort, sort)] += took
    parts["other"] += max(0.0, end - at)


def _find_arrivals(plan: Plan, step: RecordedStep, late: list[float]) -> dict[Span, float]:
    """Return the time at which the last rank reached each wait, and the time at which each received message was sent.

    Adds to `late` the delay of each collective by its last rank, relative to the median rank.
    """
    found = dict[Span, float]()
    if plan.pp > 1 and step.microbatches:
        planned = build_table(plan.schedule, plan.pp, step.microbatches, plan.stages_per_rank)
        found |= find_arrivals(planned, plan, step) if has_table_actions(planned, plan, step) else {}
    waits = [defaultdict[str, list[Span]](list) for _ in step.ranks]
    for rank, spans in enumerate(step.ranks):
        for s in spans:
            if s.kind == "wait":
                waits[rank][s.name].append(s)
    for ranks, name in _iter_wait_groups(plan, waits):
        before = 0.0
        for k in range(len(waits[ranks[0]][name])):
            together = [waits[r][name][k] for r in ranks]
            begins = [s.start for s in together]
            last = max(begins)
            delay = last - sorted(begins)[(len(begins) - 1) // 2]
            late[ranks[begins.index(last)]] += max(0.0, delay) if last > before else 0.0
            before = max(before, *(s.end for s in together))
            found |= dict.fromkeys(together, last)
    return found


def _iter_wait_groups(plan: Plan, waits: Sequence[dict[str, list[Span]]]) -> Iterable[tuple[list[int], str]]:
    """Yield (ranks, name of their waits) of each group with equally many waits: ranks that differ along these axes only."""
    for name in sorted({name for each in waits for name in each}):
        axes = name.partition(" ")[2].split("×")
        groups = defaultdict[tuple[int, ...], list[int]](list)
        for rank in range(len(waits)):
            if rank < plan.devices and set(axes) <= set(AXES):
                at = plan.at(rank)
                groups[tuple(at[a] for a in AXES if a not in axes)].append(rank)
        for ranks in groups.values():
            if len(ranks) > 1 and len({len(waits[r].get(name, ())) for r in ranks}) == 1:
                yield ranks, name
