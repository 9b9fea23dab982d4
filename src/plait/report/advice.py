"""What to change in a run: each piece has a cause that the measured split of a step shows, or the planner, the gain that they predict, and a command.

A gain is the part of the mean step that is saved, per sample: what the split measured of the cause, or what the planner predicts of another plan.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from statistics import median

from plait.config.command_options import TrainOptions, with_options
from plait.config.plan import Plan
from plait.planner.alternatives import Alternative
from plait.report.split import RankSplit, StepSplit

SLOW, MOST_WORKERS = 0.03, 16
"""Part of a step from which on a cause is named."""
OWN, AROUND = ("computing", "optimizer", "gradients"), ("Python", "checkpoint", "other")
"""Parts of a measured step."""
SENT, COMPUTED = ("tensor", "gradients"), ("compute", "recompute", "optimizer", "fixed", "bubble")
"""Parts of a prediction."""
KNOWN = 2.0
"""Times the predicted seconds of computing: what a step takes beyond them is work that the planner does not know, which each sample needs."""
OVER_TP, SMALL_BATCH = "tp over a slow link", "small batch"
OTHER_TRAINING = 0.5
"""Weight of a gain that changes the training result: what does not comes first, unless it gains half as much."""


@dataclass(frozen=True)
class Advice:
    """Something to change. `gain`: the part of a step that it is predicted to save. `command`: to paste; a training, if the change can be tried."""

    cause: str
    what: str
    why: str
    gain: float
    command: str = ""


@dataclass(frozen=True)
class RunFacts:
    """What advice depends on besides the split: the words of the run's command, and what was predicted of its plan and of others."""

    plan: Plan
    job: str
    command: tuple[str, ...] = ()
    predicted: Mapping[str, float] = field(default_factory=dict)
    others: tuple[Alternative, ...] = ()
    batch: int = 0

    def option(self, flag: str, default: int) -> int:
        """A number that the run's command gives."""
        return int((re.findall(rf"{flag}[= ](\d+)(?: |$)", " ".join(self.command)) or [default])[-1])

    def train(self, *changed: str, plan: str = "") -> str:
        """The run's command with other options; those that are given without a value are left out."""
        given = self.command[2:] if self.command[1:2] == ("train",) else (self.job,)
        words = with_options(TrainOptions, given, ["--resume", "--json", "--verbose", "-v", "--plan", *changed])
        return shlex.join(["plait", "train", *words]) + f' --plan "{plan or self.plan}"'


def advise(found: StepSplit, facts: RunFacts) -> list[Advice]:
    """What to change, best first. Gains are of the mean step, as the split has it."""
    if not found.seconds:
        return []
    advice = [*_loader(found, facts), *_slow_rank(found, facts), *_overlap(found, facts), *_bubble(found, facts), *_rest(found, facts)]
    for change in ("micro-batches", "batch", "plan"):
        if same := [other for other in facts.others if other.change == change]:
            gain, best = max(((_saved(found, facts, other), other) for other in same), key=lambda pair: pair[0])
            advice.append(_instead(found, facts, best, gain))
    advice += () if any(a.cause == OVER_TP and a.gain >= SLOW for a in advice) else _link(found, facts)
    return sorted((a for a in advice if a.gain >= SLOW), key=lambda a: -a.gain * (OTHER_TRAINING if a.cause == SMALL_BATCH else 1.0))


