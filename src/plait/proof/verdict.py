"""The judgment of `verify`: compared probes, the first wrong tensor, and the likely cause.

The likely cause follows from the place where the difference begins (`proof/locate.py`), and from patterns of known bugs in the probes.
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.config.errors import DIFFERENT, Problem
from plait.config.plan import Plan
from plait.proof.locate import Finding, locate_difference
from plait.proof.probes import (
    TOLERANCE,
    Probe,
    Trace,
    compare_collectives,
    compare_logged,
    compare_replicas,
    compare_rows,
    compare_samples,
    compare_tensors,
    compute_floor,
    explain_replicas,
    find_constant_ratio,
    measure_movement,
    measure_scale,
    relative_max_diff,
)  # fmt: skip
from plait.proof.trace_pair import TracePair

WEIGHTS_TEXT = "micro-batches or ranks have a wrong weight, or some are lost: no constant ratio"
CODES = {
    "data": "V006", "forward": "V015", "between": "V015", "gather": "V015", "message": "V016", "backward message": "V016",
    "recompute": "V017", "loss": "V014", "accumulation": "V014", "backward": "V018", "weights": "V018", "reduction": "V019",
    "clip": "V007", "optimizer": "V009",
}  # fmt: skip
SUM_CODES = ("V002", "V003", "V009", "V014", "V019")
"""Codes about wrong sums of gradients and wrong updates."""
USUAL_CAUSES = {
    "forward": "a message that is lost, late or out of order; or a mask, mean or statistics of a rank's part",
    "between": "a value computed from a rank's part instead of the full tensor",
    "gather": "shards of weights that are late, lost or out of order",
    "message": "a message that is late, from another micro-batch, or overwritten during the transfer",
    "backward message": "a message that is late, from another micro-batch, or overwritten during the transfer",
    "recompute": "other random numbers, or state that changed in between",
    "loss": "a mean instead of a sum, a wrong weight of ranks or micro-batches, or a loss over a rank's part",
    "accumulation": "overwritten gradients, or a wrongly scaled micro-batch",
    "backward": "a sum over ranks that is missing or computed twice",
    "weights": "a weight's gradient computed from a rank's part instead of the full tensor",
    "reduction": "a parameter missing from the sum, a sum instead of a mean, or two sums",
}
"""The usual causes of each kind of difference."""
COUPLING_KINDS = ("loss", "between", "forward", "backward", "weights")
COUPLING_TEXT = "the loss is not a weighted mean over samples: it couples samples, or Job.weight is not its divisor"


def find_likely_cause(
    probes: tuple[Probe, ...], expected: Trace, actual: Trace, plan: Plan, where: Finding | None = None
) -> tuple[str, str]:
    """(code, sentence) of the likely cause of the first difference. `where`: where it begins, if that was found."""
    p = {probe.code: probe for probe in probes}
    if all(probe.equal for probe in probes):
        return "", ""
    if actual.facts["inexact"]:
        return "V010", actual.facts["inexact"][0]
    if not p["I"].equal:
        return "V001", "the initial weights differ: they depend on more than the seeded generators"
    if not p["D"].equal:
        return "V006", f"the samples differ: {p['D'].detail}"
    if not p["S"].equal and (where is None or where.kind == "optimizer"):
        return "V008", f"the clock differs: {p['S'].name}, {p['S'].detail}"
    if not p["G"].equal and expected.facts["mean"] is False and (where is None or where.kind in COUPLING_KINDS):
        return "V013", COUPLING_TEXT
    if missing := set(expected.gradients) ^ set(actual.gradients):
        return "V003", f"{min(missing)} has a gradient on one side only"
    if where is not None:
        return _explain_location(where, p, expected, actual, plan)
    if not p["G"].equal:
        return _explain_gradients(p, expected, actual, plan)
    if not p["R"].equal:
        return explain_replicas(p["R"], expected.buffers)
    if not p["U2"].equal and p["U2"].name.startswith("norm"):
        why = "clipping uses another norm than the global one"
        return "V007", f"the gradients agree, but their norm does not ({p['U2'].detail}): {why}"
    if not p["U"].equal or not p["U2"].equal:
        why = "the optimizer, the clipping or later steps differ"
        return "V009", f"the gradients of step 1 agree, but the weights do not: {why}"
    if "L" in p and not p["L"].equal:
        return "V028", f"{p['L'].name} of plait.log: {p['L'].detail}"
    if not p["B"].equal:
        return "V011", f"buffer {p['B'].name} differs: it is computed from a rank's local batch"
    if "A" in p and not p["A"].equal:
        return (
            "V009",
            f"the weights agree, but their average does not ({p['A'].name}): its updates or their steps differ",
        )
    return "V012", f"the collectives differ: {p['C'].detail}"


def _explain_location(where: Finding, p: dict[str, Probe], expected: Trace, actual: Trace, plan: Plan) -> tuple[str, str]:
    """The cause by the place where the difference begins. Known patterns have their own codes."""
    code, text = CODES[where.kind], describe_finding(where, plan) + _describe_carried_state(where, expected, actual)
    if where.kind in ("loss", "weights", "reduction") and where.step == 0 and not p["G"].equal:
        known, pattern = _explain_gradients(p, expected, actual, plan)
        if known in ("V002", "V003", "V004"):
            return known, f"{pattern}: {text}"
    drawn = find_drawing_module(where, actual.facts["random"])
    if where.kind in ("forward", "between", "backward", "weights") and drawn:
        why = f"random numbers are drawn in {drawn}, and those of the ranks are not slices of those on one device"
        return "V005", f"{why}: {text}"
    return code, text


def blame_call_count(verdict: "Verdict", why: str) -> "Verdict":
    """V029: the outputs of the model depend on its number of calls, and this plan calls it more often."""
    probe, cause = Probe("K", "calls of the model", 1, 0, detail=why), f"the outputs depend on the number of model calls: {why}"
    located = verdict.where is None or verdict.where.kind in ("forward", "between", "recompute")
    if not verdict.equal and not located:
        return replace(verdict, probes=(*verdict.probes, probe))
    return replace(verdict, probes=(*verdict.probes, probe), code="V029", cause=cause)


def _describe_carried_state(where: Finding, expected: Trace, actual: Trace) -> str:
    """Name the state outside torch that may change a forward pass, if a forward pass is the first difference."""
    if where.kind not in ("forward", "between", "recompute"):
        return ""
    changes = expected.facts.get("changes") or []
    found = [f"each call of the model changes {', '.join(changes[:3])}"] if changes else []
    found += ["the model draws from Python's or numpy's generator, which is not seeded per sample"] * bool(actual.facts.get("host_random"))
    return "".join(f"; {line}" for line in found)


def find_drawing_module(where: Finding, places: list[str]) -> str:
    """Module that draws random numbers where a difference begins: in the unit, or between units. "" if none does."""
    modules = [place.partition("#")[0] for place in places]
    units = tuple(f"{unit}." for unit in (where.unit, where.after) if unit)
    inside = (module for module in modules if where.kind == "between" or f"{module}.".startswith(units))
    return next((module or "the model's own code" for module in inside), "")


def describe_finding(where: Finding, plan: Plan) -> str:
    """Describe the first difference, its place and size, and the usual causes."""
    unit, name, after = where.unit, where.name, where.after
    what = {
        "data": "the inputs or targets differ although the samples agree: they are collated differently",
        "forward": f"the first difference is the output of unit {unit}; its inputs agree",
        "between": f"the first difference is the input of unit {unit}: code between units"
        + (f", after {after}," if after else "") + " computes another value",
        "gather": f"unit {unit} used a wrong {name}: the gathered tensor does not match its shards",
        "message": f"the output of unit {unit} is right on its stage, but wrong where the next stage receives it",
        "recompute": f"the recomputed forward of unit {unit} differs from its first forward",
        "loss": f"the outputs of all units agree; the first difference is the gradient of the output of {unit}, the last unit",
        "backward": f"the forward pass agrees; the first difference is the gradient from unit {unit} for the output of {after}",
        "backward message": f"the gradient of unit {unit}'s output is right on the sending stage, but wrong where it is received",
        "weights": f"gradients of unit outputs agree; the gradient of {name} differs on the ranks before any reduction",
        "reduction": f"each rank's gradient of {name} is right, but their sum differs",
        "accumulation": f"each micro-batch's gradient of {name} is right, but their sum on a rank differs",
        "clip": "gradients agree, but the norm for clipping does not",
        "optimizer": f"gradients and norm agree, but {name} differs after the update",
    }[where.kind]  # fmt: skip
    if where.how:
        what += f" ({where.how})"
    usual = USUAL_CAUSES.get(where.kind, "")
    return f"{what}; {describe_place(where, plan)}" + (f"; usually {usual}" if usual else "")


def describe_place(where: Finding, plan: Plan) -> str:
    """Steps, ranks, micro-batches, axes and size of a difference."""
    told = [f"from step {where.step + 1}"]
    if where.ranks and len(where.ranks) < plan.world:
        told.append(f"on rank {', '.join(map(str, where.ranks))}")
    elif plan.world > 1:
        told.append("on all ranks")
    if where.micros and (len(where.micros) < plan.microbatches):
        told.append(f"in micro-batch {', '.join(map(str, where.micros))}")
    if where.axes:
        told.append(f"messages of {' or '.join(where.axes)}")
    if where.size:
        told.append(f"relative {where.size:.1e}")
    return ", ".join(told)


def _explain_algorithm(probes: tuple[Probe, ...], algorithm: "AlgorithmReference", cause: str) -> tuple[str, str]:
    """V026, and when the split run leaves its algorithm: in the first sum, or through state that is kept from step to step."""
    p = {probe.code: probe for probe in probes}
    if not p["G"].equal:
        return "V026", f"the first sum is not that of {algorithm.name}: {cause}"
    first = f", first in {p['U2'].name}" if not p["U2"].equal else ""
    kept = "state between steps (a residual, a factor), the clipping or the optimizer"
    return "V026", f"the first sum is that of {algorithm.name}, but later steps are not{first}: check {kept}"


def _explain_gradients(p: dict[str, Probe], expected: Trace, actual: Trace, plan: Plan) -> tuple[str, str]:
    both = {n: (t, actual.gradients[n]) for n, t in expected.gradients.items() if n in actual.gradients}
    floor = compute_floor(expected.gradients)
    wrong = [n for n, (a, b) in both.items() if not relative_max_diff(a, b, measure_scale(a, floor)) <= TOLERANCE]
    if not p["R"].equal and "gradient" in p["R"].detail:
        return "V004", f"{p['R'].name}: its gradient is not summed over the ranks"
    ratios = {None if (r := find_constant_ratio(*both[n])) is None else round(r, 6) for n in wrong}
    factor = ratios.pop() if len(ratios) == 1 else None
    if factor is not None and len(wrong) == len(expected.gradients):
        why = f"a sum instead of a mean, or the reverse ({plan})"
        return "V002", f"every gradient is {factor:.4g} times too large: {why}"
    if factor is not None:
        wrongs = f"only {len(wrong)} of {len(expected.gradients)} gradients are wrong"
        return "V003", f"{wrongs}, by the factor {factor:.4g}: counted twice or not at all"
    if actual.facts["places"]:
        return "V005", "the model draws random numbers: the ranks' masks are not slices of the mask on one device"
    return "V014", WEIGHTS_TEXT


@dataclass(frozen=True)
class AlgorithmReference:
    """The algorithm to which a plan is compared instead of one device, and its distance from one device's training."""

    name: str
    distance: float
    """Distance of the weights after the steps, relative to the change on one device: norms over all weights."""
    steps: int
    left_out: tuple[str, ...] = ("batches of the job's own size", "a step in the plan's own formats")
    """Parts of the proof that need one device, and are left out here."""

    @property
    def description(self) -> str:
        after = f"after {self.steps} steps"
        if self.distance <= TOLERANCE:
            return f"equal to dp here (distance {self.distance:.0e} {after})"
        return f"{100 * self.distance:.2g} % from dp {after}"


