"""Propose changes to a run. Each has a cause from the measured step split or the planner, a predicted gain, and a command.

A gain is the saved fraction of the mean step, per sample: as measured for its cause, or as predicted for another plan.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from statistics import median

from plait.config.command_options import TrainOptions, replace_options
from plait.config.plan import Plan
from plait.planner.alternatives import Alternative
from plait.report.step_split import RankSplit, StepSplit

LEAST_GAIN, MOST_WORKERS = 0.03, 16
"""Minimum gain of an advice, and maximum number of loader workers."""
RANK_PARTS, OUTSIDE_PARTS = ("computing", "optimizer", "gradients"), ("Python", "checkpoint", "other")
"""Parts of a measured step."""
SENT_PARTS, COMPUTE_PARTS = ("tensor", "gradients"), ("compute", "recompute", "optimizer", "fixed", "bubble")
"""Parts of a prediction."""
KNOWN_FACTOR = 2.0
"""Maximum ratio of measured to predicted compute time that a plan can change. The rest is work that the planner lacks and every sample needs."""
OVER_TP, SMALL_BATCH = "tp over a slow link", "small batch"
INEXACT_WEIGHT = 0.5
"""Weight of a gain that changes the training result: exact changes come first if they gain at least half as much."""


@dataclass(frozen=True)
class Advice:
    """A proposed change. `gain`: saved fraction of a step; `command`: a command to paste, which trains if the change can be tried."""

    cause: str
    what: str
    why: str
    gain: float
    command: str = ""


@dataclass(frozen=True)
class RunFacts:
    """Inputs of advice other than the split: the words of the run's command, and predictions of its plan and of others."""

    plan: Plan
    job: str
    command: tuple[str, ...] = ()
    predicted: Mapping[str, float] = field(default_factory=dict)
    others: tuple[Alternative, ...] = ()
    batch: int = 0

    def get_option(self, flag: str, default: int) -> int:
        """Return an integer option of the run's command."""
        return int((re.findall(rf"{flag}[= ](\d+)(?: |$)", " ".join(self.command)) or [default])[-1])

    def make_command(self, *changed: str, plan: str = "") -> str:
        """Return the run's command with other options. Options without a value are removed."""
        given = self.command[2:] if self.command[1:2] == ("train",) else (self.job,)
        words = replace_options(TrainOptions, given, ["--resume", "--json", "--verbose", "-v", "--plan", *changed])
        return shlex.join(["plait", "train", *words]) + f' --plan "{plan or self.plan}"'


def advise(found: StepSplit, facts: RunFacts) -> list[Advice]:
    """Return the proposed changes, best first. Gains are fractions of the mean step."""
    if not found.seconds:
        return []
    advice = [*_advise_loader(found, facts), *_advise_slow_rank(found, facts), *_advise_overlap(found, facts), *_advise_bubble(found, facts),
        *_advise_rest(found, facts)]
    for change in ("micro-batches", "batch", "plan"):
        if same := [other for other in facts.others if other.change == change]:
            gain, best = max(((_predict_saving(found, facts, other), other) for other in same), key=lambda pair: pair[0])
            advice.append(_advise_alternative(found, facts, best, gain))
    advice += () if any(a.cause == OVER_TP and a.gain >= LEAST_GAIN for a in advice) else _advise_link(found, facts)
    return sorted((a for a in advice if a.gain >= LEAST_GAIN), key=lambda a: -a.gain * (INEXACT_WEIGHT if a.cause == SMALL_BATCH else 1.0))


