"""What `plait plan` says: the best plans, the classical ones, why each of the others is not chosen, how sure it is."""

import time
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from plait.config.hugging_face import PREFIX
from plait.config.keys import AXES, KEYS
from plait.config.plan import Plan
from plait.model.table import aligned, duration, short, size
from plait.planner import late
from plait.planner.correction import PARTS, SPENT, Correction, Traits, correction, sizes_of
from plait.planner.exactness import crossing, told
from plait.planner.question import CONTEXT, PlanRequest
from plait.planner.search import ALIKE, MARGIN, Candidate, Found, gain, price
from plait.planner.search_space import SearchSpace, branch_samples

CLASSICAL = ("dp", "fsdp", "tp", "pp")
"""What everybody knows: all devices on one axis."""
WORDS = {
    "bubble": "pipeline bubble", "tensor": "messages inside layers", "gradients": "messages of gradients and weights",
    "recompute": "computes activations again", "compute": "smaller matmuls", "optimizer": "the optimizer's step",
    "data": "waits for data", "sync": "synchronising replica groups", "host": "waits for weights from the host", "fixed": "",
}  # fmt: skip
"""What a loser spends its time on."""


def facts(row: Candidate, samples: int, room: float) -> dict[str, Any]:
    """A row of an answer, for JSON: of a step of so many samples on devices of which a plan may take `room` bytes."""
    got, known = row.estimate, {"plan": str(row.plan), "fits": row.fits, "why": row.why}
    if got is None:
        return known
    return known | {
        "seconds": got.seconds, "samples_per_s": samples / got.seconds, "bytes": round(got.reserved),
        "spare_bytes": round(room - got.allocated if got.spare is None else got.spare), "host_bytes": round(got.hosted), "parts": got.parts,
        "memory": {name: round(held) for name, held in got.memory.items()}, "sent": {axis: round(size) for axis, size in got.sent.items()},
        "inexact": told(row.plan), "warnings": row.warnings,
    }  # fmt: skip


def alone(one: Candidate, chosen: Candidate, batch: int) -> str:
    """What one device does without the others."""
    if one.estimate is None:
        return f"one device alone: nothing fits{one.why and f', {one.why}'}"
    here, offload = "; which is the choice", one.plan.offload
    if chosen.plan.devices > 1:
        here = f"; the choice, {chosen.plan.devices} devices, is {one.seconds / chosen.seconds:.2f} × as fast"
    if offload != chosen.plan.offload:  # which is no measure of what more devices gain
        here = f", with offload={offload}"
    return f"one device alone: {short(batch / one.seconds)} samples/s{here}"


@dataclass(frozen=True)
class Answer:
    """Rows, the first of them the choice if it fits."""

    asked: PlanRequest
    question: SearchSpace
    rows: tuple[Candidate, ...]
    found: Found
    sure: Correction
    seconds: float
    """It took."""
    one: Candidate | None = None
    """The best plan of one device alone, or why none fits; None where there is but one device, or nobody asked."""
    fewest: float = 0.0
    """The choice has fewer devices than there are: it is predicted within this part of the fastest."""

    beside: str = ""
    """What else was looked for and not found."""
    without: Found | None = None
    """If the choice keeps state on the host: what else could be done."""

    @property
    def best(self) -> Candidate | None:
        """The choice; None when nothing fits."""
        return self.rows[0] if self.found.best else None

    def to_dict(self) -> dict[str, Any]:
        batch, one = self.question.batch, self.one
        return {
            "job": self.asked.name, "machine": str(self.asked.machine), "devices": self.question.devices, "batch": batch,
            "plans": [facts(row, batch, self.question.memory) for row in self.rows], "searched": self.found.counts,
            "confidence": {"low": self.sure.low, "high": self.sure.high, "measured": self.asked.machine.measured},
            "took_seconds": round(self.seconds, 1), "one_device": one and (
                {"fits": True, "plan": str(one.plan), "samples_per_s": batch / one.seconds} if one.estimate else {"fits": False, "why": one.why}),
            "unmeasured": self.asked.sketch.unmeasured, "sketch_age_seconds": self.asked.age, "learned": self.asked.learned.to_dict(),
        }  # fmt: skip


