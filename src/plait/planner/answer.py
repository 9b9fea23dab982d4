"""The output of `plait plan`: the best plans, single-axis plans, why each other plan is slower or invalid, and the confidence."""

import time
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from plait.config.hugging_face import PREFIX
from plait.config.keys import AXES, KEYS
from plait.config.plan import Plan
from plait.model.sketch_table import align_rows, format_count, format_duration, format_size
from plait.planner import sync_costs
from plait.planner.correction import (
    ERROR_DEVIATIONS,
    PART_DEVIATIONS,
    Correction,
    RunTraits,
    compute_log_sizes,
    fit_correction,
)
from plait.planner.exactness import describe_inexact, find_break_even
from plait.planner.plan_request import CONTEXT_BYTES, PlanRequest
from plait.planner.search import MEMORY_MARGIN, TIE_FRACTION, Candidate, SearchResult, describe_share_gain, price_plan
from plait.planner.search_space import SearchSpace, count_branch_samples

SINGLE_AXES = ("dp", "fsdp", "tp", "pp")
"""Plans with all devices on one of these axes are always shown."""
SLOWDOWN_TEXTS = {
    "bubble": "pipeline bubble", "tensor": "messages inside layers", "gradients": "gradient and weight messages",
    "recompute": "activation recomputation", "compute": "smaller matmuls", "optimizer": "the optimizer's step",
    "data": "waits for data", "sync": "synchronization of replica groups", "host": "waits for weights from the host", "fixed": "",
}  # fmt: skip
"""Reasons in the table, by the part of a step in which a plan is slower than the best one."""


def candidate_to_dict(row: Candidate, samples: int, room: float) -> dict[str, Any]:
    """Return one row of the answer for JSON. `samples`: per step; `room`: usable bytes of a device."""
    got, known = row.estimate, {"plan": str(row.plan), "fits": row.fits, "why": row.why}
    if got is None:
        return known
    return known | {
        "seconds": got.seconds, "samples_per_s": samples / got.seconds, "bytes": round(got.reserved),
        "spare_bytes": round(room - got.allocated if got.spare is None else got.spare), "host_bytes": round(got.host_bytes), "parts": got.parts,
        "memory": {name: round(held) for name, held in got.memory.items()}, "sent": {axis: round(size) for axis, size in got.sent_bytes.items()},
        "inexact": describe_inexact(row.plan), "warnings": row.warnings,
    }  # fmt: skip


def describe_baseline(baseline: Candidate, chosen: Candidate, batch: int) -> str:
    """Describe the best plan on one device, and the speedup of the chosen plan over it."""
    if baseline.estimate is None:
        return f"one device alone: no plan fits{baseline.why and f', {baseline.why}'}"
    here, offload = ", which is the choice", baseline.plan.offload
    if chosen.plan.devices > 1:
        here = f"; the choice, {chosen.plan.devices} devices, is {baseline.seconds / chosen.seconds:.2f} × as fast"
    if offload != chosen.plan.offload:  # its speed is no measure of the gain from more devices
        here = f", with offload={offload}"
    return f"one device alone: {format_count(batch / baseline.seconds)} samples/s{here}"


@dataclass(frozen=True)
class Answer:
    """The result of a search. The first row is the chosen plan, if any plan fits."""

    request: PlanRequest
    space: SearchSpace
    rows: tuple[Candidate, ...]
    result: SearchResult
    confidence: Correction
    search_seconds: float
    """Seconds that the search took."""
    baseline: Candidate | None = None
    """The best plan on one device, or the reason why none fits. None if the machine has one device or no comparison was requested."""
    max_slowdown: float = 0.0
    """If the chosen plan uses fewer devices than available: largest predicted slowdown over the fastest plan, as a fraction."""

    note: str = ""
    """Searches that found no plan, as a line of the output."""
    without_offload: SearchResult | None = None
    """If the chosen plan offloads state to the host: the search result without offloading."""

    @property
    def best(self) -> Candidate | None:
        """The chosen plan; None if no plan fits."""
        return self.rows[0] if self.result.best else None

    def to_dict(self) -> dict[str, Any]:
        batch, one = self.space.batch, self.baseline
        return {
            "job": self.request.name, "machine": str(self.request.machine), "devices": self.space.devices, "batch": batch,
            "plans": [candidate_to_dict(row, batch, self.space.memory) for row in self.rows], "searched": self.result.counts,
            "confidence": {"low": self.confidence.low, "high": self.confidence.high, "measured": self.request.machine.is_measured},
            "took_seconds": round(self.search_seconds, 1), "one_device": one and (
                {"fits": True, "plan": str(one.plan), "samples_per_s": batch / one.seconds} if one.estimate else {"fits": False, "why": one.why}),
            "unmeasured": self.request.sketch.unmeasured, "sketch_age_seconds": self.request.sketch_age, "learned": self.request.learned.to_dict(),
        }  # fmt: skip


