"""Where the time of a step went, rank by rank; what slows the run down; and what to change, with the gain that the split predicts.

A step of a rank lasts from its first span to the first span of its next step. Its seconds are divided into:

    computing         forward and backward passes without the waits inside them
    waiting           for the slowest rank: until all ranks of the group have arrived at the collective
    communication     after that, by the axes of the group: `communication tp`; messages between stages once they were sent
    bubble            of a pipeline: until the message of another stage was sent
    data, optimizer, checkpoint, evaluate    the spans of these names
    gradients         packing and unpacking what is summed
    Python            around the passes: what readies and ends a step, its records, callbacks
    other             between all spans: what nothing was recorded of

Collectives equalize the wall time of ranks: a slow rank waits less than the others. So a slow rank is the one that arrives last, and
its own seconds say why: at its data, in its passes, or between its spans.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from plait.config.keys import AXES
from plait.config.plan import Plan
from plait.parallel.pipeline.schedule_search import table
from plait.report.measured_step import COMPUTE, PYTHON, WARM_UP, Measured, Span
from plait.report.timeline import arrivals, ran

PARTS = dict.fromkeys((*COMPUTE, "forward", "backward", "loss", "replicate", "collect", "send"), "computing")
PARTS |= {"reduce": "gradients"} | dict.fromkeys(PYTHON, "Python")
"""Of the spans that are not parts by their own name."""
SLOW = 0.03
"""Part of a step from which on a cause is named."""


@dataclass(frozen=True)
class RankSplit:
    """Mean seconds of one rank's steps. `parts` add up to `seconds`."""

    rank: int
    seconds: float
    parts: dict[str, float]
    late: float = 0.0
    """Seconds by which other ranks' collectives began later than the median rank because of this one."""

    def share(self, *names: str) -> float:
        """Of the step."""
        return sum(self.parts.get(name, 0.0) for name in names) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class StepSplit:
    """The split of all ranks, over `steps` steps. `complete`: waits inside passes were recorded."""

    ranks: tuple[RankSplit, ...] = ()
    steps: int = 0
    complete: bool = True

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


def split(plan: Plan, steps: Sequence[Measured]) -> StepSplit:
    """The split of the typical ones of these steps, which are in order: of those whose waits were recorded, if there are any."""
    pairs = [(a, b) for a, b in pairwise(steps) if b.step == a.step + 1 and len(a.ranks) == len(b.ranks)]
    warm = [pair for pair in pairs if pair[0].step > WARM_UP] or pairs
    if not warm:
        return StepSplit()
    within = [pair for pair in warm if any(s.sort == "wait" for spans in pair[0].ranks for s in spans)]
    chosen = within or warm
    parts = [defaultdict[str, float](float) for _ in chosen[0][0].ranks]
    late = [0.0] * len(parts)
    for a, b in chosen:
        causes = _arrived(plan, a, late)
        for rank, spans in enumerate(a.ranks):
            _add(parts[rank], spans, b.ranks[rank][0].start, causes)
    found = [{name: seconds / len(chosen) for name, seconds in each.items()} for each in parts]
    for rank, each in enumerate(found):  # rare and long: the mean of all steps
        for name in ("checkpoint", "evaluate"):
            took = sum(s.end - s.start for a, _ in warm for s in a.ranks[rank] if s.name == name)
            each[name] = took / len(warm)
    ranks = (
        RankSplit(r, sum(each.values()), {n: s for n, s in each.items() if s > 0}, late[r] / len(chosen))
        for r, each in enumerate(found)
    )
    return StepSplit(tuple(ranks), len(chosen), bool(within) or plan.world == 1)


def _add(parts: dict[str, float], spans: Sequence[Span], end: float, arrived: dict[Span, float]) -> None:
    """Add one step of a rank, which ends when its next one begins."""
    at = spans[0].start
    for s in spans:
        parts["other"] += max(0.0, s.start - at)
        at = max(at, s.end)
        took, sort = s.end - s.start, s.sort
        if sort == "wait" or sort == "receive":
            others = max(0.0, min(s.end, arrived.get(s, s.start)) - s.start)
            parts["bubble" if sort == "receive" else "waiting for the slowest rank"] += others
            parts[f"communication {s.name.partition(' ')[2] if sort == 'wait' else 'pp'}"] += took - others
        elif sort in ("checkpoint", "evaluate"):
            continue
        else:
            parts[PARTS.get(sort, sort)] += took
    parts["other"] += max(0.0, end - at)