def ask(asked: PlanRequest, pins: dict[str, Any], memory: float | None = None, top: int = 5, devices: int = 0) -> Answer:
    """Search what there is for a job on a machine."""
    start = time.monotonic()
    question = asked.question(pins, memory, devices)
    question = replace(question, shown=max(question.shown, top))
    found, without = asked.searched(question), None
    if found.best and found.best[0].plan.offload != pins.get("offload", "none"):
        without = asked.searched(replace(question, pins=pins | {"offload": "none"}))
    return replace(answer(asked, question, found, top, time.monotonic() - start), without=without)


def answer(asked: PlanRequest, question: SearchSpace, found: Found, top: int, took: float) -> Answer:
    """The answer to a question that was searched."""
    best = found.best[0] if found.best else None
    if best is None and not found.counts.get("do not fit"):
        return Answer(asked, question, (), found, sureness(asked, best), took)
    rows = [replace(c, why=why_not(c, best)) for c in found.best[: max(1, top)]]
    rows += [replace(c, fits=False, why=why_not(c, best, question)) for c in found.large[: top - len(rows) if top > 100 else 0]]
    shown = {row.mesh for row in rows}
    for one in classical(asked, question, found):
        if one.mesh not in shown and len(rows) < max(top + 3, 4):
            rows.append(replace(one, fits=question.holds(one.estimate) and not one.why, why=one.why or why_not(one, best, question)))
            shown.add(one.mesh)
    return Answer(asked, question, tuple(rows), found, sureness(asked, best), took)


def sureness(asked: PlanRequest, best: Candidate | None) -> Correction:
    """How sure the time of a plan is: by the errors of published predictions; less is unknown on a machine that was measured, and after
    runs of one's own."""
    if asked.learned.anchors and best and best.estimate:
        return Correction(1.0, asked.learned.of(best.estimate).deviation)
    labels = dict.fromkeys(PARTS, "this run") | ({"device": ""} if asked.machine.measured else {})
    found = best.estimate if best else None
    shares, sizes = ({part: found.share(part) for part in SPENT}, sizes_of(found)) if found else ({}, {})
    return correction(Traits(labels, shares, sizes, bool(asked.cuts.mixtures)))


def classical(asked: PlanRequest, question: SearchSpace, found: Found) -> list[Candidate]:
    """All devices on one axis, each as good as it gets; of one that does not fit, what needs least."""
    n = question.devices
    got = []
    for axis in CLASSICAL if n > 1 else ():
        known = [c for c in found.best if getattr(c.plan, axis) == n]
        got.append(known[0] if known else _alone(asked, question, axis))
    return got