def find_answer(request: PlanRequest, pins: dict[str, Any], memory: float | None = None, top: int = 5, devices: int = 0) -> Answer:
    """Search plans for a job on a machine."""
    start = time.monotonic()
    question = request.make_space(pins, memory, devices)
    question = replace(question, shown_meshes=max(question.shown_meshes, top))
    found, without = request.find_plans(question), None
    if found.best and found.best[0].plan.offload != pins.get("offload", "none"):
        without = request.find_plans(replace(question, pins=pins | {"offload": "none"}))
    return replace(build_answer(request, question, found, top, time.monotonic() - start), without_offload=without)


def build_answer(request: PlanRequest, space: SearchSpace, result: SearchResult, top: int, took: float) -> Answer:
    """Build the rows of an answer from a search result."""
    best = result.best[0] if result.best else None
    if best is None and not result.counts.get("do not fit"):
        return Answer(request, space, (), result, estimate_confidence(request, best), took)
    rows = [replace(c, why=explain_choice(c, best)) for c in result.best[: max(1, top)]]
    rows += [replace(c, fits=False, why=explain_choice(c, best, space)) for c in result.oversized[: top - len(rows) if top > 100 else 0]]
    shown = {row.mesh for row in rows}
    for one in find_single_axis(request, space, result):
        if one.mesh not in shown and len(rows) < max(top + 3, 4):
            rows.append(replace(one, fits=space.can_hold(one.estimate) and not one.why, why=one.why or explain_choice(one, best, space)))
            shown.add(one.mesh)
    return Answer(request, space, tuple(rows), result, estimate_confidence(request, best), took)


def estimate_confidence(request: PlanRequest, best: Candidate | None) -> Correction:
    """Return the uncertainty of the predicted step time.

    It comes from the prediction errors on published runs. It is smaller on a measured machine, and after local runs of other plans.
    """
    if request.learned.anchors and best and best.estimate:
        return Correction(1.0, request.learned.predict_correction(best.estimate).deviation)
    labels = dict.fromkeys(ERROR_DEVIATIONS, "this run") | ({"device": ""} if request.machine.is_measured else {})
    found = best.estimate if best else None
    shares, sizes = ({part: found.get_fraction(part) for part in PART_DEVIATIONS}, compute_log_sizes(found)) if found else ({}, {})
    return fit_correction(RunTraits(labels, shares, sizes, bool(request.shardable.mixtures)))


def find_single_axis(request: PlanRequest, space: SearchSpace, result: SearchResult) -> list[Candidate]:
    """Find the best plan with all devices on each of `SINGLE_AXES`; if none fits, the plan that needs least memory."""
    n = space.devices
    got = []
    for axis in SINGLE_AXES if n > 1 else ():
        known = [c for c in result.best if getattr(c.plan, axis) == n]
        got.append(known[0] if known else _search_axis(request, space, axis))
    return got