def _arrived(plan: Plan, step: Measured, late: list[float]) -> dict[Span, float]:
    """When the last rank had arrived at each wait, and when each received message was sent. Adds to `late` how much later than the median
    rank the last one of each collective came."""
    found = dict[Span, float]()
    if plan.pp > 1 and step.microbatches:
        planned = table(plan.schedule, plan.pp, step.microbatches, plan.stages_per_rank)
        found |= arrivals(planned, plan, step) if ran(planned, plan, step) else {}
    waits = [defaultdict[str, list[Span]](list) for _ in step.ranks]
    for rank, spans in enumerate(step.ranks):
        for s in spans:
            if s.sort == "wait":
                waits[rank][s.name].append(s)
    for ranks, name in _groups(plan, waits):
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


def _groups(plan: Plan, waits: Sequence[dict[str, list[Span]]]) -> Iterable[tuple[list[int], str]]:
    """(ranks, name of their waits) of each group whose ranks waited equally often: those that differ along these axes alone."""
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


@dataclass(frozen=True)
class Advice:
    """Something to change. `gain`: the part of a step that it is predicted to save. `command`: to paste."""

    cause: str
    what: str
    why: str
    gain: float
    command: str = ""


@dataclass(frozen=True)
class RunFacts:
    """What advice depends on besides the split: the words of the run's command, and the seconds that were predicted."""

    plan: Plan
    job: str
    options: str = ""
    predicted: Mapping[str, float] = field(default_factory=dict)
    workers: int = 0
    save_every: int = 0
    better: str = ""
    """A plan that the planner predicts to be faster on this machine."""
    better_gain: float = 0.0

    def train(self, plan: str = "", more: str = "") -> str:
        """A command that trains with this change."""
        return " ".join(filter(None, ("plait train", self.job, f'--plan "{plan or self.plan}"', self.options, more)))


def advise(found: StepSplit, facts: RunFacts) -> list[Advice]:
    """What to change, the largest gain first. Gains are of the mean step, as the split has it."""
    if not found.ranks or not found.seconds:
        return []
    advice = [*_loader(found, facts), *_slow_rank(found, facts), *_link(found, facts), *_bubble(found, facts), *_rest(found, facts)]
    if facts.better and facts.better_gain > SLOW:
        what, why = f"Use the plan {facts.better}", "The planner predicts that it is faster on this machine."
        advice.append(Advice("plan", what, why, facts.better_gain, facts.train(facts.better)))
    return sorted((a for a in advice if a.gain >= SLOW), key=lambda a: -a.gain)