def _spread(found: StepSplit, *names: str) -> tuple[RankSplit, float]:
    """(the rank with most of these parts, seconds that it has more than the median rank)."""
    took = lambda r: sum(r.parts.get(name, 0.0) for name in names)  # noqa: E731
    most = max(found.ranks, key=took)
    return most, took(most) - sorted(map(took, found.ranks))[(len(found.ranks) - 1) // 2]


def _loader(found: StepSplit, facts: RunFacts) -> Iterable[Advice]:
    """Loading takes as long as its rank waits for it, or, behind `n` workers that are always late, as `n` steps."""
    most, more = _spread(found, "data")
    waits = most.parts.get("data", 0.0)
    alone = len(found.ranks) > 1 and more > 0.6 * waits
    whose, others = (f"The loader of rank {most.rank}", "other ranks wait less") if alone else ("The loader", "and so do others")
    why = f"Rank {most.rank} waits {100 * waits / found.seconds:.0f} % of a step for its samples, {others}."
    now = facts.option("--workers", 0)
    loads, rest = now * found.seconds or waits, max(found.seconds - waits, 1e-9)
    workers = min(MOST_WORKERS, max(2, now + 1, ceil(1.25 * loads / rest)))
    gain = 1 - max(rest, loads / workers) / found.seconds
    yield Advice("slow loader", f"{whose} is slow: read ahead with {workers} loader workers", why, gain, facts.train(f"--workers={workers}"))


def _slow_rank(found: StepSplit, facts: RunFacts) -> Iterable[Advice]:
    if len(found.ranks) == 1 or facts.plan.pp > 1:
        return
    slow, (computes, more), (loads, waits) = max(found.ranks, key=lambda r: r.late), _spread(found, *OWN), _spread(found, "data")
    if (loads.rank == slow.rank and waits > more) or computes.rank != slow.rank:
        return  # the loader's advice says so
    gain = min(slow.late, max(more, 0.0)) / found.seconds
    why = f"Rank {slow.rank} arrives last at collectives, {100 * slow.late / found.seconds:.0f} % of a step after the others, and computes longer."
    yield Advice("slow rank", f"The device of rank {slow.rank} is slow: check it, or replace its host", why, gain, "plait bench compute")
    if facts.plan.shares > 1 and facts.plan.batch_split == "equal":
        took = [sum(r.parts.get(name, 0.0) for name in OWN) for r in found.ranks]
        shared = len(took) / sum(1 / max(seconds, 1e-9) for seconds in took)
        what, gain = f"Give rank {slow.rank} fewer samples, by its speed", min(slow.late, max(took) - shared) / found.seconds
        yield Advice("slow rank", what, why, gain, facts.train(plan=f"{facts.plan} batch_split=auto"))


def _hideable(found: StepSplit, facts: RunFacts) -> float:
    """Seconds of sums of gradients that backward could hide and does not. Short waits are counted as sums that it hides."""
    each = found.messages.get("dp", ())
    long = [seconds for seconds in each if seconds > max(each) / 2]
    if len(long) < 2 or facts.plan.pp > 1:
        return 0.0
    backward = (found.mean.get("computing", 0.0) - found.forward) / facts.plan.microbatches
    room = backward * (len(each) - 1) / len(each)
    return max(0.0, sum(each) - max(long[-1], len(each) * sum(long) / len(long) - room))


def _overlap(found: StepSplit, facts: RunFacts) -> Iterable[Advice]:
    if hidden := _hideable(found, facts):
        why = f"All {len(found.messages['dp'])} sums of gradients are waited for after backward, which lasts long enough to hide all but the last."
        what = "No gradient is there before the end of backward: compute what layers share, such as scaled weights, inside the layers that use it"
        yield Advice("no overlap", what, why, hidden / found.seconds, f"plait sketch {facts.job}")


def _link(found: StepSplit, facts: RunFacts) -> Iterable[Advice]:
    """A link is slow by latency if the last message of a step, which is the smallest and which nothing hides, takes about as long as any."""
    if not (by_axis := found.sent):
        return
    name = max(by_axis, key=lambda axis: by_axis[axis])
    sent = _sum(facts.predicted, SENT)
    over = max(0.0, sum(by_axis.values()) - sent - _hideable(found, facts))
    slower = f", {sum(by_axis.values()) / sent:.1f} times what is predicted of the link" if sent and over > sent else ""
    why = f"Messages of {name} take {100 * by_axis[name] / found.seconds:.0f} % of a step after all ranks have arrived{slower}."
    each = [seconds for took in found.messages.values() for seconds in took]
    long, last = [s for s in each if s > max(each) / 2], min((took[-1] for took in found.messages.values() if took), default=0.0)
    if slower and len(each) > 1 and (last not in long or len(long) > 1):
        kind = "latency" if last in long else "bandwidth"
        what = f"The link of {name} is slow by its {kind}: measure it, and send {'fewer messages' if kind == 'latency' else 'less'}"
        yield Advice(f"slow link, {kind}", what, why, over / found.seconds, "plait bench comm")
    elif slower:
        yield Advice("slow link", f"The link of {name} is slow: measure it", why, over / found.seconds, "plait bench comm")
    else:
        what, command = f"Communication of {name} is exposed: compare plans that send less", shlex.join(["plait", "plan", facts.job])
        yield Advice("slow link", what, why, over / found.seconds, command)


def _bubble(found: StepSplit, facts: RunFacts) -> Iterable[Advice]:
    if facts.plan.pp == 1:
        return
    bubble, computing = found.mean.get("bubble", 0.0), [r.parts.get("computing", 0.0) for r in found.ranks]
    m, p, even = facts.plan.microbatches, facts.plan.pp * facts.plan.stages_per_rank, sum(computing) / len(computing)
    longest = computing.index(max(computing))
    if computing[longest] - even > bubble / 2:
        stage = longest * facts.plan.pp // len(computing)
        why = f"Stage {stage} computes {100 * (computing[longest] / even - 1):.0f} % longer than the mean, and the others wait."
        balanced = even * (1 + (facts.plan.pp - 1) / m / facts.plan.stages_per_rank) / found.seconds
        what = "Balance the stages of the pipeline: move units to stages that wait"
        gain = found.ranks[longest].share("computing", "bubble") - balanced
        yield Advice("uneven stages", what, why, gain, shlex.join(["plait", "plan", facts.job]))
        return
    saved, plan = bubble * (1 - (m + p - 1) / (2 * m + p - 1)), replace(facts.plan, microbatches=2 * m)
    why = f"{100 * bubble / found.seconds:.0f} % of a step is the bubble of {m} micro-batches in {p} stages; twice as many fill it better."
    yield Advice("bubble", f"Use {2 * m} micro-batches", why, saved / found.seconds, facts.train(plan=str(plan)))


def _rest(found: StepSplit, facts: RunFacts) -> Iterable[Advice]:
    mean = found.mean
    if saving := mean.get("checkpoint", 0.0):
        now = facts.option("--save-every", 100)
        every = now * max(2, ceil(saving / found.seconds / 0.01))
        why = f"Steps wait {100 * saving / found.seconds:.0f} % of their time for checkpoints and snapshots."
        what, gain = f"Save every {every} steps instead of every {now}", saving * (1 - now / every) / found.seconds
        yield Advice("checkpoint", what, why, gain, facts.train(f"--save-every={every}"))
    python = median(r.parts.get("Python", 0.0) for r in found.ranks) / found.seconds
    why = f"{100 * python:.0f} % of a step passes around its passes: in callbacks, the records of the step, or the job's own Python."
    has = any(word.startswith("--callbacks") for word in facts.command)
    what = "Do less in callbacks: compare with a run without them" if has else "Look at Python around the step in a trace"
    yield Advice("Python", what, why, python, facts.train("--callbacks" if has else "--profile=10:13"))
    less = [o for o in facts.others if o.change == "recompute"]
    if less and facts.plan.activation_checkpointing == "full":
        part, plan = found.forward / found.seconds, min(less, key=lambda o: o.parts.get("recompute", 0.0)).plan
        why = f"Forward passes take {100 * part:.0f} % of a step, and backward makes them again; there is memory for what they compute."
        yield Advice("recompute", "Keep activations instead of computing them again", why, part, facts.train(plan=plan))


def _saved(found: StepSplit, facts: RunFacts, other: Alternative) -> float:
    """The part of a step that another plan or batch saves, per sample. Measured communication and known computing change as the planner's
    predictions do; what surrounds a step's passes does not depend on the number of samples."""
    times, mean = other.batch / facts.batch, found.mean
    saved = _sum(mean, AROUND) * (1 - 1 / times)
    known = min(_sum(mean, (*OWN, "bubble")), KNOWN * _sum(facts.predicted, COMPUTED))
    for names, took in ((COMPUTED, known), (SENT, sum(found.sent.values()) - _hideable(found, facts))):
        own, others = _sum(facts.predicted, names), _sum(other.parts, names) / times
        saved += took * (1 - others / own) if own else -others
    return saved / found.seconds


def _sum(parts: Mapping[str, float], names: Iterable[str]) -> float:
    return sum(parts.get(name, 0.0) for name in names)


def _instead(found: StepSplit, facts: RunFacts, best: Alternative, gain: float) -> Advice:
    """The best of one kind of change."""
    by_axis, other, words = found.sent, Plan.parse(best.plan), tuple[str, ...]()
    cause, what, why = "plan", f"Use the plan {best.plan}", "The planner predicts that it is faster on this machine."
    if best.change == "micro-batches":
        cause, what = "too many micro-batches", f"Use {other.microbatches} micro-batch{'es' * (other.microbatches > 1)}"
        why = f"Each of {facts.plan.microbatches} micro-batches starts the same operators again; larger ones fit into memory."
    elif best.change == "batch":
        cause, what, words = SMALL_BATCH, f"The batch is small: use {best.batch} samples", (f"--batch={best.batch}", "--scale-lr=sqrt")
        why = f"Much of a step of {facts.batch} samples does not depend on their number, and {best.batch} fit. This changes the training result."
    elif facts.plan.tp > other.tp and max(by_axis, key=lambda axis: by_axis[axis], default="") == "tp":
        cause = OVER_TP
        why = f"Messages of tp take {100 * by_axis['tp'] / found.seconds:.0f} % of a step, and this plan sends less over the same link."
    return Advice(cause, what, why, gain, facts.train(*words, plan=best.plan))