def _search_axis(request: PlanRequest, space: SearchSpace, axis: str) -> Candidate:
    """Search plans with all devices on one axis. The main search may have pruned them."""
    alone = dict.fromkeys((*AXES, "ep"), 1) | {axis: space.devices}
    others = {k: v for k, v in space.pins.items() if k not in alone and KEYS[k].table not in ("groups", "messages")}
    pace, refused = request.pace, request.make_refusal()
    if found := request.find_plans(replace(space, pins=others | alone)).best:
        return found[0]
    own = -(-space.batch // (space.devices if axis in ("dp", "fsdp") else 1))
    least: dict[str, Any] = {"precision": space.get_values("precision")[0], "activation_checkpointing": "full", "microbatches": own}
    least |= others | alone
    plan = Plan(**least)
    why = refused(plan)
    if axis == "pp" and space.devices > space.most_stages:
        why = why or f"the model has {space.most_stages} units"
    priced = None if why else price_plan(pace, plan, replace(space, memory=inf), count_branch_samples(plan, space))
    return Candidate(plan, priced and request.learned.correct_estimate(priced), 1.0, why)


def explain_choice(candidate: Candidate, best: Candidate | None, space: SearchSpace | None = None) -> str:
    """Explain why a plan is not the chosen one: missing memory, or the part of the step with the largest slowdown."""
    found = candidate.estimate
    if found is None:
        return candidate.why
    if space is not None and space.count_spare(found) < 0:
        over = format_size(-space.count_spare(found))
        largest = max(found.memory, key=lambda name: found.memory[name])
        held = {"optimizer": "optimizer state is not sharded enough", "activations": "activations do not fit"}
        return f"{over} over: {held.get(largest, f'{largest} do not fit')}"
    if space is not None and found.host_bytes > space.host_memory:
        return f"{format_size(found.host_bytes - space.host_memory)} of host memory per rank missing"
    if best is None or best.estimate is None or candidate is best:
        return "chosen"
    devices = candidate.plan.devices
    more = {name: s - best.estimate.parts.get(name, 0.0) for name, s in found.parts.items()}
    worst = max(more, key=lambda name: more[name])
    slower = found.seconds / best.seconds - 1
    if slower < TIE_FRACTION:
        speed = "same speed" if slower > -TIE_FRACTION else f"{-100 * slower:.0f} % faster"
        worse = [name for name in candidate.warnings if name not in best.warnings]
        more = f"{devices} devices" if devices > best.plan.devices else "more complex"
        return f"{speed}, but {' and '.join(worse) or more}"
    word = SLOWDOWN_TEXTS.get(worst, worst)
    return f"{100 * slower:.0f} % slower: {word}" if word else f"{100 * slower:.0f} % slower"


def format_answer(answer: Answer) -> str:
    """Format the output of `plait plan`."""
    asked, question = answer.request, answer.space
    source = "measured here" if asked.machine.is_measured else "data sheet; `plait bench` measures it"
    if asked.is_guessed:
        source = "speed unknown; `plait bench` measures it"
    counts = answer.result.counts
    kept = "" if asked.sketch_age is None else f" · sketch of {format_duration(asked.sketch_age)} ago (--fresh makes a new one)"
    lines = [
        f"job       {asked.name}   {format_count(asked.pace.work.weights)} parameters · batch {question.batch}{kept}",
        f"machine   {asked.machine} ({source})",
        f"searched  {counts.get('priced', 0)} plans priced · {counts.get('do not fit', 0)} do not fit · "
        f"{counts.get('slower', 0)} pruned · {counts.get('impossible', 0)} invalid · {format_duration(answer.search_seconds)}",
    ]
    if answer.best is not None:
        lines += [f"choice    {_format_headline(answer)}", ""]
    if not answer.rows:
        return "\n".join([*lines, *_format_notes(answer)])
    head = ("plan", "fits", "memory", "step", "samples/s", "exposed communication", "bubble", "MFU", "warnings", "why not first")
    cells = [head, *(_format_cells(row, answer) for row in answer.rows)]
    for k, row in enumerate(align_rows(cells, right=range(1, len(head) - 2))):
        lines.append(("▸ " if k == 1 and answer.best else "  ") + row)
    if any("tight" in row.warnings for row in answer.rows):
        lines.append(f"tight: less than {100 * MEMORY_MARGIN:.0f} % of a device's memory is free, less than the error of memory predictions")
    if asked.has_attention:
        lines.append("MFU counts the full square of attention, even if causal (PaLM, arXiv 2204.02311): twice the causal count at long sequences")
    return "\n".join([*lines, *_format_notes(answer)])


def _format_headline(answer: Answer) -> str:
    """Format the chosen plan in one line, with its changes to the job's number format and device count."""
    assert answer.best is not None
    plan, pinned = answer.best.plan, answer.space.pins
    words = [str(plan), *([describe_inexact(plan)] if describe_inexact(plan) else [])]
    if answer.max_slowdown and plan.devices < answer.space.devices:
        part = f"within {100 * answer.max_slowdown:.0f} % of the fastest"
        words.append(f"the fewest devices {part}: {plan.devices} of {answer.space.devices}")
    if answer.without_offload is not None:
        other = next(iter(answer.without_offload.best), None)
        slower = other and f"{', '.join([f'{100 * (other.seconds / answer.best.seconds - 1):.0f} % slower', *other.warnings])}"
        words.append(f"without offload {slower or 'nothing fits'}")
    if "tight" in answer.best.warnings:
        words.append("tight: nothing else fits")
    if plan.precision != "fp32" and "precision" not in pinned:
        words.append(f"in {plan.precision}, which rounds differently from fp32; --set precision=fp32 keeps fp32")
    return " · ".join(words)


def _format_cells(row: Candidate, answer: Answer) -> tuple[str, ...]:
    got = row.estimate
    plan, memory = str(row.plan), format_size(got.reserved) if got else "–"
    if got is None or not row.fits:
        return plan, "✗", memory, *["–"] * 5, "", row.why
    sent = got.get_fraction("tensor") + got.get_fraction("gradients") + got.get_fraction("sync")
    bubble = f"{100 * got.get_fraction('bubble'):.1f} %" if row.plan.pp > 1 else "–"
    peak = replace(answer.request.pace, machine=answer.request.machine.resize(row.plan.devices)).get_peak(row.plan.precision)
    return (plan, "✓", memory, format_duration(got.seconds), format_count(answer.space.batch / got.seconds), f"{100 * sent:.0f} %", bubble,
            f"{100 * got.flops / got.seconds / peak:.0f} %", ", ".join(row.warnings), row.why)  # fmt: skip


def _format_notes(answer: Answer) -> list[str]:
    best, question = answer.best, answer.space
    if best is None or best.estimate is None:
        if not answer.result.counts.get("do not fit"):
            kept = " ".join(f"{key}={value}" for key, value in question.pins.items()) or "the model"
            return [f"no plan for {question.devices} devices and a batch of {question.batch} is valid with {kept}"]
        least = min((row for row in answer.rows if row.estimate), key=lambda row: row.reserved, default=None)
        told = f"the least is {format_size(least.reserved)} with {least.plan}" if least else "no plan is valid"
        if question.memory <= 0:
            return [f"no plan fits: a device's own context ({format_size(CONTEXT_BYTES)}) takes all of its memory; {told}"]
        return [f"no plan fits in {format_size(question.memory)} of usable device memory; {told}"]
    got, plan = best.estimate, best.plan
    shares = plan.shares * plan.replica_groups
    large = [name for name in got.parts if got.get_fraction(name) > 0.005]
    parts = " · ".join(f"{name} {100 * got.get_fraction(name):.0f} %" for name in large)
    memory = " · ".join(f"{name} {format_size(held)}" for name, held in got.memory.items() if held)
    lines = [
        f"step of #1: {parts}",
        f"memory of #1 on the fullest rank: {memory} · allocator {format_size(got.reserved - sum(got.memory.values()))} · "
        f"spare {format_size(question.count_spare(got))}" + (f"; host {format_size(got.host_bytes)}" if got.host_bytes else ""),
        *_format_sync(answer, best),
        f"batch: {question.batch} samples per step = {question.batch // shares} on each of {shares} data-parallel ranks, in "
        f"{plan.microbatches} micro-batches. The learning rate stays the job's; a batch k times as large needs "
        "about √k (Adam) to k (SGD) times this rate: --batch N --scale-lr sqrt|linear",
        f"confidence: 90 % of steps take {answer.confidence.low:.2f} to {answer.confidence.high:.2f} of the predicted time"
        + ("" if answer.request.machine.is_measured else "; `plait bench` on the machine and --try 3 improve it")
        + answer.request.learned.describe(),
        _format_next(answer.request.name, plan),
    ]
    if reason := answer.request.sketch.unmeasured:
        what = "operations and saved activations of the forward pass are unknown, and missing in memory and times"
        lines.insert(0, f"{what}: measuring its units raised {reason}")
    if answer.note:
        lines.insert(0, answer.note)
    if faster := describe_share_gain(answer.request.pace, plan, question, best.samples):
        lines.insert(0, faster)
    if answer.baseline is not None:
        lines.insert(0, describe_baseline(answer.baseline, best, question.batch))
    return lines


def _format_sync(answer: Answer, candidate: Candidate) -> list[str]:
    """Format the bytes sent under infrequent or compressed synchronization, and the link speed below which the plan is faster than its exact twin."""
    plan, got = candidate.plan, candidate.estimate
    if sync_costs.is_exact(plan) or got is None:
        return []
    pace, machine = answer.request.pace, answer.request.machine
    sent = " · ".join(f"{axis} {format_size(each)}" for axis, each in got.sent_bytes.items())
    twin = count_branch_samples(sync_costs.make_exact_twin(plan), answer.space)
    crossed = find_break_even(pace, plan, candidate.samples, twin).describe("nodes" if machine.nodes > 1 else "devices")
    return [f"mean bytes sent per rank and step: {sent}", f"{crossed}, for the same samples"]


def _format_next(name: str, plan: Plan) -> str:
    """Format the next command: a shell command for a job file, or a Python call for a job object."""
    if name.startswith(PREFIX):
        return f'next: plait plan {name} --plan "{plan}" --dry-run     a job file with your data trains it'
    if not name.partition(":")[0].endswith(".py"):
        return f'next: plait.train({name}, plan="{plan}")     plait.verify({name}, plan="{plan}")'
    return f'next: plait train {name} --plan "{plan}"     plait plan {name} --plan "{plan.uncompiled}" --dry-run'