def _alone(asked: PlanRequest, question: SearchSpace, axis: str) -> Candidate:
    """The best plan with all devices on one axis, searched for by itself: bounds may have left it out."""
    alone = dict.fromkeys((*AXES, "ep"), 1) | {axis: question.devices}
    others = {k: v for k, v in question.pins.items() if k not in alone and KEYS[k].table not in ("groups", "messages")}
    pace, refused = asked.pace, asked.refused()
    if found := asked.searched(replace(question, pins=others | alone)).best:
        return found[0]
    own = -(-question.batch // (question.devices if axis in ("dp", "fsdp") else 1))
    least: dict[str, Any] = {"precision": question.of("precision")[0], "activation_checkpointing": "full", "microbatches": own}
    least |= others | alone
    plan = Plan(**least)
    why = refused(plan)
    if axis == "pp" and question.devices > question.stages:
        why = why or f"the model has {question.stages} units"
    priced = None if why else price(pace, plan, replace(question, memory=inf), branch_samples(plan, question))
    return Candidate(plan, priced and asked.learned.applied(priced), 1.0, why)


def why_not(candidate: Candidate, best: Candidate | None, question: SearchSpace | None = None) -> str:
    """Why a plan is not the choice: what it does not fit by, else the part of the step that takes longest beyond."""
    found = candidate.estimate
    if found is None:
        return candidate.why
    if question is not None and question.spare(found) < 0:
        over = size(-question.spare(found))
        largest = max(found.memory, key=lambda name: found.memory[name])
        held = {"optimizer": "optimizer state is not sharded enough", "activations": "activations do not fit"}
        return f"{over} over: {held.get(largest, f'{largest} do not fit')}"
    if question is not None and found.hosted > question.host:
        return f"{size(found.hosted - question.host)} of host memory over, a rank"
    if best is None or best.estimate is None or candidate is best:
        return "chosen"
    devices = candidate.plan.devices
    more = {name: s - best.estimate.parts.get(name, 0.0) for name, s in found.parts.items()}
    worst = max(more, key=lambda name: more[name])
    slower = found.seconds / best.seconds - 1
    if slower < ALIKE:
        speed = "same speed" if slower > -ALIKE else f"{-100 * slower:.0f} % faster"
        worse = [name for name in candidate.warnings if name not in best.warnings]
        more = f"{devices} devices" if devices > best.plan.devices else "more complex"
        return f"{speed}, but {' and '.join(worse) or more}"
    word = WORDS.get(worst, worst)
    return f"{100 * slower:.0f} % slower: {word}" if word else f"{100 * slower:.0f} % slower"


def text(found: Answer) -> str:
    """The table that is printed."""
    asked, question = found.asked, found.question
    source = "measured here" if asked.machine.measured else "data sheet; `plait bench` measures it"
    if asked.guessed:
        source = "nothing is known of its speed: run `plait bench`"
    counts = found.found.counts
    kept = "" if asked.age is None else f" · sketch of {duration(asked.age)} ago (--fresh makes a new one)"
    lines = [
        f"job       {asked.name}   {short(asked.pace.work.weights)} parameters · batch {question.batch}{kept}",
        f"machine   {asked.machine} ({source})",
        f"searched  {counts.get('priced', 0)} plans priced · {counts.get('do not fit', 0)} do not fit · "
        f"{counts.get('slower', 0)} pruned · {counts.get('impossible', 0)} invalid · {duration(found.seconds)}",
    ]
    if found.best is not None:
        lines += [f"choice    {_headline(found)}", ""]
    if not found.rows:
        return "\n".join([*lines, *_notes(found)])
    head = ("plan", "fits", "memory", "step", "samples/s", "exposed communication", "bubble", "MFU", "warnings", "why not first")
    cells = [head, *(_cells(row, found) for row in found.rows)]
    for k, row in enumerate(aligned(cells, right=range(1, len(head) - 2))):
        lines.append(("▸ " if k == 1 and found.best else "  ") + row)
    if any("tight" in row.warnings for row in found.rows):
        lines.append(f"tight: less than {100 * MARGIN:.0f} % of a device's memory is left, which is less than predictions of memory err by")
    if asked.attends:
        lines.append("MFU counts attention as a full square, causal or not (PaLM, arXiv 2204.02311): at long sequences twice the causal count")
    return "\n".join([*lines, *_notes(found)])


def _headline(found: Answer) -> str:
    """The choice in one line, with what it changes of the job's own numbers."""
    assert found.best is not None
    plan, pinned = found.best.plan, found.question.pins
    words = [str(plan), *([told(plan)] if told(plan) else [])]
    if found.fewest and plan.devices < found.question.devices:
        part = f"within {100 * found.fewest:.0f} % of the fastest"
        words.append(f"the fewest devices {part}: {plan.devices} of {found.question.devices}")
    if found.without is not None:
        other = next(iter(found.without.best), None)
        slower = other and f"{', '.join([f'{100 * (other.seconds / found.best.seconds - 1):.0f} % slower', *other.warnings])}"
        words.append(f"without offload {slower or 'nothing fits'}")
    if "tight" in found.best.warnings:
        words.append("tight: nothing else fits")
    if plan.precision != "fp32" and "precision" not in pinned:
        words.append(f"in {plan.precision}, which rounds differently from fp32: --set precision=fp32 keeps that")
    return " · ".join(words)


def _cells(row: Candidate, found: Answer) -> tuple[str, ...]:
    got = row.estimate
    plan, memory = str(row.plan), size(got.reserved) if got else "–"
    if got is None or not row.fits:
        return plan, "✗", memory, *["–"] * 5, "", row.why
    sent = got.share("tensor") + got.share("gradients") + got.share("sync")
    bubble = f"{100 * got.share('bubble'):.1f} %" if row.plan.pp > 1 else "–"
    peak = found.asked.pace.peak(row.plan.precision)
    return (plan, "✓", memory, duration(got.seconds), short(found.question.batch / got.seconds), f"{100 * sent:.0f} %", bubble,
            f"{100 * got.flops / got.seconds / peak:.0f} %", ", ".join(row.warnings), row.why)  # fmt: skip


def _notes(found: Answer) -> list[str]:
    best, question = found.best, found.question
    if best is None or best.estimate is None:
        if not found.found.counts.get("do not fit"):
            kept = " ".join(f"{key}={value}" for key, value in question.pins.items()) or "the model"
            return [f"no plan for {question.devices} devices and a batch of {question.batch} goes with {kept}"]
        least = min((row for row in found.rows if row.estimate), key=lambda row: row.reserved, default=None)
        told = f"the least is {size(least.reserved)} with {least.plan}" if least else "no plan is possible"
        if question.memory <= 0:
            return [f"nothing fits: a device's own context ({size(CONTEXT)}) takes all of its memory; {told}"]
        return [f"nothing fits into {size(question.memory)}, what a device's memory leaves to a plan: {told}"]
    got, plan = best.estimate, best.plan
    shares = plan.shares * plan.replica_groups
    large = [name for name in got.parts if got.share(name) > 0.005]
    parts = " · ".join(f"{name} {100 * got.share(name):.0f} %" for name in large)
    memory = " · ".join(f"{name} {size(held)}" for name, held in got.memory.items() if held)
    lines = [
        f"step of #1: {parts}",
        f"memory of #1 on the fullest rank: {memory} · allocator {size(got.reserved - sum(got.memory.values()))} · "
        f"spare {size(question.spare(got))}" + (f"; host {size(got.hosted)}" if got.hosted else ""),
        *_late(found, best),
        f"batch: {question.batch} samples a step = {question.batch // shares} for each of {shares} shares, in "
        f"{plan.microbatches} micro-batches; the learning rate stays the job's. A batch k times as large asks for one of "
        "about √k (Adam) to k (SGD) times it: --batch N --scale-lr sqrt|linear",
        f"confidence: nine of ten steps take {found.sure.low:.2f} to {found.sure.high:.2f} of what is predicted"
        + ("" if found.asked.machine.measured else "; `plait bench` on the machine and --try 3 improve it")
        + found.asked.learned.describe(),
        _next(found.asked.name, plan),
    ]
    if reason := found.asked.sketch.unmeasured:
        what = "not known: what the forward pass computes and keeps for backward. Memory and times are without it"
        lines.insert(0, f"{what}: measuring its units raised {reason}")
    if found.beside:
        lines.insert(0, found.beside)
    if faster := gain(found.asked.pace, plan, question, best.samples):
        lines.insert(0, faster)
    if found.one is not None:
        lines.insert(0, alone(found.one, best, question.batch))
    return lines


def _late(found: Answer, candidate: Candidate) -> list[str]:
    """What a plan with rare or compressed synchronisation sends, and the link speed below which it pays."""
    plan, got = candidate.plan, candidate.estimate
    if late.is_exact(plan) or got is None:
        return []
    pace, machine = found.asked.pace, found.asked.machine
    sent = " · ".join(f"{axis} {size(each)}" for axis, each in got.sent.items())
    twin = branch_samples(late.exact_twin(plan), found.question)
    crossed = crossing(pace, plan, candidate.samples, twin).told("nodes" if machine.nodes > 1 else "devices")
    return [f"sent by each rank in a step, in the mean: {sent}", f"{crossed}, for the same samples"]


def _next(name: str, plan: Plan) -> str:
    """What to do with a plan, in the words in which the job was given: by its file, or as a value of Python."""
    if name.startswith(PREFIX):
        return f'next: plait plan {name} --plan "{plan}" --dry-run     a job file with your data trains it'
    if not name.partition(":")[0].endswith(".py"):
        return f'next: plait.train({name}, plan="{plan}")     plait.verify({name}, plan="{plan}")'
    return f'next: plait train {name} --plan "{plan}"     plait plan {name} --plan "{plan.uncompiled}" --dry-run'