def _spread(found: StepSplit, *names: str) -> tuple[RankSplit, float]:
    """(the rank with most of these parts, seconds that it has more than the median rank)."""
    took = lambda r: sum(r.parts.get(name, 0.0) for name in names)  # noqa: E731
    most = max(found.ranks, key=took)
    return most, took(most) - sorted(map(took, found.ranks))[(len(found.ranks) - 1) // 2]


def _loader(found: StepSplit, facts: RunFacts) -> Iterable[Advice]:
    most, more = _spread(found, "data")
    gain = most.parts.get("data", 0.0) / found.seconds
    alone = len(found.ranks) > 1 and more > 0.6 * most.parts.get("data", 0.0)
    whose = f"The loader of rank {most.rank}" if alone else "The loader"
    why = f"Rank {most.rank} waits {100 * gain:.0f} % of a step for its samples" + (", other ranks wait less." if alone else ", and so do others.")
    workers = max(2, 2 * facts.workers)
    yield Advice("slow loader", f"{whose} is slow: read ahead with {workers} loader workers", why, gain, facts.train(more=f"--workers {workers}"))


def _slow_rank(found: StepSplit, facts: RunFacts) -> Iterable[Advice]:
    if len(found.ranks) == 1:
        return
    slow = max(found.ranks, key=lambda r: r.late)
    computes, more = _spread(found, "computing", "optimizer", "gradients")
    loads, waits = _spread(found, "data")
    if loads.rank == slow.rank and waits > more:
        return  # the loader's advice says so
    gain = min(slow.late, max(more, 0.0)) / found.seconds if computes.rank == slow.rank else 0.0
    why = f"Rank {slow.rank} arrives last at collectives, {100 * slow.late / found.seconds:.0f} % of a step after the others, and computes longer."
    what = f"The device of rank {slow.rank} is slow: check it, or give it fewer samples"
    yield Advice("slow rank", what, why, gain, facts.train(f"{facts.plan} batch_shares=auto") if facts.plan.shares > 1 else "")


def _link(found: StepSplit, facts: RunFacts) -> Iterable[Advice]:
    by_axis = {name: seconds for name, seconds in found.mean.items() if name.startswith("communication")}
    if not by_axis:
        return
    name, seconds = max(by_axis.items(), key=lambda part: part[1])
    sent = facts.predicted.get("tensor", 0.0) + facts.predicted.get("gradients", 0.0)
    over, axis = max(0.0, sum(by_axis.values()) - sent), name.partition(" ")[2]
    slower = f", {sum(by_axis.values()) / sent:.1f} times what is predicted of the link" if facts.predicted and sent and over > sent else ""
    why = f"Messages of {axis} take {100 * seconds / found.seconds:.0f} % of a step after all ranks have arrived{slower}."
    what = f"The link of {axis} is slow: measure it" if slower else f"Communication of {axis} is exposed: compare plans that send less"
    command = "plait bench comm" if slower else f"plait plan {facts.job}"
    yield Advice("slow link", what, why, (over if slower else seconds) / found.seconds, command)


def _bubble(found: StepSplit, facts: RunFacts) -> Iterable[Advice]:
    if facts.plan.pp == 1:
        return
    bubble, computing = found.mean.get("bubble", 0.0), [r.parts.get("computing", 0.0) for r in found.ranks]
    uneven = max(computing) - sum(computing) / len(computing)
    stage = computing.index(max(computing)) * facts.plan.pp // len(computing)
    if uneven > bubble / 2:
        longer = max(computing) / (sum(computing) / len(computing)) - 1
        why = f"Stage {stage} computes {100 * longer:.0f} % longer than the mean, and the others wait."
        yield Advice("uneven stages", "Balance the stages of the pipeline", why, uneven / found.seconds, f"plait plan {facts.job}")
        return
    m, p = facts.plan.microbatches, facts.plan.pp * facts.plan.stages_per_rank
    saved = bubble * (1 - (m + p - 1) / (2 * m + p - 1))
    plan = str(facts.plan).replace(f"microbatches={m}", f"microbatches={2 * m}") if m > 1 else f"{facts.plan} microbatches=2"
    why = f"{100 * bubble / found.seconds:.0f} % of a step is the bubble of {m} micro-batches in {p} stages; twice as many fill it better."
    yield Advice("bubble", f"Use {2 * m} micro-batches", why, saved / found.seconds, facts.train(plan))


def _rest(found: StepSplit, facts: RunFacts) -> Iterable[Advice]:
    mean = found.mean
    if saving := mean.get("checkpoint", 0.0):
        every = 2 * (facts.save_every or 500)
        why = f"Steps wait {100 * saving / found.seconds:.0f} % of their time for checkpoints and snapshots."
        command = facts.train(more=f"--save-every {every}")
        yield Advice("checkpoint", f"Save half as often, every {every} steps", why, saving / 2 / found.seconds, command)
    python = median(r.parts.get("Python", 0.0) for r in found.ranks)
    why = f"{100 * python / found.seconds:.0f} % of a step passes between its spans: in callbacks, the records of the step, or the job's own Python."
    yield Advice("Python", "Look at callbacks and Python around the step", why, python / found.seconds)