def _find_most(found: StepSplit, *names: str) -> tuple[RankSplit, float]:
    """Return the rank with most time in these parts, and its seconds over the median rank."""
    took = lambda r: sum(r.parts.get(name, 0.0) for name in names)  # noqa: E731
    most = max(found.ranks, key=took)
    return most, took(most) - sorted(map(took, found.ranks))[(len(found.ranks) - 1) // 2]


def _advise_loader(found: StepSplit, facts: RunFacts) -> Iterable[Advice]:
    """Propose loader workers. Loading takes as long as its rank waits for it. With `n` workers that are always late, it takes `n` steps."""
    most, more = _find_most(found, "data")
    waits = most.parts.get("data", 0.0)
    alone = len(found.ranks) > 1 and more > 0.6 * waits
    whose, others = (f"The loader of rank {most.rank}", "other ranks wait less") if alone else ("The loader", "and so do other ranks")
    why = f"Rank {most.rank} waits {100 * waits / found.seconds:.0f} % of a step for its samples, {others}."
    now = facts.get_option("--workers", 0)
    loads, rest = now * found.seconds or waits, max(found.seconds - waits, 1e-9)
    workers = min(MOST_WORKERS, max(2, now + 1, ceil(1.25 * loads / rest)))
    gain = 1 - max(rest, loads / workers) / found.seconds
    yield Advice("slow loader", f"{whose} is slow: prefetch with {workers} loader workers", why, gain, facts.make_command(f"--workers={workers}"))


def _advise_slow_rank(found: StepSplit, facts: RunFacts) -> Iterable[Advice]:
    if len(found.ranks) == 1 or facts.plan.pp > 1:
        return
    slow, (computes, more), (loads, waits) = max(found.ranks, key=lambda r: r.late_seconds), _find_most(found, *RANK_PARTS), _find_most(found, "data")
    if (loads.rank == slow.rank and waits > more) or computes.rank != slow.rank:
        return  # covered by the advice on the loader
    gain = min(slow.late_seconds, max(more, 0.0)) / found.seconds
    late = 100 * slow.late_seconds / found.seconds
    why = f"Rank {slow.rank} arrives last at collectives, {late:.0f} % of a step after the others, and computes longer."
    yield Advice("slow rank", f"The device of rank {slow.rank} is slow: check it, or replace its node", why, gain, "plait bench compute")
    if facts.plan.shares > 1 and facts.plan.batch_split == "equal":
        took = [sum(r.parts.get(name, 0.0) for name in RANK_PARTS) for r in found.ranks]
        shared = len(took) / sum(1 / max(seconds, 1e-9) for seconds in took)
        what, gain = f"Give rank {slow.rank} fewer samples, by its speed", min(slow.late_seconds, max(took) - shared) / found.seconds
        yield Advice("slow rank", what, why, gain, facts.make_command(plan=f"{facts.plan} batch_split=auto"))


def _count_hideable(found: StepSplit, facts: RunFacts) -> float:
    """Return the seconds of gradient reductions that backward could hide but does not. Short waits count as hidden reductions."""
    each = found.messages.get("dp", ())
    long = [seconds for seconds in each if seconds > max(each) / 2]
    if len(long) < 2 or facts.plan.pp > 1:
        return 0.0
    backward = (found.mean.get("computing", 0.0) - found.forward) / facts.plan.microbatches
    room = backward * (len(each) - 1) / len(each)
    return max(0.0, sum(each) - max(long[-1], len(each) * sum(long) / len(long) - room))


def _advise_overlap(found: StepSplit, facts: RunFacts) -> Iterable[Advice]:
    if hidden := _count_hideable(found, facts):
        why = f"All {len(found.messages['dp'])} gradient all-reduces are exposed after backward, which is long enough to hide all but the last."
        what = "All gradients appear at the end of backward: compute shared values, such as scaled weights, inside the layers that use them"
        yield Advice("no overlap", what, why, hidden / found.seconds, f"plait sketch {facts.job}")


def _advise_link(found: StepSplit, facts: RunFacts) -> Iterable[Advice]:
    """Propose a check of a slow link. Latency is the cause if the last message, which is the smallest and exposed, takes as long as the others."""
    if not (by_axis := found.sent_seconds):
        return
    name = max(by_axis, key=lambda axis: by_axis[axis])
    sent = _sum_parts(facts.predicted, SENT_PARTS)
    over = max(0.0, sum(by_axis.values()) - sent - _count_hideable(found, facts))
    slower = f", {sum(by_axis.values()) / sent:.1f} times the prediction for the link" if sent and over > sent else ""
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


def _advise_bubble(found: StepSplit, facts: RunFacts) -> Iterable[Advice]:
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
        gain = found.ranks[longest].get_fraction("computing", "bubble") - balanced
        yield Advice("uneven stages", what, why, gain, shlex.join(["plait", "plan", facts.job]))
        return
    saved, plan = bubble * (1 - (m + p - 1) / (2 * m + p - 1)), replace(facts.plan, microbatches=2 * m)
    why = f"{100 * bubble / found.seconds:.0f} % of a step is the bubble of {m} micro-batches in {p} stages; twice as many micro-batches reduce it."
    yield Advice("bubble", f"Use {2 * m} micro-batches", why, saved / found.seconds, facts.make_command(plan=str(plan)))


def _advise_rest(found: StepSplit, facts: RunFacts) -> Iterable[Advice]:
    mean = found.mean
    if saving := mean.get("checkpoint", 0.0):
        now = facts.get_option("--save-every", 100)
        every = now * max(2, ceil(saving / found.seconds / 0.01))
        why = f"Steps wait {100 * saving / found.seconds:.0f} % of their time for checkpoints and snapshots."
        what, gain = f"Save every {every} steps instead of every {now}", saving * (1 - now / every) / found.seconds
        yield Advice("checkpoint", what, why, gain, facts.make_command(f"--save-every={every}"))
    python = median(r.parts.get("Python", 0.0) for r in found.ranks) / found.seconds
    why = f"{100 * python:.0f} % of a step is Python code around its passes: callbacks, step records, or the job's own code."
    has = any(word.startswith("--callbacks") for word in facts.command)
    what = "Do less in callbacks: compare with a run without them" if has else "Inspect Python around the step in a trace"
    yield Advice("Python", what, why, python, facts.make_command("--callbacks" if has else "--profile=10:13"))
    less = [o for o in facts.others if o.change == "recompute"]
    if less and facts.plan.activation_checkpointing == "full":
        part, plan = found.forward / found.seconds, min(less, key=lambda o: o.parts.get("recompute", 0.0)).plan
        why = f"Forward passes take {100 * part:.0f} % of a step, and backward recomputes them; their activations fit into memory."
        yield Advice("recompute", "Keep activations instead of recomputing them", why, part, facts.make_command(plan=plan))


def _predict_saving(found: StepSplit, facts: RunFacts, other: Alternative) -> float:
    """Predict the fraction of a step that another plan or batch saves, per sample.

    Measured communication and known computing change in proportion to the predictions. Time around the passes does not depend on the number of
    samples.
    """
    times, mean = other.batch / facts.batch, found.mean
    saved = _sum_parts(mean, OUTSIDE_PARTS) * (1 - 1 / times)
    known = min(_sum_parts(mean, (*RANK_PARTS, "bubble")), KNOWN_FACTOR * _sum_parts(facts.predicted, COMPUTE_PARTS))
    for names, took in ((COMPUTE_PARTS, known), (SENT_PARTS, sum(found.sent_seconds.values()) - _count_hideable(found, facts))):
        own, others = _sum_parts(facts.predicted, names), _sum_parts(other.parts, names) / times
        saved += took * (1 - others / own) if own else -others
    return saved / found.seconds


def _sum_parts(parts: Mapping[str, float], names: Iterable[str]) -> float:
    return sum(parts.get(name, 0.0) for name in names)


def _advise_alternative(found: StepSplit, facts: RunFacts, best: Alternative, gain: float) -> Advice:
    """Propose the best alternative of one kind of change."""
    by_axis, other, words = found.sent_seconds, Plan.parse(best.plan), tuple[str, ...]()
    cause, what, why = "plan", f"Use the plan {best.plan}", "The planner predicts that it is faster on this machine."
    if best.change == "micro-batches":
        cause, what = "too many micro-batches", f"Use {other.microbatches} micro-batch{'es' * (other.microbatches > 1)}"
        why = f"Each of {facts.plan.microbatches} micro-batches launches the same operators; larger micro-batches fit into memory."
    elif best.change == "batch":
        cause, what, words = SMALL_BATCH, f"The batch is small: use {best.batch} samples", (f"--batch={best.batch}", "--scale-lr=sqrt")
        why = f"Much of a step of {facts.batch} samples does not depend on their number, and {best.batch} fit. This changes the training result."
    elif facts.plan.tp > other.tp and max(by_axis, key=lambda axis: by_axis[axis], default="") == "tp":
        cause = OVER_TP
        why = f"Messages of tp take {100 * by_axis['tp'] / found.seconds:.0f} % of a step, and this plan sends less over the same link."
    return Advice(cause, what, why, gain, facts.make_command(*words, plan=best.plan))