def measure_algorithm(name: str, one: Trace, algorithm: Trace) -> AlgorithmReference:
    """Measure how far an algorithm's training is from one device's."""
    return AlgorithmReference(name, measure_distance(one.initial, one.weights, algorithm.weights), len(one.facts["rows"]))


def measure_distance(initial: dict[str, Tensor], one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Distance of weights from one device's, relative to the change of the latter: norms over all weights."""
    norm = lambda a, b: sum(float((a[n].double() - b[n].double()).square().sum()) for n in initial) ** 0.5  # noqa: E731
    return norm(other, one) / max(norm(one, initial), 1e-300)


@dataclass(frozen=True)
class Verdict:
    """Result of a proof: equal to one device or not; if not, the first difference and its likely cause."""

    plan: str
    probes: tuple[Probe, ...]
    code: str = ""
    cause: str = ""
    inexact: tuple[str, ...] = ()
    world: int = 1
    forced: dict[str, Any] = field(default_factory=dict)
    where: Finding | None = None
    """Where the difference begins, if that was found."""
    notes: tuple[str, ...] = ()
    """Properties of the split run that cost time or memory and are not visible in the plan."""
    algorithm: AlgorithmReference | None = None
    """The algorithm to which the plan is compared instead of one device."""
    split: bool = True
    """True if anything is split: a plan with one process and one micro-batch proves nothing about splitting."""
    job: str = ""
    """Name of the job, if known."""
    problems: tuple[Problem, ...] = ()
    """Findings of the job check (`proof/job/causes.py`), if the job itself causes the difference."""

    def __repr__(self) -> str:
        return format_verdict(self, self.job)

    @property
    def equal(self) -> bool:
        return all(p.equal for p in self.probes)

    @property
    def exit_code(self) -> int:
        return 0 if self.equal else DIFFERENT

    @property
    def first_wrong(self) -> Probe | None:
        return next((p for p in self.probes if not p.equal), None)

    @property
    def parameter(self) -> str:
        """The first wrong parameter or buffer: by its gradient, else by the place of the first difference, else between replicas, else by its
        value."""
        wrong = {p.code: p.name for p in self.probes if not p.equal}
        if self.where is not None and self.where.name and "I" not in wrong and "G" not in wrong:
            return self.where.name
        return next((wrong[code] for code in "IGRUBA" if code in wrong), "")

    def to_dict(self) -> dict[str, Any]:
        measured = [p for p in self.probes if 0 < p.tolerance < 1]
        worst = max(measured, key=lambda p: p.worst if p.worst == p.worst else float("inf"))
        wrong = self.first_wrong
        return {
            "equal": self.equal if self.split or not self.equal else None, "split": self.split, "plan": self.plan,
            "worst": {"probe": worst.code, "name": worst.name, "relative": worst.worst},
            "first_wrong": {"probe": wrong.code, "name": wrong.name, "parameter": self.parameter, "detail": wrong.detail} if wrong else None,
            "cause": {"code": self.code, "text": self.cause} if self.cause else None,
            "problems": [asdict(problem) for problem in self.problems], "inexact": list(self.inexact),
            "algorithm": {**asdict(self.algorithm), "equal_to_one_device": self.algorithm.distance <= TOLERANCE} if self.algorithm else None,
            "where": self.where.to_dict() if self.where else None, "notes": list(self.notes), "forced": self.forced,
            "probes": {p.code: {"title": p.title, "worst": p.worst, "tolerance": p.tolerance, "equal": p.equal, "name": p.name,
                                "detail": p.detail} for p in self.probes},
        }  # fmt: skip


def judge_traces(
    expected: Trace, actual: Trace, ranks: list[dict[str, Any]], plan: Plan, dry: list[dict[str, Any]] | str,
    folder: Path | None = None, *, algorithm: AlgorithmReference | None = None,
) -> Verdict:  # fmt: skip
    """Compare the reference with the candidate's rank 0, and the candidate's ranks with each other.

    `dry`: messages of every rank in a dry run, or the reason for having none. `folder`: the records of both sides, for locating a
    difference. `algorithm`: the reference is this algorithm, whose units are not recorded.
    """
    names, steps = actual.facts["names"], (expected.facts["rows"], actual.facts["rows"])
    far = measure_movement(expected.initial, expected.weights)
    probes = (
        compare_tensors("I", "initial weights", expected.initial, actual.initial, names, compute_floor(expected.initial)),
        compare_tensors("G", "gradients, step 1", expected.gradients, actual.gradients, names, compute_floor(expected.gradients)),
        compare_tensors("U", f"weights, step {len(steps[0])}", expected.weights, actual.weights, names, far),
        compare_rows(
            "U2", "loss and norm, every step", *steps, tuple(k for k in steps[0][0] if k.startswith(("loss", "norm")))
        ),
        compare_tensors("B", "buffers", expected.buffers, actual.buffers, list(expected.buffers), compute_floor(expected.buffers)),
        *compare_averages(expected, actual),
        compare_replicas("R", "replicas, bit for bit", [r["held"] for r in ranks]),
        compare_samples(expected, ranks),
        compare_rows("S", "learning rate and clock", *steps, tuple(k for k in steps[0][0] if k.startswith(("lr", "samples")))),
        compare_collectives(ranks, dry),
    )
    if algorithm is None and any(row.get("logged") for row in (*steps[0], *steps[1])):
        probes = (*probes, compare_logged(*steps))
    where = None
    if algorithm is None and folder is not None and not all(probe.equal for probe in probes if probe.code not in "ACL"):
        where = locate_difference(TracePair.load(folder, ranks, expected.facts, plan))
        if where is not None and where.kind in ("clip", "optimizer") and where.step == 0 and not probes[1].equal:
            where = None  # gradients differ earlier, without records
    code, cause = find_likely_cause(probes, expected, actual, plan, where)
    first = next(p.name for p in probes if p.code == "U2").endswith("step 1")
    if algorithm is not None and (code in SUM_CODES or (code == "V007" and not first)):
        code, cause = _explain_algorithm(probes, algorithm, cause)
    first = actual.facts["rows"][0]
    forced = {
        "clip": expected.facts["clip"], "clipped": all(r["norm"] > expected.facts["clip"] for r in expected.facts["rows"]),
        "batch": first["samples"], "sizes": [len(ids) for _, ids in expected.facts["ids"]], "steps": len(expected.facts["rows"]),
    }  # fmt: skip
    split = plan.world * plan.shares * plan.microbatches > 1
    return Verdict(
        str(plan), probes, code, cause, world=plan.world, forced=forced, where=where, algorithm=algorithm, split=split
    )


def compare_averages(expected: Trace, actual: Trace) -> tuple[Probe, ...]:
    """Compare the average of the weights, if the job has one."""
    if not expected.average and not actual.average:
        return ()
    floor, names = measure_movement(expected.initial, expected.weights), actual.facts["names"]
    return (compare_tensors("A", "average of weights", expected.average, actual.average, names, floor),)


def format_verdict(verdict: Verdict, job: str) -> str:
    """Output of `plait verify`."""
    return "\n".join([*format_header(verdict, job), *map(format_probe, verdict.probes), *format_conclusion(verdict, job)])


def format_header(verdict: Verdict, job: str) -> list[str]:
    """Lines that describe the comparison."""
    forced, algorithm = verdict.forced, verdict.algorithm
    processes = f"{verdict.world} process" + ("es" if verdict.world > 1 else "")
    return [
        f"job         {job}",
        f"reference   1 process, {f'the algorithm ({algorithm.name}) in ' if algorithm else ''}plain PyTorch, float64",
        f"candidate   {processes}, {verdict.plan}, float64 · clipping {'active in every step' if forced['clipped'] else 'NOT active in every step'}"
        f" · batches of {', '.join(map(str, forced['sizes']))} · warm-up running",
        *(f"            {line}" for line in forced.get("then", [])),
        *([f"            not compared: {', '.join(algorithm.left_out)}"] if algorithm else []),
        f"{'':32}{'worst relative':>16}   tolerance",
    ]


def format_probe(p: Probe) -> str:
    """The line of a comparison."""
    shown = f"{p.worst:.1e}" if p.tolerance else f"{p.worst:.0f} wrong"
    where = f"   {p.name}" if p.name else ""
    detail = f": {p.detail}" if p.detail and not p.equal else ""
    told = f"  {p.title:<30}{shown:>16}   {f'{p.tolerance:.0e}' if p.tolerance else '0':<9}"
    return f"{told}  {'✓' if p.equal else '✗'}{where}{detail}"


def format_conclusion(verdict: Verdict, job: str) -> list[str]:
    """Lines with the conclusion."""
    lines = [f"note  {line}" for line in verdict.notes]
    lines += [f"not exact by nature: {line}" for line in verdict.inexact]
    if verdict.equal and not verdict.split:
        told = f"under {verdict.plan} one process computes the same as plain PyTorch; nothing is split"
        return [*lines, f'NOT SPLIT  {told}, so no split is proved. Next: plait verify {job} --plan "dp=2"']
    if verdict.equal and verdict.algorithm:
        return [*lines, f"EQUAL to the algorithm (one process) · {verdict.algorithm.description}"]
    if verdict.equal:
        return [*lines, "EQUAL  the split run computes the same as the single-device job"]
    wrong = verdict.first_wrong
    assert wrong is not None
    told = f"likely: {verdict.cause}.   `plait help {verdict.code}`"
    lines.append(f"DIFFERENT  first wrong: {verdict.parameter or wrong.name}   {told}")
    return [*lines, *(f"plait check {job}: {problem}" for problem in verdict.problems)]
